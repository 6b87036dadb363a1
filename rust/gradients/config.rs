//! How the user wants gradients to be compressed between hosts. It is the same on every rank of a group
//! and never changes, so all ranks draw the same conclusions from it.

use super::auto;
use super::method::{MaxNoise, Method};
use crate::codec::quantizer::{Levels, Quantizer, Stepping};
use crate::codec::{Coding, Momentum, Schedule, Wire};
use crate::simd::element::Element;
use std::fmt;

/// DDP rebuilds its buckets after the first step, or with a static graph after the second. An exchange
/// before that must not leave a residual: its bucket is never seen again.
const STEPS_UNTIL_STABLE: u64 = 2;

/// A velocity that is cleared this rarely loses a twentieth of the momentum's effect.
const BUILD_UPS_UNTIL_OLD: f64 = 16.0;

#[derive(Debug, Clone, Copy)]
pub struct CompressionConfig {
    pub method: Method,
    /// Its density is that of [`Method::Chunks`].
    pub schedule: Schedule,
    /// Elements in a chunk.
    pub chunk: usize,
    /// The format of chunks.
    pub wire: Wire,
    /// Gradients of this many bytes go into one exchange; 0 fuses nothing.
    pub fusion_bytes: usize,
    /// How much noise [`Method::Auto`] may add.
    pub max_noise: MaxNoise,
    /// Steps from one audit to the next; 0 for none.
    pub audit_steps: u64,
    /// Whether the threads of the training job keep all cores of this host busy.
    pub cores_are_busy: bool,
}

/// How a bucket is exchanged in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Treatment {
    Compressed(Coding),
    Exact(WhyExact),
}

impl Treatment {
    /// Whether it differs from another in nothing but the density.
    pub fn is_like(self, other: Treatment) -> bool {
        match (self, other) {
            (
                Treatment::Compressed(Coding::Chunks { .. }),
                Treatment::Compressed(Coding::Chunks { .. }),
            ) => true,
            (one, other) => one == other,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyExact {
    /// The group compresses nothing.
    Off,
    /// Its elements cannot be compressed.
    ElementType,
    /// The schedule begins with exact steps.
    WarmUp,
    /// The user wants it.
    Method,
}

impl fmt::Display for WhyExact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyExact::Off => "compression is off",
            WhyExact::ElementType => "its element type is never compressed",
            WhyExact::WarmUp => "it is warming up",
            WhyExact::Method => "the method is exact",
        })
    }
}

/// A notice for the user: how gradients are treated from the first compressed bucket on.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressionStarted {
    pub hosts: usize,
    /// What they are sent as, after the ramp.
    pub coding: Coding,
    /// Steps until then.
    pub ramp_steps: u64,
    /// Bytes of the gradients for each byte that is sent, after the ramp.
    pub ratio: f64,
}

impl CompressionConfig {
    /// How a bucket of this type is exchanged in this step, for an optimizer that does this with it.
    /// `chosen` is what [`Method::Auto`] stands for now.
    pub fn treatment(
        &self,
        step: u64,
        element: Element,
        stepping: Option<Stepping>,
        chosen: Method,
    ) -> Treatment {
        if !can_be_compressed(element) {
            return Treatment::Exact(WhyExact::ElementType);
        }
        let is_warming_up = step < self.schedule.warmup_steps;
        if step < STEPS_UNTIL_STABLE || (is_warming_up && self.method != Method::Auto) {
            return Treatment::Exact(WhyExact::WarmUp);
        }
        let method = match (self.method, is_warming_up) {
            (Method::Auto, true) => auto::in_warm_up(chosen),
            (Method::Auto, false) => chosen,
            (method, _) => method,
        };
        match method {
            Method::Exact | Method::Auto => Treatment::Exact(WhyExact::Method),
            Method::Chunks => {
                let density = self.schedule.density_at(step).unwrap_or(1.0);
                Treatment::Compressed(Coding::Chunks { density, wire: self.wire })
            }
            Method::Rounded(wire) => Treatment::Compressed(Coding::Chunks { density: 1.0, wire }),
            Method::Quantized(levels) => {
                Treatment::Compressed(Coding::Quantized(quantizer(levels, stepping)))
            }
        }
    }

