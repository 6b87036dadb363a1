//! The 16-bit floats, converted one at a time without branches, so that loops over them vectorise.
//!
//! Rounding is to nearest, ties to even. A NaN stays a NaN, made quiet, with the upper bits of its
//! payload, as the x86 instructions do it. Results don't depend on whether the CPU flushes
//! subnormals to zero.

use super::number::{Pair, Pod, Stored};

/// IEEE 754 half precision.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper half of a single-precision float.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct BF16(pub u16);

/// Two bfloat16 floats in one word. Each is widened and narrowed in its own half of the word, so a
/// register of words needs no shuffles, unlike a register of single elements.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
pub struct BF16x2(u32);

// SAFETY: wraps an integer.
unsafe impl Pod for F16 {}
// SAFETY: wraps an integer.
unsafe impl Pod for BF16 {}
// SAFETY: wraps an integer.
unsafe impl Pod for BF16x2 {}

const _: () =
    assert!(cfg!(target_endian = "little"), "BF16x2 has the first element in the lower half");

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
        // The largest f16 exponent becomes the largest f32 exponent, so infinity and NaN survive;
        // the product corrects the exponents of everything else.
        let normal = f32::from_bits((magnitude << 13) + (224 << 23)) * power_of_two(-112);
        // A subnormal has no hidden bit: insert one worth 2^-14, then subtract it as a number.
        let hidden = power_of_two(-14);
        let subnormal = f32::from_bits((magnitude << 13) | hidden.to_bits()) - hidden;
        let is_subnormal = (magnitude as i32) < 0x0400;
        f32::from_bits(sign | pick(is_subnormal, subnormal.to_bits(), normal.to_bits()))
    }

    #[inline(always)]
    fn narrow(number: f32) -> F16 {
        let magnitude = number.to_bits() & !F32_SIGN;
        // Numbers that are too large become infinity here; all others are multiplied by 4.
        let scaled = (f32::from_bits(magnitude) * power_of_two(112)) * power_of_two(-110);
        // Adding a power of two that is 2^13 times the number's own (or that of the smallest
        // normal f16, if the number is smaller) pushes out the bits that f16 lacks, rounding them.
        let exponent = ((magnitude & F32_EXPONENT) as i32).max((127 - 14) << 23) as u32;
        let rounded = (f32::from_bits(exponent + (15 << 23)) + scaled).to_bits();
        // A mantissa overflow carries into the exponent, as it should.
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

/// Selects `yes` or `no`. An `if` would become a branch around what only one of them needs, and a
/// loop with a branch doesn't vectorise.
#[inline(always)]
fn pick(condition: bool, yes: u32, no: u32) -> u32 {
    let mask = u32::from(condition).wrapping_neg();
    (yes & mask) | (no & !mask)
}

/// The bits of an f32 whose upper half is the bfloat16; the lower half is garbage.
#[inline(always)]
fn rounded_to_bf16(number: f32) -> u32 {
    let bits = number.to_bits();
    // Adding just under half of the last place, plus that place's own bit, sends ties to even. A
    // NaN must not be rounded: the carry could run through its whole exponent.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if number.is_nan() { bits | F32_QUIET } else { rounded }
}
