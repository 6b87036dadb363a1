//! Memory for gradient buckets that the ranks of this host share.

use super::group::Group;
use super::guard;
use crate::error::Result;
use crate::huge_pages;
use crate::transport::shm::arena::Allocation;

/// Memory of a tensor that the ranks of this host share; without an address where they do not.
pub(super) struct SharedMemory(Option<Allocation>);

impl SharedMemory {
    pub(super) fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |allocation| allocation.address() as usize)
    }
}

impl Group {
    pub(super) fn allocate(&self, bytes: usize) -> Result<Box<SharedMemory>> {
        guard(|| {
            // Of a group that has failed, a rank may still be writing into what it took for ours.
            let arena = self.arena.as_ref().filter(|_| self.engine.check_usable().is_ok());
            let allocation = arena.and_then(|arena| arena.allocate(bytes));
            Ok(Box::new(SharedMemory(allocation)))
        })
    }
}

/// Asks for huge pages for a tensor that has just been made.
///
/// # Safety
/// As for [`huge_pages::prefer`].
pub(super) unsafe fn prefer_huge_pages(address: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { huge_pages::prefer(address, bytes) };
}
