//! One device of this rank in one group: the stream that exchanges are enqueued on, the kernels and
//! NCCL. All of it is loaded when the queue is opened. It knows nothing of other ranks.

use crate::cuda::kernels::KernelModule;
use crate::cuda::safe::context::Context;
use crate::cuda::safe::device::{DeviceProperties, device_count};
use crate::cuda::safe::event::Event;
use crate::cuda::safe::memory::DeviceMemory;
use crate::cuda::safe::nccl::Nccl;
use crate::cuda::safe::stream::Stream;
use crate::cuda::sys::fault::{Fault, Result};
use std::fmt;
use std::sync::Arc;

pub struct DeviceQueue {
    /// Counts from 1, in the order in which this rank has opened its devices for the group.
    pub slot: u32,
    pub device: i32,
    /// Where exchanges are enqueued.
    pub stream: Arc<Stream>,
    pub kernels: KernelModule,
    pub nccl: &'static Nccl,
    has_memory_pools: bool,
}

impl DeviceQueue {
    /// Loads libraries and kernels for a device. `stream` is the raw handle of a stream there,
    /// which must stay valid for as long as the queue.
    pub fn open(slot: u32, device: i32, stream: u64) -> Result<DeviceQueue> {
        let devices = device_count()?;
        if !(0..devices).contains(&device) {
            return Err(Fault(format!("there is no device {device}: this process sees {devices}")));
        }
        let properties = DeviceProperties::query(device)?;
        let nccl = Nccl::get()?;
        let context = Arc::new(Context::primary(device)?);
        let kernels = KernelModule::load(&context, properties.compute_capability)?;
        let stream = Arc::new(Stream::borrowed(&context, stream));
        log::info!("opened GPU {device} ({}) as device slot {slot}", properties.name);
        let has_memory_pools = properties.has_memory_pools;
        Ok(DeviceQueue { slot, device, stream, kernels, nccl, has_memory_pools })
    }

    /// Whether the caller's stream is being captured into a graph. Here and below, `stream` is the
    /// raw handle of a stream of this device.
    pub fn is_capturing(&self, stream: u64) -> Result<bool> {
        Stream::borrowed(&self.stream.context, stream).is_capturing()
    }

    /// Records an event on the caller's stream, for [`DeviceQueue::wait`].
    pub fn record(&self, stream: u64) -> Result<Event> {
        Stream::borrowed(&self.stream.context, stream).record()
    }

    /// Makes what is enqueued from now on run after the event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        #[cfg(test)]
        if hooks::FORGETS_TO_WAIT.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(());
        }
        self.stream.wait(event)
    }

    /// Allocates uninitialised memory for use on the queue's stream.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::new(&self.stream, bytes, self.has_memory_pools)
    }
}

impl fmt::Debug for DeviceQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device slot {} on device {}", self.slot, self.device)
    }
}

/// For a test that shows that a missing wait is noticed.
#[cfg(test)]
pub mod hooks {
    use std::sync::atomic::AtomicBool;

    pub static FORGETS_TO_WAIT: AtomicBool = AtomicBool::new(false);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// tests/gpu/test_engine.py reads this output, with one library or the other missing.
    #[test]
    fn a_gpu_that_cannot_be_opened_says_why() {
        match DeviceQueue::open(1, 0, 0) {
            Ok(queue) => println!("{queue:?} can be opened"),
            Err(Fault(why)) => {
                println!("{why}");
                assert!(why.contains("not found") || why.contains("failed"), "{why}");
            }
        }
        let Err(Fault(why)) = DeviceQueue::open(1, -1, 0) else { panic!("there is no device -1") };
        assert!(why.contains("not found") || why.contains("no device -1"), "{why}");
    }
}
