//! Why an exchange of gradients failed.

use crate::transport::Failure;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExchangeFailure {
    /// The ranks did not come together, or something failed in this process.
    Transport(Failure),
    /// The GPU of this rank, its driver or NCCL failed.
    Device { rank: usize, reason: String },
}

impl From<Failure> for ExchangeFailure {
    fn from(failure: Failure) -> ExchangeFailure {
        ExchangeFailure::Transport(failure)
    }
}
