//! The path over a device: every stage is enqueued on the device queue's stream, and needs nothing more
//! from the host. Only the first exchange on a device waits for the other ranks, for the NCCL bootstrap.
//!
//! The watchdog knows of everything before it is enqueued. Nothing here waits for the device, except to
//! move a state there that was loaded; that happens once, and checks the peers meanwhile.

use super::bootstrap::{Communicators, bootstrap};
use super::bucket::{Bucket, Needed};
use super::devices::DeviceWatchdog;
use super::exchange_path::{ExchangeContext, ExchangePath, ExchangePlan};
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Tensor};
use super::shard::Shard;
use super::state_buffer::{Location, StateBuffer};
use crate::codec::quantizer::{Ownership, Quantizer};
use crate::codec::{Coding, Momentum, Wire, chunks_to_send};
use crate::collective::fabric::Fabric;
use crate::collective::hierarchical;
use crate::collective::info::CollectiveInfo;
use crate::collective::partition::partitions;
use crate::collective::span::Span;
use crate::cuda::{
    self, Communicator, Completion, DeviceQueue, DeviceReport, DeviceShard, DeviceSlice, Fault,
    InterHostExchange, IntraHostExchange, OnPoll, QuantizedShard, Scratch, TwoLegExchange,
};
use crate::observe::gradient_counters::{GradientCounters, Stage};
use crate::simd::element::Element;
use crate::transport::Failure;
use std::sync::Arc;
use std::time::Instant;

pub struct DevicePath {
    queue: Arc<DeviceQueue>,
    watchdog: Arc<DeviceWatchdog>,
    /// `None` until the first exchange.
    communicators: Option<Communicators>,
    scratch: Scratch,
    rank: usize,
    /// Bytes that this rank sent for exchanges not counted yet, as far as a ring would send them.
    sent: u64,
}

/// Context for enqueueing work: the peers to check, and how long to wait.
struct Enqueuing<'a> {
    fabric: &'a mut Fabric,
    counters: &'a Arc<GradientCounters>,
    deadline: Instant,
}

impl Enqueuing<'_> {
    fn of<'a>(context: &'a mut ExchangeContext) -> Enqueuing<'a> {
        let ExchangeContext { fabric, counters, deadline, .. } = context;
        Enqueuing { fabric, counters, deadline: *deadline }
    }
}

impl DevicePath {
    /// The path of `rank` over a device.
    pub fn new(queue: Arc<DeviceQueue>, watchdog: Arc<DeviceWatchdog>, rank: usize) -> DevicePath {
        let (communicators, scratch) = (None, Scratch::default());
        DevicePath { queue, watchdog, communicators, scratch, rank, sent: 0 }
    }

    /// The communicators of this device, which all ranks make at its first exchange.
    fn communicators(
        &mut self,
        fabric: &mut Fabric,
        info: &CollectiveInfo,
        deadline: Instant,
    ) -> Result<Communicators, ExchangeFailure> {
        if let Some(communicators) = &self.communicators {
            return Ok(communicators.clone());
        }
        let made = bootstrap(fabric, &self.queue, info.seq, deadline)?;
        for communicator in made.within.iter().chain(&made.across) {
            self.watchdog.add_communicator(communicator);
        }
        Ok(self.communicators.insert(made).clone())
    }

    /// Enqueues something on the stream, with the watchdog watching. `work` ends a stage of the report for
    /// each of `stages`, and returns the buckets whose shards are in it. While it waits it checks the
    /// peers, because the watchdog cannot as long as this thread has the fabric.
    fn enqueue(
        &self,
        info: &Arc<CollectiveInfo>,
        Enqueuing { fabric, counters, deadline }: Enqueuing,
        stages: &'static [Stage],
        work: impl FnOnce(&mut DeviceReport, OnPoll) -> cuda::Result<Vec<u32>>,
    ) -> Result<(), ExchangeFailure> {
        let counters = counters.clone();
        let mut lost = None;
        let mut on_poll = || {
            fabric.check().map_err(|failure| {
                lost = Some(failure.into());
                Fault("a rank was lost, or the group has ended".to_string())
            })
        };
        let on_stream = || {
            let mut report = DeviceReport::start(&self.queue.stream)?;
            let buckets = work(&mut report, &mut on_poll)?;
            let event = report.end();
            let count = move || count_report(&counters, report, stages, &buckets);
            Ok(Completion { event, on_complete: Some(Box::new(count)) })
        };
        let outcome = self.watchdog.watch(info.clone(), deadline, on_stream);
        outcome.map_err(|fault| lost.unwrap_or_else(|| self.failed(fault)))
    }

