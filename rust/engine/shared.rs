//! State shared by a group's worker and its callers.

use super::activity::Activity;
use super::blocking_pool::BlockingPool;
use super::operation::Operation;
use super::queue::{Job, Queue};
use crate::collective::call::{CollectiveKind, View};
use crate::collective::fabric::Fabric;
use crate::error::Error;
use crate::gradients::{self, Devices, Notice};
use crate::observe::counters::Counters;
use crate::observe::gradient_counters::GradientCounters;
use crate::observe::overlap::OverlapTimer;
use crate::sync::lock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Set when the interpreter is about to end: no callback may start after that.
pub static NO_MORE_CALLBACKS: AtomicBool = AtomicBool::new(false);

/// The gradients of a group, with what the engine needs to complete each of their collectives.
pub type Gradients = gradients::Gradients<GradientTicket>;

/// Handed back to the engine when a gradient has been exchanged.
pub struct GradientTicket {
    pub operation: Arc<dyn Operation>,
    /// Whether the ranks agreed that it is a gradient bucket, for the counters.
    pub is_gradient: bool,
}

/// State that is locked by the thread running a collective.
pub struct GroupCore {
    pub fabric: Fabric,
    pub gradients: Gradients,
    /// The kinds of collective that went to the inner backend: each is logged once.
    inner_kinds: u32,
    /// Buckets are numbered as they are allocated, so a new one has a larger number.
    newest_exact_bucket: u32,
}

impl GroupCore {
    /// Logs the first collective of each kind that the engine leaves to the inner backend.
    pub fn log_inner(&mut self, view: &View) {
        let kind = 1 << view.kind as u32;
        if self.inner_kinds & kind == 0 {
            self.inner_kinds |= kind;
            log::info!("{view} is left to the inner backend");
        }
    }

    /// Logs each gradient bucket of a group that compresses nothing, once.
    pub fn log_exact_bucket(&mut self, number: u32) {
        if number > self.newest_exact_bucket {
            self.newest_exact_bucket = number;
            log::info!("bucket {number} is exchanged exactly: this group compresses nothing");
        }
    }
}

pub struct Shared {
    pub queue: Queue,
    /// The queue sees to it that only one thread at a time runs a collective.
    pub core: Mutex<GroupCore>,
    /// How messages name each rank.
    pub labels: Vec<String>,
    pub rank: usize,
    pub counters: Counters,
    pub overlap: Arc<OverlapTimer>,
    pub gradient_counters: Arc<GradientCounters>,
    pub devices: Arc<Devices>,
    pub activity: Arc<Activity>,
    pub pool: Arc<BlockingPool>,
    /// Buckets that are gone, until their state can be dropped.
    gone: Mutex<Vec<u32>>,
    /// For the user, until it is taken.
    announcement: Mutex<String>,
}

impl Shared {
    pub fn new(labels: Vec<String>, fabric: Fabric, mut gradients: Gradients) -> Shared {
        let devices: Arc<Devices> = Arc::default();
        gradients.set_devices(devices.clone());
        let rank = fabric.rank();
        Shared {
            queue: Queue::default(),
            gradient_counters: gradients.counters().clone(),
            overlap: gradients.overlap().clone(),
            core: Mutex::new(GroupCore {
                fabric,
                gradients,
                inner_kinds: 0,
                newest_exact_bucket: 0,
            }),
            labels,
            rank,
            counters: Counters::new(CollectiveKind::ALL.len()),
            devices,
            activity: Arc::default(),
            pool: Arc::default(),
            gone: Mutex::default(),
            announcement: Mutex::default(),
        }
    }

    /// How messages name this rank.
    pub fn label(&self) -> &str {
        self.labels.get(self.rank).map_or("", String::as_str)
    }

    /// Everything that a collective needs. A panic while it was locked has ended the group, but its peers
    /// must still be told.
    pub fn core(&self) -> MutexGuard<'_, GroupCore> {
        let mut core = lock(&self.core);
        self.forget_gone_buckets(&mut core);
        core
    }

    /// Drops the state of these buckets as soon as no collective runs.
    pub fn forget(&self, buckets: &[u32]) {
        lock(&self.gone).extend_from_slice(buckets);
        if let Ok(mut core) = self.core.try_lock() {
            self.forget_gone_buckets(&mut core);
        }
        // Otherwise the next thread that locks it does this.
    }

    fn forget_gone_buckets(&self, core: &mut GroupCore) {
        core.gradients.forget(&std::mem::take(&mut *lock(&self.gone)));
    }

    /// Keeps what the first rank has to tell the user about compression.
    pub fn announce(&self, notice: &Notice) {
        if self.rank != 0 {
            // The first rank says it as a warning, so that nobody can miss it.
            log::info!("{notice}");
            return;
        }
        let mut announcement = lock(&self.announcement);
        if !announcement.is_empty() {
            announcement.push_str("; ");
        }
        announcement.push_str(&notice.to_string());
    }

    pub fn take_announcement(&self) -> String {
        std::mem::take(&mut *lock(&self.announcement))
    }

    /// Releases all that wait for `operation`, and starts its callbacks.
    pub fn complete(&self, operation: &Arc<dyn Operation>, error: Option<&Error>) {
        if !operation.complete(error) || NO_MORE_CALLBACKS.load(Ordering::Acquire) {
            return;
        }
        self.activity.begin_notifying();
        let (activity, operation) = (self.activity.clone(), operation.clone());
        self.pool.spawn(move || {
            let _ = catch_unwind(AssertUnwindSafe(|| operation.notify()));
            activity.end_notifying();
        });
    }

    /// Takes no more operations and completes all that are pending with `error`.
    pub fn fail(&self, error: &Error) {
        if self.queue.check_open().is_ok() {
            log::info!("the group has failed: {error}");
        }
        self.queue.fail(error.clone());
        for Job { info, operation, .. } in self.queue.drain() {
            self.complete(&operation, Some(error));
            self.activity.skip_to(info.seq);
        }
        for operation in self.activity.running() {
            self.complete(&operation, Some(error));
        }
    }

    /// Whether every operation fails from now on.
    pub fn has_failed(&self) -> bool {
        self.queue.failure().is_some()
    }
}
