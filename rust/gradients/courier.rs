//! The courier: a thread that takes parcels to the other hosts, in order, while the worker is busy with
//! the next gradients. It touches nothing but its [`Route`] and the parcels, and never waits past a
//! parcel's deadline.

use crate::error::Error;
use crate::observe::threads;
use crate::transport::Failure;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::Duration;

/// How often the worker checks its peers while it waits for a parcel.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// A parcel that has been to the other hosts, or failed to.
pub struct Delivery<P> {
    pub parcel: P,
    pub outcome: Result<(), Failure>,
    /// How long the parcel was on its way, without the time that the one before still was.
    pub seconds: f64,
    /// How much of that the thread has spent on adding up.
    pub seconds_summing: f64,
    /// Bytes that this rank sent for it.
    pub sent: u64,
}

/// How parcels travel. It runs on the courier's thread.
pub trait Route<P>: Send + 'static {
    /// Wakes the thread when there is an order, if it may wait for something else.
    fn waker(&self) -> Option<Waker>;

    /// Carries out orders until there are no more, and delivers every parcel, whatever comes of it.
    fn run(self, orders: Orders<P>);
}

/// The thread's end of a courier.
pub struct Orders<P> {
    orders: Receiver<P>,
    deliveries: Sender<Delivery<P>>,
    stop_requested: Arc<AtomicBool>,
}

/// The courier was dropped: there are no more orders.
#[derive(Debug)]
pub struct Closed;

impl<P> Orders<P> {
    /// The next parcel; waits until there is one.
    pub fn wait(&self) -> Result<Option<P>, Closed> {
        self.orders.recv().map(Some).map_err(|_| Closed)
    }

    /// The next parcel, if there is one now.
    pub fn take(&self) -> Result<Option<P>, Closed> {
        match self.orders.try_recv() {
            Ok(parcel) => Ok(Some(parcel)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Closed),
        }
    }

    /// Returns a parcel to the worker.
    pub fn deliver(&self, delivery: Delivery<P>) {
        // If the courier is gone, nobody waits for it.
        let _ = self.deliveries.send(delivery);
    }

    /// Whether the worker no longer needs what is under way.
    pub fn are_stopped(&self) -> bool {
        self.stop_requested.load(Ordering::Acquire)
    }
}

pub struct Courier<P> {
    orders: Sender<P>,
    deliveries: Receiver<Delivery<P>>,
    stop_requested: Arc<AtomicBool>,
    waker: Option<Waker>,
    /// The thread, until the first parcel starts it.
    not_started: Option<Box<dyn FnOnce() + Send>>,
}

impl<P: Send + 'static> Courier<P> {
    /// A courier for this route. Its thread starts with the first parcel.
    pub fn new(route: impl Route<P>) -> Courier<P> {
        let (orders, thread_orders) = channel();
        let (thread_deliveries, deliveries) = channel();
        let stop_requested = Arc::new(AtomicBool::new(false));
        let waker = route.waker();
        let thread = Orders {
            orders: thread_orders,
            deliveries: thread_deliveries,
            stop_requested: stop_requested.clone(),
        };
        let run = move || {
            // The worker notices by the end of its deliveries.
            let _ = catch_unwind(AssertUnwindSafe(|| route.run(thread))).inspect_err(|payload| {
                log::error!("the thread that carries gradients panicked: {payload:?}");
            });
        };
        Courier { orders, deliveries, stop_requested, waker, not_started: Some(Box::new(run)) }
    }

    pub fn send(&mut self, parcel: P) -> Result<(), Failure> {
        if let Some(thread) = self.not_started.take() {
            threads::spawn("gflow-courier", thread)
                .map_err(|error| Failure::Broken(format!("could not start a thread: {error}")))?;
        }
        self.orders.send(parcel).map_err(|_| has_ended())?;
        if let Some(waker) = &self.waker {
            waker.wake();
        }
        Ok(())
    }

    /// Waits for the oldest parcel under way, and calls `check` from time to time.
    pub fn receive(
        &mut self,
        mut check: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Delivery<P>, Failure> {
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

impl<P> Drop for Courier<P> {
    fn drop(&mut self) {
        self.stop_requested.store(true, Ordering::Release);
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}

fn has_ended() -> Failure {
    Failure::Broken("the thread that carries gradients has ended".to_string())
}

/// The outcome of something that may panic, as a failure of the exchange.
pub fn unless_it_panics(work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|payload| Err(Failure::Broken(Error::from_panic(payload).to_string())))
}

/// Wakes a thread from a wait on sockets, as often as it is told to.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    pub fn new() -> std::io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(event)))
    }

    pub fn wake(&self) {
        // It fails only where it was told very often, and then the thread wakes anyway.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Forgets how often it was told to, so that the thread can sleep again.
    pub fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0u8; 8]);
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
