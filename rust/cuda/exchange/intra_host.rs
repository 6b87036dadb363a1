//! The exchange within a host, at full precision, enqueued on a device's stream: every carrier gets
//! the sum of its partition of a tensor, and in the end every rank gets all partitions.

use super::device_queue::DeviceQueue;
use crate::cuda::safe::communicator::{Communicator, OnPoll};
use crate::cuda::safe::memory::DeviceSlice;
use crate::cuda::safe::nccl::{Nccl, NcclTarget};
use crate::cuda::sys::fault::Result;
use std::ops::Range;

pub struct IntraHostExchange<'a> {
    pub queue: &'a DeviceQueue,
    pub communicator: &'a Communicator,
    /// The whole tensor.
    pub tensor: DeviceSlice,
    /// Byte ranges of the tensor, one per carrier, by local rank.
    pub partitions: Vec<Range<usize>>,
    /// How many ranks the host has, and which of them this is.
    pub local_ranks: usize,
    pub local_rank: usize,
}

impl IntraHostExchange<'_> {
    /// Sums every partition on its carrier.
    pub fn reduce_scatter(&self, on_poll: OnPoll) -> Result<()> {
        self.enqueue(on_poll, |nccl, on| match self.own_of_equal() {
            // SAFETY: the tensor belongs to the exchange until that is complete on this stream.
            Some(own) => unsafe { nccl.reduce_scatter(self.tensor.address, own, on) },
            None => nccl.group(|| {
                self.non_empty().try_for_each(|(root, partition)| {
                    // SAFETY: as above.
                    unsafe { nccl.reduce(partition, root, on) }
                })
            }),
        })
    }

    /// Copies every partition to all ranks.
    pub fn all_gather(&self, on_poll: OnPoll) -> Result<()> {
        self.enqueue(on_poll, |nccl, on| match self.own_of_equal() {
            // SAFETY: as above.
            Some(own) => unsafe { nccl.all_gather(self.tensor.address, own, on) },
            None => nccl.group(|| {
                self.non_empty().try_for_each(|(root, partition)| {
                    // SAFETY: as above.
                    unsafe { nccl.broadcast(partition, root, on) }
                })
            }),
        })
    }

    fn enqueue(
        &self,
        on_poll: OnPoll,
        work: impl FnOnce(&Nccl, NcclTarget) -> Result<()>,
    ) -> Result<()> {
        match self.partitions.iter().all(Range::is_empty) {
            true => Ok(()),
            false => self.communicator.enqueue(&self.queue.stream, on_poll, work),
        }
    }

    /// This rank's partition, if all ranks have equal ones: NCCL has faster collectives for that
    /// case.
    fn own_of_equal(&self) -> Option<DeviceSlice> {
        let first = self.partitions.first()?.len();
        let are_equal = self.partitions.len() == self.local_ranks
            && self.partitions.iter().all(|partition| partition.len() == first);
        self.partitions.get(self.local_rank).filter(|_| are_equal).map(|own| self.slice(own))
    }

    /// The partitions that are not empty, each with the local rank of its carrier.
    fn non_empty(&self) -> impl Iterator<Item = (usize, DeviceSlice)> {
        let partitions = self.partitions.iter().enumerate().filter(|(_, range)| !range.is_empty());
        partitions.map(|(local_rank, range)| (local_rank, self.slice(range)))
    }

    fn slice(&self, range: &Range<usize>) -> DeviceSlice {
        let DeviceSlice { address, element, .. } = self.tensor;
        let (address, count) = (address + range.start as u64, range.len() / element.bytes());
        DeviceSlice { address, element, count }
    }
}
