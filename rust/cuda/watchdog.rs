//! The watchdog: one thread per group that watches the work enqueued on the group's devices,
//! because no other thread waits for it.
//!
//! It reports the first failure of a device, of NCCL or of another rank, and the first missed
//! deadline. Then it aborts the communicators, so that no kernel waits for a rank that will not
//! come. If nothing fails, it finalizes them when the group ends. Between polls it sleeps, holding
//! no lock that an enqueueing thread could wait for.

use super::safe::communicator::{
    CALL_TIMEOUT, Communicator, FINALIZE_TIMEOUT, close_in_background,
};
use super::safe::event::Event;
use super::sys::fault::{Fault, Result};
use crate::observe::threads;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often to poll while something is in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often to poll while a thread is in [`Watchdog::wait_idle`].
const EAGER_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long to wait for the communicators to close: finalizing, and if that fails an abort, which
/// first waits for calls, and NCCL for its threads. After that they are left behind.
const CLOSE_TIMEOUT: Duration = FINALIZE_TIMEOUT.saturating_add(CALL_TIMEOUT.saturating_mul(2));

/// Why work on a device did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchFailure {
    /// The device or NCCL failed.
    Fault(Fault),
    DeadlineExceeded,
}

/// The group, as the watchdog sees it. `T` identifies a piece of work.
pub trait WatchdogClient<T>: Send {
    /// Whether the group is usable and all ranks are alive. If not, the client fails the group
    /// before it returns false. `oldest` is the work that has been in flight the longest.
    fn is_healthy(&mut self, oldest: &T) -> bool;

    /// Fails the group because of `work`.
    fn fail(&mut self, work: &T, failure: WatchFailure);
}

/// The end of a piece of work on a stream.
pub struct Completion {
    pub event: Arc<Event>,
    /// Runs on the watchdog's thread once the event is complete, unless the group has ended before.
    pub on_complete: Option<Callback>,
}

type Callback = Box<dyn FnOnce() + Send>;

/// Shared by the watchdog's thread and those that enqueue work.
pub struct Watchdog<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    communicators: Vec<Arc<Communicator>>,
    /// In the order in which it was enqueued.
    in_flight: VecDeque<InFlight<T>>,
    next_id: u64,
    /// How many threads are in [`Watchdog::wait_idle`].
    idle_waiters: usize,
    is_running: bool,
    shutdown_requested: bool,
    /// Something has failed: abort the communicators instead of finalizing them.
    has_failed: bool,
    /// The thread has stopped watching, and is closing the communicators.
    is_closing: bool,
}

struct InFlight<T> {
    id: u64,
    work: T,
    deadline: Instant,
    /// `None` until all of it is enqueued.
    completion: Option<Completion>,
}

impl<T> InFlight<T> {
    fn take_callback(&mut self) -> Option<Callback> {
        self.completion.as_mut()?.on_complete.take()
    }
}

impl<T> Default for Watchdog<T> {
    fn default() -> Self {
        let state = State {
            communicators: Vec::new(),
            in_flight: VecDeque::new(),
            next_id: 0,
            idle_waiters: 0,
            is_running: false,
            shutdown_requested: false,
            has_failed: false,
            is_closing: false,
        };
        Watchdog { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T: Clone + Send + 'static> Watchdog<T> {
    /// Starts the thread, unless it runs already or the group has ended.
    pub fn start(self: &Arc<Self>, client: impl WatchdogClient<T> + 'static) -> Result<()> {
        let mut state = lock(&self.state);
        if state.is_running || state.shutdown_requested {
            return Ok(());
        }
        let watchdog = self.clone();
        threads::spawn("gflow-watchdog", move || watchdog.run(client))
            .map_err(|error| Fault(format!("could not start a thread: {error}")))?;
        state.is_running = true;
        Ok(())
    }

    /// Takes charge of a communicator: polls it for errors, and closes it with the group. Aborts it
    /// at once if the group has ended.
    pub fn add_communicator(&self, communicator: &Arc<Communicator>) {
        let mut state = lock(&self.state);
        if state.shutdown_requested && !state.is_running {
            drop(close_in_background([communicator.clone()], Communicator::abort));
            return;
        }
        state.communicators.push(communicator.clone());
    }

    /// Enqueues work with `enqueue`, which returns its completion, and watches it from before that
    /// on: even enqueueing may hang. If it fails half-way, other ranks may wait for the rest, so
    /// the group ends and its communicators are aborted.
    pub fn watch(
        &self,
        work: T,
        deadline: Instant,
        enqueue: impl FnOnce() -> Result<Completion>,
    ) -> Result<()> {
        let mut state = lock(&self.state);
        if state.is_closing {
            return Err(Fault("the group has ended on its devices".to_string()));
        }
        let id = state.next_id;
        state.next_id += 1;
        state.in_flight.push_back(InFlight { id, work, deadline, completion: None });
        drop(state);
        self.changed.notify_all();
        let outcome = enqueue();
        let mut state = lock(&self.state);
        let position = state.in_flight.iter().position(|one| one.id == id);
        let Some(position) = position else { return outcome.map(drop) };
        match outcome {
            Ok(completion) => {
                state.in_flight[position].completion = Some(completion);
                Ok(())
            }
            Err(fault) => {
                log::info!("work could not be enqueued on a GPU: {fault}");
                state.in_flight.remove(position);
                (state.shutdown_requested, state.has_failed) = (true, true);
                self.changed.notify_all();
                Err(fault)
            }
        }
    }

    /// Waits until nothing is in flight, the watchdog closes, or the timeout expires.
    pub fn wait_idle(&self, timeout: Duration) {
        let is_busy = |state: &mut State<T>| !state.in_flight.is_empty() && !state.is_closing;
        let mut state = lock(&self.state);
        state.idle_waiters += 1;
        self.changed.notify_all();
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, timeout, is_busy)
            .unwrap_or_else(PoisonError::into_inner);
        state.idle_waiters -= 1;
    }

    /// Ends the watchdog with its group. Work in flight may complete within `timeout`; then it is
    /// aborted. The communicators are finalized, or aborted if the group `has_failed`. Returns
    /// whether the thread has ended.
    pub fn shutdown(&self, timeout: Duration, has_failed: bool) -> bool {
        let mut state = lock(&self.state);
        state.shutdown_requested = true;
        state.has_failed |= has_failed;
        let latest = Instant::now() + timeout;
        for one in &mut state.in_flight {
            one.deadline = one.deadline.min(latest);
        }
        self.changed.notify_all();
        // A little longer: closing the communicators takes time.
        let timeout = timeout + 10 * POLL_INTERVAL + CLOSE_TIMEOUT;
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| state.is_running)
            .unwrap_or_else(PoisonError::into_inner);
        !state.is_running
    }

