//! How the ranks of one host get each other's memory: they pass descriptors over Unix sockets.
//!
//! A rank connects to all lower ranks and accepts all higher ones. Both ends prove the group's key
//! before a descriptor moves: a stranger never gets one, and none of a stranger's is ever mapped.
//! The sockets have abstract names and disappear when the exchange ends.

use super::segment::Segment;
use super::unix_link::{UnixLink, WaitBounds};
use crate::observe::threads;
use crate::transport::handshake::{self, Caller, HANDSHAKE_LIMIT, Key, RETRY_PAUSE};
use crate::transport::interrupt::Interrupt;
use crate::transport::named_ranks;
use rustix::event::PollFlags;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{Error, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A socket that the other ranks of this host can connect to. Opened before the rendezvous, so that
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

/// Why memory is not shared. The reason names the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotShared {
    pub reason: String,
}

impl fmt::Display for NotShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for NotShared {}

/// One rank's side of the exchange.
#[derive(Clone, Copy)]
pub struct FdExchange<'a> {
    pub rank: usize,
    /// All ranks of this host, this one included, with the names of their [`FdListener`]s.
    pub locals: &'a [(usize, String)],
    pub key: &'a Key,
    /// The segment that the other ranks get from this one. It must have been created here.
    pub segment: &'a Segment,
    pub deadline: Instant,
    pub interrupt: &'a Interrupt,
}

