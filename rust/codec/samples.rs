//! Samples: numbers for the tests, ordinary and nasty.

use crate::simd::instructions::Instructions;
use proptest::prelude::*;

/// The instruction sets that can be tested here.
pub fn sets_here() -> impl Iterator<Item = Instructions> {
    Instructions::ALL.iter().copied().filter(|set| set.are_here())
}

/// Any magnitude, of every size equally often, and often a special one.
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

/// So many numbers: mostly such as gradients have, at times of any size, or even not finite.
pub fn numbers(count: usize) -> impl Strategy<Value = Vec<f32>> {
    let ordinary = prop::collection::vec(-1.0f32..1.0, count);
    let size = (any_magnitude(), ordinary.clone());
    let of_one_size =
        size.prop_map(|(size, numbers)| numbers.into_iter().map(|number| number * size).collect());
    let of_any_size = prop::collection::vec(any_finite(), count);
    prop_oneof![3 => ordinary, 3 => of_one_size, 1 => of_any_size]
}

/// The same, but perhaps with some that are not finite.
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

/// How many elements: mostly less than a few blocks, at times more.
pub fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..100, 1 => 100usize..1000]
}

/// The bits, with one NaN for all: which one it is, is nobody's business.
pub fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}
