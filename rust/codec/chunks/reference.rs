//! The reference: the whole method for one bucket and all ranks, in plain scalar code. Kernels and
//! engine are tested against it, so it must share no arithmetic with them: its 16-bit floats are
//! those of the `half` crate, in software.

use super::Momentum;
use crate::codec::Wire;
use crate::simd::element::Element;
use half::{bf16, f16};
use std::ops::Range;

/// A rank's state. 16-bit gradients and delivered values are given as f32.
#[derive(Debug, Clone)]
pub(crate) struct Rank {
    pub gradient: Vec<f32>,
    pub residual: Vec<f32>,
    /// Unused without momentum.
    pub velocity: Vec<f32>,
}

/// The options, the same on all ranks.
pub(crate) struct Method<'a> {
    /// Elements in a chunk.
    pub chunk: usize,
    /// Chunks that are sent.
    pub count: usize,
    pub wire: Wire,
    pub momentum: Option<Momentum>,
    /// Whether sending a chunk clears its velocity.
    pub clears_velocity: bool,
    /// The type of the gradient.
    pub element: Element,
    /// How a number of bytes on the wire is cut for the ring: one range per rank, or several per
    /// rank if the ring has several channels.
    pub cut: &'a dyn Fn(usize) -> Vec<Range<usize>>,
    /// Whether the rounding error of a hop returns to the residual. NCCL doesn't report it.
    pub keeps_what_hops_lose: bool,
}

/// The result of a step. `ranks` have their new residuals and velocities, and the delivered
/// gradient, which is the same for all.
pub(crate) struct Step {
    pub ranks: Vec<Rank>,
    /// The sum of the ranks' norms, per chunk.
    pub sums: Vec<f32>,
    pub selected: Vec<u32>,
    /// Per selected chunk.
    pub scales: Vec<f32>,
    /// The bytes of all selected chunks, per rank.
    pub sent: Vec<Vec<u8>>,
    /// The ring's sum of those.
    pub summed: Vec<u8>,
    pub delivered: Vec<f32>,
}

/// One step of all ranks, which form the ring in their order.
///
/// A chunk that is poisoned on any rank is delivered as infinity or NaN to all, and nothing of it
/// is sent: if it is selected for lack of others, zeros are sent. A rank on which it is poisoned
/// keeps its old residual and velocity; the others keep their gradient in the residual.
pub(crate) fn step(method: &Method, before: &[Rank]) -> Step {
    let mut ranks = before.to_vec();
    let elements = before[0].gradient.len();
    let starts = (0..elements).step_by(method.chunk);
    let ranges: Vec<_> = starts.map(|start| start..elements.min(start + method.chunk)).collect();

    let mut sums = vec![0.0; ranges.len()];
    for rank in &mut ranks {
        for (range, sum) in ranges.iter().zip(&mut sums) {
            let velocity = match method.momentum {
                Some(_) => &mut rank.velocity[range.clone()],
                None => &mut [],
            };
            let residual = &mut rank.residual[range.clone()];
            let norms =
                accumulate(&rank.gradient[range.clone()], residual, velocity, method.momentum);
            *sum = add_norm(*sum, norms.1);
        }
    }

    let selected = select(&sums, method.count);
    let scales: Vec<f32> =
        selected.iter().map(|chunk| scale_for(sums[*chunk as usize], method.wire)).collect();
    let mut sent = vec![Vec::new(); ranks.len()];
    for (rank, sent) in ranks.iter_mut().zip(&mut sent) {
        for (chunk, scale) in selected.iter().zip(&scales) {
            let range = ranges[*chunk as usize].clone();
            if !sums[*chunk as usize].is_finite() {
                sent.resize(sent.len() + range.len() * bytes(method.wire), 0);
                continue;
            }
            pack(&mut rank.residual[range.clone()], *scale, method.wire, sent);
            if method.momentum.is_some() && method.clears_velocity {
                rank.velocity[range].fill(0.0);
            }
        }
    }

    let (summed, rounded_off) = ring(method, &sent);
    let mut delivered = vec![0.0; elements];
    for (range, sum) in ranges.iter().zip(&sums) {
        if !sum.is_finite() {
            delivered[range.clone()].fill(*sum);
        }
    }
    let mut at = 0;
    for (chunk, scale) in selected.iter().zip(&scales) {
        let chunk = *chunk as usize;
        for element in ranges[chunk].clone() {
            if sums[chunk].is_finite() {
                let sum = read(method.wire, &summed, at);
                let largest = match method.element {
                    Element::F16 => f16::MAX.to_f32_const(),
                    Element::BF16 => bf16::MAX.to_f32_const(),
                    _ => f32::MAX,
                };
                let mut rounded = rounded_to(method.element, sum / scale);
                let is_finite = (sum / scale).is_finite();
                if is_finite {
                    rounded = rounded.clamp(-largest, largest);
                }
                delivered[element] = rounded;
                let rounded_off = rounded_off.iter().filter(|_| method.keeps_what_hops_lose);
                for (rank, rounded_off) in ranks.iter_mut().zip(rounded_off) {
                    rank.residual[element] += rounded_off[at] / scale;
                }
                if method.element != Element::F32 && is_finite {
                    ranks[0].residual[element] += sum / scale - rounded;
                }
            }
            at += 1;
        }
    }
    for rank in &mut ranks {
        rank.gradient.clone_from(&delivered);
    }
    Step { ranks, sums, selected, scales, sent, summed, delivered }
}

