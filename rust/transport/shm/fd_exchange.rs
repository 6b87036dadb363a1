//! How the ranks of one host come by each other's memory: they pass descriptors over sockets.
//!
//! A rank connects to all lower ranks and accepts all higher ones. Both ends prove the group's key
//! before a descriptor moves: a stranger never gets one and never has one mapped. The sockets have
//! names in the abstract namespace and are gone when the exchange is over.

use super::super::handshake::{self, Caller, HANDSHAKE_LIMIT, Key, RETRY_PAUSE};
use super::super::interrupt::Interrupt;
use super::segment::Segment;
use super::unix_link::{Bounds, UnixLink};
use rustix::event::PollFlags;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{Error, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A socket that the other ranks of this host can connect to. Made before the rendezvous, so that
/// its name can be published.
#[derive(Debug)]
pub struct FdListener {
    socket: UnixListener,
    name: String,
}

impl FdListener {
    pub fn open() -> std::io::Result<FdListener> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(Error::other)?;
        let name = format!("gflow-{:032x}", u128::from_le_bytes(random));
        let open = || {
            let socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let socket = open().map_err(|error: Error| {
            Error::new(error.kind(), format!("no socket to pass memory over: {error}"))
        })?;
        Ok(FdListener { socket, name })
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Why memory is not shared: with whom, and what happened. The reason names the ranks as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotShared {
    pub ranks: Vec<usize>,
    pub reason: String,
}

impl fmt::Display for NotShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for NotShared {}

/// Gives `segment` to all other ranks of this host and returns theirs, by rank. `locals` are all
/// of these ranks, `own` among them, each with the name of its listener.
pub fn exchange(
    listener: FdListener,
    own: usize,
    locals: &[(usize, String)],
    key: &Key,
    segment: &Segment,
    deadline: Instant,
    interrupt: &Interrupt,
) -> Result<Vec<(usize, Segment)>, NotShared> {
    let offer = Offer { own, key, segment, deadline, interrupt };
    let mut segments = BTreeMap::new();
    for (peer, name) in locals.iter().filter(|(rank, _)| *rank < own) {
        let passed = offer.reach(*peer, name).map_err(|error| NotShared {
            ranks: vec![*peer],
            reason: format!("rank {peer} cannot be reached: {error}"),
        })?;
        segments.insert(*peer, adopt(*peer, passed)?);
    }
    let higher: Vec<usize> = locals.iter().map(|local| local.0).filter(|r| *r > own).collect();
    offer.accept_all(&listener, &higher, &mut segments)?;
    Ok(segments.into_iter().collect())
}

/// What this rank has for each of the others, and for how long.
#[derive(Clone, Copy)]
struct Offer<'a> {
    own: usize,
    key: &'a Key,
    segment: &'a Segment,
    deadline: Instant,
    interrupt: &'a Interrupt,
}

impl Offer<'_> {
    fn memory(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.segment.fd().ok_or_else(|| Error::other("only memory that was made here is passed on"))
    }

    fn caller(&self) -> Caller {
        Caller { rank: self.own as u32, channel: 0 }
    }

    /// Swaps with one lower rank. It is called again and again until the deadline: it may not
    /// listen yet. Once it is connected all of the time is its own, since it comes to accepting
    /// only when it has reached all ranks below itself.
    fn reach(&self, peer: usize, name: &str) -> std::io::Result<OwnedFd> {
        let interrupts = [self.interrupt];
        let bounds = Bounds { until: self.deadline, interrupts: &interrupts };
        let attempt = || {
            let mut line = UnixLink::call(name, bounds)?;
            handshake::connect(&mut line, self.key, self.caller(), peer as u32)?;
            line.pass(self.memory()?)?;
            line.take_passed()
        };
        loop {
            let error = match attempt() {
                Ok(passed) => return Ok(passed),
                Err(error) => error,
            };
            let last_word = matches!(
                error.kind(),
                // It listens, and has another key or no descriptor: that does not change.
                ErrorKind::PermissionDenied | ErrorKind::ConnectionAborted
            );
            if last_word || Instant::now() + RETRY_PAUSE >= self.deadline {
                return Err(error);
            }
            bounds.pause(RETRY_PAUSE);
            bounds.check()?;
        }
    }

    /// Swaps with every rank of `expected`, all of which connect. Each handshake has a thread of
    /// its own: a stranger that connects and says nothing must not hold up a rank.
    fn accept_all(
        &self,
        listener: &FdListener,
        expected: &[usize],
        segments: &mut BTreeMap<usize, Segment>,
    ) -> Result<(), NotShared> {
        // Ends the handshakes that are still under way when the waiting is over.
        let over = Interrupt::new().map_err(|error| NotShared {
            ranks: expected.to_vec(),
            reason: format!("{} cannot be awaited: {error}", named(expected)),
        })?;
        let (sender, arrived) = channel();
        std::thread::scope(|scope| {
            let begin_greeting = |stream: UnixStream| {
                let (sender, over) = (sender.clone(), &over);
                let greet = move || {
                    // Whoever fails is dropped with its socket; the job goes on waiting for its
                    // own ranks.
                    let _ = sender.send(self.greet(stream, over));
                };
                // With no thread to be had the connection is dropped, and the peer tries again.
                let thread = std::thread::Builder::new().name("gflow-greet".into());
                let _ = thread.spawn_scoped(scope, greet);
            };
            let result = self.collect(listener, expected, &begin_greeting, &arrived, segments);
            over.raise();
            result
        })
    }

    /// Swaps with whoever connected, if it is a rank of the group.
    fn greet(&self, stream: UnixStream, over: &Interrupt) -> std::io::Result<Passed> {
        stream.set_nonblocking(true)?;
        let interrupts = [self.interrupt, over];
        let until = self.deadline.min(Instant::now() + HANDSHAKE_LIMIT);
        let mut line = UnixLink::answer(stream.into(), Bounds { until, interrupts: &interrupts });
        let peer = handshake::accept(&mut line, self.key, self.own as u32)?.rank as usize;
        let descriptor = line.take_passed()?;
        line.pass(self.memory()?)?;
        Ok(Passed { peer, descriptor })
    }

    /// Accepts, and maps what arrived, until the segment of every expected rank is there.
    fn collect(
        &self,
        listener: &FdListener,
        expected: &[usize],
        begin_greeting: &dyn Fn(UnixStream),
        arrived: &Receiver<std::io::Result<Passed>>,
        segments: &mut BTreeMap<usize, Segment>,
    ) -> Result<(), NotShared> {
        let interrupts = [self.interrupt];
        let bounds = Bounds { until: self.deadline, interrupts: &interrupts };
        let mut last = String::new();
        loop {
            for passed in arrived.try_iter() {
                match passed {
                    // Only a holder of the key gets here, so an odd rank is a bug or a second
                    // start.
                    Ok(Passed { peer, descriptor }) => {
                        if expected.contains(&peer) && !segments.contains_key(&peer) {
                            segments.insert(peer, adopt(peer, descriptor)?);
                        }
                    }
                    Err(error) => last = format!("; somebody connected, but {error}"),
                }
            }
            let mut missing = expected.to_vec();
            missing.retain(|rank| !segments.contains_key(rank));
            if missing.is_empty() {
                return Ok(());
            }
            if let Err(error) = bounds.check() {
                let reason = format!("{} passed no memory: {error}{last}", named(&missing));
                return Err(NotShared { ranks: missing, reason });
            }
            match listener.socket.accept() {
                Ok((stream, _)) => begin_greeting(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // Short, because a finished handshake arrives on the channel, not on the
                    // socket.
                    bounds.wait(&listener.socket, PollFlags::IN, Duration::from_millis(1));
                }
                Err(error) => {
                    // Out of descriptors, say: it may pass, and must not be asked in a spin.
                    last = format!("; nobody can connect: {error}");
                    bounds.pause(RETRY_PAUSE);
                }
            }
        }
    }
}

/// What a rank passed after it had proved the key.
struct Passed {
    peer: usize,
    descriptor: OwnedFd,
}

fn adopt(peer: usize, descriptor: OwnedFd) -> Result<Segment, NotShared> {
    Segment::adopt(descriptor).map_err(|error| NotShared {
        ranks: vec![peer],
        reason: format!("what rank {peer} passed cannot be mapped: {error}"),
    })
}

fn named(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Caller = Caller { rank: 1, channel: 0 };
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    const KEY: Key = [9; 32];

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    /// Entrances for these ranks, and the list of them that every rank gets.
    fn listeners(ranks: &[usize]) -> (Vec<FdListener>, Vec<(usize, String)>) {
        let listeners: Vec<_> = ranks.iter().map(|_| FdListener::open().unwrap()).collect();
        let names = listeners.iter().map(|listener| listener.name().to_string());
        let locals = ranks.iter().copied().zip(names).collect();
        (listeners, locals)
    }

    /// A segment whose first byte is its rank.
    fn segment_of(rank: usize) -> Segment {
        let segment = Segment::create("test", 4096 * (rank + 1)).unwrap();
        // SAFETY: the segment has a page at least, and nobody else has it yet.
        unsafe { segment.base().write(rank as u8) };
        segment
    }

    fn exchange_as(
        listener: FdListener,
        own: usize,
        locals: &[(usize, String)],
        deadline: Instant,
    ) -> Result<Vec<(usize, Segment)>, NotShared> {
        let never = Interrupt::new().unwrap();
        exchange(listener, own, locals, &KEY, &segment_of(own), deadline, &never)
    }

    fn assert_segments_of(ranks: &[usize], segments: &[(usize, Segment)]) {
        assert_eq!(segments.iter().map(|segment| segment.0).collect::<Vec<_>>(), ranks);
        for (rank, segment) in segments {
            assert_eq!(segment.bytes(), 4096 * (rank + 1));
            // SAFETY: the segment has a page at least; its rank wrote before it passed it.
            assert_eq!(unsafe { segment.base().read() }, *rank as u8);
        }
    }

    #[test]
    fn every_rank_of_the_host_gets_the_memory_of_every_other() {
        for size in 1..=5 {
            // Not all ranks of the job are on this host.
            let ranks: Vec<usize> = (0..size).map(|local| 3 * local + 1).collect();
            let (listeners, locals) = listeners(&ranks);
            std::thread::scope(|scope| {
                for (listener, own) in listeners.into_iter().zip(&ranks) {
                    let (locals, ranks) = (&locals, &ranks);
                    scope.spawn(move || {
                        let segments = exchange_as(listener, *own, locals, soon()).unwrap();
                        let others: Vec<_> = ranks.iter().copied().filter(|r| r != own).collect();
                        assert_segments_of(&others, &segments);
                    });
                }
            });
        }
    }

    #[test]
    fn an_exchange_leaves_no_socket_behind() {
        let (mut listeners, locals) = listeners(&[0]);
        exchange_as(listeners.remove(0), 0, &locals, soon()).unwrap();
        let address = SocketAddr::from_abstract_name(&locals[0].1).unwrap();
        UnixStream::connect_addr(&address).unwrap_err();
    }

    #[test]
    fn strangers_do_not_hold_up_the_ranks() {
        let (mut listeners, locals) = listeners(&[0, 1]);
        let address = SocketAddr::from_abstract_name(&locals[0].1).unwrap();
        let mut silent = UnixStream::connect_addr(&address).unwrap();
        let mut rude = UnixStream::connect_addr(&address).unwrap();
        rude.write_all(b"GET / HTTP/1.1\r\n\r\nand so on and so on, longer than a hello").unwrap();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let wrong_key = scope.spawn(|| {
                let mut stream = UnixStream::connect_addr(&address).unwrap();
                handshake::connect(&mut stream, &[8; 32], CALLER, 0).unwrap_err()
            });
            let second = listeners.pop().unwrap();
            let first = listeners.pop().unwrap();
            let zeroth = scope.spawn(|| exchange_as(first, 0, &locals, soon()).unwrap());
            wrong_key.join().unwrap();
            assert_segments_of(&[0], &exchange_as(second, 1, &locals, soon()).unwrap());
            assert_segments_of(&[1], &zeroth.join().unwrap());
        });
        assert!(begun.elapsed() < HANDSHAKE_LIMIT);
        assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn a_rank_with_another_key_is_refused_by_name() {
        let (mut listeners, locals) = listeners(&[0, 1]);
        let second = listeners.pop().unwrap();
        let first = listeners.pop().unwrap();
        let never = Interrupt::new().unwrap();
        let deadline = Instant::now() + Duration::from_secs(1);
        std::thread::scope(|scope| {
            let zeroth = scope.spawn(|| exchange_as(first, 0, &locals, deadline).unwrap_err());
            let error =
                exchange(second, 1, &locals, &[8; 32], &segment_of(1), soon(), &never).unwrap_err();
            let reason = "rank 0 cannot be reached: it does not hold the group's key";
            assert_eq!(error, NotShared { ranks: vec![0], reason: reason.into() });
            let error = zeroth.join().unwrap();
            assert_eq!(error.ranks, [1]);
            assert!(error.reason.contains("somebody connected, but"), "{error}");
        });
    }

    #[test]
    fn a_rank_that_passes_something_else_is_refused_by_name() {
        let (mut listeners, locals) = listeners(&[0, 1]);
        std::thread::scope(|scope| {
            let first = listeners.remove(0);
            let zeroth = scope.spawn(|| exchange_as(first, 0, &locals, soon()).unwrap_err());
            let bounds = Bounds { until: soon(), interrupts: &[] };
            let mut line = UnixLink::call(&locals[0].1, bounds).unwrap();
            handshake::connect(&mut line, &KEY, CALLER, 0).unwrap();
            let (pipe, _other_end) = std::io::pipe().unwrap();
            line.pass(pipe.as_fd()).unwrap();
            let error = zeroth.join().unwrap();
            let begin = "what rank 1 passed cannot be mapped: the descriptor is not a memfd";
            assert!(error.reason.starts_with(begin), "{error}");
        });
    }

    #[test]
    fn a_rank_that_listens_late_is_waited_for() {
        let (_, mut locals) = listeners(&[0]);
        let second = FdListener::open().unwrap();
        locals.push((1, second.name().to_string()));
        std::thread::scope(|scope| {
            let late = scope.spawn(|| exchange_as(second, 1, &locals, soon()).unwrap());
            std::thread::sleep(3 * RETRY_PAUSE);
            let address = SocketAddr::from_abstract_name(&locals[0].1).unwrap();
            let socket = UnixListener::bind_addr(&address).unwrap();
            socket.set_nonblocking(true).unwrap();
            let first = FdListener { socket, name: locals[0].1.clone() };
            assert_segments_of(&[1], &exchange_as(first, 0, &locals, soon()).unwrap());
            assert_segments_of(&[0], &late.join().unwrap());
        });
    }

    #[test]
    fn a_rank_that_never_comes_is_named() {
        let (mut listeners, locals) = listeners(&[0, 1, 4]);
        let short = || Instant::now() + Duration::from_millis(60);
        let last = listeners.pop().unwrap();
        let first = listeners.swap_remove(0);
        let error = exchange_as(first, 0, &locals, short()).unwrap_err();
        assert_eq!(error.ranks, [1, 4]);
        assert_eq!(error.to_string(), "ranks 1, 4 passed no memory: the deadline came first");
        // Its socket is closed by now; that of rank 1 is open, and nobody answers.
        let error = exchange_as(last, 4, &locals, short()).unwrap_err();
        assert_eq!(error.ranks, [0]);
        assert!(error.reason.contains("nobody listens at its socket"), "{error}");
        let error = exchange_as(FdListener::open().unwrap(), 4, &locals[1..], short()).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 cannot be reached: the deadline came first");
    }

    #[test]
    fn an_interrupt_ends_an_exchange_at_once() {
        let begun = Instant::now();
        for own in [0, 1] {
            let (mut listeners, locals) = listeners(&[0, 1]);
            let listener = listeners.remove(own);
            let interrupt = Interrupt::new().unwrap();
            let segment = segment_of(own);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    exchange(listener, own, &locals, &KEY, &segment, soon(), &interrupt)
                        .unwrap_err()
                });
                std::thread::sleep(Duration::from_millis(20));
                interrupt.raise();
                let error = waiting.join().unwrap();
                assert_eq!(error.ranks, [1 - own]);
                assert!(error.reason.ends_with("the group was aborted"), "{error}");
            });
        }
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}
