//! The sizes of elements: how large each element of a gradient usually is, as the root of a moving
//! average of its squares. They are made only of what was delivered, so all hosts have the same.
//!
//! A size is a bf16. One block in [`TURNS`] is updated at a step, by as much as in that many steps:
//! this costs an eighth of the time, and no accuracy that could be measured.
//!
//! A single number says little about how large its element usually is. So the average of a block
//! starts from the mean square of what is delivered first, as if that had been one number before,
//! and the first updates count the same.

use super::floats::{self, by_set};
use super::levels::{BLOCK, PARTS};
use crate::codec::gradient::Gradient;
use crate::simd::blocks::Upcoming;
use crate::simd::half_precision::BF16;
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::LANES;
use crate::simd::number::Stored;

/// A block is updated at one step in this many.
pub const TURNS: u64 = 8;

/// What an update keeps of the average of squares, except for the first ones: 0.98 per step.
const KEPT: f32 = 0.850_763;

/// What the first update of a block keeps of the mean square.
const KEPT_AT_FIRST: f32 = 0.5;

/// The least step of an element, as a fraction of the mean size of its block.
const FLOOR: f32 = 0.02;

/// No size is larger, so that the squares of a block can be added up.
const LARGEST_SIZE: f32 = 1e17;

/// Which blocks of a gradient are updated at a step, one in [`TURNS`], and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn {
    /// The first of them.
    pub first: usize,
    /// What is kept of the average of squares of a block that has sizes.
    pub kept: f32,
}

impl Turn {
    pub fn at(step: u64) -> Turn {
        // This one included.
        let updates = (step / TURNS + 1) as f32;
        let first = ((TURNS - step % TURNS) % TURNS) as usize;
        Turn { first, kept: KEPT.min(updates / (updates + 1.0)) }
    }
}

/// Updates the sizes of those blocks of a gradient whose turn it is at `step`, from what was
/// delivered. Blocks with infinity or NaN keep theirs.
pub fn follow(sizes: &mut [u16], delivered: &mut Gradient, step: u64) {
    follow_with(InstructionSet::best(), sizes, delivered, step);
}

/// The same with an instruction set that this CPU has.
pub(super) fn follow_with(
    set: InstructionSet,
    sizes: &mut [u16],
    delivered: &mut Gradient,
    step: u64,
) {
    assert_eq!(sizes.len(), delivered.len(), "gflow: the sizes of a gradient");
    assert!(set.is_available(), "this CPU does not have {set:?}");
    let Turn { first, kept } = Turn::at(step);
    let mut numbers = [0.0; BLOCK];
    let (count, turns) = (sizes.len(), TURNS as usize);
    let range_of = |block: usize| block * BLOCK..count.min((block + 1) * BLOCK);
    for block in (first..count.div_ceil(BLOCK)).step_by(turns) {
        let range = range_of(block);
        floats::read(&delivered.part(range.clone()), &mut numbers);
        numbers[range.len()..].fill(0.0);
        if !floats::largest(&numbers).is_finite() {
            continue;
        }
        // No CPU expects that the next block is so far away.
        let before_next = range_of(block + turns - 1);
        let next = match before_next.end + BLOCK <= count {
            true => [
                delivered.part(before_next.clone()).upcoming(PARTS),
                Upcoming::after(&sizes[before_next], PARTS),
            ],
            false => [Upcoming::NOTHING; 2],
        };
        by_set!(set, follow_kernel[](&mut sizes[range], &numbers, kept, &next));
    }
}

for_each_instruction_set! {
    mod follow_kernel = follow_block;
    <>(sizes: &mut [u16], delivered: &[f32; BLOCK], kept: f32, next: &[Upcoming])
}

/// # Safety
/// None; the macro wants it.
#[inline(always)]
unsafe fn follow_block(sizes: &mut [u16], delivered: &[f32; BLOCK], kept: f32, next: &[Upcoming]) {
    let mut numbers = *delivered;
    for number in &mut numbers {
        *number = number.clamp(-LARGEST_SIZE, LARGEST_SIZE);
    }
    let is_new = sizes.iter().fold(0, |bits, size| bits | size) == 0;
    let (first, kept) = match is_new {
        true => (floats::dot(&numbers, &numbers) / sizes.len() as f32, KEPT_AT_FIRST),
        false => (0.0, kept),
    };
    let parts = sizes.chunks_mut(LANES).zip(numbers.chunks_exact(LANES));
    for (part, (sizes, numbers)) in parts.enumerate() {
        next.iter().for_each(|upcoming| upcoming.prefetch(part));
        for (size, number) in sizes.iter_mut().zip(numbers) {
            let before = BF16(*size).widen();
            let before = before * before + first;
            let squares = kept * before + (1.0 - kept) * (number * number);
            *size = BF16::narrow(squares.sqrt()).0;
        }
    }
}

/// Multiplies all sizes: the unit of the gradients has changed by this factor.
pub fn rescale(sizes: &mut [u16], factor: f32) {
    for size in sizes {
        let scaled = (BF16(*size).widen() * factor).min(LARGEST_SIZE);
        *size = BF16::narrow(scaled).0;
    }
}

/// The step of each element of a block: what a multiple of its level is multiplied by.
pub trait Steps {
    /// Those of the elements from `part * LANES` on.
    fn part(&self, part: usize) -> [f32; LANES];
}

/// All steps are 1.
pub struct EqualSteps;

impl Steps for EqualSteps {
    #[inline(always)]
    fn part(&self, _: usize) -> [f32; LANES] {
        [1.0; LANES]
    }
}

/// Each element's step is its size, with a floor.
pub struct SizedSteps<'a> {
    sizes: &'a [u16; BLOCK],
    floor: f32,
}

impl Steps for SizedSteps<'_> {
    #[inline(always)]
    fn part(&self, part: usize) -> [f32; LANES] {
        let mut steps = [0.0; LANES];
        for (step, size) in steps.iter_mut().zip(&self.sizes[part * LANES..][..LANES]) {
            *step = BF16(*size).widen() + self.floor;
        }
        steps
    }
}

/// The steps by the sizes of a block; `None` if they are empty or zero, so that all steps are 1. A block
/// that is not whole is completed in `padded`.
#[inline(always)]
pub fn steps<'a>(sizes: &'a [u16], padded: &'a mut [u16; BLOCK]) -> Option<SizedSteps<'a>> {
    if sizes.is_empty() {
        return None;
    }
    let count = sizes.len();
    let sizes: &'a [u16; BLOCK] = match sizes.try_into() {
        Ok(whole) => whole,
        Err(_) => {
            let (own, rest) = padded.split_at_mut(count);
            own.copy_from_slice(sizes);
            rest.fill(0);
            padded
        }
    };
    let mut lanes = [0.0; LANES];
    for sizes in sizes.chunks_exact(LANES) {
        for lane in 0..LANES {
            lanes[lane] += BF16(sizes[lane]).widen();
        }
    }
    let floor = floats::sum_of(&lanes) / count as f32 * FLOOR;
    (floor >= f32::MIN_POSITIVE).then_some(SizedSteps { sizes, floor })
}
