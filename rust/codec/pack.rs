//! Packing: a chunk of the residual becomes floats of the wire, and what those cannot express
//! stays in the residual. Per element, what is sent, divided by the scale, and the new residual
//! must be exactly the old residual together.

use super::wire::Wire;
use crate::simd::blocks::{Block, blocks_mut, bytes_of_mut, fetch_ahead};
use crate::simd::instructions::{Instructions, for_each_instruction_set};
use crate::simd::lanes::call_for;
use crate::simd::number::{Float, Number, Stored};

/// The largest number of both 16-bit wires' precision. One that is larger could be rounded up
/// beyond f32, so of such a number only this much is sent.
const LARGEST_SENT: f32 = f32::from_bits(0x7f7f_0000);

/// Fills `out` with the residual times the scale, and leaves in the residual what was rounded
/// off. The scale is a power of two from `scale_for`, of a sum of which this residual's norm is a
/// part.
pub fn pack(residual: &mut [f32], scale: f32, wire: Wire, out: &mut [u8]) {
    pack_with(Instructions::best(), residual, scale, wire, out);
}

pub(super) fn pack_with(
    instructions: Instructions,
    residual: &mut [f32],
    scale: f32,
    wire: Wire,
    out: &mut [u8],
) {
    let bytes = residual.len() * wire.element_bytes();
    assert_eq!(bytes, out.len(), "gflow: a chunk must be packed into bytes for all of it");
    let from = bytes_of_mut(residual);
    match wire {
        Wire::F16 => call_for!(instructions, pack_for[F16](from, scale, LARGEST_SENT, out)),
        Wire::BF16 => call_for!(instructions, pack_for[BF16](from, scale, LARGEST_SENT, out)),
        Wire::F32 => call_for!(instructions, pack_for[F32](from, scale, f32::MAX, out)),
    }
}

for_each_instruction_set! {
    mod pack_for = pack_by_blocks;
    <W: Stored<Number: Float>>(residual: &mut [u8], scale: f32, limit: f32, out: &mut [u8])
}

/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn pack_by_blocks<W: Stored<Number: Float>>(
    residual: &mut [u8],
    scale: f32,
    limit: f32,
    out: &mut [u8],
) {
    let (residuals, residual_rest) = blocks_mut::<W::Number>(residual);
    let (outs, out_rest) = blocks_mut::<W>(out);
    for (residual, out) in residuals.iter_mut().zip(outs) {
        fetch_ahead(residual);
        *out = pack_block(residual, scale, limit);
    }
    if !residual_rest.is_empty() {
        let mut residual = Block::padded(residual_rest);
        pack_block::<W>(&mut residual, scale, limit).put_back(out_rest);
        residual.put_back(residual_rest);
    }
}

#[inline(always)]
fn pack_block<W: Stored<Number: Float>>(
    residual: &mut Block<W::Number>,
    scale: f32,
    limit: f32,
) -> Block<W> {
    let number = residual.0;
    let limited = number.smaller(Float::all(limit)).larger(Float::all(-limit));
    let sent = W::narrow(limited.multiply(Float::all(scale)));
    // Neither rounds: the quotient has the few digits of the wire, and is as near to the number
    // as those allow, so that their difference has no more digits than the number. A product
    // that was rounded, because it is subnormal, is far below what the wire can express, and
    // zero of it is sent.
    residual.0 = number.subtract(sent.widen().multiply(Float::all(1.0 / scale)));
    Block(sent)
}
