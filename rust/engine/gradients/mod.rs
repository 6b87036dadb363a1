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
    undo: Undo,
    counters: Arc<GradientCounters>,
}

/// What is needed to undo the exchanges of a step that the training job skips.
#[derive(Default)]
struct Undo {
    is_wanted: bool,
    /// The number of this backward pass.
    pass: u64,
    /// Passes that had something that was not finite.
    poisoned: Vec<u64>,
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
            undo: Undo::default(),
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
            if self.undo.is_wanted {
                kept.keep(self.undo.pass, |pass| self.undo.poisoned.contains(&pass));
            }
            // SAFETY: until it is handed out, the shard is this rank's alone.
            let gradient = Gradient::from_bytes(unsafe { shard.as_slice() }, element);
            let mut gradient = gradient.expect("only such have momentum here");
            add_velocity(&mut gradient, &mut kept.velocity, momentum);
        }
        self.counters
            .time(Stage::Wire, || hosts::reduce_across(fabric, tensor, reducer, deadline))?;
        if let Some(shard) = shard.filter(|_| momentum.is_some() && self.undo.is_wanted) {
            // SAFETY: as above.
            let gradient = Gradient::from_bytes(unsafe { shard.as_slice() }, element);
            if gradient.is_some_and(|gradient| !gradient.is_finite()) {
                self.undo.poisoned.push(self.undo.pass);
            }
        }
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

    /// A member of an exchange, for a bucket that the ranks have agreed on.
    pub fn shard_of(&self, span: Option<Span>, element: Element) -> Option<Shard> {
        self.method.as_ref()?.shard(span, element)
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

    /// The backward pass is over: what comes next belongs to another step.
    pub fn end_pass(&mut self) {
        self.undo.pass += 1;
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
        self.undo.is_wanted = is_wanted;
        if !is_wanted {
            self.buckets.values_mut().for_each(Bucket::keep_no_longer);
        }
    }

    /// The training job has looked at the gradients and changed their unit by `factor`. If it has
    /// `skipped` the step because something was not finite, all that was exchanged in the same
    /// backward pass as that goes back to where it was: nobody has used it.
    pub fn take_note_of_step(&mut self, skipped: bool, factor: f32) {
        let poisoned = std::mem::take(&mut self.undo.poisoned);
        for bucket in self.buckets.values_mut() {
            if skipped {
                bucket.undo(|pass| poisoned.contains(&pass));
            }
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
        let Gradients { method, momentum, buckets, courier, undo, counters, room, used, .. } = self;
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
                if undo.is_wanted {
                    bucket.keep(undo.pass, |pass| undo.poisoned.contains(&pass));
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
        if shards.iter().any(|(_, _, _, shard)| shard.is_poisoned()) {
            undo.poisoned.push(undo.pass);
        }

        let start = Instant::now();
        let mut parcel = Parcel::new(method.wire, deadline, used.pop());
        for (member, number, _, shard) in &shards {
            let bucket = buckets.entry(*number).or_default();
            for (range, scale) in shard.chosen() {
                if parcel.is_full_for(range.len()) {
                    let next = Parcel::new(method.wire, deadline, used.pop());
                    let full = std::mem::replace(&mut parcel, next);
                    courier.send(full).map_err(|_| Failure::Interrupted)?;
                }
                let (load, out) = parcel.add(*member, range, scale);
                Shard::pack(bucket, method.wire, &load, out);
            }
        }
        counters.add(Stage::Pack, start.elapsed().as_secs_f64());
        // Also if it is empty: an exchange ends with its last parcel.
        courier.send(parcel.last()).map_err(|_| Failure::Interrupted)
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
        if let (Some(method), Some(courier)) = (method, courier) {
            let mut sent_in_all = 0;
            loop {
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
                        shard.unpack(bucket, method.wire, &load, &mut parcel);
                    }
                });
                let is_last = parcel.is_last();
                used.push(parcel);
                if is_last {
                    break;
                }
            }
            count(counters, &members, sent_in_all);
        }
        counters.time(Stage::WithinHost, || {
            members.iter().try_for_each(|member| {
                let in_arenas = member.in_arenas.as_deref();
                hosts::hand_out_within(fabric, member.tensor, in_arenas, deadline).map_err(&failed)
            })
        })?;
        Ok(members)
    }
}

/// Counts an exchange for which this rank has sent so many bytes.
fn count(counters: &GradientCounters, members: &[Member], sent: u64) {
    let shards = || members.iter().filter_map(|member| member.shard.as_ref());
    let all: usize = shards().map(Shard::sent_elements).sum();
    for member in members {
        let Some(shard) = &member.shard else { continue };
        let weight = shard.weight;
        counters.exchanged(Exchanged {
            bucket: member.bucket.number,
            step: member.bucket.step + 1,
            gradient_bytes: member.tensor.bytes as u64,
            carried_bytes: shard.bytes() as u64,
            wire_bytes: (sent * shard.sent_elements() as u64).checked_div(all as u64).unwrap_or(0),
            density: member.density,
            residual_ratio: if weight.gradient > 0.0 {
                weight.unsent / weight.gradient
            } else {
                0.0
            },
        });
    }
}
