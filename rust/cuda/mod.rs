//! Gradients in the memory of GPUs: what finds and loads the libraries, compiles the kernels, and puts the
//! exchange of gradients on a stream.
//!
//! Nothing here is needed to build or to load gflow: what is missing on a machine is an error only when a
//! CUDA tensor is used. Nothing here knows of a group or waits for the other ranks; and of what is put on
//! a stream nobody waits for the end, but for the [`watchdog`] and those who save a state.

mod cache;
pub mod communicator;
pub mod compiler;
pub mod context;
pub mod driver;
pub mod event;
pub mod exchange;
pub mod fault;
pub mod findings;
#[cfg(test)]
mod host_kernels;
#[cfg(test)]
mod kernel_tests;
pub mod kernels;
pub mod lane;
pub mod launcher;
pub mod libraries;
pub mod memory;
pub mod nccl;
pub mod numbers;
pub mod nvrtc;
mod pinned;
pub mod report;
pub mod room;
pub mod stream;
pub mod watchdog;
pub mod within;

pub use fault::{Fault, Result};
