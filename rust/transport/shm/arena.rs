//! The arena: this rank's segment, and the tensors allocated in its heap.
//!
//! The other ranks of the host can read and write tensors in the arena. An allocation keeps the
//! arena alive, so a tensor may outlive its group.

use super::blocks::Blocks;
use super::layout::HEAP_AT;
use super::segment::Segment;
use crate::fork::ForkGuard;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

pub struct Arena {
    // Dropped before the segment that it guards.
    _fork_guard: ForkGuard,
    segment: Arc<Segment>,
    blocks: Mutex<Blocks>,
}

/// Memory in the arena, freed on drop.
pub struct Allocation {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

/// Without this much address space, memory is not shared.
const LEAST_BYTES: usize = 64 << 20;

impl Arena {
    /// An arena for up to `bytes` of tensors. Only used pages cost memory, so `bytes` may be all of
    /// it; if the system refuses that much address space, the arena gets smaller.
    pub fn create(bytes: usize) -> std::io::Result<Arc<Arena>> {
        let mut heap = bytes.max(LEAST_BYTES);
        let segment = loop {
            match Segment::create("gflow", HEAP_AT + heap) {
                Ok(segment) => break segment,
                Err(error) if heap / 2 >= LEAST_BYTES => {
                    log::debug!("no arena of {} MiB ({error}), trying half", heap >> 20);
                    heap /= 2;
                }
                Err(error) => return Err(error),
            }
        };
        let file = segment.fd().expect("created here");
        let fork_guard = ForkGuard::for_memory(segment.base(), segment.bytes(), &file);
        let blocks = Mutex::new(Blocks::new(segment.bytes() - HEAP_AT));
        Ok(Arc::new(Arena { _fork_guard: fork_guard, segment: Arc::new(segment), blocks }))
    }

    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Uninitialised memory for a tensor; `None` if the arena is full.
    pub fn allocate(self: &Arc<Arena>, bytes: usize) -> Option<Allocation> {
        let offset = lock(&self.blocks).take(bytes)?;
        Some(Allocation { arena: self.clone(), offset: HEAP_AT + offset, bytes })
    }

    /// The offset in the segment of `bytes` bytes at `address`; `None` if they are elsewhere.
    pub fn offset_of(&self, address: *const u8, bytes: usize) -> Option<u64> {
        let offset = (address as usize).checked_sub(self.segment.base() as usize)?;
        let end = offset.checked_add(bytes)?;
        (offset >= HEAP_AT && end <= self.segment.bytes()).then_some(offset as u64)
    }
}

impl Allocation {
    pub fn address(&self) -> *mut u8 {
        // SAFETY: the range was taken from the heap, which lies within the segment.
        unsafe { self.arena.segment.base().add(self.offset) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A forked child only drops its copy; the memory is its parent's.
        if self.arena.segment.is_inherited() {
            return;
        }
        // The pages before the range, which another tensor may get at once. Pages that cannot be
        // given back stay, and are reused.
        let _ = self.arena.segment.release(self.offset, self.bytes);
        let mut blocks = lock(&self.arena.blocks);
        blocks.give_back(self.offset - HEAP_AT);
    }
}
