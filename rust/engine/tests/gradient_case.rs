//! A group and its gradients for a test: random ones, and how they are exchanged.

use super::harness::{Member, OnTensors, Tensor, call, group_that_compresses};
use crate::codec::chunks::reference;
use crate::codec::quantizer::{Levels, Stepping};
use crate::codec::{Momentum, Schedule, Wire};
use crate::collective::call::CollectiveKind;
use crate::collective::span::Memory;
use crate::collective::types::DataType;
use crate::engine::Engine;
use crate::engine::shared::Gradients;
use crate::gradients::{BucketState, CompressionConfig, Method};
use crate::simd::element::Element;
use proptest::prelude::*;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const WARMUP: u64 = 2;
pub const DENSITY: f64 = 0.3;
/// Steps of one case, including the exact ones.
pub const STEPS: u64 = 6;

#[derive(Debug, Clone)]
pub struct Case {
    pub method: Method,
    pub hosts: Vec<usize>,
    /// Elements of each bucket.
    pub buckets: Vec<usize>,
    pub element: Element,
    pub wire: Wire,
    pub chunk: usize,
    pub density: f64,
    pub fusion_bytes: usize,
    pub momentum: Option<Momentum>,
    pub in_arena: bool,
    /// Whether it is exchanged on GPUs, where NCCL sums in another order.
    pub on_gpus: bool,
    /// What the optimizer does on all ranks. Without it, three levels are never used.
    pub stepping: Option<Stepping>,
    /// Steps of the warm-up.
    pub warmup: u64,
    pub seed: u64,
}

/// Every quantiser: all levels, for both kinds of optimizer where that makes a difference.
pub fn quantizers() -> Vec<(Levels, Stepping)> {
    let of_kind = |stepping| Levels::ALL.map(|levels| (levels, stepping));
    let both = [of_kind(Stepping::Normalized), of_kind(Stepping::Proportional)].concat();
    both.into_iter().filter(|one| *one != (Levels::Int8, Stepping::Proportional)).collect()
}

pub fn cases() -> impl Strategy<Value = Case> {
    let hosts = prop_oneof![
        Just(vec![0, 1]),
        Just(vec![0, 1, 2]),
        Just(vec![0, 1, 2, 3, 4]),
        Just(vec![0, 0, 1, 1]),
        Just(vec![0, 1, 0, 1, 1]),
        Just(vec![0, 0, 0, 1, 1, 1]),
    ];
    let element =
        prop_oneof![3 => Just(Element::F32), 1 => Just(Element::F16), 1 => Just(Element::BF16)];
    let wire = prop_oneof![3 => Just(Wire::F16), 1 => Just(Wire::BF16), 1 => Just(Wire::F32)];
    let momentum = prop_oneof![
        2 => Just(None),
        1 => any::<bool>().prop_map(|nesterov| Some(Momentum { factor: 0.9, nesterov })),
        1 => any::<bool>().prop_map(|nesterov| Some(Momentum { factor: 0.1, nesterov })),
    ];
    let buckets = prop::collection::vec(prop_oneof![1usize..40, 500usize..6000], 1..4);
    let fusion = prop_oneof![Just(0), Just(10_000), Just(usize::MAX)];
    let density = prop_oneof![2 => Just(DENSITY), 1 => Just(0.05)];
    let sizes = (prop_oneof![1usize..5, 16usize..700], density, fusion);
    (hosts, buckets, element, wire, sizes, momentum, any::<bool>(), any::<u64>()).prop_map(
        |(
            hosts,
            buckets,
            element,
            wire,
            (chunk, density, fusion_bytes),
            momentum,
            in_arena,
            seed,
        )| Case {
            method: Method::Chunks,
            hosts,
            buckets,
            element,
            wire,
            chunk,
            density,
            fusion_bytes,
            momentum,
            in_arena,
            on_gpus: false,
            stepping: None,
            warmup: WARMUP,
            seed,
        },
    )
}

pub fn two_hosts(buckets: Vec<usize>) -> Case {
    Case {
        method: Method::Chunks,
        hosts: vec![0, 1],
        buckets,
        element: Element::F32,
        wire: Wire::F16,
        chunk: 16,
        density: DENSITY,
        fusion_bytes: usize::MAX,
        momentum: None,
        in_arena: false,
        on_gpus: false,
        stepping: None,
        warmup: WARMUP,
        seed: 7,
    }
}

