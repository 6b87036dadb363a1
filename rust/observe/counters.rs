//! Counters of what a group has done. They only ever grow, and counting never waits for an exchange.

use crate::collective::agreement::Agreed;
use crate::collective::call::{Call, CollectiveKind};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub struct Counters {
    gradient_buckets: AtomicU64,
    gradient_bytes: AtomicU64,
    exact_tensors: AtomicU64,
    exact_bytes: AtomicU64,
    by_kind: [AtomicU64; CollectiveKind::ALL.len()],
}

/// The counters at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    pub gradient_buckets: u64,
    pub gradient_bytes: u64,
    pub exact_tensors: u64,
    pub exact_bytes: u64,
    /// Collectives done, by kind; only kinds that occurred.
    pub by_kind: Vec<(CollectiveKind, u64)>,
}

impl Counters {
    /// Counts a collective that succeeded.
    pub fn count(&self, call: &Call, agreed: &Agreed) {
        let add = |counter: &AtomicU64, amount: u64| {
            counter.fetch_add(amount, Ordering::Relaxed);
        };
        if agreed.gradient {
            add(&self.gradient_buckets, 1);
            add(&self.gradient_bytes, call.bytes);
        } else {
            add(&self.exact_tensors, u64::from(call.view.tensors));
            add(&self.exact_bytes, call.bytes);
        }
        let index = CollectiveKind::ALL.iter().position(|kind| *kind == call.view.kind);
        add(&self.by_kind[index.expect("CollectiveKind::ALL has every kind")], 1);
    }

    pub fn now(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let by_kind = CollectiveKind::ALL.into_iter().zip(self.by_kind.iter().map(read));
        Counts {
            gradient_buckets: read(&self.gradient_buckets),
            gradient_bytes: read(&self.gradient_bytes),
            exact_tensors: read(&self.exact_tensors),
            exact_bytes: read(&self.exact_bytes),
            by_kind: by_kind.filter(|(_, count)| *count > 0).collect(),
        }
    }
}
