//! The arena: this rank's segment, and who has which part of its heap.
//!
//! Tensors that are made here can be read and written by the other ranks of the host. An
//! allocation keeps the arena alive, so a tensor may outlive its group.

use super::blocks::Blocks;
use super::region::HEAP_AT;
use super::segment::Segment;
use crate::fork::Ticket;
use std::sync::{Arc, Mutex, PoisonError};

pub struct Arena {
    // Dropped before the segment that it is for.
    _ticket: Ticket,
    segment: Arc<Segment>,
    blocks: Mutex<Blocks>,
}

/// Memory of the arena, until it is dropped.
pub struct Allocation {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

/// If not even this much address space is to be had, memory is not shared.
const LEAST_BYTES: usize = 64 << 20;

impl Arena {
    /// An arena for up to `bytes` of tensors. Only what is used costs memory, so it may be as
    /// large as all memory; where the system refuses that much address space it gets smaller.
    pub fn create(bytes: usize) -> std::io::Result<Arc<Arena>> {
        let mut heap = bytes.max(LEAST_BYTES);
        let segment = loop {
            match Segment::create("gflow", HEAP_AT + heap) {
                Ok(segment) => break segment,
                Err(_) if heap / 2 >= LEAST_BYTES => heap /= 2,
                Err(error) => return Err(error),
            }
        };
        let file = segment.fd().expect("it was created here");
        let ticket = Ticket::for_memory(segment.base(), segment.bytes(), &file);
        let blocks = Mutex::new(Blocks::new(segment.bytes() - HEAP_AT));
        Ok(Arc::new(Arena { _ticket: ticket, segment: Arc::new(segment), blocks }))
    }

    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Memory for a tensor, whatever is in it; `None` if the arena is full.
    pub fn allocate(self: &Arc<Arena>, bytes: usize) -> Option<Allocation> {
        let offset = self.blocks.lock().unwrap_or_else(PoisonError::into_inner).take(bytes)?;
        Some(Allocation { arena: self.clone(), offset: HEAP_AT + offset, bytes })
    }

    /// Where in the segment `bytes` at `address` are; `None` if they are elsewhere.
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
        // A forked child lets go of its own copy only; the memory is its parent's.
        if self.arena.segment.is_inherited() {
            return;
        }
        // First the pages, then the place, which somebody else may be given at once. Where pages
        // cannot be given back they stay, and are used again.
        let _ = self.arena.segment.release(self.offset, self.bytes);
        let mut blocks = self.arena.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.give_back(self.offset - HEAP_AT);
    }
}
