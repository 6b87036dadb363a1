//! A counter in shared memory that one rank advances and the others read.
//!
//! A rank that sees a value also sees everything that the owner wrote before it. Nothing else
//! orders the memory accesses of one rank after those of another.

use crate::sync::atomic::{AtomicU64, Ordering};

/// Every value is valid, so zeroed memory is a counter at 0.
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    #[cfg(all(test, loom))]
    fn new() -> Counter {
        Counter(AtomicU64::new(0))
    }

    /// Only the owner may call this, and values never decrease.
    pub fn advance_to(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    pub fn has_reached(&self, value: u64) -> bool {
        self.0.load(Ordering::Acquire) >= value
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::relax;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    /// Two ranks swap three messages through two slots each, as `SharedRegion` does. loom fails if
    /// a slot is written while the other rank may still read it.
    #[test]
    fn two_slots_are_enough_for_swaps_in_a_row() {
        struct Rank {
            posted: Counter,
            slots: [UnsafeCell<u64>; 2],
        }
        let rank =
            || Rank { posted: Counter::new(), slots: [UnsafeCell::new(0), UnsafeCell::new(0)] };
        let swap = |own: &Rank, other: &Rank, rounds: u64| {
            for round in 0..rounds {
                let slot = (round % 2) as usize;
                own.slots[slot].with_mut(|message| {
                    // SAFETY: loom checks that nothing reads it now.
                    unsafe { *message = round + 1 }
                });
                own.posted.advance_to(round + 1);
                while !other.posted.has_reached(round + 1) {
                    relax();
                }
                // SAFETY: loom checks that nothing writes it now.
                let message = other.slots[slot].with(|message| unsafe { *message });
                assert_eq!(message, round + 1);
            }
        };
        loom::model(move || {
            let ranks = Arc::new([rank(), rank()]);
            let second = ranks.clone();
            let thread = loom::thread::spawn(move || swap(&second[1], &second[0], 3));
            swap(&ranks[0], &ranks[1], 3);
            thread.join().unwrap();
        });
    }
}
