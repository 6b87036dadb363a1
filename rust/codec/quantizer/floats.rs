//! Passes over the floats of a block, and how they are called for an instruction set. Sums are by
//! lanes, in an order that is the same with every instruction set.

use super::levels::BLOCK;
use crate::codec::gradient::Gradient;
use crate::simd::element::Element;
use crate::simd::half_precision::{BF16, F16};
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::{LANES, sum_array};
use crate::simd::number::Stored;

/// Calls what `for_each_instruction_set!` compiled for this set, which is available.
macro_rules! by_set {
    ($set:expr, $kernel:ident[$($type:ident)?]($($argument:expr),*)) => {
        // SAFETY: a workspace's set and the best set are available.
        unsafe {
            match $set {
                InstructionSet::Portable => $kernel::portable$(::<$type>)?($($argument),*),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => $kernel::avx2$(::<$type>)?($($argument),*),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => $kernel::avx512$(::<$type>)?($($argument),*),
            }
        }
    };
}
pub(super) use by_set;

/// The sum of lanes. It is not inlined: the compiler would carry its halving into the loop that fills
/// the lanes, and add two at a time there.
#[inline(never)]
pub fn sum_of(lanes: &[f32; LANES]) -> f32 {
    sum_array(*lanes)
}

#[inline(always)]
pub fn dot(left: &[f32; BLOCK], right: &[f32; BLOCK]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (left, right) in left.chunks_exact(LANES).zip(right.chunks_exact(LANES)) {
        for lane in 0..LANES {
            lanes[lane] += left[lane] * right[lane];
        }
    }
    sum_of(&lanes)
}

/// The largest magnitude. A NaN counts as larger than infinity, and is returned as the usual one.
#[inline(always)]
pub fn largest(numbers: &[f32; BLOCK]) -> f32 {
    let magnitudes = numbers.iter().map(|number| number.to_bits() & !(1 << 31));
    let largest = f32::from_bits(magnitudes.fold(0, u32::max));
    if largest.is_nan() { f32::NAN } else { largest }
}

/// sum = gradient + feedback * residual
pub fn add_feedback(
    set: InstructionSet,
    gradient: &Gradient,
    residual: &[f32],
    feedback: f32,
    sum: &mut [f32],
) {
    assert_eq!(residual.len(), sum.len(), "gflow: a residual is as long as its gradient");
    match gradient {
        Gradient::F32(numbers) => {
            by_set!(set, feedback_kernel[](numbers, residual, feedback, sum));
        }
        _ => {
            read(gradient, sum);
            for (sum, residual) in sum.iter_mut().zip(residual) {
                *sum += feedback * residual;
            }
        }
    }
}

for_each_instruction_set! {
    mod feedback_kernel = feed_back;
    <>(gradient: &[f32], residual: &[f32], feedback: f32, sum: &mut [f32])
}

/// # Safety
/// None; the macro wants it.
#[inline(always)]
unsafe fn feed_back(gradient: &[f32], residual: &[f32], feedback: f32, sum: &mut [f32]) {
    for ((sum, gradient), residual) in sum.iter_mut().zip(gradient).zip(residual) {
        *sum = gradient + feedback * residual;
    }
}

/// sum += numbers
pub fn add(sum: &mut [f32], numbers: &[f32]) {
    for (sum, number) in sum.iter_mut().zip(numbers) {
        *sum += number;
    }
}

/// The elements of a gradient as f32.
pub fn read(gradient: &Gradient, out: &mut [f32]) {
    match gradient {
        Gradient::F32(numbers) => out[..numbers.len()].copy_from_slice(numbers),
        Gradient::F16(bits) => {
            out.iter_mut().zip(&**bits).for_each(|(out, bits)| *out = F16(*bits).widen());
        }
        Gradient::BF16(bits) => {
            out.iter_mut().zip(&**bits).for_each(|(out, bits)| *out = BF16(*bits).widen());
        }
    }
}

/// Stores numbers as the elements of a gradient.
pub fn store(gradient: &mut Gradient, numbers: &[f32]) {
    match gradient {
        Gradient::F32(out) => out.copy_from_slice(numbers),
        Gradient::F16(bits) => {
            bits.iter_mut().zip(numbers).for_each(|(out, x)| *out = F16::narrow(*x).0);
        }
        Gradient::BF16(bits) => {
            bits.iter_mut().zip(numbers).for_each(|(out, x)| *out = BF16::narrow(*x).0);
        }
    }
}

/// A number as it is after it was stored as an element of this type.
pub fn rounded_to(element: Element, number: f32) -> f32 {
    match element {
        Element::F16 => F16::narrow(number).widen(),
        Element::BF16 => BF16::narrow(number).widen(),
        _ => number,
    }
}
