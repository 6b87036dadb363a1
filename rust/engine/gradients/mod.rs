//! The way of gradients between hosts, by GradientFlow's method: fused, rounded, only the important
//! chunks, and nothing lost.
//!
//! A bucket is summed within its host, then held until enough of them are together
//! ([`Gradients::hold`]). Then they are exchanged as one ([`Gradients::close`]): each is added to
//! what was not sent before, the ranks agree on the norms of its chunks and so on which are sent,
//! and the chosen ones go round the ring with the [`courier`]. What the courier brings back is put
//! into the tensors when the next exchange is on its way, or the backward pass is over
//! ([`Gradients::deliver_all`]).
//!
//! Everything here happens in the order of the program, which is the same on every rank; nothing
//! may depend on time, or on what one rank alone knows. Nothing is changed of what a bucket keeps
//! but by an exchange that all ranks have agreed on.

mod accumulation;
mod bucket;
mod courier;
mod member;
mod method;
mod norms;
mod parcel;

pub use bucket::Bucket;
pub use courier::Courier;
pub use member::{Member, Shard, can_be_compressed};
pub use method::Method;
#[cfg(test)]
pub use parcel::ENOUGH;

use crate::arithmetic::element::Element;
use crate::arithmetic::reducer::Reducer;
use crate::collective::agreement::AgreedBucket;
use crate::collective::call::Call;
use crate::collective::fabric::Fabric;
use crate::collective::hosts;
use crate::collective::span::Span;
use crate::compress::{Gradient, Momentum, add_velocity};
use crate::metrics::gradients::{Exchanged, GradientCounters, Stage};
use crate::transport::Failure;
use courier::Delivery;
use parcel::Parcel;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What one rank knows and does about the gradients of its group.
pub struct Gradients {
    /// `None`: every gradient is exchanged exactly.
    method: Option<Method>,
    momentum: Option<Momentum>,
    /// What is kept from step to step, by the number of the bucket.
    buckets: BTreeMap<u32, Bucket>,
    /// Buckets that wait for others to be exchanged with.
    held: Vec<Member>,
    /// The exchange that the courier is at, or has brought back.
    under_way: Option<Vec<Member>>,
    courier: Option<Courier>,
    /// Parcels that came back; their memory is used again.
    used: Vec<Parcel>,
    /// Room in which a chunk is remembered while it is changed.
    room: Vec<f32>,
    /// Whether the exchanges of a step that the training job skips have to be undone.
    can_undo: bool,
    counters: Arc<GradientCounters>,
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
            courier: None,
            used: Vec::new(),
            room: Vec::new(),
            can_undo: false,
            counters: Arc::default(),
        }
    }

    pub fn counters(&self) -> &Arc<GradientCounters> {
        &self.counters
    }

    /// Gives the one who carries parcels; without one this rank carries nothing.
    pub fn employ(&mut self, courier: Courier) {
        self.courier = Some(courier);
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
        tensor: Span,
        in_arenas: Option<&[Span]>,
        (element, reducer): (Element, &Reducer),
        deadline: Instant,
    ) -> Result<(), Failure> {
        let kept = self.buckets.entry(bucket.number).or_default();
        kept.step = bucket.step + 1;
        let sent = |fabric: &mut Fabric| fabric.ring().map_or(0, |(ring, _)| ring.sent());
        let before = sent(fabric);
        let shard = hosts::own_shard(fabric.topology(), tensor);
        self.counters.time(Stage::WithinHost, || {
            hosts::reduce_within(fabric, tensor, in_arenas, reducer, deadline)
        })?;
        let momentum = self.momentum.filter(|_| can_be_compressed(element));
        if let (Some(shard), Some(momentum)) = (shard, momentum) {
            kept.make_room(shard.bytes / element.bytes(), false, Some(momentum));
            if self.can_undo {
                kept.keep();
            }
            // SAFETY: until it is handed out, the shard is this rank's alone.
            let gradient = Gradient::from_bytes(unsafe { shard.as_slice() }, element);
            let mut gradient = gradient.expect("only such have momentum here");
            add_velocity(&mut gradient, &mut kept.velocity, momentum);
        }
        self.counters
            .time(Stage::Wire, || hosts::reduce_across(fabric, tensor, reducer, deadline))?;
        self.counters.time(Stage::WithinHost, || {
            hosts::hand_out_within(fabric, tensor, in_arenas, deadline)
        })?;
        self.counters.exchanged(Exchanged {
            bucket: bucket.number,
            step: bucket.step + 1,
            gradient_bytes: tensor.bytes as u64,
            carried_bytes: shard.map_or(0, |shard| shard.bytes as u64),
            wire_bytes: sent(fabric) - before,
            density: 1.0,
            residual_ratio: 0.0,
        });
        Ok(())
    }

    /// Takes a bucket, after it was summed within the host. It is exchanged when the time comes.
    pub fn hold(&mut self, member: Member) {
        let bucket = self.buckets.entry(member.bucket.number).or_default();
        bucket.step = member.bucket.step + 1;
        self.held.push(member);
    }

    /// Whether the buckets that are held are enough for an exchange.
    pub fn is_full(&self) -> bool {
        let bytes: usize = self.held.iter().map(|member| member.tensor.bytes).sum();
        self.method.as_ref().is_none_or(|method| bytes >= method.fusion_bytes)
    }

    /// How long the exchange of what is held or under way may take; `None` if there is nothing.
    pub fn timeout(&self) -> Option<Duration> {
        let mut members = self.under_way.iter().flatten().chain(&self.held);
        members.next().map(|member| member.job.call.timeout)
    }

    /// Exchanges the buckets that are held, as one. Returns those of the exchange before, which
    /// are complete now: while the parcel of one goes round, the next is made.
    pub fn close(&mut self, fabric: &mut Fabric, deadline: Instant) -> Result<Vec<Member>, Failed> {
        let mut members = std::mem::take(&mut self.held);
        let Some(first) = members.first() else { return Ok(Vec::new()) };
        let failed = Failed::at(first);
        self.dispatch(fabric, &mut members, deadline).map_err(failed)?;
        match self.under_way.replace(members) {
            Some(before) => self.deliver(fabric, before, deadline),
            None => Ok(Vec::new()),
        }
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
        self.counters.forget(buckets);
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
    pub fn take_note_of_step(&mut self, skipped: bool, factor: f32) {
        for bucket in self.buckets.values_mut() {
            if skipped {
                bucket.undo();
            }
            bucket.forget_kept();
            if factor != 1.0 {
                bucket.rescale(factor);
            }
        }
    }

    pub fn bucket(&self, number: u32) -> Option<&Bucket> {
        self.buckets.get(&number)
    }

    /// Puts back what a bucket kept when its state was saved.
    pub fn load(&mut self, number: u32, bucket: Bucket) {
        self.buckets.insert(number, bucket);
    }

    /// From the gradients to the parcel, and off it goes.
    fn dispatch(
        &mut self,
        fabric: &mut Fabric,
        members: &mut [Member],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let Gradients {
            method, momentum, buckets, courier, can_undo, counters, room, used, ..
        } = self;
        let (Some(method), Some(courier)) = (method, courier) else { return Ok(()) };
        let seq = members[0].job.seq;
        let mut shards: Vec<_> = members
            .iter_mut()
            .enumerate()
            .filter_map(|(index, member)| {
                let (number, density) = (member.bucket.number, member.density);
                member.shard.as_mut().map(|shard| (index, number, density, shard))
            })
            .collect();

        counters.time(Stage::Accumulate, || {
            for (_, number, _, shard) in &mut shards {
                let bucket = buckets.entry(*number).or_default();
                if *can_undo {
                    bucket.keep();
                }
                shard.accumulate(bucket, *momentum, room);
            }
        });

        let own: Vec<f32> =
            shards.iter().flat_map(|(_, _, _, shard)| shard.norms.iter().copied()).collect();
        let mut sums = own.clone();
        let sent = counters
            .time(Stage::Norms, || norms::sum_over_hosts(fabric, seq, &mut sums, deadline))?;
        counters.norms(sent);

        counters.time(Stage::Pack, || {
            let (mut own, mut sums) = (&own[..], &sums[..]);
            for (_, _, density, shard) in &mut shards {
                let (norms, later) = sums.split_at(shard.norms.len());
                shard.norms.copy_from_slice(norms);
                shard.choose(*density, method.wire, &own[..norms.len()]);
                shard.spread_poison();
                (sums, own) = (later, &own[norms.len()..]);
            }
        });
        let start = Instant::now();
        let mut parcel = Parcel::new(method.wire, deadline, used.pop());
        for (member, number, density, shard) in &shards {
            let clears = momentum.is_some_and(|by| method.clears_velocity(*density, by));
            let bucket = buckets.entry(*number).or_default();
            for (range, scale) in shard.chosen() {
                if parcel.is_full_for(range.len()) {
                    let next = Parcel::new(method.wire, deadline, used.pop());
                    let full = std::mem::replace(&mut parcel, next);
                    courier.send(full)?;
                }
                let (load, out) = parcel.add(*member, range, scale);
                Shard::pack(bucket, method.wire, &load, clears, out);
            }
        }
        counters.add(Stage::Pack, start.elapsed().as_secs_f64());
        // Also if it is empty: an exchange ends with its last parcel.
        courier.send(parcel.last())
    }

    /// Completes the oldest exchange under way, whose members these are.
    fn deliver(
        &mut self,
        fabric: &mut Fabric,
        mut members: Vec<Member>,
        deadline: Instant,
    ) -> Result<Vec<Member>, Failed> {
        let Gradients { method, buckets, courier, counters, used, .. } = self;
        let failed = Failed::at(&members[0]);
        let mut sent_in_all = 0;
        if let (Some(method), Some(courier)) = (method, courier) {
            let is_first_host = fabric.topology().host() == 0;
            let mut parcels = 0;
            loop {
                parcels += 1;
                let delivery = counters
                    .time(Stage::Wait, || courier.receive(|| fabric.check()))
                    .map_err(&failed)?;
                let Delivery { mut parcel, outcome, seconds, sent } = delivery;
                counters.add(Stage::Wire, seconds);
                sent_in_all += sent;
                outcome.map_err(&failed)?;
                counters.time(Stage::Unpack, || {
                    for load in std::mem::take(&mut parcel.loads) {
                        let member = &mut members[load.member];
                        let Some(shard) = &mut member.shard else { continue };
                        let bucket = buckets.entry(member.bucket.number).or_default();
                        shard.unpack(bucket, method.wire, &load, &mut parcel, is_first_host);
                    }
                });
                let is_last = parcel.is_last();
                used.push(parcel);
                if is_last {
                    break;
                }
            }
            // At a lower density fewer are needed than at the start of the ramp.
            used.truncate(2 * parcels);
        }
        count(counters, &members, sent_in_all);
        counters.time(Stage::WithinHost, || {
            members.iter().try_for_each(|member| {
                let in_arenas = member.in_arenas.as_deref();
                hosts::hand_out_within(fabric, member.tensor, in_arenas, deadline).map_err(&failed)
            })
        })?;
        Ok(members)
    }
}

/// Counts an exchange that is complete, for which this rank has sent so many bytes.
fn count(counters: &GradientCounters, members: &[Member], sent: u64) {
    let elements = |member: &Member| member.shard.as_ref().map_or(0, Shard::sent_elements) as u64;
    let all: u64 = members.iter().map(elements).sum();
    for member in members {
        let shard = member.shard.as_ref();
        let weight = shard.map(|shard| shard.weight).unwrap_or_default();
        counters.exchanged(Exchanged {
            bucket: member.bucket.number,
            step: member.bucket.step + 1,
            gradient_bytes: member.tensor.bytes as u64,
            carried_bytes: shard.map_or(0, |shard| shard.bytes() as u64),
            wire_bytes: (sent * elements(member)).checked_div(all).unwrap_or(0),
            density: member.density,
            residual_ratio: if weight.gradient > 0.0 {
                weight.unsent / weight.gradient
            } else {
                0.0
            },
        });
    }
}
