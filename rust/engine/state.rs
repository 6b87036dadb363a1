//! Saves, loads and corrects the state that gradients carry between steps, always after every
//! collective submitted so far.

use super::handle::Engine;
use super::shared::Gradients;
use crate::codec::Momentum;
use crate::codec::quantizer::Stepping;
use crate::cuda::{self, Fault};
use crate::error::{Error, Result};
use crate::gradients::{BucketState, Method, ModelLayout};
use std::time::Duration;

/// How long a state is waited for on a device of a group that has failed: it may never come.
const FAILED_DEVICE_LIMIT: Duration = Duration::from_secs(2);

impl Engine {
    /// The state of a bucket. If it is on a device, waits for the device and checks the peers meanwhile.
    /// In a group that has failed: the newest state after at most `step` exchanges, all complete, or the
    /// state as it is if that is not remembered.
    pub fn bucket_state(&self, number: u32, step: u64, limit: Duration) -> Result<BucketState> {
        let error = match self.state_between_steps(number, limit) {
            Err(error) => error,
            Ok(state) => {
                let doing = "saving what is kept of a bucket";
                return state.map_err(|fault| self.device_error(doing, fault));
            }
        };
        let limit = limit.min(FAILED_DEVICE_LIMIT);
        let state = self
            .with_gradients_after_failure(|gradients| gradients.state_until(number, step, limit))?;
        // Why the group failed is worth more than what its device says since.
        state.and_then(cuda::Result::ok).ok_or(error)
    }

    fn state_between_steps(
        &self,
        number: u32,
        limit: Duration,
    ) -> Result<cuda::Result<BucketState>> {
        self.fence(limit)?;
        // Before locking the core: while it is locked, the watchdog cannot check the peers.
        self.shared.devices.watchdog.wait_idle(limit);
        self.with_gradients(limit, |gradients| gradients.state_of(number, limit))
    }

    /// Replaces the state of a bucket by one that was saved. It `owes` if some rank keeps a residual of
    /// it; all ranks say the same.
    pub fn load_bucket(
        &self,
        number: u32,
        state: BucketState,
        owes: bool,
        limit: Duration,
    ) -> Result<()> {
        if state
            .residual
            .iter()
            .chain(&state.velocity)
            .chain(&state.sizes)
            .any(|value| !value.is_finite())
        {
            // It would stay forever, and keep its chunk from ever being sent.
            let what = format!("gflow: the state of bucket {number} has infinity or NaN in it");
            return Err(Error::Operation(what));
        }
        self.with_gradients(limit, |gradients| gradients.load(number, state, owes))
    }

    /// Takes the momentum over from the optimizer; `None` gives it back.
    pub fn set_momentum(&self, momentum: Option<Momentum>, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.set_momentum(momentum))
    }

    /// What the optimizer does with these buckets, or without any with all; `None` if that is not known.
    pub fn set_stepping(
        &self,
        buckets: &[u32],
        stepping: Option<Stepping>,
        limit: Duration,
    ) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.set_stepping(buckets, stepping))
    }

    /// What `method="auto"` stands for now, or stood for when the group failed; `None` with another method.
    pub fn chosen_method(&self, limit: Duration) -> Result<Option<Method>> {
        self.with_gradients(limit, |gradients| gradients.chosen_method()).or_else(|error| {
            let chosen = |gradients: &Gradients| gradients.chosen_method();
            self.with_gradients_after_failure(chosen)?.ok_or(error)
        })
    }

    /// Continues with what `method="auto"` stood for when a state was saved.
    pub fn set_chosen_method(&self, method: Method, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.set_chosen_method(method))
    }

    /// Whether exchanges can be undone from now on.
    pub fn keep_for_undo(&self, enabled: bool, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.keep_for_undo(enabled))
    }

    /// Where the parameters of a model are whose steps may leave some unused.
    pub fn add_layout(&self, layout: ModelLayout) -> Result<()> {
        self.check_usable()?;
        self.shared.core().gradients.add_layout(layout);
        Ok(())
    }

    /// From now on, the state of the last complete step is known even after a failure.
    pub fn keep_last_step(&self, limit: Duration) -> Result<()> {
        self.with_gradients(limit, Gradients::keep_last_step)
    }

    /// The optimizer has made a step, or `skipped` it, and changed the gradients' unit by `factor`.
    pub fn record_step(&self, skipped: bool, factor: f32, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.record_step(skipped, factor))?
            .map_err(|fault| self.device_error("taking note of a step", fault))
    }

    /// The error for a fault of a device outside of any collective.
    fn device_error(&self, doing: &str, fault: Fault) -> Error {
        let rank = self.label().to_string();
        Error::Device { rank, doing: doing.to_string(), reason: fault.0 }
    }
}
