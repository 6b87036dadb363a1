//! Whatever goes wrong on a GPU is an error that says so, on every rank, and never a hang or a panic.

use super::gpu::{self, Gpu, Pending, bring, call_for, gpus, submit, submit_brought};
use super::standin::Standin;
use super::{exchange, gradients};
use crate::codec::quantizer::Levels;
use crate::collective::call::{Call, CollectiveKind};
use crate::collective::types::DataType;
use crate::engine::tests::gradient_case::{self as cpu, Case, kept_of, two_hosts};
use crate::engine::tests::harness::{Member, call};
use crate::error::Result;
use crate::gradients::{BucketState, Method};
use std::time::{Duration, Instant};

const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
const CUDA_ERROR_LAUNCH_FAILED: i32 = 719;
const NCCL_REMOTE_ERROR: i32 = 6;
/// The timeout of calls that should time out.
const SHORT: Duration = Duration::from_millis(700);
const AN_HOUR: Duration = Duration::from_secs(3600);
/// Nothing here may take longer.
const BOUND: Duration = Duration::from_secs(15);

/// A group of two hosts that has made its first exchanges: the communicators are there, and the next
/// one is compressed.
fn group() -> (Case, Vec<Member>, Vec<Gpu>) {
    group_of(two_hosts(vec![3000]))
}

fn group_of(case: Case) -> (Case, Vec<Member>, Vec<Gpu>) {
    let members = case.members();
    let gpus = gpus(&members);
    for step in 0..=cpu::WARMUP {
        exchange(&case, &members, &gpus, &gradients(&case, step));
    }
    // An error later is not about these.
    members.iter().for_each(|member| member.engine.shared.devices.watchdog.wait_idle(BOUND));
    (case, members, gpus)
}

/// The same with quantised gradients.
fn quantized(buckets: Vec<usize>) -> Case {
    Case { method: Method::Quantized(Levels::Int3), ..two_hosts(buckets) }
}

/// Begins an exchange of the only bucket on some ranks.
fn begin(case: &Case, members: &[Member], gpus: &[Gpu], timeout: Duration) -> Vec<Result<Pending>> {
    begin_after(case, members, gpus, timeout, || ())
}

/// The same, calling `before` after the tensors are on the GPUs and before the calls.
fn begin_after(
    case: &Case,
    members: &[Member],
    gpus: &[Gpu],
    timeout: Duration,
    before: impl FnOnce(),
) -> Vec<Result<Pending>> {
    let content = |rank| cpu::encode(case.element, &case.gradient(rank, 0, 9));
    let tensors: Vec<_> =
        gpus.iter().enumerate().map(|(rank, gpu)| bring(gpu, content(rank))).collect();
    before();
    let begin = |((member, gpu), tensor): ((&Member, &Gpu), _)| {
        let call = Call { timeout, ..call_for(case, 0, true) };
        let pending = submit_brought(gpu, member, call, tensor);
        member.engine.end_of_pass();
        pending
    };
    members.iter().zip(gpus).zip(tensors).map(begin).collect()
}

