//! Accumulation: moves a chunk of the gradient into the residual.
//!
//! This pass leaves the gradient zero, which is what an unsent chunk delivers. The chunk is in
//! cache now, so clearing it is nearly free; writing the zeros after the exchange would cost at
//! least a third of this pass again (`cargo bench --bench codec`).
//!
//! Infinity and NaN must never enter a residual or a velocity, but whether a chunk contains one is
//! known only at its end. Checking first would read everything twice and takes a fifth longer,
//! even from the L2 cache. So a single pass writes at once, saves what it overwrites to a scratch
//! buffer that stays in cache, and restores it in the rare case.

use super::momentum::Momentum;
use crate::codec::chunks::norms::ChunkNorms;
use crate::codec::gradient::Gradient;
use crate::simd::blocks::{Block, blocks_mut, bytes_of_mut, prefetch};
use crate::simd::element::Element;
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::{dispatch, sum_lanes};
use crate::simd::number::{Float, Number, Stored};

/// Moves the gradient of a chunk into its residual, through the velocity if there is momentum, and
/// returns the norms.
///
/// If any new value would be NaN or infinite, the chunk is poisoned: residual and velocity keep
/// their old values to the bit, the residual's norm is NaN (if any such value is NaN) or infinity,
/// and the caller must fill the gradient with it. Otherwise the gradient is zero afterwards.
///
/// `undo` is scratch space of the chunk's length, or twice that with momentum. Pass the same one
/// for every chunk so that it stays in cache.
pub fn accumulate(
    gradient: &mut Gradient,
    residual: &mut [f32],
    momentum: Option<(&mut [f32], Momentum)>,
    undo: &mut [f32],
) -> ChunkNorms {
    accumulate_with(InstructionSet::best(), gradient, residual, momentum, undo)
}

pub(in crate::codec::chunks) fn accumulate_with(
    set: InstructionSet,
    gradient: &mut Gradient,
    residual: &mut [f32],
    momentum: Option<(&mut [f32], Momentum)>,
    undo: &mut [f32],
) -> ChunkNorms {
    let (count, element) = (gradient.len(), gradient.element());
    assert_eq!(count, residual.len(), "gflow: a residual is as long as its gradient");
    let needed = if momentum.is_some() { 2 * count } else { count };
    assert!(undo.len() >= needed, "gflow: room to undo {needed} elements, not {}", undo.len());
    let (undo, undo_velocity) = undo.split_at_mut(count);
    let from = gradient.bytes_mut();
    let (to, undo_bytes) = (bytes_of_mut(residual), bytes_of_mut(undo));
    let Some((velocity, momentum)) = momentum else {
        let sums = match element {
            Element::F16 => dispatch!(set, add_kernel[F16](from, to, undo_bytes)),
            Element::BF16 => dispatch!(set, add_kernel[BF16](from, to, undo_bytes)),
            _ => dispatch!(set, add_kernel[F32](from, to, undo_bytes)),
        };
        return sums.norms(residual).unwrap_or_else(|poisoned| {
            residual.copy_from_slice(undo);
            poisoned
        });
    };
    assert_eq!(count, velocity.len(), "gflow: a velocity is as long as its gradient");
    let undo_velocity = &mut undo_velocity[..count];
    let moving =
        Moving { velocity: bytes_of_mut(velocity), undo: bytes_of_mut(undo_velocity), momentum };
    let sums = match element {
        Element::F16 => dispatch!(set, momentum_kernel[F16](from, to, undo_bytes, moving)),
        Element::BF16 => dispatch!(set, momentum_kernel[BF16](from, to, undo_bytes, moving)),
        _ => dispatch!(set, momentum_kernel[F32](from, to, undo_bytes, moving)),
    };
    sums.norms(residual).unwrap_or_else(|poisoned| {
        residual.copy_from_slice(undo);
        velocity.copy_from_slice(undo_velocity);
        poisoned
    })
}

/// The velocity of a chunk, scratch space to undo it, and how it moves.
struct Moving<'a> {
    velocity: &'a mut [u8],
    undo: &'a mut [u8],
    momentum: Momentum,
}

/// The magnitudes that a pass over a chunk has added up.
struct Sums {
    gradient: f32,
    residual: f32,
}

impl Sums {
    /// The norms of a chunk that now has this residual; an error if the chunk is poisoned.
    fn norms(self, residual: &[f32]) -> Result<ChunkNorms, ChunkNorms> {
        // Magnitudes are never negative infinity, so a NaN sum means a NaN element. An infinite
        // sum may just be the overflow of many large numbers.
        if self.residual.is_nan() {
            // Always the same NaN: which one the sum has depends on the instruction set.
            let gradient = if self.gradient.is_nan() { f32::NAN } else { self.gradient };
            Err(ChunkNorms { gradient, residual: f32::NAN })
        } else if self.residual.is_infinite() && !residual.iter().all(|number| number.is_finite()) {
            Err(ChunkNorms { gradient: self.gradient, residual: f32::INFINITY })
        } else {
            // The gradient's elements are finite, or the residual would not be.
            let (gradient, residual) = (self.gradient.min(f32::MAX), self.residual.min(f32::MAX));
            Ok(ChunkNorms { gradient, residual })
        }
    }
}

