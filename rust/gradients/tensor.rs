//! The tensor of a gradient bucket: where its memory is, and whose collective it belongs to.

use crate::collective::call::Call;
use crate::collective::span::Span;
use crate::simd::element::Element;
use crate::simd::reducer::Reducer;
use std::sync::Arc;

pub struct Tensor {
    pub span: Span,
    pub element: Element,
    pub place: Place,
    pub of: Arc<Doing>,
}

/// Where a tensor is.
pub enum Place {
    Host {
        reducer: Reducer,
        /// The tensors of all ranks of this host, if they live in shared memory.
        in_arenas: Option<Vec<Span>>,
    },
    /// On this lane of the group, the same number on all ranks.
    Device { lane: u32 },
}

/// A collective that was agreed on, for messages.
#[derive(Debug)]
pub struct Doing {
    pub seq: u64,
    pub call: Call,
}

impl Tensor {
    /// The number of the lane that it is on; 0 in the memory of the host.
    pub fn lane(&self) -> u32 {
        match self.place {
            Place::Host { .. } => 0,
            Place::Device { lane } => lane,
        }
    }
}
