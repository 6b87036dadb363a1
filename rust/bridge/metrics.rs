//! The counters of a group, and the line that tells the user about compression.

use super::group::Group;
use super::types;
use crate::codec::Coding;
use crate::collective::call::CollectiveKind;
use crate::error::Result;
use crate::gradients::CompressionStarted;
use crate::observe::gradient_counters::{BucketCounts, Stage};

impl Group {
    pub(super) fn metrics(&self) -> Result<types::MetricsSnapshot> {
        self.guard(|| {
            let counts = self.0.engine.counts();
            let (gradients, times) = self.0.engine.gradient_counts();
            let by_kind = CollectiveKind::ALL.into_iter().zip(counts.by_kind);
            let bucket = |(number, bucket): (u32, BucketCounts)| types::BucketMetrics {
                number,
                steps: bucket.steps,
                gradient_bytes: bucket.gradient_bytes,
                carried_bytes: bucket.carried_bytes,
                wire_bytes: bucket.wire_bytes,
                density: bucket.density,
                residual_ratio: bucket.residual_ratio,
            };
            let stage = |(stage, seconds): (Stage, f64)| types::StageSeconds {
                name: stage.name().to_string(),
                seconds,
            };
            Ok(types::MetricsSnapshot {
                hosts: self.0.topology.hosts() as u64,
                ranks_here: self.0.topology.local_ranks().len() as u64,
                gradient_buckets: counts.gradient_buckets,
                gradient_bytes: counts.gradient_bytes,
                exact_tensors: counts.exact_tensors,
                exact_bytes: counts.exact_bytes,
                by_kind: by_kind
                    .filter(|(_, count)| *count > 0)
                    .map(|(kind, count)| types::KindCount { name: kind.name().to_string(), count })
                    .collect(),
                compresses: self.0.compresses,
                buckets: gradients.buckets.into_iter().map(bucket).collect(),
                other_carried_bytes: gradients.retired.carried_bytes,
                other_wire_bytes: gradients.retired.wire_bytes + gradients.norm_bytes,
                stages: Stage::ALL.into_iter().zip(gradients.seconds).map(stage).collect(),
                hidden_seconds: times.hidden.as_secs_f64(),
                exposed_seconds: times.exposed.as_secs_f64(),
            })
        })
    }

    pub(super) fn announcement(&self) -> Result<String> {
        let started = || self.0.engine.take_compression_started();
        self.guard(|| Ok(started().as_ref().map(compression_notice).unwrap_or_default()))
    }
}

/// Tells the user what happens to gradients from the first compressed bucket on.
fn compression_notice(started: &CompressionStarted) -> String {
    let CompressionStarted { hosts, coding, ramp_steps, ratio } = started;
    let when = match ramp_steps {
        0 => String::new(),
        steps => format!(" after a ramp of {steps} steps"),
    };
    let how = match coding {
        Coding::Chunks { density, wire } if *density < 1.0 => {
            // Rounded to 4 digits after the point.
            let percent = (density * 1e6).round() / 1e4;
            format!(
                "the most important {percent}% of their chunks are sent{when}, as {}, and the rest \
                 is kept and sent later",
                wire.name()
            )
        }
        Coding::Chunks { wire, .. } => format!("they are sent as {}{when}", wire.name()),
        Coding::Quantized(quantizer) => format!(
            "every element is sent as {} ({} levels){when}, and what rounding leaves of it is \
             kept for the next step",
            quantizer.levels.name(),
            2 * u32::from(quantizer.levels.largest()) + 1,
        ),
    };
    format!(
        "from this step on gradients are compressed between the {hosts} hosts: {how}: about \
         {ratio:.0}x fewer bytes. All other tensors stay exact. To switch it off: \
         GFLOW_COMPRESS=off, or pg_options=gflow.Options(compress=\"off\")"
    )
}
