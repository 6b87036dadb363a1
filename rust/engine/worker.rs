//! The worker of a group: takes one collective after the other, agrees, runs and settles it.
//!
//! It is the one place where a collective meets the other ranks. It must never end because of an
//! operation: errors and panics are settled like results.

use super::Shared;
use super::queue::Job;
use crate::collective::agreement::{Agreed, agree, explain};
use crate::error::{Error, Result};
use crate::transport::frame::Goodbye;
use crate::transport::interrupt::Interrupt;
use crate::transport::{Failure, Peers};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// An operation has a timeout of its own; this one only keeps sums of times from overflowing.
const NO_LIMIT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How long after a failure a peer's end may still become known. All connections of a process end
/// together, so this only has to cover the time between two packets.
const LOSS_LIMIT: Duration = Duration::from_millis(100);

/// Serves the queue until it is closed and empty.
pub fn serve(shared: &Arc<Shared>, peers: &mut dyn Peers) {
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
        if let Some(error) = error.as_ref().filter(|error| !error.leaves_group_usable()) {
            // The ranks may be out of step: everything after this would be a guess.
            peers.say_goodbye(Goodbye { gave_up: true, reason: format!("it gave up: {error}") });
            shared.fail(error);
        }
        shared.settle(&job.operation, error.as_ref());
        shared.end_collective(&job);
    }
    let reason = "it left the group (destroyed, or its program ended)".to_string();
    peers.say_goodbye(Goodbye { gave_up: false, reason });
}

fn perform(shared: &Shared, peers: &mut dyn Peers, job: &Job) -> Result<Agreed> {
    let explain = |failure: Failure| explain(failure, &shared.labels, job.seq, &job.call);
    let agreed = agree(peers, &shared.labels, job.seq, &job.call)?;

    let done = Interrupt::new()
        .map(Arc::new)
        .map_err(|error| Error::Operation(format!("gflow: no event descriptor: {error}")))?;
    let outcome = match job.operation.start(done.clone()) {
        Ok(()) => {
            // If a peer is lost meanwhile, the operation is left to end by itself, with the
            // tensors that it keeps alive: the inner backend cannot be stopped.
            peers.watch_until(&done, NO_LIMIT).map_err(explain)?;
            job.operation.finish()
        }
        Err(error) => Err(error),
    };
    match outcome {
        Err(error) if job.operation.broke_connection() => {
            // The inner backend only knows an address; who it was shows here.
            let never = Interrupt::new().map_err(|_| error.clone())?;
            peers.watch_until(&never, LOSS_LIMIT).map_err(explain)?;
            let doing = format!("{} #{}", job.call.view, job.seq);
            Err(Error::Connection { doing, reason: error.to_string() })
        }
        other => other.map(|()| agreed),
    }
}
