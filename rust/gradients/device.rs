//! The path over a device: every stage is put on the lane's stream, and is as good as done then. Only the
//! first exchange of a lane waits for the other ranks, to meet them in NCCL.
//!
//! The watchdog knows of all that is put on the stream before that begins. Nothing here may wait for the
//! device, but for a bucket whose state was loaded, which is brought there once, and then only with an eye
//! on the peers.

use super::bucket::Bucket;
use super::meeting::{Communicators, meet};
use super::member::Member;
use super::method::Method;
use super::numbers::{Home, Numbers};
use super::path::{Manner, Means, Path};
use super::tensor::{Doing, Tensor};
use crate::codec::{Momentum, chunks_to_send};
use crate::collective::fabric::Fabric;
use crate::collective::hierarchical;
use crate::collective::partition::partitions;
use crate::collective::span::Span;
use crate::cuda::{
    self, Completion, DeviceQueue, DeviceReport, DeviceShard, DeviceSlice, Fault,
    InterHostExchange, IntraHostExchange, OnPoll, Scratch, Watchdog,
};
use crate::observe::gradient_counters::{GradientCounters, Stage};
use crate::simd::element::Element;
use crate::transport::Failure;
use std::sync::Arc;
use std::time::Instant;

pub struct DevicePath {
    lane: Arc<DeviceQueue>,
    watchdog: Arc<Watchdog<Arc<Doing>>>,
    /// `None` until the first exchange.
    communicators: Option<Communicators>,
    scratch: Scratch,
    rank: usize,
    /// Bytes that this rank sends for exchanges that were not counted yet, as a ring would.
    sent: u64,
}

/// What is looked at while something is put on the stream.
struct Eyes<'a> {
    fabric: &'a mut Fabric,
    counters: &'a Arc<GradientCounters>,
    deadline: Instant,
}

impl Eyes<'_> {
    fn of<'a>(means: &'a mut Means) -> Eyes<'a> {
        let Means { fabric, counters, deadline, .. } = means;
        Eyes { fabric, counters, deadline: *deadline }
    }
}

impl DevicePath {
    /// The path of `rank` over a lane.
    pub fn new(
        lane: Arc<DeviceQueue>,
        watchdog: Arc<Watchdog<Arc<Doing>>>,
        rank: usize,
    ) -> DevicePath {
        let (communicators, scratch) = (None, Scratch::default());
        DevicePath { lane, watchdog, communicators, scratch, rank, sent: 0 }
    }

    /// The communicators of this lane, which all ranks make at its first exchange.
    fn communicators(
        &mut self,
        fabric: &mut Fabric,
        of: &Doing,
        deadline: Instant,
    ) -> Result<Communicators, Failure> {
        if let Some(communicators) = &self.communicators {
            return Ok(communicators.clone());
        }
        let met = meet(fabric, &self.lane, of.seq, deadline)?;
        for communicator in met.within.iter().chain(&met.across) {
            self.watchdog.add_communicator(communicator);
        }
        Ok(self.communicators.insert(met).clone())
    }

    /// Puts something on the stream, under the eyes of the watchdog. `work` ends a stage of the report for
    /// each of `stages`, and returns the buckets whose shards are in it. Where it waits, it looks after the
    /// peers: the watchdog cannot, while this one has the way to them.
    fn enqueue(
        &self,
        of: &Arc<Doing>,
        Eyes { fabric, counters, deadline }: Eyes,
        stages: &'static [Stage],
        work: impl FnOnce(&mut DeviceReport, OnPoll) -> cuda::Result<Vec<u32>>,
    ) -> Result<(), Failure> {
        let counters = counters.clone();
        let mut lost = None;
        let mut on_poll = || {
            fabric.check().map_err(|failure| {
                lost = Some(failure);
                Fault("a rank was lost, or the group has ended".to_string())
            })
        };
        let on_stream = || {
            let mut report = DeviceReport::start(&self.lane.stream)?;
            let buckets = work(&mut report, &mut on_poll)?;
            let mark = report.end();
            let then = move || note(&counters, report, stages, &buckets);
            Ok(Completion { event: mark, on_complete: Some(Box::new(then)) })
        };
        let during = self.watchdog.watch(of.clone(), deadline, on_stream);
        during.map_err(|fault| lost.unwrap_or_else(|| self.failed(fault)))
    }

