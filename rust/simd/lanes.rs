//! Lanes: floats 32 at a time, of any size in memory, for the kernels of other rooms.
//!
//! With every instruction set it is 32, so that a sum by lanes is the same to the last bit
//! whatever CPU adds it. Rounding is to nearest, ties to even; a NaN stays a NaN.

use super::half_precision::{BF16, F16};
use super::number::{Float, Pair, Pod, Stored};
#[cfg(target_arch = "x86_64")]
use super::x86::{BF16x8, BF16x16, F16x16, F16x32, F32x8, F32x16};
use std::mem::transmute;

/// How many floats a kernel takes at a time.
pub const LANES: usize = 32;

/// The types of 32 floats that an instruction set calculates best with. They must never be named
/// but by the kernels of their set.
pub trait Lanes {
    /// What is calculated with.
    type Number: Float;
    type F32: Stored<Number = Self::Number>;
    type F16: Stored<Number = Self::Number>;
    type BF16: Stored<Number = Self::Number>;
}

pub struct Portable;
#[cfg(target_arch = "x86_64")]
pub struct Avx2;
#[cfg(target_arch = "x86_64")]
pub struct Avx512;

/// 32 of them one by one, which the compiler puts into registers as it can.
type OneByOne<T> = Pair<Pair<Pair<Pair<Pair<T>>>>>;

/// 32 of them in a row. To convert them is so much work that it is not done one by one, which the
/// compiler would leave at, but in a loop, which it vectorises.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Row<S>([S; LANES]);

// SAFETY: an array of such.
unsafe impl<S: Pod> Pod for Row<S> {}

impl<S: Stored<Number = f32>> Stored for Row<S> {
    type Number = OneByOne<f32>;
    const COUNT: usize = LANES;

    #[inline(always)]
    fn widen(self) -> OneByOne<f32> {
        let mut numbers = [0.0; LANES];
        for (number, stored) in numbers.iter_mut().zip(self.0) {
            *number = stored.widen();
        }
        // SAFETY: both are so many floats one after the other.
        unsafe { transmute::<[f32; LANES], OneByOne<f32>>(numbers) }
    }

    #[inline(always)]
    fn narrow(numbers: OneByOne<f32>) -> Row<S> {
        // SAFETY: as in `widen`.
        let numbers = unsafe { transmute::<OneByOne<f32>, [f32; LANES]>(numbers) };
        let mut row = [S::narrow(0.0); LANES];
        for (stored, number) in row.iter_mut().zip(numbers) {
            *stored = S::narrow(number);
        }
        Row(row)
    }
}

impl Lanes for Portable {
    type Number = OneByOne<f32>;
    type F32 = OneByOne<f32>;
    type F16 = Row<F16>;
    type BF16 = Row<BF16>;
}

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    type Number = Pair<Pair<F32x8>>;
    type F32 = Pair<Pair<F32x8>>;
    type F16 = Pair<F16x16>;
    type BF16 = Pair<Pair<BF16x8>>;
}

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    type Number = Pair<F32x16>;
    type F32 = Pair<F32x16>;
    type F16 = F16x32;
    type BF16 = Pair<BF16x16>;
}

/// The sum over all lanes, by halves: always in the same order.
#[inline(always)]
pub fn sum_lanes<N: Float>(numbers: N) -> f32 {
    const { assert!(size_of::<N>() == size_of::<[f32; LANES]>()) }
    // SAFETY: registers of floats and an array of as many are the same bits.
    let mut lanes = unsafe { std::mem::transmute_copy::<N, [f32; LANES]>(&numbers) };
    let mut count = LANES;
    while count > 1 {
        count /= 2;
        for lane in 0..count {
            lanes[lane] += lanes[lane + count];
        }
    }
    lanes[0]
}

/// Calls what `for_each_instruction_set!` compiled, with the types of these instructions, which
/// must be here: `dispatch!(instructions, module[F16, F32](arguments))`.
macro_rules! dispatch {
    ($instructions:expr, $module:ident[$($type:ident),*]($($argument:expr),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        use $crate::simd::lanes::{Avx2, Avx512};
        use $crate::simd::lanes::{Lanes, Portable};
        let instructions: $crate::simd::instruction_set::InstructionSet = $instructions;
        assert!(instructions.is_available(), "{instructions:?} on a CPU that has not got them");
        // SAFETY: the instructions are here, and the types are the set's own.
        unsafe {
            match instructions {
                InstructionSet::Portable => {
                    $module::portable::<$(<Portable as Lanes>::$type),*>($($argument),*)
                }
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => {
                    $module::avx2::<$(<Avx2 as Lanes>::$type),*>($($argument),*)
                }
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => {
                    $module::avx512::<$(<Avx512 as Lanes>::$type),*>($($argument),*)
                }
            }
        }
    }};
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests {
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

    fn sets_here() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::ALL.iter().copied().filter(|set| set.is_available())
    }

    fn assert_same(ours: f32, theirs: f32, from: u16) {
        let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
        assert!(same, "{from:#06x}: {ours} instead of {theirs}");
    }

    #[test]
    fn every_f16_widens_as_in_half_and_comes_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for set in sets_here() {
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
        for set in sets_here() {
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

    /// Narrows with every instruction set, at every place in a register and in the tail.
    fn assert_narrows_as_half(numbers: &[f32]) {
        let mut narrow = vec![0; numbers.len()];
        for set in sets_here() {
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
        // Every exponent, with each mantissa that is or is beside a tie of either type or a
        // carry, or that keeps a NaN's payload only in bits that are lost.
        let mut mantissas = vec![0x40_0000, 0x7f_ffff, 0x7f_f000, 0x7f_8000];
        for bit in 0..23 {
            let tie: u32 = 1 << bit;
            mantissas.extend([tie, tie - 1, tie + 1, (tie * 3) & 0x7f_ffff, 0x7f_ffff - tie]);
        }
        let bits = (0..512).flat_map(|top| mantissas.iter().map(move |low| (top << 23) | low));
        let numbers: Vec<f32> = bits.chain([0, 1 << 31]).map(f32::from_bits).collect();
        assert_narrows_as_half(&numbers);
        // The rest of a slice, which is filled up to a block.
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
}
