//! The worker of a group: takes one collective after the other, agrees, runs and settles it.
//!
//! This is the one place where a collective meets the other ranks; [`run`] is called on the
//! worker's thread, or on the caller's if it wants to wait and nothing else runs. It must never
//! end because of an operation: errors and panics are settled like results.

use super::devices::Arrival;
use super::front::Front;
use super::operation::Operation;
use super::queue::{Job, Task};
use super::{LOSS_LIMIT, Shared};
use crate::collective::agreement::{Agreed, AgreedBucket, TensorInfo, agree, explain, shown};
use crate::collective::call::CollectiveKind;
use crate::collective::fabric::Fabric;
use crate::collective::hierarchical;
use crate::collective::plan::{Plan, tensors_in_arenas};
use crate::collective::span::Memory;
use crate::error::{Error, Result};
use crate::gradients::{Doing, Failed, Member, Place, Shard, Tensor};
use crate::observe::counters::Completed;
use crate::observe::gradient_counters::Stage;
use crate::simd::element::Element;
use crate::transport::Failure;
use crate::transport::frame::Goodbye;
use crate::transport::interrupt::Interrupt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An operation has a timeout of its own; this one only keeps sums of times from overflowing.
const NO_LIMIT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Serves the queue until it is closed, empty and at rest.
pub fn serve(shared: &Arc<Shared>) {
    while let Some(task) = shared.queue.pop() {
        match task {
            Task::Collective(job) => run(shared, job),
            Task::Flush => flush(shared),
        }
    }
    // The group may have failed while nothing ran here: then nobody else has told the peers.
    let goodbye = match shared.queue.failure() {
        Some(error) => Goodbye { gave_up: true, reason: format!("it gave up: {error}") },
        None => {
            let reason = "it left the group (destroyed, or its program ended)".to_string();
            Goodbye { gave_up: false, reason }
        }
    };
    shared.front().fabric.say_goodbye(goodbye);
}

/// Carries out a job that was taken from the queue.
pub fn run(shared: &Arc<Shared>, job: Job) {
    shared.begin_collective(job.seq, &job.operation);
    let own =
        Own { seq: job.seq, operation: job.operation.clone(), is_gradient: job.call.gradient };
    work(shared, Some(own), |front, over| perform(shared, front, job, over));
}

/// Exchanges and completes the gradients that are held back.
fn flush(shared: &Arc<Shared>) {
    work(shared, None, |front, over| deliver_all(shared, front, over));
}

/// A collective, apart from what it needs to run.
struct Own {
    seq: u64,
    operation: Arc<dyn Operation>,
    is_gradient: bool,
}

/// A collective that is over, and how it ended.
struct Over {
    own: Own,
    outcome: Result<()>,
}

/// Does some work with the other ranks and settles all that it brought to an end. If it fails,
/// `own` is the collective that failed.
fn work(
    shared: &Arc<Shared>,
    own: Option<Own>,
    body: impl FnOnce(&mut Front, &mut Vec<Over>) -> Result<()>,
) {
    let mut over = Vec::new();
    let mut front = shared.front();
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&mut front, &mut over)))
        .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
    if let Err(error) = outcome {
        let error = match matches!(error, Error::Closed(_)) || shared.has_failed() {
            // Interrupted, or a consequence of what has failed before: why is what closed the queue.
            true => shared.queue.check_open().err().unwrap_or(error),
            false => error,
        };
        if !error.leaves_group_usable() {
            // The ranks may be out of step: everything after this would be a guess.
            let reason = format!("it gave up: {error}");
            front.fabric.say_goodbye(Goodbye { gave_up: true, reason });
            shared.fail(&error);
        }
        over.extend(own.map(|own| Over { own, outcome: Err(error) }));
    }
    drop(front);
    // First: where no thread can be started, settling runs callbacks, which may want to go on.
    shared.queue.done();
    for Over { own, outcome } in over {
        if own.is_gradient {
            shared.overlap.end(Instant::now());
        }
        shared.settle(&own.operation, outcome.err().as_ref());
        // After that: who has waited for it to be over finds it settled.
        shared.end_collective(own.seq, &own.operation);
    }
}

