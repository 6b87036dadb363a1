//! Decides which gradient buckets are exchanged together, and when. Nothing else does.
//!
//! A bucket that is compressed is summed within its host and held until `fusion_bytes` are together, or
//! the backward pass ends. Then all held buckets are exchanged as one. While that exchange is under way
//! the next buckets are collected; it is completed when the next one has been sent off, or on a flush.
//!
//! Everything follows the order of the program, which is the same on every rank. Nothing here may depend
//! on time, or on something that only one rank knows.

use super::config::Treatment;
use super::exchanger::Exchanger;
use super::failure::ExchangeFailure;
use super::fused_bucket::{FusedBucket, Tensor};
use super::notice::Notice;
use crate::codec::Coding;
use crate::collective::agreement::AgreedBucket;
use crate::collective::fabric::Fabric;
use crate::collective::info::CollectiveInfo;
use std::sync::Arc;
use std::time::Instant;

/// A collective whose gradients are exchanged, with the ticket that its caller gave.
pub struct Completed<T> {
    pub info: Arc<CollectiveInfo>,
    pub ticket: T,
}

/// What came of a call: the collectives whose results are in place now, and why it failed if it did.
#[must_use]
pub struct Progress<T> {
    pub completed: Vec<Completed<T>>,
    pub failed: Option<Failed>,
}

/// Why an exchange of gradients failed, and the first of the collectives that it was for.
pub struct Failed {
    pub info: Arc<CollectiveInfo>,
    pub failure: ExchangeFailure,
}

/// Buckets that are exchanged as one.
struct Batch<T> {
    buckets: Vec<FusedBucket>,
    /// The caller's, one for each bucket.
    tickets: Vec<T>,
}

impl<T> Batch<T> {
    fn new() -> Batch<T> {
        Batch { buckets: Vec::new(), tickets: Vec::new() }
    }

    fn push(&mut self, bucket: FusedBucket, ticket: T) {
        self.buckets.push(bucket);
        self.tickets.push(ticket);
    }

    /// The first of its collectives, which names it in messages.
    fn first(&self) -> Option<&Arc<CollectiveInfo>> {
        self.buckets.first().map(|bucket| &bucket.tensor.info)
    }

    fn bytes(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.tensor.span.bytes).sum()
    }

    /// Whether a tensor can be exchanged with these: then all take the same path, and are sent alike.
    fn can_take(&self, tensor: &Tensor, coding: Coding) -> bool {
        self.buckets.first().is_none_or(|first| {
            let is_alike = match (first.coding, coding) {
                (Coding::Chunks { wire, .. }, Coding::Chunks { wire: other, .. }) => wire == other,
                (one, other) => one == other,
            };
            is_alike && first.tensor.device_slot() == tensor.device_slot()
        })
    }

    fn completed(self) -> impl Iterator<Item = Completed<T>> {
        let infos = self.buckets.into_iter().map(|bucket| bucket.tensor.info);
        infos.zip(self.tickets).map(|(info, ticket)| Completed { info, ticket })
    }
}

/// The buckets that were taken and are not complete; `T` is the caller's ticket for each.
pub struct Fusion<T> {
    /// Wait for others to be exchanged with.
    held: Batch<T>,
    /// The exchange that was dispatched.
    under_way: Option<Batch<T>>,
    /// Complete, and not yet returned to the caller.
    completed: Vec<Completed<T>>,
    has_compressed: bool,
    notices: Vec<Notice>,
}

impl<T> Default for Fusion<T> {
    fn default() -> Self {
        Fusion {
            held: Batch::new(),
            under_way: None,
            completed: Vec::new(),
            has_compressed: false,
            notices: Vec::new(),
        }
    }
}

impl<T> Fusion<T> {
    /// Takes a bucket that the ranks have agreed on, and exchanges it now or together with others.
    pub fn exchange(
        &mut self,
        exchanger: &mut Exchanger,
        fabric: &mut Fabric,
        bucket: AgreedBucket,
        tensor: Tensor,
        ticket: T,
    ) -> Progress<T> {
        let outcome = self.take(exchanger, fabric, bucket, tensor, ticket);
        self.progress(outcome)
    }

    /// Exchanges and completes everything.
    pub fn flush(&mut self, exchanger: &mut Exchanger, fabric: &mut Fabric) -> Progress<T> {
        let outcome = self.complete_all(exchanger, fabric);
        self.progress(outcome)
    }

