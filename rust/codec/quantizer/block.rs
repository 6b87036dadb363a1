//! Encodes and decodes one block. Every loop is over whole blocks of floats in a scratch buffer that
//! stays in the cache, so the compiler vectorises all of them; sums are by lanes, in an order that is
//! the same with every instruction set.

use super::floats::{add_feedback, by_set, dot, largest, sum_of};
use super::levels::{
    BLOCK, Int3, Int4, Int8, LEVEL_BYTES, Levels, PARTS, Packing, Quinary, Symbols, Ternary,
    multiple, nearest, outermost,
};
use super::rules::{Quantizer, Rounding};
use super::sizes::{self, EqualSteps, Steps};
use crate::codec::gradient::Gradient;
use crate::simd::blocks::Upcoming;
use crate::simd::half_precision::BF16;
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::LANES;
use crate::simd::number::Stored;

/// Sums of squares within these bounds are neither subnormal nor near overflow.
const ORDINARY: std::ops::RangeInclusive<f32> = 1e-30..=1e30;

/// The largest level that bf16 can hold.
const LARGEST_LEVEL: f32 = f32::from_bits(0x7f7f_0000);

/// Whether a block holds numbers, or all of it is infinity or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Content {
    Numbers,
    Poisoned,
}

/// Buffers for one block, and the instructions to use. Use the same workspace for all blocks, so
/// that it stays in the cache.
pub struct Workspace {
    /// Available on this CPU.
    set: InstructionSet,
    scratch: Scratch,
    /// The sizes of a block that is not whole, and zeros.
    padded_sizes: [u16; BLOCK],
}

/// What a block is rounded in.
struct Scratch {
    /// What is due of the block.
    due: [f32; BLOCK],
    /// What is due over the steps; then multiples of the level; after decoding, the numbers.
    numbers: [f32; BLOCK],
    symbols: Symbols,
    /// What the next block will probably be made of.
    next: [Upcoming; 3],
}

impl Workspace {
    /// A workspace for an instruction set that this CPU has.
    pub fn with(set: InstructionSet) -> Workspace {
        assert!(set.is_available(), "this CPU does not have {set:?}");
        let scratch = Scratch {
            due: [0.0; BLOCK],
            numbers: [0.0; BLOCK],
            symbols: [0; BLOCK],
            next: [Upcoming::NOTHING; 3],
        };
        Workspace { set, scratch, padded_sizes: [0; BLOCK] }
    }
}

impl Default for Workspace {
    fn default() -> Workspace {
        Workspace::with(InstructionSet::best())
    }
}

/// A block that is being encoded or decoded.
pub struct Block<'a> {
    quantizer: &'a Quantizer,
    workspace: &'a mut Workspace,
    /// Elements of the block; the rest is zeros.
    count: usize,
    sizes: &'a [u16],
}

