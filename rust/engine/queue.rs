//! The queue of a group: collectives in the order in which the program called them.
//!
//! It is closed once, with a reason that every later call gets. It never drops an operation: what
//! cannot run any more is given back to be settled.

use super::operation::Operation;
use crate::collective::call::Call;
use crate::error::Error;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// One collective on its way.
pub struct Job {
    /// The number of this collective in its group, from 1.
    pub seq: u64,
    pub call: Call,
    pub operation: Arc<dyn Operation>,
}

#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// The number of the newest collective.
    seq: u64,
    closed: Option<Error>,
}

impl Queue {
    /// Appends a job and returns its number, or says why nothing is taken any more.
    pub fn push(&self, call: Call, operation: Arc<dyn Operation>) -> Result<u64, Error> {
        let mut state = self.lock();
        state.check_open()?;
        state.seq += 1;
        let seq = state.seq;
        state.jobs.push_back(Job { seq, call, operation });
        drop(state);
        self.arrived.notify_one();
        Ok(seq)
    }

    /// The next job; sleeps until there is one. `None` once the queue is closed and empty.
    pub fn pop(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed.is_some() {
                return None;
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Fails with the reason if nothing is taken any more.
    pub fn check_open(&self) -> Result<(), Error> {
        self.lock().check_open()
    }

    /// Takes no more jobs; those already here can still be popped. The first reason stays.
    pub fn close(&self, reason: Error) {
        self.lock().closed.get_or_insert(reason);
        self.arrived.notify_all();
    }

    /// Takes out every job that has not been popped.
    pub fn drain(&self) -> Vec<Job> {
        self.lock().jobs.drain(..).collect()
    }

    /// How many collectives this group has seen.
    pub fn seq(&self) -> u64 {
        self.lock().seq
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // The state is valid after every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check_open(&self) -> Result<(), Error> {
        self.closed.clone().map_or(Ok(()), Err)
    }
}
