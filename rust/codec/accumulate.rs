//! Accumulation: a chunk of the gradient is moved into the residual.
//!
//! The gradient is left zero, which is what an unsent chunk is delivered as: it is in the cache
//! now, and clearing it costs next to nothing, whereas zeros written after the exchange would
//! take another third of the time of this pass at the least (`cargo bench --bench compress`).
//!
//! Infinity and NaN must never enter a residual or a velocity. Whether a chunk has any is known
//! only at its end. Looking first and writing then would read everything twice, and although the
//! second time is from the second-level cache, that takes a fifth longer than one pass which
//! writes at once and keeps what it overwrites, in room that stays in the cache, to put it back
//! in the rare case.

use super::gradient::Gradient;
use super::momentum::Momentum;
use crate::simd::blocks::{Block, blocks_mut, bytes_of_mut, fetch_ahead};
use crate::simd::element::Element;
use crate::simd::instructions::{Instructions, for_each_instruction_set};
use crate::simd::lanes::{call_for, total};
use crate::simd::number::{Float, Number, Stored};

/// L1 norms of a chunk: the sums of the magnitudes of its elements, in a fixed order. A sum of
/// finite numbers that overflows is `f32::MAX`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norms {
    /// Of the gradient.
    pub gradient: f32,
    /// Of the new residual. If it is NaN or infinite, so are some of the elements.
    pub sum: f32,
}

/// Moves the gradient of a chunk into its residual, by way of the velocity if there is momentum,
/// and gives the norms.
///
/// If any new value were NaN or infinite, residual and velocity stay as they were to the bit, and
/// the sum is NaN if any such value is NaN, else infinity: the chunk is poisoned, and the caller
/// must fill its gradient with that. Otherwise the gradient is zero afterwards.
///
/// `undo` is room for as many elements as the chunk has, twice as many with momentum. It is fast
/// if the same room is given for every chunk.
pub fn accumulate(
    gradient: &mut Gradient,
    residual: &mut [f32],
    momentum: Option<(&mut [f32], Momentum)>,
    undo: &mut [f32],
) -> Norms {
    accumulate_with(Instructions::best(), gradient, residual, momentum, undo)
}

pub(super) fn accumulate_with(
    instructions: Instructions,
    gradient: &mut Gradient,
    residual: &mut [f32],
    momentum: Option<(&mut [f32], Momentum)>,
    undo: &mut [f32],
) -> Norms {
    let (count, element) = (gradient.len(), gradient.element());
    assert_eq!(count, residual.len(), "gflow: a residual is as long as its gradient");
    let needed = if momentum.is_some() { 2 * count } else { count };
    assert!(undo.len() >= needed, "gflow: room to undo {needed} elements, not {}", undo.len());
    let (undo, undo_velocity) = undo.split_at_mut(count);
    let from = gradient.bytes_mut();
    let (to, kept) = (bytes_of_mut(residual), bytes_of_mut(undo));
    let Some((velocity, momentum)) = momentum else {
        let sums = match element {
            Element::F16 => call_for!(instructions, add_for[F16](from, to, kept)),
            Element::BF16 => call_for!(instructions, add_for[BF16](from, to, kept)),
            _ => call_for!(instructions, add_for[F32](from, to, kept)),
        };
        return sums.norms(residual).unwrap_or_else(|poisoned| {
            residual.copy_from_slice(undo);
            poisoned
        });
    };
    assert_eq!(count, velocity.len(), "gflow: a velocity is as long as its gradient");
    let undo_velocity = &mut undo_velocity[..count];
    let (by, by_kept) = (bytes_of_mut(velocity), bytes_of_mut(undo_velocity));
    let sums = match element {
        Element::F16 => {
            call_for!(instructions, move_for[F16](from, to, kept, by, by_kept, momentum))
        }
        Element::BF16 => {
            call_for!(instructions, move_for[BF16](from, to, kept, by, by_kept, momentum))
        }
        _ => call_for!(instructions, move_for[F32](from, to, kept, by, by_kept, momentum)),
    };
    sums.norms(residual).unwrap_or_else(|poisoned| {
        residual.copy_from_slice(undo);
        velocity.copy_from_slice(undo_velocity);
        poisoned
    })
}

/// What a pass over a chunk has added up.
struct Sums {
    gradient: f32,
    sum: f32,
}

impl Sums {
    /// The norms of a chunk that now has this residual, or those of a poisoned one.
    fn norms(self, residual: &[f32]) -> Result<Norms, Norms> {
        // Magnitudes have no negative infinity, so NaN comes of NaN only; but infinity may be
        // no more than the sum of many large numbers.
        if self.sum.is_nan() {
            // One NaN for all: which one it is depends on the instructions.
            let gradient = if self.gradient.is_nan() { f32::NAN } else { self.gradient };
            Err(Norms { gradient, sum: f32::NAN })
        } else if self.sum.is_infinite() && !residual.iter().all(|number| number.is_finite()) {
            Err(Norms { gradient: self.gradient, sum: f32::INFINITY })
        } else {
            // The gradient is finite, or else the residual would not be.
            Ok(Norms { gradient: self.gradient.min(f32::MAX), sum: self.sum.min(f32::MAX) })
        }
    }
}

