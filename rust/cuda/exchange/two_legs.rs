//! The exchange of quantised shards between hosts in two legs, enqueued on a device's stream. As
//! `gradients::two_legs` in host memory: the same blocks have the same owners, and the arithmetic is
//! that of `codec::quantizer`, to the bit.
//!
//! A leg is one group of sends and receives. NCCL's all-gather would want equal parts of all hosts, and
//! owners may differ by some blocks. Blocks lie in the order of their owners, so each message is
//! contiguous.

use super::device_buffer::{DeviceBuffer, DeviceSizes};
use super::device_queue::DeviceQueue;
use super::report::{DeviceNorms, DeviceReport};
use super::scratch::Scratch;
use crate::codec::Momentum;
use crate::codec::quantizer::{BLOCK, Ownership, Quantizer, SAMPLED};
use crate::cuda::kernels::{Argument, Float, Kernel, launch, number_of};
use crate::cuda::safe::communicator::{Communicator, OnPoll};
use crate::cuda::safe::memory::DeviceSlice;
use crate::cuda::safe::nccl::{Nccl, NcclTarget};
use crate::cuda::sys::fault::Result;
use crate::simd::element::Element;
use Argument::{Address, F32, U32, U64};

/// Alignment of a shard's bytes in scratch memory.
const ALIGNMENT: usize = 64;

/// The shard of a gradient bucket that this rank carries, on the device.
pub struct QuantizedDeviceShard<'a> {
    /// Replaced by the result.
    pub gradient: DeviceSlice,
    pub residual: &'a DeviceBuffer,
    /// Only with momentum.
    pub velocity: Option<&'a DeviceBuffer>,
    /// Only if steps follow the sizes of elements.
    pub sizes: Option<&'a DeviceSizes>,
    /// How often the bucket was exchanged before.
    pub step: u64,
}

/// An exchange between the carriers of the same local rank on all hosts.
pub struct TwoLegsExchange<'a> {
    pub queue: &'a DeviceQueue,
    pub communicator: &'a Communicator,
    pub ownership: Ownership,
    pub quantizer: Quantizer,
    pub momentum: Option<Momentum>,
}

/// A shard with its part of the scratch memory; device addresses.
struct Layout<'a> {
    shard: &'a QuantizedDeviceShard<'a>,
    blocks: usize,
    /// What this host sends of all blocks but its own.
    parts: u64,
    /// What the other hosts send of the blocks that this host owns, one host after another.
    received: u64,
    sums: u64,
    /// One f32 per sampled block: of what is left, and of the gradient.
    norms: u64,
    gradient_norms: u64,
}

impl Layout<'_> {
    fn samples(&self) -> usize {
        self.blocks.div_ceil(SAMPLED)
    }
}

