//! The path through host memory: the worker accumulates, selects and packs, and a courier takes the
//! parcels round the ring between hosts while the worker does the next exchange.

use super::bucket::{Bucket, HostBuffers, Needed};
use super::courier::{Courier, Delivery};
use super::exchange_path::{ExchangeContext, ExchangePath, ExchangePlan};
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Placement, Tensor};
use super::norms;
use super::parcel_pool::ParcelPool;
use super::shard::Shard;
use super::state_buffer::{Location, StateBuffer};
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
    /// A rank without one carries nothing.
    pub courier: Option<Courier>,
    pool: ParcelPool,
    /// Holds a copy of a chunk while it changes.
    scratch: Vec<f32>,
}

/// A shard that this rank carries, and which bucket of the exchange it belongs to.
struct CarriedShard<'a> {
    index: usize,
    number: u32,
    density: f64,
    shard: &'a mut Shard,
}

fn carried_shards(buckets: &mut [FusedBucket]) -> Vec<CarriedShard<'_>> {
    let buckets = buckets.iter_mut().enumerate();
    buckets
        .filter_map(|(index, fused)| {
            let (number, density) = (fused.agreed.number, fused.density);
            fused.shard.as_mut().map(|shard| CarriedShard { index, number, density, shard })
        })
        .collect()
}

impl ExchangePath for HostPath {
    fn location(&self) -> Location {
        Location::Host
    }

    fn reduce_within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<(), ExchangeFailure> {
        let (reducer, in_arenas) = on_host(tensor)?;
        let ExchangeContext { fabric, counters, deadline, .. } = context;
        counters.time(Stage::WithinHost, || {
            hierarchical::reduce_within(fabric, tensor.span, in_arenas, reducer, *deadline)
        })?;
        Ok(())
    }

    fn add_velocity(
        &mut self,
        mut shard: Span,
        element: Element,
        velocity: &mut StateBuffer,
        momentum: Momentum,
    ) -> Result<(), ExchangeFailure> {
        let velocity = velocity.as_host_mut().ok_or_else(not_on_host)?;
        // SAFETY: until it is handed out, only this rank uses the shard.
        let gradient = Gradient::from_bytes(unsafe { shard.as_mut_slice() }, element);
        let mut gradient = gradient.expect("only these types have momentum here");
        add_velocity(&mut gradient, velocity, momentum);
        Ok(())
    }

    fn reduce_across(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<u64, ExchangeFailure> {
        let (reducer, _) = on_host(tensor)?;
        let ExchangeContext { fabric, counters, deadline, .. } = context;
        let before = fabric.ring().map_or(0, |(ring, _)| ring.sent());
        counters.time(Stage::Wire, || {
            hierarchical::reduce_across(fabric, tensor.span, reducer, *deadline)
        })?;
        Ok(fabric.ring().map_or(0, |(ring, _)| ring.sent()) - before)
    }

    fn distribute_within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<(), ExchangeFailure> {
        let (_, in_arenas) = on_host(tensor)?;
        let ExchangeContext { fabric, counters, deadline, .. } = context;
        counters.time(Stage::WithinHost, || {
            hierarchical::distribute_within(fabric, tensor.span, in_arenas, *deadline)
        })?;
        Ok(())
    }

    fn dispatch(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
    ) -> Result<(), ExchangeFailure> {
        if self.courier.is_none() {
            return Ok(());
        }
        let seq = buckets[0].tensor.info.seq;
        let mut shards = carried_shards(buckets);
        self.accumulate(context, &mut shards, plan.momentum)?;
        select(context, &mut shards, seq, plan)?;
        self.pack(context, &shards, plan)
    }

    fn is_done_when_dispatched(&self) -> bool {
        false
    }

    fn receive(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
    ) -> Result<u64, ExchangeFailure> {
        let HostPath { courier: Some(courier), pool, .. } = self else { return Ok(0) };
        let ExchangeContext { fabric, store, counters, .. } = context;
        let is_first_host = fabric.topology().host() == 0;
        let mut total_sent = 0;
        loop {
            let delivery = counters.time(Stage::Wait, || courier.receive(|| fabric.check()))?;
            let Delivery { mut parcel, outcome, seconds, sent } = delivery;
            counters.add_seconds(Stage::Wire, seconds);
            total_sent += sent;
            outcome?;
            counters.time(Stage::Unpack, || -> Result<(), ExchangeFailure> {
                for chunk in std::mem::take(&mut parcel.chunks) {
                    let bucket = &mut buckets[chunk.bucket];
                    let Some(shard) = &mut bucket.shard else { continue };
                    let state = state_on_host(store.entry(bucket.agreed.number))?;
                    shard.unpack(state, plan.config.wire, &chunk, &mut parcel, is_first_host);
                }
                Ok(())
            })?;
            let is_last = parcel.is_last();
            pool.put_back(parcel);
            if is_last {
                break;
            }
        }
        pool.end_exchange();
        Ok(total_sent)
    }
}

impl HostPath {
    /// Moves the gradients into their residuals.
    fn accumulate(
        &mut self,
        context: &mut ExchangeContext,
        shards: &mut [CarriedShard],
        momentum: Option<Momentum>,
    ) -> Result<(), ExchangeFailure> {
        let (limit, can_undo) = (context.time_left(), context.store.can_undo());
        let ExchangeContext { store, counters, .. } = context;
        counters.time(Stage::Accumulate, || {
            for CarriedShard { number, shard, .. } in shards {
                let bucket = store.entry(*number);
                if can_undo {
                    bucket.back_up().map_err(moved_from_device)?;
                }
                let needed = Needed {
                    elements: shard.elements(),
                    residual: true,
                    momentum,
                    location: &Location::Host,
                    limit,
                };
                bucket.make_room(&needed).map_err(moved_from_device)?;
                shard.accumulate(state_on_host(bucket)?, momentum, &mut self.scratch);
            }
            Ok(())
        })
    }

