//! Momentum correction: a rank's own velocity, which takes the gradient's place. What is sent
//! late then has the effect it would have had in time (Lin et al. 2018, arXiv 1712.01887).
//!
//! An infinite or NaN gradient must never enter a velocity, which would keep it for ever.

use super::gradient::Gradient;
use crate::simd::blocks::{Block, blocks_mut, bytes_of_mut};
use crate::simd::element::Element;
use crate::simd::instructions::{Instructions, for_each_instruction_set};
use crate::simd::lanes::call_for;
use crate::simd::number::{Float, Stored};

/// How the velocity moves: u = factor * u + g, and what stands for the gradient then is u, or
/// g + factor * u with Nesterov's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    pub factor: f32,
    pub nesterov: bool,
}

impl Momentum {
    /// The new velocity, and what stands for the gradient. If the former is not finite, the
    /// latter is not.
    #[inline(always)]
    pub(super) fn apply<N: Float>(self, gradient: N, velocity: N) -> (N, N) {
        let factor = N::all(self.factor);
        let velocity = factor.multiply(velocity).add(gradient);
        let corrected = match self.nesterov {
            true => gradient.add(factor.multiply(velocity)),
            false => velocity,
        };
        (velocity, corrected)
    }
}

/// Replaces a gradient that is sent whole by what stands for it. Where that is infinite or NaN
/// the velocity stays as it was.
pub fn add_velocity(gradient: &mut Gradient, velocity: &mut [f32], momentum: Momentum) {
    add_velocity_with(Instructions::best(), gradient, velocity, momentum);
}

pub(super) fn add_velocity_with(
    instructions: Instructions,
    gradient: &mut Gradient,
    velocity: &mut [f32],
    momentum: Momentum,
) {
    assert_eq!(gradient.len(), velocity.len(), "gflow: a velocity is as long as its gradient");
    let element = gradient.element();
    let (to, by) = (gradient.bytes_mut(), bytes_of_mut(velocity));
    match element {
        Element::F16 => call_for!(instructions, add_velocity_for[F16](to, by, momentum)),
        Element::BF16 => call_for!(instructions, add_velocity_for[BF16](to, by, momentum)),
        _ => call_for!(instructions, add_velocity_for[F32](to, by, momentum)),
    }
}

for_each_instruction_set! {
    mod add_velocity_for = add_velocity_by_blocks;
    <G: Stored<Number: Float>>(gradient: &mut [u8], velocity: &mut [u8], momentum: Momentum)
}

/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn add_velocity_by_blocks<G: Stored<Number: Float>>(
    gradient: &mut [u8],
    velocity: &mut [u8],
    momentum: Momentum,
) {
    let (gradients, gradient_rest) = blocks_mut::<G>(gradient);
    let (velocities, velocity_rest) = blocks_mut::<G::Number>(velocity);
    for (gradient, velocity) in gradients.iter_mut().zip(velocities) {
        add_velocity_to_block(gradient, velocity, momentum);
    }
    if !gradient_rest.is_empty() {
        let mut gradient = Block::<G>::padded(gradient_rest);
        let mut velocity = Block::padded(velocity_rest);
        add_velocity_to_block(&mut gradient, &mut velocity, momentum);
        gradient.put_back(gradient_rest);
        velocity.put_back(velocity_rest);
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
    velocity.0 = corrected.pick_if_finite(after, before);
}