    /// What [`Method::Auto`] stands for on a device at this step of a bucket.
    pub fn auto_on_devices(&self, step: u64) -> Method {
        match step < self.schedule.warmup_steps {
            true => Method::Exact,
            false => Method::Rounded(Wire::F16),
        }
    }

    /// Whether some bucket may be quantised, so that carriers need links to all other hosts.
    pub fn may_quantize(&self) -> bool {
        matches!(self.method, Method::Quantized(_) | Method::Auto)
    }

    /// Whether sizes of elements may be needed at a later step, and so have to be followed in exact
    /// steps too.
    pub fn follows_sizes(&self) -> bool {
        match self.method {
            Method::Quantized(levels) => quantizer(levels, None).uses_sizes,
            // Only from the first choice that compresses on: most jobs that stay exact need none.
            _ => false,
        }
    }

    /// Whether they are followed at this step by what is quantised without them (`int8`): a job that does
    /// that in the warm-up may well take a method that needs them after it.
    pub fn follows_sizes_ahead(&self, step: u64) -> bool {
        self.method == Method::Auto && step < self.schedule.warmup_steps
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
    pub fn started(&self, hosts: usize, element: Element, now: Coding) -> CompressionStarted {
        let Schedule { density, ramp_steps, .. } = self.schedule;
        let (coding, ramp_steps) = match (self.method, now) {
            (Method::Chunks, Coding::Chunks { wire, .. }) => {
                (Coding::Chunks { density, wire }, ramp_steps)
            }
            _ => (now, 0),
        };
        let ratio = 8.0 * element.bytes() as f64 / coding.bits_per_element();
        CompressionStarted { hosts, coding, ramp_steps, ratio }
    }
}

/// The quantiser for an optimizer, if that is known. Three levels need to know it; the others go by what
/// does no harm to either kind.
fn quantizer(levels: Levels, stepping: Option<Stepping>) -> Quantizer {
    match stepping {
        Some(stepping) => Quantizer::new(levels, stepping),
        None => Quantizer::new(levels.min(Levels::Quinary), Stepping::Proportional),
    }
}

/// Whether buckets of this type can be compressed; others are always exchanged exactly.
pub fn can_be_compressed(element: Element) -> bool {
    matches!(element, Element::F32 | Element::F16 | Element::BF16)
}

#[cfg(test)]
impl CompressionConfig {
    /// A config for tests.
    pub fn sample(method: Method, schedule: Schedule) -> CompressionConfig {
        CompressionConfig {
            method,
            schedule,
            chunk: 1,
            wire: Wire::F16,
            fusion_bytes: 0,
            max_noise: MaxNoise::Low,
            audit_steps: 0,
            cores_are_busy: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a bucket is sent as at this step with this method.
    fn sent_as(method: Method, step: u64, chosen: Method) -> &'static str {
        let schedule = Schedule { density: 0.1, warmup_steps: 100, ramp_steps: 0 };
        let config = CompressionConfig::sample(method, schedule);
        match config.treatment(step, Element::F32, Some(Stepping::Normalized), chosen) {
            Treatment::Compressed(coding) => coding.name(),
            Treatment::Exact(_) => "exact",
        }
    }

    #[test]
    fn auto_adds_no_noise_in_the_warm_up_and_all_else_is_exact_there() {
        let int3 = Method::Quantized(Levels::Int3);
        for (step, chosen, expected) in [
            (1, int3, "exact"),
            (2, int3, "int8"),
            (99, int3, "int8"),
            (99, Method::Rounded(Wire::F16), "fp16"),
            (99, Method::Exact, "exact"),
            (100, int3, "int3"),
        ] {
            assert_eq!(sent_as(Method::Auto, step, chosen), expected, "{chosen} at {step}");
        }
        for method in [int3, Method::Rounded(Wire::F16), Method::Chunks] {
            assert_eq!(sent_as(method, 99, Method::Exact), "exact");
            assert_eq!(sent_as(method, 100, Method::Exact), method.to_string());
        }
    }

    #[test]
    fn a_velocity_is_cleared_only_where_it_is_much_older_than_it_takes_to_build_up() {
        let schedule = Schedule { density: 0.1, warmup_steps: 2, ramp_steps: 0 };
        let config = CompressionConfig::sample(Method::Chunks, schedule);
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
