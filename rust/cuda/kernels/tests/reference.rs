//! The same stages by `codec`, on the CPU.

use super::device::Device;
use crate::codec::samples::{OwnedGradient, exact_bits};
use crate::codec::{
    ChunkGrid, Momentum, Wire, accumulate, fill, pack, return_unpack_error, scale_for, unpack,
};
use crate::cuda::kernels::NOT_SELECTED;

/// The gradient and state of one host, on which `codec` runs.
#[derive(Debug, Clone)]
pub(super) struct Host {
    grid: ChunkGrid,
    pub(super) gradient: OwnedGradient,
    residual: Vec<f32>,
    pub(super) velocity: Vec<f32>,
    momentum: Option<Momentum>,
    clears_velocity: bool,
    clamp: f32,
}

impl Host {
    pub(super) fn of(device: &Device) -> Host {
        Host {
            grid: device.grid,
            gradient: device.gradient.owned(),
            residual: device.residual.content().to_vec(),
            velocity: device.velocity.content().to_vec(),
            momentum: device.momentum,
            clears_velocity: device.clears_velocity,
            clamp: device.clamp,
        }
    }

    pub(super) fn accumulate(&mut self) -> (Vec<f32>, Vec<f32>) {
        let mut scratch = vec![0.0; 2 * self.grid.chunk_len];
        let mut both = (Vec::new(), Vec::new());
        for range in (0..self.grid.chunks()).map(|index| self.grid.range(index)) {
            let velocity = &mut self.velocity[range.clone()];
            let momentum = self.momentum.map(|momentum| (velocity, momentum));
            let residual = &mut self.residual[range.clone()];
            let mut whole = self.gradient.borrow();
            let mut part = whole.part(range);
            let norms = accumulate(&mut part, residual, momentum, &mut scratch);
            // The kernel clears poisoned chunks too; `codec` leaves that to its caller.
            fill(&mut part, 0.0);
            let is_finite = norms.residual.is_finite();
            both.0.push(if is_finite { norms.residual.min(self.clamp) } else { norms.residual });
            both.1.push(norms.gradient);
        }
        both
    }

    /// As `scale_for`, except for sums that were capped.
    fn scale(&self, sum: f32, wire: Wire) -> f32 {
        let is_capped = sum.is_finite() && sum >= self.clamp;
        scale_for(if is_capped { f32::MAX } else { sum }, wire)
    }

    pub(super) fn pack(&mut self, sums: &[f32], selected: &[u32], wire: Wire) -> Vec<u8> {
        let slot_bytes = self.grid.chunk_len * wire.element_bytes();
        let mut out = vec![0; selected.len() * slot_bytes];
        for (chunk, slot) in selected.iter().zip(out.chunks_mut(slot_bytes.max(1))) {
            let (range, sum) = (self.grid.range(*chunk as usize), sums[*chunk as usize]);
            if sum.is_finite() {
                let scale = self.scale(sum, wire);
                let slot = &mut slot[..range.len() * wire.element_bytes()];
                pack(&mut self.residual[range.clone()], scale, wire, slot);
                if self.momentum.is_some() && self.clears_velocity {
                    self.velocity[range].fill(0.0);
                }
            }
        }
        out
    }

    pub(super) fn unpack(
        &mut self,
        sums: &[f32],
        slots: &[u32],
        wire: Wire,
        bytes: &[u8],
        keeps_rest: bool,
    ) {
        let slot_bytes = self.grid.chunk_len * wire.element_bytes();
        for (index, (sum, slot)) in sums.iter().zip(slots).enumerate() {
            let (range, scale) = (self.grid.range(index), self.scale(*sum, wire));
            let mut whole = self.gradient.borrow();
            let mut part = whole.part(range.clone());
            if !sum.is_finite() {
                fill(&mut part, *sum);
            } else if *slot != NOT_SELECTED {
                let start = *slot as usize * slot_bytes;
                let bytes = &bytes[start..start + range.len() * wire.element_bytes()];
                unpack(bytes, wire, scale, &mut part);
                let residual = keeps_rest.then(|| &mut self.residual[range]);
                return_unpack_error(bytes, wire, scale, &mut part, residual);
            }
        }
    }

    pub(super) fn assert_equals(&self, device: &Device, when: &str) {
        assert_eq!(device.gradient.owned().bits(), self.gradient.bits(), "gradient {when}");
        let residual = device.residual.content();
        assert_eq!(exact_bits(residual), exact_bits(&self.residual), "residual {when}");
        let velocity = device.velocity.content();
        assert_eq!(exact_bits(velocity), exact_bits(&self.velocity), "velocity {when}");
    }
}
