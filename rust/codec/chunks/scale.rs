//! The scale: the power of two that a chunk is multiplied by on the wire, which rounds nothing. It
//! must be derived only from the sum of all ranks' norms, which all ranks share.

use crate::codec::wire::Wire;

/// A scaled sum is at most 2 to this power: half of what half precision can represent.
const LARGEST_SUM_EXPONENT: i32 = 15;
/// Keeps both the scale and its inverse normal numbers.
const LARGEST_SCALE_EXPONENT: i32 = 126;

/// The scale for a chunk with this sum of the ranks' L1 norms.
///
/// Half precision has few exponents, so there the scale is the largest that keeps the sum at or
/// below 32768. No element of any rank, and no sum of some ranks' elements, exceeds the sum of the
/// norms, so none overflows on the way. (The other half of the range is for rounding: each hop
/// rounds by one part in 2048, so it is enough for more than a thousand hops; the norms' own sum
/// rounds much less; and a norm is never rounded below the largest of its elements.)
///
/// The scale is 1 for the other formats, which have the exponents of f32; for a sum of zero; and
/// for a sum that is infinite or NaN, whose chunk isn't sent.
pub fn scale_for(sum: f32, wire: Wire) -> f32 {
    if wire != Wire::F16 || !sum.is_finite() || sum <= 0.0 {
        return 1.0;
    }
    if sum == f32::MAX {
        // It may have been clamped, and then bounds single elements but not their sum. With the
        // smallest scale an element is less than 4, so thousands of them still fit.
        return power_of_two(-LARGEST_SCALE_EXPONENT);
    }
    let (exponent, mantissa) = ((sum.to_bits() >> 23) as i32 - 127, sum.to_bits() & 0x7f_ffff);
    let rounded_up = exponent + i32::from(mantissa != 0);
    let limit = LARGEST_SCALE_EXPONENT;
    power_of_two((LARGEST_SUM_EXPONENT - rounded_up).clamp(-limit, limit))
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::chunks::{add_norms, reference};
    use crate::codec::samples::{any_finite, any_magnitude};
    use half::f16;
    use proptest::prelude::*;

    #[test]
    fn the_scale_is_the_largest_that_leaves_room() {
        assert_eq!(scale_for(32768.0, Wire::F16), 1.0);
        assert_eq!(scale_for(32768.0f32.next_up(), Wire::F16), 0.5);
        assert_eq!(scale_for(32768.0f32.next_down(), Wire::F16), 1.0);
        assert_eq!(scale_for(16384.0, Wire::F16), 2.0);
        assert_eq!(scale_for(3.0, Wire::F16), 8192.0);
        assert_eq!(scale_for(f32::MAX.next_down(), Wire::F16), 2f32.powi(-113));
        assert_eq!(scale_for(f32::MAX, Wire::F16), 2f32.powi(-126));
        assert_eq!(scale_for(f32::MIN_POSITIVE, Wire::F16), 2f32.powi(126));
        assert_eq!(scale_for(f32::from_bits(1), Wire::F16), 2f32.powi(126));
        for none in [0.0, -0.0, f32::INFINITY, f32::NAN] {
            assert_eq!(scale_for(none, Wire::F16), 1.0);
        }
        for wire in [Wire::BF16, Wire::F32] {
            assert_eq!(scale_for(1e30, wire), 1.0);
        }
    }

    proptest! {
        #[test]
        fn the_scale_is_a_power_of_two_and_so_is_its_inverse(sum in any_magnitude()) {
            let scale = scale_for(sum, Wire::F16);
            prop_assert!(scale.is_normal() && (1.0 / scale).is_normal());
            prop_assert_eq!(scale.to_bits() & 0x807f_ffff, 0);
            prop_assert!(f64::from(sum) * f64::from(scale) <= 32768.0);
            let twice = f64::from(sum) * f64::from(scale) * 2.0;
            let is_limited = scale == 2f32.powi(126) || sum == f32::MAX || sum == 0.0;
            prop_assert!(twice > 32768.0 || is_limited);
        }

        /// The worst case: many ranks with elements of similar size and the same sign. Checks every
        /// partial sum, rounded after each hop, in the order of every partition.
        #[test]
        fn nothing_overflows_on_the_way_round_the_ring(
            first in any_finite(),
            ratios in prop::collection::vec(0.999f32..1.001, 1..300),
            others in prop::collection::vec(any_finite(), 0..10),
            beside in any_finite(),
        ) {
            let close = ratios.iter().map(|ratio| (first * ratio).clamp(f32::MIN, f32::MAX));
            let elements: Vec<f32> = close.chain(others).collect();
            // A chunk has other elements too; the norm is of all of them.
            let norm = |element: &f32| reference::norm(&[*element, beside]).min(f32::MAX);
            let mut total = [0.0];
            for element in &elements {
                add_norms(&mut total, &[norm(element)]);
            }
            let scale = scale_for(total[0], Wire::F16);
            for start in [0, elements.len() / 2] {
                let (later, earlier) = elements.split_at(start);
                let mut partial = 0.0;
                for element in earlier.iter().chain(later) {
                    let sent = f16::from_f32(element * scale);
                    prop_assert!(sent.is_finite(), "{element} by {scale}");
                    partial = f16::from_f32(partial + sent.to_f32()).to_f32();
                    prop_assert!(partial.is_finite(), "{total:?} by {scale}");
                }
            }
        }
    }
}
