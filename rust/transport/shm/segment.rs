//! A segment: memory that other processes can map as well.
//!
//! It is a memfd, sealed so that nobody can resize it: reading a mapping whose file has shrunk
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
        // SAFETY: the range is the mapping just made, which nobody else knows of yet.
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
mod tests {
    use super::*;
    use std::fs::File;

    const PAGE: usize = 4096;
    const GIB: usize = 1 << 30;

    fn adopt_copy(segment: &Segment) -> Segment {
        Segment::adopt(segment.fd().unwrap().try_clone_to_owned().unwrap()).unwrap()
    }

    fn write(segment: &Segment, offset: usize, value: u8) {
        assert!(offset < segment.bytes());
        // SAFETY: the byte is within the mapping, and the tests here take turns.
        unsafe { segment.base().add(offset).write_volatile(value) }
    }

    fn read(segment: &Segment, offset: usize) -> u8 {
        assert!(offset < segment.bytes());
        // SAFETY: as in `write`.
        unsafe { segment.base().add(offset).read_volatile() }
    }

    /// The memory it costs.
    fn resident(segment: &Segment) -> usize {
        rustix::fs::fstat(segment.fd().unwrap()).unwrap().st_blocks as usize * 512
    }

    /// The flags of the mapping at `segment`, as /proc has them.
    fn mapping_flags(segment: &Segment) -> String {
        let start = format!("{:x}-", segment.base() as usize);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        lines.find(|line| line.starts_with("VmFlags:")).unwrap().to_string() + " "
    }

    #[test]
    fn both_ends_see_what_either_writes() {
        let own = Segment::create("test", PAGE + 1).unwrap();
        assert_eq!(own.bytes(), own.bytes().next_multiple_of(PAGE));
        let theirs = adopt_copy(&own);
        assert_eq!(theirs.bytes(), own.bytes());
        assert_ne!(theirs.base(), own.base());
        write(&own, 7, 70);
        write(&theirs, PAGE, 80);
        assert_eq!((read(&theirs, 7), read(&own, PAGE)), (70, 80));
        drop(own);
        assert_eq!(read(&theirs, 7), 70);
    }

    #[test]
    fn nobody_can_resize_it() {
        let own = Segment::create("test", PAGE).unwrap();
        for bytes in [0, 2 * PAGE as u64] {
            assert_eq!(rustix::fs::ftruncate(own.fd().unwrap(), bytes), Err(Errno::PERM));
        }
        let more = rustix::fs::fcntl_add_seals(own.fd().unwrap(), SealFlags::FUTURE_WRITE);
        assert_eq!(more, Err(Errno::PERM));
    }

    #[test]
    fn what_could_be_resized_is_refused() {
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, PAGE as u64).unwrap();
        let half_sealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&half_sealed, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let file = File::open("/proc/self/exe").unwrap();
        let (pipe, _other_end) = std::io::pipe().unwrap();
        for refused in [unsealed, half_sealed, file.into(), pipe.into()] {
            let error = Segment::adopt(refused).unwrap_err().to_string();
            assert!(error.contains("the descriptor is not a memfd"), "{error}");
        }
    }

    #[test]
    fn no_bytes_or_too_many_are_refused() {
        for bytes in [0, usize::MAX, usize::MAX / 2] {
            Segment::create("test", bytes).unwrap_err();
        }
        let empty = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&empty, SIZE_SEALS).unwrap();
        Segment::adopt(empty).unwrap_err();
    }

    #[test]
    fn only_touched_pages_cost_memory_and_released_ones_do_not() {
        let own = Segment::create("test", 64 * GIB).unwrap();
        let theirs = adopt_copy(&own);
        assert_eq!((own.bytes(), resident(&own)), (64 * GIB, 0));
        for page in 0..10 {
            write(&own, 50 * GIB + page * PAGE, 1);
        }
        write(&own, 64 * GIB - 1, 1);
        let cost = resident(&own);
        assert!((11 * PAGE..GIB).contains(&cost), "{cost}");
        own.release(50 * GIB, GIB).unwrap();
        assert!(resident(&own) <= cost - 10 * PAGE, "{} of {cost}", resident(&own));
        assert_eq!((read(&own, 50 * GIB), read(&theirs, 50 * GIB)), (0, 0));
        assert_eq!(read(&theirs, 64 * GIB - 1), 1);
        // Only its creator can give pages back.
        theirs.release(0, 64 * GIB).unwrap();
        assert_eq!(read(&own, 64 * GIB - 1), 1);
        own.release(0, 64 * GIB).unwrap();
        assert_eq!(resident(&own), 0);
        assert_eq!(read(&own, 64 * GIB - 1), 0);
    }

    #[test]
    fn nothing_is_released_outside_of_the_segment() {
        let own = Segment::create("test", 2 * PAGE).unwrap();
        write(&own, 0, 1);
        for (offset, bytes) in [(PAGE, 2 * PAGE), (usize::MAX, 2), (2 * PAGE, 1)] {
            own.release(offset, bytes).unwrap_err();
        }
        own.release(2 * PAGE, 0).unwrap();
        assert_eq!(read(&own, 0), 1);
    }

    #[test]
    fn a_forked_child_keeps_the_own_memory_and_not_that_of_others() {
        let own = Segment::create("test", PAGE).unwrap();
        let theirs = adopt_copy(&own);
        assert!(!mapping_flags(&own).contains(" dc "));
        assert!(mapping_flags(&theirs).contains(" dc "));
    }
}
