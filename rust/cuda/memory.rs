//! Memory of a device that gflow has taken. It is taken and given back in the order of the stream that
//! works on it, so nobody has to wait for the device, also not for one that stands still.

use super::driver::checked;
use super::fault::Result;
use super::stream::Stream;
use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use std::sync::Arc;

/// The memory is used by one stream only.
#[derive(Debug)]
pub struct Memory {
    stream: Arc<Stream>,
    address: CUdeviceptr,
    bytes: usize,
    has_pools: bool,
}

impl Memory {
    /// So many bytes, of which nobody knows what is in them.
    pub fn new(stream: &Arc<Stream>, bytes: usize, has_pools: bool) -> Result<Memory> {
        let _entered = stream.context.enter()?;
        let address = if bytes == 0 {
            0
        } else if has_pools {
            // SAFETY: nothing is read of it before it was written, on this stream.
            let taken = unsafe { result::malloc_async(stream.handle(), bytes) };
            checked("cuMemAllocAsync", taken)?
        } else {
            // SAFETY: as above.
            checked("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?
        };
        Ok(Memory { stream: stream.clone(), address, bytes, has_pools })
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
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
