//! The expected results of a [`Case`]'s steps, from plain loops and the codec's scalar reference.

use super::gradient_case::{Case, WARMUP, encode};
use crate::codec::chunks::reference::{self, Rank};
use crate::codec::chunks_to_send;
use crate::collective::partition::{partition, partitions};
use std::ops::Range;

/// The state of a shard, by host.
pub type Kept = Vec<Rank>;

/// The result of every bucket. `kept` is the state, by bucket and by local rank.
pub fn expected(
    case: &Case,
    kept: &mut [Vec<Kept>],
    gradients: &[Vec<Vec<f32>>],
    step: u64,
) -> Vec<Vec<u8>> {
    let hosts = case.by_host();
    let carriers = hosts.iter().map(Vec::len).min().unwrap();
    let each = case.element.bytes();
    let shard = |bucket: usize, local_rank: usize| {
        let bytes = partition(case.buckets[bucket] * each, carriers, local_rank);
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
    for local_rank in 0..carriers {
        for (bucket, kept) in kept.iter_mut().enumerate() {
            for (ranks, kept) in hosts.iter().zip(&mut kept[local_rank]) {
                kept.gradient = sum_of_host(ranks, bucket, shard(bucket, local_rank));
            }
        }
        if step < WARMUP {
            kept.iter_mut().for_each(|kept| exact_step(case, &mut kept[local_rank]));
        } else {
            for group in fused(case) {
                compressed_step(case, kept, local_rank, group);
            }
        }
        for (bucket, (kept, delivered)) in kept.iter().zip(&mut delivered).enumerate() {
            let range = shard(bucket, local_rank);
            let bytes = encode(case.element, &kept[local_rank][0].gradient);
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

fn compressed_step(case: &Case, kept: &mut [Vec<Kept>], local_rank: usize, group: Range<usize>) {
    let hosts = kept[0][local_rank].len();
    let step = |kept: &[Rank], cut: &dyn Fn(usize) -> Vec<Range<usize>>| {
        let chunks = kept[0].gradient.len().div_ceil(case.chunk);
        let method = reference::Method {
            chunk: case.chunk,
            count: chunks_to_send(chunks, case.density),
            wire: case.wire,
            momentum: case.momentum,
            // Among the `cases`, only short momentum at low density is out of date when sent.
            clears_velocity: case.momentum.is_some_and(|momentum| momentum.factor < 0.5)
                && case.density < 0.1,
            element: case.element,
            cut,
            keeps_what_hops_lose: !case.on_gpus,
        };
        reference::step(&method, kept)
    };
    // The partitions of the ring depend on how much each sends, but not the other way round.
    let anyhow = |bytes: usize| partitions(bytes, hosts).collect::<Vec<_>>();
    let sizes: Vec<usize> =
        group.clone().map(|bucket| step(&kept[bucket][local_rank], &anyhow).summed.len()).collect();
    let elements = |bucket: usize| kept[bucket][local_rank][0].gradient.len();
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
        kept[bucket][local_rank] = step(&kept[bucket][local_rank], &ranges).ranks;
        start += room;
    }
}

pub fn nothing_kept(case: &Case) -> Vec<Vec<Kept>> {
    let hosts = case.by_host();
    let carriers = hosts.iter().map(Vec::len).min().unwrap();
    let of_bucket = |elements: &usize| {
        let shard = |local_rank| {
            let bytes = partition(elements * case.element.bytes(), carriers, local_rank);
            let zeros = vec![0.0; bytes.len() / case.element.bytes()];
            let rank = Rank { gradient: zeros.clone(), residual: zeros.clone(), velocity: zeros };
            vec![rank; hosts.len()]
        };
        (0..carriers).map(shard).collect()
    };
    case.buckets.iter().map(of_bucket).collect()
}
