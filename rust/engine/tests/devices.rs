//! Whole exchanges of gradients on GPUs, on ranks that are threads of one process: against the scalar
//! reference and against the engine on the CPU, to the bit.
//!
//! The GPUs are those of the stand-in (tests/gpu/standin), a libcuda and a libnccl that run on the CPU and
//! detect memory that two streams touch with no event between them. These tests are ignored by default:
//! tests/gpu/test_engine.py builds the stand-in and runs all of them.

mod failures;
mod gpu;
mod quantized;
mod standin;

use super::gradient_case::{self as cpu, Case, Results, cases, kept_of, two_hosts};
use super::gradients::check_with;
use super::harness::Member;
use crate::codec::{Momentum, Wire};
use crate::cuda::hooks::FORGETS_TO_WAIT;
use crate::engine::shared::Gradients;
use crate::gradients::BucketState;
use crate::observe::gradient_counters::Stage;
use crate::simd::element::Element;
use gpu::{Gpu, gpus};
use proptest::test_runner::{Config, TestRunner};
use standin::Standin;
use std::sync::atomic::Ordering;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

/// All ranks' gradients of a step.
fn gradients(case: &Case, step: u64) -> Vec<Vec<Vec<f32>>> {
    let of_rank = |rank| (0..case.buckets.len()).map(|b| case.gradient(rank, b, step)).collect();
    (0..case.hosts.len()).map(of_rank).collect()
}

/// Exchanges one step's buckets on all ranks' GPUs, and returns the results by rank and bucket.
fn exchange(case: &Case, members: &[Member], gpus: &[Gpu], gradients: &[Vec<Vec<f32>>]) -> Results {
    exchange_as(case, members, gpus, gradients, None)
}

