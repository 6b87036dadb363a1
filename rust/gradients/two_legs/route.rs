//! The way of parcels of blocks: to the owners of their blocks, and back as sums.
//!
//! Several parcels are under way at once, so that a link is busy while this thread adds up. A parcel
//! leaves for its second leg when the parts of all hosts are there, and is delivered when all sums
//! are; parcels are delivered in their order. Parts that arrive before this rank has the parcel wait.

use super::parcel::BlockParcel;
use crate::codec::quantizer::Workspace;
use crate::collective::links::{Arrived, Label, Links};
use crate::gradients::courier::{Delivery, Orders, Route, Waker};
use crate::transport::{Failure, Watch, reason_of_loss};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the watch is checked while nothing arrives.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// The parts of an exchange, as the labels of messages count them.
const FIRST_LEG: u32 = 1;
const SECOND_LEG: u32 = 2;

/// No honest rank is further ahead than this: a parcel needs all hosts.
const MOST_AHEAD: u64 = 1 << 20;

pub struct LinkRoute {
    links: Links,
    watch: Box<dyn Watch + Send>,
    waker: Waker,
}

impl LinkRoute {
    /// A route over these links, which checks `watch` while it waits.
    pub fn new(links: Links, watch: Box<dyn Watch + Send>) -> std::io::Result<LinkRoute> {
        Ok(LinkRoute { links, watch, waker: Waker::new()? })
    }
}

impl Route<BlockParcel> for LinkRoute {
    fn waker(&self) -> Option<Waker> {
        Some(self.waker.clone())
    }

    fn run(self, orders: Orders<BlockParcel>) {
        UnderWay::new(self, orders).run();
    }
}

/// What this rank has of a parcel.
struct Travelling {
    parcel: BlockParcel,
    started: Instant,
    /// Whether its own sums are on their way.
    is_summed: bool,
}

/// The messages of one parcel, by host, until they are used.
struct Messages {
    parts: Vec<Option<Vec<u8>>>,
    sums: Vec<Option<Vec<u8>>>,
}

struct UnderWay {
    route: LinkRoute,
    orders: Orders<BlockParcel>,
    travelling: VecDeque<Travelling>,
    /// By the number of the parcel, which this rank may not have yet.
    messages: BTreeMap<u64, Messages>,
    workspace: Workspace,
    /// The number of the parcel to deliver next.
    next: u64,
    delivered_at: Instant,
    sent: u64,
    seconds_summing: f64,
    next_check: Instant,
}

impl UnderWay {
    fn new(route: LinkRoute, orders: Orders<BlockParcel>) -> UnderWay {
        UnderWay {
            route,
            orders,
            travelling: VecDeque::new(),
            messages: BTreeMap::new(),
            workspace: Workspace::default(),
            next: 0,
            delivered_at: Instant::now(),
            sent: 0,
            seconds_summing: 0.0,
            next_check: Instant::now(),
        }
    }

    /// Runs until the courier is dropped.
    fn run(mut self) {
        loop {
            // In this order: an order that comes between the two wakes the sleep below.
            self.route.waker.clear();
            let order = match self.travelling.is_empty() {
                true => self.orders.wait(),
                false => self.orders.take(),
            };
            match order {
                Err(_closed) => return,
                Ok(Some(parcel)) => {
                    self.begin(parcel);
                    continue;
                }
                Ok(None) => {}
            }
            if let Err(failure) = self.make_progress() {
                return self.fail(&failure);
            }
        }
    }

    /// Sends the parts of a new parcel to their owners.
    fn begin(&mut self, parcel: BlockParcel) {
        let label = Label { exchange: parcel.number, part: FIRST_LEG };
        for host in self.route.links.others().filter(|host| parcel.is_owner(*host)) {
            self.route.links.send(host, label, parcel.parts[host].clone());
        }
        self.next_check = self.next_check.max(Instant::now() + CHECK_EVERY);
        let started = Instant::now();
        self.travelling.push_back(Travelling { parcel, started, is_summed: false });
    }

