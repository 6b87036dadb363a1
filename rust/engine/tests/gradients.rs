//! Whole exchanges of gradients, from the queue to what comes back, on ranks that are threads of one
//! process: against the scalar reference of the method, to the bit.

use super::collectives::{Member, OnTensors, Tensor, call, group_that_compresses};
use crate::codec::reference::{self, Rank};
use crate::codec::{Momentum, Schedule, Wire, chunks_to_send};
use crate::collective::call::CollectiveKind;
use crate::collective::partition::{partition, partitions};
use crate::collective::span::Memory;
use crate::collective::types::DataType;
use crate::engine::Engine;
use crate::engine::shared::Gradients;
use crate::gradients::{BucketState, CompressionConfig};
use crate::simd::element::Element;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) const WARMUP: u64 = 2;
pub(super) const DENSITY: f64 = 0.3;
/// Steps of one case, the exact ones among them.
pub(super) const STEPS: u64 = 6;

#[derive(Debug, Clone)]
pub(super) struct Case {
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
    /// Whether it is exchanged on GPUs, whose sums NCCL makes, in another order.
    pub on_gpus: bool,
    pub seed: u64,
}

pub(super) fn cases() -> impl Strategy<Value = Case> {
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
            seed,
        },
    )
}

impl Case {
    pub fn members(&self) -> Vec<Member> {
        let schedule = Schedule { density: self.density, warmup_steps: WARMUP, ramp_steps: 0 };
        let (chunk, wire, fusion_bytes) = (self.chunk, self.wire, self.fusion_bytes);
        let config = CompressionConfig { schedule, chunk, wire, fusion_bytes };
        let gradients = || Gradients::new(Some(config), self.momentum);
        group_that_compresses(&self.hosts, &gradients)
    }

    /// Whether numbers of so many bytes are added in the order of ranks, as the NCCL of the tests does
    /// with 32 bits, and not in that of the ring.
    fn adds_in_order_of_ranks(&self, bytes: usize) -> bool {
        self.on_gpus && bytes == 4
    }

    /// The bytes between the beginnings of two shards on the wire, of which the first has so many
    /// elements, and sends so many bytes.
    fn room_on_the_wire(&self, elements: usize, bytes: usize) -> usize {
        if !self.on_gpus || elements == 0 {
            return bytes;
        }
        // A short chunk has the room of a whole one, and the next shard begins at a whole line.
        let each = self.wire.element_bytes();
        let chunk = self.chunk.min(elements) * each;
        bytes.next_multiple_of(chunk).next_multiple_of(64 * each)
    }

