//! The ring: how hosts exchange a tensor so that every link is busy in both directions.
//!
//! **Setting.** `H` hosts form a ring. Position `p` sends to `p + 1` and receives from `p - 1` (all
//! modulo `H`), over a plain byte stream each way. Length and type of the data were agreed on
//! before, so the streams carry nothing but data: no frames, no lengths.
//!
//! **All-reduce.** The tensor is cut into `H` partitions. At step `s` position `p` sends partition
//! `p - s` and receives partition `p - s - 1`. In the first `H - 1` steps it combines what arrives
//! with its own data, *incoming op own*; then it holds partition `p + 1` complete and finishes it
//! (an average divides). In the other `H - 1` steps complete partitions go round and are read
//! straight into the tensor. Each host sends `2 (H - 1) / H` of the tensor, which is the least
//! possible, and partition `c` is always combined in the order `c, c + 1, …`: the result is the same
//! on every host and in every run, whatever the timing.
//!
//! **One rule instead of steps.** A host receives at step `s` what it sends at step `s + 1`. So its
//! outgoing stream is its own partition followed by its incoming stream, without the last one:
//!
//! ```text
//! incoming:         [ p-1 ][ p-2 ] … [ p+3 ][ p+2 ]
//! outgoing:  [  p  ][ p-1 ][ p-2 ] … [ p+3 ]
//! ```
//!
//! and byte `k` of the outgoing stream may leave as soon as `k < len(partition p)` + (bytes of the
//! incoming stream that have been processed). That is all the synchronisation there is. The code
//! has no steps and never waits for a whole partition: one loop receives, combines and forwards
//! bytes as they come. `tape.rs` is this rule.
//!
//! **The others are the same loop.** An all-gather combines nothing. A broadcast has one partition,
//! which is complete at its root and goes round once.
//!
//! **Channels.** The data may be spread over several channels, each a ring of its own over a slice
//! of the data, all driven by one thread. How the data is cut depends on its length, on `H` and on
//! the number of channels, so these must be equal on all hosts; then the order of combination, and
//! with it every bit of a sum, is the same.
//!
//! A wait in the ring must always watch for lost peers: a death anywhere stops all bytes, and the
//! streams of the neighbours cannot tell whose it was. After a failure the hosts are at different
//! bytes, so a ring that failed must not be used again.

pub mod channel;
mod combine;
mod exchange;
mod tape;
#[cfg(test)]
pub(crate) mod tests;

pub use channel::RingChannel;
pub use combine::Combine;

use crate::collective::partition::{ALIGNMENT, partition_slice};
use crate::collective::topology::Neighbours;
use crate::transport::{Failure, Watch};
use std::time::Instant;
use tape::Tape;

/// The least that a channel is used for: with less, it costs more system calls than it gains.
const CHANNEL_BYTES: usize = 256 * 1024;

/// One host's position in the ring, and its channels.
pub struct Ring {
    position: usize,
    hosts: usize,
    /// The ranks at the other ends of the channels, for failures.
    neighbours: Neighbours,
    channels: Vec<RingChannel>,
    bytes_per_channel: usize,
}

impl Ring {
    /// Position `position` of `hosts`. A single host needs no channel.
    pub fn new(
        position: usize,
        hosts: usize,
        neighbours: Neighbours,
        channels: Vec<RingChannel>,
    ) -> Ring {
        assert!(position < hosts, "position {position} of {hosts}");
        assert!(hosts == 1 || !channels.is_empty(), "{hosts} hosts and no channel between them");
        Ring { position, hosts, neighbours, channels, bytes_per_channel: CHANNEL_BYTES }
    }

    /// Bytes sent to the next host since this ring was made.
    pub fn sent(&self) -> u64 {
        self.channels.iter().map(RingChannel::sent).sum()
    }

    /// Replaces `data`, the contribution of this host, by the result.
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
            .map(|slice| {
                let partitions = partition_slice(slice, self.hosts).collect();
                Tape::of_all_reduce(partitions, self.position, combine)
            })
            .collect();
        self.run(tapes, watch, deadline)
    }

    /// Replaces `data` by that of position `root`.
    pub fn broadcast(
        &mut self,
        data: &mut [u8],
        root: usize,
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        assert!(root < self.hosts, "root {root} of {}", self.hosts);
        let is_root = self.position == root;
        let forwards = (self.position + 1) % self.hosts != root;
        let tapes = partition_slice(data, self.channels_for(data.len()))
            .map(|slice| Tape::of_broadcast(slice, is_root, forwards))
            .collect();
        self.run(tapes, watch, deadline)
    }

    /// Fills in `blocks`, one per host and of equal length. The block at this position is this
    /// host's contribution.
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
        let mut slices: Vec<_> =
            blocks.iter_mut().map(|block| partition_slice(block, count)).collect();
        let tapes = (0..count)
            .map(|_| {
                let partitions = slices.iter_mut().flat_map(|slices| slices.next()).collect();
                Tape::of_all_gather(partitions, self.position)
            })
            .collect();
        self.run(tapes, watch, deadline)
    }

    /// How many channels `bytes` are spread over. Equal on all hosts.
    fn channels_for(&self, bytes: usize) -> usize {
        (bytes / self.bytes_per_channel).clamp(1, self.channels.len().max(1))
    }

    fn run(
        &mut self,
        mut tapes: Vec<Tape>,
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        exchange::run(&mut self.channels, &mut tapes, self.neighbours, watch, deadline)
    }
}
