//! The engine of gflow, a `torch.distributed` backend.
//!
//! A collective enters through [`bridge`] and waits in the queue of its group's [`engine`]. The ranks
//! agree on it and carry it out in [`collective`], which sums with [`simd`] and moves bytes over a
//! [`transport`]. A gradient bucket that crosses hosts goes through [`gradients`], which selects and packs
//! what is sent with [`codec`], or on a GPU with [`cuda`]. [`observe`] counts and logs. Below the bridge
//! nothing calls Python or uses torch's codes (messages to the user may quote the Python API), and nothing
//! here may end the process.
//!
//! Dependencies point downward only. A folder may use every folder after the next `>`, and
//! everything may use the leaves (`make lint` runs `tools/check_layers.py`, which reads this):
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
