//! The exchange of buckets, stage by stage: what happens in which order, and what is counted and kept.
//! All of it is the same wherever the gradients are; the stages themselves are an [`ExchangePath`].

use super::bucket::Needed;
use super::config::{
    CompressionConfig, CompressionStarted, Treatment, WhyExact, can_be_compressed,
};
use super::exchange_path::{ExchangeContext, ExchangePath, ExchangePlan};
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Tensor};
use super::paths::Paths;
use super::shard::Shard;
use super::store::BucketStore;
use crate::codec::quantizer::Stepping;
use crate::codec::{Coding, Momentum};
use crate::collective::agreement::AgreedBucket;
use crate::collective::fabric::Fabric;
use crate::collective::hierarchical;
use crate::observe::gradient_counters::{BucketExchange, GradientCounters};
use crate::simd::element::Element;
use std::sync::Arc;
use std::time::Instant;

pub struct Exchanger {
    /// `None`: every gradient is exchanged exactly.
    config: Option<CompressionConfig>,
    pub momentum: Option<Momentum>,
    /// What the optimizer does with gradients, as far as this rank knows.
    pub stepping: Option<Stepping>,
    pub store: BucketStore,
    pub paths: Paths,
    pub counters: Arc<GradientCounters>,
}

impl Exchanger {
    pub fn new(config: Option<CompressionConfig>, momentum: Option<Momentum>) -> Exchanger {
        Exchanger {
            config,
            momentum,
            stepping: None,
            store: BucketStore::default(),
            paths: Paths::default(),
            counters: Arc::default(),
        }
    }

    /// How gradients are compressed; `None` if they never are.
    pub fn config(&self) -> Option<&CompressionConfig> {
        self.config.as_ref()
    }

    /// Decides how a bucket is exchanged in this step, and logs where that is new.
    pub fn decide_treatment(&mut self, bucket: &AgreedBucket, element: Element) -> Treatment {
        let treatment = match &self.config {
            Some(config) => config.treatment(bucket.step, element, bucket.stepping),
            None => Treatment::Exact(WhyExact::Off),
        };
        self.store.entry(bucket.number).log_treatment(bucket.number, treatment);
        treatment
    }

    /// The notice for the user when the first bucket is compressed.
    pub fn compression_started(
        &self,
        hosts: usize,
        element: Element,
        coding: Coding,
    ) -> Option<CompressionStarted> {
        self.config.as_ref().map(|config| config.started(hosts, element, coding))
    }

    /// Exchanges a bucket exactly. The step still counts, and if the engine has taken over the momentum,
    /// it still applies it.
    pub fn exchange_exactly(
        &mut self,
        fabric: &mut Fabric,
        bucket: &AgreedBucket,
        tensor: &Tensor,
        deadline: Instant,
    ) -> Result<(), ExchangeFailure> {
        let momentum = self.momentum.filter(|_| can_be_compressed(tensor.element));
        let shard = hierarchical::own_shard(fabric.topology(), tensor.span);
        let rank = fabric.rank();
        let follows_sizes = self.config.as_ref().is_some_and(CompressionConfig::follows_sizes);
        let (path, mut context) = self.path_for(fabric, tensor.device_slot(), deadline)?;
        path.reduce_within(&mut context, tensor)?;
        // Even if nothing is kept of it: an exchange may have to be told from a step before it.
        let remembered = context.store.remembered();
        let kept = context.store.entry(bucket.number);
        kept.begin_change(remembered)
            .map_err(|fault| ExchangeFailure::Device { rank, reason: fault.0 })?;
        kept.step = bucket.step + 1;
        kept.delivered = None;
        if let (Some(shard), Some(momentum)) = (shard, momentum) {
            let needed = Needed {
                elements: shard.bytes / tensor.element.bytes(),
                residual: false,
                sizes: false,
                momentum: Some(momentum),
                location: &path.location(),
                limit: context.time_left(),
            };
            let kept = context.store.entry(bucket.number);
            kept.make_room(&needed)
                .map_err(|fault| ExchangeFailure::Device { rank, reason: fault.0 })?;
            path.add_velocity(shard, tensor.element, &mut kept.velocity, momentum)?;
        }
        let sent = path.reduce_across(&mut context, tensor)?;
        if let Some(shard) = shard.filter(|_| follows_sizes && can_be_compressed(tensor.element)) {
            let needed = Needed {
                elements: shard.bytes / tensor.element.bytes(),
                residual: false,
                sizes: true,
                momentum,
                location: &path.location(),
                limit: context.time_left(),
            };
            let kept = context.store.entry(bucket.number);
            kept.make_room(&needed)
                .map_err(|fault| ExchangeFailure::Device { rank, reason: fault.0 })?;
            path.follow_sizes(shard, tensor.element, kept, bucket.step)?;
        }
        path.distribute_within(&mut context, tensor)?;
        context.store.entry(bucket.number).end_change(bucket.step + 1);
        self.counters.record(BucketExchange {
            bucket: bucket.number,
            step: bucket.step + 1,
            gradient_bytes: tensor.span.bytes as u64,
            carried_bytes: shard.map_or(0, |shard| shard.bytes as u64),
            wire_bytes: sent,
            density: 1.0,
            residual_ratio: Some(0.0),
        });
        Ok(())
    }

