//! One collective with the other ranks: get ready, agree, carry it out. This is the only place where a
//! collective touches the other ranks.

use super::failure::{LOSS_LIMIT, blame};
use super::operation::Operation;
use super::queue::Job;
use super::shared::{GradientTicket, Gradients, GroupCore, Shared};
use crate::collective::agreement::{
    Agreed, AgreedBucket, TensorInfo, agree, first_with_bucket, inline_tensors,
};
use crate::collective::call::{Call, CollectiveKind};
use crate::collective::info::CollectiveInfo;
use crate::collective::plan::{Plan, tensors_in_arenas};
use crate::collective::span::Memory;
use crate::error::{Error, Result};
use crate::gradients::{Completed, Failed, Placement, Progress, Tensor};
use crate::observe::counters;
use crate::observe::gradient_counters::Stage;
use crate::transport::interrupt::Interrupt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An operation has a timeout of its own; this one only keeps sums of times from overflowing.
const NO_LIMIT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A collective that is not complete, apart from what it needs to run.
pub struct PendingCollective {
    pub seq: u64,
    pub operation: Arc<dyn Operation>,
    /// Whether this rank submitted it as a gradient, which the overlap timer counts.
    pub is_timed: bool,
}

/// A collective that has an outcome, which its waiters don't know yet.
pub struct Finished {
    pub collective: PendingCollective,
    pub outcome: Result<()>,
}

/// One turn of the thread that has the core of the group.
pub struct Run<'a> {
    shared: &'a Shared,
    core: &'a mut GroupCore,
    /// Also collectives that began earlier: gradients that were held.
    finished: Vec<Finished>,
}

/// How a collective is carried out, with what that needs.
enum Ready {
    /// By the engine, in host memory.
    Engine(Plan, Memory),
    /// On a device: by the engine if it is a gradient, otherwise by the inner backend, which raises the
    /// interrupt when it is done.
    Device(Memory, Arc<Interrupt>),
    /// By the inner backend.
    Inner(Arc<Interrupt>),
}

/// Parameters of the model with this bucket that no rank used.
struct Unused {
    bucket: u32,
    /// Whether this rank keeps what was delivered for them in its shard.
    keeps_sum: bool,
}

impl Unused {
    /// Takes back what was delivered for them. `memory` has the counts of uses, of all ranks together.
    fn take_back(&self, gradients: &mut Gradients, memory: &Memory) {
        // SAFETY: the counts belong to the operation until that is complete; nothing writes them now.
        let counts =
            memory.outputs.iter().flat_map(|span| unsafe { span.as_slice() }.as_chunks().0);
        let used: Vec<i32> = counts.map(|count| i32::from_ne_bytes(*count)).collect();
        // SAFETY: the Reducer of this model has submitted the counts and waits for them.
        unsafe { gradients.take_back_unused(self.bucket, &used, self.keeps_sum) };
    }
}

