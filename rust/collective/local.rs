//! Collectives within a host: tensors in shared memory, or on their way through it.
//!
//! A tensor that lives in the arena is summed where it is, without a copy. Any other goes through
//! the blocks of the region, piece by piece: one copy in, one out. Either way every rank owns a
//! shard, adds it up over all ranks in the order of their local_ranks, and hands the sum to the others.
//! Nothing here depends on who comes first, and nobody writes where another may be reading: the
//! steps of the region say when.

use super::partition::{ALIGNMENT, partition};
use super::span::Span;
use crate::simd::reducer::Reducer;
use crate::transport::shm::layout::{BLOCK_BYTES, BLOCK_SLOTS};
use crate::transport::shm::region::SharedRegion;
use crate::transport::{Failure, Watch};
use std::ops::Range;
use std::time::Instant;

/// The ranks of this host at one collective.
pub struct Local<'a> {
    pub region: &'a mut SharedRegion,
    pub watch: &'a mut dyn Watch,
    pub deadline: Instant,
}

/// A part of a tensor that one rank of the host has and all others want.
#[derive(Debug, Clone, Copy)]
pub struct OwnedSpan {
    /// The local_rank of the rank that has it.
    pub owner: usize,
    /// Where it is, or where it is wanted, on this rank.
    pub span: Span,
}

impl Local<'_> {
    fn local_ranks(&self) -> usize {
        self.region.ranks().len()
    }

    /// Replaces `tensors`, which live in the arenas of all ranks by local_rank, by their sum.
    pub fn all_reduce_in_place(
        &mut self,
        tensors: &[Span],
        reducer: &Reducer,
    ) -> Result<(), Failure> {
        let own = self.region.local_rank();
        let range = partition(tensors[own].bytes, self.local_ranks(), own);
        let at: Vec<*mut u8> = tensors.iter().map(|tensor| tensor.at(range.start)).collect();
        let sources: Vec<*const u8> = at.iter().map(|address| address.cast_const()).collect();
        // SAFETY: all ranks have begun this collective, so no rank's program touches its tensor,
        // and no other rank touches this shard of any of them.
        unsafe { reducer.fold(&sources, &at, range.len(), true) };
        self.barrier()
    }

    /// Sums the shard of this rank, if it is among the first `carriers`, into its own tensor; all
    /// `tensors` live in arenas. The sum is not finished: other hosts add to it.
    pub fn reduce_in_place(&mut self, tensors: &[Span], carriers: usize, reducer: &Reducer) {
        let own = self.region.local_rank();
        if own >= carriers {
            return;
        }
        let range = partition(tensors[own].bytes, carriers, own);
        let sources: Vec<*const u8> =
            tensors.iter().map(|tensor| tensor.at(range.start).cast_const()).collect();
        // SAFETY: as above; the shard is read by this rank alone until `hand_out`.
        unsafe { reducer.fold(&sources, &[tensors[own].at(range.start)], range.len(), false) };
    }

    /// Writes the shard of this rank into the tensors of the others, which live in arenas, and
    /// waits until the others have done the same.
    pub fn hand_out(&mut self, tensors: &[Span], carriers: usize) -> Result<(), Failure> {
        let own = self.region.local_rank();
        if own < carriers {
            let part = tensors[own].part(partition(tensors[own].bytes, carriers, own));
            let start = part.address as usize - tensors[own].address as usize;
            for tensor in tensors.iter().filter(|tensor| tensor.address != tensors[own].address) {
                // SAFETY: this shard of every tensor is this rank's until the ranks meet.
                unsafe { part.copy_to(tensor.at(start)) };
            }
        }
        self.barrier()
    }

    /// Waits until every rank of the host has come this far.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.region.step();
        self.region.await_steps(self.region.steps(), self.watch, self.deadline)
    }

    /// Replaces `tensor` by the sum over all ranks of the host, through the blocks of the region.
    pub fn all_reduce(&mut self, tensor: Span, reducer: &Reducer) -> Result<(), Failure> {
        let (own, local_ranks) = (self.region.local_rank(), self.local_ranks());
        let pieces = Pieces::new(tensor.bytes, local_ranks);
        self.flow(
            pieces.blocks(),
            |region, block| pieces.show(tensor, region, block),
            |region, block| {
                let piece = tensor.part(pieces.range(own, block));
                let shown = pieces.shown(piece, region, block);
                let sums = [piece.address, pieces.within(region.block(own, block), own)];
                // SAFETY: all ranks have filled this block; this rank's shard of each is read by
                // nobody else, and its local_rank in the own block was left free for the sum.
                unsafe { reducer.fold(&shown, &sums, piece.bytes, true) };
            },
            |region, block| {
                for owner in (0..local_ranks).filter(|owner| *owner != own) {
                    let piece = tensor.part(pieces.range(owner, block));
                    // SAFETY: the owner has put its sum there, and keeps it until all have it.
                    unsafe { piece.copy_from(pieces.within(region.block(owner, block), owner)) };
                }
            },
        )
    }

    /// Sums the shards of the first `carriers` ranks, each into the `tensor` of its carrier. The
    /// sum is not finished: other hosts add to it.
    pub fn reduce(
        &mut self,
        tensor: Span,
        carriers: usize,
        reducer: &Reducer,
    ) -> Result<(), Failure> {
        let own = self.region.local_rank();
        let pieces = Pieces::new(tensor.bytes, carriers);
        self.flow(
            pieces.blocks(),
            |region, block| pieces.show(tensor, region, block),
            |region, block| {
                if own >= carriers {
                    return;
                }
                let piece = tensor.part(pieces.range(own, block));
                let shown = pieces.shown(piece, region, block);
                // SAFETY: all ranks have filled this block, and the own shard is nobody else's.
                unsafe { reducer.fold(&shown, &[piece.address], piece.bytes, false) };
            },
            |_, _| {},
        )
    }

    /// Brings every part from its owner to all other ranks of the host. Parts do not overlap, and
    /// all ranks name the same owners and sizes.
    pub fn publish(&mut self, parts: &[OwnedSpan]) -> Result<(), Failure> {
        let own = self.region.local_rank();
        let longest = parts.iter().map(|part| part.span.bytes).max().unwrap_or(0);
        let pieces = Pieces::new(longest.saturating_mul(parts.len()), parts.len().max(1));
        let piece = |part: &OwnedSpan, block: usize| {
            let at = |offset: usize| offset.min(part.span.bytes);
            part.span.part(at(block * pieces.each)..at((block + 1) * pieces.each))
        };
        self.flow(
            longest.div_ceil(pieces.each),
            |region, block| {
                for (index, part) in parts.iter().enumerate().filter(|(_, p)| p.owner == own) {
                    let slot = pieces.within(region.block(own, block), index);
                    // SAFETY: the local_rank in the own block is free: see `flow`.
                    unsafe { piece(part, block).copy_to(slot) };
                }
            },
            |_, _| {},
            |region, block| {
                for (index, part) in parts.iter().enumerate().filter(|(_, p)| p.owner != own) {
                    let slot = pieces.within(region.block(part.owner, block), index);
                    // SAFETY: the owner has filled it, and keeps it until all have it.
                    unsafe { piece(part, block).copy_from(slot) };
                }
            },
        )
    }

    /// Takes `blocks` blocks through the region: while one is filled, the one before is combined and
    /// the one before that is emptied. Every rank takes three steps a round: "filled", "combined"
    /// and "emptied"; before each part of the work it waits for the step of the others that the
    /// work needs, and for no more.
    fn flow(
        &mut self,
        blocks: usize,
        mut fill: impl FnMut(&SharedRegion, usize),
        mut combine: impl FnMut(&SharedRegion, usize),
        mut empty: impl FnMut(&SharedRegion, usize),
    ) -> Result<(), Failure> {
        let start = self.region.steps();
        let after = |round: usize, part: u64| start + 3 * round as u64 + part;
        // The slots are free once all are done with whatever went through them before.
        self.await_steps(start)?;
        for round in 0..blocks + 2 {
            if round < blocks {
                if let Some(before) = round.checked_sub(BLOCK_SLOTS) {
                    // The slot is in use until all have emptied the block that was in it.
                    self.await_steps(after(before + 2, 3))?;
                }
                fill(self.region, round);
            }
            self.region.step();
            if let Some(block) = round.checked_sub(1).filter(|block| *block < blocks) {
                self.await_steps(after(block, 1))?;
                combine(self.region, block);
            }
            self.region.step();
            if let Some(block) = round.checked_sub(2) {
                self.await_steps(after(block + 1, 2))?;
                empty(self.region, block);
            }
            self.region.step();
        }
        Ok(())
    }

    fn await_steps(&mut self, steps: u64) -> Result<(), Failure> {
        self.region.await_steps(steps, self.watch, self.deadline)
    }
}

