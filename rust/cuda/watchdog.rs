//! The watchdog: a thread that looks after what is on a group's streams, because nobody waits there.
//!
//! It ends with its group. Whatever goes wrong on a device, in NCCL or at another rank, or takes longer
//! than its deadline, is reported once; then the communicators are aborted, so that no kernel waits for
//! a rank that will not come. Where all is well to the end, they are left in order. It sleeps, and asks
//! neither the driver nor NCCL nor the group for anything while somebody who puts things on streams could
//! wait for it.

use super::safe::communicator::{
    CALL_TIMEOUT, Communicator, FINALIZE_TIMEOUT, close_in_background,
};
use super::safe::event::Event;
use super::sys::fault::{Fault, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often it looks while something is under way.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The same while somebody waits for what is under way.
const LOOK_EAGERLY: Duration = Duration::from_millis(1);
/// How long the end of the communicators is waited for: leaving in order, and if that fails an abort,
/// which waits for calls first, and NCCL for its threads. What takes longer is left behind.
const END_LIMIT: Duration = FINALIZE_TIMEOUT.saturating_add(CALL_TIMEOUT.saturating_mul(2));

/// What went wrong with something that was put on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchFailure {
    /// The device or NCCL has failed.
    Fault(Fault),
    /// It was not over at its deadline.
    DeadlineExceeded,
}

/// What the watchdog needs of the group; `T` says what something is.
pub trait WatchdogClient<T>: Send {
    /// Whether all ranks are there and the group is. If not, it has failed when this returns; `oldest`
    /// is what is under way for the longest time.
    fn is_healthy(&mut self, oldest: &T) -> bool;

    /// Fails the group.
    fn fail(&mut self, what: &T, trouble: WatchFailure);
}

/// The end of something on a stream.
pub struct Completion {
    /// What is reached then.
    pub event: Arc<Event>,
    /// What is done then, on the watchdog's thread, unless the group has ended before.
    pub on_complete: Option<Box<dyn FnOnce() + Send>>,
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
    /// How many wait until nothing is under way.
    resting: usize,
    is_running: bool,
    is_to_end: bool,
    /// Something has gone wrong, so communicators are not left in order.
    has_failed: bool,
    /// The thread looks after nothing any more, and ends the communicators.
    is_over: bool,
}

struct UnderWay<T> {
    number: u64,
    what: T,
    deadline: Instant,
    /// `None` until all of it is on the stream.
    end: Option<Completion>,
}

impl<T> UnderWay<T> {
    fn take_then(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        self.end.as_mut()?.on_complete.take()
    }
}

impl<T> Default for Watchdog<T> {
    fn default() -> Self {
        let state = State {
            communicators: Vec::new(),
            under_way: VecDeque::new(),
            next: 0,
            resting: 0,
            is_running: false,
            is_to_end: false,
            has_failed: false,
            is_over: false,
        };
        Watchdog { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T: Clone + Send + 'static> Watchdog<T> {
    /// Starts the thread, if there is none yet. After the end of the group it does nothing.
    pub fn start(self: &Arc<Self>, group: impl WatchdogClient<T> + 'static) -> Result<()> {
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

    /// Takes over a communicator, to look for its errors and to end it with the group: at once, if
    /// that has ended meanwhile.
    pub fn add_communicator(&self, communicator: &Arc<Communicator>) {
        let mut state = self.lock();
        if state.is_to_end && !state.is_running {
            drop(close_in_background([communicator.clone()], Communicator::abort));
            return;
        }
        state.communicators.push(communicator.clone());
    }

    /// Something is about to be put on a stream, with `work`, which returns its end.
    /// It is looked after from before that on: also putting it there may hang. If only a part of it got
    /// there, the group is over, and no rank may wait for the rest: the communicators are aborted.
    pub fn watch(
        &self,
        what: T,
        deadline: Instant,
        work: impl FnOnce() -> Result<Completion>,
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
                (state.is_to_end, state.has_failed) = (true, true);
                self.changed.notify_all();
                Err(fault)
            }
        }
    }

    /// Waits until nothing is under way any more, or the watchdog is over, or the limit is reached.
    pub fn wait_idle(&self, limit: Duration) {
        let is_busy = |state: &mut State<T>| !state.under_way.is_empty() && !state.is_over;
        let mut state = self.lock();
        state.resting += 1;
        self.changed.notify_all();
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, limit, is_busy)
            .unwrap_or_else(PoisonError::into_inner);
        state.resting -= 1;
    }