    /// The communicators in its charge, for tests that make them fail.
    #[cfg(test)]
    pub fn communicators(&self) -> Vec<Arc<Communicator>> {
        lock(&self.state).communicators.clone()
    }

    /// The thread: watches until the end, then closes the communicators.
    fn run(&self, mut client: impl WatchdogClient<T>) {
        let all_completed = self.watch_until_shutdown(&mut client);
        let mut state = lock(&self.state);
        (state.shutdown_requested, state.is_closing) = (true, true);
        let is_orderly = all_completed && !state.has_failed;
        let abandoned = std::mem::take(&mut state.in_flight);
        drop(state);
        if !is_orderly {
            let count = abandoned.len();
            log::info!("aborting NCCL on this group's GPUs, with {count} exchanges in flight");
        }
        drop(abandoned);
        self.changed.notify_all();
        let close = if is_orderly { Communicator::finalize } else { Communicator::abort };
        let mut state = lock(&self.state);
        // Closing takes time, and more communicators may be added meanwhile.
        while !state.communicators.is_empty() {
            let communicators = std::mem::take(&mut state.communicators);
            drop(state);
            let _ = close_in_background(communicators, close).recv_timeout(CLOSE_TIMEOUT);
            state = lock(&self.state);
        }
        state.is_running = false;
        self.changed.notify_all();
    }

    /// Returns when there is nothing more to watch: true if everything in flight has completed.
    fn watch_until_shutdown(&self, client: &mut impl WatchdogClient<T>) -> bool {
        let mut state = lock(&self.state);
        loop {
            if state.shutdown_requested && state.in_flight.is_empty() {
                return true;
            }
            let Some(oldest) = state.in_flight.front().map(|oldest| oldest.work.clone()) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let communicators = state.communicators.clone();
            drop(state);
            if !client.is_healthy(&oldest) {
                log::info!("the group has failed: giving up what is in flight on its GPUs");
                return false;
            }
            let mut faults = communicators.iter();
            let nccl_fault = faults.find_map(|communicator| communicator.check_async_error().err());
            if let Some((work, failure)) = self.poll(nccl_fault) {
                // A missed deadline during shutdown doesn't fail the group: nothing waits for
                // the work.
                if !lock(&self.state).shutdown_requested
                    || failure != WatchFailure::DeadlineExceeded
                {
                    log_failure(&failure);
                    client.fail(&work, failure);
                }
                return false;
            }
            let state_before = lock(&self.state);
            let interval = match state_before.idle_waiters {
                0 => POLL_INTERVAL,
                _ => EAGER_POLL_INTERVAL,
            };
            let (state_after, _) = self
                .changed
                .wait_timeout(state_before, interval)
                .unwrap_or_else(PoisonError::into_inner);
            state = state_after;
        }
    }

    /// Retires what has completed, and returns the first failure. NCCL does not say which work its
    /// fault belongs to: blame the oldest that has not completed, because all run in order.
    fn poll(&self, nccl_fault: Option<Fault>) -> Option<(T, WatchFailure)> {
        let mut fault = nccl_fault;
        let mut last_completed = None;
        while let Some(event) = self.oldest_event() {
            match event.is_complete() {
                Ok(true) => {
                    let callback =
                        lock(&self.state).in_flight.front_mut().and_then(InFlight::take_callback);
                    if let Some(callback) = callback {
                        callback();
                    }
                    last_completed = lock(&self.state).in_flight.pop_front();
                }
                Ok(false) => break,
                Err(device_fault) => {
                    fault.get_or_insert(device_fault);
                    break;
                }
            }
        }
        let mut state = lock(&self.state);
        if state.in_flight.is_empty() {
            self.changed.notify_all();
        }
        let is_late = |oldest: &InFlight<T>| oldest.deadline <= Instant::now();
        let failure = match fault {
            Some(fault) => WatchFailure::Fault(fault),
            None if state.in_flight.front().is_some_and(is_late) => WatchFailure::DeadlineExceeded,
            None => return None,
        };
        state.in_flight.pop_front().or(last_completed).map(|one| (one.work, failure))
    }

    /// The event of the oldest work, if that is enqueued. Only the watchdog's thread removes such
    /// work.
    fn oldest_event(&self) -> Option<Arc<Event>> {
        lock(&self.state)
            .in_flight
            .front()?
            .completion
            .as_ref()
            .map(|completion| completion.event.clone())
    }
}

fn log_failure(failure: &WatchFailure) {
    match failure {
        WatchFailure::Fault(fault) => log::info!("work on a GPU failed: {fault}"),
        WatchFailure::DeadlineExceeded => log::info!("work on a GPU missed its deadline"),
    }
}
