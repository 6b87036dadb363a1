//! A gradient bucket in a fused exchange, from the agreement of the ranks until it is delivered.

use super::shard::Shard;
use super::tensor::Tensor;
use crate::collective::agreement::AgreedBucket;

pub struct FusedBucket {
    pub bucket: AgreedBucket,
    /// The fraction of its chunks that is sent in this step.
    pub density: f64,
    pub tensor: Tensor,
    /// The shard that this rank carries to the other hosts, if it carries one.
    pub shard: Option<Shard>,
}
