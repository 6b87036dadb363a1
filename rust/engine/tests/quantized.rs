//! Quantised gradients through whole engines: every rank gets the same bits, what is lost is what the codec
//! says, and all ranks always use the same method.

use super::gradient_case::{Case, STEPS, WARMUP, exchange, kept_of, quantizers, two_hosts};
use crate::codec::quantizer::{Levels, Quantizer, Stepping};
use crate::engine::tests::harness::Member;
use crate::gradients::Method;
use crate::simd::element::Element;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);

fn layouts() -> Vec<Vec<usize>> {
    vec![vec![0, 1], vec![0, 1, 2], vec![0, 0, 1, 1], vec![0, 1, 0, 1, 1], vec![0, 0, 0, 1, 1, 1]]
}

fn case(levels: Levels, hosts: Vec<usize>, element: Element) -> Case {
    // More than a parcel, less than a block, and an odd number of blocks.
    let buckets = vec![400_000, 37, 5000];
    let stepping = Some(Stepping::Normalized);
    Case { method: Method::Quantized(levels), hosts, element, stepping, ..two_hosts(buckets) }
}

fn numbers(case: &Case, bytes: &[u8]) -> Vec<f32> {
    match case.element {
        Element::F32 => bytes.as_chunks().0.iter().map(|one| f32::from_ne_bytes(*one)).collect(),
        Element::F16 => {
            let half = |one: &[u8; 2]| half::f16::from_ne_bytes(*one).to_f32();
            bytes.as_chunks().0.iter().map(half).collect()
        }
        _ => {
            let half = |one: &[u8; 2]| half::bf16::from_ne_bytes(*one).to_f32();
            bytes.as_chunks().0.iter().map(half).collect()
        }
    }
}

/// One step with the case's gradients; returns what all ranks got, which must be the same.
fn step(case: &Case, members: &[Member], step: u64, joined: Option<usize>) -> Vec<Vec<f32>> {
    let gradient = |rank, bucket| match joined == Some(rank) {
        true => vec![0.0; case.buckets[bucket]],
        false => case.gradient(rank, bucket, step),
    };
    let gradients: Vec<Vec<Vec<f32>>> = (0..case.hosts.len())
        .map(|rank| (0..case.buckets.len()).map(|bucket| gradient(rank, bucket)).collect())
        .collect();
    let results = exchange(case, members, &gradients, joined);
    for (rank, result) in results.iter().enumerate() {
        assert!(*result == results[0], "rank {rank} got other bits than rank 0 in step {step}");
    }
    results[0].iter().map(|bytes| numbers(case, bytes)).collect()
}

/// What all ranks together keep of a bucket, element by element; shards are in the order of local ranks.
fn kept(case: &Case, members: &[Member], bucket: usize) -> Vec<f64> {
    let mut total = vec![0.0; case.buckets[bucket]];
    for ranks in case.by_host() {
        let shards = ranks.iter().map(|rank| kept_of(&members[*rank].engine, bucket as u32 + 1));
        let residuals: Vec<f32> = shards.flat_map(|shard| shard.residual).collect();
        for (total, residual) in total.iter_mut().zip(residuals) {
            *total += f64::from(residual);
        }
    }
    total
}

/// The exact sum of the first bucket over all ranks.
fn sum_of_gradients(case: &Case, step: u64) -> Vec<f32> {
    let mut sum = vec![0.0; case.buckets[0]];
    for rank in 0..case.hosts.len() {
        for (sum, gradient) in sum.iter_mut().zip(case.gradient(rank, 0, step)) {
            *sum += gradient;
        }
    }
    sum
}

#[test]
fn with_full_feedback_nothing_is_lost_and_all_ranks_get_the_same_bits() {
    for hosts in layouts() {
        let case = case(Levels::Int8, hosts, Element::F32);
        let members = case.members();
        let mut sums: Vec<Vec<f64>> = case.buckets.iter().map(|n| vec![0.0; *n]).collect();
        for at in 0..STEPS {
            let delivered = step(&case, &members, at, None);
            for (bucket, sum) in sums.iter_mut().enumerate() {
                for (index, sum) in sum.iter_mut().enumerate() {
                    *sum += f64::from(delivered[bucket][index]);
                }
            }
        }
        for (bucket, mut delivered) in sums.into_iter().enumerate() {
            for (sum, kept) in delivered.iter_mut().zip(kept(&case, &members, bucket)) {
                *sum += kept;
            }
            for at in 0..STEPS {
                for rank in 0..case.hosts.len() {
                    let gradient = case.gradient(rank, bucket, at);
                    delivered.iter_mut().zip(gradient).for_each(|(sum, g)| *sum -= f64::from(g));
                }
            }
            let lost = delivered.iter().fold(0.0f64, |most, lost| most.max(lost.abs()));
            assert!(lost < 1e-4, "{lost} was lost of bucket {bucket} with hosts {:?}", case.hosts);
        }
    }
}

