//! DeviceMemory of a device that gflow has taken. It is taken and given back in the order of the stream that
//! works on it, so nobody has to wait for the device, also not for one that stands still.

use super::driver::checked;
use super::fault::{Fault, Result};
use super::stream::Stream;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use std::sync::Arc;

/// The memory is used by one stream only.
#[derive(Debug)]
pub struct DeviceMemory {
    stream: Arc<Stream>,
    address: CUdeviceptr,
    bytes: usize,
    has_pools: bool,
}

impl DeviceMemory {
    /// So many bytes, of which nobody knows what is in them.
    pub fn new(stream: &Arc<Stream>, bytes: usize, has_pools: bool) -> Result<DeviceMemory> {
        let _entered = stream.context.enter()?;
        let address = if bytes == 0 {
            0
        } else if has_pools {
            // SAFETY: nothing is read of it before it was written, on this stream.
            let taken = unsafe { result::malloc_async(stream.handle(), bytes) };
            taken_or_why("cuMemAllocAsync", bytes, taken)?
        } else {
            // SAFETY: as above.
            taken_or_why("cuMemAlloc", bytes, unsafe { result::malloc_sync(bytes) })?
        };
        Ok(DeviceMemory { stream: stream.clone(), address, bytes, has_pools })
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// An allocation's outcome; where memory is what is missing, with what to do about it.
fn taken_or_why<T>(
    call: &str,
    bytes: usize,
    taken: std::result::Result<T, DriverError>,
) -> Result<T> {
    let is_full = matches!(taken, Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)));
    checked(call, taken).map_err(|fault| match is_full {
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
        let Ok(_entered) = self.stream.context.enter() else { return };
        // A device that has failed takes nothing back: then the memory ends with the process.
        if self.has_pools {
            // SAFETY: nothing of ours is put on the stream for this memory any more.
            let _ = unsafe { result::free_async(self.address, self.stream.handle()) };
        } else {
            // SAFETY: as above; this waits for the device.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
