//! The engine of a group, as its callers use it: submit collectives, wait for them, read the counters.
//!
//! `submit` never blocks, unless the caller asks to wait. Every operation that was submitted is completed
//! exactly once: by the thread that ran it, by `abort` or by `close`.

use super::operation::Operation;
use super::queue::Submitted;
use super::shared::{Gradients, Shared};
use super::watch::{CourierWatch, DeviceWatch};
use super::worker;
use crate::collective::call::Call;
use crate::collective::fabric::Fabric;
use crate::collective::links::Links;
use crate::error::{Error, Result};
use crate::gradients::{DeviceTicket, Obstacle};
use crate::observe::counters::Counts;
use crate::observe::gradient_counters::GradientCounts;
use crate::observe::overlap::OverlapTimes;
use crate::observe::threads;
use crate::transport::interrupt::Interrupt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub struct Engine {
    pub(super) shared: Arc<Shared>,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) closed: AtomicBool,
    /// Threads do not survive a fork, so a child must not wait for them.
    process: u32,
}

impl Engine {
    /// Starts the worker. `labels` name the ranks of the group in messages.
    pub fn start(
        name: &str,
        labels: Vec<String>,
        fabric: Fabric,
        links: Option<Links>,
        gradients: Gradients,
        interrupt: Arc<Interrupt>,
    ) -> Result<Engine> {
        let ring = fabric.shared_ring();
        let shared = Arc::new(Shared::new(labels, fabric, gradients));
        let watch = || {
            let shared = Arc::downgrade(&shared);
            Box::new(CourierWatch { shared, interrupt: interrupt.clone() })
        };
        if let Some(ring) = ring {
            shared.core().gradients.set_ring(ring, watch());
        }
        if let Some(links) = links {
            let set = shared.core().gradients.set_links(links, watch());
            set.map_err(|error| Error::Connect(format!("no event descriptor: {error}")))?;
        }
        let worker_shared = shared.clone();
        let serve = move || {
            worker::serve(&worker_shared);
            worker_shared.activity.worker_ended();
        };
        threads::spawn(&format!("gflow-{name}"), serve)
            .map_err(|error| Error::Connect(format!("could not start a thread: {error}")))?;
        let process = std::process::id();
        Ok(Engine { shared, interrupt, process, closed: AtomicBool::new(false) })
    }

    /// Makes a device ready for collectives on tensors there. The engine enqueues its work on `stream`, a
    /// raw handle that must stay valid as long as the group. If this rank cannot use the device, the first
    /// collective there tells all ranks why.
    pub fn open_device(&self, device: i32, stream: u64) -> Result<()> {
        self.check_usable()?;
        let watch =
            DeviceWatch { shared: Arc::downgrade(&self.shared), interrupt: self.interrupt.clone() };
        self.shared.devices.open(device, stream, watch);
        Ok(())
    }

    /// Queues a collective and returns its number in the group.
    pub fn submit(&self, mut call: Call, operation: Arc<dyn Operation>) -> Result<u64> {
        let device = self.device_ticket(&mut call)?;
        let is_gradient = call.gradient;
        if is_gradient {
            self.shared.overlap.begin(call.bucket, Instant::now());
        }
        let pushed = self.shared.queue.push(call, operation, device);
        if is_gradient && pushed.is_err() {
            self.shared.overlap.end(Instant::now());
        }
        pushed
    }

    /// Like [`Engine::submit`], for a caller that waits for the outcome anyway: if nothing else runs, the
    /// collective runs on the caller's thread, which saves waking another one twice.
    pub fn submit_and_wait(&self, mut call: Call, operation: Arc<dyn Operation>) -> Result<u64> {
        let device = self.device_ticket(&mut call)?;
        match self.shared.queue.take_or_push(call, operation, device)? {
            Submitted::RunHere(job) => {
                let seq = job.info.seq;
                worker::run(&self.shared, job);
                Ok(seq)
            }
            Submitted::Queued(seq) => Ok(seq),
        }
    }

    /// For tensors on a device: records what the caller has put on its stream there so far, and notes the
    /// device's slot in the call.
    fn device_ticket(&self, call: &mut Call) -> Result<Option<Box<DeviceTicket>>> {
        self.refuse_forks()?;
        let Some(at) = call.on_device else { return Ok(None) };
        // First: the reason why a group failed is worth more than what its device says since.
        self.shared.queue.check_open()?;
        match self.shared.devices.ticket(at) {
            Ok(ticket) => {
                call.view.device_slot = ticket.queue.slot;
                Ok(Some(Box::new(ticket)))
            }
            Err(Obstacle::Refused(error)) => Err(error),
            Err(Obstacle::Unable { device_slot, error }) => {
                call.view.device_slot = device_slot;
                call.complain_of(&error);
                Ok(None)
            }
        }
    }

