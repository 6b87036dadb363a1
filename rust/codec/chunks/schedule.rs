//! The schedule: how much of a gradient is sent at which step.
//!
//! Every rank must get the same number, whatever CPU and C library it runs on. So this file may
//! only use operations that IEEE 754 defines to the bit (sums, products, quotients and square
//! roots), never `powf`, `exp` or `ln`.

/// Dense warm-up, then a ramp down to the final density.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The final fraction of chunks that is sent; more than 0, at most 1.
    pub density: f64,
    /// Steps that send everything, exactly.
    pub warmup_steps: u64,
    /// Steps after the warm-up in which the density falls by a constant factor.
    pub ramp_steps: u64,
}

impl Schedule {
    /// The fraction of chunks to send at this step; None for all of them, exactly.
    pub fn density_at(&self, step: u64) -> Option<f64> {
        let sparse_steps = step.checked_sub(self.warmup_steps)?.saturating_add(1);
        if sparse_steps >= self.ramp_steps {
            return Some(self.density);
        }
        Some(power(self.density, sparse_steps, self.ramp_steps))
    }
}

/// How many of `chunks` chunks to send: the fraction, rounded up, but not because of floating-point
/// noise (0.1 * 30 is a little more than 3). At least one, if there are any.
pub fn chunks_to_send(chunks: usize, density: f64) -> usize {
    const NOISE: f64 = 1e-9;
    let exact = density * chunks as f64;
    let nearest = exact.round();
    let count = if (exact - nearest).abs() <= NOISE * nearest { nearest } else { exact.ceil() };
    (count as usize).max(1).min(chunks)
}

/// base ^ (numerator / denominator), for an exponent less than 1. The exponent's binary digits say
/// which of the square root, the fourth root, and so on, are factors.
fn power(base: f64, numerator: u64, denominator: u64) -> f64 {
    // As many digits as an f64 has; further ones would not change the product.
    const DIGITS: u32 = 53;
    let (mut rest, denominator) = (u128::from(numerator), u128::from(denominator));
    let (mut root, mut product) = (base, 1.0);
    for _ in 0..DIGITS {
        root = root.sqrt();
        rest *= 2;
        if rest >= denominator {
            rest -= denominator;
            product *= root;
        }
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_fraction_is_rounded_up_but_not_by_noise() {
        assert_eq!(chunks_to_send(10, 0.1), 1);
        assert_eq!(chunks_to_send(30, 0.1), 3);
        assert_eq!(chunks_to_send(31, 0.1), 4);
        assert_eq!(chunks_to_send(200, 0.1), 20);
        assert_eq!(chunks_to_send(3, 0.7), 3);
        assert_eq!(chunks_to_send(100, 1e-6), 1);
        assert_eq!(chunks_to_send(7, 1.0), 7);
        assert_eq!(chunks_to_send(7, 1.5), 7);
        assert_eq!(chunks_to_send(0, 0.5), 0);
    }

    #[test]
    fn steps_of_a_ramp_are_to_the_bit_what_they_are_on_every_machine() {
        let schedule = Schedule { density: 0.1, warmup_steps: 100, ramp_steps: 100 };
        let bits = |step| schedule.density_at(step).map(f64::to_bits);
        assert_eq!(bits(99), None);
        assert_eq!(bits(100), Some(0x3fef_4586_fe0e_0d5e));
        assert_eq!(bits(149), Some(0x3fd4_3d13_6248_490f));
        assert_eq!(bits(198), Some(0x3fba_3240_c19b_7048));
        assert_eq!(bits(199), Some(0.1f64.to_bits()));
        assert_eq!(bits(u64::MAX), Some(0.1f64.to_bits()));
    }

    #[test]
    fn without_a_ramp_the_density_comes_at_once() {
        let schedule = Schedule { density: 0.01, warmup_steps: 3, ramp_steps: 0 };
        assert_eq!(schedule.density_at(2), None);
        assert_eq!(schedule.density_at(3), Some(0.01));
        let never_dense = Schedule { density: 1.0, warmup_steps: 0, ramp_steps: 0 };
        assert_eq!(never_dense.density_at(0), Some(1.0));
    }

    proptest! {
        #[test]
        fn the_density_falls_to_its_end_and_stays(
            density in 1e-4f64..1.0, warmup_steps in 0u64..1000, ramp_steps in 0u64..2000
        ) {
            let schedule = Schedule { density, warmup_steps, ramp_steps };
            let mut before = 1.0f64;
            for step in 0..warmup_steps + ramp_steps + 5 {
                let Some(now) = schedule.density_at(step) else {
                    prop_assert!(step < warmup_steps);
                    continue;
                };
                prop_assert!(step >= warmup_steps);
                let noise = 1e-14;
                prop_assert!(now <= before + noise && now >= density - noise, "{step}: {now}");
                prop_assert!(step + 1 < warmup_steps + ramp_steps || now == density);
                before = now;
            }
        }

        #[test]
        fn a_ramp_is_the_power_of_the_density(
            density in 1e-6f64..1.0, ramp_steps in 1u64..1 << 40, part in 0.0f64..1.0
        ) {
            let step = (part * ramp_steps as f64) as u64;
            let schedule = Schedule { density, warmup_steps: 0, ramp_steps };
            let expected = density.powf((step + 1) as f64 / ramp_steps as f64);
            let density = schedule.density_at(step).unwrap();
            prop_assert!((density / expected - 1.0).abs() < 1e-12, "{density} for {expected}");
        }

        #[test]
        fn the_count_is_within_the_chunks(chunks in 0usize..1 << 40, density in 0.0f64..1.0) {
            let count = chunks_to_send(chunks, density);
            prop_assert!(count <= chunks && (count > 0 || chunks == 0));
            let exact = density * chunks as f64;
            prop_assert!(count as f64 >= exact * (1.0 - 1e-8));
            prop_assert!(count as f64 <= exact + 1.0);
        }
    }
}
