//! Saves, loads and corrects the state that gradients carry between steps.

use super::group::{Group, read_momentum};
use super::{milliseconds, types};
use crate::codec::quantizer::Stepping;
use crate::error::{Error, Result};
use crate::gradients::{BucketState, Method, ModelLayout, Part};

impl Group {
    /// Drops what is kept of buckets that no longer exist.
    pub(super) fn forget(&self, buckets: &[u32]) -> Result<()> {
        self.guard(|| {
            self.0.engine.forget(buckets);
            Ok(())
        })
    }

    /// The part of a bucket of this size that this rank carries to other hosts.
    pub(super) fn shard_of(&self, bytes: usize) -> Result<types::ByteRange> {
        self.guard(|| {
            let range = self.0.shard_of(bytes);
            Ok(types::ByteRange { start: range.start, end: range.end })
        })
    }

    /// In a group that has failed: the newest state after at most `step` exchanges.
    pub(super) fn bucket_state(
        &self,
        number: u32,
        step: u64,
        timeout_ms: u64,
    ) -> Result<types::BucketState> {
        self.guard(|| {
            let BucketState { step, residual, velocity, sizes } =
                self.0.engine.bucket_state(number, step, milliseconds(timeout_ms))?;
            Ok(types::BucketState { step, residual, velocity, sizes })
        })
    }

    pub(super) fn load_bucket(
        &self,
        number: u32,
        state: types::BucketState,
        owes: bool,
        timeout_ms: u64,
    ) -> Result<()> {
        self.guard(|| {
            let types::BucketState { step, residual, velocity, sizes } = state;
            let state = BucketState { step, residual, velocity, sizes };
            self.0.engine.load_bucket(number, state, owes, milliseconds(timeout_ms))
        })
    }

    pub(super) fn set_momentum(&self, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()> {
        self.guard(|| {
            self.0.engine.set_momentum(read_momentum(factor, nesterov), milliseconds(timeout_ms))
        })
    }

    /// `stepping` is empty if it is not known. Without `buckets` it is that of all.
    pub(super) fn set_stepping(
        &self,
        stepping: &str,
        buckets: &[u32],
        timeout_ms: u64,
    ) -> Result<()> {
        self.guard(|| {
            let stepping = match stepping {
                "" => None,
                name => Some(Stepping::from_name(name).ok_or_else(|| {
                    Error::Operation(format!("gflow: {name:?} is no way to step"))
                })?),
            };
            self.0.engine.set_stepping(buckets, stepping, milliseconds(timeout_ms))
        })
    }

    /// What "auto" stands for now; empty with another method.
    pub(super) fn chosen_method(&self, timeout_ms: u64) -> Result<String> {
        self.guard(|| {
            let method = self.0.engine.chosen_method(milliseconds(timeout_ms))?;
            Ok(method.map(|method| method.to_string()).unwrap_or_default())
        })
    }

    pub(super) fn set_chosen_method(&self, method: &str, timeout_ms: u64) -> Result<()> {
        self.guard(|| {
            let method = Method::from_name(method).ok_or_else(|| {
                Error::Operation(format!("gflow: {method:?} is no method of compression"))
            })?;
            self.0.engine.set_chosen_method(method, milliseconds(timeout_ms))
        })
    }

    pub(super) fn keep_for_undo(&self, enabled: bool, timeout_ms: u64) -> Result<()> {
        self.guard(|| self.0.engine.keep_for_undo(enabled, milliseconds(timeout_ms)))
    }

    /// Where the parameters of a model are. The slices have an entry for each of those that are in a
    /// bucket: its bucket, its index, and how many elements it has, in the order of the buckets.
    pub(super) fn add_layout(
        &self,
        parameters: usize,
        buckets: &[u32],
        indices: &[u32],
        numels: &[u64],
    ) -> Result<()> {
        self.guard(|| {
            let mut parts: Vec<Part> = Vec::new();
            for ((bucket, index), numel) in buckets.iter().zip(indices).zip(numels) {
                let before = parts.last().filter(|part| part.bucket == *bucket);
                let start = before.map_or(0, |part| part.elements.end);
                let elements = start..start + usize::try_from(*numel).unwrap_or(0);
                parts.push(Part { bucket: *bucket, parameter: *index as usize, elements });
            }
            self.0.engine.add_layout(ModelLayout { parameters, parts })
        })
    }

    pub(super) fn keep_last_step(&self, timeout_ms: u64) -> Result<()> {
        self.guard(|| self.0.engine.keep_last_step(milliseconds(timeout_ms)))
    }

    pub(super) fn record_step(&self, skipped: bool, factor: f32, timeout_ms: u64) -> Result<()> {
        self.guard(|| self.0.engine.record_step(skipped, factor, milliseconds(timeout_ms)))
    }
}
