//! A segment: memory that other processes can map as well.
//!
//! It is a memfd, sealed so that no process can resize it: reading a mapping whose file has shrunk
//! kills the process, so a segment without these seals must never be adopted. It takes address
//! space for all of its bytes, but memory only for pages that were touched.

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// They fix the size; the last one fixes the seals.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    bytes: usize,
    /// The memfd of a segment that was created here. An adopted one is only mapped.
    memory: Option<OwnedFd>,
    /// The process that mapped it.
    process: u32,
}

// SAFETY: the segment owns the mapping until it is dropped, on whichever thread. Its methods only
// return the address and make system calls about the pages; code that reads or writes there uses
// raw pointers and is responsible for the order.
unsafe impl Send for Segment {}
// SAFETY: as above; no method changes anything in the segment itself.
unsafe impl Sync for Segment {}

impl Segment {
    /// New zeroed memory of at least `bytes` bytes. `name` shows up in /proc.
    pub fn create(name: &str, bytes: usize) -> Result<Segment> {
        let bytes = bytes
            .checked_next_multiple_of(rustix::param::page_size())
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, "more bytes than there can be"))?;
        let memory = new_memfd(name).map_err(|errno| failed("memfd_create failed", errno))?;
        // Past this limit ftruncate does not just fail, it raises SIGXFSZ, which kills the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| bytes as u64 > limit) {
            let reason = format!("{bytes} bytes are over the limit for a file's size (ulimit -f)");
            return Err(Error::new(ErrorKind::FileTooLarge, reason));
        }
        rustix::fs::ftruncate(&memory, bytes as u64)
            .map_err(|errno| failed(&format!("sizing a memfd to {bytes} bytes failed"), errno))?;
        rustix::fs::fcntl_add_seals(&memory, SIZE_SEALS)
            .map_err(|errno| failed("sealing a memfd failed", errno))?;
        let mut segment = Segment::map(&memory, bytes)?;
        segment.memory = Some(memory);
        Ok(segment)
    }

    /// Maps the memory of a peer, unless the peer could still resize it.
    pub fn adopt(memory: OwnedFd) -> Result<Segment> {
        let seals = rustix::fs::fcntl_get_seals(&memory)
            .map_err(|errno| failed("the descriptor is not a memfd", errno))?;
        if !seals.contains(SIZE_SEALS) {
            let reason = "the descriptor is not a memfd that is sealed against resizing";
            return Err(Error::new(ErrorKind::InvalidData, reason));
        }
        // After checking the seals: before, the size could still change.
        let size = rustix::fs::fstat(&memory)
            .map_err(|errno| failed("the size of the memfd is not known", errno))?
            .st_size;
        let bytes = usize::try_from(size).map_err(Error::other)?;
        let segment = Segment::map(&memory, bytes)?;
        // A forked child is no rank and must not touch the memory of peers.
        // SAFETY: the range is the mapping just made, which isn't shared yet.
        unsafe { rustix::mm::madvise(segment.base().cast(), bytes, Advice::LinuxDontFork) }
            .map_err(|errno| failed("keeping the memory from forked children failed", errno))?;
        Ok(segment)
    }

    fn map(memory: &OwnedFd, bytes: usize) -> Result<Segment> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: with a null address the system picks a free range, so no other mapping is
        // replaced.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, memory, 0) }
                .map_err(|errno| failed(&format!("mapping {bytes} bytes failed"), errno))?;
        let base = NonNull::new(base.cast()).ok_or(ErrorKind::AddrNotAvailable)?;
        Ok(Segment { base, bytes, memory: None, process: std::process::id() })
    }

    /// Where it begins in this process, page-aligned. Other processes map it elsewhere.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The descriptor with which a peer can adopt it, if it was created here.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.as_ref().map(OwnedFd::as_fd)
    }

    /// Whether this process is a fork of the one that mapped it.
    pub fn is_inherited(&self) -> bool {
        std::process::id() != self.process
    }

    /// Gives the pages of a range back to the system, in all processes: they read as zeros and
    /// cost nothing until they are touched again. A partial page is zeroed and kept.
    pub fn release(&self, offset: usize, bytes: usize) -> Result<()> {
        if !self.contains(offset, bytes) {
            let reason = format!("{bytes} bytes at {offset} are not within {} bytes", self.bytes);
            return Err(Error::new(ErrorKind::InvalidInput, reason));
        }
        let Some(memory) = self.memory.as_ref().filter(|_| bytes > 0) else { return Ok(()) };
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(memory, mode, offset as u64, bytes as u64)
            .map_err(|errno| failed(&format!("releasing {bytes} bytes failed"), errno))
    }

    fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A forked child does not inherit an adopted mapping: something else may be there by now.
        if self.is_inherited() {
            return;
        }
        // SAFETY: the range is the mapping that `map` made in this process, and the segment ends
        // here, so its address must no longer be used.
        let _ = unsafe { rustix::mm::munmap(self.base().cast(), self.bytes) };
    }
}

/// An empty memfd that can be sealed, and not executed where the kernel knows that flag: some
/// systems refuse executable ones.
fn new_memfd(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3 does not know the flag.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        made => made,
    }
}

fn failed(what: &str, errno: Errno) -> Error {
    Error::new(errno.kind(), format!("{what}: {errno}"))
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
