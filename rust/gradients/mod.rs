//! The way of gradients between hosts, by GradientFlow's method: fused, rounded, only the important
//! chunks, and nothing lost.
//!
//! A bucket is summed within its host, then held until enough of them are together
//! ([`Gradients::hold`]). Then they are exchanged as one ([`Gradients::close`]): each is added to
//! what was not sent before, the ranks agree on the norms of its chunks and so on which are sent,
//! and the chosen ones go to the other hosts. What comes back is put into the tensors when the next
//! exchange is on its way, or the backward pass is over ([`Gradients::deliver_all`]).
//!
//! How each of these is done depends on where the gradients are, and is a [`path`]. In what order, and
//! what is counted and kept, does not, and is written here, once.
//!
//! Everything here happens in the order of the program, which is the same on every rank; nothing
//! may depend on time, or on what one rank alone knows. Nothing is changed of what a bucket keeps
//! but by an exchange that all ranks have agreed on.

mod accumulation;
mod bucket;
mod courier;
mod device;
mod host;
mod meeting;
mod member;
mod method;
mod norms;
mod numbers;
mod parcel;
mod path;
mod stock;
mod tensor;

pub use bucket::{Bucket, State};
pub use courier::Courier;
pub use member::{Member, Shard, can_be_compressed};
pub use method::Method;
#[cfg(test)]
pub use parcel::ENOUGH;
pub use tensor::{Doing, Place, Tensor};

use crate::codec::Momentum;
use crate::collective::agreement::AgreedBucket;
use crate::collective::call::Call;
use crate::collective::fabric::Fabric;
use crate::collective::hierarchical;
use crate::cuda;
use crate::engine::devices::Devices;
use crate::observe::gradient_counters::{BucketExchange, GradientCounters};
use crate::simd::element::Element;
use crate::transport::Failure;
use device::DevicePath;
use host::HostPath;
use path::{Buckets, Manner, Means, Path};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What one rank knows and does about the gradients of its group.
pub struct Gradients {
    /// `None`: every gradient is exchanged exactly.
    method: Option<Method>,
    momentum: Option<Momentum>,
    buckets: Buckets,
    /// Buckets that wait for others to be exchanged with; all on the same path.
    held: Vec<Member>,
    /// The exchange that was dispatched and is not complete.
    under_way: Option<Vec<Member>>,
    paths: Paths,
    /// Whether the exchanges of a step that the training job skips have to be undone.
    can_undo: bool,
    counters: Arc<GradientCounters>,
}

/// The ways to the other hosts.
#[derive(Default)]
struct Paths {
    host: HostPath,
    /// By the number of the lane.
    devices: BTreeMap<u32, DevicePath>,
    opened: Arc<Devices>,
}

impl Paths {
    /// The path for tensors on this lane.
    fn on(&mut self, lane: u32, rank: usize) -> Result<&mut dyn Path, Failure> {
        if lane == 0 {
            return Ok(&mut self.host);
        }
        match self.devices.entry(lane) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(unknown) => {
                let Some(opened) = self.opened.lane(lane) else {
                    return Err(Failure::Broken(format!("there is no lane {lane}")));
                };
                let watchdog = self.opened.watchdog.clone();
                Ok(unknown.insert(DevicePath::new(opened, watchdog, rank)))
            }
        }
    }
}

/// Why an exchange of gradients failed, and the first collective of those that it was for.
pub struct Failed {
    pub seq: u64,
    pub call: Box<Call>,
    pub failure: Failure,
}

impl Failed {
    fn at(member: &Member) -> impl Fn(Failure) -> Failed + use<> {
        let (seq, call) = (member.job.seq, Box::new(member.job.call.clone()));
        move |failure| Failed { seq, call: call.clone(), failure }
    }
}

impl Gradients {
    pub fn new(method: Option<Method>, momentum: Option<Momentum>) -> Gradients {
        Gradients {
            method,
            momentum,
            buckets: BTreeMap::new(),
            held: Vec::new(),
            under_way: None,
            paths: Paths::default(),
            can_undo: false,
            counters: Arc::default(),
        }
    }

    pub fn counters(&self) -> &Arc<GradientCounters> {
        &self.counters
    }

    /// Gives the one who carries parcels; without one this rank carries nothing.
    pub fn employ(&mut self, courier: Courier) {
        self.paths.host.courier = Some(courier);
    }

    /// Gives the devices that gradients may be on.
    pub fn use_devices(&mut self, devices: Arc<Devices>) {
        self.paths.opened = devices;
    }

    /// How gradients are exchanged, if not always exactly.
    pub fn method(&self) -> Option<&Method> {
        self.method.as_ref()
    }

