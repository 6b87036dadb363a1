//! Gradients in GPU memory, in three layers that depend downwards only:
//!
//! | folder, file | what it holds |
//! |---|---|
//! | **what gflow does with them** | |
//! | [`watchdog`] | a thread that watches what is enqueued on a group's devices |
//! | [`findings`] | what `gflow doctor` reports |
//! | `exchange/inter_host` | the compressed exchange between hosts: all stages in order |
//! | `exchange/two_legs` | the exchange of quantised gradients between hosts |
//! | `exchange/intra_host` | reduce-scatter and all-gather within a host |
//! | `exchange/stages` | one kernel launch per stage of the exchange |
//! | `exchange/shard_layout`, `scratch` | where a shard's norms and wire elements are in scratch memory |
//! | `exchange/report` | stage times and norms, measured on the device |
//! | `exchange/device_queue`, `device_buffer` | one device of a rank in a group; a residual or velocity on it |
//! | `kernels/kernels.cu`, `quantizer.cu` | the kernels; those of the quantiser |
//! | `kernels/kernel`, `launch`, `module` | their names, launch shapes, and the module loaded on a device |
//! | `kernels/compile`, `norm_limit` | compiling them with NVRTC; the cap on norms |
//! | **checked wrappers** | |
//! | `safe/device`, `context`, `stream`, `event` | the driver's objects |
//! | `safe/memory`, `pinned` | device memory, owned or not; pinned host memory |
//! | `safe/nccl`, `communicator` | NCCL's calls, and a non-blocking communicator |
//! | `safe/nvrtc`, `disk_cache` | the compiler, and a cache for its output |
//! | **raw tables** | |
//! | `sys/library`, `function_table` | finding and loading the libraries |
//! | `sys/driver`, `nccl`, `nvrtc` | function tables and status codes |
//! | `sys/fault` | the error type of this folder |
//!
//! gflow builds and loads without any of these libraries: a missing one is an error only when a
//! CUDA tensor is used. Nothing here knows the group or waits for other ranks, and only the
//! [`watchdog`] and saving or loading a state wait for the device.

mod exchange;
mod findings;
mod kernels;
mod safe;
mod sys;
mod watchdog;
#[cfg(test)]
mod watchdog_tests;

#[cfg(test)]
pub use exchange::hooks;
pub use exchange::{
    DeviceBuffer, DeviceQueue, DeviceReport, DeviceShard, InterHostExchange, IntraHostExchange,
    QuantizedShard, Scratch, TwoLegExchange,
};
pub use findings::{Finding, probe};
pub use safe::communicator::{Communicator, OnPoll, close_in_background};
pub use safe::context::Context;
pub use safe::event::Event;
pub use safe::memory::{DeviceMemory, DeviceSlice};
pub use safe::nccl::CommunicatorRank;
pub use safe::stream::Stream;
pub use sys::fault::{Fault, Result};
#[cfg(test)]
pub use sys::library::NCCL_VARIABLE;
pub use sys::nccl::{UNIQUE_ID_BYTES, UniqueId};
pub use watchdog::{Completion, WatchFailure, Watchdog, WatchdogClient};
