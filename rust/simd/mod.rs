//! Arithmetic: the fold at the heart of a reduction, and what other rooms build kernels of.
//!
//! [`reducer`] is the way in: it chooses once, for an [`element`] type and a reduction, the
//! function that the best [`instructions`] of this CPU allow. The bodies in `kernel` are written
//! once and compiled for each instruction set. Whichever set runs, the result is the same to the
//! last bit (but for which NaN a NaN is). Nothing here allocates, blocks or knows about ranks
//! other than their number.
//!
//! `lanes` and `blocks` are for the kernels of other rooms: floats of any size, 32 at a time.

pub(crate) mod blocks;
mod choice;
pub mod element;
pub mod instructions;
mod kernel;
pub(crate) mod lanes;
pub(crate) mod number;
mod operation;
#[cfg(target_arch = "x86_64")]
mod packed;
#[cfg(test)]
pub(crate) mod random;
pub mod reducer;
pub(crate) mod sixteen;
mod tile;
