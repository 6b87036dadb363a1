//! A channel: one stream to the next host and one from the previous, and the bytes in between.
//!
//! A channel moves what can be moved now. It must never wait, and never hold back a whole cache line
//! that could be combined and passed on.

use super::tape::{OnArrival, Tape};
use crate::collective::partition::ALIGNMENT;
use rustix::event::{PollFd, PollFlags};
use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::AsFd;

/// A byte stream that does not block, such as a `TcpStream` that has been told so.
pub trait Stream: Read + Write + AsFd + Send {}
impl<T: Read + Write + AsFd + Send> Stream for T {}

/// What arrives is combined from a buffer of this size: small enough to stay in the core's own
/// cache between the socket and the sum, large enough to make few system calls.
pub const STAGING_BYTES: usize = 256 * 1024;
/// The most that one turn takes in before the other direction gets its turn.
const TURN_BYTES: usize = 1024 * 1024;

pub struct RingChannel {
    to_next: Box<dyn Stream>,
    from_previous: Box<dyn Stream>,
    staging: Staging,
    /// Bytes handed to the next host so far.
    sent: u64,
}

/// What came of a turn.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// Bytes that came.
    pub received: usize,
    /// Whether the socket has no more for now.
    pub is_drained: bool,
}

/// The end of a channel at which a stream failed, and how.
pub struct Broken {
    pub neighbour: Neighbour,
    pub error: std::io::Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Neighbour {
    Next,
    Previous,
}

impl RingChannel {
    pub fn new(to_next: Box<dyn Stream>, from_previous: Box<dyn Stream>) -> RingChannel {
        RingChannel::with_staging(to_next, from_previous, STAGING_BYTES)
    }

    /// A channel with a staging buffer of another size, to measure and to test.
    pub fn with_staging(
        to_next: Box<dyn Stream>,
        from_previous: Box<dyn Stream>,
        staging_bytes: usize,
    ) -> RingChannel {
        RingChannel { to_next, from_previous, staging: Staging::new(staging_bytes), sent: 0 }
    }

    /// Bytes handed to the next host so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Takes in what has come and sends what is ready.
    pub fn take_turn(&mut self, tape: &mut Tape) -> std::result::Result<Turn, Broken> {
        // In this order, because what has just been combined is still in the cache.
        let turn =
            self.receive(tape).map_err(|error| Broken { neighbour: Neighbour::Previous, error })?;
        self.send(tape).map_err(|error| Broken { neighbour: Neighbour::Next, error })?;
        Ok(turn)
    }

    fn send(&mut self, tape: &mut Tape) -> Result<()> {
        loop {
            let ready = tape.sendable();
            if ready.is_empty() {
                return Ok(());
            }
            let whole = ready.len();
            let written = write_now(&mut self.to_next, ready)?;
            tape.mark_sent(written);
            self.sent += written as u64;
            if written < whole {
                return Ok(()); // The socket is full.
            }
        }
    }

    fn receive(&mut self, tape: &mut Tape) -> Result<Turn> {
        let mut taken = 0;
        while taken < TURN_BYTES
            && let Some((place, arrival)) = tape.arriving()
        {
            let (asked, read, consumed) = match arrival {
                OnArrival::Store => {
                    let asked = place.len().min(TURN_BYTES);
                    let read = read_now(&mut self.from_previous, &mut place[..asked])?;
                    (asked, read, read)
                }
                OnArrival::Combine { with, last } => {
                    let room = self.staging.room(place.len());
                    let asked = room.len();
                    let read = read_now(&mut self.from_previous, room)?;
                    let add = |own: &mut [u8], more: &[u8]| with.combine(own, more, last);
                    (asked, read, self.staging.consume(read, place, add))
                }
            };
            tape.mark_arrived(consumed);
            taken += read;
            if read < asked {
                return Ok(Turn { received: taken, is_drained: true });
            }
        }
        Ok(Turn { received: taken, is_drained: tape.all_arrived() })
    }

    /// What has to happen before another turn can move anything.
    pub fn waits_for<'channel>(
        &'channel self,
        tape: &Tape,
    ) -> impl Iterator<Item = PollFd<'channel>> {
        let arrival =
            (!tape.all_arrived()).then(|| PollFd::new(&self.from_previous, PollFlags::IN));
        // Room is of no interest while there is nothing to send: it would only wake for nothing.
        let room =
            (!tape.sendable().is_empty()).then(|| PollFd::new(&self.to_next, PollFlags::OUT));
        arrival.into_iter().chain(room)
    }
}

/// Bytes that have come but are not combined yet. After a turn it holds less than a cache line.
struct Staging {
    bytes: Vec<u8>,
    /// Where the aligned part begins.
    start: usize,
    filled: usize,
}

impl Staging {
    fn new(capacity: usize) -> Staging {
        let capacity = capacity.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let mut bytes = vec![0; capacity + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        bytes.truncate(start + capacity);
        Staging { bytes, start, filled: 0 }
    }

    /// Room for what is still to come of `missing` bytes that are not combined yet.
    fn room(&mut self, missing: usize) -> &mut [u8] {
        let end = self.bytes.len().min(self.start + missing);
        &mut self.bytes[self.start + self.filled..end]
    }

    /// Combines what has come with the beginning of `own`, with `more` bytes just read into the
    /// room. Returns how much that was: whole cache lines, or all that `own` still missed.
    fn consume(
        &mut self,
        more: usize,
        own: &mut [u8],
        combine: impl FnOnce(&mut [u8], &[u8]),
    ) -> usize {
        self.filled += more;
        let whole = match self.filled == own.len() {
            true => self.filled,
            false => self.filled - self.filled % ALIGNMENT,
        };
        if whole > 0 {
            let (start, end) = (self.start, self.start + self.filled);
            combine(&mut own[..whole], &self.bytes[start..start + whole]);
            self.bytes.copy_within(start + whole..end, start);
            self.filled -= whole;
        }
        whole
    }
}

/// What the stream has now, 0 bytes if it has nothing. Its end is an error.
fn read_now(stream: &mut dyn Stream, into: &mut [u8]) -> Result<usize> {
    loop {
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// As much as the stream takes now, 0 bytes if it is full.
fn write_now(stream: &mut dyn Stream, bytes: &[u8]) -> Result<usize> {
    loop {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => return Ok(written),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
