//! The tape: the bytes that pass one position of the ring, in order.
//!
//! A tape is a sequence of stops, each a visit to one partition. Two cursors move along it: bytes
//! behind `arrived` have their value for this visit, bytes behind `sent` have been sent on. All
//! synchronisation of the ring is one rule: `sent` never overtakes `arrived`.
//!
//! A partition may be visited twice, for its sum and for its result. The sum is sent before the
//! result arrives, because the result is made from it.
//!
//! A tape knows no sockets; it only says which bytes are next.

use super::combine::Combine;
use std::ops::Range;

/// What to do with bytes that arrive.
#[derive(Clone, Copy)]
pub enum OnArrival<'a> {
    /// Combine them with this host's contribution; `last` if that is the last one missing.
    Combine { with: &'a dyn Combine, last: bool },
    /// They are final: store them.
    Store,
}

/// A position on the tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Cursor {
    stop: usize,
    at: usize,
}

pub struct Tape<'a> {
    partitions: Vec<&'a mut [u8]>,
    /// The partition at every stop.
    stops: Vec<usize>,
    /// The stops where arriving bytes are combined, and how; at the others they are stored.
    combined: Option<(Range<usize>, &'a dyn Combine)>,
    /// How many stops are sent on.
    outgoing: usize,
    arrived: Cursor,
    sent: Cursor,
}

impl<'a> Tape<'a> {
    /// Every position starts with one of `partitions` and sees all of them, combined on the way.
    pub fn of_all_reduce(
        partitions: Vec<&'a mut [u8]>,
        position: usize,
        combine: &'a dyn Combine,
    ) -> Tape<'a> {
        let hosts = partitions.len();
        Tape::around(partitions, position, 2 * hosts - 1, Some((1..hosts, combine)))
    }

    /// Every position has the partition of its number and gets the others.
    pub fn of_all_gather(partitions: Vec<&'a mut [u8]>, position: usize) -> Tape<'a> {
        let hosts = partitions.len();
        Tape::around(partitions, position, hosts, None)
    }

    /// One partition, which is here already if `is_root`, and is sent on if `forwards`.
    pub fn of_broadcast(partition: &'a mut [u8], is_root: bool, forwards: bool) -> Tape<'a> {
        Tape {
            partitions: vec![partition],
            stops: vec![0],
            combined: None,
            outgoing: usize::from(forwards),
            arrived: Cursor { stop: usize::from(is_root), at: 0 },
            sent: Cursor::default(),
        }
        .past_empty_stops()
    }

    /// `count` stops down the ring from this position's partition. That one is here already; the
    /// last is not sent on, because the next position began with it.
    fn around(
        partitions: Vec<&'a mut [u8]>,
        position: usize,
        count: usize,
        combined: Option<(Range<usize>, &'a dyn Combine)>,
    ) -> Tape<'a> {
        let hosts = partitions.len();
        Tape {
            stops: (0..count).map(|stop| (position + 2 * hosts - stop) % hosts).collect(),
            partitions,
            combined,
            outgoing: count - 1,
            arrived: Cursor { stop: 1, at: 0 },
            sent: Cursor::default(),
        }
        .past_empty_stops()
    }

    fn past_empty_stops(mut self) -> Tape<'a> {
        self.mark_arrived(0);
        self.mark_sent(0);
        self
    }

    /// The bytes that arrive next, up to the end of their partition; `None` if all have.
    pub fn arriving(&mut self) -> Option<(&mut [u8], OnArrival<'a>)> {
        let Cursor { stop, at } = self.arrived;
        let partition = *self.stops.get(stop)?;
        let on_arrival = match &self.combined {
            Some((stops, with)) if stops.contains(&stop) => {
                OnArrival::Combine { with: *with, last: stop + 1 == stops.end }
            }
            _ => OnArrival::Store,
        };
        Some((&mut self.partitions[partition][at..], on_arrival))
    }

    /// The bytes that may be sent now, up to the end of their partition; empty if none.
    pub fn sendable(&self) -> &[u8] {
        let Cursor { stop, at } = self.sent;
        if stop >= self.outgoing || self.sent >= self.arrived {
            return &[];
        }
        let partition = &self.partitions[self.stops[stop]];
        let end = if stop == self.arrived.stop { self.arrived.at } else { partition.len() };
        &partition[at..end]
    }

    pub fn mark_arrived(&mut self, bytes: usize) {
        self.arrived.at += bytes;
        self.arrived = self.past_ends(self.arrived, self.stops.len());
    }

    pub fn mark_sent(&mut self, bytes: usize) {
        self.sent.at += bytes;
        self.sent = self.past_ends(self.sent, self.outgoing);
    }

    /// Moves a cursor at the end of its partition to the next partition that is not empty.
    fn past_ends(&self, mut cursor: Cursor, stops: usize) -> Cursor {
        while cursor.stop < stops && cursor.at == self.partitions[self.stops[cursor.stop]].len() {
            cursor = Cursor { stop: cursor.stop + 1, at: 0 };
        }
        cursor
    }

    pub fn all_arrived(&self) -> bool {
        self.arrived.stop >= self.stops.len()
    }

    /// Bytes that have yet to arrive.
    pub fn missing(&self) -> usize {
        let to_come = self.stops.get(self.arrived.stop..).unwrap_or(&[]);
        to_come.iter().map(|partition| self.partitions[*partition].len()).sum::<usize>()
            - self.arrived.at
    }

    pub fn all_sent(&self) -> bool {
        self.sent.stop >= self.outgoing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::ring::tests::Plain;

    const SUM: Plain<u8> = Plain::SUM;

    #[test]
    fn what_one_position_sends_is_what_the_next_expects() {
        for hosts in 2..=8 {
            let mut storage = vec![vec![[0u8; 3]; hosts]; hosts];
            let tapes: Vec<_> = storage
                .iter_mut()
                .enumerate()
                .map(|(position, chunks)| {
                    let chunks = chunks.iter_mut().map(|chunk| chunk.as_mut_slice()).collect();
                    Tape::of_all_reduce(chunks, position, &SUM)
                })
                .collect();
            for (position, tape) in tapes.iter().enumerate() {
                let next = &tapes[(position + 1) % hosts];
                assert_eq!(tape.stops[..tape.outgoing], next.stops[1..]);
            }
        }
    }

    #[test]
    fn only_the_own_chunk_may_be_sent_before_anything_has_arrived() {
        let (mut first, mut second) = ([1; 5], [2; 5]);
        let mut tape = Tape::of_all_reduce(vec![&mut first, &mut second], 1, &SUM);
        assert_eq!(tape.sendable(), [2; 5]);
        tape.mark_sent(5);
        assert!(tape.sendable().is_empty() && !tape.all_sent());
        assert!(matches!(tape.arriving(), Some((_, OnArrival::Combine { last: true, .. }))));
        tape.mark_arrived(2);
        assert_eq!(tape.sendable(), [1; 2]);
        tape.mark_arrived(3);
        assert!(matches!(tape.arriving(), Some((_, OnArrival::Store))));
        tape.mark_arrived(5);
        assert!(tape.all_arrived() && !tape.all_sent());
        tape.mark_sent(5);
        assert!(tape.all_sent());
    }

    #[test]
    fn empty_chunks_are_passed_over() {
        let (mut empty, mut also_empty) = ([], []);
        let tape = Tape::of_all_reduce(vec![&mut empty, &mut also_empty], 0, &SUM);
        assert!(tape.all_arrived() && tape.all_sent() && tape.sendable().is_empty());
    }
}
