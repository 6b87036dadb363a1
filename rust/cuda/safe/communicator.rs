//! A non-blocking NCCL communicator. No call waits for other ranks: [`Communicator::is_ready`]
//! polls what a call has started.
//!
//! One thread at a time is inside NCCL with it. It may be closed at any time, by finalizing or
//! aborting it; after that no call starts and those that poll return. Closing may wait for other
//! ranks inside NCCL, so it is done by [`close_in_background`].

use super::context::Context;
use super::memory::DeviceSlice;
use super::nccl::{CommunicatorRank, Nccl, NcclTarget};
use super::stream::Stream;
use crate::cuda::sys::fault::{Fault, Result};
use crate::cuda::sys::nccl::CommHandle;
use crate::observe::threads;
use crate::sync::lock;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long closing waits for a call inside NCCL to return. No call should take this long; one that
/// does hangs, and only an abort ends it.
pub const CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// How long NCCL may take to finalize, once all work on the device is done.
pub const FINALIZE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often to poll NCCL before sleeping between polls. A call mostly takes microseconds, but the
/// first one makes connections.
const EAGER_POLLS: usize = 100;
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Called between polls of NCCL while a call takes long; an error ends the wait.
pub type OnPoll<'a> = &'a mut dyn FnMut() -> Result<()>;

pub struct Communicator {
    nccl: &'static Nccl,
    context: Arc<Context>,
    comm: CommHandle,
    own: CommunicatorRank,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// No new call may start.
    is_closed: bool,
    /// Whether a thread is inside NCCL.
    is_busy: bool,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, which `call` ensures. `abort`
// runs when no call is in progress, or when one hangs, which nothing else could end.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Starts to connect to the other ranks, on the device of the context. Usable once it is ready.
    pub fn init(
        nccl: &'static Nccl,
        context: &Arc<Context>,
        own: CommunicatorRank,
    ) -> Result<Communicator> {
        let _guard = context.enter()?;
        let comm = nccl.init_rank(own)?;
        log::info!("joining an NCCL communicator as rank {} of {}", own.rank, own.ranks);
        let (state, changed) = Default::default();
        Ok(Communicator { nccl, context: context.clone(), comm, own, state, changed })
    }

    /// Whether NCCL is done with what was started last. Errors if that failed.
    pub fn is_ready(&self) -> Result<bool> {
        // SAFETY: the handle is valid until it is closed, and this is the only call.
        self.call(|comm| unsafe { self.nccl.is_ready(comm) })
    }

    /// Enqueues an in-place all-reduce (sum).
    ///
    /// # Safety
    /// The slice is memory of this communicator's device, valid when the stream gets there.
    pub unsafe fn all_reduce(
        &self,
        stream: &Stream,
        slice: DeviceSlice,
        on_poll: OnPoll,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.enqueue(stream, on_poll, |nccl, on| unsafe { nccl.all_reduce(slice, on) })
    }

    /// Enqueues collectives on a stream of this device, and returns once they are there. If that
    /// takes longer than usual, because NCCL makes connections, `on_poll` is called repeatedly.
    pub fn enqueue(
        &self,
        stream: &Stream,
        on_poll: OnPoll,
        work: impl FnOnce(&Nccl, NcclTarget) -> Result<()>,
    ) -> Result<()> {
        self.call(|comm| work(self.nccl, NcclTarget { comm, stream: stream.handle().cast() }))?;
        self.wait_ready(on_poll)
    }

    /// Errors if something failed asynchronously. Returns at once if another thread is inside NCCL:
    /// that thread gets the error.
    pub fn check_async_error(&self) -> Result<()> {
        let state = lock(&self.state);
        match state.is_busy {
            true => Ok(()),
            // SAFETY: as in `is_ready`.
            false => self.call_now(state, |comm| unsafe { self.nccl.is_ready(comm) }).map(drop),
        }
    }

