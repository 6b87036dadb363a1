//! Memory for gradient buckets.

use super::group::Group;
use crate::error::Result;
use crate::huge_pages;
use crate::transport::shm::arena::Allocation;

/// Memory that the ranks of this host share. It has no address if they share none.
pub(super) struct SharedMemory(Option<Allocation>);

impl SharedMemory {
    pub(super) fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |allocation| allocation.address() as usize)
    }
}

impl Group {
    pub(super) fn allocate(&self, bytes: usize) -> Result<Box<SharedMemory>> {
        self.guard(|| Ok(Box::new(SharedMemory(self.0.allocate(bytes)))))
    }
}

/// Asks for huge pages for a tensor that has just been allocated.
///
/// # Safety
/// As for [`huge_pages::prefer`].
pub(super) unsafe fn prefer_huge_pages(address: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { huge_pages::prefer(address, bytes) };
}
