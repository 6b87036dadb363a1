//! Gradients on a GPU: what a rank keeps there, and the exchange that is enqueued on its stream.
//!
//! An exchange only enqueues: how much is sent is known beforehand, so nothing waits for the
//! device, and work that the caller enqueues afterwards sees the result.

mod device_buffer;
mod device_queue;
mod inter_host;
mod intra_host;
mod report;
mod scratch;
mod shard_layout;
mod stages;
mod two_legs;

pub use device_buffer::DeviceBuffer;
pub use device_queue::DeviceQueue;
#[cfg(test)]
pub use device_queue::hooks;
pub use inter_host::InterHostExchange;
pub use intra_host::IntraHostExchange;
pub use report::DeviceReport;
pub use scratch::Scratch;
pub use shard_layout::DeviceShard;
pub use two_legs::{QuantizedShard, TwoLegExchange};
