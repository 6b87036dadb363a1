//! How a group ends: aborted, closed, or closed for good with the interpreter. No wait here is without a
//! bound, because the thread waited for may be stuck.

use super::handle::Engine;
use super::shared::NO_MORE_CALLBACKS;
use crate::error::Error;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long `close` lets operations finish that were submitted before it. Enough for a peer that is a
/// little behind; a peer that never comes must not keep a program from ending.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// How long `close` then waits for the worker to see that it was interrupted.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(1);
/// How long the end of the interpreter waits for user callbacks that are running.
const CALLBACK_LIMIT: Duration = Duration::from_secs(30);

impl Engine {
    /// Fails every operation that is pending and every later one, at once.
    pub fn abort(&self, why: &str) {
        // Before the worker is woken, so that all waiters get this reason and no other.
        self.shared.fail(&Error::Closed(why.to_string()));
        self.interrupt.raise();
    }

    /// Ends the group: collectives that were submitted may still finish, within a bound; then everything
    /// is aborted. Does nothing if the group is closed.
    pub fn close(&self) {
        if self.refuse_forks().is_err() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let why = "the process group was destroyed";
        self.shared.queue.close(Error::Closed(why.to_string()));
        let drained = self.wait_until_idle(DRAIN_LIMIT);
        // Work on the devices may still finish too; this also releases a thread that hangs in NCCL.
        let limit = if drained { DRAIN_LIMIT } else { STOP_LIMIT };
        self.shared.devices.watchdog.shutdown(limit, !drained || self.shared.has_failed());
        // Even if drained: a send or receive without a peer is still pending.
        self.abort(&format!("{why} while this operation was pending"));
        if !drained {
            // A thread that is stuck in an operation is left behind: it owns everything it uses.
            self.wait_until_idle(STOP_LIMIT);
        }
    }

    /// For the end of the interpreter: closes the group, starts no more callbacks, and waits for those
    /// that are running, because one that outlives the interpreter would crash the process.
    pub fn close_for_good(&self) {
        if self.refuse_forks().is_err() {
            return;
        }
        self.close();
        NO_MORE_CALLBACKS.store(true, Ordering::Release);
        self.wait_until_idle(CALLBACK_LIMIT);
    }

    fn wait_until_idle(&self, limit: Duration) -> bool {
        // A callback that closes its own group must not wait for itself.
        let own = usize::from(self.shared.pool.contains_this_thread());
        self.shared.activity.wait_until_idle(own, limit)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}
