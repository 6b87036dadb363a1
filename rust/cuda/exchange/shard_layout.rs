//! The shards of an exchange, and where in the scratch memory each has its norms, its selection and
//! its elements on the wire.

use super::device_buffer::DeviceBuffer;
use super::device_queue::DeviceQueue;
use super::scratch::Scratch;
use crate::codec::{ChunkGrid, Wire};
use crate::cuda::safe::memory::DeviceSlice;
use crate::cuda::sys::fault::{Fault, Result};

/// The shard of a gradient bucket that this rank carries, on the device.
pub struct DeviceShard<'a> {
    /// Replaced by the result.
    pub gradient: DeviceSlice,
    pub grid: ChunkGrid,
    /// How many of its chunks are sent.
    pub count: usize,
    pub residual: &'a DeviceBuffer,
    /// Only with momentum.
    pub velocity: Option<&'a DeviceBuffer>,
    /// Whether sending a chunk clears its velocity.
    pub clears_velocity: bool,
}

/// A shard with its part of the scratch memory.
pub(super) struct ShardLayout<'a> {
    pub shard: &'a DeviceShard<'a>,
    /// Elements per chunk.
    pub chunk: u32,
    pub chunks: u32,
    /// How many chunks are sent.
    pub count: u32,
    /// Device addresses. One f32 per chunk: the norms of what could be sent, and of the gradient.
    pub norms: u64,
    pub gradient_norms: u64,
    /// The indices of the selected chunks, and for every chunk its slot on the wire.
    pub selected: u64,
    pub slots: u64,
    pub wire: u64,
}

impl ShardLayout<'_> {
    /// The grid as the kernels see it.
    pub fn grid(&self) -> ChunkGrid {
        ChunkGrid { elements: self.shard.grid.elements, chunk_len: self.chunk as usize }
    }
}

/// Alignment of a shard on the wire, in elements: enough for the widest access of a kernel.
const ALIGNMENT: usize = 64;

/// How much scratch memory an exchange needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ScratchLayout {
    /// Totals over all shards: chunks, selected chunks, elements on the wire.
    pub chunks: usize,
    pub selected: usize,
    pub elements: usize,
    /// Elements per chunk, by shard. A shard of a single chunk has no padding.
    chunk_sizes: Vec<u32>,
}

impl ScratchLayout {
    pub fn new(shards: &[DeviceShard]) -> Result<ScratchLayout> {
        let mut layout =
            ScratchLayout { chunks: 0, selected: 0, elements: 0, chunk_sizes: Vec::new() };
        for shard in shards {
            let size = shard.grid.chunk_len.min(shard.grid.elements).max(1);
            layout.chunk_sizes.push(to_u32(size)?);
            layout.chunks += shard.grid.chunks();
            layout.selected += shard.count;
            layout.elements += (shard.count * size).next_multiple_of(ALIGNMENT);
        }
        Ok(layout)
    }

    /// Grows the scratch memory as needed, and assigns each shard its part.
    pub fn assign<'a>(
        &self,
        shards: &'a [DeviceShard<'a>],
        scratch: &mut Scratch,
        queue: &DeviceQueue,
        wire: Wire,
    ) -> Result<Vec<ShardLayout<'a>>> {
        let word = size_of::<f32>();
        let mut norms = scratch.norms.fit(queue, self.chunks * word)?;
        let mut gradient_norms = scratch.gradient_norms.fit(queue, self.chunks * word)?;
        let mut slots = scratch.slots.fit(queue, self.chunks * word)?;
        let mut selected = scratch.selected.fit(queue, self.selected * word)?;
        let mut wire_at = scratch.wire.fit(queue, self.elements * wire.element_bytes())?;
        let assign = |(shard, chunk): (&'a DeviceShard<'a>, &u32)| {
            let (chunks, count) = (to_u32(shard.grid.chunks())?, to_u32(shard.count)?);
            let chunk = *chunk;
            let layout = ShardLayout {
                shard,
                chunk,
                chunks,
                count,
                norms,
                gradient_norms,
                selected,
                slots,
                wire: wire_at,
            };
            let bytes = u64::from(chunks) * word as u64;
            (norms, gradient_norms, slots) = (norms + bytes, gradient_norms + bytes, slots + bytes);
            selected += u64::from(count) * word as u64;
            let elements = (shard.count * chunk as usize).next_multiple_of(ALIGNMENT);
            wire_at += (elements * wire.element_bytes()) as u64;
            Ok(layout)
        };
        shards.iter().zip(&self.chunk_sizes).map(assign).collect()
    }
}

/// Kernels count with 32 bits.
fn to_u32(number: usize) -> Result<u32> {
    u32::try_from(number).map_err(|_| {
        Fault(format!("{number} is too large a number for a kernel: use smaller chunks"))
    })
}
