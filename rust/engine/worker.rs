//! The worker of a group: takes one collective after the other, agrees, runs and settles it.
//!
//! It is the one place where a collective meets the other ranks. It must never end because of an
//! operation: errors and panics are settled like results.

use super::Shared;
use super::queue::Job;
use crate::collective::agreement::{Agreed, agree};
use crate::error::{Error, Result};
use crate::transport::Peers;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How long after a failure a peer's end may still become known. All connections of a process end
/// together, so this only has to cover the time between two packets.
const LOSS_LIMIT: Duration = Duration::from_millis(100);

/// Serves the queue until it is closed and empty.
pub fn serve(shared: &Shared, peers: &mut dyn Peers) {
    while let Some(job) = shared.queue.pop() {
        shared.begin(&job.operation);
        let outcome = catch_unwind(AssertUnwindSafe(|| perform(shared, peers, &job)))
            .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
        if let Ok(agreed) = &outcome {
            shared.counters.count(&job.call, *agreed);
        }
        let error = outcome.err().map(|error| match error {
            // Interrupted: why is what closed the queue.
            Error::Closed(_) => shared.queue.check_open().err().unwrap_or(error),
            other => other,
        });
        shared.settle(&job.operation, error.as_ref());
        shared.end(&job.operation);
        if let Some(error) = error.filter(|error| !error.leaves_group_usable()) {
            // The ranks may be out of step: everything after this would be a guess.
            peers.say_goodbye(&format!("it gave up: {error}"));
            shared.fail(&error);
        }
    }
    peers.say_goodbye("it left the group (destroyed, or its program ended)");
}

fn perform(shared: &Shared, peers: &mut dyn Peers, job: &Job) -> Result<Agreed> {
    let agreed = agree(peers, &shared.labels, job.seq, &job.call)?;
    job.operation.run().map_err(|error| name_lost_peer(shared, peers, job, error))?;
    Ok(agreed)
}

/// If the operation failed because a peer is gone, says who it was: the inner backend only knows
/// an address.
fn name_lost_peer(shared: &Shared, peers: &mut dyn Peers, job: &Job, error: Error) -> Error {
    match peers.find_lost(LOSS_LIMIT) {
        Some((rank, why)) => Error::PeerLost {
            peer: shared.labels[rank].clone(),
            doing: format!("{} #{}", job.call.view, job.seq),
            reason: format!("{why} ({error})"),
        },
        None => error,
    }
}
