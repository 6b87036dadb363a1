//! Within a host, at full precision: every carrier gets the sum of its part of a tensor, and in the end
//! every rank all parts. All of it is put on the stream of a lane.

use super::communicator::Communicator;
use super::fault::Result;
use super::lane::Lane;
use super::nccl::Kind;
use crate::arithmetic::element::Element;
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
    pub fn reduce(&self) -> Result<()> {
        let (kind, stream) = (Kind::from(self.element), &self.lane.stream);
        match self.equal() {
            // SAFETY: the tensor belongs to the exchange until that is over, on this stream.
            Some((own, each)) => unsafe {
                self.within.reduce_scatter(self.address, own, each, kind, stream)
            },
            // SAFETY: as above.
            None => unsafe { self.within.reduce_parts(&self.parts(), kind, stream) },
        }
    }

    /// Brings every part to all ranks.
    pub fn hand_out(&self) -> Result<()> {
        let (kind, stream) = (Kind::from(self.element), &self.lane.stream);
        match self.equal() {
            // SAFETY: as above.
            Some((own, each)) => unsafe {
                self.within.all_gather(self.address, own, each, kind, stream)
            },
            // SAFETY: as above.
            None => unsafe { self.within.broadcast_parts(&self.parts(), kind, stream) },
        }
    }

    /// Where the own part is and how many elements each has, if all ranks carry equally much: NCCL does
    /// that faster than one part after the other.
    fn equal(&self) -> Option<(u64, usize)> {
        let first = self.ranges.first()?.len();
        let are_equal =
            self.ranges.len() == self.ranks && self.ranges.iter().all(|range| range.len() == first);
        let own = self.ranges.get(self.place).filter(|_| are_equal)?;
        Some((self.address + own.start as u64, first / self.element.bytes()))
    }

    fn parts(&self) -> Vec<(u64, usize)> {
        let part = |range: &Range<usize>| {
            (self.address + range.start as u64, range.len() / self.element.bytes())
        };
        self.ranges.iter().map(part).collect()
    }
}