/// How a collective is carried out, with what that needs.
enum Way {
    /// By the engine, on this memory.
    Here(Plan, Memory),
    /// On a device, on this memory: by the engine if it is a gradient, else by the inner backend, which
    /// raises this when it is done.
    OnDevice(Memory, Arc<Interrupt>),
    /// By the inner backend.
    Inside(Arc<Interrupt>),
}

fn perform(
    shared: &Arc<Shared>,
    front: &mut Front,
    mut job: Job,
    over: &mut Vec<Over>,
) -> Result<()> {
    let deadline = Instant::now() + job.call.timeout;
    let way = match job.call.complaint.is_empty() {
        true => make_ready(&front.fabric, &job),
        false => Err(None),
    };
    match way {
        Ok(Way::Here(plan, memory)) => {
            perform_here(shared, front, job, plan, &memory, deadline, over)
        }
        Ok(Way::OnDevice(memory, done)) => {
            perform_on_device(shared, front, job, &memory, &done, deadline, over)
        }
        Ok(Way::Inside(done)) => {
            let nothing = TensorInfo::default();
            let agreed =
                agree(&mut front.fabric, &shared.labels, job.seq, &job.call, nothing, deadline)?;
            perform_inside(shared, front, job, agreed, &done, over)
        }
        Err(obstacle) => {
            // What keeps this rank from taking part is told to the others, so that all raise.
            if let Some(error) = obstacle {
                job.call.complain_of(&error);
            }
            let fabric = &mut front.fabric;
            agree(fabric, &shared.labels, job.seq, &job.call, TensorInfo::default(), deadline)
                .map(|_| ())
        }
    }
}

/// All that can fail on one rank alone, before the others are told that it takes part.
fn make_ready(fabric: &Fabric, job: &Job) -> std::result::Result<Way, Option<Error>> {
    let interrupt = || {
        Interrupt::new()
            .map(Arc::new)
            .map_err(|error| Some(Error::Operation(format!("no event descriptor: {error}"))))
    };
    if let Some(Arrival { lane, mark }) = job.arrival.as_deref() {
        // Before anything touches the tensors: they are not there yet.
        lane.wait(mark).map_err(|fault| Some(Error::Operation(fault.0)))?;
        job.operation.prepare().map_err(Some)?;
        return Ok(Way::OnDevice(job.operation.open().map_err(Some)?, interrupt()?));
    }
    job.operation.prepare().map_err(Some)?;
    match Plan::of(&job.call.view, fabric.size(), fabric.topology()) {
        Some(plan) => {
            let mut memory = job.operation.open().map_err(Some)?;
            plan.arrange(&mut memory, fabric.size());
            Ok(Way::Here(plan, memory))
        }
        None => Ok(Way::Inside(interrupt()?)),
    }
}

/// Carries a collective out by the engine's own means.
fn perform_here(
    shared: &Arc<Shared>,
    front: &mut Front,
    job: Job,
    plan: Plan,
    memory: &Memory,
    deadline: Instant,
    over: &mut Vec<Over>,
) -> Result<()> {
    let compresses = front.gradients.method().is_some();
    let fabric = &mut front.fabric;
    let fits = plan.bytes(memory) <= fabric.inline_bytes();
    let to_show = plan.to_show(memory, fabric.rank());
    let own = if fits && !(compresses && job.call.bucket != 0) {
        // SAFETY: the tensor is the operation's until it is over, and nobody writes it now.
        TensorInfo { bytes: unsafe { to_show.as_slice() }, ..TensorInfo::default() }
    } else {
        let offset = fabric.offset_of(to_show.address, to_show.bytes);
        let step = front.gradients.step_of(job.call.bucket);
        TensorInfo { bytes: &[], offset, step, momentum: front.gradients.momentum_code() }
    };
    let start = Instant::now();
    let agreed = agree(fabric, &shared.labels, job.seq, &job.call, own, deadline)?;
    if let Some(bucket) = agreed.bucket.filter(|_| compresses) {
        front.gradients.counters().add_seconds(Stage::Agree, start.elapsed().as_secs_f64());
        let (Plan::AllReduce(reducer), Some(element)) = (plan, element_of(&job)) else {
            let view = &job.call.view;
            return Err(Error::Operation(format!("gflow: {view} cannot be a gradient bucket")));
        };
        let tensor = memory.outputs[0];
        let in_arenas = tensors_in_arenas(fabric, tensor, &agreed, deadline)
            .map_err(|failure| explain(failure, &shared.labels, job.seq, &job.call))?;
        let place = Place::Host { reducer, in_arenas };
        let tensor = Tensor { span: tensor, element, place, of: doing(&job) };
        return exchange_gradient(shared, front, job, tensor, agreed, bucket, over);
    }
    if fits {
        let due = |rank| plan.to_show(memory, rank).bytes;
        plan.complete(memory, &shown(fabric, &shared.labels, due)?);
        // Gradients that are held back come before what was called after them.
        deliver_all(shared, front, over)?;
    } else {
        deliver_all(shared, front, over)?;
        plan.carry_out(&mut front.fabric, memory, &agreed, deadline)
            .map_err(|failure| explain(failure, &shared.labels, job.seq, &job.call))?;
    }
    complete(shared, job, &agreed, over);
    Ok(())
}

