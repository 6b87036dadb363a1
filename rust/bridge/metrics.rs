//! The counters of a group, and the line that tells the user about compression.

use super::group::Group;
use super::types;
use crate::collective::call::CollectiveKind;
use crate::error::Result;
use crate::observe::gradient_counters::{BucketCounts, Certificate, Stage};

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
                method: gradients.method.to_string(),
                certificates: gradients.certificate.into_iter().map(certificate).collect(),
            })
        })
    }

    pub(super) fn announcement(&self) -> Result<String> {
        self.guard(|| Ok(self.0.engine.take_announcement()))
    }
}

fn certificate(one: Certificate) -> types::Certificate {
    types::Certificate {
        bucket: one.bucket,
        step: one.step,
        steps: one.steps,
        method: one.method.to_string(),
        cosine: one.cosine,
        relative_error: one.relative_error,
        noise: one.noise,
        window_cosine: one.window_cosine,
        window_relative_error: one.window_relative_error,
    }
}
