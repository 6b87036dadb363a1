//! Registers of floats as numbers. x86 has instructions to convert half precision, which the
//! compiler doesn't find in a loop over single elements.
//!
//! Only kernels compiled for a type's instruction set may use it; every `unsafe` here relies on
//! that.

use super::half_precision::BF16;
use super::number::{Divisible, Float, Number, Pair, Pod, Stored};
use std::arch::x86_64::*;
use std::mem::transmute;

/// A register of half-precision floats as stored in memory, for AVX2 with F16C.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F16x16([u16; 16]);

/// A register of half-precision floats as stored in memory, for AVX-512.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F16x32([u16; 32]);

/// Half a register of bfloat16 floats as stored in memory, for AVX2.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct BF16x8([u16; 8]);

/// Half a register of bfloat16 floats as stored in memory, for AVX-512.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct BF16x16([u16; 16]);

/// Half of an [`F16x16`], widened.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x8(__m256);

/// Half of an [`F16x32`], widened.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x16(__m512);

macro_rules! pod {
    ($($numbers:ident),*) => {
        $(
            // SAFETY: an array of integers or a register of floats.
            unsafe impl Pod for $numbers {}
        )*
    };
}

pod!(F16x16, F16x32, BF16x8, BF16x16, F32x8, F32x16);

impl Stored for F16x16 {
    type Number = Pair<F32x8>;
    const COUNT: usize = 16;

    #[inline(always)]
    fn widen(self) -> Pair<F32x8> {
        let halves = self.0.as_ptr().cast::<__m128i>();
        // SAFETY: only AVX2 kernels use this type; the array has the 32 bytes read.
        unsafe {
            let first = _mm256_cvtph_ps(_mm_loadu_si128(halves));
            let second = _mm256_cvtph_ps(_mm_loadu_si128(halves.add(1)));
            Pair(F32x8(first), F32x8(second))
        }
    }

    #[inline(always)]
    fn narrow(numbers: Pair<F32x8>) -> F16x16 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        let mut halves = [0; 16];
        // SAFETY: only AVX2 kernels use this type; the array has the 32 bytes written.
        unsafe {
            let first = _mm256_cvtps_ph::<NEAREST>(numbers.0.0);
            let second = _mm256_cvtps_ph::<NEAREST>(numbers.1.0);
            // One store, not two: stores are this loop's bottleneck.
            _mm256_storeu_si256(halves.as_mut_ptr().cast(), _mm256_set_m128i(second, first));
        }
        F16x16(halves)
    }
}

impl Stored for F16x32 {
    type Number = Pair<F32x16>;
    const COUNT: usize = 32;

    #[inline(always)]
    fn widen(self) -> Pair<F32x16> {
        let halves = self.0.as_ptr().cast::<__m256i>();
        // SAFETY: only AVX-512 kernels use this type; the array has the 64 bytes read.
        unsafe {
            let first = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
            let second = _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(1)));
            Pair(F32x16(first), F32x16(second))
        }
    }

    #[inline(always)]
    fn narrow(numbers: Pair<F32x16>) -> F16x32 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let mut halves = [0; 32];
        // SAFETY: only AVX-512 kernels use this type; the array has the 64 bytes written.
        unsafe {
            let first = _mm512_castsi256_si512(_mm512_cvtps_ph::<NEAREST>(numbers.0.0));
            let second = _mm512_cvtps_ph::<NEAREST>(numbers.1.0);
            let both = _mm512_inserti64x4::<1>(first, second);
            _mm512_storeu_si512(halves.as_mut_ptr().cast(), both);
        }
        F16x32(halves)
    }
}

