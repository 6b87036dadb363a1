//! How fast two hosts all-reduce 25 MiB of float32 over a ring, and what the link allows.
//!
//!     cargo bench --bench ring                              two threads over loopback
//!     cargo bench --bench ring -- --listen 10.0.0.1:5000    one of two processes, and on
//!     cargo bench --bench ring -- --connect 10.0.0.1:5000   another host the other
//!
//! Every round runs each variant once, so that a slow moment affects all of them alike. `plain` is
//! the limit: the same bytes in both directions at once, one thread each, without a sum.

use gflow::collective::ring::{Combine, Ring, RingChannel};
use gflow::collective::topology::Neighbours;
use gflow::transport::socket::prepare;
use gflow::transport::{Failure, Watch};
use rustix::net::sockopt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const BYTES: usize = 25 << 20;
const SMALL: usize = 1024;
/// Channels, KiB of staging and KiB of each socket buffer (0: left to the kernel).
const VARIANTS: [(usize, usize, usize); 9] = [
    (1, 64, 0),
    (1, 128, 0),
    (1, 256, 0),
    (1, 1024, 0),
    (2, 256, 0),
    (4, 256, 0),
    (1, 256, 256),
    (1, 256, 1024),
    (1, 256, 4096),
];
/// Small all-reduces that are timed together.
const SMALL_REPEATS: u32 = 100;

struct Sum;

impl Combine for Sum {
    fn element_bytes(&self) -> usize {
        4
    }

    fn combine(&self, own: &mut [u8], incoming: &[u8], _finish: bool) {
        for (own, incoming) in own.as_chunks_mut::<4>().0.iter_mut().zip(incoming.as_chunks().0) {
            *own = (f32::from_ne_bytes(*incoming) + f32::from_ne_bytes(*own)).to_ne_bytes();
        }
    }

    fn finish(&self, _own: &mut [u8]) {}
}

struct AllWell;

impl Watch for AllWell {
    fn check(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// Makes connections in order: the n-th of one side is the n-th of the other.
enum Endpoint {
    Listen(TcpListener),
    Connect(SocketAddr),
}

impl Endpoint {
    fn stream(&self) -> TcpStream {
        match self {
            Endpoint::Listen(listener) => listener.accept().unwrap().0,
            Endpoint::Connect(address) => loop {
                match TcpStream::connect(address) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(Duration::from_millis(50)),
                }
            },
        }
    }

    /// The stream to the other host and the one from it.
    fn both_ways(&self) -> (TcpStream, TcpStream) {
        let (first, second) = (self.stream(), self.stream());
        match self {
            Endpoint::Listen(_) => (first, second),
            Endpoint::Connect(_) => (second, first),
        }
    }

    fn ring(&self, channels: usize, staging: usize, buffer: usize) -> Ring {
        let position = usize::from(matches!(self, Endpoint::Connect(_)));
        let channels = (0..channels)
            .map(|_| {
                let (to_next, from_previous) = self.both_ways();
                prepare(&to_next).unwrap();
                prepare(&from_previous).unwrap();
                if buffer > 0 {
                    sockopt::set_socket_send_buffer_size(&to_next, buffer).unwrap();
                    sockopt::set_socket_recv_buffer_size(&from_previous, buffer).unwrap();
                }
                RingChannel::with_staging(Box::new(to_next), Box::new(from_previous), staging)
            })
            .collect();
        let neighbours = Neighbours { next: 1 - position, previous: 1 - position };
        Ring::new(position, 2, neighbours, channels)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let rounds: usize = value("--rounds").map_or(20, |rounds| rounds.parse().unwrap());
    if let Some(address) = value("--listen") {
        report(measure(&Endpoint::Listen(TcpListener::bind(address).unwrap()), rounds));
    } else if let Some(address) = value("--connect") {
        measure(&Endpoint::Connect(address.parse().unwrap()), rounds);
    } else {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let other = std::thread::spawn(move || measure(&Endpoint::Connect(address), rounds));
        report(measure(&Endpoint::Listen(listener), rounds));
        other.join().unwrap();
    }
}

/// A variant, the bytes that it moves each way, and for every round its wall time and the CPU time
/// of this thread (for `plain`, the receiving half), which hardly depends on other load.
type Times = (String, usize, Vec<[f64; 2]>);

/// CPU seconds of this thread.
fn cpu_seconds() -> f64 {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    times.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

fn measure(endpoint: &Endpoint, rounds: usize) -> Vec<Times> {
    let plain = endpoint.both_ways();
    let mut rings: Vec<Ring> = VARIANTS
        .iter()
        .map(|(channels, staging, buffer)| endpoint.ring(*channels, staging << 10, buffer << 10))
        .collect();
    let mut times: Vec<Times> = vec![("plain".into(), BYTES, Vec::new())];
    times.extend(VARIANTS.iter().map(|(channels, staging, buffer)| {
        let buffer = if *buffer == 0 { "auto".to_string() } else { buffer.to_string() };
        (format!("{channels} channels, staging {staging}, buffer {buffer}"), BYTES, Vec::new())
    }));
    times.push((format!("1 channel, {SMALL} bytes"), SMALL, Vec::new()));
    let mut data = vec![0u8; BYTES];
    let soon = || Instant::now() + Duration::from_secs(60);
    // The first round warms up memory and congestion windows.
    for round in 0..=rounds {
        let mut seconds = Vec::new();
        let mut time = |act: &mut dyn FnMut(&mut [u8]), repeats: u32| {
            let (start, cpu) = (Instant::now(), cpu_seconds());
            (0..repeats).for_each(|_| act(&mut data));
            let both = [start.elapsed().as_secs_f64(), cpu_seconds() - cpu];
            seconds.push(both.map(|seconds| seconds / f64::from(repeats)));
        };
        time(&mut |data| transfer(&plain, data), 1);
        for ring in &mut rings {
            time(&mut |data| ring.all_reduce(data, &Sum, &mut AllWell, soon()).unwrap(), 1);
        }
        let mut small = |data: &mut [u8]| {
            rings[0].all_reduce(&mut data[..SMALL], &Sum, &mut AllWell, soon()).unwrap();
        };
        time(&mut small, SMALL_REPEATS);
        if round > 0 {
            times.iter_mut().zip(seconds).for_each(|(variant, seconds)| variant.2.push(seconds));
        }
    }
    times
}

/// Sends `data` to the other host and receives as much, at once.
fn transfer((to_other, from_other): &(TcpStream, TcpStream), data: &[u8]) {
    std::thread::scope(|scope| {
        scope.spawn(|| (&mut &*to_other).write_all(data).unwrap());
        let mut buffer = vec![0; 256 << 10];
        let mut missing = data.len();
        while missing > 0 {
            let room = missing.min(buffer.len());
            missing -= (&mut &*from_other).read(&mut buffer[..room]).unwrap();
        }
    });
}

fn report(times: Vec<Times>) {
    println!("{:36}  {:>9}  {:>9}  {:>9}  {:>9}", "", "median ms", "best ms", "GB/s/way", "cpu ms");
    for (name, bytes, seconds) in times {
        let sorted = |which: usize| {
            let mut sorted: Vec<f64> = seconds.iter().map(|both| both[which]).collect();
            sorted.sort_by(f64::total_cmp);
            (sorted[0] * 1e3, sorted[sorted.len() / 2] * 1e3)
        };
        let ((best, median), (_, cpu)) = (sorted(0), sorted(1));
        let rate = bytes as f64 / median / 1e6;
        println!("{name:36}  {median:9.3}  {best:9.3}  {rate:9.3}  {cpu:9.3}");
    }
}
