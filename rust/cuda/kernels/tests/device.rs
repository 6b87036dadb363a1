//! The kernels, called as the exchange calls them.

use super::host_kernels::{HostArgument, HostKernels};
use super::memory::{Guarded, Typed};
use crate::codec::{ChunkGrid, Momentum, Wire};
use crate::cuda::kernels::launch::{self, LaunchConfig};
use crate::cuda::kernels::{Float, Kernel};
use crate::simd::element::Element;
use std::ffi::c_void;

fn null() -> HostArgument {
    HostArgument::Pointer(std::ptr::null_mut::<c_void>())
}

pub(super) fn run(kernel: Kernel, config: LaunchConfig, arguments: &[HostArgument]) {
    if !config.is_empty() {
        // SAFETY: the tests give every kernel memory of the sizes they pass to it.
        unsafe { HostKernels::get().launch(kernel, config, arguments) };
    }
}

pub(super) fn float(element: Element) -> Float {
    Float::of(element).expect("an element that is compressed")
}

/// The gradient and state of one host, on which the kernels run.
#[derive(Debug, Clone)]
pub(super) struct Device {
    pub(super) grid: ChunkGrid,
    pub(super) element: Element,
    pub(super) gradient: Typed,
    pub(super) residual: Guarded<f32>,
    pub(super) velocity: Guarded<f32>,
    pub(super) momentum: Option<Momentum>,
    pub(super) clears_velocity: bool,
    pub(super) clamp: f32,
}

impl Device {
    fn chunk(&self) -> HostArgument {
        HostArgument::Unsigned(self.grid.chunk_len as u32)
    }

    pub(super) fn elements(&self) -> HostArgument {
        HostArgument::Long(self.grid.elements as u64)
    }

    /// Returns the norms of residual and gradient.
    pub(super) fn accumulate(&mut self) -> (Vec<f32>, Vec<f32>) {
        let blank = vec![-7.0; self.grid.chunks()];
        let (mut norms, mut gradient_norms) =
            (Guarded::new(&blank, 77.0, 0), Guarded::new(&blank, 77.0, 1));
        let momentum = self.momentum.unwrap_or(Momentum { factor: 0.0, nesterov: false });
        let arguments = [
            self.gradient.pointer(),
            self.residual.pointer(),
            if self.momentum.is_some() { self.velocity.pointer() } else { null() },
            self.elements(),
            self.chunk(),
            HostArgument::Float(momentum.factor),
            HostArgument::Unsigned(momentum.nesterov.into()),
            HostArgument::Float(self.clamp),
            norms.pointer(),
            gradient_norms.pointer(),
        ];
        let kernel = Kernel::Accumulate(float(self.element));
        run(kernel, launch::accumulate(self.grid), &arguments);
        (norms.content().to_vec(), gradient_norms.content().to_vec())
    }

    /// Returns the bytes on the wire, with a slot for each selected chunk.
    pub(super) fn pack(
        &mut self,
        sums: &[f32],
        selected: &[u32],
        wire: Wire,
        offset: usize,
    ) -> Vec<u8> {
        let each = wire.element_bytes();
        let blank = vec![0xa5; selected.len() * self.grid.chunk_len * each];
        // The offset is in elements, the margin in bytes.
        let mut out = Guarded::new(&blank, 0x5a, offset * each);
        let (mut sums, mut selected) = (sums.to_vec(), selected.to_vec());
        let arguments = [
            self.residual.pointer(),
            if self.momentum.is_some() { self.velocity.pointer() } else { null() },
            self.elements(),
            self.chunk(),
            HostArgument::of(&mut sums),
            HostArgument::of(&mut selected),
            HostArgument::Unsigned(selected.len() as u32),
            HostArgument::Unsigned(self.clears_velocity.into()),
            HostArgument::Float(self.clamp),
            out.pointer(),
        ];
        run(Kernel::Pack(wire.into()), launch::pack(self.grid, selected.len()), &arguments);
        out.content().to_vec()
    }

    pub(super) fn unpack(
        &mut self,
        sums: &[f32],
        slots: &[u32],
        wire: Wire,
        bytes: &[u8],
        keeps_rest: bool,
    ) {
        let (mut sums, mut slots) = (sums.to_vec(), slots.to_vec());
        let mut wire_memory = Guarded::new(bytes, 0x5a, 0);
        let arguments = [
            wire_memory.pointer(),
            if keeps_rest { self.residual.pointer() } else { null() },
            self.elements(),
            self.chunk(),
            HostArgument::of(&mut sums),
            HostArgument::of(&mut slots),
            HostArgument::Float(self.clamp),
            self.gradient.pointer(),
        ];
        let kernel = Kernel::Unpack { wire: wire.into(), gradient: float(self.element) };
        run(kernel, launch::unpack(self.grid), &arguments);
        assert_eq!(wire_memory.content(), bytes, "the wire is read-only");
    }
}

/// Returns the selected chunks, and the slot of every chunk.
pub(super) fn select_on_device(sums: &[f32], count: usize) -> (Vec<u32>, Vec<u32>) {
    let mut selected = Guarded::new(&vec![7; count.min(sums.len())], 0xa5a5, 0);
    let mut slots = Guarded::new(&vec![7; sums.len()], 0xa5a5, 0);
    let mut sums = sums.to_vec();
    let arguments = [
        HostArgument::of(&mut sums),
        HostArgument::Unsigned(sums.len() as u32),
        HostArgument::Unsigned(count as u32),
        selected.pointer(),
        slots.pointer(),
    ];
    run(Kernel::Select, launch::select(), &arguments);
    (selected.content().to_vec(), slots.content().to_vec())
}
