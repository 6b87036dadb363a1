//! Whole exchanges of gradients, from the queue to what comes back, against the scalar reference to the bit.

use super::gradient_case::{Buckets, Case, Results, STEPS, cases, exchange, kept_of, two_hosts};
use super::gradient_reference::{Kept, expected, nothing_kept};
use super::harness::Member;
use crate::engine::shared::Gradients;
use crate::gradients::BucketState;
use proptest::test_runner::{Config, TestRunner};
use std::time::Duration;

fn check(case: &Case) {
    let members = case.members();
    check_with(case, &members, &|gradients| exchange(case, &members, gradients, None));
}

/// Compares some steps of a group with the reference; `exchange` gets the gradients of all ranks.
pub(super) fn check_with(
    case: &Case,
    members: &[Member],
    exchange: &dyn Fn(&[Buckets]) -> Results,
) {
    let mut kept = nothing_kept(case);
    for step in 0..STEPS {
        let gradients: Vec<Vec<Vec<f32>>> = (0..case.hosts.len())
            .map(|rank| (0..case.buckets.len()).map(|b| case.gradient(rank, b, step)).collect())
            .collect();
        let expected = expected(case, &mut kept, &gradients, step);
        let results = exchange(&gradients);
        for (rank, results) in results.iter().enumerate() {
            for (bucket, (results, expected)) in results.iter().zip(&expected).enumerate() {
                assert!(results == expected, "step {step}, rank {rank}, bucket {bucket}");
            }
        }
    }
    assert_kept(case, members, &kept);
}

