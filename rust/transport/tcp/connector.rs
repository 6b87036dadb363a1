//! The connector: makes and accepts the TCP connections of one rank while its group is built.
//!
//! A connection counts only once its peer has proved the group's key; any other is dropped. Ranks
//! connect in any order and for several purposes, while this rank may be busy reaching others. So a
//! thread accepts them, and early ones wait until they are asked for.

use crate::observe::threads;
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

/// How late an interrupt may be noticed during a wait for ranks.
const INTERRUPT_PAUSE: Duration = Duration::from_millis(50);

/// Why connections could not be made: with whom, and what happened last.
#[derive(Debug)]
pub struct ConnectError {
    pub missing: Vec<usize>,
    pub last: String,
}

/// A socket that other ranks can connect to. Opened before the rendezvous, so that its address can
/// be published.
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

/// What a rank needs to know to connect with its group.
#[derive(Clone)]
pub struct ConnectorConfig {
    pub rank: usize,
    /// Indexed by rank.
    pub addresses: Vec<SocketAddr>,
    pub key: Key,
    pub deadline: Instant,
    pub interrupt: Arc<Interrupt>,
}

/// The outcome of a handshake with a peer that connected.
type Accepted = std::io::Result<(Caller, TcpStream)>;

pub struct Connector {
    config: ConnectorConfig,
    accepted: Receiver<Accepted>,
    /// Connections that haven't been asked for yet.
    early: HashMap<Caller, TcpStream>,
    /// The last failure, for the error message.
    last: String,
    /// Stops the acceptor.
    closing: Arc<Interrupt>,
}

/// The thread that accepts connections.
struct Acceptor {
    listener: Listener,
    rank: usize,
    key: Key,
    accepted: Sender<Accepted>,
    closing: Arc<Interrupt>,
}

impl Connector {
    /// Starts to accept connections at `listener`.
    pub fn open(listener: Listener, config: ConnectorConfig) -> std::io::Result<Connector> {
        let (sender, accepted) = channel();
        let closing = Arc::new(Interrupt::new()?);
        let acceptor = Acceptor {
            listener,
            rank: config.rank,
            key: config.key,
            accepted: sender,
            closing: closing.clone(),
        };
        threads::spawn("gflow-accept", move || acceptor.serve())?;
        let last = "nobody connected".to_string();
        Ok(Connector { config, accepted, early: HashMap::new(), last, closing })
    }

    pub fn config(&self) -> &ConnectorConfig {
        &self.config
    }

    pub fn rank(&self) -> usize {
        self.config.rank
    }

    pub fn size(&self) -> usize {
        self.config.addresses.len()
    }

