//! Gradients in the memory of GPUs: what finds and loads the libraries, compiles the kernels, and puts the
//! exchange of gradients on a stream.
//!
//! Nothing here is needed to build or to load gflow: what is missing on a machine is an error only when a
//! CUDA tensor is used. Nothing here knows of a group or waits for the other ranks; and of what is put on
//! a stream nobody waits for the end, but for the [`watchdog`] and those who save a state.

mod cache;
mod communicator;
mod compiler;
mod context;
mod device_buffer;
mod device_queue;
mod device_slice;
mod driver;
mod event;
mod exchange;
mod fault;
mod findings;
#[cfg(test)]
mod host_kernels;
mod intra_host;
mod kernel_module;
#[cfg(test)]
mod kernel_tests;
mod kernels;
mod libraries;
mod memory;
mod nccl;
mod nvrtc;
mod pinned;
mod report;
mod scratch;
mod stream;
mod watchdog;

pub use communicator::{Communicator, CommunicatorRank, OnPoll, close_in_background};
pub use context::Context;
pub use device_buffer::DeviceBuffer;
pub use device_queue::DeviceQueue;
#[cfg(test)]
pub use device_queue::hooks;
pub use device_slice::DeviceSlice;
pub use event::Event;
pub use exchange::{DeviceShard, InterHostExchange};
pub use fault::{Fault, Result};
pub use findings::{Finding, probe};
pub use intra_host::IntraHostExchange;
#[cfg(test)]
pub use libraries::NCCL_VARIABLE;
pub use memory::DeviceMemory;
pub use nccl::{UNIQUE_ID_BYTES, UniqueId};
pub use report::DeviceReport;
pub use scratch::Scratch;
pub use stream::Stream;
pub use watchdog::{Completion, WatchFailure, Watchdog, WatchdogClient};
