//! The worker's part of an exchange in two legs: encodes the shards of some buckets into parcels, and
//! decodes what comes back.

use super::parcel::{BlockParcel, Segment};
use super::quantized_shard::QuantizedShard;
use crate::codec::quantizer::{BLOCK, Content, Ownership, Quantizer, Workspace};
use crate::codec::{ExchangeNorms, Gradient};
use crate::gradients::courier::Courier;
use crate::transport::Failure;
use std::time::Instant;

/// Norms are taken of one block in this many, if another host owns it: they are for the metrics only. Odd,
/// so that in time every host samples blocks that others own; a small shard may have none.
const SAMPLED: usize = 61;

/// The stages in host memory, with what they reuse.
pub struct TwoLegs {
    pub courier: Courier<BlockParcel>,
    ownership: Ownership,
    next_number: u64,
    spare: Vec<BlockParcel>,
    workspace: Workspace,
}

impl TwoLegs {
    /// `hosts` hosts, of which this one has index `host`.
    pub fn new(courier: Courier<BlockParcel>, hosts: usize, host: usize) -> TwoLegs {
        TwoLegs {
            courier,
            ownership: Ownership { hosts, host },
            next_number: 0,
            spare: Vec::new(),
            workspace: Workspace::default(),
        }
    }

    /// Starts an exchange: shards are added to the sending one after the other.
    pub fn start(&mut self, quantizer: Quantizer, deadline: Instant) -> Sending<'_> {
        let parcel = self.empty_parcel(quantizer, deadline);
        Sending { two_legs: self, parcel }
    }

    /// Adds a block to the last segment of a parcel.
    fn encode(
        &mut self,
        parcel: &mut BlockParcel,
        shard: &mut QuantizedShard,
        block: usize,
        sampled: Option<&mut ExchangeNorms>,
    ) {
        let Some(segment) = parcel.segments.last_mut() else { return };
        segment.blocks.end = block + 1;
        let elements = segment.elements_of(block);
        let sizes = match shard.sizes.is_empty() {
            true => &[][..],
            false => &shard.sizes[elements.clone()],
        };
        let gradient = shard.gradient.part(elements.clone());
        let residual = &mut shard.residual[elements.clone()];
        let (owner, quantizer) = (self.ownership.owner(block), parcel.quantizer);
        if owner == self.ownership.host {
            let sum = &mut parcel.add_own()[..elements.len()];
            quantizer.start_sum(&gradient, residual, sum);
        } else {
            let out = parcel.add_part(owner);
            quantizer.send(&gradient, residual, sizes, out, &mut self.workspace);
        }
        if let Some(sampled) = sampled {
            sampled.gradient += gradient.l1_norm();
            sampled.unsent += Gradient::F32(residual).l1_norm();
        }
    }

    /// Decodes the sums of one segment of a parcel into the gradient of its shard, and keeps what is
    /// left of them.
    pub fn deliver(&mut self, parcel: &BlockParcel, segment: &Segment, shard: &mut QuantizedShard) {
        let (quantizer, bytes) = (parcel.quantizer, parcel.quantizer.block_bytes());
        for block in parcel.blocks_of(segment) {
            let sizes = segment.sizes_of(&block.elements);
            let mut gradient = shard.gradient.part(block.elements.clone());
            let residual = &mut shard.residual[block.elements.clone()];
            let slot = block.slot * bytes..(block.slot + 1) * bytes;
            let sum = &parcel.sums[block.owner][slot.clone()];
            let is_own = block.owner == self.ownership.host;
            match (quantizer.content(sum), is_own) {
                (Content::Numbers, true) => {
                    let left = &parcel.own_sums[block.slot * BLOCK..][..residual.len()];
                    residual.copy_from_slice(left);
                }
                (Content::Poisoned, false) => {
                    let sent = &parcel.parts[block.owner][slot];
                    quantizer.take_back(sent, sizes, &gradient, residual, &mut self.workspace);
                }
                // What other hosts own was kept when it was sent; a poisoned sum leaves nothing.
                (Content::Numbers, false) | (Content::Poisoned, true) => {}
            }
            quantizer.deliver(sum, sizes, &mut gradient, &mut self.workspace);
        }
    }

    /// Takes a parcel that is not needed any more, to reuse its memory.
    pub fn put_back(&mut self, mut parcel: BlockParcel) {
        parcel.segments.clear();
        self.spare.push(parcel);
    }

    fn empty_parcel(&mut self, quantizer: Quantizer, deadline: Instant) -> BlockParcel {
        let number = self.next_number;
        self.next_number += 1;
        BlockParcel::new(number, quantizer, self.ownership, deadline, self.spare.pop())
    }
}

/// An exchange that is being sent off.
pub struct Sending<'a> {
    two_legs: &'a mut TwoLegs,
    /// The parcel that is not full yet.
    parcel: BlockParcel,
}

impl Sending<'_> {
    /// Encodes a shard into parcels, and sends each off when it is full. Returns norms of a sample.
    pub fn add(&mut self, shard: &mut QuantizedShard) -> Result<ExchangeNorms, Failure> {
        let Sending { two_legs, parcel } = self;
        let mut sampled = ExchangeNorms::default();
        let blocks = shard.residual.len().div_ceil(BLOCK);
        let mut next = 0;
        while next < blocks {
            if parcel.is_full() {
                let empty = two_legs.empty_parcel(parcel.quantizer, parcel.deadline);
                two_legs.courier.send(std::mem::replace(parcel, empty))?;
            }
            parcel.add_segment(shard, next);
            while next < blocks && !parcel.is_full() {
                let is_own = two_legs.ownership.owner(next) == two_legs.ownership.host;
                let is_sampled = next.is_multiple_of(SAMPLED) && !is_own;
                two_legs.encode(parcel, shard, next, is_sampled.then_some(&mut sampled));
                next += 1;
            }
        }
        Ok(sampled)
    }

    /// Sends off the last parcel. Even if it is empty: an exchange ends with its last parcel.
    pub fn finish(self) -> Result<(), Failure> {
        self.two_legs.courier.send(self.parcel.into_last())
    }
}
