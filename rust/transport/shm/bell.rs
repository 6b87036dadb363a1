//! The bell: how a rank sleeps until another rank of its host has got somewhere.
//!
//! It lies in shared memory. A waiter looks for a while, then says that it sleeps, looks once more
//! and sleeps on a futex; whoever changes what it looks at rings. A ring is never lost: either the
//! ringer sees the sleeper, or the sleeper's last look sees the change. A rank that is not asleep
//! costs the ringer one load and no system call.

use super::futex::Futex;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{fence, relax};
use std::time::{Duration, Instant};

/// Every value is valid, so memory that is all zeros is a bell.
#[repr(C)]
pub struct Bell {
    strokes: Futex,
    sleeping: AtomicU32,
}

/// How long a rank looks before it sleeps.
#[derive(Debug, Clone, Copy)]
pub enum Patience {
    /// The other has a core of its own: it is worth looking for about this long.
    Spin(Duration),
    /// There are more ranks than cores: the other runs only if this one does not.
    Yield,
}

/// Between two looks at the clock, which costs more than a look at memory.
const LOOKS_PER_CLOCK: u32 = 32;
/// A yield costs about a microsecond if nobody else wants the core.
const YIELDS: u32 = 4;

impl Bell {
    #[cfg(test)]
    fn new() -> Bell {
        Bell { strokes: Futex::new(0), sleeping: AtomicU32::new(0) }
    }

    /// Returns true once `ready` is, false if it was not within about `limit`.
    pub fn wait(&self, patience: Patience, limit: Duration, ready: impl Fn() -> bool) -> bool {
        if ready() || patience.looks(&ready) {
            return true;
        }
        self.sleep_unless(limit, &ready)
    }

    fn sleep_unless(&self, limit: Duration, ready: &impl Fn() -> bool) -> bool {
        let heard = self.strokes.load();
        self.sleeping.store(1, Ordering::Relaxed);
        // Pairs with the fence in `ring`: of "I sleep" and "it changed", one is seen by the other.
        fence(Ordering::SeqCst);
        let mut is_ready = ready();
        if !is_ready {
            self.strokes.sleep_while(heard, limit);
            is_ready = ready();
        }
        self.sleeping.store(0, Ordering::Relaxed);
        is_ready
    }

    /// Wakes the rank that this bell belongs to, if it sleeps. Call it after the change.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) != 0 {
            self.strokes.bump_and_wake();
        }
    }
}

impl Patience {
    /// For `ranks` ranks on a host where this process may use `cores` cores.
    pub fn for_ranks(ranks: usize, cores: usize) -> Patience {
        // Long enough for a peer that is at the same work; short enough to be no load.
        const SPIN: Duration = Duration::from_micros(40);
        if ranks <= cores { Patience::Spin(SPIN) } else { Patience::Yield }
    }

    /// Looks until `ready` or until patience ends.
    fn looks(self, ready: &impl Fn() -> bool) -> bool {
        match self {
            Patience::Spin(limit) => {
                let start = Instant::now();
                while start.elapsed() < limit {
                    for _ in 0..LOOKS_PER_CLOCK {
                        if ready() {
                            return true;
                        }
                        relax();
                    }
                }
                false
            }
            Patience::Yield => (0..YIELDS).any(|_| {
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
        let (bell, changed) = (Bell::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                changed.store(1, Ordering::Release);
                bell.ring();
            });
            let ready = || changed.load(Ordering::Acquire) == 1;
            while !bell.wait(Patience::Yield, Duration::from_secs(5), ready) {}
            assert!(ready());
        });
    }

    #[test]
    fn a_wait_for_what_never_comes_ends_at_its_limit() {
        let bell = Bell::new();
        let patience = Patience::Spin(Duration::from_micros(5));
        assert!(!bell.wait(patience, Duration::from_millis(5), || false));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::atomic::AtomicU64;
    use loom::sync::Arc;

    /// In the model a sleep has no limit: a ring that gets lost is a deadlock, which loom reports.
    #[test]
    fn no_ring_is_lost() {
        loom::model(|| {
            let shared = Arc::new((Bell::new(), AtomicU64::new(0)));
            let ringer = shared.clone();
            let other = loom::thread::spawn(move || {
                ringer.1.store(1, Ordering::Release);
                ringer.0.ring();
            });
            let (bell, changed) = &*shared;
            let ready = || changed.load(Ordering::Acquire) == 1;
            while !bell.sleep_unless(Duration::MAX, &ready) {}
            other.join().unwrap();
        });
    }

    #[test]
    fn two_ringers_wake_a_rank_that_waits_for_both() {
        loom::model(|| {
            let shared = Arc::new((Bell::new(), AtomicU64::new(0), AtomicU64::new(0)));
            let ringers: Vec<_> = (0..2)
                .map(|which| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || {
                        let counter = if which == 0 { &shared.1 } else { &shared.2 };
                        counter.store(1, Ordering::Release);
                        shared.0.ring();
                    })
                })
                .collect();
            let (bell, first, second) = &*shared;
            let ready =
                || first.load(Ordering::Acquire) == 1 && second.load(Ordering::Acquire) == 1;
            while !bell.sleep_unless(Duration::MAX, &ready) {}
            ringers.into_iter().for_each(|ringer| ringer.join().unwrap());
        });
    }
}
