//! Saves, loads and corrects the state that gradients carry between steps, always after every
//! collective submitted so far.

use super::handle::Engine;
use crate::codec::Momentum;
use crate::codec::quantizer::Stepping;
use crate::cuda::Fault;
use crate::error::{Error, Result};
use crate::gradients::{BucketState, Method};
use std::time::Duration;

impl Engine {
    /// The state of a bucket. If it is on a device, waits for the device and checks the peers meanwhile.
    pub fn bucket_state(&self, number: u32, limit: Duration) -> Result<BucketState> {
        self.fence(limit)?;
        // Before locking the core: while it is locked, the watchdog cannot check the peers.
        self.shared.devices.watchdog.wait_idle(limit);
        self.with_gradients(limit, |gradients| gradients.state_of(number, limit))?
            .map_err(|fault| self.device_error("saving what is kept of a bucket", fault))
    }

    /// Replaces the state of a bucket by one that was saved.
    pub fn load_bucket(&self, number: u32, state: BucketState, limit: Duration) -> Result<()> {
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
        self.with_gradients(limit, |gradients| gradients.load(number, state))
    }

    /// Takes the momentum over from the optimizer; `None` gives it back.
    pub fn set_momentum(&self, momentum: Option<Momentum>, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.set_momentum(momentum))
    }

    /// What the optimizer does with gradients; `None` if that is not known.
    pub fn set_stepping(&self, stepping: Option<Stepping>, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.set_stepping(stepping))
    }

    /// What `method="auto"` stands for now; `None` with another method.
    pub fn chosen_method(&self, limit: Duration) -> Result<Option<Method>> {
        self.with_gradients(limit, |gradients| gradients.chosen_method())
    }

    /// Continues with what `method="auto"` stood for when a state was saved.
    pub fn set_chosen_method(&self, method: Method, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.set_chosen_method(method))
    }

    /// Whether exchanges can be undone from now on.
    pub fn keep_for_undo(&self, enabled: bool, limit: Duration) -> Result<()> {
        self.with_gradients(limit, |gradients| gradients.keep_for_undo(enabled))
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
