//! The stages of an exchange that are kernels: each method enqueues one for a shard, with its
//! arguments in the order of kernels.cu.

use super::device_buffer::DeviceBuffer;
use super::device_queue::DeviceQueue;
use super::shard_layout::ShardLayout;
use crate::codec::{Momentum, Wire};
use crate::cuda::kernels::{Argument, Float, Kernel, launch};
use crate::cuda::sys::fault::Result;
use Argument::{Address, F32, U32, U64};

pub(super) struct Stages<'a> {
    pub queue: &'a DeviceQueue,
    pub wire: Wire,
    pub momentum: Option<Momentum>,
    /// Whether this host keeps what a 16-bit gradient cannot represent.
    pub keeps_rest: bool,
    /// See `kernels::norm_limit`.
    pub norm_limit: f32,
}

impl Stages<'_> {
    /// Adds the gradient to the residual, and computes the norm of every chunk.
    pub fn accumulate(&self, layout: &ShardLayout) -> Result<()> {
        let shard = layout.shard;
        let momentum = self.momentum.unwrap_or(Momentum { factor: 0.0, nesterov: false });
        let arguments = [
            Address(shard.gradient.address),
            Address(shard.residual.address()),
            Address(shard.velocity.map_or(0, DeviceBuffer::address)),
            U64(shard.grid.elements as u64),
            U32(layout.chunk),
            F32(momentum.factor),
            U32(momentum.nesterov.into()),
            F32(self.norm_limit),
            Address(layout.norms),
            Address(layout.gradient_norms),
        ];
        let kernel = Kernel::Accumulate(Float::try_of(shard.gradient.element)?);
        self.launch(kernel, launch::accumulate(layout.grid()), &arguments)
    }

    /// Selects the chunks with the largest norms.
    pub fn select(&self, layout: &ShardLayout) -> Result<()> {
        if layout.chunks == 0 {
            return Ok(());
        }
        let arguments = [
            Address(layout.norms),
            U32(layout.chunks),
            U32(layout.count),
            Address(layout.selected),
            Address(layout.slots),
        ];
        self.launch(Kernel::Select, launch::select(), &arguments)
    }

    /// Moves the selected chunks from the residual to the wire.
    pub fn pack(&self, layout: &ShardLayout) -> Result<()> {
        let shard = layout.shard;
        let arguments = [
            Address(shard.residual.address()),
            Address(shard.velocity.map_or(0, DeviceBuffer::address)),
            U64(shard.grid.elements as u64),
            U32(layout.chunk),
            Address(layout.norms),
            Address(layout.selected),
            U32(layout.count),
            U32(shard.clears_velocity.into()),
            F32(self.norm_limit),
            Address(layout.wire),
        ];
        let config = launch::pack(layout.grid(), shard.count);
        self.launch(Kernel::Pack(self.wire.into()), config, &arguments)
    }

    /// Moves the summed chunks from the wire to the gradient.
    pub fn unpack(&self, layout: &ShardLayout) -> Result<()> {
        let shard = layout.shard;
        let arguments = [
            Address(layout.wire),
            Address(if self.keeps_rest { shard.residual.address() } else { 0 }),
            U64(shard.grid.elements as u64),
            U32(layout.chunk),
            Address(layout.norms),
            Address(layout.slots),
            F32(self.norm_limit),
            Address(shard.gradient.address),
        ];
        let gradient = Float::try_of(shard.gradient.element)?;
        let kernel = Kernel::Unpack { wire: self.wire.into(), gradient };
        self.launch(kernel, launch::unpack(layout.grid()), &arguments)
    }

    fn launch(
        &self,
        kernel: Kernel,
        config: launch::LaunchConfig,
        arguments: &[Argument],
    ) -> Result<()> {
        // SAFETY: the methods above pass the arguments of kernels.cu. The memory belongs to the
        // queue or to the exchange, and both outlive what is on the stream.
        unsafe { self.queue.kernels.launch(&self.queue.stream, kernel, config, arguments) }
    }
}
