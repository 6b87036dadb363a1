//! Compression: what a rank sends of its gradient, and how it keeps the rest.
//!
//! A gradient is cut into chunks by a [`grid`]. A step of the method, for each of them or for
//! those that are sent:
//!
//! 1. [`accumulate`] moves the gradient into the *residual*, what has not been sent yet, and gives
//!    the norm of the new residual. With [`momentum`] it goes there by way of a *velocity*.
//! 2. The norms of all ranks are added up, and [`selection`] picks the chunks with the largest:
//!    as many as the [`schedule`] says, and the same on every rank.
//! 3. [`scale`] gives for a norm the power of two that a chunk is sent with, [`pack`] makes of the
//!    residual the floats of the [`wire`], and leaves in it what those could not express.
//! 4. As the ranks' floats meet on the way round the ring, [`hop`] adds them up, and keeps what
//!    the sum lost.
//! 5. [`unpack`] makes the sum a [`gradient`] again. That of a chunk not sent is zero. What a
//!    gradient of 16 bits cannot express is a [`rest`], which one rank keeps.
//!
//! So nothing is lost, and infinity and NaN never enter a residual: a chunk that has any is
//! *poisoned*, its norm is infinity or NaN, and that is what all ranks are given as its gradient.
//!
//! This room is pure: slices in, slices out. It must never do input or output, look at a clock,
//! start a thread, or give another result on another CPU.

pub mod accumulate;
pub mod gradient;
pub mod grid;
pub mod hop;
pub mod momentum;
pub mod pack;
#[cfg(test)]
pub(crate) mod reference;
pub mod rest;
#[cfg(test)]
pub(crate) mod samples;
pub mod scale;
pub mod schedule;
pub mod selection;
#[cfg(test)]
mod tests;
pub mod unpack;
pub mod weight;
pub mod wire;

pub use accumulate::{Norms, accumulate};
pub use gradient::Gradient;
pub use grid::Grid;
pub use momentum::{Momentum, add_velocity};
pub use pack::pack;
pub use rest::keep_rest;
pub use scale::scale_for;
pub use schedule::Schedule;
pub use selection::{add_norms, select};
pub use unpack::{fill, unpack};
pub use weight::Weight;
pub use wire::Wire;
