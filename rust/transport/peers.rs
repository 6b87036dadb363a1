//! The other ranks of a group as one rank sees them: what a transport offers, and how it fails.

use super::frame::Goodbye;
use super::interrupt::Interrupt;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// Why a wait for other ranks failed. Ranks are numbers within the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// These ranks had not done their part by the deadline.
    Late(Vec<usize>),
    /// This rank's connection ended, or it said why it leaves.
    Lost { rank: usize, reason: String },
    /// This rank sent something that breaks the protocol.
    Garbled { rank: usize, reason: String },
    /// Bytes that come through this rank were missing at the deadline; the rank that holds them up
    /// may be any one upstream of it.
    Stalled { through: usize },
    /// The group was aborted here during the wait.
    Interrupted,
    /// Something failed in this process.
    Broken(String),
}

/// What a rank watches while it waits for something else.
pub trait Watch {
    /// Fails if the group was interrupted, or a peer was lost or gave up. Never waits. A peer that
    /// leaves in order is not lost: it has done its part.
    fn check(&mut self) -> Result<(), Failure>;

    /// Why `rank` has left, if it is known to have left in order.
    fn left(&self, _rank: usize) -> Option<String> {
        None
    }
}

/// Messages to and from every other rank of a group.
pub trait Peers: Watch + Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Sends `message` to every rank of `with` and puts what each of them sent into `inbox`, at
    /// its rank. Calls pair up in order: the n-th swap here matches the n-th swap there.
    fn swap(
        &mut self,
        message: &[u8],
        with: &[usize],
        inbox: &mut [Vec<u8>],
        deadline: Instant,
    ) -> Result<(), Failure>;

    /// Waits until `done` is raised or `limit` has passed; fails if a peer is lost or the group is
    /// interrupted.
    fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure>;

    /// Tells every peer that this rank leaves, and why, without waiting for any of them.
    fn say_goodbye(&mut self, goodbye: Goodbye);
}

/// How long to wait until the watch knows why a connection broke.
const REASON_LIMIT: Duration = Duration::from_millis(100);
const REASON_PAUSE: Duration = Duration::from_millis(2);

/// A broken connection says little: a neighbour that leaves because of a third rank closes it as
/// well. The watch knows the reason, as soon as that has arrived; otherwise it is `failure`.
pub fn reason_of_loss(failure: Failure, watch: &mut dyn Watch) -> Failure {
    if !matches!(failure, Failure::Lost { .. }) {
        return failure;
    }
    let limit = Instant::now() + REASON_LIMIT;
    loop {
        if let Err(reason) = watch.check() {
            return reason;
        }
        if Instant::now() >= limit {
            return failure;
        }
        std::thread::sleep(REASON_PAUSE);
    }
}

/// The reason for which a peer is lost when its connection fails with `error`.
pub fn loss_reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its process ended or closed the connection".to_string()
        }
        _ => format!("its connection failed: {error}"),
    }
}
