//! The shard of a bucket that this rank carries between hosts, during one exchange. The methods are the
//! stages of the exchange through host memory, in the order in which they come. Of a shard on a device
//! only its address and sizes are used.

use super::accumulation::ShardSlice;
use super::bucket::HostBuffers;
use super::parcel::{PackedChunk, Parcel};
use crate::codec::{
    ChunkGrid, ExchangeNorms, Gradient, Momentum, Wire, chunks_to_send, fill, pack,
    return_hop_error, return_unpack_error, scale_for, select, unpack,
};
use crate::collective::span::Span;
use crate::simd::element::Element;
use std::ops::Range;

pub struct Shard {
    pub span: Span,
    pub element: Element,
    pub grid: ChunkGrid,
    /// The L1 norm of each chunk: of this rank's, then summed over all hosts.
    pub norms: Vec<f32>,
    /// The chunks that are sent, ascending, and their scales on the wire.
    selected: Vec<u32>,
    scales: Vec<f32>,
    /// How many elements are sent.
    pub sent_elements: usize,
    pub exchange_norms: ExchangeNorms,
}

impl Shard {
    pub fn new(span: Span, element: Element, chunk: usize) -> Shard {
        Shard {
            span,
            element,
            grid: ChunkGrid { elements: span.bytes / element.bytes(), chunk_len: chunk },
            norms: Vec::new(),
            selected: Vec::new(),
            scales: Vec::new(),
            sent_elements: 0,
            exchange_norms: ExchangeNorms::default(),
        }
    }

    pub fn elements(&self) -> usize {
        self.grid.elements
    }

    pub fn bytes(&self) -> usize {
        self.span.bytes
    }

    /// The gradient itself.
    pub fn whole_gradient(&mut self) -> Gradient<'_> {
        let elements = self.elements();
        self.gradient(0..elements)
    }

    /// A copy of some elements of the gradient itself.
    pub fn read(&mut self, elements: Range<usize>) -> Vec<f32> {
        self.gradient(elements).widened()
    }

    /// Some elements of the gradient itself.
    fn gradient(&mut self, elements: Range<usize>) -> Gradient<'_> {
        let each = self.element.bytes();
        // SAFETY: from the agreement until it is handed out, only this rank uses the shard, and the
        // borrow of self keeps it from being borrowed twice.
        let bytes = unsafe { self.span.as_mut_slice() };
        let bytes = &mut bytes[elements.start * each..elements.end * each];
        Gradient::from_bytes(bytes, self.element).expect("only these types are compressed")
    }

    /// Moves the gradient into the residual and computes the norms of the chunks. Leaves zeros in the
    /// gradient, which is the result for chunks that are not sent.
    pub fn accumulate(
        &mut self,
        state: HostBuffers,
        momentum: Option<Momentum>,
        scratch: &mut Vec<f32>,
    ) {
        let chunk = self.grid.chunk_len;
        let slice = ShardSlice {
            gradient: self.whole_gradient(),
            residual: state.residual,
            velocity: momentum.map(|momentum| (state.velocity, momentum)),
            chunk,
        };
        let norms = slice.accumulate(scratch);
        let finite = |norm: f32| if norm.is_finite() { f64::from(norm) } else { 0.0 };
        self.exchange_norms.gradient = norms.iter().map(|norms| finite(norms.gradient)).sum();
        self.exchange_norms.unsent = norms.iter().map(|norms| finite(norms.residual)).sum();
        self.norms = norms.into_iter().map(|norms| norms.residual).collect();
    }

    /// Selects the chunks to send, from the norms over all hosts. `own` are this rank's norms.
    pub fn select(&mut self, density: f64, wire: Wire, own: &[f32]) {
        select(&self.norms, chunks_to_send(self.grid.chunks(), density), &mut self.selected);
        // Chunks with infinity or NaN are not sent: all ranks know of them by now.
        self.selected.retain(|index| self.norms[*index as usize].is_finite());
        self.scales = self
            .selected
            .iter()
            .map(|index| scale_for(self.norms[*index as usize], wire))
            .collect();
        let elements = |index: &u32| self.grid.range(*index as usize).len();
        self.sent_elements = self.selected.iter().map(elements).sum();
        let sent: f64 = self.selected.iter().map(|index| f64::from(own[*index as usize])).sum();
        self.exchange_norms.unsent = (self.exchange_norms.unsent - sent).max(0.0);
    }

    /// The selected chunks: the elements of each in the shard, and its scale.
    pub fn selected(&self) -> impl Iterator<Item = (Range<usize>, f32)> {
        let range = |index: &u32| self.grid.range(*index as usize);
        self.selected.iter().map(range).zip(self.scales.iter().copied())
    }

    /// Packs a selected chunk. The residual keeps what the cast rounds off. If `clears`, the velocity of
    /// the chunk starts again from zero: it has had its effect, and its direction is out of date.
    pub fn pack(
        state: &mut HostBuffers,
        wire: Wire,
        chunk: &PackedChunk,
        clears: bool,
        out: &mut [u8],
    ) {
        pack(&mut state.residual[chunk.in_shard.clone()], chunk.scale, wire, out);
        let velocity = state.velocity.get_mut(chunk.in_shard.clone());
        if let Some(velocity) = velocity.filter(|_| clears) {
            velocity.fill(0.0);
        }
    }

    /// Makes a chunk that is infinite or NaN on any host so on all.
    pub fn spread_poison(&mut self) {
        for index in 0..self.grid.chunks() {
            let norm = self.norms[index];
            if !norm.is_finite() {
                fill(&mut self.gradient(self.grid.range(index)), norm);
            }
        }
    }

    /// Puts the sum of a chunk into the gradient, and what this rank rounded off back into the residual;
    /// on the first host also what the gradient's own type cannot express.
    pub fn unpack(
        &mut self,
        state: HostBuffers,
        wire: Wire,
        chunk: &PackedChunk,
        parcel: &mut Parcel,
        is_first_host: bool,
    ) {
        let residual = &mut state.residual[chunk.in_shard.clone()];
        for (elements, rounded_off) in parcel.rounded_off(chunk) {
            return_hop_error(&mut residual[elements], rounded_off, chunk.scale);
        }
        let sum = parcel.bytes_of(chunk.in_parcel.clone());
        let mut gradient = self.gradient(chunk.in_shard.clone());
        unpack(sum, wire, chunk.scale, &mut gradient);
        return_unpack_error(
            sum,
            wire,
            chunk.scale,
            &mut gradient,
            is_first_host.then_some(residual),
        );
    }
}
