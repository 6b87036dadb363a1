//! The exchange of buckets, stage by stage: what happens in which order, and what is counted and kept.
//! All of it is the same wherever the gradients are; the stages themselves are an [`ExchangePath`].

use super::audit::Audits;
use super::auto::{At, Auto, Choice, MeteredBucket, most_noise};
use super::bucket::Needed;
use super::config::{
    CompressionConfig, CompressionStarted, Treatment, WhyExact, can_be_compressed,
};
use super::exchange_path::{ExchangeContext, ExchangePath, ExchangePlan};
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Tensor};
use super::method::{MaxNoise, Method};
use super::paths::Paths;
use super::shard::Shard;
use super::store::BucketStore;
use crate::codec::{Coding, Momentum, Wire};
use crate::collective::agreement::AgreedBucket;
use crate::collective::fabric::Fabric;
use crate::collective::hierarchical;
use crate::collective::span::Span;
use crate::observe::gradient_counters::{BucketExchange, Certificate, GradientCounters};
use crate::observe::overlap::OverlapTimer;
use crate::simd::element::Element;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub struct Exchanger {
    /// `None`: every gradient is exchanged exactly.
    config: Option<CompressionConfig>,
    pub momentum: Option<Momentum>,
    pub store: BucketStore,
    pub paths: Paths,
    pub counters: Arc<GradientCounters>,
    /// When gradients were called and waited for.
    pub overlap: Arc<OverlapTimer>,
    /// What `Method::Auto` stands for.
    auto: Auto,
    audits: Audits,
}

