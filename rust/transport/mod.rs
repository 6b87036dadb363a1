//! How ranks reach each other: small messages to and from the peers of a group, memory that the
//! ranks of a host share, and streams of bytes between hosts.
//!
//! A transport moves bytes and notices peers that leave. It never looks into a message, and it
//! never blocks past its deadline or past an interrupt.

pub mod frame;
pub mod handshake;
pub mod interrupt;
#[cfg(test)]
pub mod memory;
pub mod shm;
pub mod socket;
pub mod tcp;

use frame::Goodbye;
use interrupt::Interrupt;
use rustix::event::Timespec;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// Why ranks did not come together. Ranks are numbers of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// These ranks had not done their part when the deadline came.
    Late(Vec<usize>),
    /// This rank's connection ended, or it said why it leaves.
    Lost { rank: usize, reason: String },
    /// This rank sent something that is not a frame.
    Garbled { rank: usize, reason: String },
    /// Bytes that come through this rank had not come when the deadline came; who holds them up
    /// may be any rank before it.
    Stalled { through: usize },
    /// The group was aborted here while it waited.
    Interrupted,
    /// Something failed here, in this process, for this reason.
    Broken(String),
    /// The GPU of this rank, its driver or NCCL failed.
    Device { rank: usize, reason: String },
}

/// What every wait heeds besides what it waits for.
pub trait Watch {
    /// Fails if the group was interrupted, or a peer was lost or gave up. It never waits. A peer
    /// that leaves in order is not lost: it has done its part.
    fn check(&mut self) -> Result<(), Failure>;

    /// Why `rank` has left, if it is known to have left in order.
    fn left(&self, _rank: usize) -> Option<String> {
        None
    }
}

/// The other ranks of a group, as one rank sees them.
pub trait Peers: Watch + Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Sends `message` to every rank of `with` and puts what each sent into its place of `inbox`.
    /// Calls pair up in order: the n-th swap here meets the n-th swap there.
    fn swap(
        &mut self,
        message: &[u8],
        with: &[usize],
        inbox: &mut [Vec<u8>],
        deadline: Instant,
    ) -> Result<(), Failure>;

    /// Waits until `done` is raised, and returns early if a peer is lost or the group interrupted.
    fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure>;

    /// Tells every peer that and why this rank leaves, without waiting for anyone.
    fn say_goodbye(&mut self, goodbye: Goodbye);
}

/// A duration as the system takes it.
fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

/// Why a peer is lost whose connection failed with `error`.
pub fn ended(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its process ended or closed the connection".to_string()
        }
        _ => format!("its connection failed: {error}"),
    }
}
