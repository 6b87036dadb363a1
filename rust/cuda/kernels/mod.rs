//! gflow's CUDA kernels: `kernels.cu` and `quantizer.cu`, compiled at first use by NVRTC and cached on disk.
//!
//! The tests here run the same source on the CPU and compare every kernel with `codec`, bit by bit.

mod compile;
mod kernel;
pub mod launch;
mod module;
mod norm_limit;
#[cfg(test)]
mod tests;

pub use compile::compiled;
pub use kernel::{Float, Kernel, number_of};
pub use module::{Argument, KernelModule};
pub use norm_limit::norm_limit;

/// In place of a slot: the chunk is not sent. The same constant is in kernels.cu.
pub const NOT_SELECTED: u32 = u32::MAX;
