//! Half-precision floats by the register, for the x86 instructions that convert them: the
//! compiler does not find those by itself in a loop over single elements.
//!
//! The types here must never be named but by the kernels of their instruction set; that is what
//! makes each `unsafe` here sound.

use super::number::{Divisible, Number, Pair, Stored};
use std::arch::x86_64::*;

/// A register full of half-precision floats in memory, for AVX2 with F16C.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F16x16([u16; 16]);

/// A register full of half-precision floats in memory, for AVX-512.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F16x32([u16; 32]);

/// What half of [`F16x16`] widens to.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x8(__m256);

/// What half of [`F16x32`] widens to.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x16(__m512);

impl Stored for F16x16 {
    type Number = Pair<F32x8>;
    const COUNT: usize = 16;

    #[inline(always)]
    fn widen(self) -> Pair<F32x8> {
        let halves = self.0.as_ptr().cast::<__m128i>();
        // SAFETY: only kernels for AVX2 name this type; the array has the 32 bytes read.
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
        // SAFETY: only kernels for AVX2 name this type; the array has the 32 bytes written.
        unsafe {
            let first = _mm256_cvtps_ph::<NEAREST>(numbers.0.0);
            let second = _mm256_cvtps_ph::<NEAREST>(numbers.1.0);
            // One store, not two: in this loop the stores are what takes the time.
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
        // SAFETY: only kernels for AVX-512 name this type; the array has the 64 bytes read.
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
        // SAFETY: only kernels for AVX-512 name this type; the array has the 64 bytes written.
        unsafe {
            let first = _mm512_castsi256_si512(_mm512_cvtps_ph::<NEAREST>(numbers.0.0));
            let second = _mm512_cvtps_ph::<NEAREST>(numbers.1.0);
            let both = _mm512_inserti64x4::<1>(first, second);
            _mm512_storeu_si512(halves.as_mut_ptr().cast(), both);
        }
        F16x32(halves)
    }
}

macro_rules! register {
    ($numbers:ident: $add:ident $multiply:ident $divide:ident $repeat:ident $min:ident $max:ident $unless_nan:ident) => {
        impl Number for $numbers {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                // SAFETY: only kernels for this instruction set name this type.
                Self(unsafe { $add(self.0, other.0) })
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                // SAFETY: as for `add`.
                Self(unsafe { $multiply(self.0, other.0) })
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                // The instruction gives the second where they are equal or either is NaN.
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
                Self(unsafe { $divide(self.0, $repeat(by as f32)) })
            }
        }
    };
}

register!(F32x8: _mm256_add_ps _mm256_mul_ps _mm256_div_ps _mm256_set1_ps _mm256_min_ps _mm256_max_ps unless_nan_8);
register!(F32x16: _mm512_add_ps _mm512_mul_ps _mm512_div_ps _mm512_set1_ps _mm512_min_ps _mm512_max_ps unless_nan_16);

/// `chosen`, but `first` where that is NaN.
///
/// # Safety
/// AVX2 is here.
#[inline(always)]
unsafe fn unless_nan_8(first: __m256, chosen: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_ps(chosen, first, _mm256_cmp_ps::<_CMP_UNORD_Q>(first, first)) }
}

/// `chosen`, but `first` where that is NaN.
///
/// # Safety
/// AVX-512 is here.
#[inline(always)]
unsafe fn unless_nan_16(first: __m512, chosen: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_mask_mov_ps(chosen, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(first, first), first) }
}
