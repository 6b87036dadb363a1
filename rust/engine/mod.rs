//! The engine of a group: a queue, one worker thread, a courier for gradients that cross hosts, and
//! hands for what may block.
//!
//! `submit` never blocks, unless the caller asks to wait. Whatever is submitted is settled exactly
//! once, by whoever ran it, by `abort` or by `close`. Nothing here may wait without a bound for a
//! thread that may be stuck.

pub mod devices;
mod front;
pub mod group;
mod hands;
pub mod operation;
pub mod queue;
mod state;
mod watched;
mod worker;

use crate::collective::call::{Call, CollectiveKind};
use crate::collective::fabric::Fabric;
use crate::error::{Error, Result};
use crate::gradients::{Courier, Gradients};
use crate::observe::counters::{Counters, Counts};
use crate::observe::gradient_counters::{GradientCounters, GradientCounts};
use crate::observe::overlap::{OverlapTimer, OverlapTimes};
use crate::simd::element::Element;
use crate::transport::interrupt::Interrupt;
use crate::transport::{Failure, Watch};
use devices::{Arrival, Devices, Obstacle};
use front::Front;
use hands::Hands;
use operation::Operation;
use queue::Queue;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use watched::WatchedGroup;

/// How long `close` lets operations finish that were submitted before it. Enough for a peer that
/// is a little behind; a peer that never comes must not keep a program from ending.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// How long `close` then waits for the worker to see that it was interrupted.
const STOP_LIMIT: Duration = Duration::from_secs(1);
/// How long after a failure a peer's end may still become known. All connections of a process end
/// together, so this only has to cover the time between two packets.
const LOSS_LIMIT: Duration = Duration::from_millis(100);
/// How long the end of the interpreter waits for callbacks of the user that run.
const CALLBACK_LIMIT: Duration = Duration::from_secs(30);

pub struct Engine {
    shared: Arc<Shared>,
    interrupt: Arc<Interrupt>,
    /// Threads do not survive a fork, so a child must not wait for them.
    process: u32,
    closed: AtomicBool,
}

/// What the worker and the callers share.
struct Shared {
    queue: Queue,
    /// Locked by whoever runs a collective; the queue sees to it that this is one at a time.
    front: Mutex<Front>,
    labels: Vec<String>,
    rank: usize,
    counters: Counters,
    overlap: OverlapTimer,
    gradient_counters: Arc<GradientCounters>,
    devices: Arc<Devices>,
    /// Buckets that are gone, until the worker has let go of what is kept of them.
    gone: Mutex<Vec<u32>>,
    /// What the user is to be told once, until somebody has told it.
    announcement: Mutex<Announcement>,
    hands: Arc<Hands>,
    activity: Mutex<Activity>,
    /// Told of every change of `activity` that somebody may wait for.
    changed: Condvar,
}

impl Activity {
    /// Whether a collective up to this number is not over.
    fn is_pending(&self, newest: u64) -> bool {
        self.finished < newest || self.begun.first().is_some_and(|first| *first <= newest)
    }
}

#[derive(Default)]
enum Announcement {
    #[default]
    NotYet,
    Due(String),
    Done,
}

/// What is going on besides the queue.
#[derive(Default)]
struct Activity {
    worker_ended: bool,
    /// The collective that the worker is at, and every operation that runs aside.
    running: Vec<Arc<dyn Operation>>,
    /// Futures that are being completed, callbacks included.
    notifying: usize,
    /// The number of the last collective that is over.
    finished: u64,
    /// Those that have begun and are not: a gradient that is held back ends after later ones.
    begun: BTreeSet<u64>,
}

/// Set when the interpreter is about to end: a callback must not be started any more.
static NO_MORE_CALLBACKS: AtomicBool = AtomicBool::new(false);

