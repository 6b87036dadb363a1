//! How many levels a quantiser has, and how the symbols of a block are packed into bytes.
//!
//! A symbol is a whole number from 0 to twice [`Levels::largest`]; the middle one stands for zero, the
//! others for multiples of the block's level. With 7 and 5 levels these multiples grow faster than the
//! symbols ([`Packing::MULTIPLES`]): gradients have a few elements that are much larger than the others,
//! and most that are small. A block's symbols are cut into equal *planes*, and a byte (or a word of 12
//! bits) holds one symbol of each plane. So packing works on whole rows of bytes at a time, without
//! moving any sideways.

use crate::simd::lanes::LANES;

/// Elements in a block. Divisible by the number of symbols in a byte or word of every kind.
pub const BLOCK: usize = 640;

/// Passes over a block take [`LANES`] elements at a time, so many times.
pub const PARTS: usize = BLOCK / LANES;

/// Bytes of a block's level, which come before its symbols.
pub const LEVEL_BYTES: usize = 2;

/// How many levels there are. Each has a name in the options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Levels {
    /// 255 levels, a byte each.
    Int8,
    /// 15 levels, two to a byte.
    Int4,
    /// 7 levels, eight to three bytes.
    Int3,
    /// 5 levels, ten to three bytes.
    Quinary,
    /// 3 levels, five to a byte.
    Ternary,
}

impl Levels {
    pub const ALL: [Levels; 5] =
        [Levels::Int8, Levels::Int4, Levels::Int3, Levels::Quinary, Levels::Ternary];

    pub fn name(self) -> &'static str {
        match self {
            Levels::Int8 => "int8",
            Levels::Int4 => "int4",
            Levels::Int3 => "int3",
            Levels::Quinary => "quinary",
            Levels::Ternary => "ternary",
        }
    }

    pub fn from_name(name: &str) -> Option<Levels> {
        Levels::ALL.into_iter().find(|levels| levels.name() == name)
    }

    /// How many symbols stand for positive numbers; as many are negative, and one is zero.
    pub fn largest(self) -> u8 {
        match self {
            Levels::Int8 => Int8::LARGEST,
            Levels::Int4 => Int4::LARGEST,
            Levels::Int3 => Int3::LARGEST,
            Levels::Quinary => Quinary::LARGEST,
            Levels::Ternary => Ternary::LARGEST,
        }
    }

    /// Bytes of a block's symbols.
    pub fn packed_bytes(self) -> usize {
        match self {
            Levels::Int8 => Int8::PACKED_BYTES,
            Levels::Int4 => Int4::PACKED_BYTES,
            Levels::Int3 => Int3::PACKED_BYTES,
            Levels::Quinary => Quinary::PACKED_BYTES,
            Levels::Ternary => Ternary::PACKED_BYTES,
        }
    }
}

pub type Symbols = [u8; BLOCK];

/// The packing of one kind of levels, for kernels that are compiled for it.
pub trait Packing {
    const LARGEST: u8;
    const PACKED_BYTES: usize;

    /// What the symbols beside the middle one stand for, from the inside out; empty if each stands for
    /// one more than the one before.
    const MULTIPLES: &[f32] = &[];

    /// Packs symbols into `out`, which has `PACKED_BYTES`.
    fn pack(symbols: &Symbols, out: &mut [u8]);

    /// Unpacks them. Any bytes give symbols of at most twice `LARGEST`, or a little more; none panics.
    fn unpack(bytes: &[u8], symbols: &mut Symbols);
}

