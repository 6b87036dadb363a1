//! The memory of the kernels under test: with margins, and at any alignment.

use super::host_kernels::HostArgument;
use crate::codec::samples::OwnedGradient;
use crate::simd::element::Element;
use half::{bf16, f16};
use std::fmt::Debug;

const MARGIN: usize = 16;

/// Elements with a margin on both sides, which must not change. They start `offset` elements past
/// a 16-byte boundary.
#[derive(Debug)]
pub(super) struct Guarded<T> {
    memory: Vec<T>,
    offset: usize,
    start: usize,
    count: usize,
    margin: T,
}

/// At another address, with the same offset.
impl<T: Copy + PartialEq + Debug> Clone for Guarded<T> {
    fn clone(&self) -> Guarded<T> {
        Guarded::new(self.content(), self.margin, self.offset)
    }
}

impl<T: Copy + PartialEq + Debug> Guarded<T> {
    pub(super) fn new(content: &[T], margin: T, offset: usize) -> Guarded<T> {
        let mut memory = vec![margin; content.len() + 2 * MARGIN + offset + 16];
        let start = memory.as_ptr().align_offset(16) + MARGIN + offset;
        memory[start..start + content.len()].copy_from_slice(content);
        Guarded { memory, offset, start, count: content.len(), margin }
    }

    pub(super) fn pointer(&mut self) -> HostArgument {
        HostArgument::of(&mut self.memory[self.start..])
    }

    /// The elements. Panics if a margin has changed.
    pub(super) fn content(&self) -> &[T] {
        let (before, rest) = self.memory.split_at(self.start);
        let (content, after) = rest.split_at(self.count);
        let is_margin = |element: &T| *element == self.margin;
        assert!(before.iter().chain(after).all(is_margin), "written out of bounds");
        content
    }
}

/// A gradient of any type, as a kernel gets it.
#[derive(Debug, Clone)]
pub(super) enum Typed {
    F32(Guarded<f32>),
    Sixteen(Element, Guarded<u16>),
}

impl Typed {
    pub(super) fn new(element: Element, numbers: &[f32], offset: usize) -> Typed {
        match element {
            Element::F32 => Typed::F32(Guarded::new(numbers, 77.0, offset)),
            _ => {
                let narrow = |number: &f32| match element {
                    Element::F16 => f16::from_f32_const(*number).to_bits(),
                    _ => bf16::from_f32_const(*number).to_bits(),
                };
                let narrow: Vec<u16> = numbers.iter().map(narrow).collect();
                Typed::Sixteen(element, Guarded::new(&narrow, 0xa5a5, offset))
            }
        }
    }

    pub(super) fn pointer(&mut self) -> HostArgument {
        match self {
            Typed::F32(memory) => memory.pointer(),
            Typed::Sixteen(_, memory) => memory.pointer(),
        }
    }

    /// A copy for the CPU to work on.
    pub(super) fn owned(&self) -> OwnedGradient {
        match self {
            Typed::F32(memory) => OwnedGradient::F32(memory.content().to_vec()),
            Typed::Sixteen(Element::F16, memory) => OwnedGradient::F16(memory.content().to_vec()),
            Typed::Sixteen(_, memory) => OwnedGradient::BF16(memory.content().to_vec()),
        }
    }
}