impl FdExchange<'_> {
    /// Gives `segment` to all other ranks of this host and returns theirs, by rank.
    pub fn run(&self, listener: FdListener) -> Result<Vec<(usize, Segment)>, NotShared> {
        let mut segments = BTreeMap::new();
        for (peer, name) in self.locals.iter().filter(|(rank, _)| *rank < self.rank) {
            let received = self.reach(*peer, name).map_err(|error| NotShared {
                reason: format!("rank {peer} cannot be reached: {error}"),
            })?;
            segments.insert(*peer, adopt(*peer, received)?);
        }
        let higher = self.locals.iter().map(|local| local.0).filter(|rank| *rank > self.rank);
        self.accept_all(&listener, &higher.collect::<Vec<_>>(), &mut segments)?;
        Ok(segments.into_iter().collect())
    }

    fn own_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.segment.fd().ok_or_else(|| Error::other("only memory that was made here is passed on"))
    }

    /// Swaps descriptors with one lower rank. Retries until the deadline, since that rank may not
    /// listen yet. Once connected it may take all of that time: it only starts to accept when it
    /// has reached all ranks below itself.
    fn reach(&self, peer: usize, name: &str) -> std::io::Result<OwnedFd> {
        let interrupts = [self.interrupt];
        let bounds = WaitBounds { deadline: self.deadline, interrupts: &interrupts };
        let own = Caller { rank: self.rank as u32, channel: 0 };
        let attempt = || {
            let mut link = UnixLink::connect(name, bounds)?;
            handshake::connect(&mut link, self.key, own, peer as u32)?;
            link.send_fd(self.own_fd()?)?;
            link.receive_fd()
        };
        let mut retries = 0;
        loop {
            let error = match attempt() {
                Ok(received) => return Ok(received),
                Err(error) => error,
            };
            let is_final = matches!(
                error.kind(),
                // It listens, and has another key or no descriptor: that will not change.
                ErrorKind::PermissionDenied | ErrorKind::ConnectionAborted
            );
            if is_final || Instant::now() + RETRY_PAUSE >= self.deadline {
                return Err(error);
            }
            if retries == 0 {
                log::debug!("rank {peer} cannot be reached yet: {error}");
            }
            retries += 1;
            bounds.pause(RETRY_PAUSE);
            bounds.check()?;
        }
    }

    /// Swaps descriptors with every rank of `expected`, all of which connect. Each handshake has a
    /// thread of its own, so a stranger that connects and says nothing delays no other rank.
    fn accept_all(
        &self,
        listener: &FdListener,
        expected: &[usize],
        segments: &mut BTreeMap<usize, Segment>,
    ) -> Result<(), NotShared> {
        // Ends the handshakes that are still running when the wait ends.
        let over = Interrupt::new().map_err(|error| NotShared {
            reason: format!("{} cannot be awaited: {error}", named_ranks(expected)),
        })?;
        let (sender, received) = channel();
        std::thread::scope(|scope| {
            let start_handshake = |stream: UnixStream| {
                let (sender, over) = (sender.clone(), &over);
                let accept = move || {
                    // If it fails, its socket is dropped and the wait for the ranks continues.
                    let _ = sender.send(self.accept(stream, over));
                };
                // If no thread can be started, the connection is dropped and the peer retries.
                let _ = threads::spawn_scoped(scope, "gflow-handshake", accept);
            };
            let result = self.collect(listener, expected, &start_handshake, &received, segments);
            over.raise();
            result
        })
    }

    /// Swaps descriptors with a peer that connected, if it is a rank of the group.
    fn accept(&self, stream: UnixStream, over: &Interrupt) -> std::io::Result<Received> {
        stream.set_nonblocking(true)?;
        let interrupts = [self.interrupt, over];
        let deadline = self.deadline.min(Instant::now() + HANDSHAKE_LIMIT);
        let bounds = WaitBounds { deadline, interrupts: &interrupts };
        let mut link = UnixLink::accepted(stream.into(), bounds);
        let peer = handshake::accept(&mut link, self.key, self.rank as u32)?.rank as usize;
        let descriptor = link.receive_fd()?;
        link.send_fd(self.own_fd()?)?;
        Ok(Received { peer, descriptor })
    }

    /// Accepts connections and maps what they brought, until every expected rank is there.
    fn collect(
        &self,
        listener: &FdListener,
        expected: &[usize],
        start_handshake: &dyn Fn(UnixStream),
        received: &Receiver<std::io::Result<Received>>,
        segments: &mut BTreeMap<usize, Segment>,
    ) -> Result<(), NotShared> {
        let interrupts = [self.interrupt];
        let bounds = WaitBounds { deadline: self.deadline, interrupts: &interrupts };
        let mut last = String::new();
        loop {
            for outcome in received.try_iter() {
                match outcome {
                    // It holds the key, so an unexpected rank is a bug or a second start.
                    Ok(Received { peer, descriptor }) => {
                        if expected.contains(&peer) && !segments.contains_key(&peer) {
                            segments.insert(peer, adopt(peer, descriptor)?);
                        }
                    }
                    Err(error) => {
                        log::info!("a connection to share memory was refused: {error}");
                        last = format!("; somebody connected, but {error}");
                    }
                }
            }
            let mut missing = expected.to_vec();
            missing.retain(|rank| !segments.contains_key(rank));
            if missing.is_empty() {
                return Ok(());
            }
            if let Err(error) = bounds.check() {
                let reason = format!("{} passed no memory: {error}{last}", named_ranks(&missing));
                return Err(NotShared { reason });
            }
            match listener.socket.accept() {
                Ok((stream, _)) => start_handshake(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // Short, because a finished handshake arrives on the channel, not the socket.
                    bounds.wait(&listener.socket, PollFlags::IN, Duration::from_millis(1));
                }
                Err(error) => {
                    // Out of descriptors, say. It may pass; until then, do not spin.
                    last = format!("; nobody can connect: {error}");
                    bounds.pause(RETRY_PAUSE);
                }
            }
        }
    }
}

/// The descriptor of a rank that has proved the key.
struct Received {
    peer: usize,
    descriptor: OwnedFd,
}

fn adopt(peer: usize, descriptor: OwnedFd) -> Result<Segment, NotShared> {
    Segment::adopt(descriptor).map_err(|error| NotShared {
        reason: format!("what rank {peer} passed cannot be mapped: {error}"),
    })
}

#[cfg(test)]
#[path = "fd_exchange_tests.rs"]
mod tests;
