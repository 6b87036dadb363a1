//! Device memory: [`DeviceMemory`], owned by gflow, and [`DeviceSlice`], owned elsewhere.
//!
//! Owned memory is allocated and freed in the order of the one stream that
//! uses it, so neither waits for the device, not even for one that hangs.

use super::stream::Stream;
use crate::cuda::sys::driver::check;
use crate::cuda::sys::fault::{Fault, Result};
use crate::simd::element::Element;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use std::sync::Arc;

/// A typed range of device memory that is owned elsewhere. It is an address, not a borrow:
/// enqueueing work on one is `unsafe`, because the memory has to outlive that work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    pub address: u64,
    pub element: Element,
    /// In elements, not bytes.
    pub count: usize,
}

#[derive(Debug)]
pub struct DeviceMemory {
    stream: Arc<Stream>,
    address: CUdeviceptr,
    bytes: usize,
    has_memory_pools: bool,
}

impl DeviceMemory {
    /// Allocates uninitialised memory. Without memory pools this waits for the device.
    pub fn new(stream: &Arc<Stream>, bytes: usize, has_memory_pools: bool) -> Result<DeviceMemory> {
        let _guard = stream.context.enter()?;
        let address = if bytes == 0 {
            0
        } else if has_memory_pools {
            // SAFETY: nothing reads it before it is written, on this stream.
            let allocated = unsafe { result::malloc_async(stream.handle(), bytes) };
            check_allocation("cuMemAllocAsync", bytes, allocated)?
        } else {
            // SAFETY: as above.
            check_allocation("cuMemAlloc", bytes, unsafe { result::malloc_sync(bytes) })?
        };
        Ok(DeviceMemory { stream: stream.clone(), address, bytes, has_memory_pools })
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The outcome of an allocation; out-of-memory errors say what to do about it.
fn check_allocation<T>(
    call: &str,
    bytes: usize,
    allocated: std::result::Result<T, DriverError>,
) -> Result<T> {
    let is_full = matches!(allocated, Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)));
    check(call, allocated).map_err(|fault| match is_full {
        true => Fault(format!(
            "{fault}. gflow needs {bytes} bytes more on the GPU. torch keeps what its tensors have \
             freed: call torch.cuda.empty_cache() before the first step, let \
             PYTORCH_CUDA_ALLOC_CONF limit what it keeps, or use smaller batches. GFLOW_COMPRESS=off \
             does without this memory"
        )),
        false => fault,
    })
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let Ok(_guard) = self.stream.context.enter() else { return };
        // Ignore failures: a device that has failed frees nothing before the process ends.
        if self.has_memory_pools {
            // SAFETY: we enqueue nothing more that uses this memory.
            let _ = unsafe { result::free_async(self.address, self.stream.handle()) };
        } else {
            // SAFETY: as above; this call waits for the device.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