/// In order, unlike `half_precision::BF16x2`, because these are combined with f32 from memory.
macro_rules! bfloat16 {
    ($stored:ident, $numbers:ident, $count:literal) => {
        impl Stored for $stored {
            type Number = $numbers;
            const COUNT: usize = $count;

            #[inline(always)]
            fn widen(self) -> $numbers {
                let mut numbers = [0.0; $count];
                for (number, bits) in numbers.iter_mut().zip(self.0) {
                    *number = BF16(bits).widen();
                }
                // SAFETY: a register of floats and an array of them have the same bits.
                unsafe { transmute::<[f32; $count], $numbers>(numbers) }
            }

            #[inline(always)]
            fn narrow(numbers: $numbers) -> $stored {
                // SAFETY: as in `widen`.
                let numbers = unsafe { transmute::<$numbers, [f32; $count]>(numbers) };
                let mut stored = [0; $count];
                for (bits, number) in stored.iter_mut().zip(numbers) {
                    *bits = BF16::narrow(number).0;
                }
                $stored(stored)
            }
        }
    };
}

bfloat16!(BF16x8, F32x8, 8);
bfloat16!(BF16x16, F32x16, 16);

macro_rules! stored_as_itself {
    ($($numbers:ident: $count:literal),*) => {
        $(impl Stored for $numbers {
            type Number = Self;
            const COUNT: usize = $count;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(numbers: Self) -> Self {
                numbers
            }
        })*
    };
}

stored_as_itself!(F32x8: 8, F32x16: 16);

macro_rules! register {
    ($numbers:ident: $add:ident $subtract:ident $multiply:ident $divide:ident $splat:ident $min:ident $max:ident $unless_nan:ident $abs:ident $if_finite:ident) => {
        impl Number for $numbers {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                // SAFETY: only kernels for this instruction set use this type.
                Self(unsafe { $add(self.0, other.0) })
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $multiply(self.0, other.0) })
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                // The instruction returns the second where both are equal or either is NaN.
                // SAFETY: as for `add`.
                Self(unsafe { $unless_nan(self.0, $min(self.0, other.0)) })
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $unless_nan(self.0, $max(self.0, other.0)) })
            }
        }

        impl Divisible for $numbers {
            #[inline(always)]
            fn divide(self, by: usize) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $divide(self.0, $splat(by as f32)) })
            }
        }

        impl Float for $numbers {
            #[inline(always)]
            fn splat(number: f32) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $splat(number) })
            }

            #[inline(always)]
            fn subtract(self, other: Self) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $subtract(self.0, other.0) })
            }

            #[inline(always)]
            fn abs(self) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $abs(self.0) })
            }

            #[inline(always)]
            fn select_if_finite(self, yes: Self, no: Self) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $if_finite(self.0, yes.0, no.0) })
            }
        }
    };
}

register!(F32x8: _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_div_ps _mm256_set1_ps _mm256_min_ps _mm256_max_ps unless_nan_8 abs_8 if_finite_8);
register!(F32x16: _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_div_ps _mm512_set1_ps _mm512_min_ps _mm512_max_ps unless_nan_16 _mm512_abs_ps if_finite_16);

/// `chosen`, except `first` where `first` is NaN.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn unless_nan_8(first: __m256, chosen: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_ps(chosen, first, _mm256_cmp_ps::<_CMP_UNORD_Q>(first, first)) }
}

/// `chosen`, except `first` where `first` is NaN.
///
/// # Safety
/// AVX-512 is available.
#[inline(always)]
unsafe fn unless_nan_16(first: __m512, chosen: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_mask_mov_ps(chosen, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(first, first), first) }
}

/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn abs_8(numbers: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), numbers) }
}

/// `yes` where `test` is finite, `no` elsewhere.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn if_finite_8(test: __m256, yes: __m256, no: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let infinity = _mm256_set1_ps(f32::INFINITY);
        _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(abs_8(test), infinity))
    }
}

/// `yes` where `test` is finite, `no` elsewhere.
///
/// # Safety
/// AVX-512 is available.
#[inline(always)]
unsafe fn if_finite_16(test: __m512, yes: __m512, no: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let infinity = _mm512_set1_ps(f32::INFINITY);
        let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(test), infinity);
        _mm512_mask_mov_ps(no, finite, yes)
    }
}
