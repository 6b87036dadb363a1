//! The path through host memory. Of chunks, the worker accumulates, selects and packs, and a courier takes
//! the parcels round the ring between hosts while the worker does the next exchange. Quantised gradients
//! take two legs: see [`super::two_legs`].

use super::bucket::{Bucket, HostBuffers, Needed};
use super::courier::{Courier, Delivery};
use super::exchange_path::{ExchangeContext, ExchangePath, ExchangePlan};
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Placement, Tensor};
use super::norms;
use super::parcel::Parcel;
use super::parcel_pool::ParcelPool;
use super::shard::Shard;
use super::state_buffer::{Location, StateBuffer};
use super::two_legs::{QuantizedShard, TwoLegs};
use crate::codec::quantizer::{Quantizer, follow};
use crate::codec::{Coding, Gradient, Momentum, Wire, add_velocity};
use crate::collective::agreement::AgreedBucket;
use crate::collective::hierarchical;
use crate::collective::span::Span;
use crate::observe::gradient_counters::Stage;
use crate::simd::element::Element;
use crate::simd::reducer::Reducer;
use crate::transport::Failure;
use std::sync::Arc;
use std::time::Instant;

#[derive(Default)]
pub struct HostPath {
    /// A rank without one carries nothing.
    pub courier: Option<Courier<Parcel>>,
    /// For quantised gradients; a rank without it carries none.
    pub two_legs: Option<TwoLegs>,
    pool: ParcelPool,
    /// Holds a copy of a chunk while it changes.
    scratch: Vec<f32>,
}

/// A shard that this rank carries, and which bucket of the exchange it belongs to.
struct CarriedShard<'a> {
    index: usize,
    number: u32,
    step: u64,
    density: f64,
    shard: &'a mut Shard,
}

fn carried_shards(buckets: &mut [FusedBucket]) -> Vec<CarriedShard<'_>> {
    let buckets = buckets.iter_mut().enumerate();
    buckets
        .filter_map(|(index, fused)| {
            let AgreedBucket { number, step, .. } = fused.agreed;
            let density = fused.coding.density();
            fused.shard.as_mut().map(|shard| CarriedShard { index, number, step, density, shard })
        })
        .collect()
}

impl ExchangePath for HostPath {
    fn location(&self) -> Location {
        Location::Host
    }

    fn wait_to_move(
        &mut self,
        _context: &mut ExchangeContext,
        _number: u32,
    ) -> Result<(), ExchangeFailure> {
        // Copies from a device wait for it themselves.
        Ok(())
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
        let seq = buckets[0].tensor.info.seq;
        let mut shards = carried_shards(buckets);
        match plan.coding {
            Coding::Quantized(quantizer) => self.quantize(context, &mut shards, plan, quantizer),
            Coding::Chunks { .. } if self.courier.is_none() => Ok(()),
            Coding::Chunks { wire, .. } => {
                self.accumulate(context, &mut shards, plan.momentum)?;
                select(context, &mut shards, seq, wire)?;
                self.pack(context, &shards, plan, wire)
            }
        }
    }

