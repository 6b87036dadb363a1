//! Quantised gradients on GPUs: to the bit as on the CPU, whatever happens to a step.

use super::gpu::{self, gpus};
use super::standin::Standin;
use super::{
    assert_results, assert_same_states, check_in_trouble, check_on_both, cpu, exchange,
    exchange_as, gradients,
};
use crate::codec::Momentum;
use crate::codec::quantizer::{Levels, Stepping};
use crate::engine::tests::gradient_case::{Case, quantizers, two_hosts};
use crate::gradients::Method;
use crate::observe::gradient_counters::Stage;
use crate::simd::element::Element;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

/// Buckets of many blocks, with a short one at the end; of less than a block; of as many blocks for
/// each host.
fn case(levels: Levels, hosts: Vec<usize>, element: Element) -> Case {
    let buckets = vec![40 * 640 + 321, 37, 48 * 640, 5000];
    let stepping = Some(Stepping::Normalized);
    Case { method: Method::Quantized(levels), hosts, element, stepping, ..two_hosts(buckets) }
}

/// The same for an optimizer of this kind.
fn case_for(quantizer: (Levels, Stepping), hosts: Vec<usize>, element: Element) -> Case {
    Case { stepping: Some(quantizer.1), ..case(quantizer.0, hosts, element) }
}

