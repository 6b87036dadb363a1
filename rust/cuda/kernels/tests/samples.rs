//! Random hosts for the tests.

use super::device::Device;
use super::memory::{Guarded, Typed};
use crate::codec::samples::{gradient, lengths, numbers};
use crate::codec::{ChunkGrid, Momentum, Wire};
use crate::cuda::kernels::norm_limit;
use crate::simd::element::Element;
use crate::simd::random::Random;
use proptest::prelude::*;

const ELEMENTS: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

fn momenta() -> impl Strategy<Value = Option<Momentum>> {
    let some = (prop_oneof![Just(0.0f32), Just(0.9), 0.0f32..1.0], any::<bool>());
    prop::option::of(some.prop_map(|(factor, nesterov)| Momentum { factor, nesterov }))
}

fn elements() -> impl Strategy<Value = Element> {
    prop::sample::select(ELEMENTS.to_vec())
}

pub(super) fn wires() -> impl Strategy<Value = Wire> {
    prop::sample::select(Wire::ALL.to_vec())
}

/// A host with few elements, with all kinds of numbers.
pub(super) fn small_devices() -> impl Strategy<Value = Device> {
    let numbers =
        lengths().prop_flat_map(|length| (gradient(length), numbers(length), numbers(length)));
    let clamp = prop::sample::select(vec![f32::MAX, norm_limit(2), norm_limit(64), 2.0]);
    (numbers, 1usize..200, elements(), momenta(), clamp, (0usize..4, 0usize..4, any::<bool>()))
        .prop_map(|((gradient, residual, velocity), chunk, element, momentum, clamp, offsets)| {
            Device {
                grid: ChunkGrid {
                    elements: residual.len(),
                    chunk_len: chunk.min(residual.len().max(1)),
                },
                element,
                gradient: Typed::new(element, &gradient, offsets.0),
                residual: Guarded::new(&residual, 77.0, offsets.1),
                velocity: Guarded::new(&velocity, 77.0, offsets.1),
                momentum,
                clears_velocity: offsets.2,
                clamp,
            }
        })
}

/// A host with chunks longer than a tile, or than what the registers hold. The numbers come from a
/// seed: they are too many for proptest. Some chunks are poisoned.
pub(super) fn large_devices() -> impl Strategy<Value = Device> {
    let chunk = prop_oneof![
        2 => prop::sample::select(vec![1024usize, 4096, 8192, 32768, 36864]),
        1 => 1000usize..9000,
        1 => prop::sample::select(vec![4095, 4097, 4100, 32764, 32769, 40000, 65536]),
    ];
    let bad = prop::option::weighted(0.4, (any::<prop::sample::Index>(), 0usize..3));
    (chunk, 0.1f64..2.6, any::<u64>(), bad, elements(), momenta(), prop::option::of(1usize..4))
        .prop_map(|(chunk, chunks, seed, bad, element, momentum, offset)| {
            let elements = ((chunk as f64 * chunks) as usize).max(1);
            let mut random = Random(seed | 1);
            let mut gradient = random.numbers(elements);
            if let Some((place, kind)) = bad {
                gradient[place.index(elements)] =
                    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
            }
            Device {
                grid: ChunkGrid { elements, chunk_len: chunk },
                element,
                gradient: Typed::new(element, &gradient, offset.unwrap_or(0)),
                residual: Guarded::new(&random.numbers(elements), 77.0, 0),
                velocity: Guarded::new(&random.numbers(elements), 77.0, 0),
                momentum,
                clears_velocity: seed % 2 == 0,
                clamp: f32::MAX,
            }
        })
}

impl Random {
    /// Numbers of both signs and of very different sizes, so that sums round.
    pub(super) fn numbers(&mut self, count: usize) -> Vec<f32> {
        let mut number = || {
            let bits = self.next();
            let mantissa = (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            mantissa * 2f32.powi((bits & 15) as i32 - 8)
        };
        (0..count).map(|_| number()).collect()
    }
}
