//! A shard that is exchanged in two legs, with what is kept of it.

use crate::codec::Gradient;
use std::sync::Arc;

/// The shard of a bucket that is exchanged, with what is kept of it.
pub struct QuantizedShard<'a> {
    /// The index of its bucket in the exchange.
    pub bucket: usize,
    pub gradient: Gradient<'a>,
    pub residual: &'a mut [f32],
    /// Empty if steps do not follow sizes.
    pub sizes: Arc<Vec<u16>>,
}
