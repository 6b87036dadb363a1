//! The path through the memory of the host: the worker accumulates, chooses and packs, and a courier
//! takes the parcels round the ring between hosts, while the worker is at the next exchange.

use super::courier::{Courier, Delivery};
use super::member::{Member, Shard};
use super::method::Method;
use super::norms;
use super::numbers::{Home, Numbers};
use super::path::{Manner, Means, Path};
use super::stock::Stock;
use super::tensor::{Place, Tensor};
use crate::codec::{Gradient, Momentum, add_velocity};
use crate::collective::hierarchical;
use crate::collective::span::Span;
use crate::observe::gradient_counters::Stage;
use crate::simd::element::Element;
use crate::simd::reducer::Reducer;
use crate::transport::Failure;
use std::time::Instant;

#[derive(Default)]
pub struct HostPath {
    /// Without one this rank carries nothing.
    pub courier: Option<Courier>,
    stock: Stock,
    /// Room in which a chunk is remembered while it is changed.
    room: Vec<f32>,
}

impl Path for HostPath {
    fn home(&self) -> Home {
        Home::Host
    }

    fn reduce_within(&mut self, means: &mut Means, tensor: &Tensor) -> Result<(), Failure> {
        let (reducer, in_arenas) = on_host(tensor)?;
        let Means { fabric, counters, deadline, .. } = means;
        counters.time(Stage::WithinHost, || {
            hierarchical::reduce_within(fabric, tensor.span, in_arenas, reducer, *deadline)
        })
    }

    fn add_velocity(
        &mut self,
        shard: Span,
        element: Element,
        velocity: &mut Numbers,
        momentum: Momentum,
    ) -> Result<(), Failure> {
        // SAFETY: until it is handed out, the shard is this rank's alone.
        let gradient = Gradient::from_bytes(unsafe { shard.as_slice() }, element);
        let mut gradient = gradient.expect("only such have momentum here");
        add_velocity(&mut gradient, velocity.on_host(), momentum);
        Ok(())
    }

    fn reduce_across(&mut self, means: &mut Means, tensor: &Tensor) -> Result<u64, Failure> {
        let (reducer, _) = on_host(tensor)?;
        let Means { fabric, counters, deadline, .. } = means;
        let before = fabric.ring().map_or(0, |(ring, _)| ring.sent());
        counters.time(Stage::Wire, || {
            hierarchical::reduce_across(fabric, tensor.span, reducer, *deadline)
        })?;
        Ok(fabric.ring().map_or(0, |(ring, _)| ring.sent()) - before)
    }

    fn hand_out_within(&mut self, means: &mut Means, tensor: &Tensor) -> Result<(), Failure> {
        let (_, in_arenas) = on_host(tensor)?;
        let Means { fabric, counters, deadline, .. } = means;
        counters.time(Stage::WithinHost, || {
            hierarchical::hand_out_within(fabric, tensor.span, in_arenas, *deadline)
        })
    }

    /// From the gradients to the parcel, and off it goes.
    fn dispatch(
        &mut self,
        means: &mut Means,
        members: &mut [Member],
        manner: Manner,
    ) -> Result<(), Failure> {
        let HostPath { courier: Some(courier), stock, room } = self else { return Ok(()) };
        let Means { fabric, buckets, counters, can_undo, deadline } = means;
        let Manner { method, momentum } = manner;
        let seq = members[0].job.seq;
        let mut shards: Vec<_> = members
            .iter_mut()
            .enumerate()
            .filter_map(|(index, member)| {
                let (number, density) = (member.bucket.number, member.density);
                member.shard.as_mut().map(|shard| (index, number, density, shard))
            })
            .collect();

        let limit = deadline.saturating_duration_since(Instant::now());
        counters
            .time(Stage::Accumulate, || {
                for (_, number, _, shard) in &mut shards {
                    let bucket = buckets.entry(*number).or_default();
                    if *can_undo {
                        bucket.keep()?;
                    }
                    bucket.make_room(shard.elements(), true, momentum, &Home::Host, limit)?;
                    shard.accumulate(bucket, momentum, room);
                }
                Ok(())
            })
            .map_err(moved_from_device)?;

        let own: Vec<f32> =
            shards.iter().flat_map(|(_, _, _, shard)| shard.norms.iter().copied()).collect();
        let mut sums = own.clone();
        let sent = counters
            .time(Stage::Norms, || norms::sum_over_hosts(fabric, seq, &mut sums, *deadline))?;
        counters.add_norm_bytes(sent);

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
        let mut parcel = stock.take(method.wire, *deadline);
        for (member, number, density, shard) in &shards {
            let clears = momentum.is_some_and(|by| method.clears_velocity(*density, by));
            let bucket = buckets.entry(*number).or_default();
            for (range, scale) in shard.chosen() {
                if parcel.is_full_for(range.len()) {
                    let next = stock.take(method.wire, *deadline);
                    let full = std::mem::replace(&mut parcel, next);
                    courier.send(full)?;
                }
                let (load, out) = parcel.add(*member, range, scale);
                Shard::pack(bucket, method.wire, &load, clears, out);
            }
        }
        counters.add_seconds(Stage::Pack, start.elapsed().as_secs_f64());
        // Also if it is empty: an exchange ends with its last parcel.
        courier.send(parcel.last())
    }

    fn is_done_when_dispatched(&self) -> bool {
        false
    }

    fn receive(
        &mut self,
        means: &mut Means,
        members: &mut [Member],
        method: &Method,
    ) -> Result<u64, Failure> {
        let HostPath { courier: Some(courier), stock, .. } = self else { return Ok(0) };
        let Means { fabric, buckets, counters, .. } = means;
        let is_first_host = fabric.topology().host() == 0;
        let mut sent_in_all = 0;
        loop {
            let delivery = counters.time(Stage::Wait, || courier.receive(|| fabric.check()))?;
            let Delivery { mut parcel, outcome, seconds, sent } = delivery;
            counters.add_seconds(Stage::Wire, seconds);
            sent_in_all += sent;
            outcome?;
            counters.time(Stage::Unpack, || {
                for load in std::mem::take(&mut parcel.loads) {
                    let member = &mut members[load.member];
                    let Some(shard) = &mut member.shard else { continue };
                    let bucket = buckets.entry(member.bucket.number).or_default();
                    shard.unpack(bucket, method.wire, &load, &mut parcel, is_first_host);
                }
            });
            let is_last = parcel.is_last();
            stock.put_back(parcel);
            if is_last {
                break;
            }
        }
        stock.end_exchange();
        Ok(sent_in_all)
    }
}

/// How a tensor of this path is added up, and the tensors of this host's ranks if they share memory.
fn on_host(tensor: &Tensor) -> Result<(&Reducer, Option<&[Span]>), Failure> {
    match &tensor.place {
        Place::Host { reducer, in_arenas } => Ok((reducer, in_arenas.as_deref())),
        Place::Device { .. } => Err(Failure::Broken("a tensor is not on its path".to_string())),
    }
}

/// Only a bucket that was on a device before can bring this.
fn moved_from_device(fault: crate::cuda::Fault) -> Failure {
    Failure::Broken(format!("what is kept of a bucket cannot be moved from a device: {fault}"))
}