    /// Connects to `peer`. Retries until the deadline, since it may not listen yet.
    pub fn reach(&self, peer: usize, channel: u32) -> Result<TcpStream, ConnectError> {
        let ConnectorConfig { rank, addresses, key, deadline, interrupt } = &self.config;
        let address = addresses[peer];
        let own = Caller { rank: *rank as u32, channel };
        let start = Instant::now();
        for retries in 0.. {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = left.clamp(Duration::from_millis(1), HANDSHAKE_LIMIT);
            let attempt = TcpStream::connect_timeout(&address, limit).and_then(|mut stream| {
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))?;
                handshake::connect(&mut stream, key, own, peer as u32)?;
                prepare(&stream)?;
                Ok(stream)
            });
            match attempt {
                Ok(stream) => {
                    log::debug!(
                        "connected to rank {peer} at {address}, channel {channel}, in {:.1} ms \
                         with {retries} retries",
                        start.elapsed().as_secs_f64() * 1e3
                    );
                    return Ok(stream);
                }
                Err(error)
                    if Instant::now() + RETRY_PAUSE >= *deadline
                        || interrupt.is_raised()
                        // It listens, and has another key: that will not change.
                        || error.kind() == ErrorKind::PermissionDenied =>
                {
                    let last = format!("{address}: {error}");
                    return Err(ConnectError { missing: vec![peer], last });
                }
                Err(error) => {
                    if retries == 0 {
                        log::debug!("rank {peer} at {address} cannot be reached yet: {error}");
                    }
                    std::thread::sleep(RETRY_PAUSE);
                }
            }
        }
        unreachable!("the loop ends at the deadline")
    }

    /// The connections of the ranks `wanted` to this one for `channel`, in that order.
    pub fn receive(
        &mut self,
        wanted: &[usize],
        channel: u32,
    ) -> Result<Vec<TcpStream>, ConnectError> {
        let caller = |rank: &usize| Caller { rank: *rank as u32, channel };
        loop {
            let missing: Vec<_> = wanted
                .iter()
                .filter(|rank| !self.early.contains_key(&caller(rank)))
                .copied()
                .collect();
            if missing.is_empty() {
                let streams = wanted.iter().map(|rank| self.early.remove(&caller(rank)));
                return Ok(streams.map(|stream| stream.expect("none is missing")).collect());
            }
            let left = self.config.deadline.saturating_duration_since(Instant::now());
            if self.config.interrupt.is_raised() || left.is_zero() {
                return Err(ConnectError { missing, last: self.last.clone() });
            }
            match self.accepted.recv_timeout(left.min(INTERRUPT_PAUSE)) {
                // It holds the key, so a second connection is a bug or a restart.
                Ok(Ok((caller, stream))) => drop(self.early.entry(caller).or_insert(stream)),
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
        let mut is_failing = false;
        while !self.closing.is_raised() {
            match self.listener.socket.accept() {
                Ok((stream, address)) => {
                    is_failing = false;
                    self.start_handshake(stream, address);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut waits = [
                        PollFd::new(&self.listener.socket, PollFlags::IN),
                        PollFd::from_borrowed_fd(self.closing.as_fd(), PollFlags::IN),
                    ];
                    let _ = poll(&mut waits, None);
                }
                Err(error) => {
                    // Out of descriptors, say. It may pass; until then, do not spin.
                    if !std::mem::replace(&mut is_failing, true) {
                        log::info!("cannot accept connections: {error}");
                    }
                    let _ = self.accepted.send(Err(error));
                    std::thread::sleep(RETRY_PAUSE);
                }
            }
        }
    }

    /// Each handshake has a thread of its own, so a stranger that connects and says nothing
    /// delays no other rank.
    fn start_handshake(&self, mut stream: TcpStream, address: SocketAddr) {
        let (key, own, accepted) = (self.key, self.rank as u32, self.accepted.clone());
        let shake = move || {
            let outcome = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(HANDSHAKE_LIMIT)))
                .and_then(|()| stream.set_write_timeout(Some(HANDSHAKE_LIMIT)))
                .and_then(|()| handshake::accept(&mut stream, &key, own))
                .and_then(|caller| prepare(&stream).map(|()| caller));
            match &outcome {
                Ok(Caller { rank, channel }) => {
                    log::debug!("accepted rank {rank} from {address}, channel {channel}");
                }
                Err(error) => log::info!("refused a connection from {address}: {error}"),
            }
            // If it failed, the socket is dropped and the wait for the ranks continues.
            let _ = accepted.send(outcome.map(|caller| (caller, stream)));
        };
        // If no thread can be started, the connection is dropped and the peer retries.
        let _ = threads::spawn("gflow-handshake", shake);
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
            let (addresses, key, deadline) = (addresses.clone(), KEY, soon());
            let config = ConnectorConfig { rank, addresses, key, deadline, interrupt };
            Connector::open(listener, config).unwrap()
        };
        listeners.into_iter().enumerate().map(open).collect()
    }

    #[test]
    fn strangers_do_not_hold_up_the_ranks() {
        let mut ranks = connectors(2);
        let second = ranks.pop().unwrap();
        let mut first = ranks.pop().unwrap();
        let address = first.config.addresses[0];
        let _silent = TcpStream::connect(address).unwrap();
        let mut rude = TcpStream::connect(address).unwrap();
        rude.write_all(b"GET / HTTP/1.1\r\n\r\nand so on and so on, longer than a hello").unwrap();
        let other = std::thread::spawn(move || second.reach(0, 0).unwrap());
        assert_eq!(first.receive(&[1], 0).unwrap().len(), 1);
        other.join().unwrap();
    }

    #[test]
    fn a_connection_that_comes_early_for_another_channel_is_kept() {
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
        first.config.deadline = Instant::now() + Duration::from_millis(60);
        assert_eq!(first.receive(&[1, 2], 0).unwrap_err().missing, [1, 2]);
    }
}