    fn make_progress(&mut self) -> Result<(), Failure> {
        let mut arrived = Vec::new();
        let has_moved = self.route.links.take_turn(&mut arrived)?;
        for message in arrived {
            self.accept(message)?;
        }
        let has_summed = self.sum_up()?;
        let has_delivered = self.deliver()?;
        let now = Instant::now();
        if now >= self.next_check {
            self.check()?;
            self.next_check = now + CHECK_EVERY;
        }
        if has_moved || has_summed || has_delivered {
            return Ok(());
        }
        self.check_links()?;
        let deadline = self.travelling.front().map(|first| first.parcel.deadline);
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Err(Failure::Late(self.late_ranks()));
        }
        let until = deadline.map_or(self.next_check, |deadline| deadline.min(self.next_check));
        self.route.links.sleep(self.route.waker.as_fd(), until.saturating_duration_since(now));
        Ok(())
    }

    fn check(&mut self) -> Result<(), Failure> {
        match self.orders.are_stopped() {
            true => Err(Failure::Interrupted),
            false => self.route.watch.check(),
        }
    }

    /// Fails if something can never come, because the link to a host is broken.
    fn check_links(&mut self) -> Result<(), Failure> {
        let missing = self.travelling.iter().flat_map(|one| self.missing_hosts(one));
        let lost = missing.filter_map(|host| self.route.links.loss_of(host)).next();
        match lost {
            Some(failure) => Err(reason_of_loss(failure, &mut *self.route.watch)),
            None => Ok(()),
        }
    }

    /// Keeps a message until its parcel can use it.
    fn accept(&mut self, message: Arrived) -> Result<(), Failure> {
        let Arrived { host, label, bytes } = message;
        let rank = self.route.links.rank_at(host).unwrap_or_default();
        let garbled = |reason: String| Failure::Garbled { rank, reason };
        let (number, hosts) = (label.exchange, self.route.links.hosts());
        if !(self.next..self.next + MOST_AHEAD).contains(&number) {
            return Err(garbled(format!(
                "it sent gradients of exchange {number} while this rank is at {}",
                self.next
            )));
        }
        let none = || (0..hosts).map(|_| None).collect::<Vec<_>>();
        let messages =
            self.messages.entry(number).or_insert_with(|| Messages { parts: none(), sums: none() });
        let place = match label.part {
            FIRST_LEG => &mut messages.parts[host],
            SECOND_LEG => &mut messages.sums[host],
            other => return Err(garbled(format!("it sent gradients of leg {other}, of two"))),
        };
        match place.replace(bytes) {
            None => Ok(()),
            Some(_) => Err(garbled(format!("it sent gradients of exchange {number} twice"))),
        }
    }

    /// Adds up parcels whose parts are all there, and sends the sums to all. Returns whether any was.
    fn sum_up(&mut self) -> Result<bool, Failure> {
        let mut has_summed = false;
        let own = self.route.links.host();
        for travelling in self.travelling.iter_mut().filter(|one| !one.is_summed) {
            let parcel = &mut travelling.parcel;
            if parcel.gets_parts() {
                let Some(messages) = self.messages.get_mut(&parcel.number) else { continue };
                let is_there = |host: usize| messages.parts[host].is_some();
                if !self.route.links.others().all(is_there) {
                    continue;
                }
                let parts: Vec<_> =
                    messages.parts.iter_mut().map(|it| it.take().unwrap_or_default()).collect();
                let expected = parcel.bytes_of(own);
                let mut others = self.route.links.others();
                if let Some(host) = others.find(|host| parts[*host].len() != expected) {
                    return Err(wrong_length(&self.route.links, host, parts[host].len(), expected));
                }
                let start = Instant::now();
                parcel.sum_up(&parts, &mut self.workspace);
                self.seconds_summing += start.elapsed().as_secs_f64();
                let label = Label { exchange: parcel.number, part: SECOND_LEG };
                for host in self.route.links.others() {
                    self.route.links.send(host, label, parcel.sums[own].clone());
                }
            }
            travelling.is_summed = true;
            has_summed = true;
        }
        Ok(has_summed)
    }

    /// Delivers the first parcels if all their sums are there and this rank's are sent. Returns whether any was.
    fn deliver(&mut self) -> Result<bool, Failure> {
        let mut has_delivered = false;
        while let Some(first) = self.travelling.front().filter(|first| first.is_summed) {
            let number = first.parcel.number;
            let mut owners = self.route.links.others().filter(|host| first.parcel.is_owner(*host));
            let messages = self.messages.get(&number);
            let is_there =
                |host: usize| messages.is_some_and(|messages| messages.sums[host].is_some());
            // Others need what this rank sends even if it needs nothing more itself: after a
            // delivery it may stop sending.
            if !owners.all(is_there) || self.route.links.is_sending(number) {
                break;
            }
            let Some(Travelling { mut parcel, started, .. }) = self.travelling.pop_front() else {
                break;
            };
            let messages = self.messages.remove(&number);
            let sums = messages.into_iter().flat_map(|messages| messages.sums).enumerate();
            for (host, bytes) in sums.filter_map(|(host, sums)| sums.map(|sums| (host, sums))) {
                let expected = parcel.bytes_of(host);
                if bytes.len() != expected {
                    return Err(wrong_length(&self.route.links, host, bytes.len(), expected));
                }
                parcel.sums[host] = Arc::new(bytes);
            }
            let now = Instant::now();
            let seconds = (now - started.max(self.delivered_at)).as_secs_f64();
            let sent = self.route.links.sent() - self.sent;
            let seconds_summing = std::mem::take(&mut self.seconds_summing);
            (self.delivered_at, self.next) = (now, number + 1);
            self.sent += sent;
            has_delivered = true;
            self.orders.deliver(Delivery {
                parcel,
                outcome: Ok(()),
                seconds,
                seconds_summing,
                sent,
            });
        }
        Ok(has_delivered)
    }

    /// The ranks that the oldest parcel is waiting for.
    fn late_ranks(&self) -> Vec<usize> {
        let missing = self.travelling.front().map(|first| self.missing_hosts(first));
        let ranks = missing.into_iter().flatten().filter_map(|host| self.route.links.rank_at(host));
        ranks.collect()
    }

    /// The hosts that a parcel is waiting for.
    fn missing_hosts(&self, travelling: &Travelling) -> Vec<usize> {
        let Travelling { parcel, is_summed, .. } = travelling;
        let messages = self.messages.get(&parcel.number);
        let has_come = |host: usize, of: fn(&Messages) -> &Vec<Option<Vec<u8>>>| {
            messages.is_some_and(|messages| of(messages)[host].is_some())
        };
        let is_missing = |host: &usize| {
            let part = !is_summed && parcel.gets_parts();
            (part && !has_come(*host, |messages| &messages.parts))
                || (parcel.is_owner(*host) && !has_come(*host, |messages| &messages.sums))
        };
        self.route.links.others().filter(is_missing).collect()
    }

    /// Returns all parcels with this failure, those under way and those to come.
    fn fail(mut self, failure: &Failure) {
        let mut travelling = std::mem::take(&mut self.travelling).into_iter();
        loop {
            let parcel = match travelling.next() {
                Some(travelling) => travelling.parcel,
                None => match self.orders.wait() {
                    Ok(Some(parcel)) => parcel,
                    _ => return,
                },
            };
            let outcome = Err(failure.clone());
            self.orders.deliver(Delivery {
                parcel,
                outcome,
                seconds: 0.0,
                seconds_summing: 0.0,
                sent: 0,
            });
        }
    }
}

fn wrong_length(links: &Links, host: usize, came: usize, expected: usize) -> Failure {
    let rank = links.rank_at(host).unwrap_or_default();
    let reason = format!("it sent {came} bytes of gradients, expected {expected}");
    Failure::Garbled { rank, reason }
}
