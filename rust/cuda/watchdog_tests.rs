//! The watchdog without a GPU: deadlines, failures and the end of a group.

use super::{Fault, WatchFailure, Watchdog, WatchdogClient};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

struct TestGroup {
    failures: Sender<(u32, WatchFailure)>,
    is_healthy: bool,
}

impl WatchdogClient<u32> for TestGroup {
    fn is_healthy(&mut self, _oldest: &u32) -> bool {
        self.is_healthy
    }

    fn fail(&mut self, work: &u32, failure: WatchFailure) {
        let _ = self.failures.send((*work, failure));
    }
}

const SOON: Duration = Duration::from_secs(10);

#[test]
fn what_hangs_while_it_is_put_on_a_stream_is_reported_at_its_deadline() {
    let watchdog = Arc::new(Watchdog::default());
    let (failures, failed) = channel();
    watchdog.start(TestGroup { failures, is_healthy: true }).unwrap();
    let hangs = || {
        assert_eq!(failed.recv_timeout(SOON).unwrap(), (7, WatchFailure::DeadlineExceeded));
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
        let (failures, failed) = channel();
        watchdog.start(TestGroup { failures, is_healthy }).unwrap();
        let fails = || Err(Fault("no memory".to_string()));
        assert!(watchdog.watch(1, Instant::now() + SOON, fails).is_err());
        let start = Instant::now();
        assert!(watchdog.shutdown(SOON, false));
        assert!(start.elapsed() < SOON / 2);
        assert!(failed.try_recv().is_err());
    }
}

#[test]
fn a_group_that_ends_does_not_wait_for_what_hangs() {
    let watchdog = Arc::new(Watchdog::default());
    let (failures, failed) = channel();
    watchdog.start(TestGroup { failures, is_healthy: true }).unwrap();
    let for_worker = watchdog.clone();
    let (release, released) = channel::<()>();
    let (started, has_started) = channel();
    let worker = std::thread::spawn(move || {
        for_worker.watch(1, Instant::now() + Duration::from_secs(3600), || {
            let _ = started.send(());
            let _ = released.recv();
            Err(Fault("aborted".to_string()))
        })
    });
    has_started.recv().unwrap();
    assert!(watchdog.shutdown(Duration::from_millis(100), false));
    assert!(failed.try_recv().is_err());
    drop(release);
    assert!(worker.join().unwrap().is_err());
}