impl<'a> Run<'a> {
    pub fn new(shared: &'a Shared, core: &'a mut GroupCore) -> Run<'a> {
        Run { shared, core, finished: Vec::new() }
    }

    pub fn into_finished(self) -> Vec<Finished> {
        self.finished
    }

    /// Carries out a collective, or takes its gradient to be exchanged with others.
    pub fn perform(&mut self, mut job: Job) -> Result<()> {
        let deadline = Instant::now() + job.info.call.timeout;
        if !job.info.call.complaint.is_empty() {
            return self.decline(&job.info, deadline);
        }
        match self.make_ready(&job) {
            Ok(Ready::Engine(plan, memory)) => self.perform_in_memory(job, plan, &memory, deadline),
            Ok(Ready::Device(memory, done)) => {
                self.perform_on_device(job, &memory, &done, deadline)
            }
            Ok(Ready::Inner(done)) => {
                let agreed = self.agree(&job.info, TensorInfo::default(), deadline)?;
                self.perform_inner(job, &agreed, &done)
            }
            Err(error) => {
                job.info.call.complain_of(&error);
                self.decline(&job.info, deadline)
            }
        }
    }

    /// Tells the others why this rank can't take part, so that all raise.
    fn decline(&mut self, info: &CollectiveInfo, deadline: Instant) -> Result<()> {
        self.agree(info, TensorInfo::default(), deadline).map(|_| ())
    }

    /// Exchanges and completes all gradients that are held or under way.
    pub fn flush(&mut self) -> Result<()> {
        let GroupCore { fabric, gradients, .. } = &mut *self.core;
        let progress = gradients.flush(fabric);
        self.finish_gradients(progress)
    }

    /// Everything that can fail on one rank alone, before the others are told that it takes part.
    fn make_ready(&self, job: &Job) -> Result<Ready> {
        let interrupt = || {
            Interrupt::new()
                .map(Arc::new)
                .map_err(|error| Error::Operation(format!("no event descriptor: {error}")))
        };
        if let Some(ticket) = job.device.as_deref() {
            // Before anything touches the tensors: the caller's stream may still be writing them.
            ticket.queue.wait(&ticket.ready).map_err(|fault| Error::Operation(fault.0))?;
            job.operation.prepare()?;
            return Ok(Ready::Device(job.operation.open()?, interrupt()?));
        }
        job.operation.prepare()?;
        let fabric = &self.core.fabric;
        match Plan::of(&job.info.call.view, fabric.size(), fabric.topology()) {
            Some(plan) => {
                let mut memory = job.operation.open()?;
                plan.arrange(&mut memory, fabric.size());
                Ok(Ready::Engine(plan, memory))
            }
            None => Ok(Ready::Inner(interrupt()?)),
        }
    }

    /// Returns once every rank has made the same call.
    fn agree(
        &mut self,
        info: &CollectiveInfo,
        tensor: TensorInfo,
        deadline: Instant,
    ) -> Result<Agreed> {
        agree(&mut self.core.fabric, &self.shared.labels, info, tensor, deadline)
    }

    /// Carries out a collective by the engine's own plan.
    fn perform_in_memory(
        &mut self,
        job: Job,
        plan: Plan,
        memory: &Memory,
        deadline: Instant,
    ) -> Result<()> {
        let (shared, compresses) = (self.shared, self.core.gradients.compresses());
        let GroupCore { fabric, gradients, .. } = &mut *self.core;
        let call = &job.info.call;
        let fits = plan.bytes(memory) <= fabric.inline_bytes();
        let inline = plan.inline_tensor(memory, fabric.rank());
        let counts_uses = call.view.counts_uses();
        let tensor = if fits && !(compresses && call.bucket != 0 && !counts_uses) {
            // SAFETY: the tensor belongs to the operation until that is complete; nothing writes it now.
            TensorInfo { bytes: unsafe { inline.as_slice() }, ..TensorInfo::default() }
        } else {
            let offset = fabric.offset_of(inline.address, inline.bytes);
            TensorInfo { offset, ..gradient_info(gradients, call) }
        };
        let start = Instant::now();
        let agreed = self.agree(&job.info, tensor, deadline)?;
        let unused = agreed.bucket.filter(|_| compresses && counts_uses);
        let unused = unused.map(|bucket| self.find_unused(bucket, &job.info));
        if let Some(bucket) = agreed.bucket.filter(|_| compresses && !counts_uses) {
            let GroupCore { fabric, gradients, .. } = &mut *self.core;
            gradients.counters().add_seconds(Stage::Agree, start.elapsed().as_secs_f64());
            let view = &job.info.call.view;
            let (Plan::AllReduce(reducer), Some(element)) = (plan, view.dtype.element()) else {
                return Err(Error::Operation(format!("gflow: {view} cannot be a gradient bucket")));
            };
            let span = memory.outputs[0];
            let in_arenas = tensors_in_arenas(fabric, span, &agreed, deadline)
                .map_err(|failure| shared.explain(failure, &job.info))?;
            let placement = Placement::Host { reducer, in_arenas };
            let (info, ticket) = into_ticket(job, &agreed);
            let tensor = Tensor { span, element, placement, info };
            return self.exchange_gradient(bucket, tensor, ticket);
        }
        if let Some(bucket) = agreed.bucket.filter(|_| !counts_uses) {
            self.core.log_exact_bucket(bucket.number);
        }
        if fits {
            let expected = |rank| plan.inline_tensor(memory, rank).bytes;
            plan.complete(memory, &inline_tensors(&self.core.fabric, &shared.labels, expected)?);
            // Gradients that are held were called before this, so they complete before it.
            self.flush()?;
        } else {
            self.flush()?;
            plan.carry_out(&mut self.core.fabric, memory, &agreed, deadline)
                .map_err(|failure| shared.explain(failure, &job.info))?;
        }
        if let Some(unused) = unused.flatten() {
            unused.take_back(&mut self.core.gradients, memory);
        }
        let outcome = job.operation.finish();
        self.record_outcome(&job.info, job.operation, agreed.gradient, outcome);
        Ok(())
    }

    /// What this rank has to do when it is known which parameters of the model with this bucket no rank
    /// used. A rank that is not in the backward pass has nothing to take back.
    fn find_unused(&self, bucket: AgreedBucket, info: &CollectiveInfo) -> Option<Unused> {
        let fabric = &self.core.fabric;
        let topology = fabric.topology();
        let keeps_sum = topology.is_carrier()
            && first_with_bucket(fabric, &topology.carriers_of_own_shard()) == Some(fabric.rank());
        (info.call.bucket != 0).then_some(Unused { bucket: bucket.number, keeps_sum })
    }

    /// Carries out a collective on a device: by the engine if it is a gradient, otherwise by the inner
    /// backend.
    fn perform_on_device(
        &mut self,
        job: Job,
        memory: &Memory,
        done: &Arc<Interrupt>,
        deadline: Instant,
    ) -> Result<()> {
        let view = &job.info.call.view;
        let gradients = &self.core.gradients;
        let tensor = gradient_info(gradients, &job.info.call);
        let start = Instant::now();
        let agreed = self.agree(&job.info, tensor, deadline)?;
        let gradients = &self.core.gradients;
        gradients.counters().add_seconds(Stage::Agree, start.elapsed().as_secs_f64());
        // All ranks decide alike: it follows from what they have agreed on.
        let is_all_reduce = view.kind == CollectiveKind::AllReduce;
        let bucket = agreed.bucket.filter(|_| gradients.compresses() && is_all_reduce);
        match (bucket, view.dtype.element(), memory.outputs.first()) {
            (Some(bucket), Some(element), Some(&span)) => {
                let placement = Placement::Device { device_slot: view.device_slot };
                let (info, ticket) = into_ticket(job, &agreed);
                self.exchange_gradient(bucket, Tensor { span, element, placement, info }, ticket)
            }
            _ => self.perform_inner(job, &agreed, done),
        }
    }

    /// Hands a gradient bucket that the ranks have agreed on to be exchanged, and finishes all that are
    /// exchanged by then.
    fn exchange_gradient(
        &mut self,
        bucket: AgreedBucket,
        tensor: Tensor,
        ticket: GradientTicket,
    ) -> Result<()> {
        let GroupCore { fabric, gradients, .. } = &mut *self.core;
        let progress = gradients.exchange(fabric, bucket, tensor, ticket);
        for notice in gradients.take_notices() {
            self.shared.announce(&notice);
        }
        self.finish_gradients(progress)
    }

    /// Puts the results of gradients where they belong; fails if their exchange did.
    fn finish_gradients(&mut self, progress: Progress<GradientTicket>) -> Result<()> {
        for Completed { info, ticket } in progress.completed {
            let outcome = ticket.operation.finish();
            self.record_outcome(&info, ticket.operation, ticket.is_gradient, outcome);
        }
        match progress.failed {
            Some(Failed { info, failure }) => {
                Err(self.shared.explain(blame(&mut self.core.fabric, failure), &info))
            }
            None => Ok(()),
        }
    }

    /// Has the inner backend carry out a collective that the ranks have agreed on.
    fn perform_inner(&mut self, job: Job, agreed: &Agreed, done: &Arc<Interrupt>) -> Result<()> {
        self.core.log_inner(&job.info.call.view);
        self.flush()?;
        let shared = self.shared;
        let explain = |failure| shared.explain(failure, &job.info);
        let fabric = &mut self.core.fabric;
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
                // The inner backend only knows an address; the fabric knows which rank is gone.
                let never = Interrupt::new().map_err(|_| error.clone())?;
                fabric.watch_until(&never, LOSS_LIMIT).map_err(explain)?;
                let doing = format!("{} #{}", job.info.call.view, job.info.seq);
                Err(Error::Connection { doing, reason: error.to_string() })
            }
            Err(error) => Err(error),
            Ok(()) => {
                self.record_outcome(&job.info, job.operation, agreed.gradient, Ok(()));
                Ok(())
            }
        }
    }

    /// Counts a collective that has an outcome, and keeps it to be completed.
    fn record_outcome(
        &mut self,
        info: &CollectiveInfo,
        operation: Arc<dyn Operation>,
        is_gradient: bool,
        outcome: Result<()>,
    ) {
        let CollectiveInfo { seq, call } = info;
        if outcome.is_ok() {
            self.shared.counters.count(counters::CollectiveCount {
                kind: call.view.kind as usize,
                is_gradient,
                tensors: u64::from(call.view.tensors),
                bytes: call.bytes,
            });
        }
        let collective = PendingCollective { seq: *seq, operation, is_timed: call.gradient };
        self.finished.push(Finished { collective, outcome });
    }
}

/// What this rank tells the others about a tensor that may be a gradient bucket.
fn gradient_info(gradients: &Gradients, call: &Call) -> TensorInfo<'static> {
    TensorInfo {
        bytes: &[],
        offset: None,
        step: gradients.step_of(call.bucket),
        momentum: gradients.momentum_code(),
        stepping: gradients.stepping_of(call.bucket),
    }
}

/// Splits a job into the parts that a gradient exchange takes.
fn into_ticket(job: Job, agreed: &Agreed) -> (Arc<CollectiveInfo>, GradientTicket) {
    let Job { info, operation, .. } = job;
    (Arc::new(info), GradientTicket { operation, is_gradient: agreed.gradient })
}