for_each_instruction_set! {
    mod add_kernel = add_by_blocks;
    <G: Stored<Number: Float>>(gradient: &mut [u8], residual: &mut [u8], undo: &mut [u8]) -> Sums
}

for_each_instruction_set! {
    mod momentum_kernel = move_by_blocks;
    <G: Stored<Number: Float>>(
        gradient: &mut [u8], residual: &mut [u8], undo: &mut [u8], moving: Moving
    ) -> Sums
}

/// Without momentum.
///
/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn add_by_blocks<G: Stored<Number: Float>>(
    gradient: &mut [u8],
    residual: &mut [u8],
    undo: &mut [u8],
) -> Sums {
    let mut sums = LaneSums::<G>::new();
    let (gradients, gradient_tail) = blocks_mut::<G>(gradient);
    let (residuals, residual_tail) = blocks_mut::<G::Number>(residual);
    let (undos, undo_tail) = blocks_mut::<G::Number>(undo);
    for (gradient, (residual, undo)) in gradients.iter_mut().zip(residuals.iter_mut().zip(undos)) {
        prefetch(gradient);
        prefetch(residual);
        undo.0 = residual.0;
        let number = sums.take(gradient);
        residual.0 = sums.keep(undo.0.add(number));
    }
    if !gradient_tail.is_empty() {
        let mut gradient = Block::load_tail(gradient_tail);
        let undo = Block::<G::Number>::load_tail(residual_tail);
        let number = sums.take(&mut gradient);
        Block(sums.keep(undo.0.add(number))).store_tail(residual_tail);
        undo.store_tail(undo_tail);
        gradient.store_tail(gradient_tail);
    }
    sums.total()
}

/// The same with momentum.
///
/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn move_by_blocks<G: Stored<Number: Float>>(
    gradient: &mut [u8],
    residual: &mut [u8],
    undo: &mut [u8],
    moving: Moving,
) -> Sums {
    let Moving { velocity, undo: undo_velocity, momentum } = moving;
    let mut sums = LaneSums::<G>::new();
    let (gradients, gradient_tail) = blocks_mut::<G>(gradient);
    let (residuals, residual_tail) = blocks_mut::<G::Number>(residual);
    let (undos, undo_tail) = blocks_mut::<G::Number>(undo);
    let (velocities, velocity_tail) = blocks_mut::<G::Number>(velocity);
    let (undo_velocities, undo_velocity_tail) = blocks_mut::<G::Number>(undo_velocity);
    let velocities = velocities.iter_mut().zip(undo_velocities);
    let blocks = gradients.iter_mut().zip(residuals.iter_mut().zip(undos)).zip(velocities);
    for ((gradient, (residual, undo)), (velocity, undo_velocity)) in blocks {
        prefetch(gradient);
        prefetch(residual);
        prefetch(velocity);
        undo.0 = residual.0;
        undo_velocity.0 = velocity.0;
        let (moved, corrected) = momentum.apply(sums.take(gradient), undo_velocity.0);
        velocity.0 = moved;
        residual.0 = sums.keep(undo.0.add(corrected));
    }
    if !gradient_tail.is_empty() {
        let mut gradient = Block::load_tail(gradient_tail);
        let undo = Block::<G::Number>::load_tail(residual_tail);
        let undo_velocity = Block::<G::Number>::load_tail(velocity_tail);
        let (moved, corrected) = momentum.apply(sums.take(&mut gradient), undo_velocity.0);
        Block(moved).store_tail(velocity_tail);
        Block(sums.keep(undo.0.add(corrected))).store_tail(residual_tail);
        undo.store_tail(undo_tail);
        undo_velocity.store_tail(undo_velocity_tail);
        gradient.store_tail(gradient_tail);
    }
    sums.total()
}

/// The sums so far, one per lane, and a block of zeros.
struct LaneSums<G: Stored<Number: Float>> {
    gradient: G::Number,
    residual: G::Number,
    zeros: G,
}

impl<G: Stored<Number: Float>> LaneSums<G> {
    #[inline(always)]
    fn new() -> LaneSums<G> {
        let zeros = G::Number::splat(0.0);
        LaneSums { gradient: zeros, residual: zeros, zeros: G::narrow(zeros) }
    }

    /// Counts and returns the gradient in this block, and leaves zeros there.
    #[inline(always)]
    fn take(&mut self, block: &mut Block<G>) -> G::Number {
        let number = block.0.widen();
        block.0 = self.zeros;
        self.gradient = self.gradient.add(number.abs());
        number
    }

    /// Counts the residual and returns it.
    #[inline(always)]
    fn keep(&mut self, residual: G::Number) -> G::Number {
        self.residual = self.residual.add(residual.abs());
        residual
    }

    #[inline(always)]
    fn total(self) -> Sums {
        Sums { gradient: sum_lanes(self.gradient), residual: sum_lanes(self.residual) }
    }
}