impl<'a> Block<'a> {
    /// A block of `count` elements with these sizes. Without sizes all steps are the same.
    pub fn new(
        quantizer: &'a Quantizer,
        count: usize,
        sizes: &'a [u16],
        workspace: &'a mut Workspace,
    ) -> Block<'a> {
        assert!((1..=BLOCK).contains(&count), "gflow: a block of {count} elements");
        let expected = if quantizer.uses_sizes { count } else { 0 };
        assert_eq!(sizes.len(), expected, "gflow: the sizes of a block");
        workspace.scratch.next =
            [Upcoming::after(sizes, PARTS), Upcoming::NOTHING, Upcoming::NOTHING];
        Block { quantizer, workspace, count, sizes }
    }

    /// Takes a gradient and this part of its residual as what is due.
    pub fn load_due(&mut self, gradient: &Gradient, residual: &[f32], feedback: f32) {
        let set = self.workspace.set;
        self.workspace.scratch.next[1..]
            .copy_from_slice(&[gradient.upcoming(PARTS), Upcoming::after(residual, PARTS)]);
        add_feedback(
            set,
            gradient,
            residual,
            feedback,
            &mut self.workspace.scratch.due[..self.count],
        );
        self.workspace.scratch.due[self.count..].fill(0.0);
    }

    /// Takes these numbers as what is due.
    pub fn load(&mut self, numbers: &[f32]) {
        self.workspace.scratch.due[..self.count].copy_from_slice(numbers);
        self.workspace.scratch.due[self.count..].fill(0.0);
    }

    /// Encodes what is due. `left` becomes what is left of it, if it is numbers.
    pub fn encode(&mut self, left: &mut [f32], out: &mut [u8]) -> Content {
        assert_eq!(left.len(), self.count, "gflow: what is left of a block");
        assert_eq!(out.len(), self.quantizer.block_bytes(), "gflow: bytes of a block");
        let Block { quantizer, workspace, sizes, .. } = self;
        let kernel = (workspace.set, quantizer.levels);
        by_levels!(kernel, encode_kernel(workspace, quantizer, sizes, left, out))
    }

    /// Tells which gradient the block is decoded into: the next one will be after it.
    pub fn is_for(&mut self, gradient: &Gradient) {
        self.workspace.scratch.next[1] = gradient.upcoming(PARTS);
    }

    /// The numbers in these bytes, or the infinity or NaN that all of them are.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<&[f32], f32> {
        self.check(bytes)?;
        let Block { quantizer, workspace, count, sizes } = self;
        let Workspace { set, scratch, padded_sizes } = &mut **workspace;
        let Scratch { numbers, symbols, next, .. } = scratch;
        let kernel = (*set, quantizer.levels);
        by_levels!(kernel, decode_kernel(bytes, sizes, padded_sizes, symbols, next, numbers));
        Ok(&numbers[..*count])
    }

    /// The same, into `out`, which has as many elements as the block.
    pub fn decode_into(&mut self, bytes: &[u8], out: &mut [f32]) -> Result<(), f32> {
        assert_eq!(out.len(), self.count, "gflow: elements of a block");
        let Ok(whole) = <&mut [f32; BLOCK]>::try_from(&mut *out) else {
            out.copy_from_slice(self.decode(bytes)?);
            return Ok(());
        };
        self.check(bytes)?;
        let Block { quantizer, workspace, sizes, .. } = self;
        let Workspace { set, scratch, padded_sizes } = &mut **workspace;
        let Scratch { symbols, next, .. } = scratch;
        let kernel = (*set, quantizer.levels);
        by_levels!(kernel, decode_kernel(bytes, sizes, padded_sizes, symbols, next, whole));
        Ok(())
    }

    /// Fails with the infinity or NaN that all elements of a block are, if it is not numbers.
    fn check(&self, bytes: &[u8]) -> Result<(), f32> {
        assert_eq!(bytes.len(), self.quantizer.block_bytes(), "gflow: bytes of a block");
        let level = read_level(bytes);
        if level.is_finite() { Ok(()) } else { Err(level) }
    }
}

/// Calls a kernel compiled for these levels and this instruction set, which is available.
macro_rules! by_levels {
    ($set_and_levels:expr, $kernel:ident($($argument:expr),*)) => {{
        let (set, levels) = $set_and_levels;
        match levels {
            Levels::Int8 => by_set!(set, $kernel[Int8]($($argument),*)),
            Levels::Int4 => by_set!(set, $kernel[Int4]($($argument),*)),
            Levels::Int3 => by_set!(set, $kernel[Int3]($($argument),*)),
            Levels::Quinary => by_set!(set, $kernel[Quinary]($($argument),*)),
            Levels::Ternary => by_set!(set, $kernel[Ternary]($($argument),*)),
        }
    }};
}
use by_levels;

for_each_instruction_set! {
    mod encode_kernel = encode;
    <P: Packing>(
        workspace: &mut Workspace, quantizer: &Quantizer, sizes: &[u16], left: &mut [f32],
        out: &mut [u8]
    ) -> Content
}

/// # Safety
/// None; the macro wants it.
#[inline(always)]
unsafe fn encode<P: Packing>(
    workspace: &mut Workspace,
    quantizer: &Quantizer,
    sizes: &[u16],
    left: &mut [f32],
    out: &mut [u8],
) -> Content {
    let Workspace { scratch, padded_sizes, .. } = workspace;
    let (level_bytes, packed) = out.split_at_mut(LEVEL_BYTES);
    let level = match quantizer.rounding {
        Rounding::ToMaximum => round_to_maximum::<P>(scratch, left),
        Rounding::Unbiased { step, margin } => match sizes::steps(sizes, padded_sizes) {
            Some(steps) => round_unbiased::<P>(scratch, &steps, (step, margin), left),
            None => round_unbiased::<P>(scratch, &EqualSteps, (step, margin), left),
        },
    };
    let bits = BF16::narrow(level);
    level_bytes.copy_from_slice(&bits.0.to_le_bytes());
    if !level.is_finite() {
        packed.fill(0);
        return Content::Poisoned;
    }
    P::pack(&scratch.symbols, packed);
    Content::Numbers
}

