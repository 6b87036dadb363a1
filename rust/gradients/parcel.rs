//! A parcel: selected chunks of the gradients of one exchange, as they travel.
//!
//! The worker fills it, the courier takes it round the ring, and it comes back with the sums and with
//! what this rank rounded off when it added. A large exchange takes several parcels: while one is on
//! its way the next is packed and the one before is unpacked.

use crate::codec::{Wire, add_partial_sum};
use crate::collective::ring::{Combine, Ring};
use crate::sync::lock;
use crate::transport::{Failure, Watch};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A parcel is full with this many elements. Larger parcels fall out of the cache between two stages and
/// keep the ring waiting; smaller ones cost more turns of the ring.
pub const FULL_ELEMENTS: usize = 1 << 20;

pub struct Parcel {
    wire: Wire,
    /// In words, so that every element is aligned.
    words: Vec<u64>,
    /// This rank's rounding errors in the ranges of `added`; stale elsewhere.
    rounded_off: Vec<f32>,
    /// The elements where this rank has added to what came in.
    added: Vec<Range<usize>>,
    elements: usize,
    pub chunks: Vec<PackedChunk>,
    is_last: bool,
    deadline: Instant,
}

/// One chunk in a parcel.
#[derive(Debug, Clone)]
pub struct PackedChunk {
    /// The index of its bucket in the exchange.
    pub bucket: usize,
    /// Its elements in that bucket's shard, and in the parcel.
    pub in_shard: Range<usize>,
    pub in_parcel: Range<usize>,
    /// The factor that it is multiplied by on the wire.
    pub scale: f32,
}

impl Parcel {
    /// An empty parcel, which reuses the memory of `used`.
    pub fn new(wire: Wire, deadline: Instant, used: Option<Parcel>) -> Parcel {
        let empty = || Parcel {
            wire,
            words: Vec::new(),
            rounded_off: Vec::new(),
            added: Vec::new(),
            elements: 0,
            chunks: Vec::new(),
            is_last: false,
            deadline,
        };
        let mut parcel = used.filter(|used| used.wire == wire).unwrap_or_else(empty);
        (parcel.elements, parcel.is_last, parcel.deadline) = (0, false, deadline);
        parcel.chunks.clear();
        parcel.added.clear();
        parcel
    }

    /// Whether a chunk of `elements` has to go into the next parcel.
    pub fn is_full_for(&self, elements: usize) -> bool {
        self.elements > 0 && self.elements + elements > FULL_ELEMENTS
    }

    /// Marks it as the last one of its exchange.
    pub fn into_last(self) -> Parcel {
        Parcel { is_last: true, ..self }
    }

    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// Makes room for a chunk, and returns it with its bytes in the parcel.
    pub fn add(
        &mut self,
        bucket: usize,
        in_shard: Range<usize>,
        scale: f32,
    ) -> (PackedChunk, &mut [u8]) {
        let in_parcel = self.elements..self.elements + in_shard.len();
        self.elements = in_parcel.end;
        let words = (self.elements * self.wire.element_bytes()).div_ceil(size_of::<u64>());
        if self.words.len() < words {
            // Room for a full parcel at once: most are full.
            let full = FULL_ELEMENTS * self.wire.element_bytes() / size_of::<u64>();
            self.words.resize(words.max(full), 0);
        }
        let chunk = PackedChunk { bucket, in_shard, in_parcel: in_parcel.clone(), scale };
        self.chunks.push(chunk.clone());
        (chunk, self.bytes_of(in_parcel))
    }

    /// The bytes of some of its elements.
    pub fn bytes_of(&mut self, elements: Range<usize>) -> &mut [u8] {
        let each = self.wire.element_bytes();
        &mut self.bytes()[elements.start * each..elements.end * each]
    }

    fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.elements * self.wire.element_bytes();
        assert!(bytes <= size_of_val(self.words.as_slice()));
        // SAFETY: the words are there and have no padding; any bytes are a valid word.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), bytes) }
    }

    /// This rank's rounding errors in a chunk, in units of the wire: the elements that it added to
    /// incoming ones, with the error of each. The chunk's other elements were the first of their
    /// sums, so nothing was added and rounded here.
    pub fn rounded_off(&self, chunk: &PackedChunk) -> impl Iterator<Item = (Range<usize>, &[f32])> {
        let (start, end) = (chunk.in_parcel.start, chunk.in_parcel.end);
        self.added.iter().filter_map(move |added| {
            let both = added.start.max(start)..added.end.min(end);
            let lost = self.rounded_off.get(both.clone())?;
            Some((both.start - start..both.end - start, lost))
        })
    }

    /// Replaces the elements by their sums over all hosts.
    pub fn go_round(&mut self, ring: &mut Ring, watch: &mut dyn Watch) -> Result<(), Failure> {
        let (wire, deadline) = (self.wire, self.deadline);
        let (mut rounded_off, added) =
            (std::mem::take(&mut self.rounded_off), std::mem::take(&mut self.added));
        if wire != Wire::F32 && rounded_off.len() < self.elements {
            rounded_off.resize(self.elements, 0.0);
        }
        let bytes = self.bytes();
        let start = bytes.as_ptr() as usize;
        let sums = Sums { wire, start, lost: Mutex::new(Lost { rounded_off, added }) };
        let outcome = ring.all_reduce(bytes, &sums, watch, deadline);
        let lost = sums.lost.into_inner().unwrap_or_else(PoisonError::into_inner);
        (self.rounded_off, self.added) = (lost.rounded_off, lost.added);
        outcome
    }
}

