//! The mesh: one connection between any two ranks, for messages.
//!
//! Sockets are non-blocking; every wait is one `poll` over all of them and the interrupt, with a
//! deadline. A peer that closes its connection is noticed in the same `poll`.

use super::connector::{ConnectError, Connector};
use crate::fork::Unshared;
use crate::transport::frame::{Frame, FrameBuffer, Goodbye};
use crate::transport::interrupt::Interrupt;
use crate::transport::slow_wait::SlowWait;
use crate::transport::{Failure, Peers, Watch, loss_reason};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The connections of one rank to all others of its group.
#[derive(Debug)]
pub struct Mesh {
    rank: usize,
    links: Vec<Option<Link>>,
    interrupt: Arc<Interrupt>,
}

#[derive(Debug)]
struct Link {
    stream: Unshared<TcpStream>,
    incoming: FrameBuffer,
    /// Bytes that the socket has not taken yet.
    outgoing: Vec<u8>,
    /// Why the peer left, if it left in order.
    left: Option<String>,
    /// Whether the log has been told that the peer is lost.
    is_loss_logged: bool,
}

/// Connects this rank to all others: it connects to all lower ranks and accepts all higher ones.
pub fn connect(connector: &mut Connector) -> Result<Mesh, ConnectError> {
    let (rank, size) = (connector.rank(), connector.size());
    let mut links = Vec::with_capacity(size);
    for peer in 0..rank {
        links.push(Some(Link::new(connector.reach(peer, 0)?)));
    }
    links.push(None);
    let higher: Vec<_> = (rank + 1..size).collect();
    links.extend(connector.receive(&higher, 0)?.into_iter().map(|stream| Some(Link::new(stream))));
    Ok(Mesh { rank, links, interrupt: connector.config().interrupt.clone() })
}