    /// Sums a bucket within its host, before it waits for others to be exchanged with.
    pub fn begin(
        &mut self,
        fabric: &mut Fabric,
        agreed: AgreedBucket,
        coding: Coding,
        tensor: Tensor,
        deadline: Instant,
    ) -> Result<FusedBucket, ExchangeFailure> {
        let (path, mut context) = self.path_for(fabric, tensor.device_slot(), deadline)?;
        path.reduce_within(&mut context, &tensor)?;
        context.store.entry(agreed.number).step = agreed.step + 1;
        let chunk = self.config.as_ref().map_or(1, |config| config.chunk);
        let shard = hierarchical::own_shard(fabric.topology(), tensor.span)
            .map(|span| Shard::new(span, tensor.element, chunk));
        Ok(FusedBucket { agreed, coding, tensor, shard })
    }

    /// Sends off the selected chunks of some buckets. Returns whether they can be completed at once.
    pub fn dispatch(
        &mut self,
        fabric: &mut Fabric,
        buckets: &mut [FusedBucket],
        deadline: Instant,
    ) -> Result<bool, ExchangeFailure> {
        let (Some(config), Some(first)) = (self.config, buckets.first()) else { return Ok(true) };
        let (coding, device_slot) = (first.coding, first.tensor.device_slot());
        let plan = ExchangePlan { config: &config, momentum: self.momentum, coding };
        let (path, mut context) = self.path_for(fabric, device_slot, deadline)?;
        path.dispatch(&mut context, buckets, plan)?;
        Ok(path.is_done_when_dispatched())
    }

    /// Completes the oldest exchange under way, which is of these buckets.
    pub fn deliver(
        &mut self,
        fabric: &mut Fabric,
        buckets: &mut [FusedBucket],
        deadline: Instant,
    ) -> Result<(), ExchangeFailure> {
        let (Some(config), Some(first)) = (self.config, buckets.first()) else { return Ok(()) };
        let (coding, device_slot) = (first.coding, first.tensor.device_slot());
        let momentum = self.momentum;
        let plan = ExchangePlan { config: &config, momentum, coding };
        let (path, mut context) = self.path_for(fabric, device_slot, deadline)?;
        let sent = path.receive(&mut context, buckets, plan)?;
        count(context.counters, buckets, sent);
        for bucket in buckets {
            path.distribute_within(&mut context, &bucket.tensor)?;
            let kept = context.store.entry(bucket.agreed.number);
            kept.end_change(bucket.agreed.step + 1);
            kept.delivered = bucket.delivered(momentum);
        }
        Ok(())
    }

    /// The path for tensors in this device slot, and what its stages work with.
    fn path_for<'a>(
        &'a mut self,
        fabric: &'a mut Fabric,
        device_slot: u32,
        deadline: Instant,
    ) -> Result<(&'a mut dyn ExchangePath, ExchangeContext<'a>), ExchangeFailure> {
        let path = self.paths.select(device_slot, fabric.rank())?;
        let (store, counters) = (&mut self.store, &self.counters);
        Ok((path, ExchangeContext { fabric, store, counters, deadline }))
    }
}

/// Counts an exchange that is complete, for which this rank has sent `sent` bytes.
fn count(counters: &GradientCounters, buckets: &[FusedBucket], sent: u64) {
    let elements =
        |bucket: &FusedBucket| bucket.shard.as_ref().map_or(0, |shard| shard.sent_elements) as u64;
    let all: u64 = buckets.iter().map(elements).sum();
    for bucket in buckets {
        let shard = bucket.shard.as_ref();
        // A device reports its norms later.
        let has_norms = bucket.tensor.device_slot() == 0;
        let norms = shard.map(|shard| shard.exchange_norms).unwrap_or_default();
        counters.record(BucketExchange {
            bucket: bucket.agreed.number,
            step: bucket.agreed.step + 1,
            gradient_bytes: bucket.tensor.span.bytes as u64,
            carried_bytes: shard.map_or(0, |shard| shard.bytes() as u64),
            wire_bytes: (sent * elements(bucket)).checked_div(all).unwrap_or(0),
            density: bucket.coding.density(),
            residual_ratio: has_norms.then(|| norms.residual_ratio()),
        });
    }
}
