//! Groups of operations that fail, panic, block and hang: how each ends, and how the group does.

use crate::collective::call::tests::all_reduce;
use crate::collective::call::{Call, CollectiveKind, View};
use crate::collective::fabric::tests::fabrics;
use crate::collective::span::Memory;
use crate::engine::Engine;
use crate::engine::lifecycle::{DRAIN_LIMIT, STOP_LIMIT};
use crate::engine::operation::Operation;
use crate::engine::shared::Gradients;
use crate::error::{Error, Result};
use crate::sync::lock;
use crate::transport::interrupt::Interrupt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::time::Instant;

/// A call that the inner backend carries out.
fn gather(numel: u64) -> Call {
    let call = all_reduce(numel);
    Call { view: View { kind: CollectiveKind::Gather, ..call.view }, ..call }
}

type Body = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// An operation for tests: runs `body`, then reports its outcome.
struct Probe {
    body: Body,
    /// What `notify` does, if there is a "Future".
    callback: Option<Box<dyn Fn() + Send + Sync>>,
    completed: Mutex<Option<Sender<std::result::Result<(), String>>>>,
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

    fn complete(&self, error: Option<&Error>) -> bool {
        let Some(completed) = lock(&self.completed).take() else { return false };
        let outcome = error.map_or(Ok(()), |error| Err(error.to_string()));
        let _ = completed.send(outcome);
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
    let completed = Mutex::new(Some(sender));
    (Arc::new(Probe { body, callback, completed, breaks_connection }), outcome)
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
            let gradients = Gradients::new(None, None);
            Engine::start("test", labels.clone(), fabric, None, gradients, interrupt).unwrap()
        })
        .collect()
}

fn outcome(receiver: &Outcome) -> std::result::Result<(), String> {
    receiver.recv_timeout(Duration::from_secs(10)).expect("completed within 10 s")
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
    let (operation, completed) = probe(move || note());
    assert_eq!(engine.submit_and_wait(gather(4), operation).unwrap(), 1);
    // Complete when the call returns.
    assert_eq!(completed.try_recv(), Ok(Ok(())));
    assert_eq!(ran_on.recv().unwrap(), here);

    let (release, released) = channel::<()>();
    let released = Mutex::new(released);
    let (slow, slow_completed) = probe(move || {
        let _ = lock(&released).recv_timeout(Duration::from_secs(10));
        Ok(())
    });
    engine.submit(gather(4), slow).unwrap();
    let (operation, completed) = probe(move || note_thread());
    assert_eq!(engine.submit_and_wait(gather(4), operation).unwrap(), 3);
    assert!(completed.try_recv().is_err());
    release.send(()).unwrap();
    assert_eq!(outcome(&slow_completed), Ok(()));
    assert_eq!(outcome(&completed), Ok(()));
    assert_ne!(ran_on.recv().unwrap(), here);
}

