//! The exchange of chunks of shards between hosts, enqueued on a device's stream.
//!
//! The arithmetic is that of `codec`, to the bit, with one exception: what NCCL rounds off a 16-bit
//! partial sum on the way is lost, while the CPU ring returns it to the residual.

use super::device_queue::DeviceQueue;
use super::report::{DeviceNorms, DeviceReport};
use super::scratch::Scratch;
use super::shard_layout::{DeviceShard, ScratchLayout};
use super::stages::Stages;
use crate::codec::{Momentum, Wire};
use crate::cuda::kernels::norm_limit;
use crate::cuda::safe::communicator::{Communicator, OnPoll};
use crate::cuda::safe::memory::DeviceSlice;
use crate::cuda::sys::fault::Result;
use crate::simd::element::Element;

/// An exchange between the carriers of the same local rank on all hosts.
pub struct InterHostExchange<'a> {
    pub queue: &'a DeviceQueue,
    pub communicator: &'a Communicator,
    pub hosts: usize,
    /// The first host keeps what a 16-bit gradient cannot represent.
    pub is_first_host: bool,
    pub wire: Wire,
    pub momentum: Option<Momentum>,
}

impl InterHostExchange<'_> {
    /// Enqueues the exchange, and returns how many elements of each shard are sent. The report gets
    /// five stages: accumulate, norms, pack, wire, unpack. `on_poll` is called while NCCL takes
    /// long.
    pub fn run(
        &self,
        shards: &[DeviceShard],
        scratch: &mut Scratch,
        report: &mut DeviceReport,
        on_poll: OnPoll,
    ) -> Result<Vec<usize>> {
        let InterHostExchange { queue, communicator, wire, .. } = *self;
        let stages = Stages {
            queue,
            wire,
            momentum: self.momentum,
            keeps_rest: self.is_first_host,
            norm_limit: norm_limit(self.hosts),
        };
        let scratch_layout = ScratchLayout::new(shards)?;
        let layouts = scratch_layout.assign(shards, scratch, queue, wire)?;
        // If there is nothing to send, neither have this rank's peers.
        let Some(first) = layouts.first().filter(|_| scratch_layout.chunks > 0) else {
            return Ok(vec![0; shards.len()]);
        };
        let (address, count) = (first.norms, scratch_layout.chunks);
        let norms = DeviceSlice { address, element: Element::F32, count };
        let (address, count) = (first.wire, scratch_layout.elements);
        let sent = DeviceSlice { address, element: wire_element(wire), count };

        for layout in &layouts {
            stages.accumulate(layout)?;
        }
        let counts = layouts.iter().map(|layout| layout.chunks as usize).collect();
        let (own, gradient) = (first.norms, first.gradient_norms);
        report.copy_norms(&DeviceNorms { own, gradient, counts })?;
        report.end_stage()?;
        // SAFETY: the scratch memory is this queue's, and large enough for the layout.
        unsafe { communicator.all_reduce(&queue.stream, norms, on_poll) }?;
        report.end_stage()?;
        for layout in &layouts {
            stages.select(layout)?;
            stages.pack(layout)?;
        }
        report.copy_slots(&layouts)?;
        report.end_stage()?;
        // SAFETY: as above.
        unsafe { communicator.all_reduce(&queue.stream, sent, on_poll) }?;
        report.end_stage()?;
        for layout in &layouts {
            stages.unpack(layout)?;
        }
        report.end_stage()?;
        Ok(layouts.iter().map(|layout| layout.count as usize * layout.chunk as usize).collect())
    }
}

/// The element type of a wire format.
fn wire_element(wire: Wire) -> Element {
    match wire {
        Wire::F16 => Element::F16,
        Wire::BF16 => Element::BF16,
        Wire::F32 => Element::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::sys::nccl::NcclType;

    #[test]
    fn every_wire_is_the_element_of_its_name() {
        for (wire, dtype) in [
            (Wire::F16, NcclType::FLOAT16),
            (Wire::BF16, NcclType::BFLOAT16),
            (Wire::F32, NcclType::FLOAT32),
        ] {
            assert_eq!(NcclType::from(wire_element(wire)), dtype);
            assert_eq!(wire_element(wire).bytes(), wire.element_bytes());
        }
    }
}
