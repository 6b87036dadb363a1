//! The queue of a group: collectives in the order in which the program called them, and flushes of held
//! gradients between them.
//!
//! One task runs at a time: the thread that takes one says when it is done. The queue is closed once, with
//! a reason that every later call gets. It never drops an operation: jobs that can no longer run are
//! handed back to be completed with an error.

use super::operation::Operation;
use crate::collective::call::Call;
use crate::collective::info::CollectiveInfo;
use crate::error::Error;
use crate::gradients::DeviceTicket;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

/// A collective that was submitted and has not run.
pub struct Job {
    pub info: CollectiveInfo,
    pub operation: Arc<dyn Operation>,
    /// Only for tensors on a device.
    pub device: Option<Box<DeviceTicket>>,
}

/// What the worker does next.
pub enum Task {
    Collective(Job),
    /// Exchange and complete all gradients that are held.
    Flush,
}

/// The result of submitting a job whose caller was ready to run it.
pub enum Submitted {
    /// Nothing else was running or waiting: the caller runs it and then calls [`Queue::done`].
    RunHere(Job),
    /// It was appended, with this number.
    Queued(u64),
}

#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    /// Only the worker waits on it.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    /// The number of the newest collective.
    seq: u64,
    /// A task was taken and is not done.
    busy: bool,
    closed: Option<Error>,
    /// Whether it was closed because the group failed. Set together with the reason: the worker may
    /// look as soon as the queue is closed.
    has_failed: bool,
}

impl Queue {
    /// Appends a job and returns its number. Fails with the reason if the queue is closed.
    pub fn push(
        &self,
        call: Call,
        operation: Arc<dyn Operation>,
        device: Option<Box<DeviceTicket>>,
    ) -> Result<u64, Error> {
        let mut state = self.lock();
        state.check_open()?;
        let job = state.number(call, operation, device);
        Ok(self.append(state, job))
    }

    /// Appends a flush, which has no number. Does nothing if the queue is closed.
    pub fn push_flush(&self) {
        let mut state = self.lock();
        if state.check_open().is_ok() {
            state.tasks.push_back(Task::Flush);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Hands the job back if nothing is running or waiting, so that the caller runs it; otherwise appends
    /// it.
    pub fn take_or_push(
        &self,
        call: Call,
        operation: Arc<dyn Operation>,
        device: Option<Box<DeviceTicket>>,
    ) -> Result<Submitted, Error> {
        let mut state = self.lock();
        state.check_open()?;
        let job = state.number(call, operation, device);
        if !state.busy && state.tasks.is_empty() {
            state.busy = true;
            return Ok(Submitted::RunHere(job));
        }
        Ok(Submitted::Queued(self.append(state, job)))
    }

    fn append(&self, mut state: MutexGuard<'_, State>, job: Job) -> u64 {
        let seq = job.info.seq;
        state.tasks.push_back(Task::Collective(job));
        drop(state);
        self.changed.notify_one();
        seq
    }

    /// Waits for the next task until no other is running; [`Queue::done`] ends it. `None` once the queue
    /// is closed and empty and nothing is running.
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

    /// The task that was taken is done.
    pub fn done(&self) {
        let mut state = self.lock();
        state.busy = false;
        let awaited = !state.tasks.is_empty() || state.closed.is_some();
        drop(state);
        if awaited {
            self.changed.notify_one();
        }
    }

    /// Fails with the reason if the queue is closed.
    pub fn check_open(&self) -> Result<(), Error> {
        self.lock().check_open()
    }

    /// Takes no more jobs; those already queued can still be popped. The first reason wins.
    pub fn close(&self, reason: Error) {
        self.lock().closed.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// Closes the queue because the group has failed.
    pub fn fail(&self, reason: Error) {
        let mut state = self.lock();
        state.closed.get_or_insert(reason);
        state.has_failed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Why the group has failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        let state = self.lock();
        state.closed.clone().filter(|_| state.has_failed)
    }

    /// Removes every job that has not been popped.
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
        device: Option<Box<DeviceTicket>>,
    ) -> Job {
        self.seq += 1;
        let info = CollectiveInfo { seq: self.seq, call };
        Job { info, operation, device }
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
        fn complete(&self, _error: Option<&Error>) -> bool {
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
                assert_eq!(last.load(Ordering::Relaxed), job.info.seq - 1);
                last.store(job.info.seq, Ordering::Relaxed);
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
            let submitted = queue.take_or_push(all_reduce(1), Arc::new(Nothing), None).unwrap();
            if let Submitted::RunHere(job) = submitted {
                run(&queue, &last, job);
            }
            queue.close(Error::Closed("the end of the model".into()));
            worker.join().unwrap();
            assert_eq!(last.load(Ordering::Relaxed), 2);
        });
    }
}
