//! From a failure of the transport or a device to the error that the user sees.

use super::shared::Shared;
use crate::collective::agreement::explain;
use crate::collective::fabric::Fabric;
use crate::collective::info::CollectiveInfo;
use crate::error::Error;
use crate::gradients::ExchangeFailure;
use crate::transport::Failure;
use crate::transport::interrupt::Interrupt;
use std::time::Duration;

/// How long after a failure the end of a peer may still become known. All connections of a process end
/// together, so this only has to cover the time between two packets.
pub const LOSS_LIMIT: Duration = Duration::from_millis(100);

impl Shared {
    /// The error for a failure during a collective.
    pub fn explain(&self, failure: impl Into<ExchangeFailure>, info: &CollectiveInfo) -> Error {
        match failure.into() {
            ExchangeFailure::Transport(failure) => explain(failure, &self.labels, info),
            ExchangeFailure::Device { rank, reason } => {
                Error::Device { rank: self.labels[rank].clone(), doing: info.to_string(), reason }
            }
        }
    }
}

/// The failure with the rank that caused it. NCCL only knows that a connection broke; the group's own
/// connections may show which rank it was. Keeps what was noticed here, because the other rank may have
/// given up because of that and only been faster to say so.
pub fn blame(fabric: &mut Fabric, failure: ExchangeFailure) -> ExchangeFailure {
    let ExchangeFailure::Device { reason: here, .. } = &failure else { return failure };
    let lost = Interrupt::new().map(|never| fabric.watch_until(&never, LOSS_LIMIT));
    match lost {
        Ok(Err(Failure::Lost { rank, reason })) => {
            let reason = format!("{reason}. Here it was noticed as: {here}");
            Failure::Lost { rank, reason }.into()
        }
        Ok(Err(other)) => other.into(),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::fabric::tests::fabrics;
    use crate::transport::frame::Goodbye;

    fn device_failure() -> ExchangeFailure {
        ExchangeFailure::Device { rank: 0, reason: "GPU 0: ncclAllReduce failed".into() }
    }

    #[test]
    fn who_gave_up_is_told_together_with_what_happened_here() {
        let mut ranks = fabrics(2);
        let (mut other, _of_other) = ranks.pop().unwrap();
        let (mut own, _of_own) = ranks.pop().unwrap();
        assert_eq!(blame(&mut own, device_failure()), device_failure());
        other.say_goodbye(Goodbye { gave_up: true, reason: "it gave up".into() });
        let blamed = blame(&mut own, device_failure());
        let ExchangeFailure::Transport(Failure::Lost { rank: 1, reason }) = blamed else {
            panic!("rank 1 has given up")
        };
        assert!(reason.contains("it gave up") && reason.contains("ncclAllReduce"), "{reason}");
    }

    #[test]
    fn what_is_no_failure_of_a_device_is_left_as_it_is() {
        let mut ranks = fabrics(2);
        let (mut own, _of_own) = ranks.remove(0);
        let interrupted = ExchangeFailure::from(Failure::Interrupted);
        assert_eq!(blame(&mut own, interrupted.clone()), interrupted);
    }
}