    fn failed(&self, fault: Fault) -> ExchangeFailure {
        ExchangeFailure::Device {
            rank: self.rank,
            reason: format!("GPU {}: {fault}", self.queue.device),
        }
    }

    /// Makes room for the state of the buckets, and backs it up if exchanges may have to be undone.
    fn make_room(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &[FusedBucket],
        plan: ExchangePlan,
    ) -> Result<(), ExchangeFailure> {
        let location = self.location();
        for fused in buckets {
            let Some(shard) = &fused.shard else { continue };
            let number = fused.agreed.number;
            self.wait_to_move(context, number)?;
            let failed = |fault| self.failed(fault);
            let (limit, remembered) = (context.time_left(), context.store.remembered());
            let bucket = context.store.entry(number);
            let needed = Needed {
                elements: shard.elements(),
                residual: true,
                sizes: plan.coding.uses_sizes(),
                momentum: plan.momentum,
                location: &location,
                limit,
            };
            bucket.make_room(&needed).map_err(failed)?;
            bucket.begin_change(remembered).map_err(failed)?;
        }
        Ok(())
    }

    /// Does something among the ranks of the host, unless this rank is alone there.
    fn within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
        work: impl FnOnce(&IntraHostExchange, OnPoll) -> cuda::Result<()>,
    ) -> Result<(), ExchangeFailure> {
        let communicators = self.communicators(context.fabric, &tensor.info, context.deadline)?;
        let Some(within) = &communicators.within else { return Ok(()) };
        let topology = context.fabric.topology();
        let exchange = IntraHostExchange {
            queue: &self.queue,
            communicator: within,
            tensor: device_slice(tensor.span, tensor.element),
            partitions: partitions(tensor.span.bytes, topology.carriers()).collect(),
            local_ranks: topology.local_ranks().len(),
            local_rank: topology.local_rank(),
        };
        self.enqueue(
            &tensor.info,
            Enqueuing::of(context),
            &[Stage::WithinHost],
            |report, on_poll| {
                work(&exchange, on_poll)?;
                report.end_stage().map(|()| Vec::new())
            },
        )
    }
}

impl ExchangePath for DevicePath {
    fn location(&self) -> Location {
        Location::Device(self.queue.clone())
    }

    fn wait_to_move(
        &mut self,
        context: &mut ExchangeContext,
        number: u32,
    ) -> Result<(), ExchangeFailure> {
        if !context.store.entry(number).is_elsewhere(&self.location()) {
            return Ok(());
        }
        // It moves when the stream is done, and that depends on other ranks too.
        let failed = |fault| self.failed(fault);
        let event = self.queue.stream.record().map_err(failed)?;
        let is_complete = || event.is_complete().map_err(failed);
        context.fabric.poll_until(context.deadline, is_complete).map(drop)
    }

    fn reduce_within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<(), ExchangeFailure> {
        self.within(context, tensor, |exchange, on_poll| exchange.reduce_scatter(on_poll))
    }

    fn add_velocity(
        &mut self,
        shard: Span,
        element: Element,
        velocity: &mut StateBuffer,
        momentum: Momentum,
    ) -> Result<(), ExchangeFailure> {
        let velocity = velocity.as_device().ok_or_else(not_on_device)?;
        let gradient = device_slice(shard, element);
        // SAFETY: the tensor belongs to the exchange until that ends, and has as many elements as the velocity.
        let added = unsafe { velocity.apply_momentum(gradient, momentum) };
        added.map_err(|fault| self.failed(fault))
    }

