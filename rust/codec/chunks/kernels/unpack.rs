//! Unpacking: converts the final sum to the gradient of a chunk. Every rank must get the same
//! bits, so the result may depend on nothing but the sum and the scale.

use crate::codec::gradient::Gradient;
use crate::codec::wire::Wire;
use crate::simd::blocks::{Block, blocks, blocks_mut, prefetch};
use crate::simd::element::Element;
use crate::simd::half_precision::{BF16, F16};
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::dispatch;
use crate::simd::number::{Float, Number, Stored};

/// Sets the gradient to the sum divided by the scale, rounded once to the gradient's type.
pub fn unpack(sum: &[u8], wire: Wire, scale: f32, to: &mut Gradient) {
    unpack_with(InstructionSet::best(), sum, wire, scale, to);
}

/// Sets every element of the gradient to this value: infinity or NaN for a poisoned chunk.
///
/// Not used for zeros: `accumulate` has already cleared the chunks that are not sent. Measured in
/// units of touching gradient and residual once, writing zeros here, after the memory has left the
/// cache, costs 0.67, of which DDP wins back 0.28 by finding them in cache. Non-temporal stores
/// cost 0.37 and DDP wins back 0.09; but when the gradient is in cache they take twice as long as
/// plain stores, and DDP takes longer too.
pub fn fill(to: &mut Gradient, value: f32) {
    match to {
        Gradient::F32(numbers) => numbers.fill(value),
        Gradient::F16(bits) => bits.fill(F16::narrow(value).0),
        Gradient::BF16(bits) => bits.fill(BF16::narrow(value).0),
    }
}

pub(in crate::codec::chunks) fn unpack_with(
    set: InstructionSet,
    sum: &[u8],
    wire: Wire,
    scale: f32,
    to: &mut Gradient,
) {
    let bytes = to.len() * wire.element_bytes();
    assert_eq!(bytes, sum.len(), "gflow: a chunk must be unpacked from bytes for all of it");
    let (element, to) = (to.element(), to.bytes_mut());
    macro_rules! from {
        ($wire:ident) => {
            match element {
                Element::F16 => dispatch!(set, unpack_kernel[$wire, F16](sum, scale, to)),
                Element::BF16 => dispatch!(set, unpack_kernel[$wire, BF16](sum, scale, to)),
                _ => dispatch!(set, unpack_kernel[$wire, F32](sum, scale, to)),
            }
        };
    }
    match wire {
        Wire::F16 => from!(F16),
        Wire::BF16 => from!(BF16),
        Wire::F32 => from!(F32),
    }
}

for_each_instruction_set! {
    mod unpack_kernel = unpack_by_blocks;
    <W: Stored<Number: Float>, G: Stored<Number = W::Number>>(
        sum: &[u8], scale: f32, to: &mut [u8]
    )
}

/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn unpack_by_blocks<W: Stored<Number: Float>, G: Stored<Number = W::Number>>(
    sum: &[u8],
    scale: f32,
    to: &mut [u8],
) {
    let inverse = Float::splat(1.0 / scale);
    let (sums, sum_tail) = blocks::<W>(sum);
    let (to, to_tail) = blocks_mut::<G>(to);
    for (to, sum) in to.iter_mut().zip(sums) {
        prefetch(to);
        to.0 = G::narrow(sum.0.widen().multiply(inverse));
    }
    if !sum_tail.is_empty() {
        let sum = Block::<W>::load_tail(sum_tail);
        Block(G::narrow(sum.0.widen().multiply(inverse))).store_tail(to_tail);
    }
}
