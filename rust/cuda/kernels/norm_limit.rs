//! The limit of a norm before NCCL adds those of all hosts.

/// The cap for each host's norm, so that no sum of finite norms becomes infinite: that would look
/// like a poisoned chunk.
///
/// NCCL adds in an unknown order, and rounds. If the cap is a power of two, every partial sum is at
/// most a multiple of it that a float can represent exactly, so rounding never exceeds that.
pub fn norm_limit(hosts: usize) -> f32 {
    if hosts <= 1 {
        return f32::MAX;
    }
    let exponent = 127 - hosts.next_power_of_two().trailing_zeros();
    f32::from_bits((127 + exponent) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_host_has_no_limit_but_that_of_the_type() {
        assert_eq!(norm_limit(1), f32::MAX);
        assert_eq!(norm_limit(2), 2f32.powi(126));
        assert_eq!(norm_limit(3), 2f32.powi(125));
        assert_eq!(norm_limit(1024), 2f32.powi(117));
    }

    proptest! {
        #[test]
        fn limited_norms_never_add_up_to_infinity_in_any_order(
            mut norms in prop::collection::vec(
                prop_oneof![Just(f32::MAX), 0.0f32..1.0, 1e37f32..3e38], 1..200
            ),
        ) {
            let limit = norm_limit(norms.len());
            norms.iter_mut().for_each(|norm| *norm = norm.min(limit));
            let forwards = norms.iter().fold(0.0f32, |sum, norm| sum + norm);
            let backwards = norms.iter().rev().fold(0.0f32, |sum, norm| sum + norm);
            prop_assert!(forwards.is_finite() && backwards.is_finite());
            // Pairwise, as a tree adds.
            let mut tree = norms.clone();
            while tree.len() > 1 {
                tree = tree.chunks(2).map(|pair| pair.iter().sum()).collect();
            }
            prop_assert!(tree[0].is_finite());
            // The sum still shows that a norm was capped.
            if norms.contains(&limit) {
                prop_assert!(forwards >= limit && backwards >= limit && tree[0] >= limit);
            }
        }
    }
}