    fn reduce_across(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<u64, ExchangeFailure> {
        let communicators = self.communicators(context.fabric, &tensor.info, context.deadline)?;
        let topology = context.fabric.topology();
        let hosts = topology.hosts();
        let (Some(across), Some(shard)) =
            (&communicators.across, hierarchical::own_shard(topology, tensor.span))
        else {
            return Ok(0);
        };
        let elements = device_slice(shard, tensor.element);
        if elements.count == 0 {
            // The shards of this local rank on other hosts are empty too.
            return Ok(0);
        }
        self.enqueue(&tensor.info, Enqueuing::of(context), &[Stage::Wire], |report, on_poll| {
            let stream = &self.queue.stream;
            // SAFETY: the tensor belongs to the exchange until that ends.
            unsafe { across.all_reduce(stream, elements, on_poll) }?;
            report.end_stage().map(|()| Vec::new())
        })?;
        Ok(ring_bytes(hosts, shard.bytes))
    }

    fn distribute_within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<(), ExchangeFailure> {
        self.within(context, tensor, |exchange, on_poll| exchange.all_gather(on_poll))
    }

    fn follow_sizes(
        &mut self,
        shard: Span,
        element: Element,
        bucket: &mut Bucket,
        step: u64,
    ) -> Result<(), ExchangeFailure> {
        let sizes = bucket.sizes.as_device().ok_or_else(not_on_device)?;
        // SAFETY: the tensor belongs to the exchange until that ends, and has as many elements as sizes.
        let followed = unsafe { sizes.follow(device_slice(shard, element), step) };
        followed.map_err(|fault| self.failed(fault))
    }

    fn dispatch(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
    ) -> Result<(), ExchangeFailure> {
        let Some(first) = buckets.first().map(|bucket| bucket.tensor.info.clone()) else {
            return Ok(());
        };
        let communicators = self.communicators(context.fabric, &first, context.deadline)?;
        let Some(across) = &communicators.across else { return Ok(()) };
        self.make_room(context, buckets, plan)?;
        match plan.coding {
            Coding::Chunks { wire, .. } => {
                self.send_chunks(context, buckets, plan, (across, wire), &first)
            }
            Coding::Quantized(quantizer) => {
                self.quantize(context, buckets, plan, (across, quantizer), &first)
            }
        }
    }

    fn is_done_when_dispatched(&self) -> bool {
        true
    }

    fn receive(
        &mut self,
        _context: &mut ExchangeContext,
        _buckets: &mut [FusedBucket],
        _plan: ExchangePlan,
    ) -> Result<u64, ExchangeFailure> {
        Ok(std::mem::take(&mut self.sent))
    }
}

impl DevicePath {
    /// Exchanges the selected chunks of some buckets, whose first collective is `first`.
    fn send_chunks(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
        (across, wire): (&Communicator, Wire),
        first: &Arc<CollectiveInfo>,
    ) -> Result<(), ExchangeFailure> {
        let ExchangeContext { fabric, store, counters, deadline, .. } = context;
        let topology = fabric.topology();
        let hosts = topology.hosts();
        let exchange = InterHostExchange {
            queue: &self.queue,
            communicator: across,
            hosts,
            is_first_host: topology.host() == 0,
            wire,
            momentum: plan.momentum,
        };
        let (mut numbers, mut shards) = (Vec::new(), Vec::new());
        for fused in buckets.iter() {
            if let Some(shard) = &fused.shard {
                let bucket = store.get(fused.agreed.number).ok_or_else(not_on_device)?;
                shards.push(device_shard(shard, fused.coding.density(), bucket, plan)?);
                numbers.push(fused.agreed.number);
            }
        }
        let (mut scratch, mut sent) = (std::mem::take(&mut self.scratch), Vec::new());
        let enqueuing = Enqueuing { fabric, counters, deadline: *deadline };
        let outcome = self.enqueue(first, enqueuing, &CHUNK_STAGES, |report, on_poll| {
            sent = exchange.run(&shards, &mut scratch, report, on_poll)?;
            Ok(numbers)
        });
        self.scratch = scratch;
        outcome?;
        for (shard, sent) in buckets.iter_mut().filter_map(|fused| fused.shard.as_mut()).zip(sent) {
            shard.sent_elements = sent;
            let bytes = sent * wire.element_bytes();
            self.sent += ring_bytes(hosts, bytes);
            counters.add_norm_bytes(ring_bytes(hosts, 4 * shard.grid.chunks()));
        }
        Ok(())
    }

