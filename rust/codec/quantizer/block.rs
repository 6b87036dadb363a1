//! Encodes and decodes one block. Every loop is over whole blocks of floats in a scratch buffer that
//! stays in the cache, so the compiler vectorises all of them; sums are by lanes, in an order that is
//! the same with every instruction set.

use super::floats::{add_feedback, by_set, dot, largest, sum_of};
use super::levels::{
    BLOCK, Int3, Int4, Int8, LEVEL_BYTES, Levels, Packing, Quinary, Symbols, Ternary, multiple,
    nearest, outermost,
};
use super::rules::{Quantizer, Rounding};
use super::sizes;
use crate::codec::gradient::Gradient;
use crate::simd::blocks::Upcoming;
use crate::simd::half_precision::BF16;
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::LANES;
use crate::simd::number::Stored;

/// Sums of squares within these bounds are neither subnormal nor near overflow.
const ORDINARY: std::ops::RangeInclusive<f32> = 1e-30..=1e30;

/// The passes over a block take so many floats at a time.
const PARTS: usize = BLOCK / LANES;

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
    /// What is due of the block.
    due: [f32; BLOCK],
    /// What is due over the steps; then multiples of the level; after decoding, the numbers.
    numbers: [f32; BLOCK],
    /// What a level is multiplied by, for each element.
    steps: [f32; BLOCK],
    symbols: Symbols,
    /// What the next block will probably be made of.
    next: [Upcoming; 3],
}

impl Workspace {
    /// A workspace for an instruction set that this CPU has.
    pub fn with(set: InstructionSet) -> Workspace {
        assert!(set.is_available(), "this CPU does not have {set:?}");
        let [due, numbers, steps] = [[0.0; BLOCK]; 3];
        Workspace { set, due, numbers, steps, symbols: [0; BLOCK], next: [Upcoming::NOTHING; 3] }
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
        workspace.next = [Upcoming::after(sizes, PARTS), Upcoming::NOTHING, Upcoming::NOTHING];
        Block { quantizer, workspace, count, sizes }
    }

    /// Takes a gradient and this part of its residual as what is due.
    pub fn load_due(&mut self, gradient: &Gradient, residual: &[f32], feedback: f32) {
        let set = self.workspace.set;
        self.workspace.next[1..]
            .copy_from_slice(&[gradient.upcoming(PARTS), Upcoming::after(residual, PARTS)]);
        add_feedback(set, gradient, residual, feedback, &mut self.workspace.due[..self.count]);
        self.workspace.due[self.count..].fill(0.0);
    }

    /// Takes these numbers as what is due.
    pub fn load(&mut self, numbers: &[f32]) {
        self.workspace.due[..self.count].copy_from_slice(numbers);
        self.workspace.due[self.count..].fill(0.0);
    }

    /// Encodes what is due. `left` becomes what is left of it, if it is numbers.
    pub fn encode(&mut self, left: &mut [f32], out: &mut [u8]) -> Content {
        assert_eq!(left.len(), self.count, "gflow: what is left of a block");
        assert_eq!(out.len(), self.quantizer.block_bytes(), "gflow: bytes of a block");
        let (set, levels) = (self.workspace.set, self.quantizer.levels);
        let Block { quantizer, workspace, sizes, .. } = self;
        by_levels!(set, levels, encode_kernel(workspace, quantizer, sizes, left, out))
    }

    /// Tells which gradient the block is decoded into: the next one will be after it.
    pub fn is_for(&mut self, gradient: &Gradient) {
        self.workspace.next[1] = gradient.upcoming(PARTS);
    }

    /// The numbers in these bytes, or the infinity or NaN that all of them are.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<&[f32], f32> {
        assert_eq!(bytes.len(), self.quantizer.block_bytes(), "gflow: bytes of a block");
        let level = read_level(bytes);
        if !level.is_finite() {
            return Err(level);
        }
        let (set, levels) = (self.workspace.set, self.quantizer.levels);
        let Block { workspace, count, sizes, .. } = self;
        by_levels!(set, levels, decode_kernel(workspace, level, *count, sizes, bytes));
        Ok(&self.workspace.numbers[..self.count])
    }
}

