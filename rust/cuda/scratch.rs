//! The scratch in which a queue's exchanges are prepared: norms, choice and what goes over the wire. One
//! exchange comes after the other on the stream, so all use the same memory. It grows and never shrinks.

use super::device_queue::DeviceQueue;
use super::fault::Result;
use super::memory::DeviceMemory;

#[derive(Debug, Default)]
pub struct Scratch {
    pub norms: ScratchBuffer,
    pub gradient_norms: ScratchBuffer,
    pub chosen: ScratchBuffer,
    pub slots: ScratchBuffer,
    pub wire: ScratchBuffer,
}

/// Some memory, as large as was ever asked for.
#[derive(Debug, Default)]
pub struct ScratchBuffer(Option<DeviceMemory>);

impl ScratchBuffer {
    /// Makes it so large at least, and returns its address. What was in it is gone if it grows.
    pub fn fit(&mut self, queue: &DeviceQueue, bytes: usize) -> Result<u64> {
        if self.0.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // First: so both are never there at a time. It is given back in the order of the stream.
            self.0 = None;
            self.0 = Some(queue.memory(bytes)?);
        }
        Ok(self.0.as_ref().map_or(0, DeviceMemory::address))
    }
}
