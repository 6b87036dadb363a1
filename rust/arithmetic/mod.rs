//! Arithmetic: the fold at the heart of a reduction, and the conversions of 16-bit floats.
//!
//! [`reducer`] is the way in: it chooses once, for an [`element`] type and a reduction, the
//! function that the best [`instructions`] of this CPU allow. The bodies in `kernel` are written
//! once and compiled for each instruction set. Whichever set runs, the result is the same to the
//! last bit (but for which NaN a NaN is). Nothing here allocates, blocks or knows about ranks
//! other than their number.

mod choice;
pub mod convert;
pub mod element;
pub mod instructions;
mod kernel;
mod number;
mod operation;
#[cfg(target_arch = "x86_64")]
mod packed;
pub mod reducer;
mod sixteen;
mod tile;
