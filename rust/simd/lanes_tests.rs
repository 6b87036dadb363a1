//! Compares conversions of 16-bit floats with the `half` crate, for every instruction set.

use super::*;
use crate::simd::blocks::{Block, blocks, blocks_mut, bytes_of, bytes_of_mut};
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use half::{bf16, f16};
use proptest::prelude::*;

for_each_instruction_set! {
    mod convert_for = convert;
    <A: Stored, B: Stored<Number = A::Number>>(to: &mut [u8], from: &[u8])
}

/// Converts elements stored as `A` to `B`.
///
/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn convert<A: Stored, B: Stored<Number = A::Number>>(to: &mut [u8], from: &[u8]) {
    const { assert!(A::COUNT == LANES && B::COUNT == LANES) }
    let ((to, to_tail), (from, from_tail)) = (blocks_mut::<B>(to), blocks::<A>(from));
    assert_eq!(to.len(), from.len());
    for (to, from) in to.iter_mut().zip(from) {
        to.0 = B::narrow(from.0.widen());
    }
    let from = Block::<A>::load_tail(from_tail);
    Block(B::narrow(from.0.widen())).store_tail(to_tail);
}

fn widen_f16_with(set: InstructionSet, to: &mut [f32], from: &[u16]) {
    dispatch!(set, convert_for[F16, F32](bytes_of_mut(to), bytes_of(from)));
}

fn narrow_f16_with(set: InstructionSet, to: &mut [u16], from: &[f32]) {
    dispatch!(set, convert_for[F32, F16](bytes_of_mut(to), bytes_of(from)));
}

fn widen_bf16_with(set: InstructionSet, to: &mut [f32], from: &[u16]) {
    dispatch!(set, convert_for[BF16, F32](bytes_of_mut(to), bytes_of(from)));
}

fn narrow_bf16_with(set: InstructionSet, to: &mut [u16], from: &[f32]) {
    dispatch!(set, convert_for[F32, BF16](bytes_of_mut(to), bytes_of(from)));
}

fn available_sets() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.iter().copied().filter(|set| set.is_available())
}

fn assert_same(ours: f32, theirs: f32, from: u16) {
    let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
    assert!(same, "{from:#06x}: {ours} instead of {theirs}");
}

#[test]
fn every_f16_widens_as_in_half_and_comes_back() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for set in available_sets() {
        let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
        widen_f16_with(set, &mut wide, &all);
        narrow_f16_with(set, &mut back, &wide);
        for (from, (wide, back)) in all.iter().zip(wide.into_iter().zip(back)) {
            assert_same(wide, f16::from_bits(*from).to_f32_const(), *from);
            let is_nan = f16::from_bits(*from).is_nan();
            assert!(back == *from || (is_nan && f16::from_bits(back).is_nan()), "{from:#06x}");
        }
    }
}

#[test]
fn every_bf16_widens_as_in_half_and_comes_back() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for set in available_sets() {
        let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
        widen_bf16_with(set, &mut wide, &all);
        narrow_bf16_with(set, &mut back, &wide);
        for (from, (wide, back)) in all.iter().zip(wide.into_iter().zip(back)) {
            assert_same(wide, bf16::from_bits(*from).to_f32_const(), *from);
            let is_nan = bf16::from_bits(*from).is_nan();
            assert!(back == *from || (is_nan && bf16::from_bits(back).is_nan()), "{from:#06x}");
        }
    }
}

/// Narrows with every instruction set, in every lane of a register and in the tail.
fn assert_narrows_as_half(numbers: &[f32]) {
    let mut narrow = vec![0; numbers.len()];
    for set in available_sets() {
        narrow_f16_with(set, &mut narrow, numbers);
        for (from, to) in numbers.iter().zip(&narrow) {
            let (ours, theirs) = (f16::from_bits(*to), f16::from_f32_const(*from));
            let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && from.is_nan());
            assert!(same, "{set:?}, f16 of {:#010x}: {ours:?}", from.to_bits());
        }
        narrow_bf16_with(set, &mut narrow, numbers);
        for (from, to) in numbers.iter().zip(&narrow) {
            let (ours, theirs) = (bf16::from_bits(*to), bf16::from_f32_const(*from));
            let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && from.is_nan());
            assert!(same, "{set:?}, bf16 of {:#010x}: {ours:?}", from.to_bits());
        }
    }
}

#[test]
fn ties_limits_and_nans_narrow_as_in_half() {
    // Every exponent, with each mantissa at or next to a tie of either type or a carry, or with
    // a NaN's payload only in bits that are lost.
    let mut mantissas = vec![0x40_0000, 0x7f_ffff, 0x7f_f000, 0x7f_8000];
    for bit in 0..23 {
        let tie: u32 = 1 << bit;
        mantissas.extend([tie, tie - 1, tie + 1, (tie * 3) & 0x7f_ffff, 0x7f_ffff - tie]);
    }
    let bits = (0..512).flat_map(|top| mantissas.iter().map(move |low| (top << 23) | low));
    let numbers: Vec<f32> = bits.chain([0, 1 << 31]).map(f32::from_bits).collect();
    assert_narrows_as_half(&numbers);
    // The tail of a slice, which is padded to a block.
    for short in numbers.chunks(7) {
        assert_narrows_as_half(short);
    }
}

proptest! {
    #[test]
    fn random_numbers_narrow_as_in_half(
        bits in prop::collection::vec(any::<u32>(), 0..300),
        near in prop::collection::vec(-70000.0f32..70000.0, 0..100),
        small in prop::collection::vec(-1e-4f32..1e-4, 0..100),
    ) {
        let mut numbers: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        numbers.extend(near);
        numbers.extend(small);
        assert_narrows_as_half(&numbers);
    }
}
