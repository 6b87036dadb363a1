//! The mesh: every rank holds one connection to every other, for messages.
//!
//! Sockets do not block; every wait is one `poll` over all of them and the interrupt, with a
//! deadline. A peer that ends its connection is noticed in the same `poll`.

use super::ConnectError;
use super::connector::Connector;
use crate::fork::Unshared;
use crate::transport::frame::{Frame, FrameBuffer, Goodbye};
use crate::transport::interrupt::Interrupt;
use crate::transport::{Failure, Peers, Watch, ended, timespec};
use rustix::event::{PollFd, PollFlags, poll};
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
}

/// Connects this rank to all others: it reaches all lower ranks and receives all higher ones.
pub fn connect(connector: &mut Connector) -> Result<Mesh, ConnectError> {
    let (rank, size) = (connector.rank(), connector.size());
    let mut links = Vec::with_capacity(size);
    for peer in 0..rank {
        links.push(Some(Link::new(connector.reach(peer, 0)?)));
    }
    links.push(None);
    let higher: Vec<_> = (rank + 1..size).collect();
    links.extend(connector.receive(&higher, 0)?.into_iter().map(|stream| Some(Link::new(stream))));
    Ok(Mesh { rank, links, interrupt: connector.interrupt().clone() })
}

impl Link {
    fn new(stream: TcpStream) -> Link {
        // Keepalive does not ask while something is unacknowledged. Messages are short, so a peer
        // that lives always takes them. A kernel that does not know this notices later.
        let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, 25_000);
        let stream = Unshared::new(stream);
        Link { stream, incoming: FrameBuffer::default(), outgoing: Vec::new(), left: None }
    }

    /// Hands the socket as much as it takes now.
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

    /// Takes what the socket has now. An end of the stream is an error of its own.
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

    /// Takes what the socket has now, and fails if that shows that the peer will not go on.
    fn take_in(&mut self, rank: usize) -> Result<(), Failure> {
        let pulled = self.pull_incoming();
        // What arrived before the end counts, a goodbye above all: it has the reason.
        match self.incoming.waiting_goodbye() {
            Some(Goodbye { gave_up: true, reason }) => Err(Failure::Lost { rank, reason }),
            Some(Goodbye { gave_up: false, reason }) => {
                self.left = Some(reason);
                Ok(())
            }
            None => pulled.map_err(|error| Failure::Lost { rank, reason: ended(&error) }),
        }
    }

    /// The next message of this peer, if it has been taken in.
    fn next_message(&mut self, rank: usize) -> Result<Option<Vec<u8>>, Failure> {
        match self.incoming.next_frame() {
            Ok(Some(Frame::Message(bytes))) => Ok(Some(bytes)),
            Ok(Some(Frame::Goodbye(Goodbye { reason, .. }))) => Err(Failure::Lost { rank, reason }),
            Ok(None) => Ok(None),
            Err(reason) => Err(Failure::Garbled { rank, reason }),
        }
    }
}

