//! Where Futures are completed: threads that may run a user's callbacks for as long as they take.
//!
//! A callback may wait for another collective of the same group, so it must never run on the
//! worker, and one that blocks must not hold up the next: if no thread is idle, another is
//! started. An idle thread ends after a while, so a group at rest has none.

use super::operation::Operation;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

const IDLE_LIMIT: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct Completions {
    state: Mutex<State>,
    handed_over: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Arc<dyn Operation>>,
    idle: usize,
}

impl Completions {
    /// Completes the Future of `operation` soon, on a thread that holds no lock of ours.
    pub fn hand_over(self: &Arc<Self>, operation: Arc<dyn Operation>) {
        let mut state = self.lock();
        state.waiting.push_back(operation);
        let enough = state.idle >= state.waiting.len();
        drop(state);
        if enough {
            self.handed_over.notify_one();
            return;
        }
        let pool = self.clone();
        let started =
            std::thread::Builder::new().name("gflow-done".into()).spawn(move || pool.serve());
        if started.is_err() {
            // No thread to be had: late is better than never, so the caller does it.
            self.serve_waiting();
        }
    }

    fn serve(&self) {
        loop {
            self.serve_waiting();
            let mut state = self.lock();
            state.idle += 1;
            let (mut state, waited) = self
                .handed_over
                .wait_timeout_while(state, IDLE_LIMIT, |state| state.waiting.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            if waited.timed_out() && state.waiting.is_empty() {
                return;
            }
        }
    }

    fn serve_waiting(&self) {
        while let Some(operation) = self.take() {
            // A panic here would cost every later Future of the group its completion.
            let _ = catch_unwind(AssertUnwindSafe(|| operation.notify()));
        }
    }

    fn take(&self) -> Option<Arc<dyn Operation>> {
        self.lock().waiting.pop_front()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
