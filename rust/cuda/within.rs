//! Within a host, at full precision: every carrier gets the sum of its part of a tensor, and in the end
//! every rank all parts. All of it is put on the stream of a lane.

use super::communicator::{Communicator, Look};
use super::fault::Result;
use super::lane::Lane;
use super::nccl::{Elements, Kind, Nccl, On};
use crate::simd::element::Element;
use std::ops::Range;

/// A tensor on the device, cut into the parts of the host's carriers.
pub struct Parts<'a> {
    pub lane: &'a Lane,
    pub within: &'a Communicator,
    pub address: u64,
    pub element: Element,
    /// In bytes, by place, of the carriers only.
    pub ranges: Vec<Range<usize>>,
    /// How many ranks the host has, and which of them this is.
    pub ranks: usize,
    pub place: usize,
}

impl Parts<'_> {
    /// Sums every part on the rank that carries it.
    pub fn reduce(&self, look: Look) -> Result<()> {
        self.put(look, |nccl, on| match self.equal() {
            // SAFETY: the tensor belongs to the exchange until that is over, on this stream.
            Some(own) => unsafe { nccl.reduce_scatter(self.address, own, on) },
            None => nccl.group(|| {
                self.parts().try_for_each(|(root, part)| {
                    // SAFETY: as above.
                    unsafe { nccl.reduce(part, root, on) }
                })
            }),
        })
    }

    /// Brings every part to all ranks.
    pub fn hand_out(&self, look: Look) -> Result<()> {
        self.put(look, |nccl, on| match self.equal() {
            // SAFETY: as above.
            Some(own) => unsafe { nccl.all_gather(self.address, own, on) },
            None => nccl.group(|| {
                self.parts().try_for_each(|(root, part)| {
                    // SAFETY: as above.
                    unsafe { nccl.broadcast(part, root, on) }
                })
            }),
        })
    }

    fn put(&self, look: Look, work: impl FnOnce(&Nccl, On) -> Result<()>) -> Result<()> {
        match self.ranges.iter().all(Range::is_empty) {
            true => Ok(()),
            false => self.within.put(&self.lane.stream, look, work),
        }
    }

    /// The own part, if all ranks carry equally much: NCCL does that faster than one part after the other.
    fn equal(&self) -> Option<Elements> {
        let first = self.ranges.first()?.len();
        let are_equal =
            self.ranges.len() == self.ranks && self.ranges.iter().all(|range| range.len() == first);
        self.ranges.get(self.place).filter(|_| are_equal).map(|own| self.elements(own))
    }

    /// The parts that are not empty, each with the place of the rank that carries it.
    fn parts(&self) -> impl Iterator<Item = (usize, Elements)> {
        let parts = self.ranges.iter().enumerate().filter(|(_, range)| !range.is_empty());
        parts.map(|(place, range)| (place, self.elements(range)))
    }

    fn elements(&self, range: &Range<usize>) -> Elements {
        Elements {
            address: self.address + range.start as u64,
            count: range.len() / self.element.bytes(),
            kind: Kind::from(self.element),
        }
    }
}
