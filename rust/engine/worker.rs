//! The worker of a group: takes one task at a time, runs it with the other ranks, and completes what it
//! brought to an end.
//!
//! [`run`] is called on the worker's thread, or on the caller's if it is going to wait and nothing else
//! runs. The worker never ends because of an operation: errors and panics are outcomes like any other.

use super::queue::{Job, Task};
use super::run::{Finished, PendingCollective, Run};
use super::shared::Shared;
use crate::error::{Error, Result};
use crate::transport::frame::Goodbye;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Serves the queue until it is closed and empty and nothing is running.
pub fn serve(shared: &Shared) {
    while let Some(task) = shared.queue.pop() {
        match task {
            Task::Collective(job) => run(shared, job),
            Task::Flush => run_and_complete(shared, None, |run| run.flush()),
        }
    }
    // If the group failed while nothing was running here, the peers haven't been told yet.
    let goodbye = match shared.queue.failure() {
        Some(error) => Goodbye { gave_up: true, reason: format!("it gave up: {error}") },
        None => {
            let reason = "it left the group (destroyed, or its program ended)".to_string();
            Goodbye { gave_up: false, reason }
        }
    };
    shared.core().fabric.say_goodbye(goodbye);
    log::info!("the group is closed");
}

/// Runs a job that was taken from the queue.
pub fn run(shared: &Shared, job: Job) {
    shared.activity.begin_collective(job.info.seq, &job.operation);
    let pending = PendingCollective {
        seq: job.info.seq,
        operation: job.operation.clone(),
        is_timed: job.info.call.gradient,
    };
    run_and_complete(shared, Some(pending), |run| run.perform(job));
}

/// Does `work` with the other ranks and completes every collective that it finished. If it fails,
/// `pending` is the collective that failed.
fn run_and_complete(
    shared: &Shared,
    pending: Option<PendingCollective>,
    work: impl FnOnce(&mut Run) -> Result<()>,
) {
    let mut core = shared.core();
    let mut run = Run::new(shared, &mut core);
    let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut run)))
        .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
    let mut finished = run.into_finished();
    if let Err(error) = outcome {
        let error = match matches!(error, Error::Closed(_)) || shared.has_failed() {
            // Interrupted, or a consequence of an earlier failure: the queue knows the real reason.
            true => shared.queue.check_open().err().unwrap_or(error),
            false => error,
        };
        if !error.leaves_group_usable() {
            // The ranks may be out of step, so no later collective can be trusted.
            let reason = format!("it gave up: {error}");
            core.fabric.say_goodbye(Goodbye { gave_up: true, reason });
            shared.fail(&error);
        }
        finished.extend(pending.map(|collective| Finished { collective, outcome: Err(error) }));
    }
    drop(core);
    // Before completing: if no thread can be started, callbacks run here, and may submit and wait.
    shared.queue.done();
    for Finished { collective: PendingCollective { seq, operation, is_timed }, outcome } in finished
    {
        if is_timed {
            shared.overlap.end(Instant::now());
        }
        shared.complete(&operation, outcome.err().as_ref());
        // After that, so that a fence finds it complete.
        shared.activity.end_collective(seq, &operation);
    }
}
