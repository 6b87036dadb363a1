//! A parcel of blocks: some blocks of the gradients of one exchange, as they travel.
//!
//! The worker encodes blocks that others own and starts the sums of its own. On the way the sums are
//! completed and encoded, and the parcel comes back with the encoded sums of all its blocks.

use super::quantized_shard::QuantizedShard;
use crate::codec::quantizer::{BLOCK, Ownership, Quantizer, Workspace};
use crate::simd::element::Element;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A parcel is full with this many blocks. Larger ones fall out of the cache between two stages and keep
/// the links waiting; smaller ones cost more messages.
pub const FULL_BLOCKS: usize = 512;

/// Adjacent blocks of one shard.
pub struct Segment {
    /// The index of its bucket in the exchange.
    pub bucket: usize,
    pub blocks: Range<usize>,
    /// Elements of the whole shard.
    pub elements: usize,
    pub element: Element,
    /// The sizes of the shard's elements; empty if steps do not follow them.
    pub sizes: Arc<Vec<u16>>,
    /// By owner: the slot of the first of its blocks.
    first_slots: Vec<usize>,
}

impl Segment {
    /// The elements of one of the shard's blocks.
    pub fn elements_of(&self, block: usize) -> Range<usize> {
        block * BLOCK..self.elements.min((block + 1) * BLOCK)
    }

    /// The sizes of some elements.
    pub fn sizes_of(&self, elements: &Range<usize>) -> &[u16] {
        if self.sizes.is_empty() { &[] } else { &self.sizes[elements.clone()] }
    }
}

/// A block of a parcel.
pub struct BlockAt<'a> {
    pub segment: &'a Segment,
    /// Its elements in the shard.
    pub elements: Range<usize>,
    pub owner: usize,
    /// Its index among the blocks of the parcel with the same owner.
    pub slot: usize,
}

pub struct BlockParcel {
    /// Counts the parcels of this rank; the same on all carriers of the shard.
    pub number: u64,
    pub quantizer: Quantizer,
    pub ownership: Ownership,
    pub segments: Vec<Segment>,
    /// By owner: the parcel's blocks that it owns, as this host has encoded them. Empty for this host.
    pub parts: Vec<Arc<Vec<u8>>>,
    /// The sums of the blocks that this host owns; once encoded, what is left of them.
    pub own_sums: Vec<f32>,
    /// By owner: the encoded sums, once they have arrived.
    pub sums: Vec<Arc<Vec<u8>>>,
    /// By owner: how many of the blocks it owns.
    owned: Vec<usize>,
    pub deadline: Instant,
    pub is_last: bool,
}

impl BlockParcel {
    /// An empty parcel, which reuses the memory of `used`.
    pub fn new(
        number: u64,
        quantizer: Quantizer,
        ownership: Ownership,
        deadline: Instant,
        used: Option<BlockParcel>,
    ) -> BlockParcel {
        let hosts = ownership.hosts;
        let (parts, sums, mut own_sums) =
            used.map_or_else(Default::default, |used| (used.parts, used.sums, used.own_sums));
        own_sums.clear();
        BlockParcel {
            number,
            quantizer,
            ownership,
            segments: Vec::new(),
            parts: emptied(parts, hosts),
            own_sums,
            sums: emptied(sums, hosts),
            owned: vec![0; hosts],
            deadline,
            is_last: false,
        }
    }

    pub fn is_full(&self) -> bool {
        self.owned.iter().sum::<usize>() >= FULL_BLOCKS
    }

    /// Marks it as the last one of its exchange.
    pub fn into_last(self) -> BlockParcel {
        BlockParcel { is_last: true, ..self }
    }

    /// Starts a segment with blocks of this shard, from `first` on.
    pub fn add_segment(&mut self, shard: &QuantizedShard, first: usize) {
        self.segments.push(Segment {
            bucket: shard.bucket,
            blocks: first..first,
            elements: shard.residual.len(),
            element: shard.gradient.element(),
            sizes: shard.sizes.clone(),
            first_slots: self.owned.clone(),
        });
    }

    /// Adds the next block of the last segment, which another host owns. Returns its bytes.
    pub fn add_part(&mut self, owner: usize) -> &mut [u8] {
        self.owned[owner] += 1;
        let bytes = self.quantizer.block_bytes();
        let part = Arc::make_mut(&mut self.parts[owner]);
        let start = part.len();
        part.resize(start + bytes, 0);
        &mut part[start..]
    }

    /// Adds the next block of the last segment, which this host owns. Returns its sum.
    pub fn add_own(&mut self) -> &mut [f32] {
        self.owned[self.ownership.host] += 1;
        let start = self.own_sums.len();
        self.own_sums.resize(start + BLOCK, 0.0);
        &mut self.own_sums[start..]
    }

    /// Whether this host owns some of its blocks, and so gets parts from the others.
    pub fn gets_parts(&self) -> bool {
        self.owned[self.ownership.host] > 0
    }

    /// Whether this host owns some of the blocks.
    pub fn is_owner(&self, host: usize) -> bool {
        self.owned[host] > 0
    }

    /// Bytes of a message with the blocks of this owner.
    pub fn bytes_of(&self, owner: usize) -> usize {
        self.owned[owner] * self.quantizer.block_bytes()
    }

    /// The blocks of one of its segments, in the order in which they were added.
    pub fn blocks_of<'a>(
        &self,
        segment: &'a Segment,
    ) -> impl Iterator<Item = BlockAt<'a>> + use<'a> {
        let (ownership, mut slots) = (self.ownership, segment.first_slots.clone());
        segment.blocks.clone().map(move |block| {
            let owner = ownership.owner(block);
            let slot = slots[owner];
            slots[owner] += 1;
            BlockAt { segment, elements: segment.elements_of(block), owner, slot }
        })
    }

    /// Adds what the other hosts sent to the sums of this host's blocks, and encodes them for all.
    /// `parts` has, by host, as many bytes as [`BlockParcel::bytes_of`] this host; none for itself.
    pub fn sum_up(&mut self, parts: &[Vec<u8>], workspace: &mut Workspace) {
        let (host, bytes) = (self.ownership.host, self.quantizer.block_bytes());
        let mut own_sums = std::mem::take(&mut self.own_sums);
        let mut encoded = std::mem::take(&mut self.sums[host]);
        let out = Arc::make_mut(&mut encoded);
        out.resize(self.bytes_of(host), 0);
        let blocks = self.segments.iter().flat_map(|segment| self.blocks_of(segment));
        for block in blocks.filter(|block| block.owner == host) {
            let sizes = block.segment.sizes_of(&block.elements);
            let sum = &mut own_sums[block.slot * BLOCK..][..block.elements.len()];
            let slot = block.slot * bytes..(block.slot + 1) * bytes;
            for part in parts.iter().filter(|part| !part.is_empty()) {
                self.quantizer.add(&part[slot.clone()], sizes, sum, workspace);
            }
            let (element, out) = (block.segment.element, &mut out[slot]);
            self.quantizer.send_sum(sum, element, sizes, out, workspace);
        }
        (self.own_sums, self.sums[host]) = (own_sums, encoded);
    }
}

/// Empty buffers, one for each host, in the memory of used ones that nobody else has.
fn emptied(mut used: Vec<Arc<Vec<u8>>>, hosts: usize) -> Vec<Arc<Vec<u8>>> {
    used.resize_with(hosts, Arc::default);
    for buffer in &mut used {
        match Arc::get_mut(buffer) {
            Some(bytes) => bytes.clear(),
            None => *buffer = Arc::default(),
        }
    }
    used
}