/// Sets the symbols of what is due, and `left` to what is left of it with the level that it returns.
#[inline(always)]
fn round_to_maximum<P: Packing>(scratch: &mut Scratch, left: &mut [f32]) -> f32 {
    let Scratch { due, numbers, symbols, next } = scratch;
    let largest = largest(due);
    if !largest.is_finite() {
        return largest;
    }
    let level = BF16::narrow(largest / f32::from(P::LARGEST)).widen();
    // A level that is too small to be inverted stands for zeros.
    let inverse = if level > f32::MIN_POSITIVE { 1.0 / level } else { 0.0 };
    match <&mut [f32; BLOCK]>::try_from(&mut *left) {
        Ok(whole) => round_to_level::<P>(due, (level, inverse), next, symbols, whole),
        Err(_) => {
            round_to_level::<P>(due, (level, inverse), next, symbols, numbers);
            left.copy_from_slice(&numbers[..left.len()]);
        }
    }
    level
}

/// All of [`round_to_maximum`] that is done for every element, in one pass.
#[inline(always)]
fn round_to_level<P: Packing>(
    due: &[f32; BLOCK],
    (level, inverse): (f32, f32),
    next: &[Upcoming],
    symbols: &mut Symbols,
    left: &mut [f32; BLOCK],
) {
    let outputs = left.chunks_exact_mut(LANES).zip(symbols.chunks_exact_mut(LANES));
    for (part, (due, (left, symbols))) in due.chunks_exact(LANES).zip(outputs).enumerate() {
        next.iter().for_each(|upcoming| upcoming.prefetch(part));
        for lane in 0..LANES {
            let (multiple, symbol) = nearest::<P>(due[lane] * inverse);
            symbols[lane] = symbol;
            left[lane] = due[lane] - value(multiple, level, 1.0);
        }
    }
}

/// The same for [`Rounding::Unbiased`].
#[inline(always)]
fn round_unbiased<P: Packing>(
    scratch: &mut Scratch,
    steps: &impl Steps,
    (step, margin): (f32, f32),
    left: &mut [f32],
) -> f32 {
    let mut squares = divide(scratch, steps);
    let mut unit = 1.0;
    if !ORDINARY.contains(&squares) {
        let Scratch { due, numbers, .. } = scratch;
        match bring_to_ordinary(due, numbers) {
            Ok(brought) => unit = brought,
            Err(poison) => return poison,
        }
        squares = dot(numbers, numbers);
    }
    let level = if squares == 0.0 {
        round_all::<P>(scratch, 0.0, 0.0);
        0.0
    } else {
        let step = step * (squares / left.len() as f32).sqrt();
        let Fit { squares, products } = round_all::<P>(scratch, 1.0 / step, margin);
        // The largest element of a block is above its root mean square, so some symbol is not zero.
        (squares / products * step * unit).min(LARGEST_LEVEL)
    };
    let level = BF16::narrow(level).widen();
    match <&mut [f32; BLOCK]>::try_from(&mut *left) {
        Ok(whole) => subtract(&scratch.due, &scratch.numbers, level, steps, whole),
        Err(_) => {
            let mut whole = [0.0; BLOCK];
            subtract(&scratch.due, &scratch.numbers, level, steps, &mut whole);
            left.copy_from_slice(&whole[..left.len()]);
        }
    }
    level
}

/// Sets the numbers to what is due over the steps. Returns the sum of their squares.
#[inline(always)]
fn divide(scratch: &mut Scratch, steps: &impl Steps) -> f32 {
    let Scratch { due, numbers, .. } = scratch;
    let mut lanes = [0.0; LANES];
    let both = due.chunks_exact(LANES).zip(numbers.chunks_exact_mut(LANES));
    for (part, (due, numbers)) in both.enumerate() {
        let steps = steps.part(part);
        for lane in 0..LANES {
            let number = due[lane] / steps[lane];
            numbers[lane] = number;
            lanes[lane] += number * number;
        }
    }
    sum_of(&lanes)
}

/// What is left of what is due without these multiples of the level.
#[inline(always)]
fn subtract(
    due: &[f32; BLOCK],
    multiples: &[f32; BLOCK],
    level: f32,
    steps: &impl Steps,
    left: &mut [f32; BLOCK],
) {
    let inputs = due.chunks_exact(LANES).zip(multiples.chunks_exact(LANES));
    for (part, (left, (due, multiples))) in left.chunks_exact_mut(LANES).zip(inputs).enumerate() {
        let steps = steps.part(part);
        for lane in 0..LANES {
            left[lane] = due[lane] - value(multiples[lane], level, steps[lane]);
        }
    }
}

