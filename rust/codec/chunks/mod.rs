//! Chunks: GradientFlow's method. The heaviest chunks of a gradient are sent, as floats; the others wait,
//! and are sent later. With all of them sent it is the plain rounding of `fp16` and `bf16`.
//!
//! One step, for a gradient cut into chunks:
//!
//! 1. [`accumulate`] moves each chunk of the gradient into the *residual* (everything not sent
//!    yet) and returns the norm of the new residual. With [`Momentum`], a *velocity* goes in
//!    between.
//! 2. The ranks add up their norms, and [`select`] picks the chunks with the largest sums: as
//!    many as the [`Schedule`] says, and the same ones on every rank.
//! 3. For each selected chunk, [`scale_for`] derives a power of two from the norm; [`pack`]
//!    multiplies the residual by it, rounds to the [`Wire`](super::Wire) format, and leaves the
//!    rounding error in the residual.
//! 4. At each hop of the ring, [`add_partial_sum`] adds this rank's share to the incoming sum and
//!    records the rounding error; [`return_hop_error`] puts that back into the residual.
//! 5. [`unpack`] turns the final sum into the [`Gradient`](super::Gradient). A chunk that was not
//!    sent is zero. What a 16-bit gradient can't represent goes to one rank's residual
//!    ([`return_unpack_error`]).
//!
//! So no part of a gradient is ever lost. Infinity and NaN never enter a residual: a chunk that
//! contains one is *poisoned*, its norm is infinity or NaN, and all ranks receive that value as
//! the gradient of the whole chunk.
//!
//! | file | |
//! |---|---|
//! | `chunk_grid.rs` | how elements are cut into chunks |
//! | `schedule.rs` | density per step: warm-up, ramp, final value |
//! | `norms.rs` | L1 norms of chunks and how the ranks' norms add up |
//! | `selection.rs` | which chunks are sent: those with the largest norms |
//! | `scale.rs` | the power of two that keeps a chunk within fp16's range |
//! | `kernels/` | the passes over memory, compiled per instruction set |
//! | `reference.rs` | tests: the whole method in plain scalar code |
//! | `method_tests.rs` | tests: the kernels put together, compared with the reference |

mod chunk_grid;
mod kernels;
#[cfg(test)]
mod method_tests;
mod norms;
#[cfg(test)]
pub(crate) mod reference;
mod scale;
mod schedule;
mod selection;

pub use chunk_grid::ChunkGrid;
pub use kernels::accumulate::accumulate;
pub use kernels::momentum::{Momentum, add_velocity};
pub use kernels::pack::pack;
pub use kernels::partial_sum::add_partial_sum;
pub use kernels::residual::{return_hop_error, return_unpack_error};
pub use kernels::unpack::{fill, unpack};
pub use norms::{ChunkNorms, ExchangeNorms, add_norms};
pub use scale::scale_for;
pub use schedule::{Schedule, chunks_to_send};
pub use selection::select;