#[test]
fn every_level_delivers_the_same_bits_to_all_ranks_close_to_the_sum() {
    for (levels, stepping) in quantizers() {
        let most = match levels {
            Levels::Int8 => 1e-3,
            Levels::Int4 => 0.1,
            Levels::Int3 => 0.3,
            Levels::Quinary => 0.5,
            Levels::Ternary => 1.0,
        };
        for element in [Element::F32, Element::F16, Element::BF16] {
            let stepping = Some(stepping);
            let case = Case { stepping, ..case(levels, vec![0, 1, 0, 1, 1], element) };
            let members = case.members();
            for at in 0..STEPS {
                let delivered = step(&case, &members, at, None);
                let exact = sum_of_gradients(&case, at);
                let (mut errors, mut squares) = (0.0, 0.0);
                for (delivered, exact) in delivered[0].iter().zip(exact) {
                    errors += f64::from(delivered - exact).powi(2);
                    squares += f64::from(exact).powi(2);
                }
                let noise = errors / squares;
                assert!(noise < most, "{levels:?} as {element:?}: noise {noise} in step {at}");
            }
            for member in &members {
                assert_eq!(member.engine.gradient_counts().0.method, levels.name());
            }
        }
    }
}

#[test]
fn the_sizes_of_elements_are_the_same_on_all_hosts() {
    for levels in [Levels::Int3, Levels::Ternary] {
        let case = case(levels, vec![0, 1, 0, 1, 2, 2], Element::F32);
        let members = case.members();
        for at in 0..WARMUP + 9 {
            step(&case, &members, at, None);
        }
        let hosts = case.by_host();
        for local_rank in 0..2 {
            let sizes = |host: usize| kept_of(&members[hosts[host][local_rank]].engine, 1).sizes;
            assert!(sizes(0).iter().all(|size| *size > 0.0), "each has its size");
            assert!(sizes(0) == sizes(1) && sizes(0) == sizes(2));
        }
    }
}

#[test]
fn buckets_whose_optimizers_differ_are_sent_each_in_its_way() {
    let buckets = vec![60_000, 60_000, 60_000];
    let case = Case { stepping: None, ..case(Levels::Ternary, vec![0, 1, 1], Element::F32) };
    let case = Case { buckets, ..case };
    let members = case.members();
    for member in &members {
        member.engine.set_stepping(&[1], Some(Stepping::Normalized), LIMIT).unwrap();
        member.engine.set_stepping(&[2], Some(Stepping::Proportional), LIMIT).unwrap();
    }
    let sent = |bucket: u32| -> f64 {
        let of = |member: &Member| member.engine.gradient_counts().0.buckets[&bucket].wire_bytes;
        members.iter().map(of).sum::<u64>() as f64
    };
    for at in 0..WARMUP {
        step(&case, &members, at, None);
    }
    let before = [1, 2, 3].map(sent);
    for at in WARMUP..WARMUP + 4 {
        step(&case, &members, at, None);
    }
    let [adam, sgd, unknown] = [0, 1, 2].map(|index| sent(index as u32 + 1) - before[index]);
    assert!((adam / sgd - 1.0).abs() < 0.01, "{adam} and {sgd}");
    // Five levels where it is not known.
    let bits = |levels| Quantizer::new(levels, Stepping::Proportional).bits_per_element();
    let expected = bits(Levels::Quinary) / bits(Levels::Ternary);
    assert!((unknown / adam / expected - 1.0).abs() < 0.02, "{unknown} and {adam}");
}

#[test]
fn ranks_that_do_not_know_the_same_of_the_optimizer_send_five_levels() {
    let case = Case { stepping: None, ..case(Levels::Ternary, vec![0, 1, 1], Element::F32) };
    let members = case.members();
    let tell = |rank: usize, stepping| {
        members[rank].engine.set_stepping(&[1, 2, 3], stepping, LIMIT).unwrap();
    };
    for at in 0..WARMUP {
        step(&case, &members, at, None);
    }
    let (adam, sgd) = (Some(Stepping::Normalized), Some(Stepping::Proportional));
    for (at, (said, used)) in [
        ([adam, adam, sgd], "quinary"),
        ([adam, adam, None], "quinary"),
        ([adam, adam, adam], "ternary"),
        ([sgd, sgd, sgd], "ternary"),
    ]
    .into_iter()
    .enumerate()
    {
        said.into_iter().enumerate().for_each(|(rank, stepping)| tell(rank, stepping));
        step(&case, &members, WARMUP + at as u64, None);
        for member in &members {
            assert_eq!(member.engine.gradient_counts().0.method, used, "{said:?}");
        }
    }
}