/// The norms of the gradient and of the new residual of a chunk.
pub(crate) fn accumulate(
    gradient: &[f32],
    residual: &mut [f32],
    velocity: &mut [f32],
    momentum: Option<Momentum>,
) -> (f32, f32) {
    let (mut new_residual, mut new_velocity) = (residual.to_vec(), velocity.to_vec());
    for i in 0..gradient.len() {
        let mut corrected = gradient[i];
        if let Some(Momentum { factor, nesterov }) = momentum {
            new_velocity[i] = factor * velocity[i] + gradient[i];
            corrected = new_velocity[i];
            if nesterov {
                corrected = gradient[i] + factor * new_velocity[i];
            }
        }
        new_residual[i] = residual[i] + corrected;
    }
    let gradient_norm = norm(gradient);
    let is_nan = new_residual.iter().chain(&new_velocity).any(|number| number.is_nan());
    if is_nan {
        return (gradient_norm, f32::NAN);
    }
    if !new_residual.iter().chain(&new_velocity).all(|number| number.is_finite()) {
        return (gradient_norm, f32::INFINITY);
    }
    residual.copy_from_slice(&new_residual);
    velocity.copy_from_slice(&new_velocity);
    (gradient_norm.min(f32::MAX), norm(residual).min(f32::MAX))
}

/// The sum of magnitudes: 32 interleaved sums, then those added by halving.
pub(crate) fn norm(numbers: &[f32]) -> f32 {
    let mut sums: Vec<f32> = (0..32)
        .map(|lane| numbers.iter().skip(lane).step_by(32).fold(0.0, |sum, x| sum + x.abs()))
        .collect();
    while sums.len() > 1 {
        let (first, second) = sums.split_at(sums.len() / 2);
        sums = first.iter().zip(second).map(|(a, b)| a + b).collect();
    }
    sums[0]
}

fn add_norm(total: f32, more: f32) -> f32 {
    let is_finite = total.is_finite() && more.is_finite();
    if is_finite { (total + more).min(f32::MAX) } else { total + more }
}

pub(crate) fn select(sums: &[f32], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..sums.len() as u32).collect();
    // The sort is stable: ties stay in the order of their indices.
    order.sort_by(|a, b| {
        let (a, b) = (sums[*a as usize], sums[*b as usize]);
        match (a.is_finite(), b.is_finite()) {
            (true, true) => b.partial_cmp(&a).expect("neither is NaN"),
            (a, b) => b.cmp(&a),
        }
    });
    order.truncate(count);
    order.sort();
    order
}