/// The error that every later call on this rank gets, once there is one.
fn later_error(member: &Member) -> String {
    let start = Instant::now();
    loop {
        if let Err(error) = member.engine.check_usable() {
            return error.to_string();
        }
        assert!(start.elapsed() < BOUND, "the group still goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn assert_has(text: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

/// Ends a group, which must not take long whatever it is doing.
fn end(members: Vec<Member>, pending: Vec<Result<Pending>>) {
    // Work on a stream may still use them: torch's allocator keeps such memory too.
    std::mem::forget(pending);
    let start = Instant::now();
    drop(members);
    assert!(start.elapsed() < 2 * BOUND);
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn an_error_that_nccl_finds_later_fails_the_group_with_rank_operation_and_number() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    standin.freeze(gpus[0].engine_stream.raw(), true);
    let pending = begin(&case, &members, &gpus, BOUND);
    for one in pending.iter().flatten() {
        assert_eq!(one.outcome(), None);
    }
    let communicator = members[0].engine.shared.devices.watchdog.communicators()[0].handle();
    standin.set_async_error(communicator, NCCL_REMOTE_ERROR);
    let text = later_error(&members[0]);
    assert_has(&text, &["rank 0", "all_reduce of 3000 elements", "#4", "status 6", "GPU 0"]);
    let text = later_error(&members[1]);
    assert_has(&text, &["lost rank 0", "status 6"]);
    standin.freeze(gpus[0].engine_stream.raw(), false);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_gpu_that_stands_still_is_late_at_the_deadline_and_ends_no_later_than_its_group() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    standin.freeze(gpus[1].engine_stream.raw(), true);
    let pending = begin(&case, &members, &gpus, SHORT);
    for member in &members {
        // The rank that notices first tells the other.
        let text = later_error(member);
        assert_has(&text, &["Timed out after 0.7 s", "all_reduce of 3000 elements", "#4"]);
    }
    standin.freeze(gpus[1].engine_stream.raw(), false);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_group_that_is_destroyed_while_a_gpu_stands_still_does_not_hang() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    standin.freeze(gpus[0].engine_stream.raw(), true);
    let pending = begin(&case, &members, &gpus, AN_HOUR);
    end(members, pending);
    standin.freeze(gpus[0].engine_stream.raw(), false);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_is_gone_while_its_gpu_is_waited_for_is_named_at_once() {
    let standin = Standin::ready();
    let (case, mut members, gpus) = group();
    standin.freeze(gpus[1].engine_stream.raw(), true);
    let pending = begin(&case, &members, &gpus, AN_HOUR);
    for one in pending.iter().flatten() {
        assert_eq!(one.outcome(), None);
    }
    let gone = members.pop().unwrap();
    gone.engine.abort("out of memory");
    let start = Instant::now();
    let leaving = std::thread::spawn(move || drop(gone));
    let text = later_error(&members[0]);
    // NCCL may notice it first.
    assert_has(&text, &["rank 1", "#4"]);
    assert!(start.elapsed() < Duration::from_secs(5));
    standin.freeze(gpus[1].engine_stream.raw(), false);
    leaving.join().unwrap();
    end(members, pending);
    standin.clear();
}

/// Runs `waits` while the other rank is lost, and returns its result.
fn while_a_rank_is_lost(gone: Member, waits: impl FnOnce() -> String) -> String {
    let leaving = std::thread::spawn(move || {
        // By then the other rank is waiting.
        std::thread::sleep(Duration::from_millis(300));
        gone.engine.abort("out of memory");
        gone
    });
    let start = Instant::now();
    let text = waits();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    drop(leaving.join().unwrap());
    text
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_is_gone_is_named_at_once_while_a_gpu_is_waited_for_to_save_a_state() {
    let standin = Standin::ready();
    let (case, mut members, gpus) = group();
    standin.freeze(gpus[0].engine_stream.raw(), true);
    let pending = begin(&case, &members, &gpus, AN_HOUR);
    assert!(pending.iter().flatten().all(|one| one.outcome().is_none()));
    let text = while_a_rank_is_lost(members.pop().unwrap(), || {
        members[0].engine.bucket_state(1, u64::MAX, AN_HOUR).unwrap_err().to_string()
    });
    assert_has(&text, &["rank 1", "#4"]);
    standin.freeze(gpus[0].engine_stream.raw(), false);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_is_gone_is_named_at_once_while_a_loaded_state_waits_for_its_gpu() {
    let standin = Standin::ready();
    let (case, mut members, gpus) = group();
    let state = kept_of(&members[0].engine, 1);
    standin.freeze(gpus[0].engine_stream.raw(), true);
    let mut pending = begin(&case, &members, &gpus, AN_HOUR);
    assert!(pending.iter().flatten().all(|one| one.outcome().is_none()));
    // As if it had been saved just now.
    let state = BucketState { step: state.step + 1, ..state };
    members[0].engine.shared.core().gradients.load(1, state, true);
    let waiting = begin(&case, &members, &gpus, AN_HOUR);
    let text = while_a_rank_is_lost(members.pop().unwrap(), || {
        waiting[0].as_ref().unwrap().outcome().unwrap()
    });
    assert_has(&text, &["rank 1", "#5"]);
    standin.freeze(gpus[0].engine_stream.raw(), false);
    pending.extend(waiting);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_is_gone_is_named_at_once_while_loaded_sizes_wait_for_their_gpu() {
    let standin = Standin::ready();
    let (case, mut members, gpus) = group_of(quantized(vec![3000]));
    // Saved during the warm-up: the next exchange is exact, and needs nothing but the sizes.
    let sizes = kept_of(&members[0].engine, 1).sizes;
    assert!(sizes.iter().any(|size| *size > 0.0));
    let state = BucketState { step: 1, sizes, ..BucketState::default() };
    standin.freeze(gpus[0].engine_stream.raw(), true);
    let mut pending = begin(&case, &members, &gpus, AN_HOUR);
    assert!(pending.iter().flatten().all(|one| one.outcome().is_none()));
    for member in &members {
        member.engine.shared.core().gradients.load(1, state.clone(), true);
    }
    let waiting = begin(&case, &members, &gpus, AN_HOUR);
    let text = while_a_rank_is_lost(members.pop().unwrap(), || {
        waiting[0].as_ref().unwrap().outcome().unwrap()
    });
    assert_has(&text, &["rank 1", "#5"]);
    standin.freeze(gpus[0].engine_stream.raw(), false);
    pending.extend(waiting);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_rank_that_is_gone_is_named_at_once_while_nccl_takes_its_time() {
    let standin = Standin::ready();
    let (case, mut members, gpus) = group();
    standin.delay_nccl(10_000_000);
    let pending = begin(&case, &members, &gpus, AN_HOUR);
    let text = while_a_rank_is_lost(members.pop().unwrap(), || {
        pending[0].as_ref().unwrap().outcome().unwrap()
    });
    assert_has(&text, &["lost rank 1", "#4"]);
    standin.delay_nccl(0);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_gpu_is_free_again_when_another_rank_of_its_host_is_lost() {
    let standin = Standin::ready();
    let (case, mut members, gpus) =
        group_of(Case { hosts: vec![0, 0, 1, 1], ..two_hosts(vec![3000]) });
    // On the other ranks' streams, work within the host comes before work across hosts.
    standin.freeze(gpus[1].engine_stream.raw(), true);
    let pending = begin(&case, &members, &gpus, AN_HOUR);
    assert!(pending.iter().flatten().all(|one| one.outcome().is_none()));
    let gone = members.remove(1);
    gone.engine.abort("out of memory");
    let leaving = std::thread::spawn(move || drop(gone));
    for (member, gpu) in members.iter().zip([&gpus[0], &gpus[2], &gpus[3]]) {
        later_error(member);
        gpu.engine_stream.synchronize(BOUND).unwrap();
    }
    standin.freeze(gpus[1].engine_stream.raw(), false);
    leaving.join().unwrap();
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn nccl_that_does_not_get_something_onto_its_stream_is_late_at_the_deadline() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    standin.delay_nccl(10_000_000);
    let pending = begin(&case, &members, &gpus, SHORT);
    for member in &members {
        let text = later_error(member);
        assert_has(&text, &["Timed out after 0.7 s", "all_reduce of 3000 elements", "#4"]);
    }
    standin.delay_nccl(0);
    end(members, pending);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_group_that_ends_well_leaves_nccl_in_order_and_else_aborts() {
    let standin = Standin::ready();
    let before = standin.aborted();
    let (case, members, gpus) = group();
    standin.freeze(gpus[1].stream.raw(), true);
    let pending = begin(&case, &members, &gpus, BOUND);
    assert!(pending.iter().flatten().all(|one| one.outcome().is_none()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            standin.freeze(gpus[1].stream.raw(), false);
        });
        // It has the time to finish the work on its streams.
        drop(members);
    });
    assert_eq!(standin.aborted(), before);
    pending.into_iter().for_each(|one| drop(one.unwrap().content()));
    standin.assert_clean();

    let (_, members, _) = group();
    standin.fail_next("ncclCommFinalize", NCCL_REMOTE_ERROR);
    drop(members);
    assert_eq!(standin.aborted(), before + 1);
    let (_, members, _) = group();
    members[0].engine.abort("out of memory");
    drop(members);
    assert!(standin.aborted() > before + 1);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_call_of_the_driver_or_of_nccl_that_fails_is_an_error_with_its_name_on_every_rank() {
    let standin = Standin::ready();
    let chunks = || two_hosts(vec![3000]);
    // Both hosts own equally many blocks of the second.
    let quantized = || self::quantized(vec![3000]);
    let even = || self::quantized(vec![32 * 640]);
    for (function, code, case) in [
        ("cuLaunchKernel", CUDA_ERROR_LAUNCH_FAILED, chunks()),
        ("ncclAllReduce", NCCL_REMOTE_ERROR, chunks()),
        ("cuEventRecord", CUDA_ERROR_LAUNCH_FAILED, chunks()),
        ("cuStreamWaitEvent", CUDA_ERROR_LAUNCH_FAILED, chunks()),
        ("cuEventCreate", CUDA_ERROR_OUT_OF_MEMORY, chunks()),
        ("cuLaunchKernel", CUDA_ERROR_LAUNCH_FAILED, quantized()),
        ("ncclGroupStart", NCCL_REMOTE_ERROR, quantized()),
        ("ncclSend", NCCL_REMOTE_ERROR, quantized()),
        ("ncclRecv", NCCL_REMOTE_ERROR, quantized()),
        ("ncclGroupEnd", NCCL_REMOTE_ERROR, quantized()),
        ("ncclAllGather", NCCL_REMOTE_ERROR, even()),
    ] {
        let (case, members, gpus) = group_of(case);
        let fails = || standin.fail_next(function, code);
        let begun = begin_after(&case, &members, &gpus, SHORT, fails);
        // The rank that it happens to reports it, at the call or later to all ranks.
        let mut texts: Vec<String> = Vec::new();
        for one in &begun {
            match one {
                Ok(pending) => texts.extend(pending.outcome()),
                Err(error) => texts.push(error.to_string()),
            }
        }
        texts.extend(
            members.iter().filter_map(|m| m.engine.check_usable().err()).map(|e| e.to_string()),
        );
        assert!(texts.iter().any(|text| text.contains(function)), "{function}: {texts:?}");
        // No GPU waits for work that another never enqueued.
        gpus.iter().for_each(|gpu| gpu.engine_stream.synchronize(BOUND).unwrap());
        end(members, begun);
        standin.clear();
    }
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_gpu_that_one_rank_cannot_use_is_told_to_all_and_the_group_goes_on() {
    let standin = Standin::ready();
    let case = two_hosts(vec![3000]);
    let members = case.members();
    let gpus: Vec<_> = (0..2).map(Gpu::new).collect();
    standin.fail_next("cuModuleLoadData", CUDA_ERROR_OUT_OF_MEMORY);
    for (gpu, member) in gpus.iter().zip(&members) {
        gpu.open(member).unwrap();
    }
    let told = |fails: &dyn Fn(), parts: &[&str]| {
        for one in begin_after(&case, &members, &gpus, AN_HOUR, fails) {
            assert_has(&one.unwrap().outcome().unwrap(), parts);
        }
    };
    told(&|| (), &["rank 0", "cannot take part: GPU 0 cannot be used: cuModuleLoadData"]);
    // Opening it again tries again.
    gpus[0].open(&members[0]).unwrap();
    let fails = || standin.fail_next("cuEventRecord", CUDA_ERROR_LAUNCH_FAILED);
    told(&fails, &["rank 0", "cannot take part: GPU 0: cuEventRecord"]);
    exchange(&case, &members, &gpus, &gradients(&case, 0));

    // A GPU that cannot be used does not keep others from being used.
    let (bad, good): (Vec<_>, Vec<_>) = (2..4).map(|n| (Gpu::new(n), Gpu::new(n + 2))).unzip();
    standin.fail_next("cuModuleLoadData", CUDA_ERROR_OUT_OF_MEMORY);
    for gpus in [&bad, &good] {
        for (gpu, member) in gpus.iter().zip(&members) {
            gpu.open(member).unwrap();
        }
    }
    exchange(&case, &members, &good, &gradients(&case, 1));
    drop(members);
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn ranks_that_cannot_meet_in_nccl_are_told_why() {
    let standin = Standin::ready();
    for (function, is_at_all) in [("ncclGetUniqueId", true), ("ncclCommInitRankConfig", false)] {
        let case = two_hosts(vec![3000]);
        let members = case.members();
        let gpus = gpus(&members);
        standin.fail_next(function, NCCL_REMOTE_ERROR);
        let begun = begin(&case, &members, &gpus, BOUND);
        let texts: Vec<_> =
            begun.iter().map(|one| one.as_ref().unwrap().outcome().unwrap()).collect();
        // All see that there is no id; a rank that cannot join tells the others.
        assert!(texts.iter().all(|text| text.contains(function)), "{texts:?}");
        assert!(
            !is_at_all || texts.iter().all(|text| text.contains("GPU path of rank 0")),
            "{texts:?}"
        );
        end(members, begun);
        standin.clear();
    }
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn memory_that_is_not_there_is_an_error() {
    let standin = Standin::ready();
    let case = two_hosts(vec![3000]);
    let members = case.members();
    let gpus = gpus(&members);
    for step in 0..cpu::WARMUP {
        exchange(&case, &members, &gpus, &gradients(&case, step));
    }
    let fails = || standin.fail_next("cuMemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
    let begun = begin_after(&case, &members, &gpus, BOUND, fails);
    let texts: Vec<_> = begun.iter().filter_map(|one| one.as_ref().unwrap().outcome()).collect();
    assert!(texts.iter().any(|text| text.contains("cuMemAllocAsync")), "{texts:?}");
    end(members, begun);
    standin.clear();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn an_exchange_goes_on_while_another_thread_captures_a_graph() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    let pending = begin(&case, &members, &gpus, BOUND);
    // A different stream than the call's.
    let other = gpu::more_gpus(&members);
    standin.capture(other[0].stream.raw(), true);
    let completed: Vec<_> = pending.into_iter().map(|one| one.unwrap().completed()).collect();
    // The watchdog polls for its completion meanwhile.
    std::thread::sleep(Duration::from_millis(200));
    standin.capture(other[0].stream.raw(), false);
    completed.into_iter().for_each(|one| drop(one.content()));
    assert!(members.iter().all(|member| member.engine.check_usable().is_ok()));
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_stream_that_is_captured_into_a_graph_is_refused_and_the_group_goes_on() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    let tensor = bring(&gpus[0], vec![0; 12000]);
    standin.capture(gpus[0].stream.raw(), true);
    let refused = submit_brought(&gpus[0], &members[0], call_for(&case, 0, true), tensor);
    standin.capture(gpus[0].stream.raw(), false);
    assert_has(&refused.err().unwrap().to_string(), &["CUDA graph", "GPU 0"]);
    exchange(&case, &members, &gpus, &gradients(&case, 9));
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn ranks_whose_tensors_are_in_different_places_are_told_so_and_the_group_goes_on() {
    let standin = Standin::ready();
    let (case, members, gpus) = group();
    let begin = |(rank, member): (usize, &Member)| {
        let place = (rank == 0).then_some(&gpus[0]);
        gpu::begin_on(&case, member, &[place], &[case.gradient(rank, 0, 9)])
    };
    let pending: Vec<_> = members.iter().enumerate().flat_map(begin).collect();
    let texts: Vec<_> = pending.iter().map(|one| one.outcome().unwrap()).collect();
    for text in texts {
        assert_has(
            &text,
            &["rank 0 called all_reduce", "on its GPU", "rank 1 called", "SUM as #4"],
        );
    }
    exchange(&case, &members, &gpus, &gradients(&case, 9));
    standin.assert_clean();
}

#[test]
#[ignore = "needs the stand-in: tests/gpu/test_engine.py runs it"]
fn a_tensor_that_is_no_gradient_is_begun_on_the_inner_backend() {
    let standin = Standin::ready();
    let (_, members, gpus) = group();
    let begin = |(member, gpu): (&Member, &Gpu)| {
        submit(gpu, member, call(CollectiveKind::AllReduce, DataType::F32, 0, 16), vec![1; 64])
            .unwrap()
    };
    let pending: Vec<_> = members.iter().zip(&gpus).map(begin).collect();
    for one in pending {
        // The inner backend of these tests leaves tensors as they are.
        assert_eq!(one.completed().content(), vec![1; 64]);
    }
    standin.assert_clean();
}
