//! The raw layer: finding and loading the libraries, their function tables and status codes.
//!
//! The driver's functions come from `cudarc`, which loads libcuda at first use; those of NCCL and
//! NVRTC are declared here as far as gflow calls them.

pub mod driver;
pub mod fault;
#[macro_use]
mod function_table;
pub mod library;
pub mod nccl;
pub mod nvrtc;