fn assert_kept(case: &Case, members: &[Member], kept: &[Vec<Kept>]) {
    let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    for (host, ranks) in case.by_host().iter().enumerate() {
        for (local_rank, rank) in ranks.iter().enumerate().take(kept[0].len()) {
            let engine = &members[*rank].engine;
            for (bucket, kept) in kept.iter().enumerate() {
                let expected = &kept[local_rank][host];
                let BucketState { step, residual, velocity, .. } =
                    kept_of(engine, bucket as u32 + 1);
                assert_eq!(step, STEPS);
                assert_eq!(bits(&residual), bits(&expected.residual), "residual of rank {rank}");
                if case.momentum.is_some() {
                    assert_eq!(
                        bits(&velocity),
                        bits(&expected.velocity),
                        "velocity of rank {rank}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_exchange_is_to_the_bit_what_the_reference_makes_of_it() {
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&cases(), |case| {
            check(&case);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn an_exchange_of_several_parcels_loses_nothing() {
    // Three and a half parcels, one of which is larger than a parcel should be.
    let enough = crate::gradients::FULL_ELEMENTS;
    for chunk in [1 << 16, enough + 5] {
        let case = Case { chunk, ..two_hosts(vec![8 * enough, 1000]) };
        let members = case.members();
        let mut sums = vec![0.0f64; case.buckets[0]];
        let mut delivered = sums.clone();
        for step in 0..4 {
            let gradients: Vec<Vec<Vec<f32>>> =
                (0..2).map(|r| (0..2).map(|b| case.gradient(r, b, step)).collect()).collect();
            let results = exchange(&case, &members, &gradients, None);
            assert!(results[0] == results[1]);
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum += f64::from(gradients[0][0][index]) + f64::from(gradients[1][0][index]);
            }
            for (sum, bytes) in delivered.iter_mut().zip(results[0][0].as_chunks().0) {
                *sum += f64::from(f32::from_ne_bytes(*bytes));
            }
        }
        for member in &members {
            let residual = kept_of(&member.engine, 1).residual;
            for (sum, kept) in delivered.iter_mut().zip(residual) {
                *sum += f64::from(kept);
            }
        }
        for (index, (sum, results)) in sums.iter().zip(&delivered).enumerate() {
            assert!((sum - results).abs() < 1e-4, "{index}: {sum} became {results}");
        }
    }
}

#[test]
fn a_rank_that_has_run_out_of_data_sends_what_it_still_owes() {
    let case = two_hosts(vec![320, 64]);
    let members = case.members();
    let zeros: Vec<Vec<f32>> = case.buckets.iter().map(|elements| vec![0.0; *elements]).collect();
    let mut owed = [0.0f64; 2];
    let mut paid = 0.0;
    for step in 0..40 {
        let data = |rank: usize| match step {
            0..=5 => (0..2).map(|bucket| case.gradient(rank, bucket, step)).collect(),
            // The second rank has run out of data, and the gradients of the first are zero.
            _ => zeros.clone(),
        };
        let gradients: Vec<_> = (0..2).map(data).collect();
        for (owed, gradient) in owed.iter_mut().zip(&gradients) {
            *owed += gradient.iter().flatten().map(|number| f64::from(*number)).sum::<f64>();
        }
        let joined = (step > 5).then_some(1);
        let results = exchange(&case, &members, &gradients, joined);
        assert!(results[0] == results[1]);
        let numbers = results[0].iter().flat_map(|bytes| bytes.as_chunks().0);
        paid += numbers.map(|bytes| f64::from(f32::from_ne_bytes(*bytes))).sum::<f64>();
    }
    assert!((owed[0] + owed[1] - paid).abs() < 1e-2, "{owed:?} and {paid}");
}

#[test]
fn what_is_not_finite_reaches_all_ranks_and_stays_in_no_residual() {
    for (value, local_rank) in [(f32::INFINITY, 3), (f32::NAN, 319), (f32::NEG_INFINITY, 100)] {
        let case = two_hosts(vec![320, 64]);
        let members = case.members();
        for step in 0..8 {
            let mut gradients: Vec<Vec<Vec<f32>>> =
                (0..2).map(|r| (0..2).map(|b| case.gradient(r, b, step)).collect()).collect();
            if step == 4 {
                gradients[1][0][local_rank] = value;
            }
            let results = exchange(&case, &members, &gradients, None);
            assert!(results[0] == results[1]);
            let numbers: Vec<f32> = results[0][0]
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f32::from_ne_bytes(*bytes))
                .collect();
            let chunk =
                local_rank / case.chunk * case.chunk..(local_rank / case.chunk + 1) * case.chunk;
            let is_poisoned = numbers[chunk].iter().all(|number| !number.is_finite());
            assert_eq!(is_poisoned, step == 4, "step {step}: {numbers:?}");
            assert_eq!(
                numbers.iter().filter(|n| !n.is_finite()).count(),
                16 * (step == 4) as usize
            );
        }
        for member in &members {
            let residual = kept_of(&member.engine, 1).residual;
            assert!(residual.iter().all(|number| number.is_finite()));
        }
    }
}

#[test]
fn a_step_that_is_skipped_leaves_what_was_kept_as_it_was() {
    let case = two_hosts(vec![320, 64]);
    let members = case.members();
    let kept = |member: &Member| [1, 2].map(|bucket| kept_of(&member.engine, bucket).residual);
    let all = |action: &dyn Fn(&mut Gradients)| {
        for member in &members {
            member.engine.with_gradients(Duration::from_secs(10), action).unwrap();
        }
    };
    all(&|gradients| gradients.keep_for_undo(true));
    for step in 0..6 {
        let mut gradients: Vec<Vec<Vec<f32>>> =
            (0..2).map(|r| (0..2).map(|b| case.gradient(r, b, step)).collect()).collect();
        let before: Vec<_> = if step > 2 { members.iter().map(kept).collect() } else { vec![] };
        if step == 4 {
            gradients[0][1][5] = f32::NAN;
        }
        exchange(&case, &members, &gradients, None);
        // Both buckets belong to the skipped pass, even the one that was finite.
        all(&|gradients| gradients.record_step(step == 4, 0.5).unwrap());
        if step == 4 {
            let halves: Vec<_> = before
                .iter()
                .map(|both| both.clone().map(|kept| kept.iter().map(|x| x * 0.5).collect()))
                .collect::<Vec<[Vec<f32>; 2]>>();
            assert_eq!(members.iter().map(kept).collect::<Vec<_>>(), halves);
        }
    }
}
