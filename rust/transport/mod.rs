//! How ranks reach each other: one small message to and from every peer of a group.
//!
//! A transport moves bytes and notices peers that leave. It never looks into a message, and it
//! never blocks past its deadline or past an interrupt.

pub mod frame;
pub mod handshake;
pub mod interrupt;
#[cfg(test)]
pub mod memory;
pub mod tcp;

use frame::Goodbye;
use interrupt::Interrupt;
use std::time::{Duration, Instant};

/// Why a swap did not happen. Ranks are numbers of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// These ranks had sent nothing when the deadline came.
    Late(Vec<usize>),
    /// This rank's connection ended, or it said why it leaves.
    Lost { rank: usize, reason: String },
    /// This rank sent something that is not a frame.
    Garbled { rank: usize, reason: String },
    /// The group was aborted here while it waited.
    Interrupted,
}

/// The other ranks of a group, as one rank sees them.
pub trait Peers: Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Sends `message(peer)` to every peer and returns what every peer sent, by rank. The own
    /// place is empty. Calls pair up in order: the n-th swap here meets the n-th swap there.
    fn swap(
        &mut self,
        message: &dyn Fn(usize) -> Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Failure>;

    /// Waits until `done` is raised, and returns early if a peer is lost or the group interrupted.
    /// A peer that leaves in order is not lost: it has done its part.
    fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure>;

    /// Tells every peer that and why this rank leaves, without waiting for anyone.
    fn say_goodbye(&mut self, goodbye: Goodbye);
}
