//! Cuts a forked child off from the sockets and shared memory of its parent.
//!
//! A child that inherits a socket keeps it open, so peers would not notice when its parent dies. It
//! also inherits shared mappings, so writing a gradient would change its parent's. DataLoader
//! workers are such children. In the child, every socket registered here is replaced by /dev/null
//! and every shared mapping by a private copy.
//!
//! The handlers run inside `fork`: they must not allocate, panic or wait for anything but the lock,
//! which is only ever held to change the list.

use rustix::io::DupFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{Read, Result, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Clone, Copy)]
enum Resource {
    Socket(RawFd),
    Memory { base: usize, bytes: usize, file: RawFd },
}

/// A list whose lock is taken in one function and released in another, as the fork handlers need.
struct Register {
    locked: AtomicBool,
    entries: UnsafeCell<Vec<(u64, Resource)>>,
}

// SAFETY: the entries are only accessed with the lock held.
unsafe impl Sync for Register {}

static REGISTER: Register =
    Register { locked: AtomicBool::new(false), entries: UnsafeCell::new(Vec::new()) };

impl Register {
    fn lock(&self) {
        while self.locked.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.locked.store(false, Ordering::Release);
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(u64, Resource)>)) {
        self.lock();
        // SAFETY: the lock is held.
        change(unsafe { &mut *self.entries.get() });
        self.unlock();
    }
}

/// Keeps a resource registered until it is dropped.
#[derive(Debug)]
pub struct ForkGuard(u64);

impl ForkGuard {
    fn new(resource: Resource) -> ForkGuard {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        REGISTER.change(|entries| entries.push((number, resource)));
        ForkGuard(number)
    }

    /// For a shared mapping at `base`: a child gets a private copy.
    pub fn for_memory(base: *mut u8, bytes: usize, file: &impl AsFd) -> ForkGuard {
        let file = file.as_fd().as_raw_fd();
        ForkGuard::new(Resource::Memory { base: base as usize, bytes, file })
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        REGISTER.change(|entries| entries.retain(|(number, _)| *number != self.0));
    }
}

/// A stream that forked children are cut off from.
#[derive(Debug)]
pub struct Unshared<S> {
    // Dropped first: a closed descriptor may be reused at once.
    _guard: ForkGuard,
    stream: S,
}

impl<S: AsFd> Unshared<S> {
    pub fn new(stream: S) -> Unshared<S> {
        let guard = ForkGuard::new(Resource::Socket(stream.as_fd().as_raw_fd()));
        Unshared { _guard: guard, stream }
    }

    pub fn get(&self) -> &S {
        &self.stream
    }
}

impl<S: Read> Read for Unshared<S> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        self.stream.read(bytes)
    }
}

impl<S: Write> Write for Unshared<S> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.stream.flush()
    }
}

impl<S: AsFd> AsFd for Unshared<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Before a fork, in the parent: locks the list.
pub fn before() {
    REGISTER.lock();
}

/// After a fork, in the parent.
pub fn after_in_parent() {
    REGISTER.unlock();
}

/// After a fork, in the child.
pub fn after_in_child() {
    // SAFETY: `before` has locked the register, and this is the only thread.
    let entries = unsafe { &*REGISTER.entries.get() };
    let nowhere = File::open("/dev/null");
    for (_, resource) in entries {
        match *resource {
            Resource::Socket(socket) => {
                let Ok(nowhere) = &nowhere else { continue };
                // SAFETY: an entry is removed before its descriptor is closed, so this is still
                // the socket; its owner closes it, not this function.
                let mut socket = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(socket) });
                let _ = rustix::io::dup3(nowhere, &mut socket, DupFlags::CLOEXEC);
            }
            Resource::Memory { base, bytes, file } => {
                // SAFETY: as above, the descriptor is still open.
                let file = unsafe { BorrowedFd::borrow_raw(file) };
                let access = ProtFlags::READ | ProtFlags::WRITE;
                let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
                // SAFETY: it replaces a mapping by one with the same contents. If the system
                // refuses, the old one stays.
                let _ = unsafe { rustix::mm::mmap(base as *mut _, bytes, access, flags, file, 0) };
            }
        }
    }
    REGISTER.unlock();
}
