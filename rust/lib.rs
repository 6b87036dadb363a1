//! The engine of gflow, a `torch.distributed` backend.
//!
//! A collective enters through [`bridge`], waits in the queue of its group's [`engine`], is agreed
//! on with the other ranks by [`collective`] over a [`transport`], runs, and is counted by
//! [`metrics`]. Dependencies point downward only, in that order. Nothing in this crate knows
//! about Python or torch's types, and nothing in it may end the process.

pub mod bridge;
pub mod collective;
pub mod engine;
pub mod error;
pub mod metrics;
pub mod transport;