    /// Ends it with its group: what is under way may still finish within a limit, the rest is aborted. So
    /// is all of a group that `has_failed`; other communicators are left in order. Returns whether the
    /// thread has ended by then.
    pub fn shutdown(&self, limit: Duration, has_failed: bool) -> bool {
        let mut state = self.lock();
        state.is_to_end = true;
        state.has_failed |= has_failed;
        let until = Instant::now() + limit;
        for one in &mut state.under_way {
            one.deadline = one.deadline.min(until);
        }
        self.changed.notify_all();
        // A little longer: it needs time to end the communicators.
        let limit = limit + 10 * LOOK_EVERY + END_LIMIT;
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

    fn look_after(&self, mut group: impl WatchdogClient<T>) {
        let is_in_order = self.look_until_the_end(&mut group);
        let mut state = self.lock();
        (state.is_to_end, state.is_over) = (true, true);
        let is_in_order = is_in_order && !state.has_failed;
        let under_way = std::mem::take(&mut state.under_way);
        drop(state);
        drop(under_way);
        self.changed.notify_all();
        let how = if is_in_order { Communicator::finalize } else { Communicator::abort };
        let mut state = self.lock();
        // Also those that are handed over meanwhile: an end takes time.
        while !state.communicators.is_empty() {
            let communicators = std::mem::take(&mut state.communicators);
            drop(state);
            let _ = close_in_background(communicators, how).recv_timeout(END_LIMIT);
            state = self.lock();
        }
        state.is_running = false;
        self.changed.notify_all();
    }

    /// Returns when nothing is left to look after: whether all that was under way is over.
    fn look_until_the_end(&self, group: &mut impl WatchdogClient<T>) -> bool {
        let mut state = self.lock();
        loop {
            if state.is_to_end && state.under_way.is_empty() {
                return true;
            }
            let Some(oldest) = state.under_way.front().map(|oldest| oldest.what.clone()) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let communicators = state.communicators.clone();
            drop(state);
            if !group.is_healthy(&oldest) {
                return false;
            }
            let fault = communicators
                .iter()
                .find_map(|communicator| communicator.check_async_error().err());
            if let Some((what, trouble)) = self.trouble(fault) {
                // A group that ends by itself has no trouble; there is only nobody left to wait.
                if !self.lock().is_to_end || trouble != WatchFailure::DeadlineExceeded {
                    group.fail(&what, trouble);
                }
                return false;
            }
            let asleep = self.lock();
            let pause = if asleep.resting > 0 { LOOK_EAGERLY } else { LOOK_EVERY };
            let (awake, _) =
                self.changed.wait_timeout(asleep, pause).unwrap_or_else(PoisonError::into_inner);
            state = awake;
        }
    }

    /// Lets go of what is over, and returns what is not well, if anything. `fault` is NCCL's, which does
    /// not say of what: of the oldest that is not over, because everything is done in order.
    fn trouble(&self, mut fault: Option<Fault>) -> Option<(T, WatchFailure)> {
        let mut last = None;
        while let Some(mark) = self.end_of_oldest() {
            match mark.is_complete() {
                Ok(true) => {
                    let then = self.lock().under_way.front_mut().and_then(UnderWay::take_then);
                    if let Some(then) = then {
                        then();
                    }
                    last = self.lock().under_way.pop_front();
                }
                Ok(false) => break,
                Err(of_device) => {
                    fault.get_or_insert(of_device);
                    break;
                }
            }
        }
        let mut state = self.lock();
        if state.under_way.is_empty() {
            self.changed.notify_all();
        }
        let is_late = |oldest: &UnderWay<T>| oldest.deadline <= Instant::now();
        let trouble = match fault {
            Some(fault) => WatchFailure::Fault(fault),
            None if state.under_way.front().is_some_and(is_late) => WatchFailure::DeadlineExceeded,
            None => return None,
        };
        state.under_way.pop_front().or(last).map(|one| (one.what, trouble))
    }

    /// Only this thread takes anything from the front that was put on its stream.
    fn end_of_oldest(&self) -> Option<Arc<Event>> {
        self.lock().under_way.front()?.end.as_ref().map(|end| end.event.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    struct DeviceReport(Sender<(u32, WatchFailure)>, bool);

    impl WatchdogClient<u32> for DeviceReport {
        fn is_healthy(&mut self, _oldest: &u32) -> bool {
            self.1
        }

        fn fail(&mut self, what: &u32, trouble: WatchFailure) {
            let _ = self.0.send((*what, trouble));
        }
    }

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn what_hangs_while_it_is_put_on_a_stream_is_reported_at_its_deadline() {
        let watchdog = Arc::new(Watchdog::default());
        let (sender, reports) = channel();
        watchdog.start(DeviceReport(sender, true)).unwrap();
        let hangs = || {
            assert_eq!(reports.recv_timeout(SOON).unwrap(), (7, WatchFailure::DeadlineExceeded));
            Err(Fault("aborted".to_string()))
        };
        let deadline = Instant::now() + Duration::from_millis(50);
        assert_eq!(watchdog.watch(7, deadline, hangs), Err(Fault("aborted".to_string())));
        assert!(watchdog.shutdown(SOON, false));
    }

    #[test]
    fn it_ends_at_once_with_a_group_that_has_nothing_under_way_or_was_lost() {
        let never_started = Watchdog::<u32>::default();
        assert!(never_started.shutdown(SOON, false));
        for is_healthy in [true, false] {
            let watchdog = Arc::new(Watchdog::default());
            let (sender, reports) = channel();
            watchdog.start(DeviceReport(sender, is_healthy)).unwrap();
            let fails = || Err(Fault("no memory".to_string()));
            assert!(watchdog.watch(1, Instant::now() + SOON, fails).is_err());
            let start = Instant::now();
            assert!(watchdog.shutdown(SOON, false));
            assert!(start.elapsed() < SOON / 2);
            assert!(reports.try_recv().is_err());
        }
    }

    #[test]
    fn a_group_that_ends_does_not_wait_for_what_hangs() {
        let watchdog = Arc::new(Watchdog::default());
        let (sender, reports) = channel();
        watchdog.start(DeviceReport(sender, true)).unwrap();
        let of_worker = watchdog.clone();
        let (release, released) = channel::<()>();
        let (begun, has_begun) = channel();
        let worker = std::thread::spawn(move || {
            of_worker.watch(1, Instant::now() + Duration::from_secs(3600), || {
                let _ = begun.send(());
                let _ = released.recv();
                Err(Fault("aborted".to_string()))
            })
        });
        has_begun.recv().unwrap();
        assert!(watchdog.shutdown(Duration::from_millis(100), false));
        assert!(reports.try_recv().is_err());
        drop(release);
        assert!(worker.join().unwrap().is_err());
    }
}