/// The same, with a rank `joined` that has run out of data.
fn exchange_as(
    case: &Case,
    members: &[Member],
    gpus: &[Gpu],
    gradients: &[Vec<Vec<f32>>],
    joined: Option<usize>,
) -> Results {
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let (member, gpu) = (&members[rank], &gpus[rank]);
            let gradients = &gradients[rank];
            let is_tagged = joined != Some(rank);
            scope.spawn(move || gpu::exchange(case, member, gpu, gradients, is_tagged))
        };
        let ranks: Vec<_> = (0..members.len()).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn every_exchange_on_gpus_is_to_the_bit_what_the_reference_makes_of_it() {
    let standin = Standin::ready();
    standin.delay_streams(200);
    standin.delay_nccl(300);
    standin.set_small(usize::MAX);
    let config = Config { cases: 20, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&cases(), |case| {
            // Every chunk is a block of hundreds of threads, which the stand-in runs in sequence.
            let few = |elements: &usize| (*elements).min(30 * case.chunk + elements % case.chunk);
            let buckets = case.buckets.iter().map(few).collect();
            let case = Case { on_gpus: true, in_arena: false, buckets, ..case };
            let members = case.members();
            let gpus = gpus(&members);
            check_with(&case, &members, &|gradients| exchange(&case, &members, &gpus, gradients));
            standin.assert_clean();
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

/// Buckets that begin and end at the same place on the wire as on the CPU, so that rings are cut alike.
fn on_both(hosts: Vec<usize>, element: Element, momentum: Option<Momentum>) -> Case {
    Case {
        method: crate::gradients::Method::Chunks,
        hosts,
        buckets: vec![64 * 100, 64 * 30, 64 * 70],
        element,
        wire: Wire::F32,
        chunk: 64,
        density: cpu::DENSITY,
        fusion_bytes: 30_000,
        momentum,
        in_arena: false,
        on_gpus: false,
        stepping: None,
        warmup: cpu::WARMUP,
        seed: 11,
    }
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn gpus_give_bit_for_bit_what_the_cpu_engine_gives() {
    let standin = Standin::ready();
    standin.delay_streams(100);
    // More than the norms, which are added in the order of ranks; all else goes round the ring.
    standin.set_small(1024);
    let layouts = [vec![0, 1], vec![0, 0, 1, 1], vec![0, 1, 2], vec![0, 1, 2, 3]];
    let momenta = [None, Some(Momentum { factor: 0.9, nesterov: true })];
    let elements = [Element::F32, Element::F16, Element::BF16];
    for (index, hosts) in layouts.into_iter().enumerate() {
        for momentum in momenta {
            for element in elements {
                // 16-bit sums follow the local rank in memory and the ring in NCCL: only two ranks give
                // the same order.
                if element == Element::F32 || index == 0 {
                    check_on_both(&on_both(hosts.clone(), element, momentum), 20);
                }
            }
        }
    }
    standin.assert_clean();
}

fn check_on_both(case: &Case, steps: u64) {
    let (on_cpu, on_gpu) = (case.members(), case.members());
    let gpus = gpus(&on_gpu);
    for step in 0..steps {
        let gradients = gradients(case, step);
        let expected = cpu::exchange(case, &on_cpu, &gradients, None);
        let results = exchange(case, &on_gpu, &gpus, &gradients);
        assert_results(&results, &expected, &format!("step {step} of {case:?}"));
        assert_same_states(case, &on_cpu, &on_gpu);
    }
    // All of it would also agree with another method.
    let expected = case.method.to_string();
    for member in on_cpu.iter().chain(&on_gpu) {
        assert_eq!(member.engine.gradient_counts().0.method, expected);
    }
}

fn assert_results(results: &Results, expected: &Results, when: &str) {
    for (rank, (results, expected)) in results.iter().zip(expected).enumerate() {
        for (bucket, (results, expected)) in results.iter().zip(expected).enumerate() {
            let differs = results.iter().zip(expected).filter(|(a, b)| a != b).count();
            let first = results.iter().zip(expected).position(|(a, b)| a != b);
            assert!(
                differs == 0,
                "{differs} of {} bytes differ, from {first:?} on, in bucket {bucket} of rank {rank}, {when}",
                results.len()
            );
        }
    }
}

fn assert_same_states(case: &Case, on_cpu: &[Member], on_gpu: &[Member]) {
    let bits = |state: BucketState| {
        let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        (state.step, bits(state.residual), bits(state.velocity), bits(state.sizes))
    };
    for (rank, (cpu, gpu)) in on_cpu.iter().zip(on_gpu).enumerate() {
        for bucket in 1..=case.buckets.len() as u32 {
            let (expected, kept) = (kept_of(&cpu.engine, bucket), kept_of(&gpu.engine, bucket));
            assert_eq!(bits(kept), bits(expected), "bucket {bucket} of rank {rank}");
        }
    }
}

fn on_all<T>(members: &[Member], action: impl Fn(usize, &mut Gradients) -> T) -> Vec<T> {
    let one = |(rank, member): (usize, &Member)| {
        member.engine.with_gradients(LIMIT, |gradients| action(rank, gradients)).unwrap()
    };
    members.iter().enumerate().map(one).collect()
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn skipped_steps_new_scales_poison_and_loaded_states_are_as_on_the_cpu() {
    let standin = Standin::ready();
    standin.delay_streams(100);
    standin.set_small(1024);
    let momentum = Some(Momentum { factor: 0.9, nesterov: false });
    for (element, momentum) in [(Element::F32, momentum), (Element::BF16, None)] {
        check_in_trouble(&on_both(vec![0, 1], element, momentum));
    }
    standin.assert_clean();
}

/// Compares GPUs with the CPU while steps are skipped, scales change, gradients are not finite, and a
/// state is loaded. The case has at least three buckets, as large as those of [`on_both`].
fn check_in_trouble(case: &Case) {
    let (on_cpu, mut on_gpu) = (case.members(), case.members());
    let mut gpus_of = gpus(&on_gpu);
    for group in [&on_cpu, &on_gpu] {
        on_all(group, |_, gradients| gradients.keep_for_undo(true));
    }
    for step in 0..14 {
        let mut gradients = gradients(case, step);
        match step {
            4 => gradients[1][0][70] = f32::NAN,
            5 => gradients[0][2][4479] = f32::INFINITY,
            // Poisons enough chunks that fewer are left than should be sent.
            7 => gradients[0][1].iter_mut().step_by(64).for_each(|x| *x = f32::NEG_INFINITY),
            _ => {}
        }
        let expected = cpu::exchange(case, &on_cpu, &gradients, None);
        let results = exchange(case, &on_gpu, &gpus_of, &gradients);
        assert_results(&results, &expected, &format!("step {step} of {case:?}"));
        let (is_skipped, factor) = (matches!(step, 4 | 6), if step % 3 == 0 { 0.5 } else { 1.0 });
        for group in [&on_cpu, &on_gpu] {
            on_all(group, |_, gradients| gradients.record_step(is_skipped, factor))
                .into_iter()
                .for_each(|noted| noted.unwrap());
        }
        assert_same_states(case, &on_cpu, &on_gpu);
        if step == 10 {
            // Another group continues from the saved state.
            let kept = |bucket| {
                on_gpu.iter().map(|member| kept_of(&member.engine, bucket)).collect::<Vec<_>>()
            };
            let states: Vec<_> = (1..=case.buckets.len() as u32).map(kept).collect();
            on_gpu = case.members();
            gpus_of = gpus(&on_gpu);
            on_all(&on_gpu, |rank, gradients| {
                gradients.keep_for_undo(true);
                for (index, state) in states.iter().enumerate() {
                    gradients.load(index as u32 + 1, state[rank].clone(), true);
                }
            });
        }
    }
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_has_run_out_of_data_pays_what_it_owes_on_gpus_as_on_the_cpu() {
    let standin = Standin::ready();
    standin.set_small(1024);
    let case = on_both(vec![0, 1], Element::F32, None);
    let (on_cpu, on_gpu) = (case.members(), case.members());
    let gpus = gpus(&on_gpu);
    for step in 0..12 {
        let joined = (step > 5).then_some(1);
        let mut gradients = gradients(&case, step);
        if joined.is_some() {
            gradients[1].iter_mut().for_each(|bucket| bucket.fill(0.0));
        }
        let expected = cpu::exchange(&case, &on_cpu, &gradients, joined);
        let results = exchange_as(&case, &on_gpu, &gpus, &gradients, joined);
        assert!(results == expected, "step {step}");
    }
    assert_same_states(&case, &on_cpu, &on_gpu);
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn what_gpus_measure_is_counted_as_on_the_cpu() {
    let standin = Standin::ready();
    standin.set_small(1024);
    let case = on_both(vec![0, 0, 1, 1], Element::F32, None);
    let (on_cpu, on_gpu) = (case.members(), case.members());
    let gpus = gpus(&on_gpu);
    for step in 0..12 {
        let mut gradients = gradients(&case, step);
        if step == 11 {
            gradients[1][0][70] = f32::NAN;
        }
        cpu::exchange(&case, &on_cpu, &gradients, None);
        exchange(&case, &on_gpu, &gpus, &gradients);
    }
    for (cpu, gpu) in on_cpu.iter().zip(&on_gpu) {
        gpu.engine.shared.devices.watchdog.wait_idle(LIMIT);
        let (expected, counted) = (cpu.engine.gradient_counts().0, gpu.engine.gradient_counts().0);
        for (bucket, expected) in &expected.buckets {
            let (ratio, expected) =
                (counted.buckets[bucket].residual_ratio, expected.residual_ratio);
            assert!(expected > 0.5, "{expected}");
            assert!((ratio - expected).abs() < 1e-6 * expected, "{ratio} and {expected}");
        }
        for (stage, seconds) in Stage::ALL.iter().zip(counted.seconds) {
            // Only the host waits, and chunks are summed on the wire.
            let is_absent = [Stage::Wait, Stage::Sum].contains(stage);
            assert!(seconds > 0.0 || is_absent, "{}", stage.name());
        }
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn no_thread_waits_for_a_gpu_in_a_step() {
    let standin = Standin::ready();
    let case = Case { hosts: vec![0, 0, 1, 1], ..two_hosts(vec![3000, 500]) };
    let members = case.members();
    let gpus = gpus(&members);
    for step in 0..6 {
        let before = standin.host_waits();
        let gradients = gradients(&case, step);
        let begin =
            |rank: usize| gpu::begin(&case, &members[rank], &gpus[rank], &gradients[rank], true);
        let pending: Vec<_> = (0..members.len()).flat_map(begin).collect();
        let pending: Vec<_> = pending.into_iter().map(gpu::Pending::completed).collect();
        let waits = standin.host_waits() - before;
        pending.into_iter().for_each(|one| drop(one.content()));
        assert_eq!(waits, 0, "step {step}");
    }
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_wait_that_is_left_out_is_noticed() {
    let standin = Standin::ready();
    standin.delay_streams(500);
    let case = two_hosts(vec![3000, 500]);
    let members = case.members();
    let gpus = gpus(&members);
    exchange(&case, &members, &gpus, &gradients(&case, 0));
    standin.assert_clean();
    FORGETS_TO_WAIT.store(true, Ordering::Relaxed);
    exchange(&case, &members, &gpus, &gradients(&case, 1));
    FORGETS_TO_WAIT.store(false, Ordering::Relaxed);
    let (races, last) = standin.races();
    assert!(races > 0, "nobody has noticed");
    assert!(last.contains("stream"), "{last}");
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_may_use_several_gpus_and_the_cpu_in_one_group() {
    let standin = Standin::ready();
    let case = two_hosts(vec![3000, 500, 2000, 700]);
    let expected_by = case.members();
    let members = case.members();
    let (first, second) = (gpus(&members), gpu::more_gpus(&members));
    for step in 0..6 {
        let all = gradients(&case, step);
        let expected = cpu::exchange(&case, &expected_by, &all, None);
        let results: Results = std::thread::scope(|scope| {
            let rank = |rank: usize| {
                let (case, member, gradients) = (&case, &members[rank], &all[rank]);
                let places = [Some(&first[rank]), None, Some(&second[rank]), Some(&first[rank])];
                scope.spawn(move || gpu::exchange_on(case, member, &places, gradients))
            };
            let ranks: Vec<_> = (0..members.len()).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        if step < cpu::WARMUP {
            assert!(results == expected, "step {step}");
        }
        assert!(results[0] == results[1], "step {step}");
    }
    standin.assert_clean();
}
