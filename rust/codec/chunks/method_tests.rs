//! The whole method, put together from the kernels, compared with the reference bit by bit.

use super::kernels::accumulate::accumulate_with;
use super::kernels::pack::pack_with;
use super::kernels::partial_sum::add_partial_sum_with;
use super::kernels::residual::return_hop_error_with;
use super::kernels::unpack::unpack_with;
use super::reference::{self, Method, Rank};
use super::{ChunkGrid, add_norms, fill, return_unpack_error, scale_for, select};
use crate::codec::Wire;
use crate::codec::samples::{
    ELEMENTS, OwnedGradient, available_sets, bits, gradient, momenta, numbers,
};
use crate::simd::element::Element;
use crate::simd::instruction_set::InstructionSet;
use proptest::prelude::*;
use std::ops::Range;

/// The method, put together from the kernels, for all ranks.
struct Kernels {
    set: InstructionSet,
    /// Bytes that are added at a time.
    piece: usize,
}

/// The parts of a step that are compared.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    sums: Vec<u32>,
    selected: Vec<u32>,
    scales: Vec<f32>,
    sent: Vec<Vec<u8>>,
    summed: Vec<u8>,
    delivered: Vec<u32>,
    residuals: Vec<Vec<u32>>,
    velocities: Vec<Vec<u32>>,
}

impl Kernels {
    fn step(&self, method: &Method, before: &[Rank]) -> Outcome {
        let elements = before[0].gradient.len();
        let grid = ChunkGrid { elements, chunk_len: method.chunk };
        let mut ranks = before.to_vec();
        let mut gradients: Vec<OwnedGradient> =
            ranks.iter().map(|rank| OwnedGradient::new(method.element, &rank.gradient)).collect();
        let mut sums = vec![0.0; grid.chunks()];
        let mut undo = vec![0.0; 2 * method.chunk];
        for (rank, gradient) in ranks.iter_mut().zip(&mut gradients) {
            let mut norms = Vec::new();
            for range in (0..grid.chunks()).map(|chunk| grid.range(chunk)) {
                let velocity = &mut rank.velocity;
                let momentum =
                    method.momentum.map(|momentum| (&mut velocity[range.clone()], momentum));
                let residual = &mut rank.residual[range.clone()];
                let part = &mut gradient.borrow();
                let part = &mut part.part(range);
                norms.push(accumulate_with(self.set, part, residual, momentum, &mut undo).residual);
            }
            add_norms(&mut sums, &norms);
        }

        let mut selected = Vec::new();
        select(&sums, method.count, &mut selected);
        let (size, mut at) = (method.wire.element_bytes(), 0);
        let mut slots = Vec::new();
        for chunk in &selected {
            let range = grid.range(*chunk as usize);
            slots.push((range.clone(), at..at + range.len(), sums[*chunk as usize]));
            at += range.len();
        }
        let scales: Vec<f32> =
            slots.iter().map(|(_, _, sum)| scale_for(*sum, method.wire)).collect();
        let mut sent = vec![vec![0; at * size]; ranks.len()];
        for (rank, sent) in ranks.iter_mut().zip(&mut sent) {
            for ((range, slot, sum), scale) in slots.iter().zip(&scales) {
                if sum.is_finite() {
                    let out = &mut sent[slot.start * size..slot.end * size];
                    let residual = &mut rank.residual[range.clone()];
                    pack_with(self.set, residual, *scale, method.wire, out);
                    if method.momentum.is_some() {
                        rank.velocity[range.clone()].fill(0.0);
                    }
                }
            }
        }

        let (summed, rounded_off) = self.ring(method, &sent);
        for (rank, rounded_off) in ranks.iter_mut().zip(&rounded_off) {
            for ((range, slot, sum), scale) in slots.iter().zip(&scales) {
                if method.wire != Wire::F32 && sum.is_finite() {
                    let residual = &mut rank.residual[range.clone()];
                    return_hop_error_with(self.set, residual, &rounded_off[slot.clone()], *scale);
                }
            }
        }
        for (index, gradient) in gradients.iter_mut().enumerate() {
            for ((range, slot, sum), scale) in slots.iter().zip(&scales) {
                let bytes = &summed[slot.start * size..slot.end * size];
                let part = &mut gradient.borrow();
                let part = &mut part.part(range.clone());
                unpack_with(self.set, bytes, method.wire, *scale, part);
                if sum.is_finite() {
                    let residual = (index == 0).then(|| &mut ranks[0].residual[range.clone()]);
                    return_unpack_error(bytes, method.wire, *scale, part, residual);
                }
            }
            for (chunk, sum) in sums.iter().enumerate().filter(|(_, sum)| !sum.is_finite()) {
                fill(&mut gradient.borrow().part(grid.range(chunk)), *sum);
            }
        }
        let delivered: Vec<Vec<u32>> = gradients.iter().map(|g| g.bits()).collect();
        assert!(delivered.iter().all(|delivered| *delivered == delivered_to_first(&gradients)));
        Outcome {
            sums: bits(&sums),
            selected,
            scales,
            sent,
            summed,
            delivered: delivered_to_first(&gradients),
            residuals: ranks.iter().map(|rank| bits(&rank.residual)).collect(),
            velocities: ranks.iter().map(|rank| bits(&rank.velocity)).collect(),
        }
    }

