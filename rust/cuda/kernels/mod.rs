//! gflow's CUDA kernels: `kernels.cu` and, for the quantiser, `quantizer.cu`. NVRTC compiles them at
//! first use, and the image is cached on disk.
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
pub use kernel::{Float, Kernel};
pub use module::{Argument, KernelModule};
pub use norm_limit::norm_limit;

use crate::codec::quantizer::Rounding;

/// The arguments of the quantiser's kernels for its rounding: step and margin. A step of 0 stands for
/// [`Rounding::ToMaximum`].
pub fn rounding_arguments(rounding: Rounding) -> [f32; 2] {
    match rounding {
        Rounding::ToMaximum => [0.0, 0.0],
        Rounding::Unbiased { step, margin } => [step, margin],
    }
}

/// In place of a slot: the chunk is not sent. The same constant is in kernels.cu.
pub const NOT_SELECTED: u32 = u32::MAX;
