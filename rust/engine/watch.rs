//! The group as two of its threads watch it: the courier while it carries parcels, and the watchdog while
//! something is on a device. Neither may wait for the worker, which may hang in the very thing that they
//! are about to end.

use super::failure::blame;
use super::shared::{GroupCore, Shared};
use crate::collective::info::CollectiveInfo;
use crate::cuda::{WatchFailure, WatchdogClient};
use crate::error::Error;
use crate::gradients::ExchangeFailure;
use crate::transport::frame::Goodbye;
use crate::transport::interrupt::Interrupt;
use crate::transport::{Failure, Watch};
use std::sync::{Arc, MutexGuard, TryLockError, Weak};

/// Checks the peers for the courier whenever the worker doesn't. While the worker has the fabric, it
/// checks them itself, and stops the courier if necessary.
pub struct CourierWatch {
    pub shared: Weak<Shared>,
    pub interrupt: Arc<Interrupt>,
}

impl Watch for CourierWatch {
    fn check(&mut self) -> Result<(), Failure> {
        if self.interrupt.is_raised() {
            return Err(Failure::Interrupted);
        }
        let Some(shared) = self.shared.upgrade() else { return Err(Failure::Interrupted) };
        match shared.core.try_lock() {
            Ok(mut core) => core.fabric.check(),
            Err(TryLockError::Poisoned(_)) => Err(Failure::Interrupted),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }
}

/// Checks the peers for the watchdog of the group's devices, and fails the group for it.
pub struct DeviceWatch {
    pub shared: Weak<Shared>,
    pub interrupt: Arc<Interrupt>,
}

impl DeviceWatch {
    /// Fails everything, and tells the peers unless another thread has the fabric and will.
    fn give_up(&self, shared: &Shared, core: Option<MutexGuard<GroupCore>>, error: &Error) {
        // Before the worker is woken, so that all waiters get this reason and no other.
        shared.fail(error);
        if let Some(mut core) = core {
            let reason = format!("it gave up: {error}");
            core.fabric.say_goodbye(Goodbye { gave_up: true, reason });
        }
        self.interrupt.raise();
    }
}

impl WatchdogClient<Arc<CollectiveInfo>> for DeviceWatch {
    fn is_healthy(&mut self, oldest: &Arc<CollectiveInfo>) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        if self.interrupt.is_raised() || shared.has_failed() {
            return false;
        }
        match shared.core.try_lock() {
            Ok(mut core) => match core.fabric.check() {
                Ok(()) => true,
                Err(failure) => {
                    let error = shared.explain(failure, oldest);
                    self.give_up(&shared, Some(core), &error);
                    false
                }
            },
            Err(TryLockError::Poisoned(_)) => false,
            // The thread that has it checks the peers.
            Err(TryLockError::WouldBlock) => true,
        }
    }

    fn fail(&mut self, info: &Arc<CollectiveInfo>, failure: WatchFailure) {
        let Some(shared) = self.shared.upgrade() else { return };
        let call = &info.call;
        let mut core = shared.core.try_lock().ok();
        let gpu = call.on_device.map(|at| format!("GPU {}", at.device)).unwrap_or_default();
        let error = match failure {
            WatchFailure::Fault(fault) => {
                let reason = format!("{gpu}: {fault}");
                let failure = ExchangeFailure::Device { rank: shared.rank, reason };
                let failure = match &mut core {
                    Some(core) => blame(&mut core.fabric, failure),
                    None => failure,
                };
                shared.explain(failure, info)
            }
            WatchFailure::DeadlineExceeded => Error::TimedOut {
                missing: vec![format!("{gpu} of {} to be done with it", shared.label())],
                doing: info.to_string(),
                waited: call.timeout,
            },
        };
        self.give_up(&shared, core, &error);
    }
}