    fn ring(&self, method: &Method, sent: &[Vec<u8>]) -> (Vec<u8>, Vec<Vec<f32>>) {
        let (ranks, size) = (sent.len(), method.wire.element_bytes());
        let mut rounded_off = vec![vec![0.0; sent[0].len() / size]; ranks];
        let mut summed = sent[0].clone();
        for (number, range) in (method.cut)(sent[0].len()).into_iter().enumerate() {
            let mut partial = sent[number % ranks][range.clone()].to_vec();
            for rank in (1..ranks).map(|hop| (number + hop) % ranks) {
                let mut own = sent[rank][range.clone()].to_vec();
                for start in (0..own.len()).step_by(self.piece) {
                    let end = own.len().min(start + self.piece);
                    let at = (range.start + start) / size..(range.start + end) / size;
                    let (own, incoming) = (&mut own[start..end], &partial[start..end]);
                    add_partial_sum_with(
                        self.set,
                        own,
                        incoming,
                        method.wire,
                        &mut rounded_off[rank][at],
                    );
                }
                partial = own;
            }
            summed[range].copy_from_slice(&partial);
        }
        (summed, rounded_off)
    }
}

fn delivered_to_first(gradients: &[OwnedGradient]) -> Vec<u32> {
    gradients[0].bits()
}

/// Equal parts that begin at multiples of 64 bytes, as in the ring.
fn cut(bytes: usize, count: usize) -> Vec<Range<usize>> {
    let each = bytes.div_ceil(count).next_multiple_of(64);
    (0..count).map(|i| (i * each).min(bytes)..((i + 1) * each).min(bytes)).collect()
}

fn states(elements: usize, ranks: usize) -> impl Strategy<Value = Vec<Rank>> {
    let rank = (gradient(elements), numbers(elements), numbers(elements))
        .prop_map(|(gradient, residual, velocity)| Rank { gradient, residual, velocity });
    prop::collection::vec(rank, ranks)
}

proptest! {
    #[test]
    fn the_whole_method_is_that_of_the_reference(
        ranks in (1usize..400, 1usize..5).prop_flat_map(|(elements, ranks)| states(elements, ranks)),
        chunk in 1usize..150,
        count in 1usize..9,
        momentum in momenta(),
        element in prop::sample::select(ELEMENTS.to_vec()),
        wire in prop::sample::select(Wire::ALL.to_vec()),
        channels in 1usize..3,
        piece in 1usize..5,
    ) {
        let ranks: Vec<Rank> = ranks
            .into_iter()
            .map(|rank| {
                let gradient = OwnedGradient::new(element, &rank.gradient).numbers();
                Rank { gradient, ..rank }
            })
            .collect();
        let parts = ranks.len() * channels;
        let cut = |bytes| cut(bytes, parts);
        let clears_velocity = true;
        let keeps_what_hops_lose = true;
        let cut = &cut;
        let method = Method { chunk, count, wire, momentum, clears_velocity, element, cut, keeps_what_hops_lose };
        let then = reference::step(&method, &ranks);
        let then = Outcome {
            sums: bits(&then.sums),
            selected: then.selected,
            scales: then.scales,
            sent: then.sent,
            summed: then.summed,
            delivered: bits(&then.delivered),
            residuals: then.ranks.iter().map(|rank| bits(&rank.residual)).collect(),
            velocities: then.ranks.iter().map(|rank| bits(&rank.velocity)).collect(),
        };
        for set in available_sets() {
            let kernels = Kernels { set, piece: piece * 64 };
            prop_assert_eq!(kernels.step(&method, &ranks), then.clone(), "{:?}", set);
        }
    }

    /// The numbers have so few digits that no f32 sum rounds, so every digit is accounted for.
    #[test]
    fn nothing_is_lost_between_all_ranks(
        numbers in (1usize..300, 1usize..6).prop_flat_map(|(elements, ranks)| {
            let one = || prop::collection::vec(-4000i32..4000, elements);
            prop::collection::vec((one(), one()), ranks)
        }),
        chunk in 1usize..100,
        count in 1usize..9,
        wire in prop::sample::select(Wire::ALL.to_vec()),
    ) {
        let float = |numbers: &[i32]| numbers.iter().map(|x| *x as f32 / 64.0).collect::<Vec<_>>();
        let before: Vec<Rank> = numbers
            .iter()
            .map(|(gradient, residual)| Rank {
                gradient: float(gradient),
                residual: float(residual),
                velocity: Vec::new(),
            })
            .collect();
        let cut = |bytes| cut(bytes, before.len());
        let (momentum, element) = (None, Element::F32);
        let clears_velocity = true;
        let keeps_what_hops_lose = true;
        let cut = &cut;
        let method = Method { chunk, count, wire, momentum, clears_velocity, element, cut, keeps_what_hops_lose };
        let after = reference::step(&method, &before);
        for element in 0..before[0].gradient.len() {
            let had = |rank: &Rank| f64::from(rank.gradient[element]) + f64::from(rank.residual[element]);
            let has = |rank: &Rank| f64::from(rank.residual[element]);
            let had: f64 = before.iter().map(had).sum();
            let has: f64 = after.ranks.iter().map(has).sum();
            prop_assert_eq!(had, has + f64::from(after.delivered[element]));
        }
    }
}
