//! The quantiser: sends every element of a gradient, each with a few levels. Nothing waits.
//!
//! A gradient is cut into blocks of [`BLOCK`] elements. A block travels as one *level* (bf16) and a
//! *symbol* per element, a small whole number. A symbol stands for `symbol * level * size`, where
//! *size* is how large this element of the gradient usually is. All ranks know the sizes, because
//! they are computed from what was delivered ([`follow`]); so small elements are not rounded to
//! zero beside large ones.
//!
//! Sums cannot be formed on the wire, so an exchange has two legs. Each block has one host that
//! *owns* it:
//!
//! 1. [`Quantizer::send`]: a host adds what it still owes of a block (a part of the *residual*,
//!    see below) to its gradient, encodes the sum for the owner, and keeps the error as the new
//!    residual.
//! 2. The owner starts from its own gradient, which is not rounded ([`Quantizer::start_sum`]), and
//!    adds what the others sent, in the order of hosts ([`Quantizer::add`]).
//! 3. [`Quantizer::send_sum`]: it encodes the sum for all hosts. The error of this is its residual.
//! 4. [`Quantizer::deliver`]: every host, the owner too, decodes the same bytes into its gradient.
//!
//! **Feedback.** Of a residual, the fraction [`Quantizer::feedback`] is added to the next gradient.
//! With 1 nothing is ever lost. With less, old errors fade: an error that arrives late hurts, too.
//!
//! **The level** is chosen so that the projection of what is sent on what was due is what was due
//! ([`Rounding::Unbiased`]). The nearest level would be smaller, and the sum would shrink.
//!
//! **Infinity and NaN** make the level of their block NaN or infinity, which the owner passes on, so
//! all elements of the block become that on all hosts. They never enter a residual or a size.
//!
//! Like the rest of the codec this is pure, and the same to the bit on every CPU.
//!
//! | file | |
//! |---|---|
//! | `levels.rs` | how many levels there are, and how symbols are packed into bytes |
//! | `block.rs` | encoding and decoding of one block, compiled per instruction set |
//! | `ownership.rs` | which host owns which block |
//! | `sizes.rs` | the sizes of elements, and how they follow what was delivered |

mod block;
mod levels;
mod ownership;
mod sizes;

pub use block::Workspace;
pub use levels::Levels;
pub use ownership::{Ownership, RUN};
pub use sizes::{TURNS, first_turn, follow, rescale as rescale_sizes};

use super::gradient::Gradient;
use crate::simd::element::Element;
use crate::simd::half_precision::BF16;
use crate::simd::number::Stored;
use block::Block;

/// Elements in a block. Divisible by the number of symbols in a byte or word of every kind.
pub const BLOCK: usize = 640;

/// Norms are taken of one block in this many: they are for the metrics only. Odd, so that every host
/// samples blocks that others own.
pub const SAMPLED: usize = 61;

/// Bytes of a block's level, which come before its symbols.
const LEVEL_BYTES: usize = 2;

/// How a block is rounded to levels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rounding {
    /// The largest element gets the largest symbol, so none is cut off.
    ToMaximum,
    /// A step is this multiple of the block's root mean square, and the level is chosen so that
    /// the sum does not shrink.
    Unbiased { step: f32 },
}

/// What the optimizer does with a gradient, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepping {
    /// Every element is divided by its usual size, as in Adam: small elements matter as much as
    /// large ones.
    Normalized = 1,
    /// The step is proportional to the gradient, as in SGD.
    Proportional = 2,
}

impl Stepping {
    /// Its name in the options.
    pub fn from_name(name: &str) -> Option<Stepping> {
        match name {
            "normalized" => Some(Stepping::Normalized),
            "proportional" => Some(Stepping::Proportional),
            _ => None,
        }
    }

    /// What its code stands for, `stepping as u16`; `None` for any other.
    pub fn from_code(code: u16) -> Option<Stepping> {
        [Stepping::Normalized, Stepping::Proportional].into_iter().find(|it| *it as u16 == code)
    }
}

/// How gradients are quantised. All ranks of a group must use the same at the same step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantizer {
    pub levels: Levels,
    rounding: Rounding,
    /// The fraction of a residual that is added to the next gradient.
    pub feedback: f32,
    /// Whether steps follow the sizes of elements.
    pub uses_sizes: bool,
}

/// Whether a block holds numbers, or all of it is infinity or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Content {
    Numbers,
    Poisoned,
}

impl Quantizer {
    /// The quantiser with these levels. The constants are what trainings on simulated ranks were
    /// best with (docs/codecs.md).
    pub fn new(levels: Levels, stepping: Stepping) -> Quantizer {
        let unbiased = |step| Rounding::Unbiased { step };
        let (rounding, feedback, uses_sizes) = match (levels, stepping) {
            (Levels::Int8, _) => (Rounding::ToMaximum, 1.0, false),
            (Levels::Int4, _) => (unbiased(0.5), 0.5, true),
            (Levels::Int3 | Levels::Quinary, _) => (unbiased(1.0), 0.5, true),
            (Levels::Ternary, Stepping::Normalized) => (unbiased(1.25), 0.75, true),
            // With sizes, three levels are too coarse for the largest elements, and those are what
            // such an optimizer steps by.
            (Levels::Ternary, Stepping::Proportional) => (unbiased(1.25), 0.5, false),
        };
        Quantizer { levels, rounding, feedback, uses_sizes }
    }

