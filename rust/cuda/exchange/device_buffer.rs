//! A buffer that stays on a device from step to step: a residual, a velocity, or the sizes of elements.
//! Everything that happens to it is enqueued on the stream of its queue.

use super::device_queue::DeviceQueue;
use crate::codec::Momentum;
use crate::codec::quantizer::{first_turn, kept_at};
use crate::cuda::kernels::{Argument, Float, Kernel, launch};
use crate::cuda::safe::memory::{DeviceMemory, DeviceSlice};
use crate::cuda::sys::fault::Result;
use crate::simd::number::Pod;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub struct DeviceBuffer<T = f32> {
    queue: Arc<DeviceQueue>,
    memory: DeviceMemory,
    len: usize,
    _element: PhantomData<T>,
}

/// The sizes of the elements of a gradient, as bf16.
pub type DeviceSizes = DeviceBuffer<u16>;

impl<T: Pod + Default> DeviceBuffer<T> {
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
        Ok(DeviceBuffer { queue: queue.clone(), memory, len, _element: PhantomData })
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

impl DeviceBuffer {
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

impl DeviceSizes {
    /// Multiplies all sizes: the unit of the gradients has changed by this factor.
    pub fn rescale(&mut self, factor: f32) -> Result<()> {
        let arguments = [
            Argument::Address(self.address()),
            Argument::U64(self.len as u64),
            Argument::F32(factor),
        ];
        let config = launch::rescale_sizes(self.len);
        let DeviceQueue { stream, kernels, .. } = &*self.queue;
        // SAFETY: these are the kernel's arguments; the memory is freed in the order of the stream.
        unsafe { kernels.launch(stream, Kernel::RescaleSizes, config, &arguments) }
    }

    /// Updates the sizes of those blocks whose turn it is at `step`, from what was delivered.
    ///
    /// # Safety
    /// What was delivered is memory of this queue's device, as long as the sizes, and valid when the
    /// stream gets there.
    pub unsafe fn follow(&self, delivered: DeviceSlice, step: u64) -> Result<()> {
        assert_eq!(self.len, delivered.count, "gflow: the sizes of a gradient");
        let first = first_turn(step);
        let arguments = [
            Argument::Address(self.address()),
            Argument::Address(delivered.address),
            Argument::U64(self.len as u64),
            Argument::U32(Float::try_of(delivered.element)?.number()),
            Argument::U32(first as u32),
            Argument::F32(kept_at(step)),
        ];
        let config = launch::follow_sizes(self.len, first);
        let DeviceQueue { stream, kernels, .. } = &*self.queue;
        // SAFETY: these are the kernel's arguments; the memory is ours and the caller's promise.
        unsafe { kernels.launch(stream, Kernel::FollowSizes, config, &arguments) }
    }
}
