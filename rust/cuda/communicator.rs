//! A communicator: this rank's end of NCCL with some ranks. The worker puts things on streams with it,
//! and the watchdog may abort it at any time, also while the worker is inside NCCL with it. After that
//! nothing is begun with it any more.

use super::fault::{Fault, Result};
use super::nccl::{Handle, Kind, Nccl};
use super::stream::Stream;
use std::ffi::c_void;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long an abort lets a call return that is under way. Such a call only puts something on a stream;
/// if it takes longer it hangs, and then the abort is what ends it.
const CALL_LIMIT: Duration = Duration::from_millis(500);

pub struct Communicator {
    nccl: &'static Nccl,
    handle: Handle,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_aborted: bool,
    /// Calls that are inside NCCL.
    running: usize,
}

// SAFETY: NCCL lets other threads abort a communicator and ask for its errors; all else is called by
// one thread at a time, whoever has locked the front of the group.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Takes a communicator over.
    ///
    /// # Safety
    /// The handle is valid, and nobody else uses it.
    pub unsafe fn new(nccl: &'static Nccl, handle: Handle) -> Communicator {
        Communicator { nccl, handle, state: Mutex::default(), changed: Condvar::new() }
    }

    /// The memory becomes the sum over all ranks.
    ///
    /// # Safety
    /// The memory is this device's, and valid when the stream gets there: so in all of these.
    pub unsafe fn all_reduce(
        &self,
        memory: u64,
        count: usize,
        kind: Kind,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.call(|handle| unsafe {
            self.nccl.all_reduce(memory, count, kind, (handle, raw(stream)))
        })
    }

    /// Of parts for all ranks, each of `each` elements, the own one becomes the sum.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn reduce_scatter(
        &self,
        memory: u64,
        own: u64,
        each: usize,
        kind: Kind,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.call(|handle| unsafe {
            self.nccl.reduce_scatter(memory, own, each, kind, (handle, raw(stream)))
        })
    }

    /// All parts become those of the ranks that own them.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn all_gather(
        &self,
        memory: u64,
        own: u64,
        each: usize,
        kind: Kind,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.call(|handle| unsafe {
            self.nccl.all_gather(memory, own, each, kind, (handle, raw(stream)))
        })
    }

    /// Each part, an address and a count of elements, becomes the sum on the rank of its position.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn reduce_parts(
        &self,
        parts: &[(u64, usize)],
        kind: Kind,
        stream: &Stream,
    ) -> Result<()> {
        self.call(|handle| {
            self.nccl.group(|| {
                parts.iter().enumerate().filter(|(_, part)| part.1 > 0).try_for_each(
                    |(root, part)| {
                        // SAFETY: the caller's promise.
                        unsafe {
                            self.nccl.reduce(part.0, part.1, kind, root, (handle, raw(stream)))
                        }
                    },
                )
            })
        })
    }

    /// Each part becomes what it is on the rank of its position.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn broadcast_parts(
        &self,
        parts: &[(u64, usize)],
        kind: Kind,
        stream: &Stream,
    ) -> Result<()> {
        self.call(|handle| {
            self.nccl.group(|| {
                parts.iter().enumerate().filter(|(_, part)| part.1 > 0).try_for_each(
                    |(root, part)| {
                        // SAFETY: the caller's promise.
                        unsafe {
                            self.nccl.broadcast(part.0, part.1, kind, root, (handle, raw(stream)))
                        }
                    },
                )
            })
        })
    }

    /// What has gone wrong since, where nobody waited for it.
    pub fn check(&self) -> Result<()> {
        // SAFETY: it is not aborted while this runs.
        self.call(|handle| unsafe { self.nccl.async_error(handle) })
    }

    /// Ends it, and with it what it is at on the device. Done again it does nothing.
    pub fn abort(&self) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.is_aborted, true) {
            return;
        }
        let waited = self.changed.wait_timeout_while(state, CALL_LIMIT, |state| state.running > 0);
        drop(waited);
        // SAFETY: no call begins any more; one that hangs in NCCL is what an abort is for. Where it
        // fails, there is nothing left to do.
        let _ = unsafe { self.nccl.abort(self.handle) };
    }

    /// NCCL's own name for it, for tests that make it fail.
    #[cfg(test)]
    pub fn handle(&self) -> Handle {
        self.handle
    }

    fn call(&self, work: impl FnOnce(Handle) -> Result<()>) -> Result<()> {
        let mut state = self.lock();
        if state.is_aborted {
            return Err(Fault("its communicator was aborted".to_string()));
        }
        state.running += 1;
        drop(state);
        let outcome = work(self.handle);
        self.lock().running -= 1;
        self.changed.notify_all();
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn raw(stream: &Stream) -> *mut c_void {
    stream.handle().cast()
}