impl Link {
    fn new(stream: TcpStream) -> Link {
        // Keepalive does not probe while data is unacknowledged. Messages are short, so a live peer
        // always takes them. A kernel without this option notices a dead peer later.
        let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, 25_000);
        let stream = Unshared::new(stream);
        Link {
            stream,
            incoming: FrameBuffer::default(),
            outgoing: Vec::new(),
            left: None,
            is_loss_logged: false,
        }
    }

    /// Writes as much as the socket takes now.
    fn push_outgoing(&mut self) -> std::io::Result<()> {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what the socket has now. The end of the stream is an error.
    fn pull_incoming(&mut self) -> std::io::Result<()> {
        let mut bytes = [0; 16384];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.incoming.push(&bytes[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads what the socket has now, and fails if that shows that the peer has given up.
    fn receive(&mut self, rank: usize) -> Result<(), Failure> {
        let pulled = self.pull_incoming();
        // Look at frames that arrived before the end first: a goodbye has the reason.
        match self.incoming.waiting_goodbye() {
            Some(Goodbye { gave_up: true, reason }) => Err(self.lost(rank, reason)),
            Some(Goodbye { gave_up: false, reason }) => {
                log::debug!("rank {rank} has left: {reason}");
                self.left = Some(reason);
                Ok(())
            }
            None => pulled.map_err(|error| self.lost(rank, loss_reason(&error))),
        }
    }

    /// The next message of this peer, if it has been received.
    fn next_message(&mut self, rank: usize) -> Result<Option<Vec<u8>>, Failure> {
        match self.incoming.next_frame() {
            Ok(Some(Frame::Message(bytes))) => Ok(Some(bytes)),
            Ok(Some(Frame::Goodbye(Goodbye { reason, .. }))) => Err(self.lost(rank, reason)),
            Ok(None) => Ok(None),
            Err(reason) => Err(Failure::Garbled { rank, reason }),
        }
    }

    fn lost(&mut self, rank: usize, reason: String) -> Failure {
        if !self.is_loss_logged {
            log::info!("lost rank {rank}: {reason}");
            self.is_loss_logged = true;
        }
        Failure::Lost { rank, reason }
    }
}

impl Mesh {
    fn linked(&mut self) -> impl Iterator<Item = (usize, &mut Link)> {
        self.links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| link.as_mut().map(|link| (peer, link)))
    }

    /// Sleeps until a socket is ready, an interrupt is raised or the deadline has passed. Returns
    /// the peers whose sockets are ready. It polls all of them: a wait ends if any peer dies.
    fn wait(&self, also: Option<&Interrupt>, deadline: Instant) -> Vec<usize> {
        let mut waits = vec![PollFd::from_borrowed_fd(self.interrupt.as_fd(), PollFlags::IN)];
        waits.extend(also.map(|also| PollFd::from_borrowed_fd(also.as_fd(), PollFlags::IN)));
        let interrupts = waits.len();
        let mut peers = Vec::with_capacity(self.links.len());
        for (peer, link) in self.links.iter().enumerate() {
            let Some(link) = link.as_ref().filter(|link| link.left.is_none()) else { continue };
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, !link.outgoing.is_empty());
            waits.push(PollFd::new(&link.stream, flags));
            peers.push(peer);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // After an error (a signal, say) the caller's loop comes back here.
        let _ = poll(&mut waits, Timespec::try_from(left).ok().as_ref());
        let is_ready = |wait: &PollFd| !wait.revents().is_empty();
        peers.retain({
            let mut waits = waits[interrupts..].iter();
            move |_| waits.next().is_some_and(is_ready)
        });
        peers
    }
}

impl Watch for Mesh {
    fn check(&mut self) -> Result<(), Failure> {
        if self.interrupt.is_raised() {
            return Err(Failure::Interrupted);
        }
        let mut linked = self.linked().filter(|(_, link)| link.left.is_none());
        linked.try_for_each(|(rank, link)| link.receive(rank))
    }

    fn left(&self, rank: usize) -> Option<String> {
        self.links[rank].as_ref()?.left.clone()
    }
}

impl Peers for Mesh {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.links.len()
    }

    fn swap(
        &mut self,
        message: &[u8],
        with: &[usize],
        inbox: &mut [Vec<u8>],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let frame = Frame::Message(message.to_vec()).encode();
        let mut is_missing = vec![false; self.size()];
        for rank in with.iter().copied() {
            is_missing[rank] = true;
            let Some(link) = self.links[rank].as_mut() else { continue };
            link.outgoing.extend_from_slice(&frame);
        }
        // A peer that was first may have sent its message already.
        let mut ready = with.to_vec();
        let mut slow = SlowWait::start();
        loop {
            for rank in ready {
                let Some(link) = self.links[rank].as_mut() else { continue };
                let sent = link.push_outgoing();
                let received = link.receive(rank);
                if is_missing[rank]
                    && let Some(message) = link.next_message(rank)?
                {
                    // If it died after that, the next check says so.
                    inbox[rank] = message;
                    is_missing[rank] = false;
                    continue;
                }
                received?;
                // Last, because a goodbye that it sent says more than a broken pipe.
                sent.map_err(|error| link.lost(rank, loss_reason(&error)))?;
            }
            let is_pending = |rank: &usize| {
                let link = self.links[*rank].as_ref();
                is_missing[*rank] || link.is_some_and(|link| !link.outgoing.is_empty())
            };
            let pending: Vec<_> = with.iter().copied().filter(is_pending).collect();
            if pending.is_empty() {
                break;
            }
            if self.interrupt.is_raised() {
                return Err(Failure::Interrupted);
            }
            if Instant::now() >= deadline {
                return Err(Failure::Late(pending));
            }
            ready = self.wait(None, slow.wake_by(deadline));
            slow.check(|| pending);
        }
        slow.end();
        // A peer that sent its message and then gave up waiting no longer takes part.
        for (rank, link) in self.linked() {
            if let Some(Goodbye { gave_up: true, reason }) = link.incoming.waiting_goodbye() {
                return Err(link.lost(rank, reason));
            }
        }
        Ok(())
    }

    fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        while !done.is_raised() && Instant::now() < deadline {
            self.check()?;
            self.wait(Some(done), deadline);
        }
        Ok(())
    }

    fn say_goodbye(&mut self, goodbye: Goodbye) {
        let goodbye = Frame::Goodbye(goodbye).encode();
        for (_, link) in self.linked() {
            link.outgoing.extend_from_slice(&goodbye);
            // One attempt is enough: the socket has room unless the peer stopped reading long ago.
            let _ = link.push_outgoing();
            let _ = link.stream.get().shutdown(std::net::Shutdown::Write);
        }
    }
}

#[cfg(test)]
#[path = "mesh_tests.rs"]
pub mod tests;