    /// What the user has to be told, once.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn progress(&mut self, outcome: Result<(), Failed>) -> Progress<T> {
        Progress { completed: std::mem::take(&mut self.completed), failed: outcome.err() }
    }

    fn take(
        &mut self,
        exchanger: &mut Exchanger,
        fabric: &mut Fabric,
        bucket: AgreedBucket,
        tensor: Tensor,
        ticket: T,
    ) -> Result<(), Failed> {
        let info = tensor.info.clone();
        let failed = |failure| Failed { info: info.clone(), failure };
        let deadline = Instant::now() + info.call.timeout;
        if exchanger.choice_is_due(&bucket, &tensor) {
            self.complete_all(exchanger, fabric)?;
            let choice = exchanger.choose(fabric, &tensor, deadline).map_err(failed)?;
            self.notices.extend(choice.map(Notice::Chosen));
        }
        let Treatment::Compressed(coding) = exchanger.decide_treatment(&bucket, &tensor) else {
            self.complete_all(exchanger, fabric)?;
            exchanger.exchange_exactly(fabric, &bucket, &tensor, deadline).map_err(failed)?;
            self.completed.push(Completed { info, ticket });
            return Ok(());
        };
        if !bucket.on_all_ranks || !self.held.can_take(&tensor, coding) {
            self.complete_all(exchanger, fabric)?;
        }
        let (element, tensor_is_on_device) = (tensor.element, tensor.device_slot() != 0);
        let fused = exchanger.begin(fabric, bucket, coding, tensor, deadline).map_err(failed)?;
        if !std::mem::replace(&mut self.has_compressed, true)
            && exchanger.chosen_method().is_none_or(|_| tensor_is_on_device)
        {
            let hosts = fabric.topology().hosts();
            let started = exchanger.compression_started(hosts, element, coding);
            self.notices.extend(started.map(Notice::Started));
        }
        self.held.push(fused, ticket);
        if !bucket.on_all_ranks {
            // A rank that is not in this backward pass does not know when it ends.
            self.complete_all(exchanger, fabric)
        } else if self.held.bytes() >= exchanger.config().map_or(0, |config| config.fusion_bytes) {
            self.close(exchanger, fabric, deadline)
        } else {
            Ok(())
        }
    }

    fn complete_all(
        &mut self,
        exchanger: &mut Exchanger,
        fabric: &mut Fabric,
    ) -> Result<(), Failed> {
        let oldest = self.under_way.as_ref().unwrap_or(&self.held);
        let Some(info) = oldest.first() else { return Ok(()) };
        let deadline = Instant::now() + info.call.timeout;
        self.close(exchanger, fabric, deadline)?;
        match self.under_way.take() {
            Some(last) => self.deliver(exchanger, fabric, last, deadline),
            None => Ok(()),
        }
    }

    /// Exchanges the held buckets as one. This completes the exchange before, and these buckets too if the
    /// host has nothing more to do for them.
    fn close(
        &mut self,
        exchanger: &mut Exchanger,
        fabric: &mut Fabric,
        deadline: Instant,
    ) -> Result<(), Failed> {
        let mut batch = std::mem::replace(&mut self.held, Batch::new());
        let Some(info) = batch.first().cloned() else { return Ok(()) };
        let is_done = exchanger
            .dispatch(fabric, &mut batch.buckets, deadline)
            .map_err(|failure| Failed { info, failure })?;
        if let Some(before) = self.under_way.replace(batch) {
            self.deliver(exchanger, fabric, before, deadline)?;
        }
        match self.under_way.take_if(|_| is_done) {
            Some(batch) => self.deliver(exchanger, fabric, batch, deadline),
            None => Ok(()),
        }
    }

    /// Completes the oldest exchange under way.
    fn deliver(
        &mut self,
        exchanger: &mut Exchanger,
        fabric: &mut Fabric,
        mut batch: Batch<T>,
        deadline: Instant,
    ) -> Result<(), Failed> {
        match exchanger.deliver(fabric, &mut batch.buckets, deadline) {
            Ok(()) => {
                self.completed.extend(batch.completed());
                Ok(())
            }
            Err(failure) => {
                let info = batch.buckets[0].tensor.info.clone();
                Err(Failed { info, failure })
            }
        }
    }
}
