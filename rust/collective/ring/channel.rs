//! A channel of the ring: one stream to the next host and one from the previous.
//!
//! A channel moves what can be moved now. It must never wait, and never hold back a whole cache line
//! that could be combined and sent on.

use super::tape::{OnArrival, Tape};
use crate::collective::partition::ALIGNMENT;
use crate::collective::stream::{Stream, read_now, write_now};
use rustix::event::{PollFd, PollFlags};
use std::io::Result;

/// Size of the buffer between socket and sum: small enough to stay in the cache of the core, large
/// enough for few system calls.
pub const STAGING_BYTES: usize = 256 * 1024;
/// The most that one turn receives before it is time to send.
const TURN_BYTES: usize = 1024 * 1024;

pub struct RingChannel {
    to_next: Box<dyn Stream>,
    from_previous: Box<dyn Stream>,
    staging: Staging,
    /// Bytes sent to the next host so far.
    sent: u64,
}

/// The result of a turn.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// Bytes received.
    pub received: usize,
    /// Whether the socket has no more data for now.
    pub is_drained: bool,
}

/// A stream that failed: at which end, and how.
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

    /// A channel with a staging buffer of another size, for benchmarks and tests.
    pub fn with_staging(
        to_next: Box<dyn Stream>,
        from_previous: Box<dyn Stream>,
        staging_bytes: usize,
    ) -> RingChannel {
        RingChannel { to_next, from_previous, staging: Staging::new(staging_bytes), sent: 0 }
    }

    /// Bytes sent to the next host so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Receives what has come and sends what is ready.
    pub fn take_turn(&mut self, tape: &mut Tape) -> std::result::Result<Turn, Broken> {
        // In this order, because data that was just combined is still in the cache.
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
            let written = write_now(&mut *self.to_next, ready)?;
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
            && let Some((room, on_arrival)) = tape.arriving()
        {
            let (asked, read, consumed) = match on_arrival {
                OnArrival::Store => {
                    let asked = room.len().min(TURN_BYTES);
                    let read = read_now(&mut *self.from_previous, &mut room[..asked])?;
                    (asked, read, read)
                }
                OnArrival::Combine { with, last } => {
                    let staging = self.staging.room(room.len());
                    let asked = staging.len();
                    let read = read_now(&mut *self.from_previous, staging)?;
                    let combine = |own: &mut [u8], more: &[u8]| with.combine(own, more, last);
                    (asked, read, self.staging.consume(read, room, combine))
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

    /// The events that let another turn move something.
    pub fn waits_for<'channel>(
        &'channel self,
        tape: &Tape,
    ) -> impl Iterator<Item = PollFd<'channel>> {
        let arrival =
            (!tape.all_arrived()).then(|| PollFd::new(&self.from_previous, PollFlags::IN));
        // Only while there is something to send: otherwise every free buffer would wake the thread.
        let room =
            (!tape.sendable().is_empty()).then(|| PollFd::new(&self.to_next, PollFlags::OUT));
        arrival.into_iter().chain(room)
    }
}

/// Bytes that have arrived but are not combined yet. After a turn, less than a cache line.
struct Staging {
    bytes: Vec<u8>,
    /// Where the aligned bytes begin.
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

    /// Room for the rest of `missing` bytes that are not combined yet.
    fn room(&mut self, missing: usize) -> &mut [u8] {
        let end = self.bytes.len().min(self.start + missing);
        &mut self.bytes[self.start + self.filled..end]
    }

    /// Combines what has arrived, including `more` bytes just read into the room, with the
    /// beginning of `own`. Returns how much that was: whole cache lines, or all of `own`.
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