/// Adds what comes in on the ring: in f32, rounded to the type of the wire.
struct Sums {
    wire: Wire,
    /// The address of the first byte of the parcel.
    start: usize,
    /// Only one thread adds; the lock is there because the ring asks for something `Sync`.
    lost: Mutex<Lost>,
}

/// The parcel's fields of the same names, while it goes round.
struct Lost {
    rounded_off: Vec<f32>,
    added: Vec<Range<usize>>,
}

impl Combine for Sums {
    fn element_bytes(&self) -> usize {
        self.wire.element_bytes()
    }

    fn combine(&self, own: &mut [u8], incoming: &[u8], _finish: bool) {
        let each = self.wire.element_bytes();
        let bytes = own.len().min(incoming.len());
        let first = (own.as_ptr() as usize - self.start) / each;
        let elements = first..first + bytes / each;
        let mut lost = lock(&self.lost);
        let Lost { rounded_off, added } = &mut *lost;
        let rounded_off = match self.wire {
            Wire::F32 => &mut [][..],
            _ => &mut rounded_off[elements.clone()],
        };
        add_partial_sum(&mut own[..bytes], &incoming[..bytes], self.wire, rounded_off);
        // Bytes come in piece by piece, on several channels in turn: one range for each channel.
        match added.iter_mut().rev().find(|range| range.end == elements.start) {
            Some(range) => range.end = elements.end,
            None => added.push(elements),
        }
    }

    fn finish(&self, _own: &mut [u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::chunks::reference::{read, write};
    use crate::collective::ring::tests::{AllWell, dribbling_rings};
    use std::time::Duration;

    const HOSTS: usize = 3;
    const CHANNELS: usize = 2;

    /// A parcel of this many elements, each a chunk of its own; and its elements.
    fn filled(used: Option<Parcel>, count: usize, host: usize) -> (Parcel, Vec<f32>) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut parcel = Parcel::new(Wire::F16, deadline, used);
        let mut numbers = Vec::new();
        for index in 0..count {
            let (_, out) = parcel.add(0, index..index + 1, 1.0);
            let mut bytes = Vec::new();
            write(Wire::F16, &mut bytes, ((index * 31 + host * 17) % 101) as f32 * 0.37 - 9.0);
            out.copy_from_slice(&bytes);
            numbers.push(read(Wire::F16, &bytes, 0));
        }
        (parcel, numbers)
    }

    #[test]
    fn what_all_ranks_have_rounded_off_and_the_sums_are_what_was_sent() {
        let mut rings = dribbling_rings(HOSTS, CHANNELS);
        let mut used: Vec<Option<Parcel>> = (0..HOSTS).map(|_| None).collect();
        // The second and third time in used memory.
        for count in [3001, 2000, 2600] {
            let parcels = used.into_iter().enumerate();
            let (parcels, sent): (Vec<_>, Vec<_>) =
                parcels.map(|(host, used)| filled(used, count, host)).unzip();
            let mut parcels: Vec<Parcel> = std::thread::scope(|scope| {
                let hosts: Vec<_> = rings
                    .iter_mut()
                    .zip(parcels)
                    .map(|(ring, mut parcel)| {
                        scope.spawn(move || {
                            parcel.go_round(ring, &mut AllWell).map(|()| parcel).unwrap()
                        })
                    })
                    .collect();
                hosts.into_iter().map(|host| host.join().unwrap()).collect()
            });
            let mut some_was_lost = false;
            for index in 0..count {
                let bytes: Vec<_> =
                    parcels.iter_mut().map(|it| it.bytes_of(index..index + 1).to_vec()).collect();
                assert!(bytes.iter().all(|of_host| *of_host == bytes[0]), "{index}");
                let lost: Vec<f32> = parcels
                    .iter()
                    .flat_map(|it| it.rounded_off(&it.chunks[index]))
                    .flat_map(|(_, lost)| lost.iter().copied())
                    .collect();
                assert_eq!(lost.len(), HOSTS - 1, "{index} is added by all but the first");
                some_was_lost |= lost.iter().any(|lost| *lost != 0.0);
                let sum: f64 = sent.iter().map(|numbers| f64::from(numbers[index])).sum();
                let lost: f64 = lost.into_iter().map(f64::from).sum();
                assert_eq!(f64::from(read(Wire::F16, &bytes[0], 0)) + lost, sum, "{index}");
            }
            assert!(some_was_lost, "the numbers are to be such that something is");
            assert!(parcels.iter().all(|it| it.added.len() <= CHANNELS * (HOSTS - 1)));
            used = parcels.into_iter().map(Some).collect();
        }
    }
}