/// Multiplies numbers that are very large or very small, so that their squares can be added. Returns
/// the unit that they are in then, or what is not finite in the block.
#[cold]
#[inline(never)]
fn bring_to_ordinary(due: &[f32; BLOCK], numbers: &mut [f32; BLOCK]) -> Result<f32, f32> {
    let poison = largest(due);
    if !poison.is_finite() {
        return Err(poison);
    }
    for number in numbers.iter_mut() {
        *number = number.clamp(f32::MIN, f32::MAX);
    }
    let largest = largest(numbers);
    if largest < f32::MIN_POSITIVE {
        numbers.fill(0.0);
        return Ok(1.0);
    }
    // A power of two, so that no number is rounded.
    let unit = f32::from_bits(largest.to_bits() & 0x7f80_0000).clamp(1e-37, 1e37);
    let unit = f32::from_bits(unit.to_bits() & 0x7f80_0000);
    for number in numbers {
        *number /= unit;
    }
    Ok(unit)
}

/// What tells how well the multiples of a block fit its numbers.
struct Fit {
    /// The sum of the squares of the numbers over the step, each as far as it is within reach.
    squares: f32,
    /// The sum of their products with the multiples.
    products: f32,
}

/// Replaces the numbers by the multiples of a step that are nearest, and sets their symbols.
#[inline(always)]
fn round_all<P: Packing>(scratch: &mut Scratch, inverse_step: f32, margin: f32) -> Fit {
    let Scratch { numbers, symbols, next, .. } = scratch;
    let (mut squares, mut products) = ([0.0; LANES], [0.0; LANES]);
    let reach = outermost::<P>() + margin;
    let both = numbers.chunks_exact_mut(LANES).zip(symbols.chunks_exact_mut(LANES));
    for (part, (numbers, symbols)) in both.enumerate() {
        next.iter().for_each(|upcoming| upcoming.prefetch(part));
        for lane in 0..LANES {
            let number = numbers[lane] * inverse_step;
            let (multiple, symbol) = nearest::<P>(number);
            let within = number.clamp(-reach, reach);
            squares[lane] += within * within;
            products[lane] += within * multiple;
            numbers[lane] = multiple;
            symbols[lane] = symbol;
        }
    }
    Fit { squares: sum_of(&squares), products: sum_of(&products) }
}

for_each_instruction_set! {
    mod decode_kernel = decode;
    <P: Packing>(
        bytes: &[u8], sizes: &[u16], padded_sizes: &mut [u16; BLOCK], symbols: &mut Symbols,
        next: &[Upcoming], numbers: &mut [f32; BLOCK]
    )
}

/// # Safety
/// None; the macro wants it.
#[inline(always)]
unsafe fn decode<P: Packing>(
    bytes: &[u8],
    sizes: &[u16],
    padded_sizes: &mut [u16; BLOCK],
    symbols: &mut Symbols,
    next: &[Upcoming],
    numbers: &mut [f32; BLOCK],
) {
    let level = read_level(bytes);
    P::unpack(&bytes[LEVEL_BYTES..], symbols);
    match sizes::steps(sizes, padded_sizes) {
        Some(steps) => multiply::<P>(symbols, level, &steps, next, numbers),
        None => multiply::<P>(symbols, level, &EqualSteps, next, numbers),
    }
}

/// Sets the numbers to what the symbols stand for.
#[inline(always)]
fn multiply<P: Packing>(
    symbols: &Symbols,
    level: f32,
    steps: &impl Steps,
    next: &[Upcoming],
    numbers: &mut [f32; BLOCK],
) {
    let both = numbers.chunks_exact_mut(LANES).zip(symbols.chunks_exact(LANES));
    for (part, (numbers, symbols)) in both.enumerate() {
        next.iter().for_each(|upcoming| upcoming.prefetch(part));
        let steps = steps.part(part);
        for lane in 0..LANES {
            numbers[lane] = value(multiple::<P>(symbols[lane]), level, steps[lane]);
        }
    }
}

/// What a symbol stands for. Never infinite, so that no infinity is left in a residual.
#[inline(always)]
fn value(multiple: f32, level: f32, step: f32) -> f32 {
    ((multiple * level) * step).clamp(f32::MIN, f32::MAX)
}

/// The level at the start of a block's bytes.
pub fn read_level(bytes: &[u8]) -> f32 {
    BF16(u16::from_le_bytes([bytes[0], bytes[1]])).widen()
}
