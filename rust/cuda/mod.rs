//! Gradients in the memory of GPUs: the kernels, what compiles them, and what finds the libraries that
//! come with torch. Nothing here is needed to build or to load gflow: what is missing on a machine is
//! an error only when a CUDA tensor is used.

mod cache;
pub mod compiler;
pub mod fault;
#[cfg(test)]
mod host_kernels;
#[cfg(test)]
mod kernel_tests;
pub mod kernels;
pub mod libraries;
pub mod nvrtc;