/// Carries out a collective on a device, or puts it there: what it does there is done later, in order.
fn perform_on_device(
    shared: &Arc<Shared>,
    front: &mut Front,
    job: Job,
    memory: &Memory,
    done: &Arc<Interrupt>,
    deadline: Instant,
    over: &mut Vec<Over>,
) -> Result<()> {
    let Front { fabric, gradients } = front;
    let (step, momentum) = (gradients.step_of(job.call.bucket), gradients.momentum_code());
    let own = TensorInfo { step, momentum, ..TensorInfo::default() };
    let start = Instant::now();
    let agreed = agree(fabric, &shared.labels, job.seq, &job.call, own, deadline)?;
    gradients.counters().add_seconds(Stage::Agree, start.elapsed().as_secs_f64());
    let bucket = agreed.bucket.filter(|_| gradients.method().is_some());
    // The same on all ranks: it follows from what they have agreed on.
    match (bucket, element_of(&job), memory.outputs.first()) {
        (Some(bucket), Some(element), Some(span))
            if job.call.view.kind == CollectiveKind::AllReduce =>
        {
            let place = Place::Device { lane: job.call.view.device_slot };
            let tensor = Tensor { span: *span, element, place, of: doing(&job) };
            exchange_gradient(shared, front, job, tensor, agreed, bucket, over)
        }
        _ => perform_inside(shared, front, job, agreed, done, over),
    }
}

fn element_of(job: &Job) -> Option<Element> {
    job.call.view.dtype.element()
}

fn doing(job: &Job) -> Arc<Doing> {
    Arc::new(Doing { seq: job.seq, call: job.call.clone() })
}

/// Exchanges a gradient bucket on which the ranks have agreed, now or together with others.
fn exchange_gradient(
    shared: &Arc<Shared>,
    front: &mut Front,
    job: Job,
    tensor: Tensor,
    agreed: Agreed,
    bucket: AgreedBucket,
    over: &mut Vec<Over>,
) -> Result<()> {
    let deadline = Instant::now() + job.call.timeout;
    let density = front.gradients.density_of(&bucket, tensor.element);
    let chunk = front.gradients.method().map_or(1, |method| method.chunk);
    if density.is_none() || !bucket.by_all || !front.gradients.goes_with(tensor.lane()) {
        deliver_all(shared, front, over)?;
    }
    let Front { fabric, gradients } = front;
    let failed = |failure| explain(failure, &shared.labels, job.seq, &job.call);
    let Some(density) = density else {
        gradients
            .exchange_exactly(fabric, &bucket, &tensor, deadline)
            .map_err(|failure| failed(blame(fabric, failure)))?;
        complete(shared, job, &agreed, over);
        return Ok(());
    };
    gradients
        .reduce_within(fabric, &tensor, deadline)
        .map_err(|failure| failed(blame(fabric, failure)))?;
    shared.announce(fabric, gradients, tensor.element);
    let shard = hierarchical::own_shard(fabric.topology(), tensor.span)
        .map(|span| Shard::new(span, tensor.element, chunk));
    gradients.hold(Member { job, agreed, bucket, density, tensor, shard });
    if !bucket.by_all {
        // A rank that is not in this backward pass does not know when it ends.
        return deliver_all(shared, front, over);
    }
    if gradients.is_full() {
        let members =
            gradients.close(fabric, deadline).map_err(|failed| why(shared, fabric, failed))?;
        complete_all(shared, members, over);
    }
    Ok(())
}

