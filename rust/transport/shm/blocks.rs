//! The allocator of a heap: which ranges are taken, and which are free.
//!
//! Bookkeeping only: it never touches the memory, and the same calls return the same offsets in
//! every process.

use std::collections::{BTreeMap, BTreeSet};

/// Every block begins and ends at a multiple of this.
pub const BLOCK_ALIGNMENT: usize = 4096;

#[derive(Debug)]
pub struct Blocks {
    /// Sizes of the taken blocks, by offset.
    taken: BTreeMap<usize, usize>,
    taken_bytes: usize,
    /// Sizes of the free ranges, by offset. No two of them touch.
    free: BTreeMap<usize, usize>,
    /// The same ranges as (size, offset), to find the smallest that fits.
    free_by_size: BTreeSet<(usize, usize)>,
}

impl Blocks {
    /// An empty heap of `bytes` bytes. A tail shorter than a block stays unused.
    pub fn new(bytes: usize) -> Blocks {
        let mut blocks = Blocks {
            taken: BTreeMap::new(),
            taken_bytes: 0,
            free: BTreeMap::new(),
            free_by_size: BTreeSet::new(),
        };
        let bytes = bytes - bytes % BLOCK_ALIGNMENT;
        if bytes > 0 {
            blocks.add_free(0, bytes);
        }
        blocks
    }

    /// The offset of a block of at least `bytes` bytes, or `None` if no free range is that long.
    /// No two blocks have the same offset, not even blocks of no bytes.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let size = bytes.max(1).checked_next_multiple_of(BLOCK_ALIGNMENT)?;
        // Best fit, so that large ranges stay whole for large blocks; among equals the first.
        let &(range, offset) = self.free_by_size.range((size, 0)..).next()?;
        self.remove_free(offset, range);
        if range > size {
            self.add_free(offset + size, range - size);
        }
        self.taken.insert(offset, size);
        self.taken_bytes += size;
        Some(offset)
    }

    /// Frees the block at `offset` and returns its size, or `None` if no block begins there.
    pub fn give_back(&mut self, offset: usize) -> Option<usize> {
        let size = self.taken.remove(&offset)?;
        self.taken_bytes -= size;
        let (mut start, mut end) = (offset, offset + size);
        if let Some((&before, &range)) = self.free.range(..offset).next_back()
            && before + range == start
        {
            self.remove_free(before, range);
            start = before;
        }
        if let Some(&range) = self.free.get(&end) {
            self.remove_free(end, range);
            end += range;
        }
        self.add_free(start, end - start);
        Some(size)
    }

    /// How many bytes are taken.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.taken_bytes
    }

    fn add_free(&mut self, offset: usize, size: usize) {
        self.free.insert(offset, size);
        self.free_by_size.insert((size, offset));
    }

    fn remove_free(&mut self, offset: usize, size: usize) {
        self.free.remove(&offset);
        self.free_by_size.remove(&(size, offset));
    }
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
