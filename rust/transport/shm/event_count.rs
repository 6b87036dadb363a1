//! An event count in shared memory: how a rank sleeps until another rank of its host makes progress.
//!
//! A waiter spins for a while, announces that it sleeps, looks once more and sleeps on a futex; a
//! rank that changes the condition notifies it. No notification is lost: either the notifier sees
//! the sleeper, or the sleeper's last look sees the change. Notifying a rank that is awake costs
//! one load and no system call.

use super::futex::Futex;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{fence, relax};
use std::time::{Duration, Instant};

/// Every value is valid, so zeroed memory is an event count.
#[repr(C)]
pub struct EventCount {
    /// Moves on with every wake-up.
    epoch: Futex,
    sleeping: AtomicU32,
}

/// What a rank does before it sleeps.
#[derive(Debug, Clone, Copy)]
pub enum SpinPolicy {
    /// The peer has a core of its own: spin for about this long.
    Spin(Duration),
    /// There are more ranks than cores: the peer runs only if this one yields.
    Yield,
}

/// Spins between two readings of the clock, which cost more than a load.
const SPINS_PER_CLOCK: u32 = 32;
/// A yield costs about a microsecond if nothing else wants the core.
const YIELDS: u32 = 4;

impl EventCount {
    #[cfg(test)]
    fn new() -> EventCount {
        EventCount { epoch: Futex::new(0), sleeping: AtomicU32::new(0) }
    }

    /// Returns true once `ready` does, false after about `limit`.
    pub fn wait(&self, spin_policy: SpinPolicy, limit: Duration, ready: impl Fn() -> bool) -> bool {
        if ready() || spin_policy.spin(&ready) {
            return true;
        }
        self.sleep_unless(limit, &ready)
    }

    fn sleep_unless(&self, limit: Duration, ready: &impl Fn() -> bool) -> bool {
        let seen = self.epoch.load();
        self.sleeping.store(1, Ordering::Relaxed);
        // Pairs with the fence in `notify`: either the notifier sees that this rank sleeps, or
        // this rank sees the change.
        fence(Ordering::SeqCst);
        let mut is_ready = ready();
        if !is_ready {
            self.epoch.sleep_while(seen, limit);
            is_ready = ready();
        }
        self.sleeping.store(0, Ordering::Relaxed);
        is_ready
    }

    /// Wakes the rank that waits here, if it sleeps. Call it after the change.
    pub fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) != 0 {
            self.epoch.bump_and_wake();
        }
    }
}

impl SpinPolicy {
    /// For `ranks` ranks on a host where this process may use `cores` cores.
    pub fn for_ranks(ranks: usize, cores: usize) -> SpinPolicy {
        // Long enough for a peer that does the same work, short enough to waste little.
        const SPIN: Duration = Duration::from_micros(40);
        if ranks <= cores { SpinPolicy::Spin(SPIN) } else { SpinPolicy::Yield }
    }

    /// Returns whether `ready` came true before it was time to sleep.
    fn spin(self, ready: &impl Fn() -> bool) -> bool {
        match self {
            SpinPolicy::Spin(limit) => {
                let start = Instant::now();
                while start.elapsed() < limit {
                    for _ in 0..SPINS_PER_CLOCK {
                        if ready() {
                            return true;
                        }
                        relax();
                    }
                }
                false
            }
            SpinPolicy::Yield => (0..YIELDS).any(|_| {
                std::thread::yield_now();
                ready()
            }),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_wait_ends_when_the_change_comes_and_not_before() {
        let (event_count, changed) = (EventCount::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                changed.store(1, Ordering::Release);
                event_count.notify();
            });
            let ready = || changed.load(Ordering::Acquire) == 1;
            while !event_count.wait(SpinPolicy::Yield, Duration::from_secs(5), ready) {}
            assert!(ready());
        });
    }

    #[test]
    fn a_wait_for_what_never_comes_ends_at_its_limit() {
        let event_count = EventCount::new();
        let spin_policy = SpinPolicy::Spin(Duration::from_micros(5));
        assert!(!event_count.wait(spin_policy, Duration::from_millis(5), || false));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::atomic::AtomicU64;
    use loom::sync::Arc;

    /// A sleep has no limit here, so a lost notification is a deadlock, which loom reports.
    #[test]
    fn no_notification_is_lost() {
        loom::model(|| {
            let shared = Arc::new((EventCount::new(), AtomicU64::new(0)));
            let notifier = shared.clone();
            let other = loom::thread::spawn(move || {
                notifier.1.store(1, Ordering::Release);
                notifier.0.notify();
            });
            let (event_count, changed) = &*shared;
            let ready = || changed.load(Ordering::Acquire) == 1;
            while !event_count.sleep_unless(Duration::MAX, &ready) {}
            other.join().unwrap();
        });
    }

    #[test]
    fn two_notifiers_wake_a_rank_that_waits_for_both() {
        loom::model(|| {
            let shared = Arc::new((EventCount::new(), AtomicU64::new(0), AtomicU64::new(0)));
            let notifiers: Vec<_> = (0..2)
                .map(|which| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || {
                        let counter = if which == 0 { &shared.1 } else { &shared.2 };
                        counter.store(1, Ordering::Release);
                        shared.0.notify();
                    })
                })
                .collect();
            let (event_count, first, second) = &*shared;
            let ready =
                || first.load(Ordering::Acquire) == 1 && second.load(Ordering::Acquire) == 1;
            while !event_count.sleep_unless(Duration::MAX, &ready) {}
            notifiers.into_iter().for_each(|notifier| notifier.join().unwrap());
        });
    }
}
