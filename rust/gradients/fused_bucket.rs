//! A gradient bucket in a fused exchange, from the agreement of the ranks until it is delivered: its tensor,
//! and the shard of it that this rank carries.

use super::shard::Shard;
use super::unused::Delivered;
use crate::codec::{Coding, Momentum};
use crate::collective::agreement::AgreedBucket;
use crate::collective::info::CollectiveInfo;
use crate::collective::span::Span;
use crate::simd::element::Element;
use crate::simd::reducer::Reducer;
use std::sync::Arc;
use std::time::Duration;

pub struct FusedBucket {
    pub agreed: AgreedBucket,
    /// What it is sent as in this step.
    pub coding: Coding,
    pub tensor: Tensor,
    /// Whether what is delivered is compared with the exact sum.
    pub is_audited: bool,
    /// How long it took to sum it within the host.
    pub within_host: Duration,
    /// The shard that this rank carries to the other hosts, if it carries one.
    pub shard: Option<Shard>,
}

impl FusedBucket {
    /// What its exchange has delivered, if that is in host memory.
    pub fn delivered(&self, momentum: Option<Momentum>) -> Option<Delivered> {
        let Tensor { span, element, .. } = self.tensor;
        let shard = self.shard.as_ref().map_or(0..0, |shard| {
            let start = shard.span.address as usize - span.address as usize;
            start / element.bytes()..(start + shard.span.bytes) / element.bytes()
        });
        let is_on_host = self.tensor.device_slot() == 0;
        let coding = self.coding;
        is_on_host.then_some(Delivered { span, element, shard, coding, momentum })
    }
}

/// The tensor of a bucket, and the collective that it belongs to.
pub struct Tensor {
    pub span: Span,
    pub element: Element,
    pub placement: Placement,
    pub info: Arc<CollectiveInfo>,
}

/// Where a tensor is, with what it takes to sum it there.
pub enum Placement {
    Host {
        reducer: Reducer,
        /// The tensors of all ranks of this host, if they are in shared memory.
        in_arenas: Option<Vec<Span>>,
    },
    /// On the device in this slot of the group, which is the same on all ranks.
    Device { device_slot: u32 },
}

impl Tensor {
    /// The device slot that it is in; 0 for host memory.
    pub fn device_slot(&self) -> u32 {
        match self.placement {
            Placement::Host { .. } => 0,
            Placement::Device { device_slot } => device_slot,
        }
    }
}
