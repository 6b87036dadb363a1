//! The compressed exchange of some shards on a queue: all of its stages, put on the stream one after the
//! other. How much is sent is known before, so nothing here waits for the device, and when it returns the
//! exchange is as good as done for whoever comes after it on the stream.
//!
//! The arithmetic is that of `compress`, to the bit. Only one thing cannot be had back here: what NCCL
//! rounds off a partial sum of 16 bits on the way.

use super::communicator::{Communicator, OnPoll};
use super::device_buffer::DeviceBuffer;
use super::device_queue::DeviceQueue;
use super::device_slice::DeviceSlice;
use super::fault::{Fault, Result};
use super::kernels::largest_norm;
use super::nccl::element_of;
use super::report::DeviceReport;
use super::scratch::Scratch;
use crate::codec::{ChunkGrid, Momentum, Wire};
use crate::simd::element::Element;

/// The part of a gradient bucket that this rank carries, on the device.
pub struct DeviceShard<'a> {
    /// The address of the gradient, which is replaced by what is delivered.
    pub gradient: u64,
    pub element: Element,
    pub grid: ChunkGrid,
    /// How many of its chunks are sent.
    pub count: usize,
    pub residual: &'a DeviceBuffer,
    /// With momentum only.
    pub velocity: Option<&'a DeviceBuffer>,
    /// Whether what is sent takes its velocity along.
    pub clears_velocity: bool,
}

/// How the carriers of equal place on all hosts exchange.
pub struct InterHostExchange<'a> {
    pub queue: &'a DeviceQueue,
    pub communicator: &'a Communicator,
    pub hosts: usize,
    /// What a gradient of 16 bits cannot express is kept there.
    pub is_first_host: bool,
    pub wire: Wire,
    pub momentum: Option<Momentum>,
}

/// A shard, and where its parts of the scratch are.
pub(super) struct ShardLayout<'a> {
    pub shard: &'a DeviceShard<'a>,
    pub chunk: u32,
    pub chunks: u32,
    pub count: u32,
    pub norms: u64,
    pub gradient_norms: u64,
    pub chosen: u64,
    pub slots: u64,
    pub wire: u64,
}

/// Where a shard begins on the wire, in elements: enough for the widest access of a kernel.
const ALIGNMENT: usize = 64;

impl InterHostExchange<'_> {
    /// Puts the exchange on the stream, and returns how many elements of each shard are sent. The report
    /// gets its stages: accumulate, norms, pack, wire and unpack. `look` is for when NCCL takes its time.
    pub fn run(
        &self,
        shards: &[DeviceShard],
        scratch: &mut Scratch,
        report: &mut DeviceReport,
        on_poll: OnPoll,
    ) -> Result<Vec<usize>> {
        let InterHostExchange { queue, communicator, wire, .. } = self;
        let (stream, kernels) = (&queue.stream, &queue.kernels);
        let clamp = largest_norm(self.hosts);
        let layout = Layout::new(shards)?;
        let placed = layout.place(shards, scratch, queue, *wire)?;
        // Those of equal place on other hosts have as little.
        let Some(first) = placed.first().filter(|_| layout.chunks > 0) else {
            return Ok(vec![0; shards.len()]);
        };

        for one in &placed {
            kernels.accumulate(stream, one, self.momentum, clamp)?;
        }
        report.read_norms(&placed)?;
        report.end_stage()?;
        let norms =
            DeviceSlice { address: first.norms, element: Element::F32, count: layout.chunks };
        // SAFETY: the scratch is this queue's, and was made as large as the layout.
        communicator.enqueue(stream, on_poll, |nccl, on| unsafe { nccl.all_reduce(norms, on) })?;
        report.end_stage()?;
        for one in &placed {
            kernels.select(stream, one)?;
            kernels.pack(stream, one, *wire, clamp)?;
        }
        report.read_choice(&placed)?;
        report.end_stage()?;
        let element = element_of(*wire);
        let sent = DeviceSlice { address: first.wire, element, count: layout.elements };
        // SAFETY: as above.
        communicator.enqueue(stream, on_poll, |nccl, on| unsafe { nccl.all_reduce(sent, on) })?;
        report.end_stage()?;
        for one in &placed {
            kernels.unpack(stream, one, *wire, self.is_first_host, clamp)?;
        }
        report.end_stage()?;
        Ok(placed.iter().map(|one| one.count as usize * one.chunk as usize).collect())
    }
}

/// How the scratch is shared out.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    /// Chunks, chosen ones, and elements on the wire, of all shards together.
    chunks: usize,
    chosen: usize,
    elements: usize,
    /// Elements in a chunk of each shard. One that has a single chunk needs no more than it has.
    chunk_sizes: Vec<u32>,
}

impl Layout {
    fn new(shards: &[DeviceShard]) -> Result<Layout> {
        let mut layout = Layout { chunks: 0, chosen: 0, elements: 0, chunk_sizes: Vec::new() };
        for shard in shards {
            let size = shard.grid.chunk_len.min(shard.grid.elements).max(1);
            layout.chunk_sizes.push(small(size)?);
            layout.chunks += shard.grid.chunks();
            layout.chosen += shard.count;
            layout.elements += (shard.count * size).next_multiple_of(ALIGNMENT);
        }
        Ok(layout)
    }

    fn place<'a>(
        &self,
        shards: &'a [DeviceShard<'a>],
        scratch: &mut Scratch,
        queue: &DeviceQueue,
        wire: Wire,
    ) -> Result<Vec<ShardLayout<'a>>> {
        let four = size_of::<f32>();
        let mut norms = scratch.norms.fit(queue, self.chunks * four)?;
        let mut gradient_norms = scratch.gradient_norms.fit(queue, self.chunks * four)?;
        let mut slots = scratch.slots.fit(queue, self.chunks * four)?;
        let mut chosen = scratch.chosen.fit(queue, self.chosen * four)?;
        let mut wire_at = scratch.wire.fit(queue, self.elements * wire.element_bytes())?;
        let place = |(shard, chunk): (&'a DeviceShard<'a>, &u32)| {
            let (chunks, count) = (small(shard.grid.chunks())?, small(shard.count)?);
            let chunk = *chunk;
            let placed = ShardLayout {
                shard,
                chunk,
                chunks,
                count,
                norms,
                gradient_norms,
                chosen,
                slots,
                wire: wire_at,
            };
            let each = u64::from(chunks) * four as u64;
            (norms, gradient_norms, slots) = (norms + each, gradient_norms + each, slots + each);
            chosen += u64::from(count) * four as u64;
            let elements = (shard.count * chunk as usize).next_multiple_of(ALIGNMENT);
            wire_at += (elements * wire.element_bytes()) as u64;
            Ok(placed)
        };
        shards.iter().zip(&self.chunk_sizes).map(place).collect()
    }
}

/// A number as kernels take it.
fn small(number: usize) -> Result<u32> {
    u32::try_from(number).map_err(|_| {
        Fault(format!("{number} is too large a number for a kernel: use smaller chunks"))
    })
}
