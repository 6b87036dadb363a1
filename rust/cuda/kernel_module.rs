//! The kernels, loaded for one device, and how each is put on a stream. Their names and shapes are those
//! of `kernels`; here the arguments are lined up as kernels.cu takes them.

use super::compiler::compiled;
use super::context::Context;
use super::device_buffer::DeviceBuffer;
use super::device_slice::DeviceSlice;
use super::driver::checked;
use super::exchange::ShardLayout;
use super::fault::{Fault, Result};
use super::kernels::{self, Float, Kernel, Launch};
use super::stream::Stream;
use crate::codec::{ChunkGrid, Momentum, Wire};
use crate::simd::element::Element;
use cudarc::driver::result::{self, module};
use cudarc::driver::sys::CUfunction;
use std::collections::HashMap;
use std::ffi::c_void;

pub struct KernelModule {
    functions: HashMap<Kernel, CUfunction>,
}

// SAFETY: a function of a module may be launched by any thread. The module is never unloaded.
unsafe impl Send for KernelModule {}
// SAFETY: as above.
unsafe impl Sync for KernelModule {}

/// An argument of a kernel. Pointers to memory of the device are addresses.
enum Argument {
    Address(u64),
    Elements(u64),
    Count(u32),
    Number(f32),
}

impl Argument {
    fn pointer(&self) -> *mut c_void {
        let pointer: *const c_void = match self {
            Address(value) | Elements(value) => std::ptr::from_ref(value).cast(),
            Count(value) => std::ptr::from_ref(value).cast(),
            Number(value) => std::ptr::from_ref(value).cast(),
        };
        pointer.cast_mut()
    }
}

use Argument::{Address, Count, Elements, Number};

impl KernelModule {
    /// Compiles and loads the kernels for a device of this architecture.
    pub fn load(context: &Context, architecture: (u32, u32)) -> Result<KernelModule> {
        let image = compiled(architecture)?;
        let _entered = context.enter()?;
        // SAFETY: the image is a whole CUBIN, as the driver takes it.
        let module = unsafe { module::load_data(image.as_ptr().cast()) };
        let module = checked("cuModuleLoadData", module)?;
        let function = |kernel: Kernel| {
            // SAFETY: the module was just loaded, and stays.
            let function = unsafe { module::get_function(module, kernel.name().to_owned()) };
            Ok((kernel, checked("cuModuleGetFunction", function)?))
        };
        Ok(KernelModule { functions: Kernel::all().map(function).collect::<Result<_>>()? })
    }

    pub(super) fn accumulate(
        &self,
        stream: &Stream,
        placed: &ShardLayout,
        momentum: Option<Momentum>,
        clamp: f32,
    ) -> Result<()> {
        let shard = placed.shard;
        let momentum = momentum.unwrap_or(Momentum { factor: 0.0, nesterov: false });
        let arguments = [
            Address(shard.gradient),
            Address(shard.residual.address()),
            Address(shard.velocity.map_or(0, DeviceBuffer::address)),
            Elements(shard.grid.elements as u64),
            Count(placed.chunk),
            Number(momentum.factor),
            Count(momentum.nesterov.into()),
            Number(clamp),
            Address(placed.norms),
            Address(placed.gradient_norms),
        ];
        let kernel = Kernel::Accumulate(float(shard.element)?);
        self.launch(stream, kernel, kernels::accumulate(placed.grid()), &arguments)
    }

    pub(super) fn select(&self, stream: &Stream, placed: &ShardLayout) -> Result<()> {
        if placed.chunks == 0 {
            return Ok(());
        }
        let arguments = [
            Address(placed.norms),
            Count(placed.chunks),
            Count(placed.count),
            Address(placed.chosen),
            Address(placed.slots),
        ];
        self.launch(stream, Kernel::Select, kernels::select(), &arguments)
    }

    pub(super) fn pack(
        &self,
        stream: &Stream,
        placed: &ShardLayout,
        wire: Wire,
        clamp: f32,
    ) -> Result<()> {
        let shard = placed.shard;
        let arguments = [
            Address(shard.residual.address()),
            Address(shard.velocity.map_or(0, DeviceBuffer::address)),
            Elements(shard.grid.elements as u64),
            Count(placed.chunk),
            Address(placed.norms),
            Address(placed.chosen),
            Count(placed.count),
            Count(shard.clears_velocity.into()),
            Number(clamp),
            Address(placed.wire),
        ];
        let launch = kernels::pack(placed.grid(), shard.count);
        self.launch(stream, Kernel::Pack(wire.into()), launch, &arguments)
    }

    pub(super) fn unpack(
        &self,
        stream: &Stream,
        placed: &ShardLayout,
        wire: Wire,
        keeps_rest: bool,
        clamp: f32,
    ) -> Result<()> {
        let shard = placed.shard;
        let arguments = [
            Address(placed.wire),
            Address(if keeps_rest { shard.residual.address() } else { 0 }),
            Elements(shard.grid.elements as u64),
            Count(placed.chunk),
            Address(placed.norms),
            Address(placed.slots),
            Number(clamp),
            Address(shard.gradient),
        ];
        let kernel = Kernel::Unpack { wire: wire.into(), gradient: float(shard.element)? };
        self.launch(stream, kernel, kernels::unpack(placed.grid()), &arguments)
    }

    pub(super) fn add_velocity(
        &self,
        stream: &Stream,
        gradient: DeviceSlice,
        velocity: &DeviceBuffer,
        momentum: Momentum,
    ) -> Result<()> {
        let arguments = [
            Address(gradient.address),
            Address(velocity.address()),
            Elements(velocity.len() as u64),
            Number(momentum.factor),
            Count(momentum.nesterov.into()),
        ];
        let kernel = Kernel::AddVelocity(float(gradient.element)?);
        self.launch(stream, kernel, kernels::add_velocity(velocity.len()), &arguments)
    }

    pub(super) fn rescale(
        &self,
        stream: &Stream,
        numbers: &DeviceBuffer,
        factor: f32,
    ) -> Result<()> {
        let arguments =
            [Address(numbers.address()), Elements(numbers.len() as u64), Number(factor)];
        self.launch(stream, Kernel::Rescale, kernels::rescale(numbers.len()), &arguments)
    }

    fn launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        launch: Launch,
        arguments: &[Argument],
    ) -> Result<()> {
        if launch.is_empty() {
            return Ok(());
        }
        let _entered = stream.context.enter()?;
        let function = self.functions.get(&kernel);
        let function =
            function.ok_or_else(|| Fault(format!("{kernel:?} is not among the kernels")))?;
        let mut pointers: Vec<_> = arguments.iter().map(Argument::pointer).collect();
        let Launch { grid, block, shared } = launch;
        // SAFETY: the arguments are those that the kernel takes, and are copied before this returns; the
        // memory is the queue's or the exchange's, and is there when the stream gets to it.
        let outcome = unsafe {
            result::launch_kernel(*function, grid, block, shared, stream.handle(), &mut pointers)
        };
        checked("cuLaunchKernel", outcome)
    }
}

fn float(element: Element) -> Result<Float> {
    Float::of(element).ok_or_else(|| Fault(format!("{element:?} is not compressed")))
}

impl ShardLayout<'_> {
    /// How the kernels see its chunks.
    fn grid(&self) -> ChunkGrid {
        ChunkGrid { elements: self.shard.grid.elements, chunk_len: self.chunk as usize }
    }
}
