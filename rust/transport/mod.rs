//! How ranks reach each other: small messages between the peers of a group, memory that the ranks
//! of a host share, and byte streams between hosts.
//!
//! A transport moves bytes and notices peers that leave. It never looks into a message, and never
//! blocks past its deadline or past an interrupt.

pub mod frame;
pub mod handshake;
pub mod interrupt;
#[cfg(test)]
pub mod memory;
mod peers;
pub mod shm;
mod slow_wait;
pub mod socket;
pub mod tcp;

pub use peers::{Failure, Peers, Watch, loss_reason, reason_of_loss};
pub use slow_wait::named_ranks;