    /// Closes it in order. All work on streams must be done; NCCL may still be sending what other
    /// ranks wait for. Aborts if that takes too long. Does nothing if it is closed already.
    pub fn finalize(&self) {
        let deadline = Instant::now() + FINALIZE_TIMEOUT;
        // SAFETY: the handle is valid until it is closed, this is the only call, and the watchdog,
        // which calls this, accepts no more work.
        let started = self.call(|comm| unsafe { self.nccl.finalize(comm) });
        let finalized = started.and_then(|()| {
            self.wait_ready(&mut || match deadline <= Instant::now() {
                true => Err(Fault("NCCL was not done in time".to_string())),
                false => Ok(()),
            })
        });
        if let Err(fault) = finalized {
            if !lock(&self.state).is_closed {
                log::info!("{}: could not be finalized: {fault}", self.describe());
            }
            return self.abort();
        }
        // SAFETY: it was finalized and is no longer used.
        self.close("finalized", |comm| unsafe { self.nccl.destroy(comm) });
    }

    /// Closes it together with whatever it is doing on the device. Does nothing if it is closed
    /// already.
    pub fn abort(&self) {
        // SAFETY: no new call can start; one that hangs inside NCCL is what an abort is for.
        self.close("aborted", |comm| unsafe { self.nccl.abort(comm) });
    }

    /// The raw handle, for tests that make it fail.
    #[cfg(test)]
    pub fn handle(&self) -> CommHandle {
        self.comm
    }

    /// Waits until NCCL is done with what was started last.
    fn wait_ready(&self, on_poll: OnPoll) -> Result<()> {
        for polls in 0.. {
            if self.is_ready()? {
                break;
            }
            if polls < EAGER_POLLS {
                std::thread::yield_now();
            } else {
                on_poll()?;
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    /// Blocks new calls and frees the handle with `free`.
    fn close(&self, how: &str, free: impl FnOnce(CommHandle) -> Result<()>) {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.is_closed, true) {
            return;
        }
        self.changed.notify_all();
        drop(self.changed.wait_timeout_while(state, CALL_TIMEOUT, |state| state.is_busy));
        let _guard = self.context.enter();
        match free(self.comm) {
            Ok(()) => log::info!("{}: {how}", self.describe()),
            // Nothing can be done about it.
            Err(fault) => log::info!("{}: {how}, with a failure: {fault}", self.describe()),
        }
    }

    /// Calls NCCL, after other threads have left it.
    fn call<T>(&self, work: impl FnOnce(CommHandle) -> Result<T>) -> Result<T> {
        let must_wait = |state: &mut State| state.is_busy && !state.is_closed;
        let state = self.changed.wait_while(lock(&self.state), must_wait);
        self.call_now(state.unwrap_or_else(PoisonError::into_inner), work)
    }

    /// Calls NCCL. No other thread is inside.
    fn call_now<T>(
        &self,
        mut state: MutexGuard<State>,
        work: impl FnOnce(CommHandle) -> Result<T>,
    ) -> Result<T> {
        if state.is_closed {
            return Err(Fault("its communicator has ended".to_string()));
        }
        state.is_busy = true;
        drop(state);
        // NCCL switches to its device and back to the thread's. A thread without a context would
        // end up on device 0 and allocate memory there for nothing.
        let outcome = self.context.enter().and_then(|_guard| work(self.comm));
        lock(&self.state).is_busy = false;
        self.changed.notify_all();
        outcome
    }

    fn describe(&self) -> String {
        format!("NCCL communicator (rank {} of {})", self.own.rank, self.own.ranks)
    }
}

/// Closes communicators with [`Communicator::finalize`] or [`Communicator::abort`], each on a
/// thread of its own: two on one stream wait for each other, so none may be closed before the rest.
/// The receiver disconnects when all are closed; waiting for it is optional.
pub fn close_in_background(
    communicators: impl IntoIterator<Item = Arc<Communicator>>,
    close: fn(&Communicator),
) -> Receiver<()> {
    let (sender, closed) = channel();
    for communicator in communicators {
        let (for_thread, sender) = (communicator.clone(), sender.clone());
        let started = threads::spawn("gflow-goodbye", move || {
            close(&for_thread);
            drop(sender);
        });
        if started.is_err() {
            close(&communicator);
        }
    }
    closed
}
