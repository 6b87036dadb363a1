//! The watchdog: a thread that looks after what is on a group's streams, because nobody waits there.
//!
//! It ends with its group. Whatever goes wrong on a device, in NCCL or at another rank, or takes longer
//! than its deadline, is reported once; then the communicators are aborted, so that no kernel waits for
//! a rank that will not come. It sleeps, and is the only thread that aborts, because that may take long.

use super::communicator::{CALL_LIMIT, Communicator};
use super::event::Event;
use super::fault::{Fault, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often it looks while something is under way.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long the abort of one communicator may take: it waits for calls first, and NCCL for its threads.
const ABORT_LIMIT: Duration = CALL_LIMIT.saturating_mul(2);

/// What went wrong with something that was put on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// The device or NCCL has failed.
    Fault(Fault),
    /// It was not over at its deadline.
    Late,
}

/// What the watchdog needs of the group; `T` says what something is.
pub trait Group<T>: Send {
    /// Whether all ranks are there and the group is. If not, it has failed when this returns; `oldest`
    /// is what is under way for the longest time.
    fn is_well(&mut self, oldest: &T) -> bool;

    /// Fails the group.
    fn fail(&mut self, what: &T, trouble: Trouble);
}

/// Shared by the thread and by those who put things on streams.
pub struct Watchdog<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    communicators: Vec<Arc<Communicator>>,
    /// In the order in which they were put on streams.
    under_way: VecDeque<UnderWay<T>>,
    next: u64,
    is_running: bool,
    is_to_end: bool,
    /// The thread looks after nothing any more, and aborts.
    is_over: bool,
}

struct UnderWay<T> {
    number: u64,
    what: T,
    deadline: Instant,
    /// What is reached when it is over; `None` until all of it is on the stream.
    end: Option<Event>,
}