#[test]
fn a_panic_in_an_operation_is_an_error_and_the_engine_lives_long_enough_to_say_so() {
    let engine = engines(1).remove(0);
    let (operation, completed) = probe(|| panic!("an unlucky number"));
    engine.submit(gather(4), operation).unwrap();
    let text = outcome(&completed).unwrap_err();
    assert!(text.contains("an unlucky number") && text.contains("bug in gflow"), "{text}");
    let (operation, _completed) = probe(|| Ok(()));
    // Nobody knows what a panic left behind, so the group has failed, with that reason.
    let later = engine.submit(gather(4), operation).map(|_| ()).map_err(|e| e.to_string());
    assert!(later.is_err() || outcome(&_completed).is_err());
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
    let (second, second_completed) = probe(|| Ok(()));
    let second_completed = Mutex::new(second_completed);
    let (waited, has_waited) = channel();
    let (first, _) = with_callback(move || {
        let _ = waited.send(outcome(&lock(&second_completed)));
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
    // The last one submitted is the only one that doesn't wait for another.
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
    let (aside, aside_completed) = probe(move || {
        let _ = lock(&is_never).recv();
        Ok(())
    });
    stuck.submit_aside(aside).unwrap();
    stuck.abort("aborted by a test");
    assert!(outcome(&running).unwrap_err().contains("aborted by a test"));
    assert!(outcome(&aside_completed).unwrap_err().contains("aborted by a test"));
    let (late, _) = probe(|| Ok(()));
    assert!(stuck.submit_aside(late).is_err());
    drop((release, never));
}

#[test]
fn a_group_that_was_aborted_at_rest_tells_its_peers_why_and_one_that_ended_that_it_left() {
    let lost = |end: fn(&Engine)| {
        let engines = engines(2);
        end(&engines[1]);
        let (operation, completed) = probe(|| Ok(()));
        engines[0].submit(gather(4), operation).unwrap();
        outcome(&completed).unwrap_err()
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
    let (operation, completed) = probe(|| Ok(()));
    engine.submit(gather(4), operation).unwrap();
    let start = Instant::now();
    drop(engine);
    assert!(start.elapsed() < DRAIN_LIMIT + STOP_LIMIT + Duration::from_secs(5));
    assert!(outcome(&completed).unwrap_err().contains("was destroyed"));
}

#[test]
fn closing_lets_a_collective_finish_that_its_peer_is_about_to_join() {
    let mut engines = engines(2);
    let late = engines.pop().unwrap();
    let early = engines.pop().unwrap();
    let (operation, completed) = probe(|| Ok(()));
    early.submit(gather(4), operation).unwrap();
    let closing = std::thread::spawn(move || drop(early));
    std::thread::sleep(Duration::from_millis(100));
    let (operation, _) = probe(|| Ok(()));
    late.submit(gather(4), operation).unwrap();
    assert_eq!(outcome(&completed), Ok(()));
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
    let (operation, completed) = new_probe(Box::new(breaking), None, true);
    survivor.submit(gather(4), operation).unwrap();
    let text = outcome(&completed).unwrap_err();
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
        fn complete(&self, error: Option<&Error>) -> bool {
            self.0.complete(error)
        }
        fn notify(&self) {
            self.0.notify()
        }
    }
    let (sender, completed) = channel();
    let probe_of = Probe {
        body: Box::new(|| Ok(())),
        callback: None,
        completed: Mutex::new(Some(sender)),
        breaks_connection: false,
    };
    waiting.submit(gather(4), Arc::new(Endless(probe_of))).unwrap();
    let failing = || Err(Error::Operation("no memory".into()));
    let (operation, _) = new_probe(Box::new(failing), None, true);
    giving_up.submit(gather(4), operation).unwrap();
    let text = outcome(&completed).unwrap_err();
    assert!(text.contains("lost rank 1") && text.contains("no memory"), "{text}");
}

#[test]
fn a_fence_waits_for_what_was_submitted_and_for_no_longer_than_its_limit() {
    let engines = engines(2);
    let mut outcomes = Vec::new();
    for engine in &engines {
        let (operation, completed) = probe(|| {
            std::thread::sleep(Duration::from_millis(50));
            Ok(())
        });
        engine.submit(gather(4), operation).unwrap();
        outcomes.push(completed);
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
    let (operation, completed) = with_callback(move || {
        std::thread::sleep(Duration::from_millis(200));
        let _ = finished.send(());
    });
    engine.submit(gather(4), operation).unwrap();
    outcome(&completed).unwrap();
    engine.close();
    assert_eq!(is_finished.try_recv(), Ok(()));
}

#[test]
fn after_a_peer_is_lost_every_later_collective_says_so() {
    let mut engines = engines(2);
    drop(engines.pop());
    let survivor = engines.pop().unwrap();
    let (operation, completed) = probe(|| Ok(()));
    survivor.submit(gather(4), operation).unwrap();
    let first = outcome(&completed).unwrap_err();
    assert!(first.contains("lost rank 1"), "{first}");
    let (operation, _) = probe(|| Ok(()));
    let mut later = survivor.submit(gather(4), operation).map_err(|e| e.to_string());
    while later.is_ok() {
        // The queue is closed right after the first one is complete.
        let (operation, _) = probe(|| Ok(()));
        later = survivor.submit(gather(4), operation).map_err(|e| e.to_string());
    }
    assert_eq!(later.unwrap_err(), first);
}
