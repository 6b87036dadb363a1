//! Links: one connection from a carrier to the carrier of the same shard on every other host, for
//! messages that a sender and a receiver number alike.
//!
//! Where sums cannot be formed on the way, hosts send each other parts of a tensor directly. Several
//! such exchanges are under way at once, so every message begins with a header that says what it is.
//! Nothing here waits, except [`Links::sleep`], and nothing trusts a header: a message that nobody can
//! have sent in good faith is refused before memory is set aside for it.

use super::stream::{Stream, read_now, write_now};
use crate::transport::{Failure, loss_reason};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The longest message. A longer one cannot be ours.
const MAX_BYTES: usize = 1 << 26;
/// The most that a link receives before it is another's turn.
const TURN_BYTES: usize = 1 << 20;

/// What a message is: which exchange it belongs to, and which part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    pub exchange: u64,
    pub part: u32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    exchange: U64,
    part: U32,
    bytes: U32,
}

const HEADER_BYTES: usize = size_of::<Header>();

/// A message that has arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The host that sent it.
    pub host: usize,
    pub label: Label,
    pub bytes: Vec<u8>,
}

pub struct Links {
    /// By host; this host has none.
    links: Vec<Option<Link>>,
}

struct Link {
    /// The rank at the other end.
    rank: usize,
    stream: Box<dyn Stream>,
    outgoing: VecDeque<Outgoing>,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that have arrived.
    header_read: usize,
    incoming: Option<Incoming>,
    /// Bytes sent so far.
    sent: u64,
    /// Why nothing more can come, once that is so.
    broken: Option<String>,
}

struct Outgoing {
    header: Header,
    bytes: Arc<Vec<u8>>,
    /// Bytes that are sent, header included.
    at: usize,
}

struct Incoming {
    label: Label,
    bytes: Vec<u8>,
    at: usize,
}

impl Links {
    /// `peers` are, by host, the rank there and the connection to it; `None` for this host.
    pub fn new(peers: Vec<Option<(usize, Box<dyn Stream>)>>) -> Links {
        let link = |(rank, stream)| Link {
            rank,
            stream,
            outgoing: VecDeque::new(),
            header: [0; HEADER_BYTES],
            header_read: 0,
            incoming: None,
            sent: 0,
            broken: None,
        };
        Links { links: peers.into_iter().map(|peer| peer.map(link)).collect() }
    }

    pub fn hosts(&self) -> usize {
        self.links.len()
    }

    /// The index of this host.
    pub fn host(&self) -> usize {
        self.links.iter().position(Option::is_none).expect("this host has no link to itself")
    }

    /// The other hosts.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.host();
        (0..self.hosts()).filter(move |host| *host != own)
    }

    /// The rank at the other end of the link to a host.
    pub fn rank_at(&self, host: usize) -> Option<usize> {
        self.links.get(host)?.as_ref().map(|link| link.rank)
    }

    /// Bytes sent so far, over all links.
    pub fn sent(&self) -> u64 {
        self.links.iter().flatten().map(|link| link.sent).sum()
    }

    /// Queues a message to another host.
    pub fn send(&mut self, host: usize, label: Label, bytes: Arc<Vec<u8>>) {
        let header = Header {
            exchange: label.exchange.into(),
            part: label.part.into(),
            bytes: (bytes.len() as u32).into(),
        };
        assert!(bytes.len() <= MAX_BYTES, "gflow: a message of {} bytes", bytes.len());
        let link = self.links[host].as_mut().expect("no host sends to itself");
        if link.broken.is_none() {
            link.outgoing.push_back(Outgoing { header, bytes, at: 0 });
        }
    }

    /// Whether something of this exchange is waiting to be sent.
    pub fn is_sending(&self, exchange: u64) -> bool {
        let mut outgoing = self.links.iter().flatten().flat_map(|link| &link.outgoing);
        outgoing.any(|message| message.header.exchange.get() == exchange)
    }

    /// Sends and receives what can be moved now. Returns whether anything was. A link that breaks is no
    /// failure yet: a rank that is done may leave while others still exchange something.
    pub fn take_turn(&mut self, arrived: &mut Vec<Arrived>) -> Result<bool, Failure> {
        let mut has_moved = false;
        let links = self.links.iter_mut().enumerate();
        for (host, link) in links.filter_map(|(host, link)| Some((host, link.as_mut()?))) {
            if link.broken.is_some() {
                continue;
            }
            // What has arrived counts even if the link has broken since.
            let received = link.receive(host, arrived)?;
            match received.and_then(|received| Ok(received | link.send()?)) {
                Ok(moved) => has_moved |= moved,
                Err(error) => {
                    link.broken = Some(loss_reason(&error));
                    link.outgoing.clear();
                    has_moved = true;
                }
            }
        }
        Ok(has_moved)
    }

    /// The failure to wait for something of a host to which there is no connection any more.
    pub fn loss_of(&self, host: usize) -> Option<Failure> {
        let link = self.links.get(host)?.as_ref()?;
        let reason = link.broken.clone()?;
        Some(Failure::Lost { rank: link.rank, reason })
    }

    /// Sleeps until something can move, `wake` can be read, or `limit` has passed.
    pub fn sleep(&self, wake: BorrowedFd, limit: Duration) {
        let mut waits = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        for link in self.links.iter().flatten().filter(|link| link.broken.is_none()) {
            let mut events = PollFlags::IN;
            if !link.outgoing.is_empty() {
                events |= PollFlags::OUT;
            }
            waits.push(PollFd::new(&link.stream, events));
        }
        let limit = Timespec::try_from(limit).expect("shorter than an age");
        // After an error (a signal, say) the caller's loop comes back here.
        let _ = poll(&mut waits, Some(&limit));
    }
}

