//! Inputs for tests: numbers, ordinary and nasty.

use super::{Gradient, Momentum};
use crate::simd::element::Element;
use crate::simd::instruction_set::InstructionSet;
use half::{bf16, f16};
use proptest::prelude::*;

/// The instruction sets of this CPU.
pub fn available_sets() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.iter().copied().filter(|set| set.is_available())
}

/// Any magnitude, every exponent equally often, and often a special one.
pub fn any_magnitude() -> impl Strategy<Value = f32> {
    let specials = vec![
        0.0,
        f32::from_bits(1),
        f32::MIN_POSITIVE.next_down(),
        f32::MIN_POSITIVE,
        1.0,
        65504.0,
        f32::from_bits(0x7f7e_ffff),
        f32::from_bits(0x7f7f_0000),
        f32::from_bits(0x7f7f_8000),
        f32::MAX.next_down(),
        f32::MAX,
    ];
    prop_oneof![
        6 => (0u32..0x7f80_0000).prop_map(f32::from_bits),
        2 => (0u32..255).prop_map(|exponent| f32::from_bits(exponent << 23)),
        1 => prop::sample::select(specials),
    ]
}

pub fn any_finite() -> impl Strategy<Value = f32> {
    (any_magnitude(), any::<bool>())
        .prop_map(|(number, minus)| if minus { -number } else { number })
}

/// Finite numbers: mostly like those of gradients, sometimes of any size.
pub fn numbers(count: usize) -> impl Strategy<Value = Vec<f32>> {
    let ordinary = prop::collection::vec(-1.0f32..1.0, count);
    let size = (any_magnitude(), ordinary.clone());
    let of_one_size =
        size.prop_map(|(size, numbers)| numbers.into_iter().map(|number| number * size).collect());
    let of_any_size = prop::collection::vec(any_finite(), count);
    prop_oneof![3 => ordinary, 3 => of_one_size, 1 => of_any_size]
}

/// Like [`numbers`], but some may not be finite.
pub fn gradient(count: usize) -> impl Strategy<Value = Vec<f32>> {
    let bad = prop::sample::select(vec![f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    let some_bad = prop_oneof![
        3 => Just(Vec::new()),
        1 => prop::collection::vec((any::<prop::sample::Index>(), bad), 1..3),
    ];
    (numbers(count), some_bad).prop_map(|(mut numbers, some_bad)| {
        for (index, bad) in some_bad {
            if !numbers.is_empty() {
                let index = index.index(numbers.len());
                numbers[index] = bad;
            }
        }
        numbers
    })
}

/// A number of elements: mostly less than a few blocks, sometimes more.
pub fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..100, 1 => 100usize..1000]
}

/// The bits, with the same NaN for all NaNs: payloads don't matter.
pub fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// The bits, with NaNs as they are.
pub fn exact_bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// A gradient that owns its elements.
#[derive(Debug, Clone, PartialEq)]
pub enum OwnedGradient {
    F32(Vec<f32>),
    F16(Vec<u16>),
    BF16(Vec<u16>),
}

pub const ELEMENTS: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

impl OwnedGradient {
    pub fn new(element: Element, numbers: &[f32]) -> OwnedGradient {
        let numbers = numbers.iter();
        match element {
            Element::F16 => {
                OwnedGradient::F16(numbers.map(|x| f16::from_f32_const(*x).to_bits()).collect())
            }
            Element::BF16 => {
                OwnedGradient::BF16(numbers.map(|x| bf16::from_f32_const(*x).to_bits()).collect())
            }
            _ => OwnedGradient::F32(numbers.copied().collect()),
        }
    }

    pub fn borrow(&mut self) -> Gradient<'_> {
        match self {
            OwnedGradient::F32(numbers) => Gradient::F32(numbers),
            OwnedGradient::F16(bits) => Gradient::F16(bits),
            OwnedGradient::BF16(bits) => Gradient::BF16(bits),
        }
    }

    /// The bits of every element as f32, with the same NaN for all NaNs.
    pub fn bits(&self) -> Vec<u32> {
        bits(&self.numbers())
    }

    /// The bits of every element as stored.
    pub fn exact_bits(&self) -> Vec<u32> {
        match self {
            OwnedGradient::F32(numbers) => exact_bits(numbers),
            OwnedGradient::F16(halves) | OwnedGradient::BF16(halves) => {
                halves.iter().map(|half| u32::from(*half)).collect()
            }
        }
    }

    pub fn numbers(&self) -> Vec<f32> {
        match self {
            OwnedGradient::F32(numbers) => numbers.clone(),
            OwnedGradient::F16(bits) => {
                bits.iter().map(|x| f16::from_bits(*x).to_f32_const()).collect()
            }
            OwnedGradient::BF16(bits) => {
                bits.iter().map(|x| bf16::from_bits(*x).to_f32_const()).collect()
            }
        }
    }
}

pub fn momenta() -> impl Strategy<Value = Option<Momentum>> {
    let some = (prop_oneof![Just(0.0f32), Just(0.9), 0.0f32..1.0], any::<bool>());
    prop::option::of(some.prop_map(|(factor, nesterov)| Momentum { factor, nesterov }))
}

/// Sums of norms: often equal, sometimes negative or not finite.
pub fn sums() -> impl Strategy<Value = Vec<f32>> {
    let few = prop::sample::select(vec![0.0, -0.0, 1.0, 2.0, 1e-40, f32::MAX]);
    let not_finite =
        prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN]);
    let sum = prop_oneof![4 => few, 4 => 0.0f32..1e6, 1 => -1e3f32..0.0, 1 => not_finite];
    prop::collection::vec(sum, 0..80)
}
