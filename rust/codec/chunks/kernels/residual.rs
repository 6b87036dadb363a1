//! Rounding errors go back into the residual, so that they are sent again later: those of the hops
//! on the rank that made them, and those of 16-bit gradients on one rank.

use crate::codec::gradient::Gradient;
use crate::codec::wire::Wire;
use crate::simd::blocks::{Block, blocks, blocks_mut, bytes_of, bytes_of_mut, prefetch};
use crate::simd::half_precision::{BF16, F16};
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::dispatch;
use crate::simd::number::{Float, Stored};

/// Returns the rounding error of `add_partial_sum` to the residual of a chunk sent with this scale.
pub fn return_hop_error(residual: &mut [f32], error: &[f32], scale: f32) {
    return_hop_error_with(InstructionSet::best(), residual, error, scale);
}

pub(in crate::codec::chunks) fn return_hop_error_with(
    set: InstructionSet,
    residual: &mut [f32],
    error: &[f32],
    scale: f32,
) {
    assert_eq!(residual.len(), error.len(), "gflow: a residual is as long as its chunk");
    add_scaled(set, bytes_of_mut(residual), bytes_of(error), 1.0 / scale);
}

/// Corrects a gradient that was unpacked from `sum`: a finite sum that is too large for a 16-bit
/// type becomes the largest number instead of infinity. The one rank that keeps the error of all
/// elements passes its residual. Nothing to do for f32, which loses nothing.
pub fn return_unpack_error(
    sum: &[u8],
    wire: Wire,
    scale: f32,
    gradient: &mut Gradient,
    mut residual: Option<&mut [f32]>,
) {
    let mut correct = |index: usize, delivered: f32, largest: f32| {
        let exact = element(sum, wire, index) / scale;
        if !exact.is_finite() {
            // Gradients near the limit of f32, whose sum is beyond it.
            return delivered;
        }
        let delivered = delivered.clamp(-largest, largest);
        if let Some(residual) = &mut residual {
            residual[index] += exact - delivered;
        }
        delivered
    };
    match gradient {
        Gradient::F32(_) => {}
        Gradient::F16(bits) => {
            for (index, bits) in bits.iter_mut().enumerate() {
                *bits = F16::narrow(correct(index, F16(*bits).widen(), 65504.0)).0;
            }
        }
        Gradient::BF16(bits) => {
            let largest = BF16(0x7f7f).widen();
            for (index, bits) in bits.iter_mut().enumerate() {
                *bits = BF16::narrow(correct(index, BF16(*bits).widen(), largest)).0;
            }
        }
    }
}

/// One element of a sum.
fn element(sum: &[u8], wire: Wire, index: usize) -> f32 {
    let two_bytes = || sum.as_chunks().0[index];
    match wire {
        Wire::F16 => F16(u16::from_ne_bytes(two_bytes())).widen(),
        Wire::BF16 => BF16(u16::from_ne_bytes(two_bytes())).widen(),
        Wire::F32 => f32::from_ne_bytes(sum.as_chunks().0[index]),
    }
}

/// to += from * scale, in f32.
pub(super) fn add_scaled(set: InstructionSet, to: &mut [u8], from: &[u8], scale: f32) {
    dispatch!(set, add_scaled_kernel[F32](to, from, scale))
}

for_each_instruction_set! {
    mod add_scaled_kernel = add_scaled_by_blocks;
    <N: Float>(to: &mut [u8], from: &[u8], scale: f32)
}

/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn add_scaled_by_blocks<N: Float>(to: &mut [u8], from: &[u8], scale: f32) {
    let scale = N::splat(scale);
    let (tos, to_tail) = blocks_mut::<N>(to);
    let (froms, from_tail) = blocks::<N>(from);
    for (to, from) in tos.iter_mut().zip(froms) {
        prefetch(to);
        to.0 = to.0.add(from.0.multiply(scale));
    }
    if !to_tail.is_empty() {
        let (to, from) = (Block::<N>::load_tail(to_tail), Block::<N>::load_tail(from_tail));
        Block(to.0.add(from.0.multiply(scale))).store_tail(to_tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::unpack;
    use proptest::prelude::*;

    fn check(sums: &[f32], scale: f32) {
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
        let mut bits = vec![0; sums.len()];
        for is_brain in [false, true] {
            let mut gradient =
                if is_brain { Gradient::BF16(&mut bits) } else { Gradient::F16(&mut bits) };
            unpack(&bytes, Wire::F32, scale, &mut gradient);
            let mut residual = vec![0.0; sums.len()];
            return_unpack_error(&bytes, Wire::F32, scale, &mut gradient, Some(&mut residual));
            for (index, sum) in sums.iter().enumerate() {
                let delivered = match is_brain {
                    true => half::bf16::from_bits(bits[index]).to_f32_const(),
                    false => half::f16::from_bits(bits[index]).to_f32_const(),
                };
                assert!(delivered.is_finite());
                assert_eq!(delivered + residual[index], sum / scale, "{sum} by {scale}");
            }
        }
    }

    #[test]
    fn what_is_too_large_or_too_small_for_the_type_is_kept() {
        check(&[70000.0, -1e6, 1e-9, -65519.0, 65520.0, 0.0, 3.0e38, 1.0 / 3.0], 1.0);
    }

    proptest! {
        #[test]
        fn what_is_delivered_and_what_is_kept_are_the_sum(
            sums in prop::collection::vec(-1e5f32..1e5, 1..50), exponent in -4i32..5
        ) {
            check(&sums, 2f32.powi(exponent));
        }
    }
}
