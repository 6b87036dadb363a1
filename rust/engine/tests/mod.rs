//! Whole groups, on ranks that are threads of one process.

mod collectives;
mod devices;
mod gradient_case;
mod gradient_reference;
mod gradients;
mod harness;
mod lifecycle;
mod quantized;
