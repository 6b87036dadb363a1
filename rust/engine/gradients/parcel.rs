//! A parcel: chosen chunks of the gradients of one exchange, as they travel.
//!
//! It is filled by the worker, goes round the ring with the courier, and comes back with the sums
//! and with what this rank has rounded off while it added. An exchange that chose much is several
//! parcels: while one is on its way the next is packed and the one before unpacked.

use crate::collective::ring::{Combine, Ring};
use crate::compress::Wire;
use crate::compress::hop;
use crate::transport::{Failure, Watch};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A parcel is full with this many elements. Larger ones leave the cache between two stages, and
/// let the ring wait for them; smaller ones make it turn around more often.
pub const ENOUGH: usize = 1 << 20;

pub struct Parcel {
    wire: Wire,
    /// In words, so that every element is aligned.
    words: Vec<u64>,
    rounded_off: Vec<f32>,
    elements: usize,
    pub loads: Vec<Load>,
    is_last: bool,
    deadline: Instant,
}

/// One chunk in a parcel.
#[derive(Debug, Clone)]
pub struct Load {
    /// Which member of the exchange it is of.
    pub member: usize,
    /// Where it is in that member's shard, and in the parcel.
    pub range: Range<usize>,
    pub place: Range<usize>,
    /// What it is multiplied by on the wire.
    pub scale: f32,
}

impl Parcel {
    /// An empty parcel; `used` is an old one whose memory is used again.
    pub fn new(wire: Wire, deadline: Instant, used: Option<Parcel>) -> Parcel {
        let empty = || Parcel {
            wire,
            words: Vec::new(),
            rounded_off: Vec::new(),
            elements: 0,
            loads: Vec::new(),
            is_last: false,
            deadline,
        };
        let mut parcel = used.filter(|used| used.wire == wire).unwrap_or_else(empty);
        (parcel.elements, parcel.is_last, parcel.deadline) = (0, false, deadline);
        parcel.loads.clear();
        parcel
    }

    /// Whether another chunk of so many elements belongs into the next parcel.
    pub fn is_full_for(&self, elements: usize) -> bool {
        self.elements > 0 && self.elements + elements > ENOUGH
    }

    /// The same as the last one of its exchange.
    pub fn last(self) -> Parcel {
        Parcel { is_last: true, ..self }
    }

    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// Makes room for a chunk, and returns it with its bytes.
    pub fn add(&mut self, member: usize, range: Range<usize>, scale: f32) -> (Load, &mut [u8]) {
        let place = self.elements..self.elements + range.len();
        self.elements = place.end;
        let words = (self.elements * self.wire.element_bytes()).div_ceil(size_of::<u64>());
        if self.words.len() < words {
            // At once what a full one needs: most are full.
            let enough = ENOUGH * self.wire.element_bytes() / size_of::<u64>();
            self.words.resize(words.max(enough), 0);
        }
        let load = Load { member, range, place: place.clone(), scale };
        self.loads.push(load.clone());
        (load, self.part(place))
    }

    /// The bytes of some elements.
    pub fn part(&mut self, elements: Range<usize>) -> &mut [u8] {
        let each = self.wire.element_bytes();
        &mut self.bytes()[elements.start * each..elements.end * each]
    }

    fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.elements * self.wire.element_bytes();
        assert!(bytes <= size_of_val(self.words.as_slice()));
        // SAFETY: the words are there and have no padding; any bytes are a valid word.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), bytes) }
    }

    /// What this rank has rounded off of some elements, in the unit of the wire; empty if nothing.
    pub fn rounded_off(&self, elements: Range<usize>) -> &[f32] {
        self.rounded_off.get(elements).unwrap_or(&[])
    }

    /// Replaces the elements by their sums over all hosts.
    pub fn go_round(&mut self, ring: &mut Ring, watch: &mut dyn Watch) -> Result<(), Failure> {
        let (wire, deadline) = (self.wire, self.deadline);
        let mut rounded_off = std::mem::take(&mut self.rounded_off);
        rounded_off.clear();
        if wire != Wire::F32 {
            rounded_off.resize(self.elements, 0.0);
        }
        let bytes = self.bytes();
        let start = bytes.as_ptr() as usize;
        let sums = Sums { wire, start, rounded_off: Mutex::new(&mut rounded_off) };
        let outcome = ring.all_reduce(bytes, &sums, watch, deadline);
        self.rounded_off = rounded_off;
        outcome
    }
}

/// How the ring adds up what arrives: in f32, rounded to the type of the wire.
struct Sums<'a> {
    wire: Wire,
    /// The address of the first byte of the parcel.
    start: usize,
    /// Locked by the one thread that adds; the ring only asks for something that can be shared.
    rounded_off: Mutex<&'a mut [f32]>,
}

impl Combine for Sums<'_> {
    fn element_bytes(&self) -> usize {
        self.wire.element_bytes()
    }

    fn combine(&self, own: &mut [u8], incoming: &[u8], _finish: bool) {
        let each = self.wire.element_bytes();
        let bytes = own.len().min(incoming.len());
        let first = (own.as_ptr() as usize - self.start) / each;
        let mut rounded_off = self.rounded_off.lock().unwrap_or_else(PoisonError::into_inner);
        let rounded_off = match self.wire {
            Wire::F32 => &mut [][..],
            _ => &mut rounded_off[first..first + bytes / each],
        };
        hop::add(&mut own[..bytes], &incoming[..bytes], self.wire, rounded_off);
    }

    fn finish(&self, _own: &mut [u8]) {}
}
