//! The rest: what a sum loses when it becomes a gradient of 16 bits. It goes back to the residual of
//! one rank, so that it is sent again; a sum that is too large for the type becomes the largest number
//! and not infinity, and what is over goes the same way.

use super::gradient::Gradient;
use super::wire::Wire;
use crate::simd::number::Stored;
use crate::simd::sixteen::{BF16, F16};

/// Looks again at a gradient that was unpacked from `sum`. The one rank that keeps the rest gives its
/// residual. For f32 there is nothing to do: it loses nothing.
pub fn keep_rest(
    sum: &[u8],
    wire: Wire,
    scale: f32,
    gradient: &mut Gradient,
    mut residual: Option<&mut [f32]>,
) {
    let mut settle = |index: usize, delivered: f32, largest: f32| {
        let exact = element(sum, wire, index) / scale;
        if !exact.is_finite() {
            // Gradients near the end of what f32 can express: their sum is beyond it.
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
                *bits = F16::narrow(settle(index, F16(*bits).widen(), 65504.0)).0;
            }
        }
        Gradient::BF16(bits) => {
            let largest = BF16(0x7f7f).widen();
            for (index, bits) in bits.iter_mut().enumerate() {
                *bits = BF16::narrow(settle(index, BF16(*bits).widen(), largest)).0;
            }
        }
    }
}

fn element(sum: &[u8], wire: Wire, index: usize) -> f32 {
    let sixteen = || sum.as_chunks().0[index];
    match wire {
        Wire::F16 => F16(u16::from_ne_bytes(sixteen())).widen(),
        Wire::BF16 => BF16(u16::from_ne_bytes(sixteen())).widen(),
        Wire::F32 => f32::from_ne_bytes(sum.as_chunks().0[index]),
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
            keep_rest(&bytes, Wire::F32, scale, &mut gradient, Some(&mut residual));
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
