//! A pool of threads for tasks that may block for as long as they like.
//!
//! A user's callback may wait for another collective of the same group, and a receive may wait for its
//! peer. Neither may run on the worker, and a task that blocks must not hold up the next: if no thread is
//! idle, another is started. An idle thread ends after a while, so an idle group has none.

use crate::observe::threads;
use crate::sync::lock;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

const IDLE_LIMIT: Duration = Duration::from_secs(2);

thread_local! {
    /// The address of the pool that this thread belongs to.
    static POOL_OF: Cell<usize> = const { Cell::new(0) };
}

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct BlockingPool {
    state: Mutex<State>,
    spawned: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Task>,
    idle: usize,
}

impl BlockingPool {
    /// Whether this thread belongs to the pool, so that waiting for all tasks would never end.
    pub fn contains_this_thread(&self) -> bool {
        POOL_OF.get() == self.address()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Runs `task` soon, on a thread that holds no lock of ours.
    pub fn spawn(self: &Arc<Self>, task: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.state);
        state.waiting.push_back(Box::new(task));
        let enough = state.idle >= state.waiting.len();
        drop(state);
        if enough {
            self.spawned.notify_one();
            return;
        }
        let pool = self.clone();
        let started = threads::spawn("gflow-blocking", move || pool.serve());
        if started.is_err() {
            // No thread can be started: better late than never, so the caller runs it.
            self.serve_waiting();
        }
    }

    fn serve(&self) {
        POOL_OF.set(self.address());
        loop {
            self.serve_waiting();
            let mut state = lock(&self.state);
            state.idle += 1;
            let (mut state, _) = self
                .spawned
                .wait_timeout_while(state, IDLE_LIMIT, |state| state.waiting.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            if state.waiting.is_empty() {
                return;
            }
        }
    }

    fn serve_waiting(&self) {
        while let Some(task) = self.take() {
            // A panic here would cost every later task of the group its thread.
            let _ = catch_unwind(AssertUnwindSafe(task));
        }
    }

    fn take(&self) -> Option<Task> {
        lock(&self.state).waiting.pop_front()
    }
}
