//! The method: how gradients are exchanged between hosts, as the user has set it. It is the same on
//! every rank of a group and never changes, so all ranks draw the same conclusions from it.

use crate::codec::{Momentum, Schedule, Wire};
use crate::simd::element::Element;

/// DDP rebuilds its buckets after the first step, or with a static graph after the second. What is
/// exchanged before that must leave nothing behind: its bucket is never seen again.
const STEPS_UNTIL_SETTLED: u64 = 2;

/// Clearing a velocity this rarely costs a twentieth of what the momentum does in all.
const BUILD_UPS_UNTIL_OLD: f64 = 16.0;

#[derive(Debug, Clone)]
pub struct Method {
    pub schedule: Schedule,
    /// Elements in a chunk.
    pub chunk: usize,
    pub wire: Wire,
    /// Gradients of this many bytes go into one exchange; 0 fuses nothing.
    pub fusion_bytes: usize,
}

impl Method {
    /// The fraction of its chunks that a bucket sends in this step; `None` while all of it is
    /// exchanged exactly.
    pub fn density_at(&self, step: u64) -> Option<f64> {
        if step < STEPS_UNTIL_SETTLED {
            return None;
        }
        self.schedule.density_at(step)
    }

    /// Whether what is sent takes its velocity along (momentum factor masking). A velocity needs
    /// some `1 / (1 - factor)` steps to build up. A chunk that is sent about as often would lose
    /// most of its momentum by that, and train as with a smaller learning rate; one that waits for
    /// much longer has a velocity that is old by the time it is sent.
    pub fn clears_velocity(&self, density: f64, momentum: Momentum) -> bool {
        let build_up_steps = 1.0 / (1.0 - f64::from(momentum.factor)).max(f64::MIN_POSITIVE);
        1.0 / density >= BUILD_UPS_UNTIL_OLD * build_up_steps
    }

    /// What it does, for the person whose gradients these are.
    pub fn in_words(&self, hosts: usize, element: Element) -> String {
        let Schedule { density, ramp_steps, .. } = self.schedule;
        let ratio = element.bytes() as f64 / (density * self.wire.element_bytes() as f64);
        let when = match ramp_steps {
            0 => String::new(),
            steps => format!(" after a ramp of {steps} steps"),
        };
        format!(
            "from this step on gradients are compressed between the {hosts} hosts: the most \
             important {}% of their chunks are sent{when}, as {}, and the rest is kept and sent \
             later: about {ratio:.0}x fewer bytes. All other tensors stay exact. To switch it off: \
             GFLOW_COMPRESS=off, or pg_options=gflow.Options(compress=\"off\")",
            percent(density),
            self.wire.name(),
        )
    }
}

/// A fraction as a percentage, without digits that say nothing.
fn percent(fraction: f64) -> f64 {
    (fraction * 1e6).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_velocity_is_cleared_only_where_it_is_much_older_than_it_takes_to_build_up() {
        let schedule = Schedule { density: 0.1, warmup_steps: 2, ramp_steps: 0 };
        let method = Method { schedule, chunk: 1, wire: Wire::F16, fusion_bytes: 0 };
        let clears = |density: f64, factor: f32| {
            method.clears_velocity(density, Momentum { factor, nesterov: false })
        };
        for (density, factor, expected) in [
            (1.0, 0.9, false),
            (0.1, 0.9, false),
            (0.01, 0.9, false),
            (0.005, 0.9, true),
            (0.001, 0.99, false),
            (0.0005, 0.99, true),
            (0.1, 0.5, false),
            (0.02, 0.5, true),
            (1e-9, 1.0, false),
        ] {
            assert_eq!(clears(density, factor), expected, "density {density}, momentum {factor}");
        }
    }
}