impl Engine {
    /// Starts the worker. `labels` name the ranks of the group in messages.
    pub fn start(
        name: &str,
        labels: Vec<String>,
        fabric: Fabric,
        mut gradients: Gradients,
        interrupt: Arc<Interrupt>,
    ) -> Result<Engine> {
        let ring = fabric.shared_ring();
        let devices: Arc<Devices> = Arc::default();
        gradients.use_devices(devices.clone());
        let gradient_counters = gradients.counters().clone();
        let rank = fabric.rank();
        let shared = Arc::new(Shared {
            queue: Queue::default(),
            front: Mutex::new(Front { fabric, gradients }),
            labels,
            rank,
            counters: Counters::new(CollectiveKind::ALL.len()),
            overlap: OverlapTimer::default(),
            gradient_counters,
            devices,
            gone: Mutex::default(),
            announcement: Mutex::default(),
            hands: Arc::default(),
            activity: Mutex::default(),
            changed: Condvar::new(),
        });
        if let Some(ring) = ring {
            let watch = WhileTheWorkerRests(Arc::downgrade(&shared), interrupt.clone());
            shared.front().gradients.employ(Courier::new(ring, Box::new(watch)));
        }
        let seen_by_worker = shared.clone();
        std::thread::Builder::new()
            .name(format!("gflow-{name}"))
            .spawn(move || {
                worker::serve(&seen_by_worker);
                seen_by_worker.activity().worker_ended = true;
                seen_by_worker.changed.notify_all();
            })
            .map_err(|error| Error::Connect(format!("could not start a thread: {error}")))?;
        let process = std::process::id();
        Ok(Engine { shared, interrupt, process, closed: AtomicBool::new(false) })
    }

    /// Makes a device ready for collectives whose tensors are there. `stream` is the raw handle of a
    /// stream there, on which the engine puts its part, and which stays valid as long as the group. What
    /// keeps this rank from using the device is told to all ranks, by the first collective there.
    pub fn open_device(&self, device: i32, stream: u64) -> Result<()> {
        self.check_usable()?;
        let group = WatchedGroup::new(&self.shared, &self.interrupt);
        self.shared.devices.open(device, stream, group);
        Ok(())
    }

    /// Queues a collective and returns its number in the group.
    pub fn submit(&self, mut call: Call, operation: Arc<dyn Operation>) -> Result<u64> {
        let arrival = self.arrive(&mut call)?;
        if call.gradient {
            self.shared.overlap.begin(Instant::now());
        }
        let is_gradient = call.gradient;
        let pushed = self.shared.queue.push(call, operation, arrival);
        if is_gradient && pushed.is_err() {
            self.shared.overlap.end(Instant::now());
        }
        pushed
    }

    /// The same for a caller that waits for the outcome anyway: if nothing else runs, the
    /// collective runs on the caller's thread, which saves waking another twice.
    pub fn submit_and_wait(&self, mut call: Call, operation: Arc<dyn Operation>) -> Result<u64> {
        let arrival = self.arrive(&mut call)?;
        match self.shared.queue.take_or_push(call, operation, arrival)? {
            Ok(job) => {
                let seq = job.seq;
                worker::run(&self.shared, job);
                Ok(seq)
            }
            Err(seq) => Ok(seq),
        }
    }

    /// For tensors on a device: notes what the caller has put on its stream there so far, and which of
    /// this rank's devices it is.
    fn arrive(&self, call: &mut Call) -> Result<Option<Box<Arrival>>> {
        self.refuse_forks()?;
        let Some(at) = call.on_device else { return Ok(None) };
        // First: why a group has failed is better to know than what its device says since.
        self.shared.queue.check_open()?;
        match self.shared.devices.arrive(at) {
            Ok(arrival) => {
                call.view.device_slot = arrival.lane.slot;
                Ok(Some(Box::new(arrival)))
            }
            Err(Obstacle::Refused(error)) => Err(error),
            Err(Obstacle::Unable { lane, error }) => {
                call.view.device_slot = lane;
                call.complain_of(&error);
                Ok(None)
            }
        }
    }

    /// The backward pass is over: gradients that are held back are exchanged, and somebody waits
    /// for them.
    pub fn end_of_pass(&self) {
        self.shared.overlap.backward_ended(Instant::now());
        self.shared.queue.push_flush();
    }

    /// Somebody waits for a gradient that may be held back.
    pub fn flush(&self) {
        self.shared.queue.push_flush();
    }

    /// What the user is to be told, if anything, and only once.
    pub fn announcement(&self) -> Option<String> {
        let mut announcement = lock(&self.shared.announcement);
        match std::mem::replace(&mut *announcement, Announcement::Done) {
            Announcement::Due(text) => Some(text),
            other => {
                *announcement = other;
                None
            }
        }
    }

