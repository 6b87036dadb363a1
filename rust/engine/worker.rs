//! The worker of a group: takes one collective after the other, agrees, runs and settles it.
//!
//! This is the one place where a collective meets the other ranks; [`run`] is called on the
//! worker's thread, or on the caller's if it wants to wait and nothing else runs. It must never
//! end because of an operation: errors and panics are settled like results.

use super::Shared;
use super::queue::Job;
use crate::collective::agreement::{Agreed, Shown, agree, explain, shown};
use crate::collective::fabric::Fabric;
use crate::collective::plan::Plan;
use crate::collective::span::Memory;
use crate::error::{Error, Result};
use crate::transport::Failure;
use crate::transport::frame::Goodbye;
use crate::transport::interrupt::Interrupt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An operation has a timeout of its own; this one only keeps sums of times from overflowing.
const NO_LIMIT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How long after a failure a peer's end may still become known. All connections of a process end
/// together, so this only has to cover the time between two packets.
const LOSS_LIMIT: Duration = Duration::from_millis(100);

/// Serves the queue until it is closed, empty and at rest.
pub fn serve(shared: &Arc<Shared>) {
    while let Some(job) = shared.queue.pop() {
        run(shared, job);
    }
    let reason = "it left the group (destroyed, or its program ended)".to_string();
    shared.fabric().say_goodbye(Goodbye { gave_up: false, reason });
}

/// Carries out a job that was taken from the queue.
pub fn run(shared: &Arc<Shared>, mut job: Job) {
    shared.begin(&job.operation);
    let mut fabric = shared.fabric();
    let outcome = catch_unwind(AssertUnwindSafe(|| perform(shared, &mut fabric, &mut job)))
        .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
    if let Ok(agreed) = &outcome {
        shared.counters.count(&job.call, agreed);
    }
    let error = outcome.err().map(|error| match error {
        // Interrupted: why is what closed the queue.
        Error::Closed(_) => shared.queue.check_open().err().unwrap_or(error),
        other => other,
    });
    if let Some(error) = error.as_ref().filter(|error| !error.leaves_group_usable()) {
        // The ranks may be out of step: everything after this would be a guess.
        fabric.say_goodbye(Goodbye { gave_up: true, reason: format!("it gave up: {error}") });
        shared.fail(error);
    }
    drop(fabric);
    shared.end_collective(&job);
    // First: where no thread can be started, settling runs callbacks, which may want to go on.
    shared.queue.done();
    shared.settle(&job.operation, error.as_ref());
}

/// How a collective is carried out, with what that needs.
enum Way {
    /// By the engine, on this memory.
    Here(Plan, Memory),
    /// By the inner backend, which raises this when it is done.
    Inside(Arc<Interrupt>),
}

fn perform(shared: &Shared, fabric: &mut Fabric, job: &mut Job) -> Result<Agreed> {
    let deadline = Instant::now() + job.call.timeout;
    let way = if job.call.complaint.is_empty() { Some(make_ready(fabric, job)) } else { None };
    match way {
        Some(Ok(Way::Here(plan, memory))) => {
            perform_here(shared, fabric, job, plan, &memory, deadline)
        }
        Some(Ok(Way::Inside(done))) => perform_inside(shared, fabric, job, &done, deadline),
        Some(Err(error)) => {
            // What keeps this rank from taking part is told to the others, so that all raise.
            job.call.complaint = format!("cannot take part: {error}");
            agree(fabric, &shared.labels, job.seq, &job.call, Shown::default(), deadline)
        }
        None => agree(fabric, &shared.labels, job.seq, &job.call, Shown::default(), deadline),
    }
}

/// All that can fail on one rank alone, before the others are told that it takes part.
fn make_ready(fabric: &Fabric, job: &Job) -> Result<Way> {
    job.operation.prepare()?;
    match Plan::of(&job.call.view, fabric.size(), fabric.topology()) {
        Some(plan) => {
            let mut memory = job.operation.open()?;
            plan.arrange(&mut memory, fabric.size());
            Ok(Way::Here(plan, memory))
        }
        None => match Interrupt::new() {
            Ok(done) => Ok(Way::Inside(Arc::new(done))),
            Err(error) => Err(Error::Operation(format!("no event descriptor: {error}"))),
        },
    }
}

/// Carries a collective out by the engine's own means.
fn perform_here(
    shared: &Shared,
    fabric: &mut Fabric,
    job: &Job,
    plan: Plan,
    memory: &Memory,
    deadline: Instant,
) -> Result<Agreed> {
    let is_small = plan.bytes(memory) <= fabric.inline_bytes();
    let to_show = plan.to_show(memory, fabric.rank());
    let own = if is_small {
        // SAFETY: the tensor is the operation's until it is over, and nobody writes it now.
        Shown { bytes: unsafe { to_show.as_slice() }, offset: None }
    } else {
        Shown { bytes: &[], offset: fabric.offset_of(to_show.address, to_show.bytes) }
    };
    let agreed = agree(fabric, &shared.labels, job.seq, &job.call, own, deadline)?;
    if is_small {
        let due = |rank| plan.to_show(memory, rank).bytes;
        plan.complete(memory, &shown(fabric, &shared.labels, due)?);
    } else {
        plan.carry_out(fabric, memory, &agreed, deadline)
            .map_err(|failure| explain(failure, &shared.labels, job.seq, &job.call))?;
    }
    job.operation.finish().map(|()| agreed)
}

/// Lets the inner backend carry a collective out.
fn perform_inside(
    shared: &Shared,
    fabric: &mut Fabric,
    job: &Job,
    done: &Arc<Interrupt>,
    deadline: Instant,
) -> Result<Agreed> {
    let explain = |failure: Failure| explain(failure, &shared.labels, job.seq, &job.call);
    let agreed = agree(fabric, &shared.labels, job.seq, &job.call, Shown::default(), deadline)?;

    let outcome = match job.operation.start(done.clone()) {
        Ok(()) => {
            // If a peer is lost meanwhile, the operation is left to end by itself, with the
            // tensors that it keeps alive: the inner backend cannot be stopped.
            fabric.watch_until(done, NO_LIMIT).map_err(explain)?;
            job.operation.finish()
        }
        Err(error) => Err(error),
    };
    match outcome {
        Err(error) if job.operation.broke_connection() => {
            // The inner backend only knows an address; who it was shows here.
            let never = Interrupt::new().map_err(|_| error.clone())?;
            fabric.watch_until(&never, LOSS_LIMIT).map_err(explain)?;
            let doing = format!("{} #{}", job.call.view, job.seq);
            Err(Error::Connection { doing, reason: error.to_string() })
        }
        other => other.map(|()| agreed),
    }
}