    fn follow_sizes(
        &mut self,
        mut shard: Span,
        element: Element,
        bucket: &mut Bucket,
        step: u64,
    ) -> Result<(), ExchangeFailure> {
        // SAFETY: until it is handed out, only this rank uses the shard.
        let gradient = Gradient::from_bytes(unsafe { shard.as_mut_slice() }, element);
        if let (Some(mut gradient), Some(state)) = (gradient, bucket.as_host_mut()) {
            let sizes: &mut Vec<u16> = Arc::make_mut(state.sizes);
            follow(sizes, &mut gradient, step);
        }
        Ok(())
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
        let wire = match plan.coding {
            Coding::Quantized(_) => return self.receive_quantized(context, buckets, plan),
            Coding::Chunks { wire, .. } => wire,
        };
        let HostPath { courier: Some(courier), pool, .. } = self else { return Ok(0) };
        let ExchangeContext { fabric, store, counters, link, .. } = context;
        let is_first_host = fabric.topology().host() == 0;
        let mut total_sent = 0;
        loop {
            let delivery = counters.time(Stage::Wait, || courier.receive(|| fabric.check()))?;
            let Delivery { mut parcel, outcome, seconds, sent, .. } = delivery;
            counters.add_seconds(Stage::Wire, seconds);
            link.add(sent, seconds);
            total_sent += sent;
            outcome?;
            counters.time(Stage::Unpack, || -> Result<(), ExchangeFailure> {
                for chunk in std::mem::take(&mut parcel.chunks) {
                    let bucket = &mut buckets[chunk.bucket];
                    let Some(shard) = &mut bucket.shard else { continue };
                    let state = state_on_host(store.entry(bucket.agreed.number))?;
                    shard.unpack(state, wire, &chunk, &mut parcel, is_first_host);
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
        let (limit, remembered) = (context.time_left(), context.store.remembered());
        let ExchangeContext { store, counters, .. } = context;
        counters.time(Stage::Accumulate, || {
            for CarriedShard { number, shard, .. } in shards {
                let bucket = store.entry(*number);
                bucket.begin_change(remembered).map_err(moved_from_device)?;
                let needed = Needed {
                    elements: shard.elements(),
                    residual: true,
                    sizes: false,
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

    /// Encodes shards, and sends the parcels off as they are full.
    fn quantize(
        &mut self,
        context: &mut ExchangeContext,
        shards: &mut [CarriedShard],
        plan: ExchangePlan,
        quantizer: Quantizer,
    ) -> Result<(), ExchangeFailure> {
        let HostPath { two_legs: Some(two_legs), .. } = self else { return Ok(()) };
        let (limit, remembered) = (context.time_left(), context.store.remembered());
        let ExchangeContext { store, counters, deadline, .. } = context;
        let mut sending = two_legs.start(quantizer, *deadline);
        counters.time(Stage::Pack, || {
            for CarriedShard { index, number, step, shard, .. } in shards.iter_mut() {
                let bucket = store.entry(*number);
                bucket.begin_change(remembered).map_err(moved_from_device)?;
                let needed = Needed {
                    elements: shard.elements(),
                    residual: true,
                    sizes: plan.follows_sizes(*step),
                    momentum: plan.momentum,
                    location: &Location::Host,
                    limit,
                };
                bucket.make_room(&needed).map_err(moved_from_device)?;
                if let Some(momentum) = plan.momentum {
                    let velocity = state_on_host(bucket)?.velocity;
                    add_velocity(&mut shard.whole_gradient(), velocity, momentum);
                }
                shard.sent_elements = shard.elements();
                let mut quantized = quantized_shard(*index, shard, bucket, &quantizer)?;
                shard.exchange_norms = sending.add(&mut quantized)?;
            }
            Ok(sending.finish()?)
        })
    }

    /// Decodes the sums of the oldest exchange of quantised buckets.
    fn receive_quantized(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
    ) -> Result<u64, ExchangeFailure> {
        let HostPath { two_legs: Some(two_legs), .. } = self else { return Ok(0) };
        let ExchangeContext { fabric, store, counters, link, .. } = context;
        let mut total_sent = 0;
        loop {
            let receive = || two_legs.courier.receive(|| fabric.check());
            let delivery = counters.time(Stage::Wait, receive)?;
            let Delivery { parcel, outcome, seconds, seconds_summing, sent } = delivery;
            counters.add_seconds(Stage::Wire, seconds);
            counters.add_seconds(Stage::Sum, seconds_summing);
            link.add(sent, (seconds - seconds_summing).max(0.0));
            total_sent += sent;
            outcome?;
            let is_last = parcel.is_last;
            counters.time(Stage::Unpack, || -> Result<(), ExchangeFailure> {
                for segment in &parcel.segments {
                    let fused = &mut buckets[segment.bucket];
                    let Some(shard) = &mut fused.shard else { continue };
                    let bucket = store.entry(fused.agreed.number);
                    let mut shard =
                        quantized_shard(segment.bucket, shard, bucket, &parcel.quantizer)?;
                    two_legs.deliver(&parcel, segment, &mut shard);
                }
                Ok(())
            })?;
            two_legs.put_back(parcel);
            if is_last {
                break;
            }
        }
        for bucket in buckets {
            if !plan.follows_sizes(bucket.agreed.step) {
                continue;
            }
            let Some(shard) = &bucket.shard else { continue };
            let (span, element, step) = (shard.span, shard.element, bucket.agreed.step);
            let kept = store.entry(bucket.agreed.number);
            counters.time(Stage::Unpack, || self.follow_sizes(span, element, kept, step))?;
        }
        Ok(total_sent)
    }

    /// Packs the selected chunks into parcels, and sends each off when it is full.
    fn pack(
        &mut self,
        context: &mut ExchangeContext,
        shards: &[CarriedShard],
        plan: ExchangePlan,
        wire: Wire,
    ) -> Result<(), ExchangeFailure> {
        let HostPath { courier: Some(courier), pool, .. } = self else { return Ok(()) };
        let ExchangeContext { store, counters, deadline, .. } = context;
        let ExchangePlan { config, momentum, .. } = plan;
        let start = Instant::now();
        let mut parcel = pool.take(wire, *deadline);
        for CarriedShard { index, number, density, shard, .. } in shards {
            let clears = momentum.is_some_and(|by| config.clears_velocity(*density, by));
            let mut state = state_on_host(store.entry(*number))?;
            for (range, scale) in shard.selected() {
                if parcel.is_full_for(range.len()) {
                    let next = pool.take(wire, *deadline);
                    let full = std::mem::replace(&mut parcel, next);
                    courier.send(full)?;
                }
                let (chunk, out) = parcel.add(*index, range, scale);
                Shard::pack(&mut state, wire, &chunk, clears, out);
            }
        }
        counters.add_seconds(Stage::Pack, start.elapsed().as_secs_f64());
        // Even if it is empty: an exchange ends with its last parcel.
        courier.send(parcel.into_last())?;
        Ok(())
    }
}

/// A shard of the bucket with this index in the exchange, with what is kept of it.
fn quantized_shard<'a>(
    index: usize,
    shard: &'a mut Shard,
    bucket: &'a mut Bucket,
    quantizer: &Quantizer,
) -> Result<QuantizedShard<'a>, ExchangeFailure> {
    let state = state_on_host(bucket)?;
    let sizes = if quantizer.uses_sizes { state.sizes.clone() } else { Arc::default() };
    Ok(QuantizedShard {
        bucket: index,
        gradient: shard.whole_gradient(),
        residual: state.residual,
        sizes,
    })
}

/// Agrees with the other hosts on the norms, and selects the chunks to send.
fn select(
    context: &mut ExchangeContext,
    shards: &mut [CarriedShard],
    seq: u64,
    wire: Wire,
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
            shard.select(*density, wire, &own[..norms.len()]);
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
