//! The ring: how hosts exchange a tensor so that every link is busy in both directions.
//!
//! **Setting.** `H` hosts stand in a ring. Position `p` sends to `p + 1` and receives from `p - 1`
//! (all modulo `H`), over a plain byte stream each way. What is exchanged, how long it is and of
//! what type was agreed on before, so the streams carry nothing but data: no frames, no lengths.
//!
//! **All-reduce.** The tensor is cut into `H` chunks. At step `s` position `p` sends chunk `p - s`
//! and receives chunk `p - s - 1`. In the first `H - 1` steps what arrives is combined with the own
//! chunk, *incoming op own*; after them position `p` holds chunk `p + 1` complete, and finishes it
//! (an average divides). In the `H - 1` steps after that complete chunks go round and are read
//! straight into their place. Each host sends `2 (H - 1) / H` of the tensor, which is the least
//! possible, and chunk `c` is always combined in the order `c, c + 1, …`: the result is the same
//! on every host and in every run, whatever arrives when.
//!
//! **One rule instead of steps.** A host receives at step `s` what it sends at step `s + 1`. So its
//! outgoing stream is its own chunk followed by its incoming stream, without the last chunk:
//!
//! ```text
//! incoming:         [ p-1 ][ p-2 ] … [ p+3 ][ p+2 ]
//! outgoing:  [  p  ][ p-1 ][ p-2 ] … [ p+3 ]
//! ```
//!
//! and byte `k` of the outgoing stream may leave as soon as `k < len(chunk p)` + (bytes of the
//! incoming stream that have been dealt with). That is all the synchronisation there is. There are
//! no steps in the code and nobody waits for a chunk to be whole: bytes are received, combined and
//! sent on in one loop, as they come. `tape.rs` is this rule.
//!
//! **The others are the same loop.** An all-gather has no steps that combine. A broadcast has one
//! chunk, which is complete at its root and goes round once.
//!
//! **Channels.** The data may be spread over several channels, each a ring of its own over a part of the
//! data, all driven by one thread. How the data is cut depends on its length, on `H` and on the
//! number of channels, so these must be the same on every host; with them the order of combination,
//! and so the bits of a sum, stay the same.
//!
//! The ring must never wait without asking whether somebody was lost: a death anywhere stops every
//! byte, and the streams of the neighbours cannot tell whose it was. After a failure hosts stand
//! at different bytes, so a ring that failed must not be used again.

pub mod channel;
mod exchange;
mod tape;
#[cfg(test)]
pub(crate) mod tests;

pub use channel::{RingChannel, Stream};

use crate::collective::partition::{ALIGNMENT, partition_slice};
use crate::transport::{Failure, Watch};
use std::time::Instant;
use tape::Tape;

/// Less than this is not spread any further: another channel costs more system calls than it gains.
const CHANNEL_BYTES: usize = 256 * 1024;

/// How contributions become one.
pub trait Combine: Sync {
    /// Size of an element; a divisor of 64.
    fn element_bytes(&self) -> usize;

    /// own = incoming op own, for as many whole elements as both have. `finish` if these are then
    /// all contributions.
    fn combine(&self, own: &mut [u8], incoming: &[u8], finish: bool);

    /// Finishes what is the only contribution.
    fn finish(&self, own: &mut [u8]);
}

/// One host's place in the ring, and its channels.
pub struct Ring {
    position: usize,
    hosts: usize,
    channels: Vec<RingChannel>,
    next_rank: usize,
    previous_rank: usize,
    bytes_per_channel: usize,
}

impl Ring {
    /// Position `position` of `hosts`. The ranks are those at the other ends of the channels, and
    /// are only named in failures. One host alone needs no channel.
    pub fn new(
        position: usize,
        hosts: usize,
        channels: Vec<RingChannel>,
        next_rank: usize,
        previous_rank: usize,
    ) -> Ring {
        assert!(position < hosts, "position {position} of {hosts}");
        assert!(hosts == 1 || !channels.is_empty(), "{hosts} hosts and no channel between them");
        Ring {
            position,
            hosts,
            channels,
            next_rank,
            previous_rank,
            bytes_per_channel: CHANNEL_BYTES,
        }
    }

    /// Bytes handed to the next host since this ring was made.
    pub fn sent(&self) -> u64 {
        self.channels.iter().map(RingChannel::sent).sum()
    }

    /// `data` is this host's contribution, and is replaced by the result.
    pub fn all_reduce(
        &mut self,
        data: &mut [u8],
        combine: &dyn Combine,
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let element = combine.element_bytes();
        assert!(ALIGNMENT.is_multiple_of(element), "elements of {element} bytes");
        assert!(data.len().is_multiple_of(element), "{} bytes of {element} each", data.len());
        if self.hosts == 1 {
            combine.finish(data);
            return Ok(());
        }
        let tapes = partition_slice(data, self.channels_for(data.len()))
            .map(|part| {
                let chunks = partition_slice(part, self.hosts).collect();
                Tape::of_all_reduce(chunks, self.position, combine)
            })
            .collect();
        self.run(tapes, watch, deadline)
    }

    /// The `data` of position `root` replaces that of all others.
    pub fn broadcast(
        &mut self,
        data: &mut [u8],
        root: usize,
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        assert!(root < self.hosts, "root {root} of {}", self.hosts);
        let has_it = self.position == root;
        let hands_on = (self.position + 1) % self.hosts != root;
        let tapes = partition_slice(data, self.channels_for(data.len()))
            .map(|part| Tape::of_broadcast(part, has_it, hands_on))
            .collect();
        self.run(tapes, watch, deadline)
    }

    /// `blocks` are as many as hosts and of equal length. The one with the index of this position
    /// is this host's contribution; the others are filled in.
    pub fn all_gather(
        &mut self,
        blocks: &mut [&mut [u8]],
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        assert_eq!(blocks.len(), self.hosts, "one block for every host");
        let length = blocks[0].len();
        assert!(blocks.iter().all(|block| block.len() == length), "blocks of different lengths");
        let count = self.channels_for(length.saturating_mul(self.hosts));
        let mut parts: Vec<_> =
            blocks.iter_mut().map(|block| partition_slice(block, count)).collect();
        let tapes = (0..count)
            .map(|_| {
                let chunks = parts.iter_mut().flat_map(|parts| parts.next()).collect();
                Tape::of_all_gather(chunks, self.position)
            })
            .collect();
        self.run(tapes, watch, deadline)
    }

    /// How many channels `bytes` are spread over. Equal on all hosts, because both numbers are.
    fn channels_for(&self, bytes: usize) -> usize {
        (bytes / self.bytes_per_channel).clamp(1, self.channels.len().max(1))
    }

    fn run(
        &mut self,
        mut tapes: Vec<Tape>,
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let ranks = exchange::Ranks { next: self.next_rank, previous: self.previous_rank };
        exchange::run(&mut self.channels, &mut tapes, ranks, watch, deadline)
    }
}
