//! Packing: converts a chunk of the residual to the wire format and leaves the rounding error in
//! the residual. Per element, `sent / scale + new residual` must equal the old residual exactly.

use crate::codec::wire::Wire;
use crate::simd::blocks::{Block, blocks_mut, bytes_of_mut, prefetch};
use crate::simd::instruction_set::{InstructionSet, for_each_instruction_set};
use crate::simd::lanes::dispatch;
use crate::simd::number::{Float, Number, Stored};

/// The largest f32 that both 16-bit formats' precision can hold. A larger number could round up
/// beyond f32, so only this much of it is sent.
const LARGEST_SENT: f32 = f32::from_bits(0x7f7f_0000);

/// Fills `out` with the residual times the scale, and leaves the rounding error in the residual.
/// The scale is what `scale_for` gives for a sum of norms that includes this residual's.
pub fn pack(residual: &mut [f32], scale: f32, wire: Wire, out: &mut [u8]) {
    pack_with(InstructionSet::best(), residual, scale, wire, out);
}

pub(in crate::codec::chunks) fn pack_with(
    set: InstructionSet,
    residual: &mut [f32],
    scale: f32,
    wire: Wire,
    out: &mut [u8],
) {
    let bytes = residual.len() * wire.element_bytes();
    assert_eq!(bytes, out.len(), "gflow: a chunk must be packed into bytes for all of it");
    let from = bytes_of_mut(residual);
    match wire {
        Wire::F16 => dispatch!(set, pack_kernel[F16](from, scale, LARGEST_SENT, out)),
        Wire::BF16 => dispatch!(set, pack_kernel[BF16](from, scale, LARGEST_SENT, out)),
        Wire::F32 => dispatch!(set, pack_kernel[F32](from, scale, f32::MAX, out)),
    }
}

for_each_instruction_set! {
    mod pack_kernel = pack_by_blocks;
    <W: Stored<Number: Float>>(residual: &mut [u8], scale: f32, limit: f32, out: &mut [u8])
}

/// # Safety
/// The types belong to the instruction set this is compiled for.
#[inline(always)]
unsafe fn pack_by_blocks<W: Stored<Number: Float>>(
    residual: &mut [u8],
    scale: f32,
    limit: f32,
    out: &mut [u8],
) {
    let (residuals, residual_tail) = blocks_mut::<W::Number>(residual);
    let (outs, out_tail) = blocks_mut::<W>(out);
    for (residual, out) in residuals.iter_mut().zip(outs) {
        prefetch(residual);
        *out = pack_block(residual, scale, limit);
    }
    if !residual_tail.is_empty() {
        let mut residual = Block::load_tail(residual_tail);
        pack_block::<W>(&mut residual, scale, limit).store_tail(out_tail);
        residual.store_tail(residual_tail);
    }
}

#[inline(always)]
fn pack_block<W: Stored<Number: Float>>(
    residual: &mut Block<W::Number>,
    scale: f32,
    limit: f32,
) -> Block<W> {
    let number = residual.0;
    let limited = number.smaller(Float::splat(limit)).larger(Float::splat(-limit));
    let sent = W::narrow(limited.multiply(Float::splat(scale)));
    // Neither operation rounds. The quotient has the wire format's few digits and is the nearest
    // such value to the number, so their difference has no more digits than the number. A product
    // that did round because it is subnormal is far below what the wire can represent, and goes
    // out as zero.
    residual.0 = number.subtract(sent.widen().multiply(Float::splat(1.0 / scale)));
    Block(sent)
}
