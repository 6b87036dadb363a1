//! A buffer that stays on a device from step to step: a residual or a velocity, or the sizes of
//! elements as bf16. Everything that happens to it is enqueued on the stream of its queue.

use super::device_queue::DeviceQueue;
use crate::codec::Momentum;
use crate::codec::quantizer::Turn;
use crate::cuda::kernels::{Argument, Float, Kernel, launch};
use crate::cuda::safe::memory::{DeviceMemory, DeviceSlice};
use crate::cuda::safe::stream::Number;
use crate::cuda::sys::fault::Result;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub struct DeviceBuffer<T = f32> {
    queue: Arc<DeviceQueue>,
    memory: DeviceMemory,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Number> DeviceBuffer<T> {
    pub fn zeros(queue: &Arc<DeviceQueue>, len: usize) -> Result<DeviceBuffer<T>> {
        let buffer = DeviceBuffer::uninitialised(queue, len)?;
        // SAFETY: the memory is this queue's, and freed in the order of its stream.
        unsafe { queue.stream.zero(buffer.address(), buffer.memory.bytes()) }?;
        Ok(buffer)
    }

    /// Copies values from the host. Waits until the stream has done it.
    pub fn from_host(
        queue: &Arc<DeviceQueue>,
        values: Vec<T>,
        timeout: Duration,
    ) -> Result<DeviceBuffer<T>> {
        let buffer = DeviceBuffer::uninitialised(queue, values.len())?;
        // SAFETY: as above, and the lengths are equal.
        unsafe { queue.stream.upload(buffer.address(), values, timeout) }?;
        Ok(buffer)
    }

    fn uninitialised(queue: &Arc<DeviceQueue>, len: usize) -> Result<DeviceBuffer<T>> {
        let memory = queue.allocate(len * size_of::<T>())?;
        Ok(DeviceBuffer { queue: queue.clone(), memory, len, element: PhantomData })
    }

    /// Copies the values to the host. Waits for the device.
    pub fn to_host(&self, timeout: Duration) -> Result<Vec<T>> {
        // SAFETY: as above, and the lengths are equal.
        unsafe { self.queue.stream.download(self.address(), self.len, timeout) }
    }

    /// A copy, as of when the stream gets here.
    pub fn try_clone(&self) -> Result<DeviceBuffer<T>> {
        let mut copy = DeviceBuffer::uninitialised(&self.queue, self.len)?;
        copy.copy_from(self)?;
        Ok(copy)
    }

    /// Copies from a buffer of the same length on the same queue.
    pub fn copy_from(&mut self, other: &DeviceBuffer<T>) -> Result<()> {
        assert_eq!(self.len, other.len, "gflow: lengths differ");
        // SAFETY: both are memory of this queue, and distinct.
        unsafe { self.queue.stream.copy(self.address(), other.address(), self.memory.bytes()) }
    }

    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether both have the same length and queue.
    pub fn has_layout_of(&self, other: &DeviceBuffer<T>) -> bool {
        self.len == other.len && Arc::ptr_eq(&self.queue, &other.queue)
    }

    pub fn is_on(&self, queue: &Arc<DeviceQueue>) -> bool {
        Arc::ptr_eq(&self.queue, queue)
    }
}

impl DeviceBuffer<f32> {
    /// Multiplies every element; infinite results become the largest finite number.
    pub fn rescale(&mut self, factor: f32) -> Result<()> {
        let arguments = [
            Argument::Address(self.address()),
            Argument::U64(self.len as u64),
            Argument::F32(factor),
        ];
        let DeviceQueue { stream, kernels, .. } = &*self.queue;
        // SAFETY: these are the kernel's arguments; the memory is freed in the order of the stream.
        unsafe { kernels.launch(stream, Kernel::Rescale, launch::rescale(self.len), &arguments) }
    }

    /// With this buffer as the velocity, replaces a gradient that is sent whole by its momentum
    /// step.
    ///
    /// # Safety
    /// The gradient is memory of this queue's device, as long as the velocity, and valid when the
    /// stream gets there.
    pub unsafe fn apply_momentum(&self, gradient: DeviceSlice, momentum: Momentum) -> Result<()> {
        let arguments = [
            Argument::Address(gradient.address),
            Argument::Address(self.address()),
            Argument::U64(self.len as u64),
            Argument::F32(momentum.factor),
            Argument::U32(momentum.nesterov.into()),
        ];
        let kernel = Kernel::AddVelocity(Float::try_of(gradient.element)?);
        let DeviceQueue { stream, kernels, .. } = &*self.queue;
        // SAFETY: these are the kernel's arguments; the memory is ours and the caller's promise.
        unsafe { kernels.launch(stream, kernel, launch::add_velocity(self.len), &arguments) }
    }
}

impl DeviceBuffer<u16> {
    /// Multiplies every size: the unit of the gradients has changed by this factor.
    pub fn rescale(&mut self, factor: f32) -> Result<()> {
        let arguments = [
            Argument::Address(self.address()),
            Argument::U64(self.len as u64),
            Argument::F32(factor),
        ];
        let DeviceQueue { stream, kernels, .. } = &*self.queue;
        let config = launch::scale_sizes(self.len);
        // SAFETY: these are the kernel's arguments; the memory is freed in the order of the stream.
        unsafe { kernels.launch(stream, Kernel::ScaleSizes, config, &arguments) }
    }

    /// Updates the sizes from what was delivered at a step.
    ///
    /// # Safety
    /// What was delivered is memory of this queue's device, as long as the sizes, and valid when the
    /// stream gets there.
    pub unsafe fn follow(&self, delivered: DeviceSlice, step: u64) -> Result<()> {
        let Turn { first, kept } = Turn::at(step);
        let arguments = [
            Argument::Address(delivered.address),
            Argument::Address(self.address()),
            Argument::U64(self.len as u64),
            Argument::U32(first as u32),
            Argument::F32(kept),
        ];
        let kernel = Kernel::Follow(Float::try_of(delivered.element)?);
        let DeviceQueue { stream, kernels, .. } = &*self.queue;
        let config = launch::follow(self.len, first);
        // SAFETY: these are the kernel's arguments; the memory is ours and the caller's promise.
        unsafe { kernels.launch(stream, kernel, config, &arguments) }
    }
}
