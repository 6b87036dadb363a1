//! The way of parcels of chunks: round the ring, one after the other.

use super::courier::{Delivery, Orders, Route, Waker, unless_it_panics};
use super::parcel::Parcel;
use crate::collective::ring::Ring;
use crate::sync::lock;
use crate::transport::{Failure, Watch};
use std::sync::{Arc, Mutex};
use std::time::Instant;

pub struct RingRoute {
    pub ring: Arc<Mutex<Ring>>,
    /// Checked while a parcel is on its way.
    pub watch: Box<dyn Watch + Send>,
}

impl Route<Parcel> for RingRoute {
    fn waker(&self) -> Option<Waker> {
        None
    }

    fn run(mut self, orders: Orders<Parcel>) {
        while let Ok(Some(mut parcel)) = orders.wait() {
            let mut ring = lock(&self.ring);
            let (start, sent) = (Instant::now(), ring.sent());
            let mut watch = UntilStopped { watch: &mut *self.watch, orders: &orders };
            let outcome = unless_it_panics(|| parcel.go_round(&mut ring, &mut watch));
            let seconds = start.elapsed().as_secs_f64();
            let sent = ring.sent() - sent;
            drop(ring);
            orders.deliver(Delivery { parcel, outcome, seconds, seconds_summing: 0.0, sent });
        }
    }
}

/// `watch`, until the worker asks the courier to stop.
struct UntilStopped<'a> {
    watch: &'a mut dyn Watch,
    orders: &'a Orders<Parcel>,
}

impl Watch for UntilStopped<'_> {
    fn check(&mut self) -> Result<(), Failure> {
        match self.orders.are_stopped() {
            true => Err(Failure::Interrupted),
            false => self.watch.check(),
        }
    }
}