    fn failed(&self, fault: Fault) -> Failure {
        Failure::Device { rank: self.rank, reason: format!("GPU {}: {fault}", self.lane.device) }
    }

    /// Makes room for what is kept of the members, and remembers it if that may have to be undone.
    fn make_room(
        &self,
        means: &mut Means,
        members: &[Member],
        manner: Manner,
    ) -> Result<(), Failure> {
        let failed = |fault| self.failed(fault);
        let home = self.home();
        for member in members {
            let Some(shard) = &member.shard else { continue };
            let bucket = means.buckets.entry(member.bucket.number).or_default();
            if bucket.is_elsewhere(&home) {
                // It is brought here once what is on the stream is over: a matter of other ranks too.
                let mark = self.lane.stream.record().map_err(failed)?;
                means.fabric.ask_until(means.deadline, || mark.is_complete().map_err(failed))?;
            }
            let limit = means.deadline.saturating_duration_since(Instant::now());
            let room = bucket.make_room(shard.elements(), true, manner.momentum, &home, limit);
            room.map_err(failed)?;
            if means.can_undo {
                bucket.keep().map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Within the host, of ranks that are not alone there.
    fn within(
        &mut self,
        means: &mut Means,
        tensor: &Tensor,
        work: impl FnOnce(&IntraHostExchange, OnPoll) -> cuda::Result<()>,
    ) -> Result<(), Failure> {
        let communicators = self.communicators(means.fabric, &tensor.of, means.deadline)?;
        let Some(within) = &communicators.within else { return Ok(()) };
        let topology = means.fabric.topology();
        let parts = IntraHostExchange {
            queue: &self.lane,
            communicator: within,
            tensor: device_slice(tensor.span, tensor.element),
            partitions: partitions(tensor.span.bytes, topology.carriers()).collect(),
            local_ranks: topology.local_ranks().len(),
            local_rank: topology.local_rank(),
        };
        self.enqueue(&tensor.of, Eyes::of(means), &[Stage::WithinHost], |report, on_poll| {
            work(&parts, on_poll)?;
            report.end_stage().map(|()| Vec::new())
        })
    }
}

impl Path for DevicePath {
    fn home(&self) -> Home {
        Home::Device(self.lane.clone())
    }

    fn reduce_within(&mut self, means: &mut Means, tensor: &Tensor) -> Result<(), Failure> {
        self.within(means, tensor, |parts, on_poll| parts.reduce_scatter(on_poll))
    }

    fn add_velocity(
        &mut self,
        shard: Span,
        element: Element,
        velocity: &mut Numbers,
        momentum: Momentum,
    ) -> Result<(), Failure> {
        let Some(velocity) = velocity.on_device() else { return Ok(()) };
        let gradient = device_slice(shard, element);
        // SAFETY: the tensor belongs to the exchange until that is over, and the velocity is as long.
        let added = unsafe { velocity.apply_momentum(gradient, momentum) };
        added.map_err(|fault| self.failed(fault))
    }

    fn reduce_across(&mut self, means: &mut Means, tensor: &Tensor) -> Result<u64, Failure> {
        let communicators = self.communicators(means.fabric, &tensor.of, means.deadline)?;
        let topology = means.fabric.topology();
        let hosts = topology.hosts();
        let (Some(across), Some(shard)) =
            (&communicators.across, hierarchical::own_shard(topology, tensor.span))
        else {
            return Ok(0);
        };
        let elements = device_slice(shard, tensor.element);
        if elements.count == 0 {
            // That of equal place on other hosts has as little.
            return Ok(0);
        }
        self.enqueue(&tensor.of, Eyes::of(means), &[Stage::Wire], |report, on_poll| {
            let stream = &self.lane.stream;
            // SAFETY: the tensor belongs to the exchange until that is over.
            unsafe { across.all_reduce(stream, elements, on_poll) }?;
            report.end_stage().map(|()| Vec::new())
        })?;
        Ok(ring_bytes(hosts, shard.bytes))
    }

    fn hand_out_within(&mut self, means: &mut Means, tensor: &Tensor) -> Result<(), Failure> {
        self.within(means, tensor, |parts, on_poll| parts.all_gather(on_poll))
    }

    fn dispatch(
        &mut self,
        means: &mut Means,
        members: &mut [Member],
        manner: Manner,
    ) -> Result<(), Failure> {
        let Some(first) = members.first().map(|member| member.tensor.of.clone()) else {
            return Ok(());
        };
        let communicators = self.communicators(means.fabric, &first, means.deadline)?;
        let Some(across) = &communicators.across else { return Ok(()) };
        self.make_room(means, members, manner)?;
        let Means { fabric, buckets, counters, deadline, .. } = means;
        let topology = fabric.topology();
        let hosts = topology.hosts();
        let exchange = InterHostExchange {
            queue: &self.lane,
            communicator: across,
            hosts,
            is_first_host: topology.host() == 0,
            wire: manner.method.wire,
            momentum: manner.momentum,
        };
        let shards: Vec<_> = members
            .iter()
            .filter_map(|member| {
                let bucket = buckets.get(&member.bucket.number)?;
                shard_of(member, bucket, manner)
            })
            .collect();
        let (mut scratch, mut sent) = (std::mem::take(&mut self.scratch), Vec::new());
        let eyes = Eyes { fabric, counters, deadline: *deadline };
        let outcome = self.enqueue(&first, eyes, &STAGES, |report, on_poll| {
            sent = exchange.run(&shards, &mut scratch, report, on_poll)?;
            Ok(members.iter().filter(|m| m.shard.is_some()).map(|m| m.bucket.number).collect())
        });
        self.scratch = scratch;
        outcome?;
        for (member, sent) in members.iter_mut().filter_map(|m| m.shard.as_mut()).zip(sent) {
            member.sent_elements = sent;
            let bytes = sent * manner.method.wire.element_bytes();
            self.sent += ring_bytes(hosts, bytes);
            counters.add_norm_bytes(ring_bytes(hosts, 4 * member.grid.chunks()));
        }
        Ok(())
    }

    fn is_done_when_dispatched(&self) -> bool {
        true
    }

    fn receive(
        &mut self,
        _means: &mut Means,
        _members: &mut [Member],
        _method: &Method,
    ) -> Result<u64, Failure> {
        Ok(std::mem::take(&mut self.sent))
    }
}

/// The stages of an exchange, as [`InterHostExchange::run`] reports them.
static STAGES: [Stage; 5] =
    [Stage::Accumulate, Stage::Norms, Stage::Pack, Stage::Wire, Stage::Unpack];

/// Counts what the device has measured of something that is over there.
fn note(counters: &GradientCounters, report: DeviceReport, stages: &[Stage], buckets: &[u32]) {
    let (seconds, weights) = report.read();
    for (stage, seconds) in stages.iter().zip(seconds) {
        counters.add_seconds(*stage, seconds);
    }
    for (bucket, weight) in buckets.iter().zip(weights) {
        counters.set_residual_ratio(*bucket, weight.residual_ratio());
    }
}

/// What this rank carries of a member, as the device sees it.
fn shard_of<'a>(member: &Member, bucket: &'a Bucket, manner: Manner) -> Option<DeviceShard<'a>> {
    let Manner { method, momentum } = manner;
    let shard = member.shard.as_ref()?;
    Some(DeviceShard {
        gradient: device_slice(shard.span, shard.element),
        grid: shard.grid,
        count: chunks_to_send(shard.grid.chunks(), member.density),
        residual: bucket.residual.on_device()?,
        velocity: bucket.velocity.on_device(),
        clears_velocity: momentum.is_some_and(|by| method.clears_velocity(member.density, by)),
    })
}

/// A span of device memory as elements.
fn device_slice(span: Span, element: Element) -> DeviceSlice {
    DeviceSlice { address: span.address as u64, element, count: span.bytes / element.bytes() }
}

/// What a ring of the hosts makes each send of so many bytes; what NCCL really does it does not say.
fn ring_bytes(hosts: usize, bytes: usize) -> u64 {
    let hosts = hosts as u64;
    2 * (hosts - 1) * bytes as u64 / hosts
}
