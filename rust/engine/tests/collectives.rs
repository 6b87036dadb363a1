//! Whole collectives, from the queue to the result, over memory, shared memory, TCP and mixtures of them.
//! Expected results come from plain loops.

use super::harness::{
    Member, OnTensors, Tensor, call, group_that_compresses, group_without_listeners, memory_group,
};
use crate::collective::call::{Call, CollectiveKind};
use crate::collective::span::{Memory, Span};
use crate::collective::types::DataType;
use crate::engine::shared::Gradients;
use crate::transport::tcp::connector::tests::soon;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn exact() -> Gradients {
    Gradients::new(None, None)
}

/// A group as it is made for real, on loopback; ranks with the same number are on one host.
fn group(hosts: &[usize]) -> Vec<Member> {
    group_that_compresses(hosts, &exact)
}

/// Element types of the tests, and their sizes.
const I32: (DataType, usize) = (DataType::I32, 4);
const U8: (DataType, usize) = (DataType::U8, 1);
const F64: (DataType, usize) = (DataType::F64, 8);

/// Runs one collective on all ranks. Even ranks wait in the call.
fn run(members: &[Member], call: &Call, memories: Vec<Memory>) {
    std::thread::scope(|scope| {
        for (rank, (member, memory)) in members.iter().zip(memories).enumerate() {
            scope.spawn(move || {
                let (sender, completed) = channel();
                let complete = Mutex::new(Some(sender));
                let operation = Arc::new(OnTensors { memory, obstacle: None, completed: complete });
                if rank % 2 == 0 {
                    member.engine.submit_and_wait(call.clone(), operation).unwrap();
                } else {
                    member.engine.submit(call.clone(), operation).unwrap();
                }
                assert_eq!(completed.recv_timeout(Duration::from_secs(60)).unwrap(), None);
            });
        }
    });
}

/// Numbers whose sum over eight ranks is exact in every element type, and that differ by rank and index.
fn number(rank: usize, index: usize) -> u8 {
    ((rank * 7 + index * 3 + index / 251) % 31) as u8
}

fn encode(dtype: (DataType, usize), value: u32) -> Vec<u8> {
    match dtype {
        I32 => value.to_ne_bytes().to_vec(),
        F64 => f64::from(value).to_ne_bytes().to_vec(),
        _ => vec![value as u8],
    }
}

fn contribution(dtype: (DataType, usize), rank: usize, numel: usize) -> Vec<u8> {
    (0..numel).flat_map(|index| encode(dtype, u32::from(number(rank, index)))).collect()
}

fn check_all_reduce(
    members: &[Member],
    dtype: (DataType, usize),
    numel: usize,
    guard: usize,
    in_arena: &dyn Fn(usize) -> bool,
) {
    let tensors: Vec<_> = members
        .iter()
        .enumerate()
        .map(|(rank, member)| {
            let arena = member.arena.as_ref().filter(|_| in_arena(rank));
            Tensor::new(&contribution(dtype, rank, numel), guard * dtype.1, arena)
        })
        .collect();
    let memory = |tensor: &Tensor| Memory { inputs: Vec::new(), outputs: vec![tensor.span()] };
    let memories = tensors.iter().map(memory).collect();
    run(members, &call(CollectiveKind::AllReduce, dtype.0, 0, numel), memories);
    let sum = |index| (0..members.len()).map(|rank| u32::from(number(rank, index))).sum::<u32>();
    let expected: Vec<u8> = (0..numel).flat_map(|index| encode(dtype, sum(index))).collect();
    for (rank, tensor) in tensors.iter().enumerate() {
        assert!(tensor.content() == expected, "rank {rank} of {}, {numel}", members.len());
    }
}

fn check_broadcast(members: &[Member], root: usize, bytes: usize) {
    let tensors: Vec<_> = (0..members.len())
        .map(|rank| Tensor::new(&contribution(U8, rank, bytes), 3, None))
        .collect();
    let memory = |tensor: &Tensor| Memory { inputs: Vec::new(), outputs: vec![tensor.span()] };
    let memories = tensors.iter().map(memory).collect();
    run(members, &call(CollectiveKind::Broadcast, DataType::U8, root, bytes), memories);
    let expected = contribution(U8, root, bytes);
    assert!(tensors.iter().all(|tensor| tensor.content() == expected), "root {root}, {bytes}");
}