    /// Does something with what is kept of the gradients, between two steps: after all that was
    /// submitted is over, or an error says why that takes too long.
    pub fn with_gradients<T>(
        &self,
        limit: Duration,
        action: impl FnOnce(&mut Gradients) -> T,
    ) -> Result<T> {
        self.fence(limit)?;
        let outcome = action(&mut self.shared.front().gradients);
        // A group that has failed meanwhile has aborted its exchanges: what was read is no result.
        self.check_usable()?;
        Ok(outcome)
    }

    /// These buckets are gone: nothing needs to be kept of them.
    pub fn forget(&self, buckets: &[u32]) {
        lock(&self.shared.gone).extend_from_slice(buckets);
        if let Ok(mut front) = self.shared.front.try_lock() {
            self.shared.forget_what_is_gone(&mut front);
        }
        // Else whoever works with it does that next time.
    }

    /// Runs an operation that is no collective, aside from the queue: a send or a receive.
    pub fn submit_aside(&self, operation: Arc<dyn Operation>) -> Result<()> {
        self.shared.begin(&operation);
        // After `begin`, so that whoever closes the group meanwhile settles it or is seen here.
        if let Err(error) = self.check_usable() {
            self.shared.end(&operation);
            return Err(error);
        }
        let shared = self.shared.clone();
        self.shared.hands.hand_over(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| operation.finish()))
                .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
            shared.settle(&operation, outcome.err().as_ref());
            shared.end(&operation);
        });
        Ok(())
    }

    /// Fails with the reason if this group cannot be used, or not from this process.
    pub fn check_usable(&self) -> Result<()> {
        self.refuse_forks()?;
        self.shared.queue.check_open()
    }

    /// Waits until every collective submitted so far is over.
    pub fn fence(&self, limit: Duration) -> Result<()> {
        self.check_usable()?;
        self.flush();
        let newest = self.seq();
        let pending = |activity: &mut Activity| activity.is_pending(newest);
        let (activity, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.activity(), limit, pending)
            .unwrap_or_else(PoisonError::into_inner);
        let (is_pending, finished) = (activity.is_pending(newest), activity.finished);
        drop(activity);
        self.check_usable()?;
        if !is_pending {
            return Ok(());
        }
        let finished = finished.min(newest - 1);
        Err(Error::TimedOut {
            missing: vec![format!("the collectives #{} to #{newest} before it", finished + 1)],
            doing: "waiting for the collectives before".to_string(),
            waited: limit,
        })
    }

    /// The name of this rank in messages.
    pub fn label(&self) -> &str {
        self.shared.labels.get(self.shared.rank).map_or("", String::as_str)
    }

    /// The number of the newest collective, 0 before the first.
    pub fn seq(&self) -> u64 {
        self.shared.queue.seq()
    }

    pub fn counts(&self) -> Counts {
        self.shared.counters.snapshot()
    }

    /// What the exchange of gradients has cost.
    pub fn gradient_counts(&self) -> (GradientCounts, OverlapTimes) {
        (self.shared.gradient_counters.snapshot(), self.shared.overlap.times())
    }

    /// Fails everything that is pending and everything that comes, at once.
    pub fn abort(&self, why: &str) {
        // Before the worker is woken, so that the waiting get this reason and no other.
        self.shared.fail(&Error::Closed(why.to_string()));
        self.interrupt.raise();
    }

    /// Ends the group: collectives that were submitted may still finish, within a bound; then
    /// everything is aborted. Called again it does nothing.
    pub fn close(&self) {
        if self.refuse_forks().is_err() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let why = "the process group was destroyed";
        self.shared.queue.close(Error::Closed(why.to_string()));
        let drained = self.is_at_rest_within(DRAIN_LIMIT);
        // What is on the devices may still finish too; a thread that hangs in NCCL is released by it.
        let limit = if drained { DRAIN_LIMIT } else { STOP_LIMIT };
        self.shared.devices.watchdog.shutdown(limit, !drained || self.shared.has_failed());
        // Also when drained: a message that has no peer is still pending.
        self.abort(&format!("{why} while this operation was pending"));
        if !drained {
            // A thread stuck in an operation is left behind: it owns all that it uses.
            self.is_at_rest_within(STOP_LIMIT);
        }
    }

    /// For the end of the interpreter: closes the group, starts no more callbacks, and waits for
    /// those that run, because one that goes on after the end would take the process down.
    pub fn close_for_good(&self) {
        if self.refuse_forks().is_err() {
            return;
        }
        self.close();
        NO_MORE_CALLBACKS.store(true, Ordering::Release);
        self.is_at_rest_within(CALLBACK_LIMIT);
    }

    fn is_at_rest_within(&self, limit: Duration) -> bool {
        // A callback that closes its own group must not wait for itself.
        let own = usize::from(self.shared.hands.include_this_thread());
        let busy = |activity: &mut Activity| !activity.worker_ended || activity.notifying > own;
        let (mut activity, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.activity(), limit, busy)
            .unwrap_or_else(PoisonError::into_inner);
        !busy(&mut activity)
    }

    fn refuse_forks(&self) -> Result<()> {
        let now = std::process::id();
        if self.process == now {
            return Ok(());
        }
        Err(Error::Closed(format!(
            "this process group belongs to process {}, and this is its fork {now}: make a new \
             group here",
            self.process
        )))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Tells whoever waits for `operation` that it is over.
    fn settle(self: &Arc<Self>, operation: &Arc<dyn Operation>, error: Option<&Error>) {
        if !operation.settle(error) || NO_MORE_CALLBACKS.load(Ordering::Acquire) {
            return;
        }
        self.activity().notifying += 1;
        let (shared, operation) = (self.clone(), operation.clone());
        self.hands.hand_over(move || {
            let _ = catch_unwind(AssertUnwindSafe(|| operation.notify()));
            shared.activity().notifying -= 1;
            shared.changed.notify_all();
        });
    }

    /// Takes no more operations and settles all that are pending with `error`.
    fn fail(self: &Arc<Self>, error: &Error) {
        self.queue.fail(error.clone());
        for job in self.queue.drain() {
            self.settle(&job.operation, Some(error));
            self.activity().finished = job.seq;
        }
        let running = self.activity().running.clone();
        for operation in running {
            self.settle(&operation, Some(error));
        }
        self.changed.notify_all();
    }

    /// Whether everything fails since.
    fn has_failed(&self) -> bool {
        self.queue.failure().is_some()
    }

    fn begin(&self, operation: &Arc<dyn Operation>) {
        self.activity().running.push(operation.clone());
    }

    fn begin_collective(&self, seq: u64, operation: &Arc<dyn Operation>) {
        self.activity().begun.insert(seq);
        self.begin(operation);
    }

    fn end(&self, operation: &Arc<dyn Operation>) {
        self.activity().running.retain(|other| !Arc::ptr_eq(other, operation));
    }

    fn end_collective(&self, seq: u64, operation: &Arc<dyn Operation>) {
        self.end(operation);
        let mut activity = self.activity();
        activity.begun.remove(&seq);
        activity.finished = activity.finished.max(seq);
        drop(activity);
        self.changed.notify_all();
    }

    /// Everything that a collective needs. After a panic the group is over, but its peers must
    /// still be told.
    fn front(&self) -> MutexGuard<'_, Front> {
        let mut front = lock(&self.front);
        self.forget_what_is_gone(&mut front);
        front
    }

    fn forget_what_is_gone(&self, front: &mut Front) {
        front.gradients.forget(&std::mem::take(&mut *lock(&self.gone)));
    }

    /// Has the user told once that gradients are compressed from now on, by the first rank.
    fn announce(&self, fabric: &Fabric, gradients: &Gradients, element: Element) {
        let mut announcement = lock(&self.announcement);
        if let (Announcement::NotYet, Some(method)) = (&*announcement, gradients.method()) {
            *announcement = match fabric.rank() {
                0 => Announcement::Due(method.in_words(fabric.topology().hosts(), element)),
                _ => Announcement::Done,
            };
        }
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        lock(&self.activity)
    }
}