/// Calls a kernel compiled for these levels and this instruction set, which is available.
macro_rules! by_levels {
    ($set:expr, $levels:expr, $kernel:ident($($argument:expr),*)) => {
        match $levels {
            Levels::Int8 => by_set!($set, $kernel[Int8]($($argument),*)),
            Levels::Int4 => by_set!($set, $kernel[Int4]($($argument),*)),
            Levels::Int3 => by_set!($set, $kernel[Int3]($($argument),*)),
            Levels::Quinary => by_set!($set, $kernel[Quinary]($($argument),*)),
            Levels::Ternary => by_set!($set, $kernel[Ternary]($($argument),*)),
        }
    };
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
    let count = left.len();
    let uses_sizes = sizes::steps(sizes, count, &mut workspace.steps);
    let (level_bytes, packed) = out.split_at_mut(LEVEL_BYTES);
    let level = match quantizer.rounding {
        Rounding::ToMaximum => {
            workspace.numbers = workspace.due;
            round_to_maximum::<P>(workspace)
        }
        Rounding::Unbiased { step, margin } => {
            let squares = divide(workspace, uses_sizes);
            round_unbiased::<P>(workspace, squares, count, (step, margin))
        }
    };
    let bits = BF16::narrow(level);
    level_bytes.copy_from_slice(&bits.0.to_le_bytes());
    if !level.is_finite() {
        packed.fill(0);
        return Content::Poisoned;
    }
    let level = bits.widen();
    let Workspace { due, numbers, steps, symbols, .. } = workspace;
    for (((left, due), number), step) in left.iter_mut().zip(&*due).zip(&*numbers).zip(&*steps) {
        *left = due - value(*number, level, *step);
    }
    P::pack(symbols, packed);
    Content::Numbers
}

/// Sets the numbers to what is due over the steps. Returns the sum of their squares.
#[inline(always)]
fn divide(workspace: &mut Workspace, uses_sizes: bool) -> f32 {
    let Workspace { due, numbers, steps, .. } = workspace;
    if !uses_sizes {
        *numbers = *due;
        return dot(numbers, numbers);
    }
    let mut lanes = [0.0; LANES];
    let both = due.chunks_exact(LANES).zip(steps.chunks_exact(LANES));
    for ((due, steps), numbers) in both.zip(numbers.chunks_exact_mut(LANES)) {
        for lane in 0..LANES {
            let number = due[lane] / steps[lane];
            numbers[lane] = number;
            lanes[lane] += number * number;
        }
    }
    sum_of(&lanes)
}

/// Replaces the numbers by multiples of the level that it returns, and sets their symbols.
#[inline(always)]
fn round_to_maximum<P: Packing>(workspace: &mut Workspace) -> f32 {
    let largest = largest(&workspace.numbers);
    if !largest.is_finite() {
        return largest;
    }
    let level = BF16::narrow(largest / f32::from(P::LARGEST)).widen();
    // A level that is too small to be inverted stands for zeros.
    let inverse = if level > f32::MIN_POSITIVE { 1.0 / level } else { 0.0 };
    round_all::<P>(workspace, inverse, 0.0);
    level
}

/// The same for [`Rounding::Unbiased`]. The numbers are what is due over the steps of its elements,
/// and the sum of their squares is `squares`.
#[inline(always)]
fn round_unbiased<P: Packing>(
    workspace: &mut Workspace,
    mut squares: f32,
    count: usize,
    (step, margin): (f32, f32),
) -> f32 {
    let mut unit = 1.0;
    if !ORDINARY.contains(&squares) {
        let Workspace { due, numbers, .. } = workspace;
        match bring_to_ordinary(due, numbers) {
            Ok(brought) => unit = brought,
            Err(poison) => return poison,
        }
        squares = dot(numbers, numbers);
    }
    if squares == 0.0 {
        round_all::<P>(workspace, 0.0, 0.0);
        return 0.0;
    }
    let step = step * (squares / count as f32).sqrt();
    let Fit { squares, products } = round_all::<P>(workspace, 1.0 / step, margin);
    // The largest element of a block is above its root mean square, so some symbol is not zero.
    (squares / products * step * unit).min(LARGEST_LEVEL)
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
fn round_all<P: Packing>(workspace: &mut Workspace, inverse_step: f32, margin: f32) -> Fit {
    let Workspace { numbers, symbols, next, .. } = workspace;
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
    <P: Packing>(workspace: &mut Workspace, level: f32, count: usize, sizes: &[u16], bytes: &[u8])
}

/// # Safety
/// None; the macro wants it.
#[inline(always)]
unsafe fn decode<P: Packing>(
    workspace: &mut Workspace,
    level: f32,
    count: usize,
    sizes: &[u16],
    bytes: &[u8],
) {
    let Workspace { numbers, steps, symbols, next, .. } = workspace;
    P::unpack(&bytes[LEVEL_BYTES..], symbols);
    sizes::steps(sizes, count, steps);
    let symbols_and_steps = symbols.chunks_exact(LANES).zip(steps.chunks_exact(LANES));
    let all = numbers.chunks_exact_mut(LANES).zip(symbols_and_steps);
    for (part, (numbers, (symbols, steps))) in all.enumerate() {
        next.iter().for_each(|upcoming| upcoming.prefetch(part));
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