impl<T> Default for Watchdog<T> {
    fn default() -> Self {
        let state = State {
            communicators: Vec::new(),
            under_way: VecDeque::new(),
            next: 0,
            is_running: false,
            is_to_end: false,
            is_over: false,
        };
        Watchdog { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T: Clone + Send + 'static> Watchdog<T> {
    /// Starts the thread, if there is none yet. After the end of the group it does nothing.
    pub fn start(self: &Arc<Self>, group: impl Group<T> + 'static) -> Result<()> {
        let mut state = self.lock();
        if state.is_running || state.is_to_end {
            return Ok(());
        }
        let watchdog = self.clone();
        std::thread::Builder::new()
            .name("gflow-watchdog".to_string())
            .spawn(move || watchdog.look_after(group))
            .map_err(|error| Fault(format!("could not start a thread: {error}")))?;
        state.is_running = true;
        Ok(())
    }

    /// Takes over a communicator, to look for its errors and to abort it in the end: at once, if the
    /// group has ended meanwhile.
    pub fn take(&self, communicator: &Arc<Communicator>) {
        let mut state = self.lock();
        if state.is_to_end && !state.is_running {
            drop(state);
            return communicator.abort();
        }
        state.communicators.push(communicator.clone());
    }

    /// Something is about to be put on a stream, with `work`, which returns what is reached at its end.
    /// It is looked after from before that on: also putting it there may hang. If only a part of it got
    /// there, the group is over, and no rank may wait for the rest: the communicators are aborted.
    pub fn during(
        &self,
        what: T,
        deadline: Instant,
        work: impl FnOnce() -> Result<Event>,
    ) -> Result<()> {
        let mut state = self.lock();
        if state.is_over {
            return Err(Fault("the group has ended on its devices".to_string()));
        }
        let number = state.next;
        state.next += 1;
        state.under_way.push_back(UnderWay { number, what, deadline, end: None });
        drop(state);
        self.changed.notify_all();
        let outcome = work();
        let mut state = self.lock();
        let position = state.under_way.iter().position(|one| one.number == number);
        let Some(position) = position else { return outcome.map(drop) };
        match outcome {
            Ok(end) => {
                state.under_way[position].end = Some(end);
                Ok(())
            }
            Err(fault) => {
                state.under_way.remove(position);
                state.is_to_end = true;
                self.changed.notify_all();
                Err(fault)
            }
        }
    }

    /// Ends it with its group: what is under way may still finish within a limit, the rest is aborted.
    /// Returns whether the thread has ended by then.
    pub fn end(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        state.is_to_end = true;
        let until = Instant::now() + limit;
        for one in &mut state.under_way {
            one.deadline = one.deadline.min(until);
        }
        self.changed.notify_all();
        // A little longer: it needs time to abort what is late by then.
        let aborts = ABORT_LIMIT * u32::try_from(state.communicators.len()).unwrap_or(1);
        let limit = limit + 10 * LOOK_EVERY + aborts;
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |state| state.is_running)
            .unwrap_or_else(PoisonError::into_inner);
        !state.is_running
    }

    /// Those that it has taken over, for tests that make them fail.
    #[cfg(test)]
    pub fn communicators(&self) -> Vec<Arc<Communicator>> {
        self.lock().communicators.clone()
    }

    fn look_after(&self, mut group: impl Group<T>) {
        let mut state = self.lock();
        loop {
            if state.is_to_end && state.under_way.is_empty() {
                break;
            }
            let Some(oldest) = state.under_way.front().map(|oldest| oldest.what.clone()) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let communicators = state.communicators.clone();
            drop(state);
            // Not with the lock held: neither may keep somebody from putting things on a stream.
            let is_well = group.is_well(&oldest);
            let fault = communicators.iter().find_map(|communicator| communicator.check().err());
            state = self.lock();
            if !is_well {
                break;
            }
            if let Some((what, trouble)) = state.trouble(fault) {
                let is_to_end = state.is_to_end;
                drop(state);
                // A group that ends by itself has no trouble; there is only nobody left to wait.
                if !is_to_end || trouble != Trouble::Late {
                    group.fail(&what, trouble);
                }
                state = self.lock();
                break;
            }
            let (awake, _) = self
                .changed
                .wait_timeout(state, LOOK_EVERY)
                .unwrap_or_else(PoisonError::into_inner);
            state = awake;
        }
        state.is_to_end = true;
        state.is_over = true;
        let under_way = std::mem::take(&mut state.under_way);
        drop(state);
        drop(under_way);
        let mut state = self.lock();
        // Also those that are handed over meanwhile: an abort takes time.
        while let Some(communicator) = state.communicators.pop() {
            drop(state);
            communicator.abort();
            state = self.lock();
        }
        state.is_running = false;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    /// Lets go of what is over, and returns what is not well, if anything. `fault` is NCCL's, which does
    /// not say of what: of the oldest that is not over, because everything is done in order.
    fn trouble(&mut self, fault: Option<Fault>) -> Option<(T, Trouble)> {
        let (mut last, mut fault) = (None, fault);
        while let Some(end) = self.under_way.front().and_then(|oldest| oldest.end.as_ref()) {
            match end.is_over() {
                Ok(true) => last = self.under_way.pop_front(),
                Ok(false) => break,
                Err(of_device) => {
                    fault.get_or_insert(of_device);
                    break;
                }
            }
        }
        let is_late = |oldest: &UnderWay<T>| oldest.deadline <= Instant::now();
        let trouble = match fault {
            Some(fault) => Trouble::Fault(fault),
            None if self.under_way.front().is_some_and(is_late) => Trouble::Late,
            None => return None,
        };
        self.under_way.pop_front().or(last).map(|one| (one.what, trouble))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    struct Report(Sender<(u32, Trouble)>, bool);

    impl Group<u32> for Report {
        fn is_well(&mut self, _oldest: &u32) -> bool {
            self.1
        }

        fn fail(&mut self, what: &u32, trouble: Trouble) {
            let _ = self.0.send((*what, trouble));
        }
    }

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn what_hangs_while_it_is_put_on_a_stream_is_reported_at_its_deadline() {
        let watchdog = Arc::new(Watchdog::default());
        let (sender, reports) = channel();
        watchdog.start(Report(sender, true)).unwrap();
        let hangs = || {
            assert_eq!(reports.recv_timeout(SOON).unwrap(), (7, Trouble::Late));
            Err(Fault("aborted".to_string()))
        };
        let deadline = Instant::now() + Duration::from_millis(50);
        assert_eq!(watchdog.during(7, deadline, hangs), Err(Fault("aborted".to_string())));
        assert!(watchdog.end(SOON));
    }

    #[test]
    fn it_ends_at_once_with_a_group_that_has_nothing_under_way_or_was_lost() {
        let never_started = Watchdog::<u32>::default();
        assert!(never_started.end(SOON));
        for is_well in [true, false] {
            let watchdog = Arc::new(Watchdog::default());
            let (sender, reports) = channel();
            watchdog.start(Report(sender, is_well)).unwrap();
            let fails = || Err(Fault("no memory".to_string()));
            assert!(watchdog.during(1, Instant::now() + SOON, fails).is_err());
            let start = Instant::now();
            assert!(watchdog.end(SOON));
            assert!(start.elapsed() < SOON / 2);
            assert!(reports.try_recv().is_err());
        }
    }

    #[test]
    fn a_group_that_ends_does_not_wait_for_what_hangs() {
        let watchdog = Arc::new(Watchdog::default());
        let (sender, reports) = channel();
        watchdog.start(Report(sender, true)).unwrap();
        let of_worker = watchdog.clone();
        let (release, released) = channel::<()>();
        let (begun, has_begun) = channel();
        let worker = std::thread::spawn(move || {
            of_worker.during(1, Instant::now() + Duration::from_secs(3600), || {
                let _ = begun.send(());
                let _ = released.recv();
                Err(Fault("aborted".to_string()))
            })
        });
        has_begun.recv().unwrap();
        assert!(watchdog.end(Duration::from_millis(100)));
        assert!(reports.try_recv().is_err());
        drop(release);
        assert!(worker.join().unwrap().is_err());
    }
}