/// How a tensor is cut: into a shard for each owner, and each shard into pieces, of which a block
/// holds one of every shard.
struct Pieces {
    bytes: usize,
    owners: usize,
    /// The size of a piece that is not short.
    each: usize,
}

impl Pieces {
    fn new(bytes: usize, owners: usize) -> Pieces {
        let each = (BLOCK_BYTES / owners / ALIGNMENT * ALIGNMENT).max(ALIGNMENT);
        assert!(each * owners <= BLOCK_BYTES, "{owners} ranks on one host");
        Pieces { bytes, owners, each }
    }

    fn blocks(&self) -> usize {
        partition(self.bytes, self.owners, 0).len().div_ceil(self.each)
    }

    /// The piece of `owner`'s shard that is in `block`.
    fn range(&self, owner: usize, block: usize) -> Range<usize> {
        let shard = partition(self.bytes, self.owners, owner);
        let at = |block: usize| (shard.start + block * self.each).min(shard.end);
        at(block)..at(block + 1)
    }

    /// Puts what the other owners need of `tensor` into this rank's block.
    fn show(&self, tensor: Span, region: &SharedRegion, block: usize) {
        for owner in (0..self.owners).filter(|owner| *owner != region.local_rank()) {
            let piece = tensor.part(self.range(owner, block));
            // SAFETY: the piece's local_rank in the own block is free: see `flow`.
            unsafe { piece.copy_to(self.within(region.block(region.local_rank(), block), owner)) };
        }
    }

    /// Where the pieces of this rank's shard are, by local_rank: the own one where it was.
    fn shown(&self, own_piece: Span, region: &SharedRegion, block: usize) -> Vec<*const u8> {
        let own = region.local_rank();
        (0..region.ranks().len())
            .map(|local_rank| match local_rank == own {
                true => own_piece.address.cast_const(),
                false => self.within(region.block(local_rank, block), own).cast_const(),
            })
            .collect()
    }

    /// Where in a block the piece of `owner` is.
    fn within(&self, block: *mut u8, owner: usize) -> *mut u8 {
        // SAFETY: `owners` pieces fit into a block.
        unsafe { block.add(owner * self.each) }
    }
}