    /// Packs the selected chunks into parcels, and sends each off when it is full.
    fn pack(
        &mut self,
        context: &mut ExchangeContext,
        shards: &[CarriedShard],
        plan: ExchangePlan,
    ) -> Result<(), ExchangeFailure> {
        let HostPath { courier: Some(courier), pool, .. } = self else { return Ok(()) };
        let ExchangeContext { store, counters, deadline, .. } = context;
        let ExchangePlan { config, momentum } = plan;
        let start = Instant::now();
        let mut parcel = pool.take(config.wire, *deadline);
        for CarriedShard { index, number, density, shard } in shards {
            let clears = momentum.is_some_and(|by| config.clears_velocity(*density, by));
            let mut state = state_on_host(store.entry(*number))?;
            for (range, scale) in shard.selected() {
                if parcel.is_full_for(range.len()) {
                    let next = pool.take(config.wire, *deadline);
                    let full = std::mem::replace(&mut parcel, next);
                    courier.send(full)?;
                }
                let (chunk, out) = parcel.add(*index, range, scale);
                Shard::pack(&mut state, config.wire, &chunk, clears, out);
            }
        }
        counters.add_seconds(Stage::Pack, start.elapsed().as_secs_f64());
        // Even if it is empty: an exchange ends with its last parcel.
        courier.send(parcel.into_last())?;
        Ok(())
    }
}

/// Agrees with the other hosts on the norms, and selects the chunks to send.
fn select(
    context: &mut ExchangeContext,
    shards: &mut [CarriedShard],
    seq: u64,
    plan: ExchangePlan,
) -> Result<(), ExchangeFailure> {
    let ExchangeContext { fabric, counters, deadline, .. } = context;
    let own: Vec<f32> = shards.iter().flat_map(|one| one.shard.norms.iter().copied()).collect();
    let mut sums = own.clone();
    let sent =
        counters.time(Stage::Norms, || norms::sum_over_hosts(fabric, seq, &mut sums, *deadline))?;
    counters.add_norm_bytes(sent);
    counters.time(Stage::Pack, || {
        let (mut own, mut sums) = (&own[..], &sums[..]);
        for CarriedShard { density, shard, .. } in shards {
            let (norms, later) = sums.split_at(shard.norms.len());
            shard.norms.copy_from_slice(norms);
            shard.select(*density, plan.config.wire, &own[..norms.len()]);
            shard.spread_poison();
            (sums, own) = (later, &own[norms.len()..]);
        }
    });
    Ok(())
}

/// How a tensor of this path is summed, and the tensors of this host's ranks if they share memory.
fn on_host(tensor: &Tensor) -> Result<(&Reducer, Option<&[Span]>), ExchangeFailure> {
    match &tensor.placement {
        Placement::Host { reducer, in_arenas } => Ok((reducer, in_arenas.as_deref())),
        Placement::Device { .. } => {
            Err(Failure::Broken("a tensor is not on its path".to_string()).into())
        }
    }
}

/// The buffers of a bucket, for which room was made here.
fn state_on_host(bucket: &mut Bucket) -> Result<HostBuffers<'_>, ExchangeFailure> {
    bucket.as_host_mut().ok_or_else(not_on_host)
}

fn not_on_host() -> ExchangeFailure {
    Failure::Broken("the state of a bucket is not in host memory".to_string()).into()
}

/// Only a bucket that was on a device before can fail like this.
fn moved_from_device(fault: crate::cuda::Fault) -> ExchangeFailure {
    Failure::Broken(format!("what is kept of a bucket cannot be moved from a device: {fault}"))
        .into()
}
