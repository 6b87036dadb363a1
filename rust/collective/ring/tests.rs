//! The ring with threads as hosts: over sockets of every kind, against a plain loop.

use super::*;
use crate::collective::partition::partitions;
use crate::collective::stream::Stream;
use crate::transport::memory;
use crate::transport::socket::prepare;
use proptest::prelude::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Combines elements one by one.
pub struct Plain<T> {
    op: fn(T, T) -> T,
    finish: fn(T, usize) -> T,
    hosts: usize,
}

impl Plain<u8> {
    pub const SUM: Plain<u8> = Plain { op: u8::wrapping_add, finish: |sum, _| sum, hosts: 1 };
}

trait Element: Copy + std::fmt::Debug + PartialEq + Send + Sync + 'static {
    const BYTES: usize;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn to_bytes(self) -> Vec<u8>;
    /// A value that differs from index to index.
    fn sample(seed: u64) -> Self;
}

macro_rules! element {
    ($type:ty, $sample:expr) => {
        impl Element for $type {
            const BYTES: usize = size_of::<$type>();
            fn from_bytes(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().unwrap())
            }
            fn to_bytes(self) -> Vec<u8> {
                self.to_ne_bytes().to_vec()
            }
            fn sample(seed: u64) -> Self {
                $sample(seed)
            }
        }
    };
}

element!(u8, |seed| seed as u8);
element!(i32, |seed| seed as i32);
element!(u64, |seed| seed);
// Values of very different size: the order of a sum shows in its bits.
element!(f32, |seed: u64| (seed as i32 as f32) * [1e-6, 1.0, 3e7][(seed % 3) as usize]);
element!(f64, |seed: u64| (seed as i64 as f64) * [1e-9, 1.0, 7e12][(seed % 3) as usize]);

impl<T: Element> Combine for Plain<T> {
    fn element_bytes(&self) -> usize {
        T::BYTES
    }

    fn combine(&self, own: &mut [u8], incoming: &[u8], finish: bool) {
        assert_eq!(own.len(), incoming.len());
        assert!(own.len().is_multiple_of(T::BYTES) && !own.is_empty());
        assert!(incoming.as_ptr().addr().is_multiple_of(ALIGNMENT));
        for (own, incoming) in own.chunks_mut(T::BYTES).zip(incoming.chunks(T::BYTES)) {
            let both = (self.op)(T::from_bytes(incoming), T::from_bytes(own));
            let both = if finish { (self.finish)(both, self.hosts) } else { both };
            own.copy_from_slice(&both.to_bytes());
        }
    }

    fn finish(&self, own: &mut [u8]) {
        for own in own.chunks_mut(T::BYTES) {
            let finished = (self.finish)(T::from_bytes(own), self.hosts);
            own.copy_from_slice(&finished.to_bytes());
        }
    }
}

/// A stream that moves a few bytes at a time, and sometimes none although it could.
struct Dribble {
    stream: UnixStream,
    turn: usize,
}

impl Dribble {
    fn next_limit(&mut self) -> std::io::Result<usize> {
        self.turn += 1;
        match self.turn * 37 % 101 {
            limit if limit % 11 == 0 => Err(ErrorKind::WouldBlock.into()),
            limit if limit % 13 == 0 => Err(ErrorKind::Interrupted.into()),
            limit => Ok(limit),
        }
    }
}

impl Read for Dribble {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let limit = self.next_limit()?.min(into.len());
        self.stream.read(&mut into[..limit])
    }
}

