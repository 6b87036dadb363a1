//! A way to wake a thread that waits on sockets, from any other thread, once and for good.

use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Once raised it stays raised: it ends a group, it does not pause one.
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
        // The counter of an eventfd cannot overflow from one write of 1, and a waiter that is
        // woken late still sees the flag: there is nothing to do about an error here.
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
