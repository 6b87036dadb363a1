//! How gradients travel to the other hosts and back, depending on where they are: through host memory
//! ([`super::host_path`]), or over a device ([`super::device_path`], one for each device of this rank).
//!
//! A path carries out single stages. Which buckets go together and when is decided in [`super::fusion`],
//! and the order of the stages in [`super::exchanger`], alike for all paths.

use super::auto::LinkMeter;
use super::bucket::Bucket;
use super::config::CompressionConfig;
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Tensor};
use super::state_buffer::{Location, StateBuffer};
use super::store::BucketStore;
use crate::codec::{Coding, Momentum};
use crate::collective::fabric::Fabric;
use crate::collective::span::Span;
use crate::observe::gradient_counters::GradientCounters;
use crate::simd::element::Element;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Context for every stage of an exchange.
pub struct ExchangeContext<'a> {
    pub fabric: &'a mut Fabric,
    pub store: &'a mut BucketStore,
    pub counters: &'a Arc<GradientCounters>,
    /// Learns how long bytes take to other hosts.
    pub link: &'a mut LinkMeter,
    pub deadline: Instant,
}

impl ExchangeContext<'_> {
    /// The time until the deadline.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// How the buckets of one exchange are compressed.
#[derive(Clone, Copy)]
pub struct ExchangePlan<'a> {
    pub config: &'a CompressionConfig,
    pub momentum: Option<Momentum>,
    /// What all of them are sent as.
    pub coding: Coding,
}

impl ExchangePlan<'_> {
    /// Whether the sizes of a bucket's elements are followed at this step, by what is delivered.
    pub fn follows_sizes(&self, step: u64) -> bool {
        self.coding.uses_sizes() || self.config.follows_sizes_ahead(step)
    }
}

pub trait ExchangePath {
    /// Where the state of its buckets is.
    fn location(&self) -> Location;

    /// Waits until the state of a bucket can move to this path, if it is elsewhere, and checks the peers
    /// meanwhile.
    fn wait_to_move(
        &mut self,
        context: &mut ExchangeContext,
        number: u32,
    ) -> Result<(), ExchangeFailure>;

    /// Sums a tensor within the host. Every carrier then has the sum of its shard in its own tensor.
    fn reduce_within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<(), ExchangeFailure>;

    /// Replaces a shard that is sent whole by what momentum makes of it.
    fn add_velocity(
        &mut self,
        shard: Span,
        element: Element,
        velocity: &mut StateBuffer,
        momentum: Momentum,
    ) -> Result<(), ExchangeFailure>;

    /// Makes every carrier's shard the exact sum over all hosts. Returns how many bytes this rank sent.
    fn reduce_across(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<u64, ExchangeFailure>;

    /// Brings all shards to all ranks of the host.
    fn distribute_within(
        &mut self,
        context: &mut ExchangeContext,
        tensor: &Tensor,
    ) -> Result<(), ExchangeFailure>;

    /// Updates the sizes of a shard's elements from what was delivered at this step.
    fn follow_sizes(
        &mut self,
        shard: Span,
        element: Element,
        bucket: &mut Bucket,
        step: u64,
    ) -> Result<(), ExchangeFailure>;

    /// Encodes some buckets and sends off what is sent of them.
    fn dispatch(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
    ) -> Result<(), ExchangeFailure>;

    /// Whether a dispatched exchange needs nothing more of the host, so that it can be completed at once.
    /// If not, the host does something else meanwhile.
    fn is_done_when_dispatched(&self) -> bool;

    /// Puts the sums into the shards of the oldest exchange that was dispatched. Returns how many bytes
    /// this rank sent for it.
    fn receive(
        &mut self,
        context: &mut ExchangeContext,
        buckets: &mut [FusedBucket],
        plan: ExchangePlan,
    ) -> Result<u64, ExchangeFailure>;
}
