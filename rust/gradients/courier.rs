//! The courier: a thread that takes parcels round the ring, in order, while the worker is busy with the
//! next gradients. It touches nothing but the ring and the parcel, and never waits past the parcel's
//! deadline.

use super::parcel::Parcel;
use crate::collective::ring::Ring;
use crate::error::Error;
use crate::observe::threads;
use crate::sync::lock;
use crate::transport::{Failure, Watch};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often the worker checks its peers while it waits for a parcel.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// A parcel that has been round the ring, or failed to.
pub struct Delivery {
    pub parcel: Parcel,
    pub outcome: Result<(), Failure>,
    pub seconds: f64,
    /// Bytes that this rank sent for it.
    pub sent: u64,
}

pub struct Courier {
    orders: Sender<Parcel>,
    deliveries: Receiver<Delivery>,
    stop_requested: Arc<AtomicBool>,
    /// The thread, until the first parcel starts it.
    not_started: Option<CourierThread>,
}

struct CourierThread {
    ring: Arc<Mutex<Ring>>,
    watch: Box<dyn Watch + Send>,
    orders: Receiver<Parcel>,
    deliveries: Sender<Delivery>,
    stop_requested: Arc<AtomicBool>,
}

impl Courier {
    /// A courier for this ring, which checks `watch` while it waits. Its thread starts with the first
    /// parcel.
    pub fn new(ring: Arc<Mutex<Ring>>, watch: Box<dyn Watch + Send>) -> Courier {
        let (orders, thread_orders) = channel();
        let (thread_deliveries, deliveries) = channel();
        let stop_requested = Arc::new(AtomicBool::new(false));
        let thread = CourierThread {
            ring,
            watch,
            orders: thread_orders,
            deliveries: thread_deliveries,
            stop_requested: stop_requested.clone(),
        };
        Courier { orders, deliveries, stop_requested, not_started: Some(thread) }
    }

    pub fn send(&mut self, parcel: Parcel) -> Result<(), Failure> {
        if let Some(thread) = self.not_started.take() {
            threads::spawn("gflow-courier", move || thread.run())
                .map_err(|error| Failure::Broken(format!("could not start a thread: {error}")))?;
        }
        self.orders.send(parcel).map_err(|_| has_ended())
    }

    /// Waits for the oldest parcel under way, and calls `check` from time to time.
    pub fn receive(
        &mut self,
        mut check: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Delivery, Failure> {
        loop {
            match self.deliveries.recv_timeout(CHECK_EVERY) {
                Ok(delivery) => return Ok(delivery),
                Err(RecvTimeoutError::Timeout) => check().inspect_err(|_| {
                    // The parcels under way are no longer needed.
                    self.stop_requested.store(true, Ordering::Release);
                })?,
                Err(RecvTimeoutError::Disconnected) => return Err(has_ended()),
            }
        }
    }
}

fn has_ended() -> Failure {
    Failure::Broken("the thread that carries gradients has ended".to_string())
}

impl CourierThread {
    /// Runs until the courier is dropped.
    fn run(mut self) {
        while let Ok(mut parcel) = self.orders.recv() {
            let mut ring = lock(&self.ring);
            let (start, sent) = (Instant::now(), ring.sent());
            let mut watch = UntilStopped { watch: &mut *self.watch, stop: &self.stop_requested };
            let go_round = AssertUnwindSafe(|| parcel.go_round(&mut ring, &mut watch));
            let outcome = catch_unwind(go_round).unwrap_or_else(|payload| {
                Err(Failure::Broken(Error::from_panic(payload).to_string()))
            });
            let seconds = start.elapsed().as_secs_f64();
            let sent = ring.sent() - sent;
            drop(ring);
            if self.deliveries.send(Delivery { parcel, outcome, seconds, sent }).is_err() {
                return;
            }
        }
    }
}

/// `watch`, until the worker asks the courier to stop.
struct UntilStopped<'a> {
    watch: &'a mut dyn Watch,
    stop: &'a AtomicBool,
}

impl Watch for UntilStopped<'_> {
    fn check(&mut self) -> Result<(), Failure> {
        match self.stop.load(Ordering::Acquire) {
            true => Err(Failure::Interrupted),
            false => self.watch.check(),
        }
    }
}
