//! The codecs: what a rank sends of its gradient, and how the rest is kept for later.
//!
//! | codec | methods | what is sent | how sums form |
//! |---|---|---|---|
//! | [`chunks`] | `chunks`, `fp16`, `bf16` | the heaviest chunks, or all, as floats | on the wire, at each hop of a ring |
//! | [`quantizer`] | `int8` to `ternary` | every element, each with a few levels | at the owner of a block |
//!
//! [`Coding`] says which of them a bucket takes in a step, and answers what does not depend on which:
//! density, bytes, the part of a residual that is fed back.
//!
//! Codecs are pure: slices in, slices out. No I/O, clocks or threads, and the result is the same to the
//! bit on every CPU and GPU (`rust/cuda/` holds the same arithmetic as CUDA kernels).
//!
//! | file | |
//! |---|---|
//! | `chunks/` | GradientFlow's method, and plain rounding |
//! | `quantizer/` | a few levels for each element |
//! | `coding.rs` | what a gradient is sent as in one step |
//! | `gradient.rs` | a slice of gradient: f32, f16 or bf16 |
//! | `wire.rs` | the float format on the wire |
//! | `samples.rs` | tests: ordinary and nasty numbers |

pub mod chunks;
pub mod coding;
pub mod gradient;
pub mod quantizer;
#[cfg(test)]
pub(crate) mod samples;
pub mod wire;

pub use chunks::{
    ChunkGrid, ChunkNorms, ExchangeNorms, Momentum, Schedule, accumulate, add_norms,
    add_partial_sum, add_velocity, chunks_to_send, fill, pack, return_hop_error,
    return_unpack_error, scale_for, select, unpack,
};
pub use coding::Coding;
pub use gradient::Gradient;
pub use wire::Wire;
