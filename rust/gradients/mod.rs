//! How gradients are exchanged between hosts, after GradientFlow: fused, rounded, only the most important
//! chunks, and nothing lost.
//!
//! [`Gradients::exchange`] takes one bucket at a time. A bucket is summed within its host and held until
//! enough of them are together ([`fusion`]). Then they are exchanged as one ([`exchanger`]): each is added
//! to its residual, the ranks agree on the norms of its chunks and so on which are sent, and the selected
//! chunks go to the other hosts. The sums are put into the tensors when the next exchange is on its way,
//! or the backward pass is over.
//!
//! How each stage is done depends on where the gradients are, and is an [`exchange_path`]: [`host_path`]
//! for host memory, with a [`courier`] that takes each [`parcel`] round the ring, or [`device_path`].
//! What has to survive from step to step is in [`store`].
//!
//! Everything happens in the order of the program, which is the same on every rank. Only an exchange that
//! all ranks have agreed on changes the state of a bucket.

mod accumulation;
mod api;
mod bootstrap;
mod bucket;
mod config;
mod courier;
mod device_path;
mod devices;
mod exchange_path;
mod exchanger;
mod failure;
mod fused_bucket;
mod fusion;
mod host_path;
mod norms;
mod parcel;
mod parcel_pool;
mod paths;
mod shard;
mod state_buffer;
mod store;

pub use api::Gradients;
pub use bucket::BucketState;
pub use config::{CompressionConfig, CompressionStarted};
pub use courier::Courier;
pub use devices::{DeviceTicket, Devices, Obstacle};
pub use failure::ExchangeFailure;
pub use fused_bucket::{Placement, Tensor};
pub use fusion::{Completed, Failed};
#[cfg(test)]
pub use parcel::FULL_ELEMENTS;
