//! The exchange of quantised shards between hosts, enqueued on a device's stream: in two legs, as
//! [`crate::codec::quantizer`] describes, and to the bit as through host memory.
//!
//! On the first leg every host sends each other one the blocks that it owns, in one group of sends
//! and receives. The owner adds up and encodes. On the second leg the encoded sums go to all hosts:
//! by an all-gather where all hosts own equally many blocks of a shard, else by sends and receives.

use super::device_buffer::DeviceBuffer;
use super::device_queue::DeviceQueue;
use super::report::DeviceReport;
use super::scratch::Scratch;
use crate::codec::quantizer::{BLOCK, Ownership, Quantizer};
use crate::cuda::kernels::{Argument, Float, Kernel, launch, rounding_arguments};
use crate::cuda::safe::communicator::{Communicator, OnPoll};
use crate::cuda::safe::memory::DeviceSlice;
use crate::cuda::safe::nccl::{Nccl, NcclTarget};
use crate::cuda::sys::fault::{Fault, Result};
use crate::simd::element::Element;
use Argument::{Address, F32, U32, U64};
use std::ops::Range;

/// Norms are taken of one block in this many, for the metrics: the same constant is in quantizer.cu.
const SAMPLED: usize = 61;

/// An exchange between the carriers of the same local rank on all hosts.
pub struct TwoLegExchange<'a> {
    pub queue: &'a DeviceQueue,
    /// By host.
    pub communicator: &'a Communicator,
    pub ownership: Ownership,
    pub quantizer: Quantizer,
}

/// The shard of a bucket that this rank carries, on the device.
pub struct QuantizedShard<'a> {
    /// Replaced by the sum over all hosts.
    pub gradient: DeviceSlice,
    pub residual: &'a DeviceBuffer,
    /// The sizes of its elements. `None` if steps do not follow them.
    pub sizes: Option<&'a DeviceBuffer<u16>>,
    /// How often its bucket was exchanged before.
    pub step: u64,
}

impl QuantizedShard<'_> {
    fn blocks(&self) -> usize {
        self.gradient.count.div_ceil(BLOCK)
    }
}

/// A shard with its part of the scratch memory.
struct Layout<'a> {
    shard: &'a QuantizedShard<'a>,
    blocks: usize,
    /// Device addresses. By owner: the blocks as this host has encoded them, and the encoded sums.
    parts: u64,
    sums: u64,
    /// By host, without this one: the blocks that this host owns.
    received: u64,
    /// Norms of gradient and residual, of the blocks that are sampled.
    norms: u64,
}

impl Layout<'_> {
    fn samples(&self) -> usize {
        self.blocks.div_ceil(SAMPLED)
    }
}