impl Case {
    pub fn members(&self) -> Vec<Member> {
        let schedule = Schedule { density: self.density, warmup_steps: self.warmup, ramp_steps: 0 };
        let (chunk, wire, fusion_bytes) = (self.chunk, self.wire, self.fusion_bytes);
        let sample = CompressionConfig::sample(self.method, schedule);
        let config = CompressionConfig { chunk, wire, fusion_bytes, ..sample };
        let gradients = || {
            let mut gradients = Gradients::new(Some(config), self.momentum);
            gradients.set_stepping(&[], self.stepping);
            gradients
        };
        group_that_compresses(&self.hosts, &gradients)
    }

    /// Whether elements of this size are added in the order of ranks, as the tests' NCCL does with 32 bits,
    /// rather than in the order of the ring.
    pub fn adds_in_order_of_ranks(&self, bytes: usize) -> bool {
        self.on_gpus && bytes == 4
    }

    /// The distance on the wire, in bytes, from the start of a shard that has `elements` and sends `bytes`
    /// to the start of the next.
    pub fn room_on_the_wire(&self, elements: usize, bytes: usize) -> usize {
        if !self.on_gpus || elements == 0 {
            return bytes;
        }
        // A short chunk takes the room of a whole one, and the next shard is aligned.
        let each = self.wire.element_bytes();
        let chunk = self.chunk.min(elements) * each;
        bytes.next_multiple_of(chunk).next_multiple_of(64 * each)
    }

    /// Ranks by host.
    pub fn by_host(&self) -> Vec<Vec<usize>> {
        let ranks = |host| (0..self.hosts.len()).filter(|r| self.hosts[*r] == host).collect();
        (0..=*self.hosts.iter().max().unwrap()).map(ranks).collect()
    }

    pub fn gradient(&self, rank: usize, bucket: usize, step: u64) -> Vec<f32> {
        let seed = self.seed ^ (rank as u64) << 40 ^ (bucket as u64) << 20 ^ step;
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        (0..self.buckets[bucket])
            .map(|_| {
                let number = (next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                reference::rounded_to(self.element, number * (next() % 5) as f32)
            })
            .collect()
    }
}

pub fn data_type(element: Element) -> DataType {
    match element {
        Element::F32 => DataType::F32,
        Element::F16 => DataType::F16,
        _ => DataType::BF16,
    }
}

pub fn encode(element: Element, numbers: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in numbers {
        match element {
            Element::F32 => bytes.extend(number.to_ne_bytes()),
            Element::F16 => bytes.extend(half::f16::from_f32_const(*number).to_ne_bytes()),
            _ => bytes.extend(half::bf16::from_f32_const(*number).to_ne_bytes()),
        }
    }
    bytes
}

/// The gradients of a rank's buckets.
pub type Buckets = Vec<Vec<f32>>;
/// The bytes that came back, by rank and bucket.
pub type Results = Vec<Vec<Vec<u8>>>;

/// Exchanges one step's buckets on all ranks, and returns the results by rank and bucket.
pub fn exchange(
    case: &Case,
    members: &[Member],
    gradients: &[Vec<Vec<f32>>],
    joined: Option<usize>,
) -> Vec<Vec<Vec<u8>>> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = members
            .iter()
            .enumerate()
            .map(|(rank, member)| {
                scope.spawn(move || {
                    let arena = member.arena.as_ref().filter(|_| case.in_arena);
                    let mut pending: Vec<(Tensor, Receiver<_>)> = Vec::new();
                    for (bucket, gradient) in gradients[rank].iter().enumerate() {
                        let tensor = Tensor::new(&encode(case.element, gradient), 64, arena);
                        let memory = Memory { inputs: Vec::new(), outputs: vec![tensor.span()] };
                        let (sender, completed) = channel();
                        let completed_by = Mutex::new(Some(sender));
                        let operation =
                            Arc::new(OnTensors { memory, obstacle: None, completed: completed_by });
                        let dtype = data_type(case.element);
                        let mut call = call(CollectiveKind::AllReduce, dtype, 0, gradient.len());
                        if joined != Some(rank) {
                            (call.gradient, call.bucket) = (true, bucket as u32 + 1);
                        }
                        member.engine.submit(call, operation).unwrap();
                        pending.push((tensor, completed));
                    }
                    if joined != Some(rank) {
                        member.engine.end_of_pass();
                    }
                    let content = |(tensor, completed): (Tensor, Receiver<Option<String>>)| {
                        assert_eq!(completed.recv_timeout(Duration::from_secs(60)).unwrap(), None);
                        tensor.content()
                    };
                    pending.into_iter().map(content).collect()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The state that a rank keeps of a bucket.
pub fn kept_of(engine: &Engine, bucket: u32) -> BucketState {
    let limit = Duration::from_secs(10);
    engine.bucket_state(bucket, u64::MAX, limit).unwrap()
}
