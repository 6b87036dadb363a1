//! The connector: where connections come in, and who may come in.
//!
//! Whoever connects proves the group's key first; anybody else is dropped without harm. Ranks come
//! in any order and for several purposes, also while this rank is busy reaching others, so a
//! thread lets them in, and who comes early waits until it is asked for.

use super::ConnectError;
use crate::transport::handshake::{self, Caller, HANDSHAKE_LIMIT, Key, RETRY_PAUSE};
use crate::transport::interrupt::Interrupt;
use crate::transport::socket::prepare;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How late an interrupt may be noticed while ranks are awaited.
const INTERRUPT_PAUSE: Duration = Duration::from_millis(50);

/// A socket that other ranks can connect to. Made before the rendezvous, so that its address
/// can be published.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on a free port of `address`.
    pub fn bind(address: IpAddr) -> std::io::Result<Listener> {
        let socket = TcpListener::bind((address, 0))?;
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        Ok(Listener { socket, address })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

type Greeted = std::io::Result<(Caller, TcpStream)>;

/// One rank while it makes its connections.
pub struct Connector {
    rank: usize,
    /// Of all ranks, in order.
    addresses: Vec<SocketAddr>,
    key: Key,
    deadline: Instant,
    interrupt: Arc<Interrupt>,
    greeted: Receiver<Greeted>,
    waiting: HashMap<Caller, TcpStream>,
    /// What happened last that was not what was hoped for.
    last: String,
    /// Tells the thread at the door that nobody else is expected.
    closing: Arc<Interrupt>,
}

/// The thread that lets callers in.
struct Acceptor {
    listener: Listener,
    rank: usize,
    key: Key,
    greeted: Sender<Greeted>,
    closing: Arc<Interrupt>,
}

impl Connector {
    pub fn open(
        listener: Listener,
        rank: usize,
        addresses: Vec<SocketAddr>,
        key: Key,
        deadline: Instant,
        interrupt: Arc<Interrupt>,
    ) -> std::io::Result<Connector> {
        let last = "nobody connected".to_string();
        let waiting = HashMap::new();
        let (sender, greeted) = channel();
        let closing = Arc::new(Interrupt::new()?);
        let doorman = Acceptor { listener, rank, key, greeted: sender, closing: closing.clone() };
        std::thread::Builder::new().name("gflow-door".into()).spawn(move || doorman.serve())?;
        Ok(Connector { rank, addresses, key, deadline, interrupt, greeted, waiting, last, closing })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.addresses.len()
    }

    pub fn interrupt(&self) -> &Arc<Interrupt> {
        &self.interrupt
    }

    /// Connects to `peer`, again and again until the deadline: it may not listen yet.
    pub fn reach(&self, peer: usize, channel: u32) -> Result<TcpStream, ConnectError> {
        let address = self.addresses[peer];
        let own = Caller { rank: self.rank as u32, channel };
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let limit = left.clamp(Duration::from_millis(1), HANDSHAKE_LIMIT);
            let attempt = TcpStream::connect_timeout(&address, limit).and_then(|mut stream| {
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))?;
                handshake::connect(&mut stream, &self.key, own, peer as u32)?;
                prepare(&stream)?;
                Ok(stream)
            });
            match attempt {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if Instant::now() + RETRY_PAUSE >= self.deadline
                        || self.interrupt.is_raised()
                        // It listens, and has another key: that does not change.
                        || error.kind() == ErrorKind::PermissionDenied =>
                {
                    let last = format!("{address}: {error}");
                    return Err(ConnectError { missing: vec![peer], last });
                }
                Err(_) => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }

    /// The connections that `wanted` ranks make to this one for `channel`, in that order.
    pub fn receive(
        &mut self,
        wanted: &[usize],
        channel: u32,
    ) -> Result<Vec<TcpStream>, ConnectError> {
        let caller = |rank: &usize| Caller { rank: *rank as u32, channel };
        loop {
            let missing: Vec<_> = wanted
                .iter()
                .filter(|rank| !self.waiting.contains_key(&caller(rank)))
                .copied()
                .collect();
            if missing.is_empty() {
                let streams = wanted.iter().map(|rank| self.waiting.remove(&caller(rank)));
                return Ok(streams.map(|stream| stream.expect("none is missing")).collect());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if self.interrupt.is_raised() || left.is_zero() {
                return Err(ConnectError { missing, last: self.last.clone() });
            }
            match self.greeted.recv_timeout(left.min(INTERRUPT_PAUSE)) {
                // Only a holder of the key gets here; who comes twice is a bug or a restart.
                Ok(Ok((caller, stream))) => drop(self.waiting.entry(caller).or_insert(stream)),
                Ok(Err(error)) => self.last = format!("somebody connected, but {error}"),
                Err(_) => {}
            }
        }
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        self.closing.raise();
    }
}

impl Acceptor {
    fn serve(self) {
        while !self.closing.is_raised() {
            match self.listener.socket.accept() {
                Ok((stream, _)) => self.begin_handshake(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut waits = [
                        PollFd::new(&self.listener.socket, PollFlags::IN),
                        PollFd::from_borrowed_fd(self.closing.as_fd(), PollFlags::IN),
                    ];
                    let _ = poll(&mut waits, None);
                }
                Err(error) => {
                    // Out of descriptors, say: it may pass, and must not be asked in a spin.
                    let _ = self.greeted.send(Err(error));
                    std::thread::sleep(RETRY_PAUSE);
                }
            }
        }
    }

    /// Each handshake has a thread of its own: a stranger that connects and says nothing must not
    /// hold up a rank.
    fn begin_handshake(&self, mut stream: TcpStream) {
        let (key, own, arrived) = (self.key, self.rank as u32, self.greeted.clone());
        let shake = move || {
            let greeted = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(HANDSHAKE_LIMIT)))
                .and_then(|()| stream.set_write_timeout(Some(HANDSHAKE_LIMIT)))
                .and_then(|()| handshake::accept(&mut stream, &key, own))
                .and_then(|caller| prepare(&stream).map(|()| caller));
            // Whoever fails is dropped with its socket; the job goes on waiting for its own ranks.
            let _ = arrived.send(greeted.map(|caller| (caller, stream)));
        };
        // With no thread to be had the connection is dropped, and the peer tries again.
        let _ = std::thread::Builder::new().name("gflow-greet".into()).spawn(shake);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::io::Write;
    use std::net::Ipv4Addr;

    pub const KEY: Key = [9; 32];

    pub fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    /// The connectors of `size` ranks on loopback.
    pub fn connectors(size: usize) -> Vec<Connector> {
        let listeners: Vec<_> =
            (0..size).map(|_| Listener::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
        let addresses: Vec<_> = listeners.iter().map(Listener::address).collect();
        let open = |(rank, listener)| {
            let interrupt = Arc::new(Interrupt::new().unwrap());
            Connector::open(listener, rank, addresses.clone(), KEY, soon(), interrupt).unwrap()
        };
        listeners.into_iter().enumerate().map(open).collect()
    }

    #[test]
    fn strangers_do_not_hold_up_the_ranks() {
        let mut ranks = connectors(2);
        let second = ranks.pop().unwrap();
        let mut first = ranks.pop().unwrap();
        let address = first.addresses[0];
        let _silent = TcpStream::connect(address).unwrap();
        let mut rude = TcpStream::connect(address).unwrap();
        rude.write_all(b"GET / HTTP/1.1\r\n\r\nand so on and so on, longer than a hello").unwrap();
        let other = std::thread::spawn(move || second.reach(0, 0).unwrap());
        assert_eq!(first.receive(&[1], 0).unwrap().len(), 1);
        other.join().unwrap();
    }

    #[test]
    fn who_comes_early_for_another_channel_is_kept() {
        let mut ranks = connectors(2);
        let second = ranks.pop().unwrap();
        let mut first = ranks.pop().unwrap();
        let other =
            std::thread::spawn(move || [2, 1, 0].map(|channel| second.reach(0, channel).unwrap()));
        for channel in 0..3 {
            assert_eq!(first.receive(&[1], channel).unwrap().len(), 1);
        }
        other.join().unwrap();
    }

    #[test]
    fn a_rank_that_never_comes_is_named() {
        let mut first = connectors(3).remove(0);
        first.deadline = Instant::now() + Duration::from_millis(60);
        assert_eq!(first.receive(&[1, 2], 0).unwrap_err().missing, [1, 2]);
    }
}
