//! The engine of gflow, a `torch.distributed` backend.
//!
//! A collective enters through [`bridge`], waits in the queue of its group's [`engine`], is agreed
//! on and carried out with the other ranks by [`collective`], which adds up with [`simd`] and
//! moves bytes over a [`transport`], and is counted by [`observe`]. What is sent of a gradient is
//! calculated by [`codec`], which knows nothing but [`simd`], or on a GPU by [`cuda`], which
//! knows the types of both. Nothing in this crate knows about Python or torch's types, and nothing
//! in it may end the process.
//!
//! Dependencies point downward only. A folder may use those after the next `>`, and everything may
//! use the leaves (`tools/check_layers.py`, run by `make lint`, reads these two lines):
//!
//! ```text
//! bridge > engine > gradients > cuda, collective > codec, transport > observe > simd
//! leaves: error, fork, huge_pages, sync
//! ```

pub mod bridge;
pub mod codec;
pub mod collective;
pub mod cuda;
pub mod engine;
pub mod error;
pub mod fork;
pub mod gradients;
pub mod huge_pages;
pub mod observe;
pub mod simd;
mod sync;
pub mod transport;
