//! What the watchdog of a group's devices needs of the group: whether all ranks are there, and a way to
//! fail it. It must never wait for the worker, which may hang in what the watchdog is about to end.

use super::Shared;
use super::front::Front;
use super::worker;
use crate::collective::agreement::explain;
use crate::cuda::{WatchFailure, WatchdogClient};
use crate::error::Error;
use crate::gradients::Doing;
use crate::transport::Failure;
use crate::transport::frame::Goodbye;
use crate::transport::interrupt::Interrupt;
use std::sync::{Arc, MutexGuard, TryLockError, Weak};

/// The group, as the watchdog of its devices sees it.
pub struct WatchedGroup {
    shared: Weak<Shared>,
    interrupt: Arc<Interrupt>,
}

impl WatchedGroup {
    pub(super) fn new(shared: &Arc<Shared>, interrupt: &Arc<Interrupt>) -> WatchedGroup {
        WatchedGroup { shared: Arc::downgrade(shared), interrupt: interrupt.clone() }
    }

    /// Fails everything, and tells the peers if nobody else is about to.
    fn give_up(&self, shared: &Arc<Shared>, front: Option<MutexGuard<Front>>, error: &Error) {
        // Before the worker is woken, so that the waiting get this reason and no other.
        shared.fail(error);
        if let Some(mut front) = front {
            let reason = format!("it gave up: {error}");
            front.fabric.say_goodbye(Goodbye { gave_up: true, reason });
        }
        self.interrupt.raise();
    }
}

impl WatchdogClient<Arc<Doing>> for WatchedGroup {
    fn is_healthy(&mut self, oldest: &Arc<Doing>) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        if self.interrupt.is_raised() || shared.has_failed() {
            return false;
        }
        match shared.front.try_lock() {
            Ok(mut front) => match front.fabric.check() {
                Ok(()) => true,
                Err(failure) => {
                    let error = explain(failure, &shared.labels, oldest.seq, &oldest.call);
                    self.give_up(&shared, Some(front), &error);
                    false
                }
            },
            Err(TryLockError::Poisoned(_)) => false,
            // Whoever has it looks after the peers.
            Err(TryLockError::WouldBlock) => true,
        }
    }

    fn fail(&mut self, what: &Arc<Doing>, trouble: WatchFailure) {
        let Some(shared) = self.shared.upgrade() else { return };
        let Doing { seq, call } = &**what;
        let mut front = shared.front.try_lock().ok();
        let here = shared.labels.get(shared.rank).cloned().unwrap_or_default();
        let gpu = call.on_device.map(|at| format!("GPU {}", at.device)).unwrap_or_default();
        let error = match trouble {
            WatchFailure::Fault(fault) => {
                let reason = format!("{gpu}: {fault}");
                let failure = Failure::Device { rank: shared.rank, reason };
                let failure = match &mut front {
                    Some(front) => worker::blame(&mut front.fabric, failure),
                    None => failure,
                };
                explain(failure, &shared.labels, *seq, call)
            }
            WatchFailure::DeadlineExceeded => Error::TimedOut {
                missing: vec![format!("{gpu} of {here} to be done with it")],
                doing: format!("{} #{seq}", call.view),
                waited: call.timeout,
            },
        };
        self.give_up(&shared, front, &error);
    }
}
