//! Unpacking: the sum that came round becomes the gradient of a chunk. It must be the same to the
//! bit on every rank, so nothing but the sum and the scale may enter.

use super::gradient::Gradient;
use super::wire::Wire;
use crate::simd::blocks::{Block, blocks, blocks_mut, fetch_ahead};
use crate::simd::element::Element;
use crate::simd::instructions::{Instructions, for_each_instruction_set};
use crate::simd::lanes::call_for;
use crate::simd::number::{Float, Number, Stored};
use crate::simd::sixteen::{BF16, F16};

/// Makes the gradient the sum divided by the scale, rounded once to the gradient's type.
pub fn unpack(sum: &[u8], wire: Wire, scale: f32, to: &mut Gradient) {
    unpack_with(Instructions::best(), sum, wire, scale, to);
}

/// Makes every element of the gradient this value: infinity or NaN for a poisoned chunk.
///
/// Plain stores. Zeros are not this function's business: the gradient of a chunk that is not sent
/// is zero already, see `accumulate`. Written here, to memory that has left the cache, they were
/// measured to take 0.67 of the time of touching gradient and residual once, of which DDP, that
/// finds them in the cache then, gains 0.28. Stores past the cache take 0.37, and DDP gains 0.09;
/// but if the gradient is in the cache they take twice as long as plain ones, and DDP longer too.
pub fn fill(to: &mut Gradient, value: f32) {
    match to {
        Gradient::F32(numbers) => numbers.fill(value),
        Gradient::F16(bits) => bits.fill(F16::narrow(value).0),
        Gradient::BF16(bits) => bits.fill(BF16::narrow(value).0),
    }
}

pub(super) fn unpack_with(
    instructions: Instructions,
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
                Element::F16 => call_for!(instructions, unpack_for[$wire, F16](sum, scale, to)),
                Element::BF16 => call_for!(instructions, unpack_for[$wire, BF16](sum, scale, to)),
                _ => call_for!(instructions, unpack_for[$wire, F32](sum, scale, to)),
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
    mod unpack_for = unpack_by_blocks;
    <W: Stored<Number: Float>, G: Stored<Number = W::Number>>(
        sum: &[u8], scale: f32, to: &mut [u8]
    )
}

/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn unpack_by_blocks<W: Stored<Number: Float>, G: Stored<Number = W::Number>>(
    sum: &[u8],
    scale: f32,
    to: &mut [u8],
) {
    let inverse = Float::all(1.0 / scale);
    let (sums, sum_rest) = blocks::<W>(sum);
    let (to, to_rest) = blocks_mut::<G>(to);
    for (to, sum) in to.iter_mut().zip(sums) {
        fetch_ahead(to);
        to.0 = G::narrow(sum.0.widen().multiply(inverse));
    }
    if !sum_rest.is_empty() {
        let sum = Block::<W>::padded(sum_rest);
        Block(G::narrow(sum.0.widen().multiply(inverse))).put_back(to_rest);
    }
}
