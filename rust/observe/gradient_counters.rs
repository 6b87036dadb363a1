//! Costs and savings of the gradient exchange: bytes per bucket, seconds per stage. Cheap enough to
//! be always on: the lock is held for a few additions only.

use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

/// The stages a gradient passes through, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waiting until all ranks have submitted the same bucket.
    Agree,
    /// Reducing and broadcasting among the ranks of a host.
    WithinHost,
    /// Adding the gradient to the residual, and taking norms.
    Accumulate,
    /// Adding up the norms over the hosts.
    Norms,
    /// Selecting chunks and packing them into the parcel.
    Pack,
    /// Going round the ring; overlaps with the other stages.
    Wire,
    /// Adding up what other hosts sent of quantised gradients; a part of `Wire`.
    Sum,
    /// Waiting for the ring with nothing else to do.
    Wait,
    /// Writing the sums into the gradients.
    Unpack,
}

impl Stage {
    pub const ALL: [Stage; 9] = [
        Stage::Agree,
        Stage::WithinHost,
        Stage::Accumulate,
        Stage::Norms,
        Stage::Pack,
        Stage::Wire,
        Stage::Sum,
        Stage::Wait,
        Stage::Unpack,
    ];

    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Agree => "agree",
            Stage::WithinHost => "within_host",
            Stage::Accumulate => "accumulate",
            Stage::Norms => "norms",
            Stage::Pack => "pack",
            Stage::Wire => "wire",
            Stage::Sum => "sum",
            Stage::Wait => "wait",
            Stage::Unpack => "unpack",
        }
    }
}

/// The counters of one bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BucketCounts {
    /// How many times it was exchanged.
    pub steps: u64,
    /// Bytes of gradient, over all exchanges.
    pub gradient_bytes: u64,
    /// Bytes of the shard that this rank carries to other hosts.
    pub carried_bytes: u64,
    /// Bytes sent to other hosts by this rank.
    pub wire_bytes: u64,
    /// The fraction of its chunks sent last time; 1 for an exact exchange.
    pub density: f64,
    /// Last time's unsent residual over the gradient, as L1 norms on this rank.
    pub residual_ratio: f64,
}

/// One exchange of one bucket.
#[derive(Debug, Clone, Copy)]
pub struct BucketExchange {
    pub bucket: u32,
    pub step: u64,
    pub gradient_bytes: u64,
    pub carried_bytes: u64,
    pub wire_bytes: u64,
    /// What it was sent as.
    pub method: &'static str,
    pub density: f64,
    /// `None` if not known yet: see [`GradientCounters::set_residual_ratio`].
    pub residual_ratio: Option<f64>,
}

/// What an audit found: how close what was delivered is to the exact sums.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Certificate {
    pub bucket: u32,
    /// The first step that it is about, and how many they are.
    pub step: u64,
    pub steps: u64,
    /// What the bucket was sent as.
    pub method: &'static str,
    pub cosine: f64,
    pub relative_error: f64,
    /// The variance that was added to the gradient, relative to the gradient's own square.
    pub noise: f64,
    /// The same for the sum of all its steps.
    pub window_cosine: f64,
    pub window_relative_error: f64,
}

/// A snapshot of all counters.
#[derive(Debug, Clone, Default)]
pub struct GradientCounts {
    /// The result of the last audit.
    pub certificate: Option<Certificate>,
    /// What gradients were sent as last; empty before the first exchange.
    pub method: &'static str,
    pub buckets: BTreeMap<u32, BucketCounts>,
    /// The total bytes of retired buckets.
    pub retired: BucketCounts,
    /// Bytes sent for the norms.
    pub norm_bytes: u64,
    /// Seconds per stage, in the order of [`Stage::ALL`].
    pub seconds: [f64; Stage::ALL.len()],
}

#[derive(Debug, Default)]
pub struct GradientCounters(Mutex<GradientCounts>);

impl GradientCounters {
    /// Runs `work` and counts the time it takes.
    pub fn time<T>(&self, stage: Stage, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.add_seconds(stage, start.elapsed().as_secs_f64());
        result
    }

    pub fn add_seconds(&self, stage: Stage, seconds: f64) {
        lock(&self.0).seconds[stage as usize] += seconds;
    }

    /// Counts bytes sent for norms.
    pub fn add_norm_bytes(&self, bytes: u64) {
        lock(&self.0).norm_bytes += bytes;
    }

    pub fn record(&self, one: BucketExchange) {
        let mut counts = lock(&self.0);
        counts.method = one.method;
        let bucket = counts.buckets.entry(one.bucket).or_default();
        bucket.steps = one.step;
        bucket.gradient_bytes += one.gradient_bytes;
        bucket.carried_bytes += one.carried_bytes;
        bucket.wire_bytes += one.wire_bytes;
        bucket.density = one.density;
        bucket.residual_ratio = one.residual_ratio.unwrap_or(bucket.residual_ratio);
    }

    /// Sets the [`BucketCounts::residual_ratio`] of an exchange that was recorded without it.
    pub fn set_residual_ratio(&self, bucket: u32, residual_ratio: f64) {
        if let Some(counted) = lock(&self.0).buckets.get_mut(&bucket) {
            counted.residual_ratio = residual_ratio;
        }
    }

    /// Keeps the result of the last audit.
    pub fn certify(&self, certificate: Certificate) {
        lock(&self.0).certificate = Some(certificate);
    }

    /// Drops buckets that no longer exist; their bytes still count.
    pub fn retire(&self, buckets: &[u32]) {
        let mut counts = lock(&self.0);
        for number in buckets {
            let Some(bucket) = counts.buckets.remove(number) else { continue };
            counts.retired.gradient_bytes += bucket.gradient_bytes;
            counts.retired.carried_bytes += bucket.carried_bytes;
            counts.retired.wire_bytes += bucket.wire_bytes;
        }
    }

    pub fn snapshot(&self) -> GradientCounts {
        lock(&self.0).clone()
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
            counters.add_seconds(stage, index as f64);
            counters.add_seconds(stage, 1.0);
        }
        let seconds = counters.snapshot().seconds;
        assert!(seconds.iter().enumerate().all(|(i, seconds)| *seconds == i as f64 + 1.0));
    }
}
