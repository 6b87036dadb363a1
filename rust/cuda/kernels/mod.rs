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

/// The argument of the quantiser's kernels for its rounding: the step in units of the root mean square
/// of a block; 0 stands for [`Rounding::ToMaximum`].
pub fn quantizer_step(rounding: Rounding) -> f32 {
    match rounding {
        Rounding::ToMaximum => 0.0,
        Rounding::Unbiased { step } => step,
    }
}

/// In place of a slot: the chunk is not sent. The same constant is in kernels.cu.
pub const NOT_SELECTED: u32 = u32::MAX;