    /// Runs an operation that is not a collective outside of the queue: a send or a receive.
    pub fn submit_aside(&self, operation: Arc<dyn Operation>) -> Result<()> {
        self.shared.activity.begin_aside(&operation);
        // Checked after `begin_aside`: if the group closes meanwhile, either closing completes the operation
        // or this check fails.
        if let Err(error) = self.check_usable() {
            self.shared.activity.end_aside(&operation);
            return Err(error);
        }
        let shared = self.shared.clone();
        self.shared.pool.spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| operation.finish()))
                .unwrap_or_else(|payload| Err(Error::from_panic(payload)));
            shared.complete(&operation, outcome.err().as_ref());
            shared.activity.end_aside(&operation);
        });
        Ok(())
    }

    /// The backward pass has ended: exchanges the gradients that are held, for which the caller waits now.
    pub fn end_of_pass(&self) {
        self.shared.overlap.backward_ended(Instant::now());
        self.shared.queue.push_flush();
    }

    /// Exchanges the gradients that are held, because the job waits for one of them.
    pub fn flush(&self) {
        self.shared.queue.push_flush();
    }

    /// Waits until every collective submitted so far is complete.
    pub fn fence(&self, limit: Duration) -> Result<()> {
        self.check_usable()?;
        self.flush();
        let newest = self.seq();
        let outcome = self.shared.activity.wait_until_complete(newest, limit);
        self.check_usable()?;
        outcome.map_err(|finished| {
            let first = finished.min(newest - 1) + 1;
            Error::TimedOut {
                missing: vec![format!("the collectives #{first} to #{newest} before it")],
                doing: "waiting for the collectives before".to_string(),
                waited: limit,
            }
        })
    }

    /// Does something with the state of the gradients between two steps, after every collective submitted
    /// so far.
    pub fn with_gradients<T>(
        &self,
        limit: Duration,
        action: impl FnOnce(&mut Gradients) -> T,
    ) -> Result<T> {
        self.fence(limit)?;
        let outcome = action(&mut self.shared.core().gradients);
        // If the group failed meanwhile, its exchanges were aborted, and what was read is worthless.
        self.check_usable()?;
        Ok(outcome)
    }

    /// Reads the state of the gradients in a group that has failed, as soon as nothing runs any more.
    /// `None` in any other group.
    pub fn with_gradients_after_failure<T>(
        &self,
        action: impl FnOnce(&Gradients) -> T,
    ) -> Result<Option<T>> {
        self.refuse_forks()?;
        // A group that was closed has failed only in name, and its user is done with it.
        if !self.shared.has_failed() || self.closed.load(Ordering::Acquire) {
            return Ok(None);
        }
        // What ran when it failed has been interrupted.
        Ok(Some(action(&self.shared.core().gradients)))
    }

    /// These buckets are gone: their state is dropped.
    pub fn forget(&self, buckets: &[u32]) {
        self.shared.forget(buckets);
    }

    /// What the user should be told about compression, empty if nothing; only once, and only on the first
    /// rank.
    pub fn take_announcement(&self) -> String {
        self.shared.take_announcement()
    }

    /// The name of this rank in messages.
    pub fn label(&self) -> &str {
        self.shared.label()
    }

    /// The number of the newest collective, 0 before the first.
    pub fn seq(&self) -> u64 {
        self.shared.queue.seq()
    }

    pub fn counts(&self) -> Counts {
        self.shared.counters.snapshot()
    }

    /// The costs of the gradient exchange so far.
    pub fn gradient_counts(&self) -> (GradientCounts, OverlapTimes) {
        (self.shared.gradient_counters.snapshot(), self.shared.overlap.times())
    }

    /// Fails with the reason if this group cannot be used, or not from this process.
    pub fn check_usable(&self) -> Result<()> {
        self.refuse_forks()?;
        self.shared.queue.check_open()
    }

    pub(super) fn refuse_forks(&self) -> Result<()> {
        let now = std::process::id();
        if self.process == now {
            return Ok(());
        }
        Err(Error::Closed(format!(
            "this process group belongs to process {}, and this is its fork {now}: make a new \
             group here",
            self.process
        )))
    }
}