/// What is locked here is valid after every statement, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks after the peers for the courier whenever the worker does not; while the worker is at
/// something, it does that itself, and stops the courier if need be.
struct WhileTheWorkerRests(Weak<Shared>, Arc<Interrupt>);

impl Watch for WhileTheWorkerRests {
    fn check(&mut self) -> std::result::Result<(), Failure> {
        if self.1.is_raised() {
            return Err(Failure::Interrupted);
        }
        let Some(shared) = self.0.upgrade() else { return Err(Failure::Interrupted) };
        match shared.front.try_lock() {
            Ok(mut front) => front.fabric.check(),
            Err(TryLockError::Poisoned(_)) => Err(Failure::Interrupted),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod gradient_tests;
#[cfg(test)]
mod whole_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::call::View;
    use crate::collective::call::tests::all_reduce;
    use crate::collective::fabric::tests::fabrics;
    use crate::collective::span::Memory;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    /// A call that the inner backend carries out.
    fn gather(numel: u64) -> Call {
        let call = all_reduce(numel);
        Call { view: View { kind: CollectiveKind::Gather, ..call.view }, ..call }
    }

    type Body = Box<dyn Fn() -> Result<()> + Send + Sync>;

    /// An operation for tests: runs `body`, then reports how it was settled.
    struct Probe {
        body: Body,
        /// What `notify` does, if there is a "Future".
        callback: Option<Box<dyn Fn() + Send + Sync>>,
        settled: Mutex<Option<Sender<std::result::Result<(), String>>>>,
        breaks_connection: bool,
    }

    impl Operation for Probe {
        fn prepare(&self) -> Result<()> {
            Ok(())
        }

        fn open(&self) -> Result<Memory> {
            Err(Error::Operation("a probe has no tensors".into()))
        }

        fn start(&self, done: Arc<Interrupt>) -> Result<()> {
            done.raise();
            Ok(())
        }

        fn finish(&self) -> Result<()> {
            (self.body)()
        }

        fn broke_connection(&self) -> bool {
            self.breaks_connection
        }

        fn settle(&self, error: Option<&Error>) -> bool {
            let Some(settled) = lock(&self.settled).take() else { return false };
            let outcome = error.map_or(Ok(()), |error| Err(error.to_string()));
            let _ = settled.send(outcome);
            self.callback.is_some()
        }

        fn notify(&self) {
            if let Some(callback) = &self.callback {
                callback();
            }
        }
    }

    type Outcome = Receiver<std::result::Result<(), String>>;

    fn new_probe(
        body: Body,
        callback: Option<Box<dyn Fn() + Send + Sync>>,
        breaks_connection: bool,
    ) -> (Arc<Probe>, Outcome) {
        let (sender, outcome) = channel();
        let settled = Mutex::new(Some(sender));
        (Arc::new(Probe { body, callback, settled, breaks_connection }), outcome)
    }

    fn probe(body: impl Fn() -> Result<()> + Send + Sync + 'static) -> (Arc<Probe>, Outcome) {
        new_probe(Box::new(body), None, false)
    }

    fn with_callback(callback: impl Fn() + Send + Sync + 'static) -> (Arc<Probe>, Outcome) {
        new_probe(Box::new(|| Ok(())), Some(Box::new(callback)), false)
    }

    fn engines(size: usize) -> Vec<Engine> {
        let labels: Vec<_> = (0..size).map(|rank| format!("rank {rank}")).collect();
        fabrics(size)
            .into_iter()
            .map(|(fabric, interrupt)| {
                Engine::start("test", labels.clone(), fabric, Gradients::new(None, None), interrupt)
                    .unwrap()
            })
            .collect()
    }

    fn outcome(receiver: &Outcome) -> std::result::Result<(), String> {
        receiver.recv_timeout(Duration::from_secs(10)).expect("settled within 10 s")
    }

    #[test]
    fn collectives_run_in_program_order_and_are_counted() {
        let engines = engines(2);
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut outcomes = Vec::new();
        for number in 1..=20u64 {
            for engine in &engines {
                let order = order.clone();
                let (operation, outcome) = probe(move || {
                    lock(&order).push(number);
                    Ok(())
                });
                assert_eq!(engine.submit(gather(4), operation).unwrap(), number);
                outcomes.push(outcome);
            }
        }
        assert!(outcomes.iter().all(|o| outcome(o) == Ok(())));
        // Neither rank can start number n + 1 before both have agreed on it, after n.
        assert!(lock(&order).windows(3).all(|w| w[0] <= w[2]));
        assert_eq!(engines[0].counts().exact_tensors, 20);
        assert_eq!(engines[0].counts().exact_bytes, 20 * 16);
    }

    #[test]
    fn who_waits_anyway_runs_the_collective_itself_unless_another_runs() {
        let engine = engines(1).remove(0);
        let here = std::thread::current().id();
        let (sender, ran_on) = channel();
        let sender = Mutex::new(sender);
        let note_thread = move || {
            let _ = lock(&sender).send(std::thread::current().id());
            Ok(())
        };
        let note_thread = Arc::new(note_thread);
        let note = note_thread.clone();
        let (operation, settled) = probe(move || note());
        assert_eq!(engine.submit_and_wait(gather(4), operation).unwrap(), 1);
        // Over when the call returns.
        assert_eq!(settled.try_recv(), Ok(Ok(())));
        assert_eq!(ran_on.recv().unwrap(), here);

        let (release, released) = channel::<()>();
        let released = Mutex::new(released);
        let (slow, slow_settled) = probe(move || {
            let _ = lock(&released).recv_timeout(Duration::from_secs(10));
            Ok(())
        });
        engine.submit(gather(4), slow).unwrap();
        let (operation, settled) = probe(move || note_thread());
        assert_eq!(engine.submit_and_wait(gather(4), operation).unwrap(), 3);
        assert!(settled.try_recv().is_err());
        release.send(()).unwrap();
        assert_eq!(outcome(&slow_settled), Ok(()));
        assert_eq!(outcome(&settled), Ok(()));
        assert_ne!(ran_on.recv().unwrap(), here);
    }

    #[test]
    fn a_panic_in_an_operation_is_an_error_and_the_engine_lives_long_enough_to_say_so() {
        let engine = engines(1).remove(0);
        let (operation, settled) = probe(|| panic!("an unlucky number"));
        engine.submit(gather(4), operation).unwrap();
        let text = outcome(&settled).unwrap_err();
        assert!(text.contains("an unlucky number") && text.contains("bug in gflow"), "{text}");
        let (operation, _settled) = probe(|| Ok(()));
        // Nobody knows what a panic left behind, so the group is over, with that reason.
        let later = engine.submit(gather(4), operation).map(|_| ()).map_err(|e| e.to_string());
        assert!(later.is_err() || outcome(&_settled).is_err());
    }

    #[test]
    fn a_failed_operation_leaves_the_group_usable() {
        let engine = engines(1).remove(0);
        let (failing, failed) = probe(|| Err(Error::Operation("no BAND of floats".into())));
        let (working, worked) = probe(|| Ok(()));
        engine.submit(gather(4), failing).unwrap();
        engine.submit(gather(4), working).unwrap();
        assert_eq!(outcome(&failed), Err("no BAND of floats".into()));
        assert_eq!(outcome(&worked), Ok(()));
    }

    #[test]
    fn a_callback_may_wait_for_a_later_collective_of_its_own_group() {
        let engine = Arc::new(engines(1).remove(0));
        let (second, second_settled) = probe(|| Ok(()));
        let second_settled = Mutex::new(second_settled);
        let (waited, has_waited) = channel();
        let (first, _) = with_callback(move || {
            let _ = waited.send(outcome(&lock(&second_settled)));
        });
        engine.submit(gather(4), first).unwrap();
        engine.submit(gather(4), second).unwrap();
        assert_eq!(has_waited.recv_timeout(Duration::from_secs(10)), Ok(Ok(())));
    }

    #[test]
    fn a_chain_of_callbacks_that_block_each_other_completes() {
        let engine = engines(1).remove(0);
        const DEPTH: usize = 20;
        let (done, is_done) = channel();
        let mut wait_for: Option<Receiver<()>> = None;
        let mut operations = Vec::new();
        for _ in 0..DEPTH {
            let (completed, completion) = channel();
            let waits = Mutex::new(wait_for.replace(completion));
            let done = done.clone();
            let (operation, _) = with_callback(move || {
                if let Some(receiver) = lock(&waits).take() {
                    receiver.recv_timeout(Duration::from_secs(10)).unwrap();
                }
                let _ = completed.send(());
                let _ = done.send(());
            });
            operations.push(operation);
        }
        // The last one submitted is the only one that waits for nobody.
        for operation in operations.into_iter().rev() {
            engine.submit(gather(4), operation).unwrap();
        }
        for _ in 0..DEPTH {
            is_done.recv_timeout(Duration::from_secs(10)).expect("no deadlock");
        }
    }

    #[test]
    fn operations_aside_do_not_wait_for_the_queue_or_for_each_other() {
        let mut engines = engines(2);
        let engine = engines.remove(0);
        let (operation, stuck) = probe(|| Ok(()));
        engine.submit(gather(4), operation).unwrap();
        let (unblock, blocked) = channel::<()>();
        let blocked = Mutex::new(blocked);
        let (receive, received) = probe(move || {
            let _ = lock(&blocked).recv_timeout(Duration::from_secs(10));
            Ok(())
        });
        let unblock = Mutex::new(unblock);
        let (send, sent) = probe(move || {
            let _ = lock(&unblock).send(());
            Ok(())
        });
        engine.submit_aside(receive).unwrap();
        engine.submit_aside(send).unwrap();
        assert_eq!(outcome(&sent), Ok(()));
        assert_eq!(outcome(&received), Ok(()));
        assert!(stuck.try_recv().is_err());
        assert_eq!(engine.seq(), 1);
    }

    #[test]
    fn abort_releases_the_waiting_the_queued_and_the_running_at_once() {
        let mut pair = engines(2);
        let waiting_for_peer = pair.remove(0);
        let (operation, waiting) = probe(|| Ok(()));
        waiting_for_peer.submit(gather(4), operation).unwrap();
        let (operation, queued) = probe(|| Ok(()));
        waiting_for_peer.submit(gather(4), operation).unwrap();
        waiting_for_peer.abort("aborted by a test");
        assert!(outcome(&waiting).unwrap_err().contains("aborted by a test"));
        assert!(outcome(&queued).unwrap_err().contains("aborted by a test"));

        let stuck = engines(1).remove(0);
        let (release, released) = channel::<()>();
        let released = Mutex::new(released);
        let (started, has_started) = channel();
        let (operation, running) = probe(move || {
            let _ = started.send(());
            let _ = lock(&released).recv();
            Ok(())
        });
        stuck.submit(gather(4), operation).unwrap();
        has_started.recv().unwrap();
        let (never, is_never) = channel::<()>();
        let is_never = Mutex::new(is_never);
        let (aside, settled_aside) = probe(move || {
            let _ = lock(&is_never).recv();
            Ok(())
        });
        stuck.submit_aside(aside).unwrap();
        stuck.abort("aborted by a test");
        assert!(outcome(&running).unwrap_err().contains("aborted by a test"));
        assert!(outcome(&settled_aside).unwrap_err().contains("aborted by a test"));
        let (late, _) = probe(|| Ok(()));
        assert!(stuck.submit_aside(late).is_err());
        drop((release, never));
    }

    #[test]
    fn a_group_that_was_aborted_at_rest_tells_its_peers_why_and_one_that_ended_that_it_left() {
        let lost = |end: fn(&Engine)| {
            let engines = engines(2);
            end(&engines[1]);
            let (operation, settled) = probe(|| Ok(()));
            engines[0].submit(gather(4), operation).unwrap();
            outcome(&settled).unwrap_err()
        };
        let text = lost(|engine| engine.abort("its GPU fell off"));
        assert!(text.contains("gave up") && text.contains("its GPU fell off"), "{text}");
        let text = lost(|engine| engine.close());
        assert!(text.contains("left the group") && !text.contains("gave up"), "{text}");
    }

    #[test]
    fn dropping_an_engine_is_bounded_when_its_peer_never_comes() {
        let mut engines = engines(2);
        let engine = engines.remove(0);
        let (operation, settled) = probe(|| Ok(()));
        engine.submit(gather(4), operation).unwrap();
        let start = Instant::now();
        drop(engine);
        assert!(start.elapsed() < DRAIN_LIMIT + STOP_LIMIT + Duration::from_secs(5));
        assert!(outcome(&settled).unwrap_err().contains("was destroyed"));
    }

    #[test]
    fn closing_lets_a_collective_finish_that_its_peer_is_about_to_join() {
        let mut engines = engines(2);
        let late = engines.pop().unwrap();
        let early = engines.pop().unwrap();
        let (operation, settled) = probe(|| Ok(()));
        early.submit(gather(4), operation).unwrap();
        let closing = std::thread::spawn(move || drop(early));
        std::thread::sleep(Duration::from_millis(100));
        let (operation, _) = probe(|| Ok(()));
        late.submit(gather(4), operation).unwrap();
        assert_eq!(outcome(&settled), Ok(()));
        closing.join().unwrap();
    }

    #[test]
    fn an_operation_that_fails_with_its_connection_ends_the_group() {
        let mut engines = engines(2);
        let leaving = Arc::new(Mutex::new(engines.pop()));
        let survivor = engines.pop().unwrap();
        let (operation, _) = probe(|| Ok(()));
        lock(&leaving).as_ref().unwrap().submit(gather(4), operation).unwrap();
        let breaking = move || {
            lock(&leaving).take().unwrap().abort("out of memory");
            Err(Error::Operation("connection reset by 192.0.2.7".into()))
        };
        let (operation, settled) = new_probe(Box::new(breaking), None, true);
        survivor.submit(gather(4), operation).unwrap();
        let text = outcome(&settled).unwrap_err();
        let parts = ["gather of 4 elements", "#1"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        let (late, _) = probe(|| Ok(()));
        assert!(survivor.submit(gather(4), late).is_err());
    }

    #[test]
    fn a_peer_that_gives_up_in_the_middle_releases_the_others_at_once() {
        let mut engines = engines(2);
        let giving_up = engines.pop().unwrap();
        let waiting = engines.pop().unwrap();
        /// An operation that the inner backend never finishes.
        struct Endless(Probe);
        impl Operation for Endless {
            fn prepare(&self) -> Result<()> {
                self.0.prepare()
            }
            fn open(&self) -> Result<Memory> {
                self.0.open()
            }
            fn start(&self, _done: Arc<Interrupt>) -> Result<()> {
                Ok(())
            }
            fn finish(&self) -> Result<()> {
                self.0.finish()
            }
            fn broke_connection(&self) -> bool {
                false
            }
            fn settle(&self, error: Option<&Error>) -> bool {
                self.0.settle(error)
            }
            fn notify(&self) {
                self.0.notify()
            }
        }
        let (sender, settled) = channel();
        let probe_of = Probe {
            body: Box::new(|| Ok(())),
            callback: None,
            settled: Mutex::new(Some(sender)),
            breaks_connection: false,
        };
        waiting.submit(gather(4), Arc::new(Endless(probe_of))).unwrap();
        let failing = || Err(Error::Operation("no memory".into()));
        let (operation, _) = new_probe(Box::new(failing), None, true);
        giving_up.submit(gather(4), operation).unwrap();
        let text = outcome(&settled).unwrap_err();
        assert!(text.contains("lost rank 1") && text.contains("no memory"), "{text}");
    }

    #[test]
    fn a_fence_waits_for_what_was_submitted_and_for_no_longer_than_its_limit() {
        let engines = engines(2);
        let mut outcomes = Vec::new();
        for engine in &engines {
            let (operation, settled) = probe(|| {
                std::thread::sleep(Duration::from_millis(50));
                Ok(())
            });
            engine.submit(gather(4), operation).unwrap();
            outcomes.push(settled);
        }
        engines[0].fence(Duration::from_secs(10)).unwrap();
        assert_eq!(outcomes[0].try_recv(), Ok(Ok(())));
        let (operation, _) = probe(|| Ok(()));
        engines[0].submit(gather(4), operation).unwrap();
        let error = engines[0].fence(Duration::from_millis(20)).unwrap_err();
        assert!(error.to_string().contains("#2 to #2"), "{error}");
    }

    #[test]
    fn what_was_read_of_gradients_while_the_group_failed_is_an_error() {
        let engine = engines(1).remove(0);
        let limit = Duration::from_secs(10);
        assert_eq!(engine.with_gradients(limit, |_| 7).unwrap(), 7);
        let read = engine.with_gradients(limit, |_| engine.abort("its GPU fell off"));
        assert!(read.unwrap_err().to_string().contains("its GPU fell off"));
    }

    #[test]
    fn closing_waits_for_callbacks_that_run() {
        let engine = engines(1).remove(0);
        let (finished, is_finished) = channel();
        let (operation, settled) = with_callback(move || {
            std::thread::sleep(Duration::from_millis(200));
            let _ = finished.send(());
        });
        engine.submit(gather(4), operation).unwrap();
        outcome(&settled).unwrap();
        engine.close();
        assert_eq!(is_finished.try_recv(), Ok(()));
    }

    #[test]
    fn after_a_peer_is_lost_every_later_collective_says_so() {
        let mut engines = engines(2);
        drop(engines.pop());
        let survivor = engines.pop().unwrap();
        let (operation, settled) = probe(|| Ok(()));
        survivor.submit(gather(4), operation).unwrap();
        let first = outcome(&settled).unwrap_err();
        assert!(first.contains("lost rank 1"), "{first}");
        let (operation, _) = probe(|| Ok(()));
        let mut later = survivor.submit(gather(4), operation).map_err(|e| e.to_string());
        while later.is_ok() {
            // The queue is closed right after the first was settled.
            let (operation, _) = probe(|| Ok(()));
            later = survivor.submit(gather(4), operation).map_err(|e| e.to_string());
        }
        assert_eq!(later.unwrap_err(), first);
    }
}