    /// The momentum that this rank applies, as a number to compare; 0 for none.
    pub fn momentum_code(&self) -> u32 {
        self.momentum.map_or(0, |momentum| {
            momentum.factor.to_bits() ^ (u32::from(momentum.nesterov) << (u32::BITS - 1))
        })
    }

    /// How often this bucket was exchanged.
    pub fn step_of(&self, bucket: u32) -> u64 {
        self.buckets.get(&bucket).map_or(0, |bucket| bucket.step)
    }

    /// The density of a bucket in this step, if it is compressed in this step.
    pub fn density_of(&self, bucket: &AgreedBucket, element: Element) -> Option<f64> {
        let method = self.method.as_ref().filter(|_| can_be_compressed(element))?;
        method.density_at(bucket.step)
    }

    /// Exchanges a bucket exactly, as long as it is not compressed. It is still counted, and the
    /// momentum is still the engine's if it has taken that over.
    pub fn exchange_exactly(
        &mut self,
        fabric: &mut Fabric,
        bucket: &AgreedBucket,
        tensor: &Tensor,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let momentum = self.momentum.filter(|_| can_be_compressed(tensor.element));
        let shard = hierarchical::own_shard(fabric.topology(), tensor.span);
        let rank = fabric.rank();
        let (path, mut means) = self.on_path(fabric, tensor.lane(), deadline)?;
        means.buckets.entry(bucket.number).or_default().step = bucket.step + 1;
        path.reduce_within(&mut means, tensor)?;
        if let (Some(shard), Some(momentum)) = (shard, momentum) {
            let kept = means.buckets.entry(bucket.number).or_default();
            let (elements, limit) = (shard.bytes / tensor.element.bytes(), left(deadline));
            kept.make_room(elements, false, Some(momentum), &path.home(), limit)
                .and_then(|()| if means.can_undo { kept.keep() } else { Ok(()) })
                .map_err(|fault| Failure::Device { rank, reason: fault.0 })?;
            path.add_velocity(shard, tensor.element, &mut kept.velocity, momentum)?;
        }
        let sent = path.reduce_across(&mut means, tensor)?;
        path.hand_out_within(&mut means, tensor)?;
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

    /// Sums a bucket within the host, before it is held.
    pub fn reduce_within(
        &mut self,
        fabric: &mut Fabric,
        tensor: &Tensor,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (path, mut means) = self.on_path(fabric, tensor.lane(), deadline)?;
        path.reduce_within(&mut means, tensor)
    }

    /// The path for tensors on this lane, and what it works with.
    fn on_path<'a>(
        &'a mut self,
        fabric: &'a mut Fabric,
        lane: u32,
        deadline: Instant,
    ) -> Result<(&'a mut dyn Path, Means<'a>), Failure> {
        let path = self.paths.on(lane, fabric.rank())?;
        let (buckets, counters) = (&mut self.buckets, &self.counters);
        Ok((path, Means { fabric, buckets, counters, can_undo: self.can_undo, deadline }))
    }

    /// Takes a bucket, after it was summed within the host. It is exchanged when the time comes.
    pub fn hold(&mut self, member: Member) {
        let bucket = self.buckets.entry(member.bucket.number).or_default();
        bucket.step = member.bucket.step + 1;
        self.held.push(member);
    }

    /// Whether what is held can be exchanged together with a bucket on this lane.
    pub fn goes_with(&self, lane: u32) -> bool {
        self.held.iter().all(|member| member.tensor.lane() == lane)
    }

    /// Whether the buckets that are held are enough for an exchange.
    pub fn is_full(&self) -> bool {
        let bytes: usize = self.held.iter().map(|member| member.tensor.span.bytes).sum();
        self.method.as_ref().is_none_or(|method| bytes >= method.fusion_bytes)
    }

    /// How long the exchange of what is held or under way may take; `None` if there is nothing.
    pub fn timeout(&self) -> Option<Duration> {
        let mut members = self.under_way.iter().flatten().chain(&self.held);
        members.next().map(|member| member.job.call.timeout)
    }

    /// Exchanges the buckets that are held, as one. Returns those that are complete now: of the exchange
    /// before, if the host does something for this one while that is on its way; else of both.
    pub fn close(&mut self, fabric: &mut Fabric, deadline: Instant) -> Result<Vec<Member>, Failed> {
        let mut members = std::mem::take(&mut self.held);
        let Some(first) = members.first() else { return Ok(Vec::new()) };
        let failed = Failed::at(first);
        let is_done = self.dispatch(fabric, &mut members, deadline).map_err(failed)?;
        let mut delivered = match self.under_way.replace(members) {
            Some(before) => self.deliver(fabric, before, deadline)?,
            None => Vec::new(),
        };
        if let Some(members) = self.under_way.take_if(|_| is_done) {
            delivered.extend(self.deliver(fabric, members, deadline)?);
        }
        Ok(delivered)
    }

