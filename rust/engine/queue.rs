//! The queue of a group: collectives in the order in which the program called them, and between them
//! where gradients that are held back are to go out.
//!
//! One collective runs at a time: whoever takes a job says when it is over. It is closed once, with
//! a reason that every later call gets. It never drops an operation: what cannot run any more is
//! given back to be settled.

use super::devices::Arrival;
use super::operation::Operation;
use crate::collective::call::Call;
use crate::error::Error;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

/// One collective on its way.
pub struct Job {
    /// The number of this collective in its group, from 1.
    pub seq: u64,
    pub call: Call,
    pub operation: Arc<dyn Operation>,
    /// For tensors on a device only.
    pub arrival: Option<Box<Arrival>>,
}

/// What the worker is to do next.
pub enum Task {
    Collective(Job),
    /// Gradients that are held back are exchanged now, and completed.
    Flush,
}

#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    /// Only the worker waits for it.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    /// The number of the newest collective.
    seq: u64,
    /// Somebody has taken a task and is not done with it.
    busy: bool,
    closed: Option<Error>,
    /// Whether it is closed because the group has failed, and not in order. Set together with the
    /// reason: the worker may look as soon as the queue is closed.
    has_failed: bool,
}

impl Queue {
    /// Appends a job and returns its number, or says why nothing is taken any more.
    pub fn push(
        &self,
        call: Call,
        operation: Arc<dyn Operation>,
        arrival: Option<Box<Arrival>>,
    ) -> Result<u64, Error> {
        let mut state = self.lock();
        state.check_open()?;
        let job = state.number(call, operation, arrival);
        let seq = job.seq;
        state.tasks.push_back(Task::Collective(job));
        drop(state);
        self.changed.notify_one();
        Ok(seq)
    }

    /// Appends a flush. It has no number: it is no collective.
    pub fn push_flush(&self) {
        let mut state = self.lock();
        if state.check_open().is_ok() {
            state.tasks.push_back(Task::Flush);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// A job that the caller runs itself, because nothing runs or waits; else it is appended and
    /// its number returned. A job that was taken ends with [`Queue::done`].
    pub fn take_or_push(
        &self,
        call: Call,
        operation: Arc<dyn Operation>,
        arrival: Option<Box<Arrival>>,
    ) -> Result<Result<Job, u64>, Error> {
        let mut state = self.lock();
        state.check_open()?;
        let job = state.number(call, operation, arrival);
        if !state.busy && state.tasks.is_empty() {
            state.busy = true;
            return Ok(Ok(job));
        }
        let seq = job.seq;
        state.tasks.push_back(Task::Collective(job));
        drop(state);
        self.changed.notify_one();
        Ok(Err(seq))
    }

    /// The next task; sleeps until there is one and nobody else is at one. It ends with
    /// [`Queue::done`]. `None` once the queue is closed, empty and at rest.
    pub fn pop(&self) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if !state.busy {
                if let Some(task) = state.tasks.pop_front() {
                    state.busy = true;
                    return Some(task);
                }
                if state.closed.is_some() {
                    return None;
                }
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The task that was taken is over.
    pub fn done(&self) {
        let mut state = self.lock();
        state.busy = false;
        let awaited = !state.tasks.is_empty() || state.closed.is_some();
        drop(state);
        if awaited {
            self.changed.notify_one();
        }
    }

    /// Fails with the reason if nothing is taken any more.
    pub fn check_open(&self) -> Result<(), Error> {
        self.lock().check_open()
    }

    /// Takes no more jobs; those already here can still be popped. The first reason stays.
    pub fn close(&self, reason: Error) {
        self.lock().closed.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// The same because the group has failed.
    pub fn fail(&self, reason: Error) {
        let mut state = self.lock();
        state.closed.get_or_insert(reason);
        state.has_failed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Why nothing is taken any more, if that is because the group has failed.
    pub fn failure(&self) -> Option<Error> {
        let state = self.lock();
        state.closed.clone().filter(|_| state.has_failed)
    }

    /// Takes out every job that has not been popped.
    pub fn drain(&self) -> Vec<Job> {
        let job = |task| match task {
            Task::Collective(job) => Some(job),
            Task::Flush => None,
        };
        self.lock().tasks.drain(..).filter_map(job).collect()
    }

    /// How many collectives this group has seen.
    pub fn seq(&self) -> u64 {
        self.lock().seq
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is valid after every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn number(
        &mut self,
        call: Call,
        operation: Arc<dyn Operation>,
        arrival: Option<Box<Arrival>>,
    ) -> Job {
        self.seq += 1;
        Job { seq: self.seq, call, operation, arrival }
    }

    fn check_open(&self) -> Result<(), Error> {
        self.closed.clone().map_or(Ok(()), Err)
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::collective::call::tests::all_reduce;
    use crate::collective::span::Memory;
    use crate::sync::atomic::{AtomicU64, Ordering};
    use crate::transport::interrupt::Interrupt;

    struct Nothing;

    impl Operation for Nothing {
        fn prepare(&self) -> Result<(), Error> {
            Ok(())
        }
        fn open(&self) -> Result<Memory, Error> {
            Ok(Memory::default())
        }
        fn start(&self, _done: Arc<Interrupt>) -> Result<(), Error> {
            Ok(())
        }
        fn finish(&self) -> Result<(), Error> {
            Ok(())
        }
        fn broke_connection(&self) -> bool {
            false
        }
        fn settle(&self, _error: Option<&Error>) -> bool {
            false
        }
        fn notify(&self) {}
    }

    /// One caller that waits, one that does not, and the worker: every job runs once, one at a
    /// time and in the order of its number, and the worker ends when the queue is closed.
    #[test]
    fn jobs_run_one_at_a_time_in_order_whoever_runs_them() {
        loom::model(|| {
            let queue = loom::sync::Arc::new(Queue::default());
            let last = loom::sync::Arc::new(AtomicU64::new(0));
            let run = |queue: &Queue, last: &AtomicU64, job: Job| {
                // If two ran at a time, or in another order, this would not be the one before.
                assert_eq!(last.load(Ordering::Relaxed), job.seq - 1);
                last.store(job.seq, Ordering::Relaxed);
                queue.done();
            };
            let (of_worker, of_last) = (queue.clone(), last.clone());
            let worker = loom::thread::spawn(move || {
                while let Some(task) = of_worker.pop() {
                    match task {
                        Task::Collective(job) => run(&of_worker, &of_last, job),
                        Task::Flush => of_worker.done(),
                    }
                }
            });
            queue.push(all_reduce(1), Arc::new(Nothing), None).unwrap();
            queue.push_flush();
            if let Ok(job) = queue.take_or_push(all_reduce(1), Arc::new(Nothing), None).unwrap() {
                run(&queue, &last, job);
            }
            queue.close(Error::Closed("the end of the model".into()));
            worker.join().unwrap();
            assert_eq!(last.load(Ordering::Relaxed), 2);
        });
    }
}
