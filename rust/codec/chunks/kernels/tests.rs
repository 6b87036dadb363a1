//! Compares every kernel, with every instruction set of this CPU, with the reference bit by bit, and
//! checks the properties that the method relies on.

use super::accumulate::accumulate_with;
use super::momentum::add_velocity_with;
use super::pack::pack_with;
use super::partial_sum::add_partial_sum_with;
use super::residual::return_hop_error_with;
use super::unpack::unpack_with;
use crate::codec::chunks::reference;
use crate::codec::samples::{
    ELEMENTS, OwnedGradient, any_finite, any_magnitude, available_sets, bits, gradient, lengths,
    momenta, numbers,
};
use crate::codec::{Gradient, Momentum, Wire, fill, scale_for};
use half::f16;
use proptest::prelude::*;

/// Gradient, residual and velocity of one chunk.
fn chunks() -> impl Strategy<Value = (Vec<f32>, Vec<f32>, Vec<f32>)> {
    lengths().prop_flat_map(|length| (gradient(length), numbers(length), numbers(length)))
}

proptest! {
    #[test]
    fn accumulation_is_that_of_the_reference(
        (gradient, residual, velocity) in chunks(), momentum in momenta()
    ) {
        for element in ELEMENTS {
            let gradient = OwnedGradient::new(element, &gradient);
            let (mut residual_then, mut velocity_then) = (residual.clone(), velocity.clone());
            let norms_then = reference::accumulate(
                &gradient.numbers(), &mut residual_then, &mut velocity_then, momentum,
            );
            for set in available_sets() {
                let (mut gradient, mut residual) = (gradient.clone(), residual.clone());
                let (mut velocity, mut undo) = (velocity.clone(), vec![0.0; 2 * residual.len()]);
                let momentum = momentum.map(|momentum| (&mut velocity[..], momentum));
                let is_moving = momentum.is_some();
                let norms = accumulate_with(
                    set, &mut gradient.borrow(), &mut residual, momentum, &mut undo,
                );
                prop_assert_eq!(
                    bits(&[norms.gradient, norms.residual]), bits(&[norms_then.0, norms_then.1]),
                    "{:?} {:?} {:?} {:?}", set, element, norms, norms_then
                );
                prop_assert_eq!(bits(&residual), bits(&residual_then), "{:?} {:?}", set, element);
                if is_moving {
                    prop_assert_eq!(bits(&velocity), bits(&velocity_then));
                }
                if norms.residual.is_finite() {
                    prop_assert!(gradient.numbers().iter().all(|x| x.to_bits() == 0));
                }
            }
        }
    }

    #[test]
    fn a_dense_step_moves_the_velocity_but_where_it_would_not_be_finite(
        (gradient, _, velocity) in chunks(), momentum in momenta()
    ) {
        let Some(momentum) = momentum else { return Ok(()) };
        for element in ELEMENTS {
            let gradient = OwnedGradient::new(element, &gradient);
            let (mut gradient_then, mut velocity_then) = (gradient.numbers(), velocity.clone());
            for (gradient, velocity) in gradient_then.iter_mut().zip(&mut velocity_then) {
                let moved = momentum.factor * *velocity + *gradient;
                let corrected = match momentum.nesterov {
                    true => *gradient + momentum.factor * moved,
                    false => moved,
                };
                *velocity = if corrected.is_finite() { moved } else { *velocity };
                *gradient = reference::rounded_to(element, corrected);
            }
            for set in available_sets() {
                let (mut gradient, mut velocity) = (gradient.clone(), velocity.clone());
                add_velocity_with(set, &mut gradient.borrow(), &mut velocity, momentum);
                prop_assert_eq!(gradient.bits(), bits(&gradient_then), "{:?}", set);
                prop_assert_eq!(bits(&velocity), bits(&velocity_then), "{:?}", set);
                prop_assert!(velocity.iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn packing_loses_nothing_and_is_that_of_the_reference(
        residual in lengths().prop_flat_map(numbers), more in any_magnitude(), offset in 0usize..3
    ) {
        for wire in Wire::ALL {
            // The sum includes the other ranks' norms.
            let norm = reference::norm(&residual).min(f32::MAX);
            let scale = scale_for((norm + more).min(f32::MAX), wire);
            let (mut residual_then, mut sent_then) = (residual.clone(), Vec::new());
            reference::pack(&mut residual_then, scale, wire, &mut sent_then);
            for set in available_sets() {
                let mut after = residual.clone();
                let mut memory = vec![0xa5; offset + sent_then.len() + 1];
                let sent = &mut memory[offset..offset + sent_then.len()];
                pack_with(set, &mut after, scale, wire, sent);
                prop_assert_eq!(&*sent, &sent_then[..], "{:?} {:?}", set, wire);
                prop_assert_eq!(bits(&after), bits(&residual_then), "{:?} {:?}", set, wire);
                for (index, before) in residual.iter().enumerate() {
                    assert_nothing_lost(*before, reference::read(wire, sent, index), scale, after[index]);
                }
                prop_assert_eq!(memory[offset + sent_then.len()], 0xa5);
            }
        }
    }

    #[test]
    fn unpacking_is_that_of_the_reference(
        sums in lengths().prop_flat_map(gradient), sum in any_magnitude(), offset in 0usize..3
    ) {
        for wire in Wire::ALL {
            let scale = scale_for(sum, wire);
            let mut memory = vec![0; offset];
            sums.iter().for_each(|sum| reference::write(wire, &mut memory, *sum));
            let bytes = &memory[offset..];
            for element in ELEMENTS {
                let quotients = (0..sums.len()).map(|i| reference::read(wire, bytes, i) / scale);
                let then: Vec<f32> =
                    quotients.map(|sum| reference::rounded_to(element, sum)).collect();
                for set in available_sets() {
                    let mut to = OwnedGradient::new(element, &vec![7.0; sums.len()]);
                    unpack_with(set, bytes, wire, scale, &mut to.borrow());
                    prop_assert_eq!(to.bits(), bits(&then), "{:?} {:?}", set, wire);
                }
            }
        }
    }

    #[test]
    fn a_hop_is_that_of_the_reference_and_loses_nothing(
        (incoming, own, kept) in chunks(), offset in 0usize..3
    ) {
        for wire in Wire::ALL {
            let (mut incoming_bytes, mut own_bytes) = (vec![0; offset], Vec::new());
            incoming.iter().for_each(|x| reference::write(wire, &mut incoming_bytes, *x));
            own.iter().for_each(|x| reference::write(wire, &mut own_bytes, *x));
            for set in available_sets() {
                let (mut sum, mut rounded_off) = (own_bytes.clone(), kept.clone());
                add_partial_sum_with(set, &mut sum, &incoming_bytes[offset..], wire, &mut rounded_off);
                for index in 0..own.len() {
                    let incoming = reference::read(wire, &incoming_bytes[offset..], index);
                    let own = reference::read(wire, &own_bytes, index);
                    let (sum_then, lost) = reference::hop_sum(wire, incoming, own);
                    let sum = reference::read(wire, &sum, index);
                    prop_assert_eq!(bits(&[sum]), bits(&[sum_then]), "{} + {}", incoming, own);
                    let lost = if wire == Wire::F32 { kept[index] } else { lost };
                    prop_assert_eq!(rounded_off[index], lost);
                }
            }
        }
    }

    #[test]
    fn what_hops_lost_comes_back_to_the_residual(
        (rounded_off, residual, _) in chunks(), sum in any_magnitude()
    ) {
        let scale = scale_for(sum, Wire::F16);
        let then: Vec<f32> = residual.iter().zip(&rounded_off).map(|(r, x)| r + x / scale).collect();
        for set in available_sets() {
            let mut residual = residual.clone();
            return_hop_error_with(set, &mut residual, &rounded_off, scale);
            prop_assert_eq!(bits(&residual), bits(&then), "{:?}", set);
        }
    }
}

/// All of these have few enough digits, and are close enough to each other, for an f64.
fn assert_nothing_lost(before: f32, sent: f32, scale: f32, after: f32) {
    let sent_back = f64::from(sent) / f64::from(scale);
    let together = sent_back + f64::from(after);
    assert_eq!(together, f64::from(before), "sent {sent}, scale {scale}, kept {after}");
    // Nor does the sum of the two hide anything that is kept.
    assert_eq!(together - sent_back, f64::from(after));
}

/// Numbers with every exponent, and mantissas at or next to a tie or a carry.
fn telling_numbers() -> Vec<f32> {
    let mut mantissas = vec![0, 0x7f_ffff, 0x7f_f000, 0x7f_8000, 0x55_5555];
    for bit in 0..23 {
        let tie: u32 = 1 << bit;
        mantissas.extend([tie, tie - 1, tie + 1, (tie * 3) & 0x7f_ffff, 0x7f_ffff - tie]);
    }
    let exponents = (0..255).chain(256..511);
    let bits = exponents.flat_map(|top| mantissas.iter().map(move |low| (top << 23) | low));
    bits.map(f32::from_bits).collect()
}

#[test]
fn numbers_of_every_size_are_packed_without_loss_at_every_scale() {
    let all = telling_numbers();
    let exponents = (-126..=126).step_by(9).chain([-113, -112, 14, 15, 125]);
    for exponent in exponents {
        let scale = 2f32.powi(exponent);
        // Those whose norm allows this scale: the sum is at most 32768.
        let largest = 32768.0 / f64::from(scale);
        let fit = |number: &&f32| f64::from(number.abs()) <= largest;
        let numbers: Vec<f32> = all.iter().filter(fit).copied().collect();
        for set in available_sets() {
            for wire in Wire::ALL {
                let scale = if wire == Wire::F16 { scale } else { 1.0 };
                let (mut after, mut sent) = (numbers.clone(), vec![0; numbers.len() * 4]);
                let sent = &mut sent[..numbers.len() * wire.element_bytes()];
                pack_with(set, &mut after, scale, wire, sent);
                for (index, before) in numbers.iter().enumerate() {
                    let sent = reference::read(wire, sent, index);
                    assert!(sent.is_finite() && after[index].is_finite(), "{before} by {scale}");
                    assert_nothing_lost(*before, sent, scale, after[index]);
                }
            }
        }
    }
}

/// Adds a sample of half-precision floats to every one; the sums are exact in f64.
#[test]
fn a_hop_in_half_precision_loses_nothing() {
    let finite = |bits: &u16| f16::from_bits(*bits).is_finite();
    let all: Vec<u16> = (0..=u16::MAX).filter(finite).collect();
    for other in all.iter().step_by(997).chain(&[1, 0x8001, 0x3ff, 0x400, 0x7bff, 0xfbff]) {
        let incoming: Vec<u8> = all.iter().flat_map(|_| other.to_ne_bytes()).collect();
        for set in available_sets() {
            let mut own: Vec<u8> = all.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
            let mut rounded_off = vec![0.0; all.len()];
            add_partial_sum_with(set, &mut own, &incoming, Wire::F16, &mut rounded_off);
            let other = f16::from_bits(*other).to_f64_const();
            for (index, bits) in all.iter().enumerate() {
                let exact = other + f16::from_bits(*bits).to_f64_const();
                let sum = f64::from(reference::read(Wire::F16, &own, index));
                let overflows = exact.abs() >= 65520.0;
                assert_eq!(sum.is_infinite(), overflows, "{exact}");
                let expected = if overflows { 0.0 } else { exact - sum };
                assert_eq!(f64::from(rounded_off[index]), expected, "{other} and {bits:#x}");
            }
        }
    }
}

#[test]
fn one_bad_number_anywhere_leaves_residual_and_velocity_as_they_were() {
    let length = 70;
    let (residual, velocity) = (vec![0.1; length], vec![-3.0; length]);
    let bad =
        [(f32::NAN, f32::NAN), (f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, f32::INFINITY)];
    let momenta = [None, Some(false), Some(true)];
    for set in available_sets() {
        for element in ELEMENTS {
            for (place, (bad, sum)) in (0..length).flat_map(|place| bad.map(|bad| (place, bad))) {
                for nesterov in momenta {
                    let mut gradient = vec![0.7; length];
                    gradient[place] = bad;
                    let mut gradient = OwnedGradient::new(element, &gradient);
                    let (mut residual_now, mut velocity_now) = (residual.clone(), velocity.clone());
                    let momentum = nesterov.map(|nesterov| Momentum { factor: 0.9, nesterov });
                    let norms = accumulate_with(
                        set,
                        &mut gradient.borrow(),
                        &mut residual_now,
                        momentum.map(|momentum| (&mut velocity_now[..], momentum)),
                        &mut vec![0.0; 2 * length],
                    );
                    assert_eq!(bits(&[norms.residual]), bits(&[sum]), "{bad} at {place}");
                    assert_eq!(residual_now, residual);
                    assert_eq!(velocity_now, velocity);
                }
            }
        }
    }
}

#[test]
fn a_sum_that_overflows_is_clamped_and_its_chunk_is_not_poisoned() {
    for set in available_sets() {
        let mut gradient = vec![3e38; 100];
        let mut residual = vec![-1e38; 100];
        let norms = accumulate_with(
            set,
            &mut Gradient::F32(&mut gradient),
            &mut residual,
            None,
            &mut [0.0; 100],
        );
        assert_eq!((norms.gradient, norms.residual), (f32::MAX, f32::MAX));
        assert_eq!(residual, vec![3e38 - 1e38; 100]);
        // But a number that overflows itself poisons it.
        let mut gradient = vec![0.0; 100];
        gradient[33] = f32::MAX;
        let norms = accumulate_with(
            set,
            &mut Gradient::F32(&mut gradient),
            &mut residual,
            None,
            &mut [0.0; 100],
        );
        assert_eq!(norms.residual, f32::INFINITY);
        assert_eq!(residual, vec![3e38 - 1e38; 100]);
    }
}

#[test]
fn a_poisoned_gradient_is_filled_in_its_own_type() {
    for element in ELEMENTS {
        for value in [f32::INFINITY, f32::NAN, 0.0] {
            let mut gradient = OwnedGradient::new(element, &[1.0; 5]);
            fill(&mut gradient.borrow(), value);
            assert_eq!(gradient.bits(), bits(&[value; 5]));
        }
    }
}

proptest! {
    #[test]
    fn a_velocity_that_is_not_finite_never_hides_behind_a_finite_residual(
        gradient in any_finite(), velocity in any_finite(), factor in 0.0f32..=1.0,
        nesterov in any::<bool>(),
    ) {
        let (velocity, corrected) = Momentum { factor, nesterov }.apply(gradient, velocity);
        prop_assert!(velocity.is_finite() || !corrected.is_finite());
    }
}
