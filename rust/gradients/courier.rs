//! The courier: a thread that takes wire buffers round the ring, one after the other, while the
//! worker is already busy with the gradients that come next.
//!
//! Parcels come back in the order in which they were sent. The courier touches nothing but the ring
//! and what is in the parcel, and must never wait past a parcel's deadline.

use super::parcel::Parcel;
use crate::collective::ring::Ring;
use crate::error::Error;
use crate::transport::{Failure, Watch};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the worker looks after the peers while it waits for a parcel.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A parcel that has been round the ring, or failed to.
pub struct Delivery {
    pub parcel: Parcel,
    pub outcome: Result<(), Failure>,
    pub seconds: f64,
    /// Bytes that this rank has sent for it.
    pub sent: u64,
}

pub struct Courier {
    orders: Sender<Parcel>,
    deliveries: Receiver<Delivery>,
    is_to_stop: Arc<AtomicBool>,
    /// What the thread needs, until there is something to do for it.
    waiting: Option<Outfit>,
}

struct Outfit {
    ring: Arc<Mutex<Ring>>,
    watch: Box<dyn Watch + Send>,
    orders: Receiver<Parcel>,
    deliveries: Sender<Delivery>,
    is_to_stop: Arc<AtomicBool>,
}

impl Courier {
    /// A courier for this ring, whose waits heed `watch`. The thread starts with the first parcel.
    pub fn new(ring: Arc<Mutex<Ring>>, watch: Box<dyn Watch + Send>) -> Courier {
        let (orders, of_thread) = channel();
        let (by_thread, deliveries) = channel();
        let is_to_stop = Arc::new(AtomicBool::new(false));
        let outfit = Outfit {
            ring,
            watch,
            orders: of_thread,
            deliveries: by_thread,
            is_to_stop: is_to_stop.clone(),
        };
        Courier { orders, deliveries, is_to_stop, waiting: Some(outfit) }
    }

    pub fn send(&mut self, parcel: Parcel) -> Result<(), Failure> {
        if let Some(outfit) = self.waiting.take() {
            std::thread::Builder::new()
                .name("gflow-courier".to_string())
                .spawn(move || outfit.work())
                .map_err(|error| Failure::Broken(format!("could not start a thread: {error}")))?;
        }
        self.orders.send(parcel).map_err(|_| has_ended())
    }

    /// Waits for the oldest parcel under way; `check` looks after the peers meanwhile.
    pub fn receive(
        &mut self,
        mut check: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Delivery, Failure> {
        loop {
            match self.deliveries.recv_timeout(LOOK_EVERY) {
                Ok(delivery) => return Ok(delivery),
                Err(RecvTimeoutError::Timeout) => check().inspect_err(|_| {
                    // What is under way is of no use to anybody any more.
                    self.is_to_stop.store(true, Ordering::Release);
                })?,
                Err(RecvTimeoutError::Disconnected) => return Err(has_ended()),
            }
        }
    }
}

fn has_ended() -> Failure {
    Failure::Broken("the thread that carries gradients has ended".to_string())
}

impl Outfit {
    /// Until the courier is dropped.
    fn work(mut self) {
        while let Ok(mut parcel) = self.orders.recv() {
            let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            let (start, sent) = (Instant::now(), ring.sent());
            let mut watch = UntilStopped { watch: &mut *self.watch, stop: &self.is_to_stop };
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
