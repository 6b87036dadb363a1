//! Arithmetic on buffers of numbers: reductions, 16-bit floats, and what other folders build their
//! own vector kernels from.
//!
//! Every kernel is written once and compiled for each instruction set (SSE2 or NEON, AVX2,
//! AVX-512); the best one for this CPU is picked at run time. The result is the same to the bit
//! with each of them, except for the payload of a NaN. Nothing here allocates, blocks, or knows
//! anything about ranks except how many there are.
//!
//! | file | |
//! |---|---|
//! | `element.rs` | element types and reductions |
//! | `instruction_set.rs` | which instruction sets there are; compiles a body for each |
//! | `number.rs` | the traits: plain data, numbers, floats, elements as stored in memory |
//! | `half_precision.rs` | f16 and bf16, converted one at a time without branches |
//! | `x86.rs` | AVX2 and AVX-512 registers of floats as numbers |
//! | **reductions** | |
//! | `reducer.rs` | the entry: folds buffers of one element type by one reduction |
//! | `dispatch.rs` | picks the fold for an instruction set, element type and reduction |
//! | `fold.rs` | the fold: all its loops |
//! | `reduce_op.rs` | sum, average, product, min, max |
//! | `tile.rs` | scratch space on the stack for one cache tile of the fold |
//! | **for kernels elsewhere** | |
//! | `lanes.rs` | 32 floats at a time, whatever their size in memory; `dispatch!` |
//! | `blocks.rs` | a byte slice as blocks of lanes and a padded tail |

pub(crate) mod blocks;
mod dispatch;
pub mod element;
mod fold;
pub(crate) mod half_precision;
pub mod instruction_set;
pub(crate) mod lanes;
pub(crate) mod number;
#[cfg(test)]
pub(crate) mod random;
mod reduce_op;
pub mod reducer;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;
