//! Errors, worded for the person whose job stopped.
//!
//! Each variant says what was expected, what came and what to do, and includes the message of its
//! cause. None is a bare code.

use std::fmt;
use std::time::Duration;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The ranks made different calls, or one made a wrong one. Only headers were exchanged, so
    /// the group is still in step and can continue.
    Mismatch(String),
    /// A peer's connection ended.
    PeerLost { peer: String, doing: String, reason: String },
    /// Some ranks did not make the call in time.
    TimedOut { missing: Vec<String>, doing: String, waited: Duration },
    /// The group was aborted, shut down or had failed before.
    Closed(String),
    /// A new group could not connect.
    Connect(String),
    /// A peer sent bytes that break the protocol.
    Protocol(String),
    /// The operation itself failed, on every rank alike.
    Operation(String),
    /// The operation failed because its connection did, so the ranks are out of step.
    Connection { doing: String, reason: String },
    /// A GPU, its driver or NCCL failed on this rank.
    Device { rank: String, doing: String, reason: String },
    /// A bug in gflow, caught before it could end the process.
    Panic(String),
}

impl Error {
    /// Whether the group can continue after this error: the ranks are still in step.
    pub fn leaves_group_usable(&self) -> bool {
        matches!(self, Error::Mismatch(_) | Error::Operation(_))
    }

    /// The error for a caught panic, with its message.
    pub fn from_panic(payload: Box<dyn std::any::Any + Send>) -> Self {
        let text = payload
            .downcast_ref::<&str>()
            .map(|text| text.to_string())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_string());
        Error::Panic(text)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Mismatch(views) => write!(f, "gflow: the ranks do not agree: {views}"),
            Error::PeerLost { peer, doing, reason } => {
                write!(
                    f,
                    "gflow: lost {peer} during {doing}: {reason}. See that rank's own output for why it stopped"
                )
            }
            Error::TimedOut { missing, doing, waited } => write!(
                f,
                "gflow: Timed out after {:.1} s in {doing}, waiting for {}. Either a rank is stuck elsewhere \
                 or it makes fewer calls than this one; if it only needs longer, give \
                 init_process_group a larger timeout",
                waited.as_secs_f64(),
                missing.join(", ")
            ),
            Error::Closed(why) => write!(f, "gflow: {why}"),
            Error::Connect(what) => write!(f, "gflow: {what}"),
            Error::Protocol(what) => write!(f, "gflow: unexpected bytes from a peer: {what}"),
            Error::Operation(what) => f.write_str(what),
            Error::Connection { doing, reason } => {
                write!(f, "gflow: the connection failed during {doing}: {reason}")
            }
            Error::Device { rank, doing, reason } => {
                write!(f, "gflow: the GPU path of {rank} failed during {doing}: {reason}")
            }
            Error::Panic(what) => {
                write!(f, "gflow: internal error (a bug in gflow, please report it): {what}")
            }
        }
    }
}

impl std::error::Error for Error {}
