//! TCP between the ranks of a group: every rank holds one connection to every other.
//!
//! A rank connects to all lower ranks and accepts all higher ones. Sockets do not block; every
//! wait is one `poll` over all of them and the interrupt, with a deadline. A peer that ends its
//! connection is noticed in the same `poll`.

use super::frame::{Frame, FrameBuffer, Goodbye};
use super::handshake::{self, Key};
use super::interrupt::Interrupt;
use super::{Failure, Peers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// How long one stranger may take over its handshake before it is dropped.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Pause between attempts to reach a rank that does not listen yet.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

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

/// The connections of one rank to all others of its group.
#[derive(Debug)]
pub struct Mesh {
    rank: usize,
    links: Vec<Option<Link>>,
    interrupt: Arc<Interrupt>,
}

#[derive(Debug)]
struct Link {
    stream: TcpStream,
    incoming: FrameBuffer,
    /// Bytes that the socket has not taken yet.
    outgoing: Vec<u8>,
}

/// Why the connections could not be made: with whom, and what happened last.
#[derive(Debug)]
pub struct ConnectError {
    pub missing: Vec<usize>,
    pub last: String,
}

/// Connects rank `rank` to all others. `addresses` are those of all ranks, in order.
pub fn connect(
    listener: Listener,
    rank: usize,
    addresses: &[SocketAddr],
    key: &Key,
    deadline: Instant,
    interrupt: Arc<Interrupt>,
) -> Result<Mesh, ConnectError> {
    let mut links: Vec<Option<Link>> = addresses.iter().map(|_| None).collect();
    for (peer, address) in addresses.iter().enumerate().take(rank) {
        let stream = reach(*address, key, rank as u32, peer as u32, deadline, &interrupt)
            .map_err(|last| ConnectError { missing: vec![peer], last: last.to_string() })?;
        links[peer] = Some(
            Link::new(stream)
                .map_err(|error| ConnectError { missing: vec![peer], last: error.to_string() })?,
        );
    }
    accept_higher(&listener, rank, key, deadline, &interrupt, &mut links)?;
    Ok(Mesh { rank, links, interrupt })
}

/// Connects to one lower rank, again and again until the deadline: it may not listen yet.
fn reach(
    address: SocketAddr,
    key: &Key,
    own: u32,
    peer: u32,
    deadline: Instant,
    interrupt: &Interrupt,
) -> std::io::Result<TcpStream> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = left.clamp(Duration::from_millis(1), HANDSHAKE_LIMIT);
        let attempt = TcpStream::connect_timeout(&address, limit).and_then(|mut stream| {
            stream.set_read_timeout(Some(limit))?;
            stream.set_write_timeout(Some(limit))?;
            handshake::connect(&mut stream, key, own, peer)?;
            Ok(stream)
        });
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error)
                if Instant::now() + RETRY_PAUSE >= deadline
                    || interrupt.is_raised()
                    // It listens, and has another key: that does not change.
                    || error.kind() == ErrorKind::PermissionDenied =>
            {
                return Err(std::io::Error::new(error.kind(), format!("{address}: {error}")));
            }
            Err(_) => std::thread::sleep(RETRY_PAUSE),
        }
    }
}