    /// Exchanges and completes everything.
    pub fn deliver_all(
        &mut self,
        fabric: &mut Fabric,
        deadline: Instant,
    ) -> Result<Vec<Member>, Failed> {
        let mut delivered = self.close(fabric, deadline)?;
        if let Some(last) = self.under_way.take() {
            delivered.extend(self.deliver(fabric, last, deadline)?);
        }
        Ok(delivered)
    }

    /// Lets go of what is kept of buckets that are gone.
    pub fn forget(&mut self, buckets: &[u32]) {
        for bucket in buckets {
            self.buckets.remove(bucket);
        }
        self.counters.retire(buckets);
    }

    /// Takes the momentum over from the optimizer, or gives it back.
    pub fn set_momentum(&mut self, momentum: Option<Momentum>) {
        self.momentum = momentum;
    }

    /// Whether exchanges can be undone from now on. It costs as much memory as there is to undo.
    pub fn keep_for_undo(&mut self, is_wanted: bool) {
        self.can_undo = is_wanted;
        self.buckets.values_mut().for_each(Bucket::keep_no_longer);
    }

    /// The training job has looked at the gradients that were exchanged since the last call, and
    /// changed their unit by `factor`. If it has `skipped` the step, all that was exchanged goes
    /// back to where it was: nobody has used it.
    pub fn take_note_of_step(&mut self, skipped: bool, factor: f32) -> cuda::Result<()> {
        for bucket in self.buckets.values_mut() {
            if skipped {
                bucket.undo();
            }
            bucket.forget_kept();
            if factor != 1.0 {
                bucket.rescale(factor)?;
            }
        }
        Ok(())
    }

    /// What is kept of a bucket; nothing if it was never exchanged. It may wait for a device.
    pub fn state_of(&self, number: u32, limit: Duration) -> cuda::Result<State> {
        self.buckets.get(&number).map_or(Ok(State::default()), |bucket| bucket.state(limit))
    }

    /// Puts back what a bucket kept when its state was saved.
    pub fn load(&mut self, number: u32, state: State) {
        self.buckets.insert(number, Bucket::from(state));
    }

    /// Sends what is chosen of some buckets on its way. Returns whether they can be completed at once.
    fn dispatch(
        &mut self,
        fabric: &mut Fabric,
        members: &mut [Member],
        deadline: Instant,
    ) -> Result<bool, Failure> {
        let Some(method) = self.method.clone() else { return Ok(true) };
        let manner = Manner { method: &method, momentum: self.momentum };
        let lane = members.first().map_or(0, |member| member.tensor.lane());
        let (path, mut means) = self.on_path(fabric, lane, deadline)?;
        path.dispatch(&mut means, members, manner)?;
        Ok(path.is_done_when_dispatched())
    }

    /// Completes the oldest exchange under way, whose members these are.
    fn deliver(
        &mut self,
        fabric: &mut Fabric,
        mut members: Vec<Member>,
        deadline: Instant,
    ) -> Result<Vec<Member>, Failed> {
        let failed = Failed::at(&members[0]);
        let method = self.method.clone();
        let lane = members[0].tensor.lane();
        let (path, mut means) = self.on_path(fabric, lane, deadline).map_err(&failed)?;
        let sent = match &method {
            Some(method) => path.receive(&mut means, &mut members, method).map_err(&failed)?,
            None => 0,
        };
        count(means.counters, &members, sent);
        for member in &members {
            path.hand_out_within(&mut means, &member.tensor).map_err(&failed)?;
        }
        Ok(members)
    }
}

/// How long it is until then.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Counts an exchange that is complete, for which this rank has sent so many bytes.
fn count(counters: &GradientCounters, members: &[Member], sent: u64) {
    let elements =
        |member: &Member| member.shard.as_ref().map_or(0, |shard| shard.sent_elements) as u64;
    let all: u64 = members.iter().map(elements).sum();
    for member in members {
        let shard = member.shard.as_ref();
        let is_weighed = member.tensor.lane() == 0;
        let weight = shard.map(|shard| shard.weight).unwrap_or_default();
        counters.record(BucketExchange {
            bucket: member.bucket.number,
            step: member.bucket.step + 1,
            gradient_bytes: member.tensor.span.bytes as u64,
            carried_bytes: shard.map_or(0, |shard| shard.bytes() as u64),
            wire_bytes: (sent * elements(member)).checked_div(all).unwrap_or(0),
            density: member.density,
            residual_ratio: is_weighed.then(|| weight.residual_ratio()),
        });
    }
}
