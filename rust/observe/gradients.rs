//! What the exchange of gradients has cost and saved, bucket by bucket and stage by stage. A lock is
//! held for a few additions only, so it can be left on, and read at any time.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The stages of the way of a gradient, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waiting until all ranks have come with the same bucket.
    Agree,
    /// Summing and handing out among the ranks of a host.
    WithinHost,
    /// Adding to what was not sent, and taking the norms.
    Accumulate,
    /// Agreeing on the norms with the other hosts.
    Norms,
    /// Choosing chunks and putting them into the parcel.
    Pack,
    /// Round the ring; the other stages go on meanwhile.
    Wire,
    /// Waiting for what goes round the ring, with nothing else to do.
    Wait,
    /// Putting the sums into the gradients.
    Unpack,
}

impl Stage {
    pub const ALL: [Stage; 8] = [
        Stage::Agree,
        Stage::WithinHost,
        Stage::Accumulate,
        Stage::Norms,
        Stage::Pack,
        Stage::Wire,
        Stage::Wait,
        Stage::Unpack,
    ];

    /// The name that a Python user reads.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Agree => "agree",
            Stage::WithinHost => "within_host",
            Stage::Accumulate => "accumulate",
            Stage::Norms => "norms",
            Stage::Pack => "pack",
            Stage::Wire => "wire",
            Stage::Wait => "wait",
            Stage::Unpack => "unpack",
        }
    }
}

/// One bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BucketCounts {
    /// How often it was exchanged.
    pub steps: u64,
    /// Bytes of gradient, in all exchanges together.
    pub gradient_bytes: u64,
    /// Bytes of the part that this rank carries to other hosts.
    pub carried_bytes: u64,
    /// Bytes that this rank has sent to other hosts.
    pub wire_bytes: u64,
    /// The fraction of its chunks that it sent last time; 1 while it is exchanged exactly.
    pub density: f64,
    /// What stayed behind last time over the gradient of that step, as L1 norms of this rank.
    pub residual_ratio: f64,
}

/// One exchange of one bucket.
#[derive(Debug, Clone, Copy)]
pub struct Exchanged {
    pub bucket: u32,
    pub step: u64,
    pub gradient_bytes: u64,
    pub carried_bytes: u64,
    pub wire_bytes: u64,
    pub density: f64,
    /// `None` if it is not known yet: see [`GradientCounters::weigh`].
    pub residual_ratio: Option<f64>,
}

/// All counters at one moment.
#[derive(Debug, Clone, Default)]
pub struct GradientCounts {
    pub buckets: BTreeMap<u32, BucketCounts>,
    /// The bytes of buckets that are gone, all together.
    pub gone: BucketCounts,
    /// Bytes sent for the norms.
    pub norm_bytes: u64,
    /// Seconds, in the order of [`Stage::ALL`].
    pub seconds: [f64; Stage::ALL.len()],
}

#[derive(Debug, Default)]
pub struct GradientCounters(Mutex<GradientCounts>);

impl GradientCounters {
    /// Does `work`, and counts how long that took.
    pub fn time<T>(&self, stage: Stage, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.add(stage, start.elapsed().as_secs_f64());
        result
    }

    pub fn add(&self, stage: Stage, seconds: f64) {
        self.lock().seconds[stage as usize] += seconds;
    }

    /// Counts bytes of norms that were sent.
    pub fn norms(&self, bytes: u64) {
        self.lock().norm_bytes += bytes;
    }

    pub fn exchanged(&self, one: Exchanged) {
        let mut counts = self.lock();
        let bucket = counts.buckets.entry(one.bucket).or_default();
        bucket.steps = one.step;
        bucket.gradient_bytes += one.gradient_bytes;
        bucket.carried_bytes += one.carried_bytes;
        bucket.wire_bytes += one.wire_bytes;
        bucket.density = one.density;
        bucket.residual_ratio = one.residual_ratio.unwrap_or(bucket.residual_ratio);
    }

    /// Says the [`BucketCounts::residual_ratio`] of an exchange that was counted without it.
    pub fn weigh(&self, bucket: u32, residual_ratio: f64) {
        if let Some(counted) = self.lock().buckets.get_mut(&bucket) {
            counted.residual_ratio = residual_ratio;
        }
    }

    /// These buckets are gone; their bytes still count.
    pub fn forget(&self, buckets: &[u32]) {
        let mut counts = self.lock();
        for number in buckets {
            let Some(bucket) = counts.buckets.remove(number) else { continue };
            counts.gone.gradient_bytes += bucket.gradient_bytes;
            counts.gone.carried_bytes += bucket.carried_bytes;
            counts.gone.wire_bytes += bucket.wire_bytes;
        }
    }

    pub fn now(&self) -> GradientCounts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, GradientCounts> {
        // Valid after every statement, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_counted_under_their_own_name() {
        let counters = GradientCounters::default();
        for (index, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, index);
            counters.add(stage, index as f64);
            counters.add(stage, 1.0);
        }
        let seconds = counters.now().seconds;
        assert!(seconds.iter().enumerate().all(|(i, seconds)| *seconds == i as f64 + 1.0));
    }
}
