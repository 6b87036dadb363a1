//! Tracks what a group does besides its queue, and waits for it to end.

use super::operation::Operation;
use crate::sync::lock;
use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Default)]
pub struct Activity {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    worker_ended: bool,
    /// Collectives that have begun, and every operation that runs aside.
    running: Vec<Arc<dyn Operation>>,
    /// Futures that are being completed, callbacks included.
    notifying: usize,
    /// The highest number of a collective that is complete.
    finished: u64,
    /// Collectives that have begun and are not complete. A gradient that is held completes after later
    /// ones.
    begun: BTreeSet<u64>,
}

impl State {
    /// Whether a collective up to this number is not complete.
    fn is_pending(&self, newest: u64) -> bool {
        self.finished < newest || self.begun.first().is_some_and(|first| *first <= newest)
    }

    fn remove(&mut self, operation: &Arc<dyn Operation>) {
        self.running.retain(|other| !Arc::ptr_eq(other, operation));
    }
}

impl Activity {
    pub fn begin_aside(&self, operation: &Arc<dyn Operation>) {
        lock(&self.state).running.push(operation.clone());
    }

    pub fn end_aside(&self, operation: &Arc<dyn Operation>) {
        lock(&self.state).remove(operation);
    }

    pub fn begin_collective(&self, seq: u64, operation: &Arc<dyn Operation>) {
        let mut state = lock(&self.state);
        state.begun.insert(seq);
        state.running.push(operation.clone());
    }

    pub fn end_collective(&self, seq: u64, operation: &Arc<dyn Operation>) {
        let mut state = lock(&self.state);
        state.remove(operation);
        state.begun.remove(&seq);
        state.finished = state.finished.max(seq);
        drop(state);
        self.changed.notify_all();
    }

    /// Collectives up to this number were taken out of the queue and will never begin.
    pub fn skip_to(&self, seq: u64) {
        lock(&self.state).finished = seq;
        self.changed.notify_all();
    }

    /// Everything that has begun and is not complete.
    pub fn running(&self) -> Vec<Arc<dyn Operation>> {
        lock(&self.state).running.clone()
    }

    pub fn begin_notifying(&self) {
        lock(&self.state).notifying += 1;
    }

    pub fn end_notifying(&self) {
        lock(&self.state).notifying -= 1;
        self.changed.notify_all();
    }

    pub fn worker_ended(&self) {
        lock(&self.state).worker_ended = true;
        self.changed.notify_all();
    }

    /// Waits until all collectives up to `newest` are complete. If they aren't within `limit`, returns
    /// the highest number that is.
    pub fn wait_until_complete(&self, newest: u64, limit: Duration) -> Result<(), u64> {
        let state = self.wait_while(limit, |state| state.is_pending(newest));
        match state.is_pending(newest) {
            true => Err(state.finished),
            false => Ok(()),
        }
    }

    /// Waits until the worker has ended and at most `callbacks` notifications run. Returns whether that
    /// is so within `limit`.
    pub fn wait_until_idle(&self, callbacks: usize, limit: Duration) -> bool {
        let is_busy = |state: &mut State| !state.worker_ended || state.notifying > callbacks;
        !is_busy(&mut self.wait_while(limit, is_busy))
    }

    fn wait_while(
        &self,
        limit: Duration,
        condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(lock(&self.state), limit, condition);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