impl Exchanger {
    pub fn new(config: Option<CompressionConfig>, momentum: Option<Momentum>) -> Exchanger {
        let max_noise = config.map_or(MaxNoise::None, |config| config.max_noise);
        let cores_are_busy = config.is_some_and(|config| config.cores_are_busy);
        Exchanger {
            auto: Auto::new(max_noise, cores_are_busy),
            audits: Audits::new(config.map_or(0, |config| config.audit_steps)),
            overlap: Arc::default(),
            config,
            momentum,
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
    pub fn decide_treatment(&mut self, bucket: &AgreedBucket, tensor: &Tensor) -> Treatment {
        let wanted = match &self.config {
            Some(config) => {
                let chosen = match tensor.device_slot() {
                    0 => self.auto.method(),
                    // Devices report their times too late to choose by them.
                    _ => config.auto_on_devices(bucket.step),
                };
                config.treatment(bucket.step, tensor.element, bucket.stepping, chosen)
            }
            None => Treatment::Exact(WhyExact::Off),
        };
        let may_be_unused = self.store.may_be_unused(bucket.number);
        let kept = self.store.entry(bucket.number);
        let treatment = match wanted {
            // Once more compressed, but without loss: what is kept of the bucket goes along.
            Treatment::Exact(WhyExact::Method) if kept.may_owe() => {
                Treatment::Compressed(Coding::Chunks { density: 1.0, wire: Wire::F32 })
            }
            other => other,
        };
        kept.note_treatment(bucket.number, wanted, may_be_unused);
        treatment
    }

    /// Whether [`Exchanger::choose`] has to be called before this bucket is exchanged. All ranks get the
    /// same answer.
    pub fn choice_is_due(&mut self, bucket: &AgreedBucket, tensor: &Tensor) -> bool {
        let Some(config) = &self.config else { return false };
        config.method == Method::Auto
            && bucket.on_all_ranks
            && tensor.device_slot() == 0
            && can_be_compressed(tensor.element)
            && self.auto.is_due(bucket, config.schedule.warmup_steps)
    }

    /// Chooses with all ranks how gradients are sent from now on. Returns what is new.
    pub fn choose(
        &mut self,
        fabric: &mut Fabric,
        tensor: &Tensor,
        deadline: Instant,
    ) -> Result<Option<Choice>, ExchangeFailure> {
        let at = At { seq: tensor.info.seq, deadline };
        Ok(self.auto.choose(fabric, &self.overlap, at)?)
    }

    /// What `Method::Auto` stands for now.
    pub fn chosen_method(&self) -> Option<Method> {
        let config = self.config.as_ref()?;
        (config.method == Method::Auto).then(|| self.auto.method())
    }

    /// Continues with what `Method::Auto` stood for when a state was saved.
    pub fn set_chosen_method(&mut self, method: Method) {
        self.auto.set_method(method);
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
        if shard.is_some() {
            path.wait_to_move(&mut context, bucket.number)?;
        }
        let start = Instant::now();
        path.reduce_within(&mut context, tensor)?;
        let within_host = start.elapsed();
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
        let start = Instant::now();
        let sent = path.reduce_across(&mut context, tensor)?;
        context.link.add(sent, start.elapsed().as_secs_f64());
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
        let start = Instant::now();
        path.distribute_within(&mut context, tensor)?;
        let within_host = within_host + start.elapsed();
        context.store.entry(bucket.number).end_change(bucket.step + 1);
        self.auto.buckets.insert(bucket.number, metered(shard, tensor.element, within_host));
        self.counters.record(BucketExchange {
            method: "exact",
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
        let is_audited = self.audits.concern(&agreed)
            && tensor.device_slot() == 0
            && !coding.is_exact()
            // The engine adds momentum to what it delivers.
            && self.momentum.is_none();
        let (path, mut context) = self.path_for(fabric, tensor.device_slot(), deadline)?;
        let start = Instant::now();
        path.reduce_within(&mut context, &tensor)?;
        let within_host = start.elapsed();
        context.store.entry(agreed.number).step = agreed.step + 1;
        let chunk = self.config.as_ref().map_or(1, |config| config.chunk);
        let shard = hierarchical::own_shard(fabric.topology(), tensor.span)
            .map(|span| Shard::new(span, tensor.element, chunk));
        Ok(FusedBucket { agreed, coding, tensor, is_audited, within_host, shard })
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
        for (Audited { agreed, coding, seq }, shard) in audited(buckets) {
            let (elements, at) = (shard.elements(), (seq, deadline));
            let read = |range| shard.read(range);
            self.audits.begin(&agreed, coding, elements, read, fabric, at)?;
        }
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
        for bucket in buckets.iter_mut() {
            let start = Instant::now();
            path.distribute_within(&mut context, &bucket.tensor)?;
            bucket.within_host += start.elapsed();
            let kept = context.store.entry(bucket.agreed.number);
            kept.end_change(bucket.agreed.step + 1);
            kept.delivered = bucket.delivered(momentum);
        }
        for FusedBucket { agreed, tensor, within_host, shard, .. } in buckets.iter() {
            let span = shard.as_ref().map(|shard| shard.span);
            let metered = metered(span, tensor.element, *within_host);
            self.auto.buckets.insert(agreed.number, metered);
        }
        for (Audited { agreed, .. }, shard) in audited(buckets) {
            let Some(finding) = self.audits.end(&agreed, |range| shard.read(range)) else {
                continue;
            };
            // A bucket may be sent as something else, in its warm-up or by an unknown optimizer.
            if finding.certificate.method == self.auto.method().to_string() {
                for (sum, more) in self.auto.audited.iter_mut().zip(finding.squares) {
                    *sum += more;
                }
            }
            report(&finding.certificate, fabric.rank());
            self.counters.certify(finding.certificate);
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
        let link = &mut self.auto.link;
        Ok((path, ExchangeContext { fabric, store, counters, link, deadline }))
    }
}

/// What an audit has to know of a bucket.
struct Audited {
    agreed: AgreedBucket,
    coding: Coding,
    /// The number of its collective.
    seq: u64,
}

/// The buckets that are audited in this step, with this rank's shards of them.
fn audited(buckets: &mut [FusedBucket]) -> impl Iterator<Item = (Audited, &mut Shard)> {
    buckets.iter_mut().filter(|bucket| bucket.is_audited).filter_map(|bucket| {
        let FusedBucket { agreed, coding, tensor, shard, .. } = bucket;
        let audited = Audited { agreed: *agreed, coding: *coding, seq: tensor.info.seq };
        shard.as_mut().filter(|shard| shard.elements() > 0).map(|shard| (audited, shard))
    })
}

/// Tells the log what an audit has found, and the user if it is not as it should be.
fn report(certificate: &Certificate, rank: usize) {
    let Certificate { bucket, step, method, cosine, noise, window_relative_error, .. } =
        certificate;
    let found = format!(
        "bucket {bucket} from step {step} on, sent as {method}: cosine {cosine:.4} with the exact sum, \
         noise {noise:.4}, error over the window {window_relative_error:.4}"
    );
    match most_noise(method).filter(|most| rank == 0 && noise > most) {
        Some(most) => log::warn!(
            "compression adds more noise to this training than is expected of it (at most \
             {most:.3}): {found}. Choose another method, such as GFLOW_METHOD=fp16"
        ),
        None => log::info!("audited {found}"),
    }
}

/// What an exchange within the host and its shard mean for the choice of a method.
fn metered(shard: Option<Span>, element: Element, within_host: Duration) -> MeteredBucket {
    MeteredBucket {
        elements: shard.map_or(0, |shard| shard.bytes / element.bytes()) as u64,
        bits_per_element: 8 * element.bytes() as u32,
        within_host_seconds: within_host.as_secs_f64(),
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
            method: bucket.coding.name(),
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
