//! A communicator: this rank's end of NCCL with some ranks. The worker puts things on streams with it,
//! and the watchdog may abort it at any time, also while the worker is inside NCCL with it. After that
//! nothing is begun with it any more.

use super::context::Context;
use super::fault::{Fault, Result};
use super::nccl::{Handle, Nccl, On};
use super::stream::Stream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long an abort lets a call return that is under way. Such a call only puts something on a stream;
/// if it takes longer it hangs, and then the abort is what ends it.
pub const CALL_LIMIT: Duration = Duration::from_millis(500);

pub struct Communicator {
    nccl: &'static Nccl,
    context: Arc<Context>,
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
    /// The handle is valid, of a device of this context, and nobody else uses it.
    pub unsafe fn new(nccl: &'static Nccl, context: &Arc<Context>, handle: Handle) -> Communicator {
        let (state, changed) = Default::default();
        Communicator { nccl, context: context.clone(), handle, state, changed }
    }

    /// Puts something of NCCL's on a stream of its device.
    pub fn put(&self, stream: &Stream, work: impl FnOnce(&Nccl, On) -> Result<()>) -> Result<()> {
        self.call(|handle| work(self.nccl, On { handle, stream: stream.handle().cast() }))
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
        let _entered = self.context.enter();
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
        // NCCL goes to its device and back to the thread's. A thread that is nowhere would end up on the
        // first device, and take memory there for nothing.
        let _entered = self.context.enter()?;
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
