//! L1 norms: how large a chunk is, summed over the ranks, and how much of a gradient stays behind.

/// L1 norms of a chunk: the sums of the magnitudes of its elements, added in a fixed order. A sum
/// of finite numbers that overflows is `f32::MAX`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkNorms {
    pub gradient: f32,
    /// The norm of the new residual. NaN or infinite if some of its elements are.
    pub residual: f32,
}

/// L1 norms of what one rank handles in an exchange. Chunks with infinity or NaN don't count.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExchangeNorms {
    pub gradient: f64,
    /// The part of the residual that is not sent.
    pub unsent: f64,
}

impl ExchangeNorms {
    /// The ratio of the unsent part to the gradient; 0 if the gradient is zero.
    pub fn residual_ratio(self) -> f64 {
        if self.gradient > 0.0 { self.unsent / self.gradient } else { 0.0 }
    }
}

/// Adds the norms of another rank's chunks. A sum that is too large for f32 is `f32::MAX`, so that
/// only infinity gives infinity; a NaN gives NaN.
pub fn add_norms(total: &mut [f32], more: &[f32]) {
    assert_eq!(total.len(), more.len(), "gflow: all ranks have as many chunks");
    for (total, more) in total.iter_mut().zip(more) {
        let (sum, are_finite) = (*total + more, total.is_finite() && more.is_finite());
        *total = if are_finite { sum.clamp(f32::MIN, f32::MAX) } else { sum };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::samples::sums;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn norms_add_up_without_overflow(pairs in prop::collection::vec((sums(), sums()), 1)) {
            for (mut total, mut more) in pairs {
                let length = total.len().min(more.len());
                total.truncate(length);
                more.truncate(length);
                let before = total.clone();
                add_norms(&mut total, &more);
                for ((total, before), more) in total.iter().zip(before).zip(more) {
                    let expected = f64::from(before) + f64::from(more);
                    if before.is_finite() && more.is_finite() {
                        let clamped = expected.clamp(f64::from(f32::MIN), f64::from(f32::MAX));
                        prop_assert_eq!(*total, clamped as f32);
                    } else {
                        prop_assert_eq!(total.is_nan(), expected.is_nan());
                        prop_assert!(total.is_nan() || *total == expected as f32);
                    }
                }
            }
        }
    }

    #[test]
    fn a_clamped_norm_stays_the_largest_finite_one() {
        let mut total = [f32::MAX, 3e38, 1.0];
        add_norms(&mut total, &[f32::MAX, 3e38, f32::INFINITY]);
        assert_eq!(total, [f32::MAX, f32::MAX, f32::INFINITY]);
        add_norms(&mut total, &[1.0, 0.0, f32::NAN]);
        assert!(total[..2] == [f32::MAX; 2] && total[2].is_nan());
    }
}
