//! Numbers that are kept on a device from step to step: a residual or a velocity. All that happens to
//! them happens on the stream of their lane.

use super::fault::Result;
use super::lane::Lane;
use super::memory::Memory;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub struct Numbers {
    lane: Arc<Lane>,
    memory: Memory,
    count: usize,
}

impl Numbers {
    pub fn zeros(lane: &Arc<Lane>, count: usize) -> Result<Numbers> {
        let numbers = Numbers::uninitialised(lane, count)?;
        // SAFETY: the memory is this lane's, and given back in the order of its stream.
        unsafe { lane.stream.clear(numbers.address(), numbers.memory.bytes()) }?;
        Ok(numbers)
    }

    /// Numbers of the host; it waits until they were read, which is as long as the stream is busy.
    pub fn from_host(lane: &Arc<Lane>, values: Vec<f32>, limit: Duration) -> Result<Numbers> {
        let numbers = Numbers::uninitialised(lane, values.len())?;
        // SAFETY: as above, and it is as long.
        unsafe { lane.stream.upload(numbers.address(), values, limit) }?;
        Ok(numbers)
    }

    fn uninitialised(lane: &Arc<Lane>, count: usize) -> Result<Numbers> {
        let memory = lane.memory(count * size_of::<f32>())?;
        Ok(Numbers { lane: lane.clone(), memory, count })
    }

    /// What they are, on the host; it waits for the device.
    pub fn to_host(&self, limit: Duration) -> Result<Vec<f32>> {
        // SAFETY: as above, and there are as many.
        unsafe { self.lane.stream.download(self.address(), self.count, limit) }
    }

    /// A copy of them as they are when the stream gets here.
    pub fn copy(&self) -> Result<Numbers> {
        let mut copy = Numbers::uninitialised(&self.lane, self.count)?;
        copy.copy_from(self)?;
        Ok(copy)
    }

    /// Makes these what as many others are.
    pub fn copy_from(&mut self, other: &Numbers) -> Result<()> {
        assert_eq!(self.count, other.count, "gflow: numbers are copied to as many");
        // SAFETY: both are memory of this lane, and two different ones.
        unsafe { self.lane.stream.copy(self.address(), other.address(), self.memory.bytes()) }
    }

    /// Multiplies all of them; what would be infinite becomes the largest number.
    pub fn rescale(&mut self, factor: f32) -> Result<()> {
        self.lane.kernels.rescale(&self.lane.stream, self, factor)
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

    /// Whether others are as many, on the same lane.
    pub fn are_like(&self, others: &Numbers) -> bool {
        self.count == others.count && Arc::ptr_eq(&self.lane, &others.lane)
    }

    /// Whether they are on this lane.
    pub fn are_on(&self, lane: &Arc<Lane>) -> bool {
        Arc::ptr_eq(&self.lane, lane)
    }
}