impl TwoLegsExchange<'_> {
    /// Enqueues the exchange, and returns how many bytes this rank sends. The report gets five stages:
    /// pack, first leg, sum, second leg, unpack. `on_poll` is called while NCCL takes long.
    pub fn run(
        &self,
        shards: &[QuantizedDeviceShard],
        scratch: &mut Scratch,
        report: &mut DeviceReport,
        on_poll: OnPoll,
    ) -> Result<u64> {
        let layouts = self.assign(shards, scratch)?;
        // If there is nothing to send, neither have this rank's peers.
        let Some(first) = layouts.iter().find(|layout| layout.blocks > 0) else { return Ok(0) };
        for layout in &layouts {
            self.add_velocity(layout.shard)?;
            self.quantize(layout)?;
        }
        let counts = layouts.iter().map(Layout::samples).collect();
        let (own, gradient) = (first.norms, first.gradient_norms);
        report.copy_norms(&DeviceNorms { own, gradient, counts })?;
        report.end_stage()?;
        let mut sent = 0;
        self.enqueue(on_poll, |nccl, on| self.send_parts(&layouts, &mut sent, nccl, on))?;
        report.end_stage()?;
        for layout in &layouts {
            self.sum(layout)?;
        }
        report.end_stage()?;
        self.enqueue(on_poll, |nccl, on| self.send_sums(&layouts, &mut sent, nccl, on))?;
        report.end_stage()?;
        for layout in &layouts {
            self.deliver(layout)?;
            if let Some(sizes) = layout.shard.sizes {
                // SAFETY: the tensor belongs to the exchange until that is complete on this stream.
                unsafe { sizes.follow(layout.shard.gradient, layout.shard.step) }?;
            }
        }
        report.end_stage()?;
        Ok(sent)
    }

    /// Grows the scratch memory as needed, and assigns a part to each shard.
    fn assign<'a>(
        &self,
        shards: &'a [QuantizedDeviceShard<'a>],
        scratch: &mut Scratch,
    ) -> Result<Vec<Layout<'a>>> {
        let of_all = |blocks: usize| self.bytes(blocks).next_multiple_of(ALIGNMENT);
        let received = |blocks: usize| of_all((self.ownership.hosts - 1) * self.own(blocks));
        let mut layouts = Vec::new();
        let (mut wire, mut of_others, mut samples) = (0, 0, 0);
        for shard in shards {
            let blocks = shard.gradient.count.div_ceil(BLOCK);
            // Offsets for now.
            let (wire_at, norms_at) = (wire as u64, (samples * size_of::<f32>()) as u64);
            layouts.push(Layout {
                shard,
                blocks,
                parts: wire_at,
                received: of_others as u64,
                sums: wire_at,
                norms: norms_at,
                gradient_norms: norms_at,
            });
            wire += of_all(blocks);
            of_others += received(blocks);
            samples += blocks.div_ceil(SAMPLED);
        }
        let queue = self.queue;
        let (parts, sums) = (scratch.parts.fit(queue, wire)?, scratch.sums.fit(queue, wire)?);
        let received = scratch.received.fit(queue, of_others)?;
        let norms = scratch.norms.fit(queue, samples * size_of::<f32>())?;
        let gradient_norms = scratch.gradient_norms.fit(queue, samples * size_of::<f32>())?;
        for layout in &mut layouts {
            layout.parts += parts;
            layout.received += received;
            layout.sums += sums;
            layout.norms += norms;
            layout.gradient_norms += gradient_norms;
        }
        Ok(layouts)
    }

    fn bytes(&self, blocks: usize) -> usize {
        blocks * self.quantizer.block_bytes()
    }

    /// How many of a shard's blocks this host owns.
    fn own(&self, blocks: usize) -> usize {
        self.ownership.owned_by(self.ownership.host, blocks)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Ownership { hosts, host } = self.ownership;
        (0..hosts).filter(move |other| *other != host)
    }

    /// The bytes of the blocks that `host` owns, in memory for all blocks that starts at `address`.
    fn region(&self, address: u64, host: usize, blocks: usize) -> DeviceSlice {
        let owned_by = |host| self.ownership.owned_by(host, blocks);
        let before = (0..host).map(owned_by).sum();
        bytes_at(address + self.bytes(before) as u64, self.bytes(owned_by(host)))
    }

    fn enqueue(
        &self,
        on_poll: OnPoll,
        work: impl FnOnce(&Nccl, NcclTarget) -> Result<()>,
    ) -> Result<()> {
        let work = |nccl: &Nccl, on| nccl.group(|| work(nccl, on));
        self.communicator.enqueue(&self.queue.stream, on_poll, work)
    }

    /// The first leg: every part goes to the owner of its blocks.
    fn send_parts(
        &self,
        layouts: &[Layout],
        sent: &mut u64,
        nccl: &Nccl,
        on: NcclTarget,
    ) -> Result<()> {
        for layout in layouts {
            let own_bytes = self.bytes(self.own(layout.blocks));
            for (index, other) in self.others().enumerate() {
                let part = self.region(layout.parts, other, layout.blocks);
                let place = layout.received + (index * own_bytes) as u64;
                // SAFETY: the scratch memory is this queue's, and large enough for the layout.
                unsafe { swap(nccl, on, other, part, bytes_at(place, own_bytes)) }?;
                *sent += part.count as u64;
            }
        }
        Ok(())
    }

    /// The second leg: every sum goes from the owner of its blocks to all.
    fn send_sums(
        &self,
        layouts: &[Layout],
        sent: &mut u64,
        nccl: &Nccl,
        on: NcclTarget,
    ) -> Result<()> {
        for layout in layouts {
            let own = self.region(layout.sums, self.ownership.host, layout.blocks);
            for other in self.others() {
                let place = self.region(layout.sums, other, layout.blocks);
                // SAFETY: as above.
                unsafe { swap(nccl, on, other, own, place) }?;
                *sent += own.count as u64;
            }
        }
        Ok(())
    }

    fn add_velocity(&self, shard: &QuantizedDeviceShard) -> Result<()> {
        match (shard.velocity, self.momentum) {
            // SAFETY: the tensor belongs to the exchange until that is complete on this stream.
            (Some(velocity), Some(momentum)) => unsafe {
                velocity.apply_momentum(shard.gradient, momentum)
            },
            _ => Ok(()),
        }
    }

    /// Encodes the blocks that others own.
    fn quantize(&self, layout: &Layout) -> Result<()> {
        let out = [Address(layout.parts), Address(layout.norms), Address(layout.gradient_norms)];
        let arguments = [&self.due(layout)?[..], &out].concat();
        self.launch(Kernel::Quantize, layout.blocks, &arguments)
    }

    /// Adds up the blocks that this host owns, and encodes the sums.
    fn sum(&self, layout: &Layout) -> Result<()> {
        let wire = [Address(layout.received), Address(layout.sums)];
        let arguments = [&self.due(layout)?[..], &wire].concat();
        self.launch(Kernel::Sum, self.own(layout.blocks), &arguments)
    }

    /// Decodes the sums into the gradient.
    fn deliver(&self, layout: &Layout) -> Result<()> {
        let shard = layout.shard;
        let wire = [Address(layout.sums), Address(layout.parts), Address(shard.residual.address())];
        let last = [self.hosts()[0], self.hosts()[1], Address(shard.gradient.address)];
        let arguments = [&wire[..], &self.of_shard(shard)?, &last].concat();
        self.launch(Kernel::Deliver, layout.blocks, &arguments)
    }

    /// The arguments of kernels that begin with what is due of a gradient.
    fn due(&self, layout: &Layout) -> Result<Vec<Argument>> {
        let shard = layout.shard;
        let memory = [Address(shard.gradient.address), Address(shard.residual.address())];
        let step = self.quantizer.unbiased_step().unwrap_or(0.0);
        let how = [F32(self.quantizer.feedback), F32(step)];
        Ok([&memory[..], &self.of_shard(shard)?, &how, &self.hosts()].concat())
    }

    fn of_shard(&self, shard: &QuantizedDeviceShard) -> Result<[Argument; 4]> {
        Ok([
            Address(shard.sizes.map_or(0, DeviceSizes::address)),
            U64(shard.gradient.count as u64),
            U32(Float::try_of(shard.gradient.element)?.number()),
            U32(number_of(self.quantizer.levels)),
        ])
    }

    fn hosts(&self) -> [Argument; 2] {
        let Ownership { hosts, host } = self.ownership;
        [U32(hosts as u32), U32(host as u32)]
    }

    fn launch(&self, kernel: Kernel, blocks: usize, arguments: &[Argument]) -> Result<()> {
        let config = launch::quantizer(blocks);
        // SAFETY: the methods above pass the arguments of quantizer.cu. The memory belongs to the
        // queue or to the exchange, and both outlive what is on the stream.
        unsafe { self.queue.kernels.launch(&self.queue.stream, kernel, config, arguments) }
    }
}

fn bytes_at(address: u64, bytes: usize) -> DeviceSlice {
    DeviceSlice { address, element: Element::U8, count: bytes }
}

/// Sends one slice to a rank and receives another from it. Of empty ones both know that.
///
/// # Safety
/// Both are memory of the target's device, valid when the stream gets there.
unsafe fn swap(
    nccl: &Nccl,
    on: NcclTarget,
    peer: usize,
    out: DeviceSlice,
    into: DeviceSlice,
) -> Result<()> {
    if out.count > 0 {
        // SAFETY: the caller's promise.
        unsafe { nccl.send(out, peer, on) }?;
    }
    if into.count > 0 {
        // SAFETY: the caller's promise.
        unsafe { nccl.receive(into, peer, on) }?;
    }
    Ok(())
}
