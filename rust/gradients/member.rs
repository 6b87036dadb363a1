//! A member of a fused exchange: one gradient bucket on its way, from the agreement of the ranks
//! until it is delivered. Each method is one stage of the way, in the order in which they come.

use super::accumulation::Stretch;
use super::bucket::Bucket;
use super::parcel::{Load, Parcel};
use super::tensor::Tensor;
use crate::codec::{
    ChunkGrid, ExchangeNorms, Gradient, Momentum, Wire, chunks_to_send, fill, pack,
    return_hop_error, return_unpack_error, scale_for, select, unpack,
};
use crate::collective::agreement::{Agreed, AgreedBucket};
use crate::collective::span::Span;
use crate::engine::queue::Job;
use crate::simd::element::Element;
use std::ops::Range;

pub struct Member {
    pub job: Job,
    pub agreed: Agreed,
    pub bucket: AgreedBucket,
    pub density: f64,
    pub tensor: Tensor,
    /// What this rank carries of the tensor, if it carries anything.
    pub shard: Option<Shard>,
}

/// The part of a bucket that this rank carries between hosts. Of one on a device only the place and the
/// sizes are known here.
pub struct Shard {
    pub span: Span,
    pub element: Element,
    pub grid: ChunkGrid,
    /// By chunk: the L1 norm of what could be sent, of this rank, then of all hosts.
    pub norms: Vec<f32>,
    /// The chunks that are sent, ascending, and by what they are multiplied on the wire.
    chosen: Vec<u32>,
    scales: Vec<f32>,
    /// How many elements it sends.
    pub sent_elements: usize,
    pub weight: ExchangeNorms,
}

impl Shard {
    pub fn new(span: Span, element: Element, chunk: usize) -> Shard {
        Shard {
            span,
            element,
            grid: ChunkGrid { elements: span.bytes / element.bytes(), chunk_len: chunk },
            norms: Vec::new(),
            chosen: Vec::new(),
            scales: Vec::new(),
            sent_elements: 0,
            weight: ExchangeNorms::default(),
        }
    }

    pub fn elements(&self) -> usize {
        self.grid.elements
    }

    pub fn bytes(&self) -> usize {
        self.span.bytes
    }

    /// The gradient itself, of a range of elements.
    fn gradient(&mut self, elements: Range<usize>) -> Gradient<'_> {
        let each = self.element.bytes();
        let part = self.span.part(elements.start * each..elements.end * each);
        // SAFETY: from the agreement until it is handed out, the shard is this rank's alone, and
        // the borrow of self keeps it from being borrowed twice.
        let bytes = unsafe { part.as_slice() };
        Gradient::from_bytes(bytes, self.element).expect("only such are compressed")
    }

    /// Moves the gradient to what was not sent before, and takes the norms of the chunks. What is
    /// left is zeros: that is what comes back of chunks that are not sent. The bucket has room for it.
    pub fn accumulate(
        &mut self,
        bucket: &mut Bucket,
        momentum: Option<Momentum>,
        room: &mut Vec<f32>,
    ) {
        let (chunk, elements) = (self.grid.chunk_len, self.elements());
        let stretch = Stretch {
            gradient: self.gradient(0..elements),
            residual: bucket.residual.on_host(),
            velocity: momentum.map(|momentum| (bucket.velocity.on_host(), momentum)),
            chunk,
        };
        let norms = stretch.accumulate(room);
        let finite = |norm: f32| if norm.is_finite() { f64::from(norm) } else { 0.0 };
        self.weight.gradient = norms.iter().map(|norms| finite(norms.gradient)).sum();
        self.weight.unsent = norms.iter().map(|norms| finite(norms.residual)).sum();
        self.norms = norms.into_iter().map(|norms| norms.residual).collect();
    }

    /// Chooses, from the norms of all hosts, what is sent. `own` are this rank's norms.
    pub fn choose(&mut self, density: f64, wire: Wire, own: &[f32]) {
        select(&self.norms, chunks_to_send(self.grid.chunks(), density), &mut self.chosen);
        // What is not finite goes nowhere: all ranks know of it by now.
        self.chosen.retain(|index| self.norms[*index as usize].is_finite());
        self.scales =
            self.chosen.iter().map(|index| scale_for(self.norms[*index as usize], wire)).collect();
        let elements = |index: &u32| self.grid.range(*index as usize).len();
        self.sent_elements = self.chosen.iter().map(elements).sum();
        let sent: f64 = self.chosen.iter().map(|index| f64::from(own[*index as usize])).sum();
        self.weight.unsent = (self.weight.unsent - sent).max(0.0);
    }

    /// The chosen chunks: where each is in the shard, and its scale.
    pub fn chosen(&self) -> impl Iterator<Item = (Range<usize>, f32)> {
        let range = |index: &u32| self.grid.range(*index as usize);
        self.chosen.iter().map(range).zip(self.scales.iter().copied())
    }

    /// Packs a chosen chunk; what the cast rounds off stays. If it `clears` the velocity, that has
    /// had its effect, and would push on in a direction that is old by then.
    pub fn pack(bucket: &mut Bucket, wire: Wire, load: &Load, clears: bool, out: &mut [u8]) {
        pack(&mut bucket.residual.on_host()[load.range.clone()], load.scale, wire, out);
        let velocity = bucket.velocity.on_host().get_mut(load.range.clone());
        if let Some(velocity) = velocity.filter(|_| clears) {
            velocity.fill(0.0);
        }
    }

    /// What is not finite on any host comes back as not finite on all.
    pub fn spread_poison(&mut self) {
        for index in 0..self.grid.chunks() {
            let norm = self.norms[index];
            if !norm.is_finite() {
                fill(&mut self.gradient(self.grid.range(index)), norm);
            }
        }
    }

    /// Puts the sum of a chunk into the gradient, and what this rank rounded off back to what is
    /// yet to be sent; on the first host also what the gradient itself cannot express.
    pub fn unpack(
        &mut self,
        bucket: &mut Bucket,
        wire: Wire,
        load: &Load,
        parcel: &mut Parcel,
        is_first_host: bool,
    ) {
        let residual = &mut bucket.residual.on_host()[load.range.clone()];
        for (elements, rounded_off) in parcel.rounded_off(load) {
            return_hop_error(&mut residual[elements], rounded_off, load.scale);
        }
        let sum = parcel.part(load.place.clone());
        let mut gradient = self.gradient(load.range.clone());
        unpack(sum, wire, load.scale, &mut gradient);
        return_unpack_error(
            sum,
            wire,
            load.scale,
            &mut gradient,
            is_first_host.then_some(residual),
        );
    }
}

/// Whether a bucket of such elements is compressed at all; else it is always exchanged exactly.
pub fn can_be_compressed(element: Element) -> bool {
    matches!(element, Element::F32 | Element::F16 | Element::BF16)
}
