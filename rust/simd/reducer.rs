//! The reducer: folds buffers of one element type by one reduction, on the best instruction set.
//!
//! It folds from left to right in the order given; which rank holds what is the caller's business.
//! The result must be the same on every CPU, and 16-bit floats must be rounded only once.

use super::dispatch::kernel_for;
use super::element::{Element, Reduction};
use super::fold::FoldKernel;
use super::instruction_set::InstructionSet;

/// Folds buffers of one element type by one reduction.
#[derive(Clone, Copy)]
pub struct Reducer {
    element: Element,
    ranks: usize,
    fold: FoldKernel,
    fold_and_finish: FoldKernel,
}

impl Reducer {
    /// A reducer with the best instruction set of this CPU. An average divides by `ranks`, which
    /// is at least 1; integers round toward zero.
    pub fn new(element: Element, reduction: Reduction, ranks: usize) -> Reducer {
        Reducer::with(InstructionSet::best(), element, reduction, ranks)
            .expect("the best set is available")
    }

    /// A reducer with this instruction set, or None if this CPU doesn't have it.
    pub fn with(
        set: InstructionSet,
        element: Element,
        reduction: Reduction,
        ranks: usize,
    ) -> Option<Reducer> {
        if !set.is_available() {
            return None;
        }
        let fold_and_finish = kernel_for(set, element, reduction);
        let unfinished = if reduction == Reduction::Avg { Reduction::Sum } else { reduction };
        let fold = kernel_for(set, element, unfinished);
        Some(Reducer { element, ranks, fold, fold_and_finish })
    }

    pub fn element_bytes(&self) -> usize {
        self.element.bytes()
    }

    /// Folds the sources from left to right, element by element, and writes the result to every
    /// destination. An average stays a sum without `finish`; with it, it is divided by the number
    /// of ranks. A single source is copied.
    ///
    /// # Safety
    /// Every source can be read and every destination written for `bytes` bytes, a multiple of
    /// [`Reducer::element_bytes`]; nothing else writes to the former or touches the latter. All are
    /// aligned for the element. A destination either starts at the same byte as a source or
    /// overlaps none; no two destinations overlap. A source that is a destination may be given
    /// twice, but overlaps no source partially.
    pub unsafe fn fold(
        &self,
        sources: &[*const u8],
        destinations: &[*mut u8],
        bytes: usize,
        finish: bool,
    ) {
        debug_assert!(bytes.is_multiple_of(self.element_bytes()), "{bytes} bytes");
        let fold = if finish { self.fold_and_finish } else { self.fold };
        // SAFETY: the caller's promise; `with` checked that the instruction set is available.
        unsafe { fold(sources, destinations, bytes, self.ranks) }
    }
}

#[cfg(test)]
#[path = "reducer_tests.rs"]
mod tests;
