//! The exchange of descriptors between ranks that are threads, and with strangers.

use super::*;

const CALLER: Caller = Caller { rank: 1, channel: 0 };
use std::io::{Read, Write};
use std::os::fd::AsFd;

const KEY: Key = [9; 32];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Listeners for these ranks, and the list of them that every rank gets.
fn listeners(ranks: &[usize]) -> (Vec<FdListener>, Vec<(usize, String)>) {
    let listeners: Vec<_> = ranks.iter().map(|_| FdListener::open().unwrap()).collect();
    let names = listeners.iter().map(|listener| listener.name().to_string());
    let locals = ranks.iter().copied().zip(names).collect();
    (listeners, locals)
}

/// A segment whose first byte is its rank.
fn segment_of(rank: usize) -> Segment {
    let segment = Segment::create("test", 4096 * (rank + 1)).unwrap();
    // SAFETY: the segment has at least one page and isn't shared yet.
    unsafe { segment.base().write(rank as u8) };
    segment
}

fn exchange_as(
    listener: FdListener,
    own: usize,
    locals: &[(usize, String)],
    deadline: Instant,
) -> Result<Vec<(usize, Segment)>, NotShared> {
    let (segment, interrupt) = (&segment_of(own), &Interrupt::new().unwrap());
    FdExchange { rank: own, locals, key: &KEY, segment, deadline, interrupt }.run(listener)
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
        let stranger = FdExchange {
            rank: 1,
            locals: &locals,
            key: &[8; 32],
            segment: &segment_of(1),
            deadline: soon(),
            interrupt: &never,
        };
        let error = stranger.run(second).unwrap_err();
        let reason = "rank 0 cannot be reached: it does not hold the group's key";
        assert_eq!(error, NotShared { reason: reason.into() });
        let error = zeroth.join().unwrap();
        assert!(error.reason.starts_with("rank 1 "), "{error}");
        assert!(error.reason.contains("somebody connected, but"), "{error}");
    });
}

#[test]
fn a_rank_that_passes_something_else_is_refused_by_name() {
    let (mut listeners, locals) = listeners(&[0, 1]);
    std::thread::scope(|scope| {
        let first = listeners.remove(0);
        let zeroth = scope.spawn(|| exchange_as(first, 0, &locals, soon()).unwrap_err());
        let bounds = WaitBounds { deadline: soon(), interrupts: &[] };
        let mut link = UnixLink::connect(&locals[0].1, bounds).unwrap();
        handshake::connect(&mut link, &KEY, CALLER, 0).unwrap();
        let (pipe, _other_end) = std::io::pipe().unwrap();
        link.send_fd(pipe.as_fd()).unwrap();
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
    assert_eq!(error.to_string(), "ranks 1, 4 passed no memory: the deadline came first");
    // Its socket is closed by now; rank 1's is open, but gets no answer.
    let error = exchange_as(last, 4, &locals, short()).unwrap_err();
    assert!(error.reason.starts_with("rank 0 "), "{error}");
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
        let exchange = FdExchange {
            rank: own,
            locals: &locals,
            key: &KEY,
            segment: &segment,
            deadline: soon(),
            interrupt: &interrupt,
        };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| exchange.run(listener).unwrap_err());
            std::thread::sleep(Duration::from_millis(20));
            interrupt.raise();
            let error = waiting.join().unwrap();
            assert!(error.reason.starts_with(&format!("rank {} ", 1 - own)), "{error}");
            assert!(error.reason.ends_with("the group was aborted"), "{error}");
        });
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}