    /// Ranks by host.
    fn by_host(&self) -> Vec<Vec<usize>> {
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

pub(super) fn data_type(element: Element) -> DataType {
    match element {
        Element::F32 => DataType::F32,
        Element::F16 => DataType::F16,
        _ => DataType::BF16,
    }
}

pub(super) fn encode(element: Element, numbers: &[f32]) -> Vec<u8> {
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

/// Exchanges one step's buckets on all ranks, and returns what each rank got of each.
pub(super) fn exchange(
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
                        let (sender, settled) = channel();
                        let settled_by = Mutex::new(Some(sender));
                        let operation =
                            Arc::new(OnTensors { memory, obstacle: None, settled: settled_by });
                        let dtype = data_type(case.element);
                        let mut call = call(CollectiveKind::AllReduce, dtype, 0, gradient.len());
                        if joined != Some(rank) {
                            (call.gradient, call.bucket) = (true, bucket as u32 + 1);
                        }
                        member.engine.submit(call, operation).unwrap();
                        pending.push((tensor, settled));
                    }
                    if joined != Some(rank) {
                        member.engine.end_of_pass();
                    }
                    let content = |(tensor, settled): (Tensor, Receiver<Option<String>>)| {
                        assert_eq!(settled.recv_timeout(Duration::from_secs(60)).unwrap(), None);
                        tensor.content()
                    };
                    pending.into_iter().map(content).collect()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What is kept of a shard, by host.
type Kept = Vec<Rank>;

/// The method by plain loops: what comes back of every bucket, with what is kept in `kept`, by
/// bucket and by place.
fn expected(
    case: &Case,
    kept: &mut [Vec<Kept>],
    gradients: &[Vec<Vec<f32>>],
    step: u64,
) -> Vec<Vec<u8>> {
    let hosts = case.by_host();
    let carriers = hosts.iter().map(Vec::len).min().unwrap();
    let each = case.element.bytes();
    let shard = |bucket: usize, place: usize| {
        let bytes = partition(case.buckets[bucket] * each, carriers, place);
        bytes.start / each..bytes.end / each
    };
    let sum_of_host = |host: &[usize], bucket: usize, range: Range<usize>| -> Vec<f32> {
        let sum = |index: usize| {
            let sum = host.iter().map(|rank| gradients[*rank][bucket][index]).reduce(|a, b| a + b);
            reference::rounded_to(case.element, sum.unwrap())
        };
        range.map(sum).collect()
    };
    let mut delivered: Vec<Vec<u8>> =
        case.buckets.iter().map(|elements| vec![0; elements * each]).collect();
    for place in 0..carriers {
        for (bucket, kept) in kept.iter_mut().enumerate() {
            for (ranks, kept) in hosts.iter().zip(&mut kept[place]) {
                kept.gradient = sum_of_host(ranks, bucket, shard(bucket, place));
            }
        }
        if step < WARMUP {
            kept.iter_mut().for_each(|kept| exact_step(case, &mut kept[place]));
        } else {
            for group in fused(case) {
                compressed_step(case, kept, place, group);
            }
        }
        for (bucket, (kept, delivered)) in kept.iter().zip(&mut delivered).enumerate() {
            let range = shard(bucket, place);
            let bytes = encode(case.element, &kept[place][0].gradient);
            delivered[range.start * each..range.end * each].copy_from_slice(&bytes);
        }
    }
    delivered
}

/// Which buckets are exchanged together.
fn fused(case: &Case) -> Vec<Range<usize>> {
    let (mut groups, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (bucket, elements) in case.buckets.iter().enumerate() {
        bytes += elements * case.element.bytes();
        if bytes >= case.fusion_bytes || bucket + 1 == case.buckets.len() {
            groups.push(start..bucket + 1);
            (start, bytes) = (bucket + 1, 0);
        }
    }
    groups
}

fn exact_step(case: &Case, hosts: &mut [Rank]) {
    if let Some(momentum) = case.momentum {
        for rank in hosts.iter_mut() {
            for (g, u) in rank.gradient.iter_mut().zip(&mut rank.velocity) {
                *u = momentum.factor * *u + *g;
                let sent = if momentum.nesterov { *g + momentum.factor * *u } else { *u };
                *g = reference::rounded_to(case.element, sent);
            }
        }
    }
    // The ring of exact sums: chunk c is combined in the order c, c + 1, …
    let bytes = hosts[0].gradient.len() * case.element.bytes();
    let mut sums = Vec::new();
    let ranges: Vec<_> = match case.adds_in_order_of_ranks(case.element.bytes()) {
        true => partitions(bytes, 1).collect(),
        false => partitions(bytes, hosts.len()).collect(),
    };
    for (index, range) in ranges.into_iter().enumerate() {
        let elements = range.start / case.element.bytes()..range.end / case.element.bytes();
        sums.extend(elements.map(|element| {
            let in_order = (0..hosts.len()).map(|hop| &hosts[(index + hop) % hosts.len()]);
            let numbers = in_order.map(|rank| rank.gradient[element]);
            numbers.reduce(|sum, own| reference::rounded_to(case.element, sum + own)).unwrap()
        }));
    }
    for rank in hosts {
        rank.gradient.clone_from(&sums);
    }
}

fn compressed_step(case: &Case, kept: &mut [Vec<Kept>], place: usize, group: Range<usize>) {
    let hosts = kept[0][place].len();
    let step = |kept: &[Rank], cut: &dyn Fn(usize) -> Vec<Range<usize>>| {
        let chunks = kept[0].gradient.len().div_ceil(case.chunk);
        let method = reference::Method {
            chunk: case.chunk,
            count: chunks_to_send(chunks, case.density),
            wire: case.wire,
            momentum: case.momentum,
            // Of those in `cases` only a short momentum is old before it is sent, if little is.
            clears_velocity: case.momentum.is_some_and(|momentum| momentum.factor < 0.5)
                && case.density < 0.1,
            element: case.element,
            cut,
            keeps_what_hops_lose: !case.on_gpus,
        };
        reference::step(&method, kept)
    };
    // How much each sends does not depend on how the ring is cut; where it is cut depends on that.
    let anyhow = |bytes: usize| partitions(bytes, hosts).collect::<Vec<_>>();
    let sizes: Vec<usize> =
        group.clone().map(|bucket| step(&kept[bucket][place], &anyhow).summed.len()).collect();
    let elements = |bucket: usize| kept[bucket][place][0].gradient.len();
    let rooms: Vec<usize> = (group.clone().zip(&sizes))
        .map(|(bucket, size)| case.room_on_the_wire(elements(bucket), *size))
        .collect();
    let all: usize = rooms.iter().sum();
    let mut start = 0;
    for (bucket, (size, room)) in group.zip(sizes.into_iter().zip(rooms)) {
        let within = |range: Range<usize>| {
            let at = |offset: usize| offset.clamp(start, start + size) - start;
            at(range.start)..at(range.end)
        };
        let ranges = |_: usize| match case.adds_in_order_of_ranks(case.wire.element_bytes()) {
            true => partitions(all, 1).map(within).collect(),
            false => partitions(all, hosts).map(within).collect(),
        };
        kept[bucket][place] = step(&kept[bucket][place], &ranges).ranks;
        start += room;
    }
}

fn nothing_kept(case: &Case) -> Vec<Vec<Kept>> {
    let hosts = case.by_host();
    let carriers = hosts.iter().map(Vec::len).min().unwrap();
    let of_bucket = |elements: &usize| {
        let shard = |place| {
            let bytes = partition(elements * case.element.bytes(), carriers, place);
            let zeros = vec![0.0; bytes.len() / case.element.bytes()];
            let rank = Rank { gradient: zeros.clone(), residual: zeros.clone(), velocity: zeros };
            vec![rank; hosts.len()]
        };
        (0..carriers).map(shard).collect()
    };
    case.buckets.iter().map(of_bucket).collect()
}

/// What a rank keeps of a bucket.
pub(super) fn kept_of(engine: &Engine, bucket: u32) -> BucketState {
    let limit = Duration::from_secs(10);
    engine.bucket_state(bucket, limit).unwrap()
}

fn assert_kept(case: &Case, members: &[Member], kept: &[Vec<Kept>]) {
    let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    for (host, ranks) in case.by_host().iter().enumerate() {
        for (place, rank) in ranks.iter().enumerate().take(kept[0].len()) {
            let engine = &members[*rank].engine;
            for (bucket, kept) in kept.iter().enumerate() {
                let expected = &kept[place][host];
                let BucketState { step, residual, velocity } = kept_of(engine, bucket as u32 + 1);
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

fn check(case: &Case) {
    let members = case.members();
    check_with(case, &members, &|gradients| exchange(case, &members, gradients, None));
}

/// The gradients of a rank's buckets.
pub(super) type Buckets = Vec<Vec<f32>>;
/// What the ranks have got of their buckets, by rank.
pub(super) type Came = Vec<Vec<Vec<u8>>>;

/// Compares some steps of a group with the reference; `exchange` is given all ranks' gradients.
pub(super) fn check_with(case: &Case, members: &[Member], exchange: &dyn Fn(&[Buckets]) -> Came) {
    let mut kept = nothing_kept(case);
    for step in 0..STEPS {
        let gradients: Vec<Vec<Vec<f32>>> = (0..case.hosts.len())
            .map(|rank| (0..case.buckets.len()).map(|b| case.gradient(rank, b, step)).collect())
            .collect();
        let expected = expected(case, &mut kept, &gradients, step);
        let came = exchange(&gradients);
        for (rank, came) in came.iter().enumerate() {
            for (bucket, (came, expected)) in came.iter().zip(&expected).enumerate() {
                assert!(came == expected, "step {step}, rank {rank}, bucket {bucket}");
            }
        }
    }
    assert_kept(case, members, &kept);
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

pub(super) fn two_hosts(buckets: Vec<usize>) -> Case {
    Case {
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
        seed: 7,
    }
}

#[test]
fn an_exchange_of_several_parcels_loses_nothing() {
    // Three parcels and a half, of which one is larger than a parcel should be.
    let enough = crate::gradients::FULL_ELEMENTS;
    for chunk in [1 << 16, enough + 5] {
        let case = Case { chunk, ..two_hosts(vec![8 * enough, 1000]) };
        let members = case.members();
        let mut sums = vec![0.0f64; case.buckets[0]];
        let mut delivered = sums.clone();
        for step in 0..4 {
            let gradients: Vec<Vec<Vec<f32>>> =
                (0..2).map(|r| (0..2).map(|b| case.gradient(r, b, step)).collect()).collect();
            let came = exchange(&case, &members, &gradients, None);
            assert!(came[0] == came[1]);
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum += f64::from(gradients[0][0][index]) + f64::from(gradients[1][0][index]);
            }
            for (sum, bytes) in delivered.iter_mut().zip(came[0][0].as_chunks().0) {
                *sum += f64::from(f32::from_ne_bytes(*bytes));
            }
        }
        for member in &members {
            let residual = kept_of(&member.engine, 1).residual;
            for (sum, kept) in delivered.iter_mut().zip(residual) {
                *sum += f64::from(kept);
            }
        }
        for (index, (sum, came)) in sums.iter().zip(&delivered).enumerate() {
            assert!((sum - came).abs() < 1e-4, "{index}: {sum} became {came}");
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
            // The second rank has run out; the first has nothing new to say either.
            _ => zeros.clone(),
        };
        let gradients: Vec<_> = (0..2).map(data).collect();
        for (owed, gradient) in owed.iter_mut().zip(&gradients) {
            *owed += gradient.iter().flatten().map(|number| f64::from(*number)).sum::<f64>();
        }
        let joined = (step > 5).then_some(1);
        let came = exchange(&case, &members, &gradients, joined);
        assert!(came[0] == came[1]);
        let numbers = came[0].iter().flat_map(|bytes| bytes.as_chunks().0);
        paid += numbers.map(|bytes| f64::from(f32::from_ne_bytes(*bytes))).sum::<f64>();
    }
    assert!((owed[0] + owed[1] - paid).abs() < 1e-2, "{owed:?} and {paid}");
}

#[test]
fn what_is_not_finite_reaches_all_ranks_and_stays_in_no_residual() {
    for (value, place) in [(f32::INFINITY, 3), (f32::NAN, 319), (f32::NEG_INFINITY, 100)] {
        let case = two_hosts(vec![320, 64]);
        let members = case.members();
        for step in 0..8 {
            let mut gradients: Vec<Vec<Vec<f32>>> =
                (0..2).map(|r| (0..2).map(|b| case.gradient(r, b, step)).collect()).collect();
            if step == 4 {
                gradients[1][0][place] = value;
            }
            let came = exchange(&case, &members, &gradients, None);
            assert!(came[0] == came[1]);
            let numbers: Vec<f32> =
                came[0][0].as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
            let chunk = place / case.chunk * case.chunk..(place / case.chunk + 1) * case.chunk;
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
        // Both buckets were in the pass that is skipped, also the one that was well.
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
