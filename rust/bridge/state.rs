//! Saves, loads and corrects the state that gradients carry between steps.

use super::group::{Group, read_momentum};
use super::{milliseconds, types};
use crate::codec::quantizer::Stepping;
use crate::error::{Error, Result};
use crate::gradients::{BucketState, Method};

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

    pub(super) fn bucket_state(&self, number: u32, timeout_ms: u64) -> Result<types::BucketState> {
        self.guard(|| {
            let BucketState { step, residual, velocity, sizes } =
                self.0.engine.bucket_state(number, milliseconds(timeout_ms))?;
            Ok(types::BucketState { step, residual, velocity, sizes })
        })
    }

    pub(super) fn load_bucket(
        &self,
        number: u32,
        state: types::BucketState,
        timeout_ms: u64,
    ) -> Result<()> {
        self.guard(|| {
            let types::BucketState { step, residual, velocity, sizes } = state;
            let state = BucketState { step, residual, velocity, sizes };
            self.0.engine.load_bucket(number, state, milliseconds(timeout_ms))
        })
    }

    pub(super) fn set_momentum(&self, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()> {
        self.guard(|| {
            self.0.engine.set_momentum(read_momentum(factor, nesterov), milliseconds(timeout_ms))
        })
    }

    /// `stepping` is empty if it is not known.
    pub(super) fn set_stepping(&self, stepping: &str, timeout_ms: u64) -> Result<()> {
        self.guard(|| {
            let stepping = match stepping {
                "" => None,
                name => Some(Stepping::from_name(name).ok_or_else(|| {
                    Error::Operation(format!("gflow: {name:?} is no way to step"))
                })?),
            };
            self.0.engine.set_stepping(stepping, milliseconds(timeout_ms))
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

    pub(super) fn record_step(&self, skipped: bool, factor: f32, timeout_ms: u64) -> Result<()> {
        self.guard(|| self.0.engine.record_step(skipped, factor, milliseconds(timeout_ms)))
    }
}
