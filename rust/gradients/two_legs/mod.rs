//! The exchange of quantised gradients through host memory, in two legs.
//!
//! Sums of quantised blocks cannot be formed on the wire. So every block of a shard has a host that
//! owns it ([`Ownership`](crate::codec::quantizer::Ownership)). On the first leg each host sends the
//! owner what is due of the block; the owner adds up, in the order of hosts. On the second leg it
//! sends the sum to all. A block is quantised twice, whatever the number of hosts.
//!
//! The worker encodes blocks into parcels and hands them to the courier, whose [`route`] takes them
//! over both legs and adds up in between, several at a time. They come back with the sums, which the
//! worker decodes into the gradients. The arithmetic is in [`crate::codec::quantizer`].
//!
//! | file | what it is |
//! |---|---|
//! | `parcel` | blocks of the gradients of one exchange, as they travel |
//! | `quantized_shard` | a shard, with what is kept of it |
//! | `route` | both legs, for the parcels that are under way |
//! | `stages` | the worker's part: encoding, and decoding of what comes back |

mod parcel;
mod quantized_shard;
mod route;
mod stages;

pub use quantized_shard::QuantizedShard;
pub use route::LinkRoute;
pub use stages::TwoLegs;
