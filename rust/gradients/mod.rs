//! How gradients are exchanged between hosts: fused, and sent as what the user or the group itself has
//! chosen. What is particular to a codec is in [`crate::codec`].
//!
//! [`Gradients::exchange`] takes one bucket at a time. A bucket is summed within its host and held until
//! enough of them are together. Then they are exchanged as one: each is added to its residual, encoded
//! and sent. With chunks the ranks agree first on norms, and so on which are sent. The sums are put into the tensors when the next exchange is on its way, or the backward pass has
//! ended.
//!
//! | file | what it is |
//! |---|---|
//! | `api` | [`Gradients`], what the engine calls |
//! | `fusion` | which buckets are exchanged together, and when: the only file that decides that |
//! | `exchanger` | the stages of an exchange in order, and what is counted |
//! | `config`, `method` | what the user set, and how it treats a bucket in a step |
//! | `auto` | what `method="auto"` stands for: measured, predicted, chosen |
//! | `audit` | what was delivered, compared with the exact sum now and then |
//! | `notice` | what the user is told |
//! | `exchange_path`, `paths` | the stages, as a trait; one path for host memory, one for each device |
//! | `host_path`, `shard`, `accumulation`, `norms` | the stages in host memory |
//! | `courier` | the thread that takes parcels to the other hosts while the worker continues |
//! | `ring_route`, `parcel`, `parcel_pool` | how chunks travel round the ring |
//! | `two_legs` | how quantised gradients travel: to the owner of each block, and back as sums |
//! | `device_path`, `devices`, `bootstrap` | the stages on a device, its queue, and its NCCL communicators |
//! | `fused_bucket`, `failure` | a bucket during one exchange, and why that failed |
//! | `bucket`, `state_buffer`, `sizes_buffer`, `store` | what is kept of a bucket from step to step |
//! | `unused` | what was delivered for parameters that no rank used, and is taken back |
//!
//! Everything happens in the order of the program, which is the same on every rank. Only an exchange that
//! all ranks have agreed on changes the state of a bucket.

mod accumulation;
mod api;
mod audit;
mod auto;
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
mod method;
mod norms;
mod notice;
mod parcel;
mod parcel_pool;
mod paths;
mod ring_route;
mod shard;
mod sizes_buffer;
mod state_buffer;
mod store;
mod two_legs;
mod unused;

pub use api::Gradients;
pub use bucket::BucketState;
pub use config::CompressionConfig;
pub use devices::{DeviceTicket, Devices, Obstacle};
pub use failure::ExchangeFailure;
pub use fused_bucket::{Placement, Tensor};
pub use fusion::{Completed, Failed, Progress};
pub use method::{MaxNoise, Method};
pub use notice::Notice;
#[cfg(test)]
pub use parcel::FULL_ELEMENTS;
pub use unused::{ModelLayout, Part};