fn check_all_gather(members: &[Member], bytes: usize) {
    let size = members.len();
    let inputs: Vec<_> =
        (0..size).map(|rank| Tensor::new(&contribution(U8, rank, bytes), 3, None)).collect();
    let outputs: Vec<Vec<_>> = (0..size)
        .map(|_| (0..size).map(|_| Tensor::new(&vec![0; bytes], 5, None)).collect())
        .collect();
    let memory = |(input, outputs): (&Tensor, &Vec<Tensor>)| Memory {
        inputs: vec![input.span()],
        outputs: outputs.iter().map(Tensor::span).collect(),
    };
    let memories = inputs.iter().zip(&outputs).map(memory).collect();
    run(members, &call(CollectiveKind::AllGather, DataType::U8, 0, bytes), memories);
    for outputs in &outputs {
        for (rank, output) in outputs.iter().enumerate() {
            assert!(output.content() == contribution(U8, rank, bytes), "{bytes} of rank {rank}");
        }
    }
}

/// Checks many collectives in one group.
fn check(members: &[Member], cases: u32) {
    let size = members.len();
    // Around the largest tensor that travels with its call, and around the sizes of blocks and shards.
    let numel = prop_oneof![0usize..70, 8000usize..8400, 60_000usize..70_000, 0usize..700_000];
    let dtype = prop_oneof![Just(I32), Just(U8), Just(F64)];
    let case = (numel, dtype, 0usize..9, 0usize..4, 0..size);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&case, |(numel, dtype, guard, placing, root)| {
            match placing {
                0 => check_all_reduce(members, dtype, numel, guard, &|_| true),
                1 => check_all_reduce(members, dtype, numel, guard, &|rank| rank % 2 == 0),
                2 => check_all_reduce(members, dtype, numel, guard, &|_| false),
                _ => {
                    check_broadcast(members, root, numel);
                    let even = members[0].engine.shared.core().fabric.topology().is_even();
                    if even {
                        check_all_gather(members, numel);
                    }
                }
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{size} ranks: {error}"));
}

#[test]
fn ranks_in_one_memory_get_the_right_results() {
    for size in 1..=8 {
        check(&memory_group(size), 12);
    }
}

#[test]
fn ranks_of_one_host_get_the_right_results() {
    for size in 1..=8 {
        check(&group(&vec![0; size]), 16);
    }
}

#[test]
fn ranks_of_different_hosts_get_the_right_results() {
    for size in 2..=8 {
        let hosts: Vec<_> = (0..size).collect();
        check(&group(&hosts), 10);
    }
}

#[test]
fn hosts_with_several_ranks_get_the_right_results() {
    let topologies: [&[usize]; 6] = [
        &[0, 0, 1],
        &[0, 1, 1, 0],
        &[0, 0, 1, 1, 2, 2],
        &[0, 0, 0, 1],
        &[0, 1, 2, 0, 1],
        &[0, 0, 0, 0, 1, 1, 1, 1],
    ];
    for hosts in topologies {
        check(&group(hosts), 12);
    }
}

#[test]
fn ranks_that_cannot_share_memory_use_tcp_and_one_of_them_says_so() {
    let (members, notices) = group_without_listeners(&[0, 0, 1, 1], &[3], &exact);
    let hosts = members[0].engine.shared.core().fabric.topology().hosts();
    assert_eq!(hosts, 3, "the first host still shares memory");
    let told: Vec<_> = notices.iter().map(|notice| !notice.is_empty()).collect();
    assert_eq!(told, [false, false, true, false]);
    assert!(notices[2].starts_with("ranks 2, 3 of this host cannot share memory ("), "{notices:?}");
    check(&members, 6);
}

#[test]
fn what_a_rank_has_shown_is_void_once_it_has_given_up() {
    for hosts in [[0, 0], [0, 1]] {
        let members = group(&hosts);
        let barrier = |rank: usize, timeout| {
            let (sender, completed) = channel();
            let operation = Arc::new(OnTensors {
                memory: Memory::default(),
                obstacle: None,
                completed: Mutex::new(Some(sender)),
            });
            let call = Call { timeout, ..call(CollectiveKind::Barrier, DataType::U8, 0, 0) };
            members[rank].engine.submit(call, operation).unwrap();
            completed.recv_timeout(Duration::from_secs(30)).unwrap().expect("it fails")
        };
        let early = barrier(0, Duration::from_millis(50));
        assert!(early.contains("Timed out") && early.contains("rank 1"), "{early}");
        // Too late: the other rank has left the barrier.
        let late = barrier(1, Duration::from_secs(20));
        assert!(late.contains("lost rank 0") && late.contains("it gave up"), "{late}");
    }
}

#[test]
fn tensors_that_all_live_in_arenas_are_added_up_where_they_are() {
    let members = group(&[0, 0]);
    let steps = || members[0].engine.shared.core().fabric.local(soon()).unwrap().region.steps();
    let before = steps();
    check_all_reduce(&members, I32, 1_000_003, 2, &|_| true);
    // One barrier, when the sums are written; going through blocks would take nine or more.
    assert_eq!(steps() - before, 1);
    check_all_reduce(&members, I32, 1_000_003, 2, &|rank| rank == 0);
    assert!(steps() - before > 9);
}

#[test]
fn a_rank_that_cannot_get_ready_is_named_by_all_and_the_group_goes_on() {
    for hosts in [[0, 0], [0, 1]] {
        let members = group(&hosts);
        std::thread::scope(|scope| {
            for (rank, member) in members.iter().enumerate() {
                scope.spawn(move || {
                    let (sender, completed) = channel();
                    let operation = Arc::new(OnTensors {
                        memory: Memory { inputs: Vec::new(), outputs: vec![Span::of(&mut [])] },
                        obstacle: (rank == 1).then_some("no memory for a copy"),
                        completed: Mutex::new(Some(sender)),
                    });
                    member
                        .engine
                        .submit(call(CollectiveKind::AllReduce, DataType::F32, 0, 0), operation)
                        .unwrap();
                    let text = completed.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
                    let expected = "rank 1 cannot take part: no memory for a copy";
                    assert!(text.contains(expected), "{text}");
                });
            }
        });
        check_all_reduce(&members, I32, 70_001, 3, &|_| false);
    }
}

#[test]
fn sixteen_bit_floats_are_summed_in_more_than_sixteen_bits() {
    // 2048 + 1 + 1 is 2048 in f16 if every sum is rounded, and 2050 if only the last one is.
    let members = group(&[0, 0, 0]);
    for numel in [3usize, 100_000] {
        let value = |rank: usize| half::f16::from_f32(if rank == 0 { 2048.0 } else { 1.0 });
        let content = |rank| value(rank).to_ne_bytes().repeat(numel);
        let tensors: Vec<_> = (0..3).map(|rank| Tensor::new(&content(rank), 2, None)).collect();
        let memory = |tensor: &Tensor| Memory { inputs: Vec::new(), outputs: vec![tensor.span()] };
        let memories = tensors.iter().map(memory).collect();
        run(&members, &call(CollectiveKind::AllReduce, DataType::F16, 0, numel), memories);
        let expected = half::f16::from_f32(2050.0).to_ne_bytes().repeat(numel);
        assert!(tensors.iter().all(|tensor| tensor.content() == expected));
    }
}

#[test]
fn sums_of_floats_have_the_same_bits_on_every_rank_and_in_every_run() {
    let wild = |rank: usize, index: usize| {
        let seed = (rank * 1_000_003 + index) as u64;
        let bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        (bits as f32 / 1e6).sin() * 10f32.powi((bits % 13) as i32 - 6)
    };
    for hosts in [vec![0, 0, 0], vec![0, 1, 2], vec![0, 0, 1, 1, 2]] {
        let mut first: Option<Vec<u8>> = None;
        for run_number in 0..2 {
            let members = group(&hosts);
            let content = |rank| -> Vec<u8> {
                (0..50_001).flat_map(|index| wild(rank, index).to_ne_bytes()).collect()
            };
            let tensors: Vec<_> = (0..hosts.len())
                // The order of the sum does not depend on whether they are in shared memory.
                .map(|rank| {
                    let arena = members[rank].arena.as_ref().filter(|_| run_number == 0);
                    Tensor::new(&content(rank), 4, arena)
                })
                .collect();
            let memory =
                |tensor: &Tensor| Memory { inputs: Vec::new(), outputs: vec![tensor.span()] };
            let memories = tensors.iter().map(memory).collect();
            run(&members, &call(CollectiveKind::AllReduce, DataType::F32, 0, 50_001), memories);
            for tensor in &tensors {
                let content = tensor.content();
                assert!(*first.get_or_insert_with(|| content.clone()) == content, "{hosts:?}");
            }
        }
    }
}