impl Mesh {
    fn linked(&mut self) -> impl Iterator<Item = (usize, &mut Link)> {
        self.links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| link.as_mut().map(|link| (peer, link)))
    }

    /// Sleeps until a socket is ready, an interrupt is raised or the deadline came. Returns the
    /// peers whose sockets are. All are looked at: the end of any peer is of interest to a wait.
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
        // An error here (a signal, say) only means another round of the caller's loop.
        let _ = poll(&mut waits, Some(&timespec(left)));
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
        linked.try_for_each(|(rank, link)| link.take_in(rank))
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
        // Who was here first may have sent it already.
        let mut ready = with.to_vec();
        loop {
            for rank in ready {
                let Some(link) = self.links[rank].as_mut() else { continue };
                let sent = link.push_outgoing();
                let taken_in = link.take_in(rank);
                if is_missing[rank]
                    && let Some(message) = link.next_message(rank)?
                {
                    // If it ended after that, the next look says so.
                    inbox[rank] = message;
                    is_missing[rank] = false;
                    continue;
                }
                taken_in?;
                // Only now: a goodbye that it sent first says more than a broken pipe.
                sent.map_err(|error| Failure::Lost { rank, reason: ended(&error) })?;
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
            ready = self.wait(None, deadline);
        }
        // A peer that called, then gave up waiting for this rank, will not take part any more.
        for (rank, link) in self.linked() {
            if let Some(Goodbye { gave_up: true, reason }) = link.incoming.waiting_goodbye() {
                return Err(Failure::Lost { rank, reason });
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
            // One attempt: the socket's buffer has room unless the peer has long stopped reading.
            let _ = link.push_outgoing();
            let _ = link.stream.get().shutdown(std::net::Shutdown::Write);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::transport::tcp::connector::tests::{connectors, soon};

    /// The meshes of `size` ranks on loopback.
    pub fn meshes(size: usize) -> Vec<Mesh> {
        let connect = |mut connector| std::thread::spawn(move || connect(&mut connector).unwrap());
        let ranks: Vec<_> = connectors(size).into_iter().map(connect).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    /// Swaps `message` with all others and returns what they sent.
    fn swap_all(
        mesh: &mut Mesh,
        message: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let others: Vec<_> = (0..mesh.size()).filter(|peer| *peer != mesh.rank).collect();
        let mut inbox = vec![Vec::new(); mesh.size()];
        mesh.swap(message, &others, &mut inbox, deadline).map(|()| inbox)
    }

    #[test]
    fn every_rank_gets_what_every_other_sent_it_round_after_round() {
        for size in 1..=5 {
            let ranks: Vec<_> = meshes(size)
                .into_iter()
                .map(|mut mesh| {
                    std::thread::spawn(move || {
                        for round in 0..50u8 {
                            let own = mesh.rank() as u8;
                            let got = swap_all(&mut mesh, &[own, round], soon());
                            for (peer, message) in got.unwrap().into_iter().enumerate() {
                                if peer as u8 != own {
                                    assert_eq!(message, [peer as u8, round]);
                                }
                            }
                        }
                        mesh.say_goodbye(Goodbye { gave_up: false, reason: "done".into() });
                    })
                })
                .collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        }
    }

    #[test]
    fn a_rank_that_is_gone_is_noticed_at_once() {
        let mut meshes = meshes(3);
        let never = Interrupt::new().unwrap();
        let limit = Duration::from_secs(10);
        assert_eq!(meshes[0].watch_until(&never, Duration::ZERO), Ok(()));
        drop(meshes.remove(1));
        let failure = meshes[0].watch_until(&never, limit).unwrap_err();
        assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
        let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
        assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
    }

    #[test]
    fn a_rank_that_dies_after_it_has_answered_does_not_let_the_others_wait() {
        let mut meshes = meshes(3);
        let _late = meshes.pop().unwrap();
        let mut dying = meshes.pop().unwrap();
        // It sends its message, gets nothing, and ends without a word.
        assert!(swap_all(&mut dying, &[1], Instant::now()).is_err());
        drop(dying);
        let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
        assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
    }

    #[test]
    fn a_goodbye_is_told_even_behind_a_message() {
        let mut meshes = meshes(2);
        let mut leaving = meshes.pop().unwrap();
        let past = Instant::now();
        assert_eq!(swap_all(&mut leaving, &[1], past), Err(Failure::Late(vec![0])));
        leaving.say_goodbye(Goodbye { gave_up: true, reason: "it gave up".into() });
        let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
        assert_eq!(failure, Failure::Lost { rank: 1, reason: "it gave up".into() });
    }

    #[test]
    fn a_peer_that_left_in_order_is_not_lost_to_what_it_took_part_in() {
        let mut meshes = meshes(2);
        let mut leaving = meshes.pop().unwrap();
        assert!(swap_all(&mut leaving, &[1], Instant::now()).is_err());
        leaving.say_goodbye(Goodbye { gave_up: false, reason: "it left".into() });
        drop(leaving);
        assert_eq!(swap_all(&mut meshes[0], &[1], soon()), Ok(vec![Vec::new(), vec![1]]));
        let never = Interrupt::new().unwrap();
        assert_eq!(meshes[0].watch_until(&never, Duration::from_millis(50)), Ok(()));
        let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
        assert_eq!(failure, Failure::Lost { rank: 1, reason: "it left".into() });
    }

    #[test]
    fn an_interrupt_ends_a_wait_at_once() {
        let mut meshes = meshes(2);
        let mut waiting = meshes.remove(0);
        let interrupt = waiting.interrupt.clone();
        let wait = std::thread::spawn(move || swap_all(&mut waiting, &[1], soon()));
        std::thread::sleep(Duration::from_millis(20));
        interrupt.raise();
        assert_eq!(wait.join().unwrap(), Err(Failure::Interrupted));
    }
}
