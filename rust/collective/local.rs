//! Collectives within a host, through shared memory.
//!
//! A tensor that lives in the arena is reduced in place, without a copy. Any other goes through the
//! block slots of the region, piece by piece: one copy in, one out. Either way every rank owns a
//! shard, reduces it over all ranks in the order of local ranks, and distributes the result. The
//! result does not depend on timing, and no rank writes where another may be reading: the steps of
//! the region say when.

use super::partition::{ALIGNMENT, partition};
use super::span::Span;
use crate::simd::reducer::Reducer;
use crate::transport::shm::layout::{BLOCK_BYTES, BLOCK_SLOTS};
use crate::transport::shm::region::SharedRegion;
use crate::transport::{Failure, Watch};
use std::ops::Range;
use std::time::Instant;

/// The ranks of this host, for one collective.
pub struct LocalRanks<'a> {
    pub region: &'a mut SharedRegion,
    pub watch: &'a mut dyn Watch,
    pub deadline: Instant,
}

/// Data that one rank of the host has and all others need.
#[derive(Debug, Clone, Copy)]
pub struct OwnedSpan {
    /// The local rank that has it.
    pub owner: usize,
    /// Where this rank has it, or needs it.
    pub span: Span,
}

impl LocalRanks<'_> {
    fn size(&self) -> usize {
        self.region.ranks().len()
    }

    /// Replaces `tensors`, one per local rank and all in arenas, by their reduction.
    pub fn all_reduce_in_place(
        &mut self,
        tensors: &[Span],
        reducer: &Reducer,
    ) -> Result<(), Failure> {
        let own = self.region.local_rank();
        let range = partition(tensors[own].bytes, self.size(), own);
        let at: Vec<*mut u8> = tensors.iter().map(|tensor| tensor.at(range.start)).collect();
        let sources: Vec<*const u8> = at.iter().map(|address| address.cast_const()).collect();
        // SAFETY: all ranks have begun this collective, so no rank's program touches its tensor,
        // and no other rank touches this shard of any tensor.
        unsafe { reducer.fold(&sources, &at, range.len(), true) };
        self.barrier()
    }

    /// Reduces the shard of this rank, if it is one of the first `carriers`, into its own tensor;
    /// all `tensors` live in arenas. The result is not finished: other hosts contribute to it.
    pub fn reduce_in_place(&mut self, tensors: &[Span], carriers: usize, reducer: &Reducer) {
        let own = self.region.local_rank();
        if own >= carriers {
            return;
        }
        let range = partition(tensors[own].bytes, carriers, own);
        let sources: Vec<*const u8> =
            tensors.iter().map(|tensor| tensor.at(range.start).cast_const()).collect();
        // SAFETY: as above; only this rank reads the shard until `distribute`.
        unsafe { reducer.fold(&sources, &[tensors[own].at(range.start)], range.len(), false) };
    }

    /// Writes the shard of this rank into the tensors of the others, which live in arenas, and
    /// waits until the others have done the same.
    pub fn distribute(&mut self, tensors: &[Span], carriers: usize) -> Result<(), Failure> {
        let own = self.region.local_rank();
        if own < carriers {
            let shard = tensors[own].subspan(partition(tensors[own].bytes, carriers, own));
            let start = shard.address as usize - tensors[own].address as usize;
            for tensor in tensors.iter().filter(|tensor| tensor.address != tensors[own].address) {
                // SAFETY: until the barrier, only this rank touches this shard of any tensor.
                unsafe { shard.copy_to(tensor.at(start)) };
            }
        }
        self.barrier()
    }

    /// Waits until every rank of the host has got this far.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.region.step();
        self.region.await_steps(self.region.steps(), self.watch, self.deadline)
    }

    /// Replaces `tensor` by the reduction over all ranks of the host, through block slots.
    pub fn all_reduce(&mut self, tensor: Span, reducer: &Reducer) -> Result<(), Failure> {
        let (own, size) = (self.region.local_rank(), self.size());
        let pieces = Pieces::new(tensor.bytes, size);
        self.pipeline(
            pieces.blocks(),
            |region, block| pieces.fill(tensor, region, block),
            |region, block| {
                let piece = tensor.subspan(pieces.range(own, block));
                let sources = pieces.sources(piece, region, block);
                let sums = [piece.address, pieces.within(region.block(own, block), own)];
                // SAFETY: all ranks have filled this block. Only this rank reads its shard of each,
                // and the piece for it in its own block was left free for the result.
                unsafe { reducer.fold(&sources, &sums, piece.bytes, true) };
            },
            |region, block| {
                for owner in (0..size).filter(|owner| *owner != own) {
                    let piece = tensor.subspan(pieces.range(owner, block));
                    // SAFETY: the owner has put the result there and keeps it until all have it.
                    unsafe { piece.copy_from(pieces.within(region.block(owner, block), owner)) };
                }
            },
        )
    }

    /// Reduces the shards of the first `carriers` ranks, each into the `tensor` of its carrier. The
    /// result is not finished: other hosts contribute to it.
    pub fn reduce(
        &mut self,
        tensor: Span,
        carriers: usize,
        reducer: &Reducer,
    ) -> Result<(), Failure> {
        let own = self.region.local_rank();
        let pieces = Pieces::new(tensor.bytes, carriers);
        self.pipeline(
            pieces.blocks(),
            |region, block| pieces.fill(tensor, region, block),
            |region, block| {
                if own >= carriers {
                    return;
                }
                let piece = tensor.subspan(pieces.range(own, block));
                let sources = pieces.sources(piece, region, block);
                // SAFETY: all ranks have filled this block, and only this rank uses this shard.
                unsafe { reducer.fold(&sources, &[piece.address], piece.bytes, false) };
            },
            |_, _| {},
        )
    }

    /// Copies every span from its owner to all other ranks of the host. Spans do not overlap, and
    /// all ranks give the same owners and sizes.
    pub fn publish(&mut self, spans: &[OwnedSpan]) -> Result<(), Failure> {
        let own = self.region.local_rank();
        let longest = spans.iter().map(|one| one.span.bytes).max().unwrap_or(0);
        let pieces = Pieces::new(longest.saturating_mul(spans.len()), spans.len().max(1));
        let piece = |one: &OwnedSpan, block: usize| {
            let at = |offset: usize| offset.min(one.span.bytes);
            one.span.subspan(at(block * pieces.each)..at((block + 1) * pieces.each))
        };
        self.pipeline(
            longest.div_ceil(pieces.each),
            |region, block| {
                for (index, one) in spans.iter().enumerate().filter(|(_, one)| one.owner == own) {
                    let slot = pieces.within(region.block(own, block), index);
                    // SAFETY: that piece of this rank's block is free: see `pipeline`.
                    unsafe { piece(one, block).copy_to(slot) };
                }
            },
            |_, _| {},
            |region, block| {
                for (index, one) in spans.iter().enumerate().filter(|(_, one)| one.owner != own) {
                    let slot = pieces.within(region.block(one.owner, block), index);
                    // SAFETY: the owner has filled it, and keeps it until all have it.
                    unsafe { piece(one, block).copy_from(slot) };
                }
            },
        )
    }

    /// Moves `blocks` blocks through the slots: while one is filled, the one before is combined and
    /// the one before that is emptied. Every rank takes three steps per round, "filled", "combined"
    /// and "emptied"; before each it waits only for the step of the others that it depends on.
    fn pipeline(
        &mut self,
        blocks: usize,
        mut fill: impl FnMut(&SharedRegion, usize),
        mut combine: impl FnMut(&SharedRegion, usize),
        mut empty: impl FnMut(&SharedRegion, usize),
    ) -> Result<(), Failure> {
        let start = self.region.steps();
        let after = |round: usize, step: u64| start + 3 * round as u64 + step;
        // The slots are free once all ranks are done with the collective before.
        self.await_steps(start)?;
        for round in 0..blocks + 2 {
            if round < blocks {
                if let Some(before) = round.checked_sub(BLOCK_SLOTS) {
                    // The slot is in use until all ranks have emptied its previous block.
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

/// How a tensor is cut: into one shard per owner, and each shard into pieces. A block holds one
/// piece of every shard.
struct Pieces {
    bytes: usize,
    owners: usize,
    /// The size of a piece; the last one may be shorter.
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

    /// Copies the pieces that other owners need of `tensor` into this rank's block.
    fn fill(&self, tensor: Span, region: &SharedRegion, block: usize) {
        for owner in (0..self.owners).filter(|owner| *owner != region.local_rank()) {
            let piece = tensor.subspan(self.range(owner, block));
            // SAFETY: that piece of this rank's block is free: see `pipeline`.
            unsafe { piece.copy_to(self.within(region.block(region.local_rank(), block), owner)) };
        }
    }

    /// Where the pieces of this rank's shard are, by local rank: its own one in its tensor.
    fn sources(&self, own_piece: Span, region: &SharedRegion, block: usize) -> Vec<*const u8> {
        let own = region.local_rank();
        (0..region.ranks().len())
            .map(|local_rank| match local_rank == own {
                true => own_piece.address.cast_const(),
                false => self.within(region.block(local_rank, block), own).cast_const(),
            })
            .collect()
    }

    /// Where the piece of `owner` is in a block.
    fn within(&self, block: *mut u8, owner: usize) -> *mut u8 {
        // SAFETY: `owners` pieces fit into a block.
        unsafe { block.add(owner * self.each) }
    }
}