/// Exchanges and completes the gradients that are held back or under way, if there are any.
fn deliver_all(shared: &Arc<Shared>, front: &mut Front, over: &mut Vec<Over>) -> Result<()> {
    let Front { fabric, gradients } = front;
    let Some(timeout) = gradients.timeout() else { return Ok(()) };
    let members = gradients
        .deliver_all(fabric, Instant::now() + timeout)
        .map_err(|failed| why(shared, fabric, failed))?;
    complete_all(shared, members, over);
    Ok(())
}

fn why(shared: &Shared, fabric: &mut Fabric, failed: Failed) -> Error {
    explain(blame(fabric, failed.failure), &shared.labels, failed.seq, &failed.call)
}

/// A failure with who is to blame: NCCL only knows that a connection broke; who it was shows on our own
/// connections, if it does. What happened here is told as well: the other rank may have given up
/// because of that, and only been faster to say so.
pub fn blame(fabric: &mut Fabric, failure: Failure) -> Failure {
    let Failure::Device { reason: here, .. } = &failure else { return failure };
    let lost = Interrupt::new().map(|never| fabric.watch_until(&never, LOSS_LIMIT));
    match lost {
        Ok(Err(Failure::Lost { rank, reason })) => {
            Failure::Lost { rank, reason: format!("{reason}. Here it was noticed as: {here}") }
        }
        Ok(Err(other)) => other,
        _ => failure,
    }
}

fn complete_all(shared: &Shared, members: Vec<Member>, over: &mut Vec<Over>) {
    for member in members {
        complete(shared, member.job, &member.agreed, over);
    }
}

/// Puts the results of a collective that the engine has carried out where they belong.
fn complete(shared: &Shared, job: Job, agreed: &Agreed, over: &mut Vec<Over>) {
    let outcome = job.operation.finish();
    note(shared, job, agreed, outcome, over);
}

fn note(shared: &Shared, job: Job, agreed: &Agreed, outcome: Result<()>, over: &mut Vec<Over>) {
    if outcome.is_ok() {
        let view = &job.call.view;
        shared.counters.count(Completed {
            kind: view.kind as usize,
            is_gradient: agreed.gradient,
            tensors: u64::from(view.tensors),
            bytes: job.call.bytes,
        });
    }
    let is_gradient = job.call.gradient;
    let own = Own { seq: job.seq, operation: job.operation, is_gradient };
    over.push(Over { own, outcome });
}

/// Lets the inner backend carry a collective out, on which the ranks have agreed.
fn perform_inside(
    shared: &Arc<Shared>,
    front: &mut Front,
    job: Job,
    agreed: Agreed,
    done: &Arc<Interrupt>,
    over: &mut Vec<Over>,
) -> Result<()> {
    let explain = |failure: Failure| explain(failure, &shared.labels, job.seq, &job.call);
    deliver_all(shared, front, over)?;

    let fabric = &mut front.fabric;
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
        Err(error) => Err(error),
        Ok(()) => {
            note(shared, job, &agreed, Ok(()), over);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::fabric::tests::fabrics;

    fn device_failure() -> Failure {
        Failure::Device { rank: 0, reason: "GPU 0: ncclAllReduce failed".into() }
    }

    #[test]
    fn who_gave_up_is_told_together_with_what_happened_here() {
        let mut ranks = fabrics(2);
        let (mut other, _of_other) = ranks.pop().unwrap();
        let (mut own, _of_own) = ranks.pop().unwrap();
        assert_eq!(blame(&mut own, device_failure()), device_failure());
        other.say_goodbye(Goodbye { gave_up: true, reason: "it gave up".into() });
        let Failure::Lost { rank: 1, reason } = blame(&mut own, device_failure()) else {
            panic!("rank 1 has given up")
        };
        assert!(reason.contains("it gave up") && reason.contains("ncclAllReduce"), "{reason}");
    }

    #[test]
    fn what_is_no_failure_of_a_device_is_left_as_it_is() {
        let mut ranks = fabrics(2);
        let (mut own, _of_own) = ranks.remove(0);
        assert_eq!(blame(&mut own, Failure::Interrupted), Failure::Interrupted);
    }
}
