//! Scratch memory of a queue's exchanges: norms, selection, and what travels. Exchanges
//! run one after another on the stream, so all use the same memory. It grows and never shrinks.

use super::device_queue::DeviceQueue;
use crate::cuda::safe::memory::DeviceMemory;
use crate::cuda::sys::fault::Result;

#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) norms: ScratchBuffer,
    pub(super) gradient_norms: ScratchBuffer,
    pub(super) selected: ScratchBuffer,
    pub(super) slots: ScratchBuffer,
    pub(super) wire: ScratchBuffer,
    /// Of quantised gradients: what this host sends to the owners of blocks, what it gets as an owner,
    /// and the sums.
    pub(super) parts: ScratchBuffer,
    pub(super) received: ScratchBuffer,
    pub(super) sums: ScratchBuffer,
}

#[derive(Debug, Default)]
pub(super) struct ScratchBuffer(Option<DeviceMemory>);

impl ScratchBuffer {
    /// Makes it at least this large, and returns its address. Growing loses the content.
    pub(super) fn fit(&mut self, queue: &DeviceQueue, bytes: usize) -> Result<u64> {
        if self.0.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // Free the old memory first, in the order of the stream, so that both never exist at a
            // time.
            self.0 = None;
            self.0 = Some(queue.allocate(bytes)?);
        }
        Ok(self.0.as_ref().map_or(0, DeviceMemory::address))
    }
}