    /// Bytes of a block on the wire; a shorter block at the end of a gradient takes as many.
    pub fn block_bytes(&self) -> usize {
        LEVEL_BYTES + self.levels.packed_bytes()
    }

    /// The multiple of a block's root mean square that is a step; `None` if blocks are rounded to their
    /// maximum.
    pub fn unbiased_step(&self) -> Option<f32> {
        match self.rounding {
            Rounding::ToMaximum => None,
            Rounding::Unbiased { step } => Some(step),
        }
    }

    pub fn bits_per_element(&self) -> f64 {
        8.0 * self.block_bytes() as f64 / BLOCK as f64
    }

    /// Encodes a block for its owner: `gradient` with the residual's part, which becomes what is
    /// left. If either is not finite, the residual stays as it was.
    pub fn send(
        &self,
        gradient: &Gradient,
        residual: &mut [f32],
        sizes: &[u16],
        out: &mut [u8],
        workspace: &mut Workspace,
    ) {
        let mut block = Block::new(self, residual.len(), sizes, workspace);
        block.load_due(gradient, residual, self.feedback);
        if block.encode(out) == Content::Numbers {
            residual.copy_from_slice(block.left());
        }
    }

    /// Starts the sum of a block that this host owns: its gradient and the residual's part.
    pub fn start_sum(&self, gradient: &Gradient, residual: &[f32], sum: &mut [f32]) {
        block::add_feedback(gradient, residual, self.feedback, sum);
    }

    /// Adds what another host sent of a block.
    pub fn add(&self, bytes: &[u8], sizes: &[u16], sum: &mut [f32], workspace: &mut Workspace) {
        match Block::new(self, sum.len(), sizes, workspace).decode(bytes) {
            Ok(numbers) => block::add(sum, numbers),
            Err(poison) => sum.iter_mut().for_each(|sum| *sum += poison),
        }
    }

    /// Encodes the sum of a block for all hosts; `sum` becomes what is left of it, once it is
    /// delivered as an `element`. If the sum is not finite, there is nothing left to keep.
    pub fn send_sum(
        &self,
        sum: &mut [f32],
        element: Element,
        sizes: &[u16],
        out: &mut [u8],
        workspace: &mut Workspace,
    ) {
        let mut block = Block::new(self, sum.len(), sizes, workspace);
        block.load(sum);
        let content = block.encode(out);
        if content == Content::Poisoned || element == Element::F32 {
            sum.copy_from_slice(block.left());
            return;
        }
        // What the gradient's own type cannot express is left, too.
        if let Ok(numbers) = block.decode(out) {
            for (sum, number) in sum.iter_mut().zip(numbers) {
                *sum -= block::rounded_to(element, *number);
            }
        }
    }

    /// Decodes the sum of a block into the gradient.
    pub fn deliver(
        &self,
        bytes: &[u8],
        sizes: &[u16],
        gradient: &mut Gradient,
        workspace: &mut Workspace,
    ) {
        match Block::new(self, gradient.len(), sizes, workspace).decode(bytes) {
            Ok(numbers) => block::store(gradient, numbers),
            Err(poison) => super::fill(gradient, poison),
        }
    }

    /// Takes back what [`Quantizer::send`] moved out of the residual for a block that another host
    /// has poisoned: `sent` was not delivered. `gradient` must still be what was sent. The block
    /// then keeps what it would have added of its residual to the next gradient.
    pub fn take_back(
        &self,
        sent: &[u8],
        sizes: &[u16],
        gradient: &Gradient,
        residual: &mut [f32],
        workspace: &mut Workspace,
    ) {
        let mut own = [0.0; BLOCK];
        block::read(gradient, &mut own);
        // If this host's own part was poisoned, its residual has not changed.
        if let Ok(numbers) = Block::new(self, residual.len(), sizes, workspace).decode(sent) {
            for ((residual, sent), own) in residual.iter_mut().zip(numbers).zip(own) {
                *residual = (*residual + *sent) - own;
            }
        }
    }

    /// Whether the sum of a block was infinity or NaN, from its bytes.
    pub fn content(&self, bytes: &[u8]) -> Content {
        match read_level(bytes).is_finite() {
            true => Content::Numbers,
            false => Content::Poisoned,
        }
    }
}

/// The level at the start of a block's bytes.
fn read_level(bytes: &[u8]) -> f32 {
    BF16(u16::from_le_bytes([bytes[0], bytes[1]])).widen()
}
