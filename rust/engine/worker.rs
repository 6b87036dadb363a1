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

/// Serves the queue until it is closed and empty.
pub fn serve(shared: &Shared, peers: &mut dyn Peers) {
    while let Some(job) = shared.queue.pop() {
        shared.begin(&job.operation);
        let outcome = catch_unwind(AssertUnwindSafe(|| perform(shared, peers, &job)))
            .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
        if let Ok(agreed) = &outcome {
            shared.counters.count(&job.call, *agreed);
        }
        let error = outcome.err();
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
    job.operation.run()?;
    Ok(agreed)
}