    /// Exchanges some buckets in two legs. Their first collective is `first`.
    fn quantize(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
        (across, quantizer): (&Communicator, Quantizer),
        first: &Arc<CollectiveInfo>,
    ) -> Result<(), ExchangeFailure> {
        let ExchangeContext { fabric, store, counters, deadline, .. } = context;
        let topology = fabric.topology();
        let ownership = Ownership { hosts: topology.hosts(), host: topology.host() };
        let exchange =
            TwoLegExchange { queue: &self.queue, communicator: across, ownership, quantizer };
        let (mut numbers, mut shards, mut velocities) = (Vec::new(), Vec::new(), Vec::new());
        for fused in buckets.iter_mut() {
            let Some(shard) = &mut fused.shard else { continue };
            shard.sent_elements = shard.elements();
            let bucket = store.get(fused.agreed.number).ok_or_else(not_on_device)?;
            let gradient = device_slice(shard.span, shard.element);
            let sizes = bucket.sizes.as_device().filter(|_| quantizer.uses_sizes);
            if quantizer.uses_sizes && sizes.is_none() {
                return Err(not_on_device());
            }
            if let Some(momentum) = plan.momentum {
                let velocity = bucket.velocity.as_device().ok_or_else(not_on_device)?;
                velocities.push((velocity, gradient, momentum));
            }
            shards.push(QuantizedShard {
                gradient,
                residual: bucket.residual.as_device().ok_or_else(not_on_device)?,
                sizes,
                step: fused.agreed.step,
            });
            numbers.push(fused.agreed.number);
        }
        let (mut scratch, mut sent) = (std::mem::take(&mut self.scratch), 0);
        let enqueuing = Enqueuing { fabric, counters, deadline: *deadline };
        let outcome = self.enqueue(first, enqueuing, &QUANTIZED_STAGES, |report, on_poll| {
            for (velocity, gradient, momentum) in velocities {
                // SAFETY: the tensor belongs to the exchange until that ends, and has as many elements as
                // the velocity.
                unsafe { velocity.apply_momentum(gradient, momentum) }?;
            }
            sent = exchange.run(&shards, &mut scratch, report, on_poll)?;
            Ok(numbers)
        });
        self.scratch = scratch;
        outcome?;
        self.sent += sent;
        Ok(())
    }
}

/// The stages of an exchange of chunks, as [`InterHostExchange::run`] reports them.
static CHUNK_STAGES: [Stage; 5] =
    [Stage::Accumulate, Stage::Norms, Stage::Pack, Stage::Wire, Stage::Unpack];

/// The stages of a quantised exchange, as [`TwoLegExchange::run`] reports them: two legs on the wire.
static QUANTIZED_STAGES: [Stage; 5] =
    [Stage::Pack, Stage::Wire, Stage::Sum, Stage::Wire, Stage::Unpack];

/// Counts what the device has measured of something that is complete there.
fn count_report(
    counters: &GradientCounters,
    report: DeviceReport,
    stages: &[Stage],
    buckets: &[u32],
) {
    let (seconds, norms) = report.read();
    for (stage, seconds) in stages.iter().zip(seconds) {
        counters.add_seconds(*stage, seconds);
    }
    for (bucket, norms) in buckets.iter().zip(norms) {
        counters.set_residual_ratio(*bucket, norms.residual_ratio());
    }
}

/// A span of device memory as elements.
fn device_slice(span: Span, element: Element) -> DeviceSlice {
    DeviceSlice { address: span.address as u64, element, count: span.bytes / element.bytes() }
}

/// A shard with the state of its bucket, for which room was made on the device.
fn device_shard<'a>(
    shard: &Shard,
    density: f64,
    bucket: &'a Bucket,
    plan: ExchangePlan,
) -> Result<DeviceShard<'a>, ExchangeFailure> {
    let ExchangePlan { config, momentum, .. } = plan;
    Ok(DeviceShard {
        gradient: device_slice(shard.span, shard.element),
        grid: shard.grid,
        count: chunks_to_send(shard.grid.chunks(), density),
        residual: bucket.residual.as_device().ok_or_else(not_on_device)?,
        velocity: bucket.velocity.as_device(),
        clears_velocity: momentum.is_some_and(|by| config.clears_velocity(density, by)),
    })
}

fn not_on_device() -> ExchangeFailure {
    Failure::Broken("the state of a bucket is not on its device".to_string()).into()
}

/// The bytes that each host sends when a ring sums `bytes`. NCCL does not say what it really sends.
fn ring_bytes(hosts: usize, bytes: usize) -> u64 {
    let hosts = hosts as u64;
    2 * (hosts - 1) * bytes as u64 / hosts
}