pub(crate) fn scale_for(sum: f32, wire: Wire) -> f32 {
    if wire != Wire::F16 || !sum.is_finite() || sum == 0.0 {
        return 1.0;
    }
    let (sum, least) = (f64::from(sum), 2f64.powi(-126));
    if sum == f64::from(f32::MAX) {
        return least as f32;
    }
    let mut scale = 2f64.powi(126);
    while sum * scale > 32768.0 && scale > least {
        scale /= 2.0;
    }
    scale as f32
}

/// Appends what a chunk sends.
pub(crate) fn pack(residual: &mut [f32], scale: f32, wire: Wire, sent: &mut Vec<u8>) {
    for residual in residual {
        let limit = match wire {
            Wire::F32 => f32::MAX,
            _ => bf16::MAX.to_f32_const(),
        };
        let scaled = residual.clamp(-limit, limit) * scale;
        write(wire, sent, scaled);
        let count = sent.len() / bytes(wire);
        let back = f64::from(read(wire, sent, count - 1)) / f64::from(scale);
        *residual = (f64::from(*residual) - back) as f32;
    }
}

/// The sum of what the ranks sent, as the ring calculates it: range number `c` starts at rank `c`
/// and is rounded at every rank that adds its share. Also returns each rank's rounding errors.
fn ring(method: &Method, sent: &[Vec<u8>]) -> (Vec<u8>, Vec<Vec<f32>>) {
    let (wire, ranks) = (method.wire, sent.len());
    let mut rounded_off = vec![vec![0.0; sent[0].len() / bytes(wire)]; ranks];
    let mut summed = Vec::new();
    for (number, range) in (method.cut)(sent[0].len()).into_iter().enumerate() {
        assert_eq!(range.start, summed.len(), "ranges must cover everything, in order");
        let elements = range.start / bytes(wire)..range.end / bytes(wire);
        for at in elements {
            let mut partial = read(wire, &sent[number % ranks], at);
            for hop in 1..ranks {
                let rank = (number + hop) % ranks;
                let sum = hop_sum(wire, partial, read(wire, &sent[rank], at));
                partial = sum.0;
                rounded_off[rank][at] += sum.1;
            }
            write(wire, &mut summed, partial);
        }
    }
    (summed, rounded_off)
}

/// The sum, rounded to the wire format, and the rounding error.
pub(crate) fn hop_sum(wire: Wire, incoming: f32, own: f32) -> (f32, f32) {
    let mut bytes = Vec::new();
    write(wire, &mut bytes, incoming + own);
    let rounded = read(wire, &bytes, 0);
    if wire == Wire::F32 || !rounded.is_finite() {
        return (rounded, 0.0);
    }
    // In this order no difference has more digits than an f64.
    let (large, small) = match incoming.abs() > own.abs() {
        true => (f64::from(incoming), f64::from(own)),
        false => (f64::from(own), f64::from(incoming)),
    };
    (rounded, ((large - f64::from(rounded)) + small) as f32)
}

pub(crate) fn bytes(wire: Wire) -> usize {
    if wire == Wire::F32 { 4 } else { 2 }
}

/// The element with this index.
pub(crate) fn read(wire: Wire, from: &[u8], index: usize) -> f32 {
    let from = &from[index * bytes(wire)..];
    match wire {
        Wire::F16 => f16::from_ne_bytes([from[0], from[1]]).to_f32_const(),
        Wire::BF16 => bf16::from_ne_bytes([from[0], from[1]]).to_f32_const(),
        Wire::F32 => f32::from_ne_bytes([from[0], from[1], from[2], from[3]]),
    }
}

/// Appends an element.
pub(crate) fn write(wire: Wire, to: &mut Vec<u8>, number: f32) {
    match wire {
        Wire::F16 => to.extend(f16::from_f32_const(number).to_ne_bytes()),
        Wire::BF16 => to.extend(bf16::from_f32_const(number).to_ne_bytes()),
        Wire::F32 => to.extend(number.to_ne_bytes()),
    }
}

/// The nearest number that this element type can represent.
pub(crate) fn rounded_to(element: Element, number: f32) -> f32 {
    match element {
        Element::F16 => f16::from_f32_const(number).to_f32_const(),
        Element::BF16 => bf16::from_f32_const(number).to_f32_const(),
        _ => number,
    }
}
