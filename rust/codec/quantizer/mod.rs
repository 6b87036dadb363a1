//! The quantiser: sends every element of a gradient, each with a few levels. Nothing waits.
//!
//! A gradient is cut into blocks of [`BLOCK`] elements. A block travels as one *level* (bf16) and a
//! *symbol* per element, a small whole number. A symbol stands for `multiple * level * size`, where
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
//! ([`Rounding::Unbiased`]). The nearest level would be smaller, and the sum would shrink. Outliers, which
//! no symbol reaches, count only as far as symbols reach.
//!
//! **Infinity and NaN** make the level of their block NaN or infinity, which the owner passes on, so
//! all elements of the block become that on all hosts. They never enter a residual or a size.
//!
//! Like the rest of the codec this is pure, and the same to the bit on every CPU.
//!
//! | file | |
//! |---|---|
//! | `rules.rs` | how gradients are quantised with each kind of levels |
//! | `levels.rs` | how many levels there are, and how symbols are packed into bytes |
//! | `floats.rs` | passes over the floats of a block |
//! | `block.rs` | encoding and decoding of one block, compiled per instruction set |
//! | `sizes.rs` | the sizes of elements, and how they follow what was delivered |
//! | `ownership.rs` | which host owns which block |
//! | `reference.rs` | tests: the same in plain scalar code |
//! | `tests.rs` | tests: what holds for any gradient, and that all instruction sets agree |

mod block;
mod floats;
mod levels;
mod ownership;
#[cfg(test)]
mod reference;
mod rules;
mod sizes;
#[cfg(test)]
mod tests;

pub use block::{Content, Workspace};
pub use levels::{BLOCK, Levels};
pub use ownership::Ownership;
pub use rules::{Quantizer, Rounding, Stepping};
pub use sizes::{TURNS, Turn, follow, rescale as rescale_sizes};

use super::gradient::Gradient;
use crate::simd::element::Element;
use crate::simd::instruction_set::InstructionSet;
use block::{Block, read_level};

impl Quantizer {
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
        // What is not finite leaves the residual as it was.
        let _ = block.encode(residual, out);
    }

    /// Starts the sum of a block that this host owns: its gradient and the residual's part.
    pub fn start_sum(&self, gradient: &Gradient, residual: &[f32], sum: &mut [f32]) {
        let set = InstructionSet::best();
        floats::add_feedback(set, gradient, residual, self.feedback, sum);
    }

    /// Adds what another host sent of a block.
    pub fn add(&self, bytes: &[u8], sizes: &[u16], sum: &mut [f32], workspace: &mut Workspace) {
        match Block::new(self, sum.len(), sizes, workspace).decode(bytes) {
            Ok(numbers) => floats::add(sum, numbers),
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
        if element == Element::F32 {
            let _ = block.encode(sum, out);
            return;
        }
        let mut left = [0.0; BLOCK];
        let _ = block.encode(&mut left[..sum.len()], out);
        // What the gradient's own type cannot express is left, too.
        if let Ok(numbers) = block.decode(out) {
            for (sum, number) in sum.iter_mut().zip(numbers) {
                let delivered = floats::rounded_to(element, *number);
                // What is too large for f16 is delivered as infinity, and nothing of it is left.
                *sum = if delivered.is_finite() { *sum - delivered } else { 0.0 };
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
        let mut block = Block::new(self, gradient.len(), sizes, workspace);
        block.is_for(gradient);
        let decoded = match gradient {
            Gradient::F32(out) => block.decode_into(bytes, out),
            _ => block.decode(bytes).map(|numbers| floats::store(gradient, numbers)),
        };
        if let Err(poison) = decoded {
            super::fill(gradient, poison);
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
        floats::read(gradient, &mut own);
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
