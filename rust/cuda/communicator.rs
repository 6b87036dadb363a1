//! A communicator: this rank's end of NCCL with some ranks. It is a non-blocking one: no call waits for
//! other ranks, and what a call has begun is asked for until it is done, or the communicator is over.
//!
//! One thread at a time is inside NCCL with it. It may be ended at any time; after that nothing is begun
//! with it any more, and who waits for something that was begun returns. All that ends one may take long,
//! for NCCL may wait for other ranks then, and is done aside: [`close_in_background`].

use super::context::Context;
use super::fault::{Fault, Result};
pub use super::nccl::CommunicatorRank;
use super::nccl::{Handle, Nccl, On};
use super::stream::Stream;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an end lets a call return that is under way. None should take long; one that does hangs, and
/// then an abort is what ends it.
pub const CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// How often those who wait for NCCL look before they sleep, and how long they sleep then: what it does for
/// a call is mostly a matter of microseconds, but at the first one it makes connections.
const EAGER_LOOKS: usize = 100;
const PAUSE: Duration = Duration::from_micros(100);

/// How long NCCL may take to finish what it is at, when all is over on the device.
pub const FINALIZE_TIMEOUT: Duration = Duration::from_secs(2);

/// What those who wait for NCCL look at meanwhile; an error ends the wait.
pub type OnPoll<'a> = &'a mut dyn FnMut() -> Result<()>;

pub struct Communicator {
    nccl: &'static Nccl,
    context: Arc<Context>,
    handle: Handle,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Nothing is begun with it any more.
    is_over: bool,
    /// Whether a call is inside NCCL.
    is_busy: bool,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, which `call` sees to. An abort comes only
// when no call is under way, or when one hangs, which nothing else could end.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Begins to meet the other ranks, on the device of the context. It can be used once it is ready.
    pub fn init(
        nccl: &'static Nccl,
        context: &Arc<Context>,
        own: CommunicatorRank,
    ) -> Result<Communicator> {
        let _entered = context.enter()?;
        let handle = nccl.init_rank(own)?;
        let (state, changed) = Default::default();
        Ok(Communicator { nccl, context: context.clone(), handle, state, changed })
    }

    /// Whether NCCL is done with what was begun last; what went wrong is an error.
    pub fn is_ready(&self) -> Result<bool> {
        // SAFETY: it is valid until it is over, and this is the only call.
        self.call(|handle| unsafe { self.nccl.is_ready(handle) })
    }

    /// Puts something of NCCL's on a stream of its device, and returns when it is there. If that takes
    /// longer than usual, because NCCL makes connections, `look` is called from time to time.
    pub fn enqueue(
        &self,
        stream: &Stream,
        on_poll: OnPoll,
        work: impl FnOnce(&Nccl, On) -> Result<()>,
    ) -> Result<()> {
        self.call(|handle| work(self.nccl, On { handle, stream: stream.handle().cast() }))?;
        self.until_ready(on_poll)
    }

    /// What has gone wrong since, where nobody waited for it. It does not wait for a call that is under
    /// way: who made that will be told.
    pub fn check_async_error(&self) -> Result<()> {
        let state = self.lock();
        match state.is_busy {
            true => Ok(()),
            // SAFETY: as above.
            false => self.inside(state, |handle| unsafe { self.nccl.is_ready(handle) }).map(drop),
        }
    }

    /// Leaves the other ranks in order, once all that was put on streams is over there: NCCL may still be
    /// sending what they wait for. What is not finished after a while is aborted. Done again, or after an
    /// abort, it does nothing.
    pub fn finalize(&self) {
        let until = Instant::now() + FINALIZE_TIMEOUT;
        // SAFETY: it is valid until it is over, this is the only call, and the watchdog, which has this
        // done, lets nobody put anything on a stream before.
        let begun = self.call(|handle| unsafe { self.nccl.finalize(handle) });
        let left = begun.and_then(|()| {
            self.until_ready(&mut || match until <= Instant::now() {
                true => Err(Fault("NCCL was not done in time".to_string())),
                false => Ok(()),
            })
        });
        if left.is_err() {
            return self.abort();
        }
        // SAFETY: it was left in order, and is over. Where it fails, there is nothing left to do.
        self.end(|handle| unsafe { self.nccl.destroy(handle) });
    }

    /// Ends it, and with it what it is at on the device. Done again it does nothing.
    pub fn abort(&self) {
        // SAFETY: no call begins any more; one that still hangs in NCCL is what an abort is for.
        self.end(|handle| unsafe { self.nccl.abort(handle) });
    }

    /// NCCL's own name for it, for tests that make it fail.
    #[cfg(test)]
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Waits until NCCL is done with what was begun last.
    fn until_ready(&self, on_poll: OnPoll) -> Result<()> {
        for looks in 0.. {
            if self.is_ready()? {
                break;
            }
            if looks < EAGER_LOOKS {
                std::thread::yield_now();
            } else {
                on_poll()?;
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Lets nobody begin anything any more, and gives it back to NCCL.
    fn end(&self, how: impl FnOnce(Handle) -> Result<()>) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.is_over, true) {
            return;
        }
        self.changed.notify_all();
        drop(self.changed.wait_timeout_while(state, CALL_TIMEOUT, |state| state.is_busy));
        let _entered = self.context.enter();
        // Where it fails, there is nothing left to do about it.
        let _ = how(self.handle);
    }

    /// Goes into NCCL, one after the other.
    fn call<T>(&self, work: impl FnOnce(Handle) -> Result<T>) -> Result<T> {
        let is_waiting = |state: &mut State| state.is_busy && !state.is_over;
        let state = self.changed.wait_while(self.lock(), is_waiting);
        self.inside(state.unwrap_or_else(PoisonError::into_inner), work)
    }

    /// Goes into NCCL, where nobody is now.
    fn inside<T>(
        &self,
        mut state: MutexGuard<State>,
        work: impl FnOnce(Handle) -> Result<T>,
    ) -> Result<T> {
        if state.is_over {
            return Err(Fault("its communicator has ended".to_string()));
        }
        state.is_busy = true;
        drop(state);
        // NCCL goes to its device and back to the thread's. A thread that is nowhere would end up on the
        // first device, and take memory there for nothing.
        let outcome = self.context.enter().and_then(|_entered| work(self.handle));
        self.lock().is_busy = false;
        self.changed.notify_all();
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends some communicators, `how` they say, each on a thread of its own: two that are on one stream wait
/// for each other, so one can be the first to be over only if all are being ended. What is returned is
/// disconnected when all have ended, which nobody has to wait for.
pub fn close_in_background(
    communicators: impl IntoIterator<Item = Arc<Communicator>>,
    how: fn(&Communicator),
) -> Receiver<()> {
    let (sender, ended) = channel();
    for communicator in communicators {
        let (of_thread, sender) = (communicator.clone(), sender.clone());
        let thread = std::thread::Builder::new().name("gflow-goodbye".to_string());
        let started = thread.spawn(move || {
            how(&of_thread);
            drop(sender);
        });
        if started.is_err() {
            how(&communicator);
        }
    }
    ended
}
