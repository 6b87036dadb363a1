//! How the user wants gradients to be compressed between hosts. It is the same on every rank of a group
//! and never changes, so all ranks draw the same conclusions from it.

use crate::codec::{Momentum, Schedule, Wire};
use crate::simd::element::Element;
use std::fmt;

/// DDP rebuilds its buckets after the first step, or with a static graph after the second. An exchange
/// before that must not leave a residual: its bucket is never seen again.
const STEPS_UNTIL_STABLE: u64 = 2;

/// A velocity that is cleared this rarely loses a twentieth of the momentum's effect.
const BUILD_UPS_UNTIL_OLD: f64 = 16.0;

#[derive(Debug, Clone, Copy)]
pub struct CompressionConfig {
    pub schedule: Schedule,
    /// Elements in a chunk.
    pub chunk: usize,
    pub wire: Wire,
    /// Gradients of this many bytes go into one exchange; 0 fuses nothing.
    pub fusion_bytes: usize,
}

/// How a bucket is exchanged in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Treatment {
    /// This fraction of its chunks is sent, rounded to the type of the wire.
    Compressed {
        density: f64,
    },
    Exact(WhyExact),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyExact {
    /// The group compresses nothing.
    Off,
    /// Its elements cannot be compressed.
    ElementType,
    /// The schedule begins with exact steps.
    WarmUp,
}

impl fmt::Display for WhyExact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyExact::Off => "compression is off",
            WhyExact::ElementType => "its element type is never compressed",
            WhyExact::WarmUp => "it is warming up",
        })
    }
}

/// A notice for the user: how gradients are treated from the first compressed bucket on.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressionStarted {
    pub hosts: usize,
    /// The fraction of chunks that is sent, after the ramp.
    pub density: f64,
    pub ramp_steps: u64,
    pub wire: Wire,
    /// Bytes of the gradients for each byte that is sent, after the ramp.
    pub ratio: f64,
}

impl CompressionConfig {
    /// How a bucket of this type is exchanged in this step.
    pub fn treatment(&self, step: u64, element: Element) -> Treatment {
        if !can_be_compressed(element) {
            return Treatment::Exact(WhyExact::ElementType);
        }
        match self.schedule.density_at(step).filter(|_| step >= STEPS_UNTIL_STABLE) {
            Some(density) => Treatment::Compressed { density },
            None => Treatment::Exact(WhyExact::WarmUp),
        }
    }

    /// Whether a chunk that is sent loses its velocity (momentum factor masking). A velocity needs some
    /// `1 / (1 - factor)` steps to build up. A chunk that is sent about as often would lose most of its
    /// momentum, and train as with a smaller learning rate; one that waits for much longer has a velocity
    /// that is out of date when it is sent.
    pub fn clears_velocity(&self, density: f64, momentum: Momentum) -> bool {
        let build_up_steps = 1.0 / (1.0 - f64::from(momentum.factor)).max(f64::MIN_POSITIVE);
        1.0 / density >= BUILD_UPS_UNTIL_OLD * build_up_steps
    }

    /// The notice for gradients of this type.
    pub fn started(&self, hosts: usize, element: Element) -> CompressionStarted {
        let Schedule { density, ramp_steps, .. } = self.schedule;
        let ratio = element.bytes() as f64 / (density * self.wire.element_bytes() as f64);
        CompressionStarted { hosts, density, ramp_steps, wire: self.wire, ratio }
    }
}

/// Whether buckets of this type can be compressed; others are always exchanged exactly.
pub fn can_be_compressed(element: Element) -> bool {
    matches!(element, Element::F32 | Element::F16 | Element::BF16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_velocity_is_cleared_only_where_it_is_much_older_than_it_takes_to_build_up() {
        let schedule = Schedule { density: 0.1, warmup_steps: 2, ramp_steps: 0 };
        let config = CompressionConfig { schedule, chunk: 1, wire: Wire::F16, fusion_bytes: 0 };
        let clears = |density: f64, factor: f32| {
            config.clears_velocity(density, Momentum { factor, nesterov: false })
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
