//! The compiled kernels, loaded on one device.

use super::compile::compiled;
use super::kernel::Kernel;
use super::launch::LaunchConfig;
use crate::cuda::safe::context::Context;
use crate::cuda::safe::stream::Stream;
use crate::cuda::sys::driver::check;
use crate::cuda::sys::fault::{Fault, Result};
use cudarc::driver::result::{self, module};
use cudarc::driver::sys::CUfunction;
use std::collections::HashMap;
use std::ffi::c_void;

pub struct KernelModule {
    functions: HashMap<Kernel, CUfunction>,
}

// SAFETY: any thread may launch a function of a module. The module is never unloaded.
unsafe impl Send for KernelModule {}
// SAFETY: as above.
unsafe impl Sync for KernelModule {}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Argument {
    /// A pointer to device memory.
    Address(u64),
    U64(u64),
    U32(u32),
    F32(f32),
}

impl Argument {
    fn pointer(&self) -> *mut c_void {
        let pointer: *const c_void = match self {
            Argument::Address(value) | Argument::U64(value) => std::ptr::from_ref(value).cast(),
            Argument::U32(value) => std::ptr::from_ref(value).cast(),
            Argument::F32(value) => std::ptr::from_ref(value).cast(),
        };
        pointer.cast_mut()
    }
}

impl KernelModule {
    /// Compiles the kernels for a device of this compute capability, or takes them from the cache,
    /// and loads them.
    pub fn load(context: &Context, compute_capability: (u32, u32)) -> Result<KernelModule> {
        let image = compiled(compute_capability)?;
        let _guard = context.enter()?;
        // SAFETY: the image is a complete CUBIN.
        let module = unsafe { module::load_data(image.as_ptr().cast()) };
        let module = check("cuModuleLoadData", module)?;
        let function = |kernel: Kernel| {
            // SAFETY: the module was just loaded, and is never unloaded.
            let function = unsafe { module::get_function(module, kernel.name().to_owned()) };
            Ok((kernel, check("cuModuleGetFunction", function)?))
        };
        Ok(KernelModule { functions: Kernel::all().map(function).collect::<Result<_>>()? })
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes in its source, and its memory is of the
    /// stream's device and valid when the stream gets there.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        config: LaunchConfig,
        arguments: &[Argument],
    ) -> Result<()> {
        if config.is_empty() {
            return Ok(());
        }
        let _guard = stream.context.enter()?;
        let function = self.functions.get(&kernel);
        let function =
            function.ok_or_else(|| Fault(format!("{kernel:?} is not among the kernels")))?;
        let mut pointers: Vec<_> = arguments.iter().map(Argument::pointer).collect();
        let LaunchConfig { grid, block, shared } = config;
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        let outcome = unsafe {
            result::launch_kernel(*function, grid, block, shared, stream.handle(), &mut pointers)
        };
        check("cuLaunchKernel", outcome)
    }
}
