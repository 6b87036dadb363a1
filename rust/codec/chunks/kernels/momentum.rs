//! Momentum correction: each rank keeps a velocity and sends that in place of the gradient, so
//! that what is sent late has the effect it would have had in time (Lin et al. 2018,
//! arXiv 1712.01887).
//!
//! An infinite or NaN gradient must never enter a velocity: it would stay there forever.

use crate::codec::gradient::Gradient;
use crate::simd::blocks::{Block, blocks_mut, bytes_of_mut};
use crate::simd::element::Element;
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::dispatch;
use crate::simd::number::{Float, Stored};

/// How the velocity moves: u = factor * u + g. The corrected gradient is u, or g + factor * u with
/// Nesterov momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    pub factor: f32,
    pub nesterov: bool,
}

impl Momentum {
    /// The new velocity and the corrected gradient. If the former isn't finite, neither is the
    /// latter.
    #[inline(always)]
    pub(in crate::codec::chunks) fn apply<N: Float>(self, gradient: N, velocity: N) -> (N, N) {
        let factor = N::splat(self.factor);
        let velocity = factor.multiply(velocity).add(gradient);
        let corrected = match self.nesterov {
            true => gradient.add(factor.multiply(velocity)),
            false => velocity,
        };
        (velocity, corrected)
    }
}

/// Corrects a gradient that is sent whole. Where the result is infinite or NaN, the velocity keeps
/// its old value.
pub fn add_velocity(gradient: &mut Gradient, velocity: &mut [f32], momentum: Momentum) {
    add_velocity_with(InstructionSet::best(), gradient, velocity, momentum);
}

pub(in crate::codec::chunks) fn add_velocity_with(
    set: InstructionSet,
    gradient: &mut Gradient,
    velocity: &mut [f32],
    momentum: Momentum,
) {
    assert_eq!(gradient.len(), velocity.len(), "gflow: a velocity is as long as its gradient");
    let element = gradient.element();
    let (to, by) = (gradient.bytes_mut(), bytes_of_mut(velocity));
    match element {
        Element::F16 => dispatch!(set, velocity_kernel[F16](to, by, momentum)),
        Element::BF16 => dispatch!(set, velocity_kernel[BF16](to, by, momentum)),
        _ => dispatch!(set, velocity_kernel[F32](to, by, momentum)),
    }
}

for_each_instruction_set! {
    mod velocity_kernel = add_velocity_by_blocks;
    <G: Stored<Number: Float>>(gradient: &mut [u8], velocity: &mut [u8], momentum: Momentum)
}

/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn add_velocity_by_blocks<G: Stored<Number: Float>>(
    gradient: &mut [u8],
    velocity: &mut [u8],
    momentum: Momentum,
) {
    let (gradients, gradient_tail) = blocks_mut::<G>(gradient);
    let (velocities, velocity_tail) = blocks_mut::<G::Number>(velocity);
    for (gradient, velocity) in gradients.iter_mut().zip(velocities) {
        add_velocity_to_block(gradient, velocity, momentum);
    }
    if !gradient_tail.is_empty() {
        let mut gradient = Block::<G>::load_tail(gradient_tail);
        let mut velocity = Block::load_tail(velocity_tail);
        add_velocity_to_block(&mut gradient, &mut velocity, momentum);
        gradient.store_tail(gradient_tail);
        velocity.store_tail(velocity_tail);
    }
}

#[inline(always)]
fn add_velocity_to_block<G: Stored<Number: Float>>(
    gradient: &mut Block<G>,
    velocity: &mut Block<G::Number>,
    momentum: Momentum,
) {
    let before = velocity.0;
    let (after, corrected) = momentum.apply(gradient.0.widen(), before);
    gradient.0 = G::narrow(corrected);
    velocity.0 = corrected.select_if_finite(after, before);
}
