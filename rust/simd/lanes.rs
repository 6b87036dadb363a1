//! Floats 32 at a time, whatever their size in memory, for kernels in other folders.
//!
//! It is 32 lanes with every instruction set, so that sums over lanes are the same to the bit on
//! every CPU. Rounding is to nearest, ties to even; a NaN stays a NaN.

use super::half_precision::{BF16, F16};
use super::number::{Float, Pair, Pod, Stored};
#[cfg(target_arch = "x86_64")]
use super::x86::{BF16x8, BF16x16, F16x16, F16x32, F32x8, F32x16};
use std::mem::transmute;

/// How many floats a kernel processes at a time.
pub const LANES: usize = 32;

/// An instruction set's best types for 32 floats. Only kernels compiled for that set may use them.
pub trait Lanes {
    /// The type used for calculations.
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

/// 32 scalars, which the compiler packs into registers as it can.
type Scalars<T> = Pair<Pair<Pair<Pair<Pair<T>>>>>;

/// 32 elements in an array. Converting them is a loop, which the compiler vectorises; it wouldn't
/// vectorise that much code written out for 32 scalars.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Array<S>([S; LANES]);

// SAFETY: an array of plain data.
unsafe impl<S: Pod> Pod for Array<S> {}

impl<S: Stored<Number = f32>> Stored for Array<S> {
    type Number = Scalars<f32>;
    const COUNT: usize = LANES;

    #[inline(always)]
    fn widen(self) -> Scalars<f32> {
        let mut numbers = [0.0; LANES];
        for (number, stored) in numbers.iter_mut().zip(self.0) {
            *number = stored.widen();
        }
        // SAFETY: both are 32 adjacent floats.
        unsafe { transmute::<[f32; LANES], Scalars<f32>>(numbers) }
    }

    #[inline(always)]
    fn narrow(numbers: Scalars<f32>) -> Array<S> {
        // SAFETY: as in `widen`.
        let numbers = unsafe { transmute::<Scalars<f32>, [f32; LANES]>(numbers) };
        let mut array = [S::narrow(0.0); LANES];
        for (stored, number) in array.iter_mut().zip(numbers) {
            *stored = S::narrow(number);
        }
        Array(array)
    }
}

impl Lanes for Portable {
    type Number = Scalars<f32>;
    type F32 = Scalars<f32>;
    type F16 = Array<F16>;
    type BF16 = Array<BF16>;
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

/// The sum over all lanes, by halving: always in the same order.
#[inline(always)]
pub fn sum_lanes<N: Float>(numbers: N) -> f32 {
    const { assert!(size_of::<N>() == size_of::<[f32; LANES]>()) }
    // SAFETY: registers of 32 floats and an array of 32 have the same bits.
    sum_array(unsafe { std::mem::transmute_copy::<N, [f32; LANES]>(&numbers) })
}

/// The same for numbers that are not in registers yet.
#[inline(always)]
pub fn sum_array(mut lanes: [f32; LANES]) -> f32 {
    let mut count = LANES;
    while count > 1 {
        count /= 2;
        for lane in 0..count {
            lanes[lane] += lanes[lane + count];
        }
    }
    lanes[0]
}

/// Calls what `for_each_instruction_set!` compiled, with the types of an instruction set, which
/// must be available: `dispatch!(set, module[F16, F32](arguments))`.
macro_rules! dispatch {
    ($set:expr, $module:ident[$($type:ident),*]($($argument:expr),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        use $crate::simd::lanes::{Avx2, Avx512};
        use $crate::simd::lanes::{Lanes, Portable};
        use $crate::simd::instruction_set::InstructionSet;
        let set: InstructionSet = $set;
        assert!(set.is_available(), "this CPU does not have {set:?}");
        // SAFETY: the set is available, and the types are its own.
        unsafe {
            match set {
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
#[path = "lanes_tests.rs"]
mod tests;