#[test]
fn infinity_and_nan_reach_all_ranks_and_enter_nothing() {
    for (bad, levels) in [
        (f32::INFINITY, Levels::Int3),
        (f32::NEG_INFINITY, Levels::Ternary),
        (f32::NAN, Levels::Int3),
        (f32::NAN, Levels::Ternary),
    ] {
        let case = case(levels, vec![0, 1, 2], Element::F32);
        let members = case.members();
        for at in 0..WARMUP + 1 {
            step(&case, &members, at, None);
        }
        let mut gradients: Vec<Vec<Vec<f32>>> = (0..3)
            .map(|rank| (0..3).map(|bucket| case.gradient(rank, bucket, 9)).collect())
            .collect();
        gradients[1][0][1234] = bad;
        for result in exchange(&case, &members, &gradients, None) {
            let numbers = numbers(&case, &result[0]);
            assert!(!numbers[1234].is_finite(), "{bad} arrived as {}", numbers[1234]);
            assert!(numbers[300_000].is_finite(), "another block is not concerned");
        }
        for member in &members {
            let state = kept_of(&member.engine, 1);
            assert!(state.residual.iter().chain(&state.sizes).all(|kept| kept.is_finite()));
        }
        let delivered = step(&case, &members, 10, None);
        assert!(delivered[0].iter().all(|number| number.is_finite()), "the next step is sound");
    }
}

#[test]
fn a_rank_that_has_run_out_of_data_takes_part() {
    for levels in [Levels::Int3, Levels::Ternary] {
        let case = case(levels, vec![0, 1, 2], Element::F32);
        let members = case.members();
        for at in 0..STEPS {
            let joined = (at > WARMUP).then_some(2);
            step(&case, &members, at, joined);
        }
        assert_eq!(members[2].engine.gradient_counts().0.method, levels.name());
    }
}

#[test]
fn all_ranks_choose_the_same_method_however_differently_they_run() {
    let buckets = vec![300_000, 5000];
    let case = Case { method: Method::Auto, hosts: vec![0, 1, 2, 2], ..two_hosts(buckets) };
    let members = case.members();
    for at in 0..90 {
        if at % 3 == 0 {
            // Ranks are of different speed, so that they measure different times.
            std::thread::sleep(Duration::from_millis(2));
        }
        step(&case, &members, at, None);
        let chosen = |member: &Member| member.engine.chosen_method(LIMIT).unwrap();
        let chosen: Vec<_> = members.iter().map(chosen).collect();
        assert!(chosen.iter().all(|one| *one == chosen[0]), "step {at}: {chosen:?}");
    }
}

#[test]
fn in_the_warm_up_of_auto_int8_prepares_the_sizes_for_what_comes_after_it() {
    let warmup = 12;
    let case = case(Levels::Int3, vec![0, 1, 2], Element::F32);
    let case = Case { method: Method::Auto, warmup, ..case };
    let members = case.members();
    let used = || members[0].engine.gradient_counts().0.method;
    for member in &members {
        let coarse = Method::Quantized(Levels::Int3);
        member.engine.set_chosen_method(coarse, LIMIT).unwrap();
    }
    for at in 0..warmup {
        step(&case, &members, at, (at == 5).then_some(2));
        assert_eq!(used(), if at < WARMUP { "exact" } else { "int8" }, "step {at}");
    }
    let sizes = |member: &Member| kept_of(&member.engine, 1).sizes;
    let first = sizes(&members[0]);
    assert!(!first.is_empty() && first.iter().all(|size| *size > 0.0), "each has its size");
    assert!(members.iter().all(|member| sizes(member) == sizes(&members[0])));
    step(&case, &members, warmup, None);
    assert_eq!(used(), "int3");
}

#[test]
fn a_bucket_that_is_exact_again_brings_what_was_kept_of_it() {
    let case = Case { method: Method::Auto, ..case(Levels::Int3, vec![0, 1], Element::F32) };
    let members = case.members();
    let set = |method| {
        for member in &members {
            member.engine.set_chosen_method(method, LIMIT).unwrap();
        }
    };
    for at in 0..WARMUP {
        step(&case, &members, at, None);
    }
    set(Method::Quantized(Levels::Int8));
    step(&case, &members, WARMUP, None);
    let owed = kept(&case, &members, 0);
    assert!(owed.iter().any(|owed| *owed != 0.0), "rounding leaves something");
    set(Method::Exact);
    let delivered = step(&case, &members, WARMUP + 1, None);
    let exact = sum_of_gradients(&case, WARMUP + 1);
    for (index, (owed, exact)) in owed.iter().zip(exact).enumerate() {
        let expected = f64::from(exact) + owed;
        assert!((f64::from(delivered[0][index]) - expected).abs() < 1e-5, "element {index}");
    }
    assert!(kept(&case, &members, 0).iter().all(|owed| *owed == 0.0), "nothing is kept any more");
}
