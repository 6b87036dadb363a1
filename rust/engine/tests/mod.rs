//! Whole groups, on ranks that are threads of one process.

mod collectives;
mod devices;
mod gradients;
mod lifecycle;
