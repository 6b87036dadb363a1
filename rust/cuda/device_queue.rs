//! A queue: one device of this rank in one group, and what is needed to exchange there. All of it is
//! loaded when the queue is opened; nothing here knows of other ranks.

use super::context::Context;
use super::driver;
use super::event::Event;
use super::fault::{Fault, Result};
use super::kernel_module::KernelModule;
use super::memory::DeviceMemory;
use super::nccl::Nccl;
use super::stream::Stream;
use std::fmt;
use std::sync::Arc;

pub struct DeviceQueue {
    /// Counted from 1, in the order in which this rank has opened its devices for the group.
    pub slot: u32,
    pub device: i32,
    /// What the exchanges go on.
    pub stream: Arc<Stream>,
    pub kernels: KernelModule,
    pub nccl: &'static Nccl,
    has_pools: bool,
}

impl DeviceQueue {
    /// Loads libraries and kernels for a device; `stream` is the raw handle of a stream there, which
    /// stays valid as long as the queue.
    pub fn open(slot: u32, device: i32, stream: u64) -> Result<DeviceQueue> {
        let devices = driver::devices()?;
        if !(0..devices).contains(&device) {
            return Err(Fault(format!("there is no device {device}: this process sees {devices}")));
        }
        let description = driver::describe(device)?;
        let nccl = Nccl::get()?;
        let context = Arc::new(Context::primary(device)?);
        let kernels = KernelModule::load(&context, description.architecture)?;
        let stream = Arc::new(Stream::borrowed(&context, stream));
        Ok(DeviceQueue { slot, device, stream, kernels, nccl, has_pools: description.has_pools })
    }

    /// Whether what the caller puts on its own stream is recorded into a graph rather than done. `stream`
    /// is the raw handle of a stream of the queue's device: so below.
    pub fn is_capturing(&self, stream: u64) -> Result<bool> {
        Stream::borrowed(&self.stream.context, stream).is_capturing()
    }

    /// Marks what the caller has put on its own stream, for this queue to wait for.
    pub fn record(&self, stream: u64) -> Result<Event> {
        Stream::borrowed(&self.stream.context, stream).record()
    }

    /// What is put on the queue from now on happens after the mark.
    pub fn wait(&self, mark: &Event) -> Result<()> {
        #[cfg(test)]
        if hooks::FORGETS_TO_WAIT.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(());
        }
        self.stream.wait(mark)
    }

    pub fn memory(&self, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::new(&self.stream, bytes, self.has_pools)
    }
}

impl fmt::Debug for DeviceQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue {} on device {}", self.slot, self.device)
    }
}

/// For a test that proves that a missing wait is noticed.
#[cfg(test)]
pub mod hooks {
    use std::sync::atomic::AtomicBool;

    pub static FORGETS_TO_WAIT: AtomicBool = AtomicBool::new(false);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// tests/gpu/test_engine.py reads what this writes, where one library or the other is missing.
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
