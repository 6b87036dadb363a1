//! Counts what a group has done. Counters only grow, and counting never blocks.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub struct Counters {
    gradient_buckets: AtomicU64,
    gradient_bytes: AtomicU64,
    exact_tensors: AtomicU64,
    exact_bytes: AtomicU64,
    by_kind: Vec<AtomicU64>,
}

/// What one successful collective adds to the counters.
#[derive(Debug, Clone, Copy)]
pub struct CollectiveCount {
    /// Index of its kind in the caller's list of kinds.
    pub kind: usize,
    pub is_gradient: bool,
    pub tensors: u64,
    pub bytes: u64,
}

/// A snapshot of the counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    pub gradient_buckets: u64,
    pub gradient_bytes: u64,
    pub exact_tensors: u64,
    pub exact_bytes: u64,
    /// Collectives completed, by index of kind.
    pub by_kind: Vec<u64>,
}

impl Counters {
    /// For collectives of `kinds` kinds.
    pub fn new(kinds: usize) -> Counters {
        Counters {
            gradient_buckets: AtomicU64::new(0),
            gradient_bytes: AtomicU64::new(0),
            exact_tensors: AtomicU64::new(0),
            exact_bytes: AtomicU64::new(0),
            by_kind: (0..kinds).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub fn count(&self, collective: CollectiveCount) {
        let add = |counter: &AtomicU64, amount: u64| {
            counter.fetch_add(amount, Ordering::Relaxed);
        };
        if collective.is_gradient {
            add(&self.gradient_buckets, 1);
            add(&self.gradient_bytes, collective.bytes);
        } else {
            add(&self.exact_tensors, collective.tensors);
            add(&self.exact_bytes, collective.bytes);
        }
        add(&self.by_kind[collective.kind], 1);
    }

    pub fn snapshot(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            gradient_buckets: read(&self.gradient_buckets),
            gradient_bytes: read(&self.gradient_bytes),
            exact_tensors: read(&self.exact_tensors),
            exact_bytes: read(&self.exact_bytes),
            by_kind: self.by_kind.iter().map(read).collect(),
        }
    }
}