/// The multiple that is nearest to a number, which need not be finite, and its symbol. Of two that are
/// as near, the smaller one; if they are all whole numbers, the even one.
#[inline(always)]
pub fn nearest<P: Packing>(number: f32) -> (f32, u8) {
    if P::MULTIPLES.is_empty() {
        let limit = f32::from(P::LARGEST);
        let shifted = number.clamp(-limit, limit) + ROUNDER;
        return (shifted - ROUNDER, (shifted.to_bits() as u8).wrapping_add(P::LARGEST));
    }
    let (mut multiple, mut offset, mut inner) = (0.0, 0, 0.0);
    for outer in P::MULTIPLES {
        let is_beyond = number.abs() > (inner + outer) * 0.5;
        multiple = if is_beyond { *outer } else { multiple };
        offset += i32::from(is_beyond);
        inner = *outer;
    }
    let is_negative = number < 0.0;
    // Not negated, so that zero stays positive.
    multiple = if is_negative { 0.0 - multiple } else { multiple };
    offset = if is_negative { -offset } else { offset };
    (multiple, (offset as u8).wrapping_add(P::LARGEST))
}

/// The multiple that a symbol stands for.
#[inline(always)]
pub fn multiple<P: Packing>(symbol: u8) -> f32 {
    let whole = f32::from(i16::from(symbol) - i16::from(P::LARGEST));
    let mut multiple = whole;
    for (below, outer) in P::MULTIPLES.iter().enumerate() {
        let is_beyond = whole.abs() > below as f32 + 0.5;
        multiple = if is_beyond { outer.copysign(whole) } else { multiple };
    }
    multiple
}

/// The multiple that the largest symbol stands for.
#[inline(always)]
pub fn outermost<P: Packing>() -> f32 {
    P::MULTIPLES.last().copied().unwrap_or(f32::from(P::LARGEST))
}

/// Adding this to a number below 2^22 rounds it to a whole number, ties to even, and leaves that in
/// the lowest bits.
const ROUNDER: f32 = 12_582_912.0;

pub struct Int8;
pub struct Int4;
pub struct Int3;
pub struct Quinary;
pub struct Ternary;

impl Packing for Int8 {
    const LARGEST: u8 = 127;
    const PACKED_BYTES: usize = BLOCK;

    #[inline(always)]
    fn pack(symbols: &Symbols, out: &mut [u8]) {
        out.copy_from_slice(symbols);
    }

    #[inline(always)]
    fn unpack(bytes: &[u8], symbols: &mut Symbols) {
        symbols.copy_from_slice(bytes);
    }
}

impl Packing for Int4 {
    const LARGEST: u8 = 7;
    const PACKED_BYTES: usize = BLOCK / 2;

    #[inline(always)]
    fn pack(symbols: &Symbols, out: &mut [u8]) {
        let (low, high) = symbols.split_at(BLOCK / 2);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            *out = low | (high << 4);
        }
    }

    #[inline(always)]
    fn unpack(bytes: &[u8], symbols: &mut Symbols) {
        let (low, high) = symbols.split_at_mut(BLOCK / 2);
        for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
            *low = byte & 0xf;
            *high = byte >> 4;
        }
    }
}

impl Packing for Int3 {
    const LARGEST: u8 = 3;
    const PACKED_BYTES: usize = 3 * INT3_WORDS / 2;
    const MULTIPLES: &[f32] = &[1.0, 2.25, 4.5];

    #[inline(always)]
    fn pack(symbols: &Symbols, out: &mut [u8]) {
        let mut words = [0u16; INT3_WORDS];
        for plane in symbols.chunks_exact(INT3_WORDS).rev() {
            for (word, symbol) in words.iter_mut().zip(plane) {
                *word = (*word << 3) | u16::from(*symbol);
            }
        }
        write_words(&words, out);
    }

    #[inline(always)]
    fn unpack(bytes: &[u8], symbols: &mut Symbols) {
        let mut words = [0u16; INT3_WORDS];
        read_words(bytes, &mut words);
        for plane in symbols.chunks_exact_mut(INT3_WORDS) {
            for (word, symbol) in words.iter_mut().zip(plane) {
                *symbol = (*word & 7) as u8;
                *word >>= 3;
            }
        }
    }
}

impl Packing for Quinary {
    const LARGEST: u8 = 2;
    const PACKED_BYTES: usize = 3 * QUINARY_WORDS / 2;
    const MULTIPLES: &[f32] = &[1.0, 2.5];

