//! A path: how gradients get to the other hosts and back, from where they are. One leads through the
//! memory of the host ([`super::host`]), one for each device over that ([`super::device`]).
//!
//! A path does what it is told, stage by stage. What is done when is decided by [`super::Gradients`],
//! for all of them alike.

use super::bucket::Bucket;
use super::member::Member;
use super::method::Method;
use super::numbers::{Home, Numbers};
use super::tensor::Tensor;
use crate::codec::Momentum;
use crate::collective::fabric::Fabric;
use crate::collective::span::Span;
use crate::observe::gradient_counters::GradientCounters;
use crate::simd::element::Element;
use crate::transport::Failure;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What is kept from step to step, by the number of the bucket.
pub type Buckets = BTreeMap<u32, Bucket>;

/// What a path works with, besides what it has itself.
pub struct Means<'a> {
    pub fabric: &'a mut Fabric,
    pub buckets: &'a mut Buckets,
    pub counters: &'a Arc<GradientCounters>,
    /// Whether exchanges may have to be undone.
    pub can_undo: bool,
    pub deadline: Instant,
}

/// How the gradients of one exchange are compressed.
#[derive(Clone, Copy)]
pub struct Manner<'a> {
    pub method: &'a Method,
    pub momentum: Option<Momentum>,
}

pub trait Path {
    /// Where what is kept of its buckets is.
    fn home(&self) -> Home;

    /// Sums a tensor within the host: every carrier then has the sum of its shard in its own tensor.
    fn reduce_within(&mut self, means: &mut Means, tensor: &Tensor) -> Result<(), Failure>;

    /// Replaces a shard that is sent whole by what momentum makes of it.
    fn add_velocity(
        &mut self,
        shard: Span,
        element: Element,
        velocity: &mut Numbers,
        momentum: Momentum,
    ) -> Result<(), Failure>;

    /// Makes every carrier's shard the sum over all hosts, exactly. Returns how many bytes this rank has
    /// sent for it.
    fn reduce_across(&mut self, means: &mut Means, tensor: &Tensor) -> Result<u64, Failure>;

    /// Brings all shards to all ranks of the host.
    fn hand_out_within(&mut self, means: &mut Means, tensor: &Tensor) -> Result<(), Failure>;

    /// Sends what is chosen of some buckets on its way.
    fn dispatch(
        &mut self,
        means: &mut Means,
        members: &mut [Member],
        manner: Manner,
    ) -> Result<(), Failure>;

    /// Whether what was dispatched needs nothing more of the host, so that it can be completed at once.
    /// Otherwise the host does something else meanwhile.
    fn is_done_when_dispatched(&self) -> bool;

    /// Puts what came back into the shards of the oldest exchange that was dispatched. Returns how many
    /// bytes this rank has sent for it.
    fn receive(
        &mut self,
        means: &mut Means,
        members: &mut [Member],
        method: &Method,
    ) -> Result<u64, Failure>;
}