impl TwoLegExchange<'_> {
    /// Enqueues the exchange, and returns how many bytes this host sends. The report gets five stages:
    /// pack, wire, sum, wire, unpack. `on_poll` is called while NCCL takes long.
    pub fn run(
        &self,
        shards: &[QuantizedShard],
        scratch: &mut Scratch,
        report: &mut DeviceReport,
        on_poll: OnPoll,
    ) -> Result<u64> {
        let layouts = self.assign(shards, scratch)?;
        // If there is nothing to send, neither have this rank's peers.
        let Some(first) = layouts.iter().find(|layout| layout.blocks > 0) else { return Ok(0) };
        let (communicator, stream) = (self.communicator, &self.queue.stream);

        for layout in &layouts {
            self.send(layout)?;
        }
        let samples: Vec<usize> = layouts.iter().map(Layout::samples).collect();
        report.copy_samples(&samples, first.norms)?;
        report.end_stage()?;
        let mut sent = 0;
        communicator.enqueue(stream, on_poll, |nccl, on| {
            nccl.group(|| layouts.iter().try_for_each(|it| self.to_owners(it, &mut sent, nccl, on)))
        })?;
        report.end_stage()?;
        for layout in &layouts {
            self.sum(layout)?;
        }
        report.end_stage()?;
        communicator.enqueue(stream, on_poll, |nccl, on| {
            nccl.group(|| layouts.iter().try_for_each(|it| self.to_all(it, &mut sent, nccl, on)))
        })?;
        report.end_stage()?;
        for layout in &layouts {
            self.deliver(layout)?;
            if let Some(sizes) = layout.shard.sizes {
                // SAFETY: the gradient belongs to the exchange until that is complete on this stream.
                unsafe { sizes.follow(layout.shard.gradient, layout.shard.step) }?;
            }
        }
        report.end_stage()?;
        Ok(sent)
    }

    /// Grows the scratch memory as needed, and assigns each shard its part.
    fn assign<'a>(
        &self,
        shards: &'a [QuantizedShard<'a>],
        scratch: &mut Scratch,
    ) -> Result<Vec<Layout<'a>>> {
        let (queue, others) = (self.queue, self.ownership.hosts - 1);
        let room = |blocks: usize| self.bytes(Ownership::room(blocks));
        let received = |blocks| self.bytes(others * self.own_room(blocks));
        let total = |of: &dyn Fn(usize) -> usize| -> usize {
            shards.iter().map(|shard| of(shard.blocks())).sum()
        };
        let norms = |blocks: usize| 2 * size_of::<f32>() * blocks.div_ceil(SAMPLED);
        let mut next = Layout {
            shard: match shards.first() {
                Some(first) => first,
                None => return Ok(Vec::new()),
            },
            blocks: 0,
            parts: scratch.parts.fit(queue, total(&room))?,
            sums: scratch.sums.fit(queue, total(&room))?,
            received: scratch.received.fit(queue, total(&received))?,
            norms: scratch.norms.fit(queue, total(&norms))?,
        };
        let assign = |shard: &'a QuantizedShard<'a>| {
            let blocks = shard.blocks();
            if u32::try_from(blocks).is_err() {
                return Err(Fault(format!("{blocks} blocks are too many for a kernel")));
            }
            let Layout { parts, sums, received: at, norms: norms_at, .. } = next;
            let layout = Layout { shard, blocks, parts, sums, received: at, norms: norms_at };
            next.parts += room(blocks) as u64;
            next.sums += room(blocks) as u64;
            next.received += received(blocks) as u64;
            next.norms += norms(blocks) as u64;
            Ok(layout)
        };
        shards.iter().map(assign).collect()
    }

    /// The room for what another host sends of what this host owns.
    fn own_room(&self, blocks: usize) -> usize {
        Ownership::room(self.ownership.slots(self.ownership.host, blocks).len())
    }

    /// The bytes of so many blocks.
    fn bytes(&self, blocks: usize) -> usize {
        blocks * self.quantizer.block_bytes()
    }

    /// The bytes of some blocks that begin at this address.
    fn slice(&self, start: u64, slots: Range<usize>) -> DeviceSlice {
        let address = start + self.bytes(slots.start) as u64;
        DeviceSlice { address, element: Element::U8, count: self.bytes(slots.len()) }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let Ownership { hosts, host } = self.ownership;
        (0..hosts).filter(move |other| *other != host)
    }

    /// The first leg of a shard, in a group: sends the blocks to their owners, and gets those that this
    /// host owns.
    fn to_owners(
        &self,
        layout: &Layout,
        sent: &mut u64,
        nccl: &Nccl,
        on: NcclTarget,
    ) -> Result<()> {
        let slots = |owner| self.ownership.slots(owner, layout.blocks);
        let (owned, room) = (slots(self.ownership.host).len(), self.own_room(layout.blocks));
        for (index, other) in self.others().enumerate() {
            let part = self.slice(layout.parts, slots(other));
            let received = self.slice(layout.received, index * room..index * room + owned);
            *sent += part.count as u64;
            if part.count > 0 {
                // SAFETY: the scratch memory is this queue's, and large enough for the layout.
                unsafe { nccl.send(part, other, on) }?;
            }
            if received.count > 0 {
                // SAFETY: as above.
                unsafe { nccl.recv(received, other, on) }?;
            }
        }
        Ok(())
    }

    /// The second leg of a shard, in a group: sends the sums of what this host owns to all, and gets
    /// those of the others.
    fn to_all(&self, layout: &Layout, sent: &mut u64, nccl: &Nccl, on: NcclTarget) -> Result<()> {
        let sums = |owner| self.slice(layout.sums, self.ownership.slots(owner, layout.blocks));
        let own = sums(self.ownership.host);
        *sent += (own.count * (self.ownership.hosts - 1)) as u64;
        if own.count > 0 && self.others().all(|other| sums(other).count == own.count) {
            // SAFETY: as above.
            return unsafe { nccl.all_gather(layout.sums, own, on) };
        }
        for other in self.others() {
            if own.count > 0 {
                // SAFETY: as above.
                unsafe { nccl.send(own, other, on) }?;
            }
            if sums(other).count > 0 {
                // SAFETY: as above.
                unsafe { nccl.recv(sums(other), other, on) }?;
            }
        }
        Ok(())
    }

    /// Encodes the blocks that others own.
    fn send(&self, layout: &Layout) -> Result<()> {
        let arguments = [
            &self.shard(layout)[..],
            &self.rounding(),
            &self.hosts(),
            &[Address(layout.parts), Address(layout.norms)],
        ];
        let config = launch::quantize(layout.blocks);
        self.launch(Kernel::Send, layout, config, &arguments.concat())
    }

    /// Adds up the blocks that this host owns, and encodes the sums.
    fn sum(&self, layout: &Layout) -> Result<()> {
        let arguments = [
            &self.shard(layout)[..],
            &self.rounding(),
            &self.hosts(),
            &[Address(layout.received), Address(layout.sums)],
        ];
        let owned = self.ownership.slots(self.ownership.host, layout.blocks).len();
        self.launch(Kernel::Sum, layout, launch::quantize(owned), &arguments.concat())
    }

    /// Decodes all sums into the gradient.
    fn deliver(&self, layout: &Layout) -> Result<()> {
        let arguments = [
            &self.shard(layout)[..],
            &self.hosts(),
            &[Address(layout.parts), Address(layout.sums)],
        ];
        let config = launch::quantize(layout.blocks);
        self.launch(Kernel::Deliver, layout, config, &arguments.concat())
    }

    /// The arguments that all three kernels begin with.
    fn shard(&self, layout: &Layout) -> [Argument; 5] {
        let shard = layout.shard;
        [
            Address(shard.gradient.address),
            Address(shard.residual.address()),
            Address(shard.sizes.map_or(0, DeviceBuffer::address)),
            U64(shard.gradient.count as u64),
            U32(self.quantizer.levels as u32),
        ]
    }

    fn rounding(&self) -> [Argument; 3] {
        let [step, margin] = rounding_arguments(self.quantizer.rounding);
        [F32(step), F32(margin), F32(self.quantizer.feedback)]
    }

    fn hosts(&self) -> [Argument; 2] {
        [U32(self.ownership.hosts as u32), U32(self.ownership.host as u32)]
    }

    fn launch(
        &self,
        kernel: fn(Float) -> Kernel,
        layout: &Layout,
        config: launch::LaunchConfig,
        arguments: &[Argument],
    ) -> Result<()> {
        let kernel = kernel(Float::try_of(layout.shard.gradient.element)?);
        // SAFETY: the methods above pass the arguments of quantizer.cu. The memory belongs to the
        // queue or to the exchange, and both outlive what is on the stream.
        unsafe { self.queue.kernels.launch(&self.queue.stream, kernel, config, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_samples_of_norms_are_those_of_the_source() {
        let source = include_str!("../kernels/quantizer.cu");
        assert!(source.contains(&format!("const unsigned SAMPLED = {SAMPLED};")));
    }
}
