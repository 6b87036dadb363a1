//! A flag that wakes a thread from a wait on sockets. Once raised, it stays raised.

use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// It can be polled like a socket.
#[derive(Debug)]
pub struct Interrupt {
    raised: AtomicBool,
    event: OwnedFd,
}

impl Interrupt {
    pub fn new() -> std::io::Result<Interrupt> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Interrupt { raised: AtomicBool::new(false), event })
    }

    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        // One write of 1 cannot overflow an eventfd, and a waiter that wakes late still sees the
        // flag, so an error here needs no handling.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