/// Accepts until every higher rank is there. Each handshake has a thread of its own: a stranger
/// that connects and says nothing must not hold up a rank.
fn accept_higher(
    listener: &Listener,
    rank: usize,
    key: &Key,
    deadline: Instant,
    interrupt: &Interrupt,
    links: &mut [Option<Link>],
) -> Result<(), ConnectError> {
    let (sender, arrived) = channel();
    let mut last = "nobody connected".to_string();
    loop {
        while let Ok(greeted) = arrived.try_recv() {
            let (peer, stream) = match greeted {
                Ok(rank) => rank,
                Err(error) => {
                    last = format!("somebody connected, but {error}");
                    continue;
                }
            };
            // Only a holder of the key gets here, so an odd rank is a bug or a second start.
            let expected = peer > rank && links.get(peer).is_some_and(Option::is_none);
            if expected && let Ok(link) = Link::new(stream) {
                links[peer] = Some(link);
            }
        }
        let missing: Vec<_> = (rank + 1..links.len()).filter(|p| links[*p].is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if interrupt.is_raised() || Instant::now() >= deadline {
            return Err(ConnectError { missing, last });
        }
        match listener.socket.accept() {
            Ok((stream, _)) => begin_handshake(stream, *key, rank as u32, sender.clone()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut waits = [PollFd::new(&listener.socket, PollFlags::IN)];
                // Short, because a finished handshake arrives on the channel, not on the socket.
                let _ = poll(&mut waits, Some(&timespec(Duration::from_millis(1))));
            }
            Err(error) => {
                // Out of descriptors, say: it may pass, and must not be asked in a spin.
                last = error.to_string();
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

fn begin_handshake(
    mut stream: TcpStream,
    key: Key,
    own: u32,
    arrived: Sender<std::io::Result<(usize, TcpStream)>>,
) {
    let shake = move || {
        let greeted = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(HANDSHAKE_LIMIT)))
            .and_then(|()| stream.set_write_timeout(Some(HANDSHAKE_LIMIT)))
            .and_then(|()| handshake::accept(&mut stream, &key, own));
        // Whoever fails is dropped with its socket; the job goes on waiting for its own ranks.
        let _ = arrived.send(greeted.map(|peer| (peer as usize, stream)));
    };
    // With no thread to be had the connection is dropped, and the peer tries again.
    let _ = std::thread::Builder::new().name("gflow-greet".into()).spawn(shake);
}

impl Link {
    fn new(stream: TcpStream) -> std::io::Result<Link> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A host that vanishes sends no FIN: the kernel asks for it.
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, Duration::from_secs(10))?;
        rustix::net::sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(5))?;
        rustix::net::sockopt::set_tcp_keepcnt(&stream, 3)?;
        // It does not ask while something is unacknowledged, which this covers.
        rustix::net::sockopt::set_tcp_user_timeout(&stream, 25_000)?;
        Ok(Link { stream, incoming: FrameBuffer::default(), outgoing: Vec::new() })
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
        let mut bytes = [0; 4096];
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

    /// The next message of this peer, if it has arrived.
    fn next_message(&mut self, rank: usize) -> Result<Option<Vec<u8>>, Failure> {
        let from_buffer = |incoming: &mut FrameBuffer| match incoming.next_frame() {
            Ok(Some(Frame::Message(bytes))) => Ok(Some(bytes)),
            Ok(Some(Frame::Goodbye(goodbye))) => {
                Err(Failure::Lost { rank, reason: goodbye.reason })
            }
            Ok(None) => Ok(None),
            Err(reason) => Err(Failure::Garbled { rank, reason }),
        };
        if let Some(bytes) = from_buffer(&mut self.incoming)? {
            return Ok(Some(bytes));
        }
        let pulled = self.pull_incoming();
        // What arrived before the end counts, a goodbye above all: it has the reason.
        if let Some(bytes) = from_buffer(&mut self.incoming)? {
            return Ok(Some(bytes));
        }
        pulled.map_err(|error| Failure::Lost { rank, reason: ended(&error) })?;
        Ok(None)
    }
}

fn ended(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its process ended or closed the connection".to_string()
        }
        _ => format!("its connection failed: {error}"),
    }
}