/// All sums are in the order of the ring, as on the CPU.
fn ready() -> Standin {
    let standin = Standin::ready();
    standin.delay_streams(100);
    standin.set_small(0);
    standin
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn two_hosts_get_bit_for_bit_what_the_cpu_engine_gives_with_all_levels_and_types() {
    let standin = ready();
    for quantizer in quantizers() {
        for element in [Element::F32, Element::F16, Element::BF16] {
            check_on_both(&case_for(quantizer, vec![0, 1], element), 6);
        }
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn more_hosts_and_ranks_get_bit_for_bit_what_the_cpu_engine_gives() {
    let standin = ready();
    // A slow NCCL: everything else is on the stream long before.
    standin.delay_nccl(300);
    for hosts in [vec![0, 1, 2], vec![0, 0, 1, 1], vec![0, 1, 2, 3], vec![0, 1, 0, 1, 1]] {
        for (quantizer, fusion_bytes) in [
            ((Levels::Int8, Stepping::Normalized), 0),
            ((Levels::Int8, Stepping::Normalized), usize::MAX),
            ((Levels::Int3, Stepping::Normalized), 0),
            ((Levels::Int3, Stepping::Proportional), usize::MAX),
            ((Levels::Ternary, Stepping::Normalized), 0),
            ((Levels::Ternary, Stepping::Normalized), usize::MAX),
            ((Levels::Ternary, Stepping::Proportional), usize::MAX),
        ] {
            let case = case_for(quantizer, hosts.clone(), Element::F32);
            check_on_both(&Case { fusion_bytes, ..case }, 4);
        }
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn many_steps_are_those_of_the_cpu_so_that_all_sizes_are_followed() {
    let standin = ready();
    for levels in [Levels::Int3, Levels::Ternary] {
        check_on_both(&case(levels, vec![0, 1, 2], Element::F32), 20);
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn skipped_steps_new_scales_poison_momentum_and_loaded_states_are_as_on_the_cpu() {
    let standin = ready();
    let momentum = Some(Momentum { factor: 0.9, nesterov: true });
    for (quantizer, element, momentum) in [
        ((Levels::Int8, Stepping::Normalized), Element::F32, None),
        ((Levels::Int4, Stepping::Proportional), Element::BF16, None),
        ((Levels::Int3, Stepping::Normalized), Element::F32, momentum),
        ((Levels::Quinary, Stepping::Normalized), Element::F16, None),
        ((Levels::Ternary, Stepping::Normalized), Element::F32, None),
        ((Levels::Ternary, Stepping::Proportional), Element::F32, momentum),
    ] {
        let buckets = vec![21 * 640, 2000, 40 * 640 + 1];
        check_in_trouble(&Case { buckets, momentum, ..case_for(quantizer, vec![0, 1], element) });
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn gradients_that_are_not_finite_on_any_of_three_hosts_are_as_on_the_cpu() {
    let standin = ready();
    for (bad, levels) in [
        (f32::NAN, Levels::Int3),
        (f32::INFINITY, Levels::Ternary),
        (f32::NEG_INFINITY, Levels::Int3),
    ] {
        let case = case(levels, vec![0, 1, 2], Element::F32);
        let (on_cpu, on_gpu) = (case.members(), case.members());
        let gpus = gpus(&on_gpu);
        for step in 0..7 {
            let mut gradients = gradients(&case, step);
            if step > cpu::WARMUP {
                // In blocks of all owners, one of them on two hosts.
                for (host, of_host) in gradients.iter_mut().enumerate() {
                    of_host[0][640 * (5 * step as usize + host)] = bad;
                    of_host[2][640 * 3] = if host == 1 { 1.0 } else { bad };
                }
            }
            let expected = cpu::exchange(&case, &on_cpu, &gradients, None);
            let results = exchange(&case, &on_gpu, &gpus, &gradients);
            assert_results(&results, &expected, &format!("step {step} with {bad}"));
            assert_same_states(&case, &on_cpu, &on_gpu);
        }
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_has_run_out_of_data_takes_part_on_gpus_as_on_the_cpu() {
    let standin = ready();
    let case = case(Levels::Quinary, vec![0, 1, 2], Element::F32);
    let (on_cpu, on_gpu) = (case.members(), case.members());
    let gpus = gpus(&on_gpu);
    for step in 0..7 {
        let joined = (step > 3).then_some(2);
        let mut gradients = gradients(&case, step);
        if joined.is_some() {
            gradients[2].iter_mut().for_each(|bucket| bucket.fill(0.0));
        }
        let expected = cpu::exchange(&case, &on_cpu, &gradients, joined);
        let results = exchange_as(&case, &on_gpu, &gpus, &gradients, joined);
        assert_results(&results, &expected, &format!("step {step}"));
    }
    assert_same_states(&case, &on_cpu, &on_gpu);
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn what_gpus_measure_of_quantised_gradients_is_counted() {
    let standin = ready();
    // Enough blocks that both hosts have some whose norms are taken.
    let buckets = vec![200 * 640];
    let case = Case { buckets, ..case(Levels::Int3, vec![0, 0, 1, 1], Element::F32) };
    let (on_cpu, on_gpu) = (case.members(), case.members());
    let gpus = gpus(&on_gpu);
    for step in 0..6 {
        let gradients = gradients(&case, step);
        cpu::exchange(&case, &on_cpu, &gradients, None);
        exchange(&case, &on_gpu, &gpus, &gradients);
    }
    for (cpu, gpu) in on_cpu.iter().zip(&on_gpu) {
        gpu.engine.shared.devices.watchdog.wait_idle(LIMIT);
        let (expected, counted) = (cpu.engine.gradient_counts().0, gpu.engine.gradient_counts().0);
        let (ratio, expected) = (counted.buckets[&1].residual_ratio, &expected.buckets[&1]);
        assert!(expected.residual_ratio > 0.1, "{}", expected.residual_ratio);
        let differs = (ratio - expected.residual_ratio).abs() / expected.residual_ratio;
        assert!(differs < 1e-5, "{ratio} and {}", expected.residual_ratio);
        for (stage, seconds) in Stage::ALL.iter().zip(counted.seconds) {
            // Only the host waits, and nothing is chosen by norms.
            let is_absent = [Stage::Wait, Stage::Accumulate, Stage::Norms].contains(stage);
            assert!(seconds > 0.0 || is_absent, "{}", stage.name());
        }
    }
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn no_thread_waits_for_a_gpu_in_a_quantised_step() {
    let standin = Standin::ready();
    let case = case(Levels::Int4, vec![0, 0, 1, 1], Element::F32);
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
