//! What a forked child must not share with the process that it was forked from.
//!
//! A child that inherits a socket keeps it open, so that nobody would notice the end of its parent;
//! and shared memory stays shared, so that what it does to a gradient would be done to its parent's.
//! Workers of a DataLoader are such children. So in a child every socket that is registered here
//! leads nowhere, and every memory becomes a copy of its own.
//!
//! The handlers run inside `fork`: they must not allocate, panic or wait for anything but the lock,
//! which nobody holds for longer than it takes to change the list.

use rustix::io::DupFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{Read, Result, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Clone, Copy)]
enum Kept {
    Socket(RawFd),
    Memory { base: usize, bytes: usize, file: RawFd },
}

/// A list with a lock that can be taken in one function and given back in another, as the
/// handlers of a fork do.
struct Register {
    locked: AtomicBool,
    entries: UnsafeCell<Vec<(u64, Kept)>>,
}

// SAFETY: the entries are touched only by whoever holds the lock.
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

    fn change(&self, change: impl FnOnce(&mut Vec<(u64, Kept)>)) {
        self.lock();
        // SAFETY: the lock is held.
        change(unsafe { &mut *self.entries.get() });
        self.unlock();
    }
}

/// An entry of the register, until it is dropped.
#[derive(Debug)]
pub struct Ticket(u64);

impl Ticket {
    fn new(kept: Kept) -> Ticket {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        REGISTER.change(|entries| entries.push((number, kept)));
        Ticket(number)
    }

    /// For memory that is mapped shared at `base`: a child gets a private copy.
    pub fn for_memory(base: *mut u8, bytes: usize, file: &impl AsFd) -> Ticket {
        let file = file.as_fd().as_raw_fd();
        Ticket::new(Kept::Memory { base: base as usize, bytes, file })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        REGISTER.change(|entries| entries.retain(|(number, _)| *number != self.0));
    }
}

/// A stream that a forked child does not have.
#[derive(Debug)]
pub struct Unshared<S> {
    // Dropped first: a descriptor that is closed may be given to somebody else.
    _ticket: Ticket,
    stream: S,
}

impl<S: AsFd> Unshared<S> {
    pub fn new(stream: S) -> Unshared<S> {
        let ticket = Ticket::new(Kept::Socket(stream.as_fd().as_raw_fd()));
        Unshared { _ticket: ticket, stream }
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

/// Before a fork, in the process that forks: nobody changes the list meanwhile.
pub fn before() {
    REGISTER.lock();
}

/// After a fork, in the process that forked.
pub fn after_in_parent() {
    REGISTER.unlock();
}

/// After a fork, in the child.
pub fn after_in_child() {
    // SAFETY: `before` has locked the register, and this is the only thread.
    let entries = unsafe { &*REGISTER.entries.get() };
    let nowhere = File::open("/dev/null");
    for (_, kept) in entries {
        match *kept {
            Kept::Socket(socket) => {
                let Ok(nowhere) = &nowhere else { continue };
                // SAFETY: an entry is gone before its descriptor is closed, so this is still the
                // socket; it is not closed here, because it has an owner.
                let mut socket = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(socket) });
                let _ = rustix::io::dup3(nowhere, &mut socket, DupFlags::CLOEXEC);
            }
            Kept::Memory { base, bytes, file } => {
                // SAFETY: as above, this is the file that is mapped there.
                let file = unsafe { BorrowedFd::borrow_raw(file) };
                let access = ProtFlags::READ | ProtFlags::WRITE;
                let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
                // SAFETY: it replaces a mapping by one with the same contents. Where the system
                // refuses, the old one stays.
                let _ = unsafe { rustix::mm::mmap(base as *mut _, bytes, access, flags, file, 0) };
            }
        }
    }
    REGISTER.unlock();
}
