//! A parcel: the chosen chunks of the gradients of one exchange, as they travel.
//!
//! It is filled by the worker, goes round the ring with the courier, and comes back with the sums
//! and with what this rank has rounded off while it added.

use crate::collective::ring::{Combine, Ring};
use crate::compress::Wire;
use crate::compress::hop;
use crate::transport::{Failure, Watch};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

pub struct Parcel {
    wire: Wire,
    /// In words, so that every element is aligned.
    words: Vec<u64>,
    elements: usize,
    rounded_off: Vec<f32>,
    deadline: Instant,
}

impl Parcel {
    /// A parcel with room for so many elements; `used` is an old one whose memory is used again.
    pub fn new(wire: Wire, elements: usize, deadline: Instant, used: Option<Parcel>) -> Parcel {
        let (mut words, mut rounded_off) =
            used.map_or_else(Default::default, |used| (used.words, used.rounded_off));
        words.resize((elements * wire.element_bytes()).div_ceil(size_of::<u64>()), 0);
        rounded_off.clear();
        if wire != Wire::F32 {
            rounded_off.resize(elements, 0.0);
        }
        Parcel { wire, words, elements, rounded_off, deadline }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.elements * self.wire.element_bytes();
        // SAFETY: the words are there and have no padding; any bytes are a valid word.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), bytes) }
    }

    /// The bytes of some elements.
    pub fn part(&mut self, elements: Range<usize>) -> &mut [u8] {
        let each = self.wire.element_bytes();
        &mut self.bytes()[elements.start * each..elements.end * each]
    }

    /// What this rank has rounded off of some elements, in the unit of the wire; empty if nothing.
    pub fn rounded_off(&self, elements: Range<usize>) -> &[f32] {
        self.rounded_off.get(elements).unwrap_or(&[])
    }

    /// Replaces the elements by their sums over all hosts.
    pub fn go_round(&mut self, ring: &mut Ring, watch: &mut dyn Watch) -> Result<(), Failure> {
        let (wire, deadline) = (self.wire, self.deadline);
        let mut rounded_off = std::mem::take(&mut self.rounded_off);
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
