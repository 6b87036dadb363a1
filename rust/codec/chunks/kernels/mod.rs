//! The passes over memory that compression consists of. Each is written once, by blocks of 32
//! floats, and compiled for every instruction set; the result is the same to the bit with each.
//!
//! | file | |
//! |---|---|
//! | `accumulate.rs` | gradient into residual, with norms |
//! | `momentum.rs` | momentum correction: the velocity |
//! | `pack.rs` | residual to wire format |
//! | `partial_sum.rs` | one hop of the ring: incoming sum plus this rank's share |
//! | `residual.rs` | rounding errors of hops and of unpacking go back into the residual |
//! | `unpack.rs` | final sum to gradient |

pub mod accumulate;
pub mod momentum;
pub mod pack;
pub mod partial_sum;
pub mod residual;
#[cfg(test)]
mod tests;
pub mod unpack;