impl Mesh {
    fn linked(&mut self) -> impl Iterator<Item = (usize, &mut Link)> {
        self.links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| link.as_mut().map(|link| (peer, link)))
    }

    /// Sleeps until a socket that matters is ready, the interrupt is raised or the deadline came.
    fn wait(&self, received: &[Option<Vec<u8>>], deadline: Instant) {
        let mut waits = vec![PollFd::from_borrowed_fd(self.interrupt.as_fd(), PollFlags::IN)];
        for (link, message) in self.links.iter().zip(received) {
            let Some(link) = link else { continue };
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, message.is_none());
            flags.set(PollFlags::OUT, !link.outgoing.is_empty());
            if !flags.is_empty() {
                waits.push(PollFd::new(&link.stream, flags));
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // An error here (a signal, say) only means another round of the caller's loop.
        let _ = poll(&mut waits, Some(&timespec(left)));
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
        message: &dyn Fn(usize) -> Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        for (peer, link) in self.linked() {
            link.outgoing.extend_from_slice(&Frame::Message(message(peer)).encode());
        }
        let mut received: Vec<Option<Vec<u8>>> = vec![None; self.size()];
        received[self.rank] = Some(Vec::new());
        loop {
            for (peer, link) in self.linked() {
                let sent = link.push_outgoing();
                if received[peer].is_none() {
                    received[peer] = link.next_message(peer)?;
                }
                // Only now: a goodbye that it sent first says more than a broken pipe.
                sent.map_err(|error| Failure::Lost { rank: peer, reason: ended(&error) })?;
            }
            let idle = self.linked().all(|(_, link)| link.outgoing.is_empty());
            if idle && received.iter().all(Option::is_some) {
                break;
            }
            if self.interrupt.is_raised() {
                return Err(Failure::Interrupted);
            }
            if Instant::now() >= deadline {
                let late = (0..received.len()).filter(|peer| received[*peer].is_none());
                return Err(Failure::Late(late.collect()));
            }
            self.wait(&received, deadline);
        }
        // A peer that called, then gave up waiting for this rank, will not take part any more.
        for (rank, link) in self.linked() {
            if let Some(Goodbye { gave_up: true, reason }) = link.incoming.waiting_goodbye() {
                return Err(Failure::Lost { rank, reason });
            }
        }
        Ok(received.into_iter().map(Option::unwrap_or_default).collect())
    }

    fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        let mut left: Vec<bool> = self.links.iter().map(Option::is_none).collect();
        while !done.is_raised() && Instant::now() < deadline {
            if self.interrupt.is_raised() {
                return Err(Failure::Interrupted);
            }
            for (rank, link) in self.linked().filter(|(rank, _)| !left[*rank]).collect::<Vec<_>>() {
                let pulled = link.pull_incoming();
                match link.incoming.waiting_goodbye() {
                    Some(Goodbye { gave_up: true, reason }) => {
                        return Err(Failure::Lost { rank, reason });
                    }
                    Some(Goodbye { gave_up: false, .. }) => left[rank] = true,
                    None => {
                        pulled.map_err(|error| Failure::Lost { rank, reason: ended(&error) })?
                    }
                }
            }
            let mut waits = vec![
                PollFd::from_borrowed_fd(done.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.interrupt.as_fd(), PollFlags::IN),
            ];
            let watched = self.links.iter().zip(&left).filter(|(_, left)| !**left);
            waits.extend(
                watched
                    .filter_map(|(link, _)| link.as_ref())
                    .map(|l| PollFd::new(&l.stream, PollFlags::IN)),
            );
            let remaining = deadline.saturating_duration_since(Instant::now());
            let _ = poll(&mut waits, Some(&timespec(remaining)));
        }
        Ok(())
    }

    fn say_goodbye(&mut self, goodbye: Goodbye) {
        let goodbye = Frame::Goodbye(goodbye).encode();
        for (_, link) in self.linked() {
            link.outgoing.extend_from_slice(&goodbye);
            // One attempt: the socket's buffer has room unless the peer has long stopped reading.
            let _ = link.push_outgoing();
            let _ = link.stream.shutdown(std::net::Shutdown::Write);
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const KEY: Key = [9; 32];

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn listeners(size: usize) -> (Vec<Listener>, Vec<SocketAddr>) {
        let listeners: Vec<_> =
            (0..size).map(|_| Listener::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
        let addresses = listeners.iter().map(Listener::address).collect();
        (listeners, addresses)
    }

    /// The meshes of `size` ranks on loopback.
    fn meshes(size: usize) -> Vec<Mesh> {
        let (listeners, addresses) = listeners(size);
        let ranks: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let addresses = addresses.clone();
                std::thread::spawn(move || {
                    let interrupt = Arc::new(Interrupt::new().unwrap());
                    connect(listener, rank, &addresses, &KEY, soon(), interrupt).unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
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
                            let got = mesh.swap(&|peer| vec![own, peer as u8, round], soon());
                            for (peer, message) in got.unwrap().into_iter().enumerate() {
                                if peer as u8 != own {
                                    assert_eq!(message, [peer as u8, own, round]);
                                }
                            }
                        }
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
        let failure = meshes[0].swap(&|_| vec![1], soon()).unwrap_err();
        assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
    }

    #[test]
    fn a_goodbye_is_told_even_behind_a_message() {
        let mut meshes = meshes(2);
        let mut leaving = meshes.pop().unwrap();
        let past = Instant::now();
        assert_eq!(leaving.swap(&|_| vec![1], past), Err(Failure::Late(vec![0])));
        leaving.say_goodbye(Goodbye { gave_up: true, reason: "it gave up".into() });
        let failure = meshes[0].swap(&|_| vec![1], soon()).unwrap_err();
        assert_eq!(failure, Failure::Lost { rank: 1, reason: "it gave up".into() });
    }

    #[test]
    fn a_peer_that_left_in_order_is_not_lost_to_what_it_took_part_in() {
        let mut meshes = meshes(2);
        let mut leaving = meshes.pop().unwrap();
        assert!(leaving.swap(&|_| vec![1], Instant::now()).is_err());
        leaving.say_goodbye(Goodbye { gave_up: false, reason: "it left".into() });
        drop(leaving);
        assert_eq!(meshes[0].swap(&|_| vec![1], soon()), Ok(vec![Vec::new(), vec![1]]));
        let never = Interrupt::new().unwrap();
        assert_eq!(meshes[0].watch_until(&never, Duration::from_millis(50)), Ok(()));
        let failure = meshes[0].swap(&|_| vec![1], soon()).unwrap_err();
        assert_eq!(failure, Failure::Lost { rank: 1, reason: "it left".into() });
    }

    #[test]
    fn strangers_do_not_hold_up_the_ranks() {
        let (mut listeners, addresses) = listeners(2);
        let silent = TcpStream::connect(addresses[0]).unwrap();
        let mut rude = TcpStream::connect(addresses[0]).unwrap();
        rude.write_all(b"GET / HTTP/1.1\r\n\r\nand so on and so on, longer than a hello").unwrap();
        let second = listeners.pop().unwrap();
        let first = listeners.pop().unwrap();
        let theirs = addresses.clone();
        let other = std::thread::spawn(move || {
            let interrupt = Arc::new(Interrupt::new().unwrap());
            connect(second, 1, &theirs, &KEY, soon(), interrupt).unwrap()
        });
        let interrupt = Arc::new(Interrupt::new().unwrap());
        let mesh = connect(first, 0, &addresses, &KEY, soon(), interrupt).unwrap();
        assert_eq!(mesh.size(), 2);
        other.join().unwrap();
        drop(silent);
    }

    #[test]
    fn a_rank_that_never_comes_is_named() {
        let (mut listeners, addresses) = listeners(3);
        let deadline = Instant::now() + Duration::from_millis(60);
        let interrupt = Arc::new(Interrupt::new().unwrap());
        let first = listeners.remove(0);
        let error = connect(first, 0, &addresses, &KEY, deadline, interrupt).unwrap_err();
        assert_eq!(error.missing, [1, 2]);
    }

    #[test]
    fn an_interrupt_ends_a_wait_at_once() {
        let mut meshes = meshes(2);
        let mut waiting = meshes.remove(0);
        let interrupt = waiting.interrupt.clone();
        let wait = std::thread::spawn(move || waiting.swap(&|_| vec![1], soon()));
        std::thread::sleep(Duration::from_millis(20));
        interrupt.raise();
        assert_eq!(wait.join().unwrap(), Err(Failure::Interrupted));
    }
}
