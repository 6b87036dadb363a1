//! What is kept of gradients between steps: saved, loaded and corrected.

use super::group::Group;
use super::{ffi, guard, milliseconds};
use crate::codec::Momentum;
use crate::collective::hierarchical;
use crate::cuda::Fault;
use crate::error::{Error, Result};
use crate::gradients::State;

pub(super) fn momentum(factor: f32, nesterov: bool) -> Option<Momentum> {
    (factor != 0.0).then_some(Momentum { factor, nesterov })
}

impl Group {
    pub(super) fn forget(&self, buckets: &[u32]) -> Result<()> {
        guard(|| {
            self.engine.forget(buckets);
            Ok(())
        })
    }

    /// The part of a bucket of so many bytes that this rank carries to other hosts.
    pub(super) fn shard_of(&self, bytes: usize) -> Result<ffi::ByteRange> {
        guard(|| {
            let range = hierarchical::shard_range(&self.topology, bytes).unwrap_or(0..0);
            Ok(ffi::ByteRange { start: range.start, end: range.end })
        })
    }

    pub(super) fn bucket_state(&self, number: u32, timeout_ms: u64) -> Result<ffi::BucketState> {
        guard(|| {
            let limit = milliseconds(timeout_ms);
            let state = self.engine.bucket_state(number, limit)?;
            let State { step, residual, velocity } =
                state.map_err(|fault| self.on_device("saving what is kept of a bucket", fault))?;
            Ok(ffi::BucketState { step, residual, velocity })
        })
    }

    pub(super) fn load_bucket(
        &self,
        number: u32,
        state: ffi::BucketState,
        timeout_ms: u64,
    ) -> Result<()> {
        guard(|| {
            let ffi::BucketState { step, residual, velocity } = state;
            if residual.iter().chain(&velocity).any(|number| !number.is_finite()) {
                // It would stay for ever, and keep its chunk from ever being sent.
                let what = format!("gflow: the state of bucket {number} has infinity or NaN in it");
                return Err(Error::Operation(what));
            }
            self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.load(number, State { step, residual, velocity });
            })
        })
    }

    pub(super) fn set_momentum(&self, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()> {
        guard(|| {
            self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.set_momentum(momentum(factor, nesterov));
            })
        })
    }

    pub(super) fn keep_for_undo(&self, is_wanted: bool, timeout_ms: u64) -> Result<()> {
        guard(|| {
            self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.keep_for_undo(is_wanted);
            })
        })
    }

    pub(super) fn take_note_of_step(
        &self,
        skipped: bool,
        factor: f32,
        timeout_ms: u64,
    ) -> Result<()> {
        guard(|| {
            let noted = self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.take_note_of_step(skipped, factor)
            })?;
            noted.map_err(|fault| self.on_device("taking note of a step", fault))
        })
    }

    /// The error for what a device refused, outside of any collective.
    fn on_device(&self, doing: &str, fault: Fault) -> Error {
        let rank = self.engine.label().to_string();
        Error::Device { rank, doing: doing.to_string(), reason: fault.0 }
    }
}