impl Link {
    fn send(&mut self) -> std::io::Result<bool> {
        let mut has_moved = false;
        while let Some(message) = self.outgoing.front_mut() {
            let header = message.header.as_bytes();
            let (next, is_last) = match message.at.checked_sub(HEADER_BYTES) {
                None => (&header[message.at..], message.bytes.is_empty()),
                Some(at) => (&message.bytes[at..], true),
            };
            let whole = next.len();
            let written = write_now(&mut *self.stream, next)?;
            message.at += written;
            self.sent += written as u64;
            has_moved |= written > 0;
            if written < whole {
                break; // The socket is full.
            }
            if is_last {
                self.outgoing.pop_front();
            }
        }
        Ok(has_moved)
    }

    /// Receives what there is; the outer error is for bytes that cannot be right.
    fn receive(
        &mut self,
        host: usize,
        arrived: &mut Vec<Arrived>,
    ) -> Result<std::io::Result<bool>, Failure> {
        let rank = self.rank;
        let mut taken = 0;
        while taken < TURN_BYTES {
            let Some(incoming) = &mut self.incoming else {
                let room = &mut self.header[self.header_read..];
                let read = match read_now(&mut *self.stream, room) {
                    Ok(read) => read,
                    Err(error) => return Ok(Err(error)),
                };
                self.header_read += read;
                taken += read;
                if self.header_read < HEADER_BYTES {
                    break;
                }
                self.header_read = 0;
                let incoming = Incoming::announced_by(&self.header);
                let incoming = incoming.map_err(|reason| Failure::Garbled { rank, reason })?;
                self.incoming = Some(incoming);
                continue;
            };
            let whole = incoming.bytes.len() - incoming.at;
            if whole > 0 {
                let read = read_now(&mut *self.stream, &mut incoming.bytes[incoming.at..]);
                let read = match read {
                    Ok(read) => read,
                    Err(error) => return Ok(Err(error)),
                };
                incoming.at += read;
                taken += read;
                if read < whole {
                    break;
                }
            }
            if let Some(Incoming { label, bytes, .. }) = self.incoming.take() {
                arrived.push(Arrived { host, label, bytes });
            }
        }
        Ok(Ok(taken > 0))
    }
}

impl Incoming {
    fn announced_by(header: &[u8; HEADER_BYTES]) -> Result<Incoming, String> {
        let header = Header::read_from_bytes(header).map_err(|error| error.to_string())?;
        let bytes = header.bytes.get() as usize;
        if bytes > MAX_BYTES {
            return Err(format!(
                "it announced {bytes} bytes of gradients; {MAX_BYTES} are the most"
            ));
        }
        let label = Label { exchange: header.exchange.get(), part: header.part.get() };
        Ok(Incoming { label, bytes: vec![0; bytes], at: 0 })
    }
}

#[cfg(test)]
#[path = "links_tests.rs"]
pub(crate) mod tests;
