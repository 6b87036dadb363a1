//! Within a host, at full precision: every carrier gets the sum of its part of a tensor, and in the end
//! every rank all parts. All of it is put on the stream of a queue.

use super::communicator::{Communicator, OnPoll};
use super::device_queue::DeviceQueue;
use super::device_slice::DeviceSlice;
use super::fault::Result;
use super::nccl::{Nccl, On};
use crate::simd::element::Element;
use std::ops::Range;

/// A tensor on the device, cut into the parts of the host's carriers.
pub struct IntraHostExchange<'a> {
    pub queue: &'a DeviceQueue,
    pub communicator: &'a Communicator,
    pub address: u64,
    pub element: Element,
    /// In bytes, by place, of the carriers only.
    pub partitions: Vec<Range<usize>>,
    /// How many ranks the host has, and which of them this is.
    pub local_ranks: usize,
    pub local_rank: usize,
}

impl IntraHostExchange<'_> {
    /// Sums every part on the rank that carries it.
    pub fn reduce_scatter(&self, on_poll: OnPoll) -> Result<()> {
        self.enqueue(on_poll, |nccl, on| match self.equal() {
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
    pub fn all_gather(&self, on_poll: OnPoll) -> Result<()> {
        self.enqueue(on_poll, |nccl, on| match self.equal() {
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

    fn enqueue(&self, on_poll: OnPoll, work: impl FnOnce(&Nccl, On) -> Result<()>) -> Result<()> {
        match self.partitions.iter().all(Range::is_empty) {
            true => Ok(()),
            false => self.communicator.enqueue(&self.queue.stream, on_poll, work),
        }
    }

    /// The own part, if all ranks carry equally much: NCCL does that faster than one part after the other.
    fn equal(&self) -> Option<DeviceSlice> {
        let first = self.partitions.first()?.len();
        let are_equal = self.partitions.len() == self.local_ranks
            && self.partitions.iter().all(|range| range.len() == first);
        self.partitions.get(self.local_rank).filter(|_| are_equal).map(|own| self.elements(own))
    }

    /// The parts that are not empty, each with the place of the rank that carries it.
    fn parts(&self) -> impl Iterator<Item = (usize, DeviceSlice)> {
        let parts = self.partitions.iter().enumerate().filter(|(_, range)| !range.is_empty());
        parts.map(|(place, range)| (place, self.elements(range)))
    }

    fn elements(&self, range: &Range<usize>) -> DeviceSlice {
        DeviceSlice {
            address: self.address + range.start as u64,
            count: range.len() / self.element.bytes(),
            element: self.element,
        }
    }
}
