//! The method: how gradients are exchanged between hosts, as the user has set it. It is the same on
//! every rank of a group and never changes, so all ranks draw the same conclusions from it.

use crate::arithmetic::element::Element;
use crate::compress::Schedule;
use crate::compress::Wire;

/// DDP rebuilds its buckets after the first step, or with a static graph after the second. What is
/// exchanged before that must leave nothing behind: its bucket is never seen again.
const STEPS_UNTIL_SETTLED: u64 = 2;

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

    /// Whether what is sent takes its velocity along. A chunk that is sent in most steps has no old
    /// velocity: without it such a chunk would have no momentum at all.
    pub fn clears_velocity(&self, density: f64) -> bool {
        density < 0.5
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
