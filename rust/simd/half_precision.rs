//! The 16-bit floats, one at a time and without branches, so that loops over them vectorise.
//!
//! Rounding is to nearest, ties to even; a NaN stays a NaN, made quiet, with the upper bits of
//! its payload, which is what the x86 instructions do. The results do not depend on whether the
//! CPU flushes subnormal numbers to zero.

use super::number::{Pair, Pod, Stored};

/// IEEE 754 half precision.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper half of a single-precision float.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct BF16(pub u16);

/// Two bfloat16 floats as one word. Each is widened and narrowed in its own half of the word, so
/// that a register of words needs no shuffling, unlike one of single elements.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
pub struct BF16x2(u32);

// SAFETY: an integer and nothing else.
unsafe impl Pod for F16 {}
// SAFETY: an integer and nothing else.
unsafe impl Pod for BF16 {}
// SAFETY: an integer and nothing else.
unsafe impl Pod for BF16x2 {}

const _: () = assert!(cfg!(target_endian = "little"), "BF16x2 has the first in the lower half");

const F32_SIGN: u32 = 0x8000_0000;
const F32_EXPONENT: u32 = 0x7f80_0000;
const F32_QUIET: u32 = 0x0040_0000;

/// 2 to this power, as f32.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

impl Stored for F16 {
    type Number = f32;
    const COUNT: usize = 1;

    #[inline(always)]
    fn widen(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let magnitude = u32::from(self.0 & 0x7fff);
        // The greatest exponent of f16 becomes the greatest of f32, so that infinity and NaN
        // stay what they are; the product puts the exponents of all others right.
        let normal = f32::from_bits((magnitude << 13) + (224 << 23)) * power_of_two(-112);
        // A subnormal has no hidden bit: put one in, of 2^-14, and take it away as a number.
        let hidden = power_of_two(-14);
        let subnormal = f32::from_bits((magnitude << 13) | hidden.to_bits()) - hidden;
        let is_subnormal = (magnitude as i32) < 0x0400;
        f32::from_bits(sign | pick(is_subnormal, subnormal.to_bits(), normal.to_bits()))
    }

    #[inline(always)]
    fn narrow(number: f32) -> F16 {
        let magnitude = number.to_bits() & !F32_SIGN;
        // Too large a number becomes infinity here; any other is multiplied by 4.
        let scaled = (f32::from_bits(magnitude) * power_of_two(112)) * power_of_two(-110);
        // Adding a power of two that is 2^13 times the number's own (or that of the least normal
        // f16, for a lesser one) pushes out the bits that f16 lacks, and so rounds them.
        let exponent = ((magnitude & F32_EXPONENT) as i32).max((127 - 14) << 23) as u32;
        let rounded = (f32::from_bits(exponent + (15 << 23)) + scaled).to_bits();
        // What is left in the mantissa carries into the exponent as it should.
        let known = ((rounded >> 13) & 0x7c00) + (rounded & 0x0fff);
        let nan = 0x7e00 | ((magnitude >> 13) & 0x01ff);
        let half = pick(magnitude as i32 > F32_EXPONENT as i32, nan, known);
        F16((half | ((number.to_bits() & F32_SIGN) >> 16)) as u16)
    }
}

impl Stored for BF16 {
    type Number = f32;
    const COUNT: usize = 1;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> BF16 {
        BF16((rounded_to_bf16(number) >> 16) as u16)
    }
}

impl Stored for BF16x2 {
    type Number = Pair<f32>;
    const COUNT: usize = 2;

    #[inline(always)]
    fn widen(self) -> Pair<f32> {
        Pair(f32::from_bits(self.0 << 16), f32::from_bits(self.0 & 0xffff_0000))
    }

    #[inline(always)]
    fn narrow(number: Pair<f32>) -> BF16x2 {
        BF16x2((rounded_to_bf16(number.0) >> 16) | (rounded_to_bf16(number.1) & 0xffff_0000))
    }
}

/// `yes` or `no`. An `if` would become a branch around what only one of them needs, and with a
/// branch in it the loop does not vectorise.
#[inline(always)]
fn pick(condition: bool, yes: u32, no: u32) -> u32 {
    let mask = u32::from(condition).wrapping_neg();
    (yes & mask) | (no & !mask)
}

/// The bits of an f32 of which the upper half is the bfloat16, and the lower half anything.
#[inline(always)]
fn rounded_to_bf16(number: f32) -> u32 {
    let bits = number.to_bits();
    // Just under half of the last place, and that place's own bit, make ties go to even. A NaN
    // must not be rounded: the carry could go all through its exponent.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if number.is_nan() { bits | F32_QUIET } else { rounded }
}
