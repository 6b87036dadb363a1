//! One hop of the ring: adds this rank's share to the partial sum that arrives. A 16-bit sum
//! loses digits, which must come back to this rank's residual, so they are recorded.

use super::residual::add_scaled;
use crate::codec::wire::Wire;
use crate::simd::blocks::{Block, blocks, blocks_mut, bytes_of_mut};
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::dispatch;
use crate::simd::number::{Float, Number, Stored};

/// own = incoming + own, rounded to the wire format; `error` is set to what the rounding lost. Both
/// are scaled values. Exactly: incoming + own (before) = own (after) + error. A sum that overflows
/// is infinity, with an error of zero.
///
/// `Wire::F32` records no error and doesn't touch `error`.
pub fn add_partial_sum(own: &mut [u8], incoming: &[u8], wire: Wire, error: &mut [f32]) {
    add_partial_sum_with(InstructionSet::best(), own, incoming, wire, error);
}

pub(in crate::codec::chunks) fn add_partial_sum_with(
    set: InstructionSet,
    own: &mut [u8],
    incoming: &[u8],
    wire: Wire,
    error: &mut [f32],
) {
    assert_eq!(own.len(), incoming.len(), "gflow: as many bytes must come as there are");
    let elements = own.len() / wire.element_bytes();
    assert_eq!(elements * wire.element_bytes(), own.len(), "gflow: bytes must be whole elements");
    if wire == Wire::F32 {
        return add_scaled(set, own, incoming, 1.0);
    }
    assert_eq!(elements, error.len(), "gflow: there must be room for what is rounded off");
    let error = bytes_of_mut(error);
    match wire {
        Wire::F16 => dispatch!(set, add_kernel[F16](own, incoming, error)),
        _ => dispatch!(set, add_kernel[BF16](own, incoming, error)),
    }
}

for_each_instruction_set! {
    mod add_kernel = add_by_blocks;
    <W: Stored<Number: Float>>(own: &mut [u8], incoming: &[u8], error: &mut [u8])
}

/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn add_by_blocks<W: Stored<Number: Float>>(
    own: &mut [u8],
    incoming: &[u8],
    error: &mut [u8],
) {
    let (owns, own_tail) = blocks_mut::<W>(own);
    let (incomings, incoming_tail) = blocks::<W>(incoming);
    let (errors, error_tail) = blocks_mut::<W::Number>(error);
    for ((own, incoming), error) in owns.iter_mut().zip(incomings).zip(errors) {
        error.0 = add_block(own, incoming);
    }
    if !own_tail.is_empty() {
        let mut own = Block::<W>::load_tail(own_tail);
        Block(add_block(&mut own, &Block::load_tail(incoming_tail))).store_tail(error_tail);
        own.store_tail(own_tail);
    }
}

/// Adds the incoming block and returns the rounding error.
#[inline(always)]
fn add_block<W: Stored<Number: Float>>(own: &mut Block<W>, incoming: &Block<W>) -> W::Number {
    let (a, b) = (incoming.0.widen(), own.0.widen());
    let sum = a.add(b);
    let rounded = W::narrow(sum);
    // If the two differ a lot in size, the f32 sum has been rounded already; Knuth's two-sum gives
    // that error.
    let from_b = sum.subtract(a);
    let from_a = sum.subtract(from_b);
    let sum_error = a.subtract(from_a).add(b.subtract(from_b));
    let error = sum.subtract(rounded.widen()).add(sum_error);
    own.0 = rounded;
    error.select_if_finite(error, W::Number::splat(0.0))
}