    /// Five symbols are a number below 5^5 = 3125. It is stretched to 12 bits: as a fraction of
    /// 4096, its digits come out one after the other by multiplication.
    #[expect(clippy::manual_div_ceil, reason = "written like this, it is vectorised")]
    #[inline(always)]
    fn pack(symbols: &Symbols, out: &mut [u8]) {
        let mut words = [0u16; QUINARY_WORDS];
        for plane in symbols.chunks_exact(QUINARY_WORDS) {
            for (word, symbol) in words.iter_mut().zip(plane) {
                *word = *word * 5 + u16::from(*symbol);
            }
        }
        for word in &mut words {
            *word = ((u32::from(*word) * 4096 + 3124) / 3125) as u16;
        }
        write_words(&words, out);
    }

    #[inline(always)]
    fn unpack(bytes: &[u8], symbols: &mut Symbols) {
        let mut words = [0u16; QUINARY_WORDS];
        read_words(bytes, &mut words);
        for plane in symbols.chunks_exact_mut(QUINARY_WORDS) {
            for (word, symbol) in words.iter_mut().zip(plane) {
                let product = *word * 5;
                *symbol = (product >> 12) as u8;
                *word = product & 0xfff;
            }
        }
    }
}

impl Packing for Ternary {
    const LARGEST: u8 = 1;
    const PACKED_BYTES: usize = TERNARY_BYTES;

    /// Five symbols are a number below 3^5 = 243, stretched to a fraction of 256.
    #[expect(clippy::manual_div_ceil, reason = "written like this, it is vectorised")]
    #[inline(always)]
    fn pack(symbols: &Symbols, out: &mut [u8]) {
        let mut numbers = [0u8; TERNARY_BYTES];
        for plane in symbols.chunks_exact(TERNARY_BYTES) {
            for (number, symbol) in numbers.iter_mut().zip(plane) {
                *number = *number * 3 + symbol;
            }
        }
        for (out, number) in out.iter_mut().zip(numbers) {
            // number * 256 / 243, rounded up: 13 / 243 of the number on top of it.
            *out = number + ((u16::from(number) * 13 + 242) / 243) as u8;
        }
    }

    #[inline(always)]
    fn unpack(bytes: &[u8], symbols: &mut Symbols) {
        let mut fractions = [0u16; TERNARY_BYTES];
        for (fraction, byte) in fractions.iter_mut().zip(bytes) {
            *fraction = u16::from(*byte);
        }
        for plane in symbols.chunks_exact_mut(TERNARY_BYTES) {
            for (fraction, symbol) in fractions.iter_mut().zip(plane) {
                let product = *fraction * 3;
                *symbol = (product >> 8) as u8;
                *fraction = product & 0xff;
            }
        }
    }
}

const INT3_WORDS: usize = BLOCK / 4;
const QUINARY_WORDS: usize = BLOCK / 5;
const TERNARY_BYTES: usize = BLOCK / 5;

/// Writes words of 12 bits, two to three bytes: the low bytes of the first half, then the four bits
/// that are left of each, then the high bytes of the second half.
#[inline(always)]
fn write_words(words: &[u16], out: &mut [u8]) {
    let half = words.len() / 2;
    let (first, second) = words.split_at(half);
    let (low, rest) = out.split_at_mut(half);
    let (middle, high) = rest.split_at_mut(half);
    for (((first, second), low), (middle, high)) in
        first.iter().zip(second).zip(low).zip(middle.iter_mut().zip(high))
    {
        *low = *first as u8;
        *middle = (*first >> 8) as u8 | (*second << 4) as u8;
        *high = (*second >> 4) as u8;
    }
}

#[inline(always)]
fn read_words(bytes: &[u8], words: &mut [u16]) {
    let half = words.len() / 2;
    let (first, second) = words.split_at_mut(half);
    let (low, rest) = bytes.split_at(half);
    let (middle, high) = rest.split_at(half);
    for (((first, second), low), (middle, high)) in
        first.iter_mut().zip(second).zip(low).zip(middle.iter().zip(high))
    {
        *first = u16::from(*low) | (u16::from(*middle & 0xf) << 8);
        *second = u16::from(*middle >> 4) | (u16::from(*high) << 4);
    }
}
