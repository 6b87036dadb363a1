//! DeviceBuffer that are kept on a device from step to step: a residual or a velocity. All that happens to
//! them happens on the stream of their queue.

use super::device_queue::DeviceQueue;
use super::device_slice::DeviceSlice;
use super::fault::Result;
use super::memory::DeviceMemory;
use crate::codec::Momentum;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub struct DeviceBuffer {
    queue: Arc<DeviceQueue>,
    memory: DeviceMemory,
    count: usize,
}

impl DeviceBuffer {
    pub fn zeros(queue: &Arc<DeviceQueue>, count: usize) -> Result<DeviceBuffer> {
        let numbers = DeviceBuffer::uninitialised(queue, count)?;
        // SAFETY: the memory is this queue's, and given back in the order of its stream.
        unsafe { queue.stream.clear(numbers.address(), numbers.memory.bytes()) }?;
        Ok(numbers)
    }

    /// DeviceBuffer of the host; it waits until they were read, which is as long as the stream is busy.
    pub fn from_host(
        queue: &Arc<DeviceQueue>,
        values: Vec<f32>,
        limit: Duration,
    ) -> Result<DeviceBuffer> {
        let numbers = DeviceBuffer::uninitialised(queue, values.len())?;
        // SAFETY: as above, and it is as long.
        unsafe { queue.stream.upload(numbers.address(), values, limit) }?;
        Ok(numbers)
    }

    fn uninitialised(queue: &Arc<DeviceQueue>, count: usize) -> Result<DeviceBuffer> {
        let memory = queue.memory(count * size_of::<f32>())?;
        Ok(DeviceBuffer { queue: queue.clone(), memory, count })
    }

    /// What they are, on the host; it waits for the device.
    pub fn to_host(&self, limit: Duration) -> Result<Vec<f32>> {
        // SAFETY: as above, and there are as many.
        unsafe { self.queue.stream.download(self.address(), self.count, limit) }
    }

    /// A copy of them as they are when the stream gets here.
    pub fn try_clone(&self) -> Result<DeviceBuffer> {
        let mut copy = DeviceBuffer::uninitialised(&self.queue, self.count)?;
        copy.copy_from(self)?;
        Ok(copy)
    }

    /// Makes these what as many others are.
    pub fn copy_from(&mut self, other: &DeviceBuffer) -> Result<()> {
        assert_eq!(self.count, other.count, "gflow: numbers are copied to as many");
        // SAFETY: both are memory of this queue, and two different ones.
        unsafe { self.queue.stream.copy(self.address(), other.address(), self.memory.bytes()) }
    }

    /// Multiplies all of them; what would be infinite becomes the largest number.
    pub fn rescale(&mut self, factor: f32) -> Result<()> {
        self.queue.kernels.rescale(&self.queue.stream, self, factor)
    }

    /// Replaces a gradient that is sent whole by what momentum makes of it; these are its velocity.
    ///
    /// # Safety
    /// The gradient is memory of this queue's device, valid when its stream gets there, with as many
    /// elements as the velocity.
    pub unsafe fn apply_momentum(&self, gradient: DeviceSlice, momentum: Momentum) -> Result<()> {
        self.queue.kernels.add_velocity(&self.queue.stream, gradient, self, momentum)
    }

    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether others are as many, on the same queue.
    pub fn has_layout_of(&self, others: &DeviceBuffer) -> bool {
        self.count == others.count && Arc::ptr_eq(&self.queue, &others.queue)
    }

    /// Whether they are on this queue.
    pub fn is_on(&self, queue: &Arc<DeviceQueue>) -> bool {
        Arc::ptr_eq(&self.queue, queue)
    }
}