for_each_instruction_set! {
    mod add_for = add_by_blocks;
    <G: Stored<Number: Float>>(gradient: &mut [u8], residual: &mut [u8], undo: &mut [u8]) -> Sums
}

for_each_instruction_set! {
    mod move_for = move_by_blocks;
    <G: Stored<Number: Float>>(
        gradient: &mut [u8], residual: &mut [u8], undo: &mut [u8],
        velocity: &mut [u8], undo_velocity: &mut [u8], momentum: Momentum
    ) -> Sums
}

/// Without momentum.
///
/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn add_by_blocks<G: Stored<Number: Float>>(
    gradient: &mut [u8],
    residual: &mut [u8],
    undo: &mut [u8],
) -> Sums {
    let mut lanes = Lanes::<G>::new();
    let (gradients, gradient_rest) = blocks_mut::<G>(gradient);
    let (residuals, residual_rest) = blocks_mut::<G::Number>(residual);
    let (undos, undo_rest) = blocks_mut::<G::Number>(undo);
    for (gradient, (residual, undo)) in gradients.iter_mut().zip(residuals.iter_mut().zip(undos)) {
        fetch_ahead(gradient);
        fetch_ahead(residual);
        undo.0 = residual.0;
        let number = lanes.take(gradient);
        residual.0 = lanes.keep(undo.0.add(number));
    }
    if !gradient_rest.is_empty() {
        let mut gradient = Block::padded(gradient_rest);
        let undo = Block::<G::Number>::padded(residual_rest);
        let number = lanes.take(&mut gradient);
        Block(lanes.keep(undo.0.add(number))).put_back(residual_rest);
        undo.put_back(undo_rest);
        gradient.put_back(gradient_rest);
    }
    lanes.sums()
}

/// With momentum.
///
/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn move_by_blocks<G: Stored<Number: Float>>(
    gradient: &mut [u8],
    residual: &mut [u8],
    undo: &mut [u8],
    velocity: &mut [u8],
    undo_velocity: &mut [u8],
    momentum: Momentum,
) -> Sums {
    let mut lanes = Lanes::<G>::new();
    let (gradients, gradient_rest) = blocks_mut::<G>(gradient);
    let (residuals, residual_rest) = blocks_mut::<G::Number>(residual);
    let (undos, undo_rest) = blocks_mut::<G::Number>(undo);
    let (velocities, velocity_rest) = blocks_mut::<G::Number>(velocity);
    let (undo_velocities, undo_velocity_rest) = blocks_mut::<G::Number>(undo_velocity);
    let velocities = velocities.iter_mut().zip(undo_velocities);
    let blocks = gradients.iter_mut().zip(residuals.iter_mut().zip(undos)).zip(velocities);
    for ((gradient, (residual, undo)), (velocity, undo_velocity)) in blocks {
        fetch_ahead(gradient);
        fetch_ahead(residual);
        fetch_ahead(velocity);
        undo.0 = residual.0;
        undo_velocity.0 = velocity.0;
        let (moved, corrected) = momentum.apply(lanes.take(gradient), undo_velocity.0);
        velocity.0 = moved;
        residual.0 = lanes.keep(undo.0.add(corrected));
    }
    if !gradient_rest.is_empty() {
        let mut gradient = Block::padded(gradient_rest);
        let undo = Block::<G::Number>::padded(residual_rest);
        let undo_velocity = Block::<G::Number>::padded(velocity_rest);
        let (moved, corrected) = momentum.apply(lanes.take(&mut gradient), undo_velocity.0);
        Block(moved).put_back(velocity_rest);
        Block(lanes.keep(undo.0.add(corrected))).put_back(residual_rest);
        undo.put_back(undo_rest);
        undo_velocity.put_back(undo_velocity_rest);
        gradient.put_back(gradient_rest);
    }
    lanes.sums()
}

/// The sums so far, one for each lane, and a cleared block.
struct Lanes<G: Stored<Number: Float>> {
    gradient: G::Number,
    sum: G::Number,
    zeros: G,
}

impl<G: Stored<Number: Float>> Lanes<G> {
    #[inline(always)]
    fn new() -> Lanes<G> {
        let zeros = G::Number::all(0.0);
        Lanes { gradient: zeros, sum: zeros, zeros: G::narrow(zeros) }
    }

    /// The gradient in this block, which is zero then.
    #[inline(always)]
    fn take(&mut self, block: &mut Block<G>) -> G::Number {
        let number = block.0.widen();
        block.0 = self.zeros;
        self.gradient = self.gradient.add(number.magnitude());
        number
    }

    /// The residual as it is given.
    #[inline(always)]
    fn keep(&mut self, residual: G::Number) -> G::Number {
        self.sum = self.sum.add(residual.magnitude());
        residual
    }

    #[inline(always)]
    fn sums(self) -> Sums {
        Sums { gradient: total(self.gradient), sum: total(self.sum) }
    }
}
