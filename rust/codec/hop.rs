//! A hop of the ring: a partial sum arrives and the own contribution is added. What the 16-bit
//! sum cannot express must not be lost: it is kept, and goes back to this rank's residual.

use super::wire::Wire;
use crate::simd::blocks::{Block, blocks, blocks_mut, bytes_of, bytes_of_mut, fetch_ahead};
use crate::simd::instructions::{Instructions, for_each_instruction_set};
use crate::simd::lanes::call_for;
use crate::simd::number::{Float, Number, Stored};

/// own = incoming + own, rounded to the wire's float, and `rounded_off` becomes what that lost, all
/// times the scale. Exactly: incoming + own before are own + what was lost after. A sum that
/// overflows is infinity, and nothing is kept of it.
///
/// With `Wire::F32` there is nothing to keep, and `rounded_off` is not looked at.
pub fn add(own: &mut [u8], incoming: &[u8], wire: Wire, rounded_off: &mut [f32]) {
    add_with(Instructions::best(), own, incoming, wire, rounded_off);
}

/// Gives what was rounded off in hops back to the residual of a chunk sent with this scale.
pub fn take_back(residual: &mut [f32], rounded_off: &[f32], scale: f32) {
    take_back_with(Instructions::best(), residual, rounded_off, scale);
}

pub(super) fn add_with(
    instructions: Instructions,
    own: &mut [u8],
    incoming: &[u8],
    wire: Wire,
    rounded_off: &mut [f32],
) {
    assert_eq!(own.len(), incoming.len(), "gflow: as many bytes must come as there are");
    let elements = own.len() / wire.element_bytes();
    assert_eq!(elements * wire.element_bytes(), own.len(), "gflow: bytes must be whole elements");
    if wire == Wire::F32 {
        return call_for!(instructions, add_scaled_for[F32](own, incoming, 1.0));
    }
    assert_eq!(elements, rounded_off.len(), "gflow: there must be room for what is rounded off");
    let lost = bytes_of_mut(rounded_off);
    match wire {
        Wire::F16 => call_for!(instructions, add_for[F16](own, incoming, lost)),
        _ => call_for!(instructions, add_for[BF16](own, incoming, lost)),
    }
}

pub(super) fn take_back_with(
    instructions: Instructions,
    residual: &mut [f32],
    rounded_off: &[f32],
    scale: f32,
) {
    assert_eq!(residual.len(), rounded_off.len(), "gflow: a residual is as long as its chunk");
    let (to, from) = (bytes_of_mut(residual), bytes_of(rounded_off));
    call_for!(instructions, add_scaled_for[F32](to, from, 1.0 / scale));
}

for_each_instruction_set! {
    mod add_for = add_by_blocks;
    <W: Stored<Number: Float>>(own: &mut [u8], incoming: &[u8], rounded_off: &mut [u8])
}

for_each_instruction_set! {
    mod add_scaled_for = add_scaled_by_blocks;
    <N: Float>(to: &mut [u8], from: &[u8], scale: f32)
}

/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn add_by_blocks<W: Stored<Number: Float>>(
    own: &mut [u8],
    incoming: &[u8],
    rounded_off: &mut [u8],
) {
    let (owns, own_rest) = blocks_mut::<W>(own);
    let (incomings, incoming_rest) = blocks::<W>(incoming);
    let (losts, lost_rest) = blocks_mut::<W::Number>(rounded_off);
    for ((own, incoming), lost) in owns.iter_mut().zip(incomings).zip(losts) {
        lost.0 = add_block(own, incoming);
    }
    if !own_rest.is_empty() {
        let mut own = Block::<W>::padded(own_rest);
        Block(add_block(&mut own, &Block::padded(incoming_rest))).put_back(lost_rest);
        own.put_back(own_rest);
    }
}

/// Adds what comes in, and gives what that lost.
#[inline(always)]
fn add_block<W: Stored<Number: Float>>(own: &mut Block<W>, incoming: &Block<W>) -> W::Number {
    let (a, b) = (incoming.0.widen(), own.0.widen());
    let sum = a.add(b);
    let rounded = W::narrow(sum);
    // The sum in f32 may have been rounded already, if the two are of very different size: this
    // is by how much (Knuth's two-sum).
    let from_b = sum.subtract(a);
    let from_a = sum.subtract(from_b);
    let lost_before = a.subtract(from_a).add(b.subtract(from_b));
    let lost = sum.subtract(rounded.widen()).add(lost_before);
    own.0 = rounded;
    lost.pick_if_finite(lost, W::Number::all(0.0))
}

/// # Safety
/// The types are those of the instructions that this is compiled for.
#[inline(always)]
unsafe fn add_scaled_by_blocks<N: Float>(to: &mut [u8], from: &[u8], scale: f32) {
    let scale = N::all(scale);
    let (tos, to_rest) = blocks_mut::<N>(to);
    let (froms, from_rest) = blocks::<N>(from);
    for (to, from) in tos.iter_mut().zip(froms) {
        fetch_ahead(to);
        to.0 = to.0.add(from.0.multiply(scale));
    }
    if !to_rest.is_empty() {
        let (to, from) = (Block::<N>::padded(to_rest), Block::<N>::padded(from_rest));
        Block(to.0.add(from.0.multiply(scale))).put_back(to_rest);
    }
}