impl Write for Dribble {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let limit = self.next_limit()?.min(bytes.len());
        self.stream.write(&bytes[..limit])
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl AsFd for Dribble {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[derive(Debug, Clone, Copy)]
enum Wire {
    Unix,
    /// With the smallest buffers that the kernel gives.
    NarrowUnix,
    Tcp,
    NarrowTcp,
    Dribble,
}

const WIRES: [Wire; 5] = [Wire::Unix, Wire::NarrowUnix, Wire::Tcp, Wire::NarrowTcp, Wire::Dribble];

fn narrow(stream: &impl AsFd) {
    rustix::net::sockopt::set_socket_send_buffer_size(stream, 1).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(stream, 1).unwrap();
}

fn unix_pair() -> (UnixStream, UnixStream) {
    let (left, right) = UnixStream::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    (left, right)
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let left = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let right = listener.accept().unwrap().0;
    prepare(&left).unwrap();
    prepare(&right).unwrap();
    (left, right)
}

type Ends = (Box<dyn Stream>, Box<dyn Stream>);

fn connected(wire: Wire) -> Ends {
    match wire {
        Wire::Unix | Wire::NarrowUnix => {
            let (left, right) = unix_pair();
            if matches!(wire, Wire::NarrowUnix) {
                narrow(&left);
                narrow(&right);
            }
            (Box::new(left), Box::new(right))
        }
        Wire::Tcp | Wire::NarrowTcp => {
            let (left, right) = tcp_pair();
            if matches!(wire, Wire::NarrowTcp) {
                narrow(&left);
                narrow(&right);
            }
            (Box::new(left), Box::new(right))
        }
        Wire::Dribble => {
            let (left, right) = unix_pair();
            let (left, right) =
                (Dribble { stream: left, turn: 5 }, Dribble { stream: right, turn: 0 });
            (Box::new(left), Box::new(right))
        }
    }
}

/// The rings of all hosts. The rank of a host is 10 times its position.
fn rings(hosts: usize, channels: usize, wire: Wire, staging: usize) -> Vec<Ring> {
    let mut channels_of: Vec<Vec<RingChannel>> = (0..hosts).map(|_| Vec::new()).collect();
    for _ in 0..channels {
        let (mut to_next, mut from_previous): (Vec<_>, Vec<_>) =
            (0..hosts).map(|_| connected(wire)).unzip();
        // The other end of what a host sends into is its next one's.
        from_previous.rotate_right(1);
        for channels in channels_of.iter_mut().rev() {
            let (to, from) = (to_next.pop().unwrap(), from_previous.pop().unwrap());
            channels.push(RingChannel::with_staging(to, from, staging));
        }
    }
    let with_channels = channels_of.into_iter().enumerate();
    with_channels
        .map(|(position, channels)| {
            let next = (position + 1) % hosts * 10;
            let previous = (position + hosts - 1) % hosts * 10;
            let mut ring = Ring::new(position, hosts, Neighbours { next, previous }, channels);
            // So that small data is spread as well.
            ring.bytes_per_channel = 200;
            ring
        })
        .collect()
}

/// The rings of all hosts, over streams that deliver a few bytes at a time.
pub(crate) fn dribbling_rings(hosts: usize, channels: usize) -> Vec<Ring> {
    rings(hosts, channels, Wire::Dribble, 1 << 10)
}

/// A watch that never fails.
pub(crate) struct AllWell;

impl Watch for AllWell {
    fn check(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The data of each host after `act`, by position.
fn on_all_hosts(
    rings: &mut [Ring],
    data: Vec<Vec<u8>>,
    act: impl Fn(&mut Ring, &mut Vec<u8>) -> Result<(), Failure> + Sync,
) -> Vec<Vec<u8>> {
    std::thread::scope(|scope| {
        let hosts: Vec<_> = rings
            .iter_mut()
            .zip(data)
            .map(|(ring, mut data)| {
                let act = &act;
                scope.spawn(move || act(ring, &mut data).map(|()| data).unwrap())
            })
            .collect();
        hosts.into_iter().map(|host| host.join().unwrap()).collect()
    })
}

fn samples<T: Element>(count: usize, host: usize) -> Vec<T> {
    (0..count as u64)
        .map(|index| {
            let seed =
                (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (host as u64 * 0xabcd_ef01);
            T::sample(seed.rotate_left((seed % 64) as u32))
        })
        .collect()
}

fn to_bytes<T: Element>(elements: &[T]) -> Vec<u8> {
    elements.iter().flat_map(|element| element.to_bytes()).collect()
}

/// Every chunk, combined in the order of the ring: from the host of its number onwards.
fn expected<T: Element>(of_hosts: &[Vec<T>], plain: &Plain<T>, channels: usize) -> Vec<u8> {
    let (hosts, bytes) = (of_hosts.len(), of_hosts[0].len() * T::BYTES);
    let mut result = Vec::new();
    for part in partitions(bytes, channels) {
        for (first, chunk) in partitions(part.len(), hosts).enumerate() {
            let start = (part.start + chunk.start) / T::BYTES;
            let end = (part.start + chunk.end) / T::BYTES;
            let chunk = |step: usize| &of_hosts[(first + step) % hosts][start..end];
            let mut all = chunk(0).to_vec();
            for step in 1..hosts {
                let both = all.iter_mut().zip(chunk(step));
                both.for_each(|(all, own)| *all = (plain.op)(*all, *own));
            }
            all.iter().for_each(|all| result.extend((plain.finish)(*all, hosts).to_bytes()));
        }
    }
    result
}

/// An all-reduce on every host, twice over the same streams, against the plain loop.
fn check_all_reduce<T: Element>(
    mut rings: Vec<Ring>,
    count: usize,
    op: fn(T, T) -> T,
    finish: fn(T, usize) -> T,
) {
    let hosts = rings.len();
    let plain = Plain { op, finish, hosts };
    for round in 0..2 {
        let inputs: Vec<Vec<T>> = (0..hosts).map(|host| samples(count, host + round)).collect();
        let channels = rings[0].channels_for(count * T::BYTES);
        let results = on_all_hosts(&mut rings, inputs.iter().map(|i| to_bytes(i)).collect(), {
            |ring, data| ring.all_reduce(data, &plain, &mut AllWell, soon())
        });
        let expected = expected(&inputs, &plain, channels);
        for (position, result) in results.iter().enumerate() {
            assert!(*result == expected, "position {position} of {hosts}, {count} elements");
        }
    }
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), 2usize..40, 40usize..2000, 2000usize..30_000]
}

fn wires() -> impl Strategy<Value = Wire> {
    (0..WIRES.len()).prop_map(|index| WIRES[index])
}

fn stagings() -> impl Strategy<Value = usize> {
    prop_oneof![Just(64), Just(192), Just(4096), Just(channel::STAGING_BYTES)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn sums_are_those_of_a_plain_loop_bit_for_bit_on_every_host(
        hosts in 1usize..=8, channels in 1usize..=3, wire in wires(), staging in stagings(),
        count in sizes(), kind in 0..4,
    ) {
        let rings = rings(hosts, channels, wire, staging);
        match kind {
            0 => check_all_reduce::<u8>(rings, count, u8::wrapping_add, |sum, _| sum),
            1 => check_all_reduce::<i32>(rings, count, i32::wrapping_add, |sum, _| sum),
            2 => check_all_reduce::<f32>(rings, count, |a, b| a + b, |sum, _| sum),
            _ => check_all_reduce::<f64>(rings, count, |a, b| a + b, |sum, _| sum),
        }
    }

    #[test]
    fn a_broadcast_reaches_everyone_from_every_root(
        hosts in 1usize..=8, channels in 1usize..=3, wire in wires(), bytes in sizes(),
    ) {
        let mut rings = rings(hosts, channels, wire, 192);
        for root in 0..hosts {
            let data = (0..hosts).map(|host| samples(bytes, host)).collect();
            let results = on_all_hosts(&mut rings, data, |ring, data| {
                ring.broadcast(data, root, &mut AllWell, soon())
            });
            prop_assert!(results.iter().all(|result| *result == samples::<u8>(bytes, root)));
        }
    }

    #[test]
    fn an_all_gather_brings_every_block_to_everyone(
        hosts in 1usize..=8, channels in 1usize..=3, wire in wires(), bytes in sizes(),
    ) {
        let mut rings = rings(hosts, channels, wire, 192);
        let bytes = bytes / hosts;
        let data = (0..hosts).map(|host| samples(bytes, host)).collect();
        let results = on_all_hosts(&mut rings, data, |ring, data| {
            // Blocks that are not adjacent, in an order of their own.
            let mut blocks = vec![vec![0; bytes]; hosts];
            blocks[ring.position].copy_from_slice(data);
            let mut places: Vec<_> = blocks.iter_mut().map(Vec::as_mut_slice).collect();
            ring.all_gather(&mut places, &mut AllWell, soon())?;
            *data = blocks.concat();
            Ok(())
        });
        let all: Vec<u8> = (0..hosts).flat_map(|host| samples::<u8>(bytes, host)).collect();
        prop_assert!(results.iter().all(|result| *result == all));
    }
}

#[test]
fn the_order_of_combination_is_incoming_before_own() {
    for hosts in 1..=5 {
        let op = |incoming: u64, own: u64| incoming.wrapping_mul(31).wrapping_add(own);
        check_all_reduce(rings(hosts, 2, Wire::Dribble, 192), 500, op, |all, _| all);
    }
}

#[test]
fn every_element_is_finished_once() {
    for hosts in 1..=5 {
        let average = |sum: f64, hosts: usize| sum / hosts as f64;
        check_all_reduce(rings(hosts, 2, Wire::Unix, 4096), 1001, |a, b| a + b, average);
    }
}

#[test]
fn large_data_goes_through_many_turns() {
    for (hosts, channels) in [(2, 1), (3, 3)] {
        let rings = rings(hosts, channels, Wire::Tcp, channel::STAGING_BYTES);
        check_all_reduce::<f32>(rings, 3_000_001, |a, b| a + b, |sum, _| sum);
    }
}

#[test]
fn collectives_of_all_kinds_follow_each_other_on_the_same_streams() {
    let mut rings = rings(3, 2, Wire::NarrowTcp, 256);
    let data = (0..3).map(|host| vec![host as u8 + 1; 3000]).collect();
    let results = on_all_hosts(&mut rings, data, |ring, data| {
        for _ in 0..20 {
            ring.all_reduce(data, &Plain::SUM, &mut AllWell, soon())?;
            ring.broadcast(&mut data[..1000], 2, &mut AllWell, soon())?;
            let mut blocks: Vec<_> = data.chunks_mut(1000).collect();
            ring.all_gather(&mut blocks, &mut AllWell, soon())?;
        }
        Ok(())
    });
    assert!(results.iter().all(|result| *result == results[0]));
}

/// One host of a ring of three or more, whose neighbours are rank 30 (next) and 10 (previous),
/// with the other ends of its streams.
fn one_host() -> (Ring, UnixStream, UnixStream) {
    let ((to_next, next), (from_previous, previous)) = (unix_pair(), unix_pair());
    let channel = RingChannel::new(Box::new(to_next), Box::new(from_previous));
    (Ring::new(2, 5, Neighbours { next: 30, previous: 10 }, vec![channel]), next, previous)
}

const LARGE: usize = 8 << 20;

#[test]
fn a_neighbour_that_closes_midway_is_named() {
    let (mut ring, _next, mut previous) = one_host();
    previous.write_all(&[1; 100]).unwrap();
    drop(previous);
    let failure = ring.all_reduce(&mut vec![0; LARGE], &Plain::SUM, &mut AllWell, soon());
    assert!(matches!(failure, Err(Failure::Lost { rank: 10, .. })), "{failure:?}");

    let (mut ring, mut next, _previous) = one_host();
    let reading = std::thread::spawn(move || next.read(&mut [0; 100]).map(drop));
    let failure = ring.all_reduce(&mut vec![0; LARGE], &Plain::SUM, &mut AllWell, soon());
    assert!(matches!(failure, Err(Failure::Lost { rank: 30, .. })), "{failure:?}");
    let _ = reading.join().unwrap();
}

/// A watch that finds out after a while that another rank is the cause.
struct KnowsBetter {
    looks: usize,
}

impl Watch for KnowsBetter {
    fn check(&mut self) -> Result<(), Failure> {
        self.looks += 1;
        match self.looks {
            ..3 => Ok(()),
            _ => Err(Failure::Lost { rank: 40, reason: "it ran out of memory".into() }),
        }
    }
}

#[test]
fn the_watch_has_the_better_reason() {
    let (mut ring, _next, previous) = one_host();
    drop(previous);
    let failure = ring.broadcast(&mut [0; 10], 0, &mut KnowsBetter { looks: 0 }, soon());
    let reason = "it ran out of memory".to_string();
    assert_eq!(failure, Err(Failure::Lost { rank: 40, reason: reason.clone() }));

    // It is also asked while nothing moves.
    let (mut ring, _next, _previous) = one_host();
    let failure = ring.broadcast(&mut [0; 10], 0, &mut KnowsBetter { looks: 0 }, soon());
    assert_eq!(failure, Err(Failure::Lost { rank: 40, reason }));
}

#[test]
fn a_frozen_neighbour_is_late_at_the_deadline() {
    let shortly = || Instant::now() + Duration::from_millis(120);
    let (mut ring, _next, mut previous) = one_host();
    previous.write_all(&[1; 100]).unwrap();
    let mut data = vec![0; LARGE];
    let failure = ring.all_reduce(&mut data, &Plain::SUM, &mut AllWell, shortly());
    // With more than two hosts it could be any host upstream.
    assert_eq!(failure, Err(Failure::Stalled { through: 10 }));

    // Nothing is missing here, but the next host does not take it.
    let (mut ring, _next, _previous) = one_host();
    let failure = ring.broadcast(&mut data, 2, &mut AllWell, shortly());
    assert_eq!(failure, Err(Failure::Late(vec![30])));
}

#[test]
fn an_interrupt_ends_the_exchange() {
    let (mut watch, interrupt) = memory::mesh(2).remove(0);
    let (mut ring, _next, _previous) = one_host();
    let exchange = std::thread::spawn(move || {
        ring.all_reduce(&mut vec![0; LARGE], &Plain::SUM, &mut watch, soon())
    });
    std::thread::sleep(Duration::from_millis(20));
    interrupt.raise();
    assert_eq!(exchange.join().unwrap(), Err(Failure::Interrupted));
}

#[test]
fn one_host_alone_needs_no_channel() {
    let mut ring = Ring::new(0, 1, Neighbours { next: 0, previous: 0 }, Vec::new());
    let half = Plain::<i32> { op: |a, b| a + b, finish: |sum, _| sum / 2, hosts: 1 };
    let mut data = to_bytes(&[2i32, 4, 6]);
    ring.all_reduce(&mut data, &half, &mut AllWell, soon()).unwrap();
    assert_eq!(data, to_bytes(&[1i32, 2, 3]));
    ring.broadcast(&mut data, 0, &mut AllWell, soon()).unwrap();
    ring.all_gather(&mut [&mut data], &mut AllWell, soon()).unwrap();
    assert_eq!(data, to_bytes(&[1i32, 2, 3]));
}
