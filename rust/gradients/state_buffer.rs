//! A buffer of f32 that a bucket keeps from step to step, in host memory or on a device, wherever its
//! gradient is.

use crate::cuda::{self, DeviceBuffer, DeviceQueue};
use crate::huge_pages;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub enum StateBuffer {
    Host(Vec<f32>),
    Device(DeviceBuffer),
}

/// Where a buffer is.
#[derive(Debug, Clone)]
pub enum Location {
    Host,
    Device(Arc<DeviceQueue>),
}

impl Default for StateBuffer {
    fn default() -> Self {
        StateBuffer::Host(Vec::new())
    }
}

impl StateBuffer {
    pub fn len(&self) -> usize {
        match self {
            StateBuffer::Host(values) => values.len(),
            StateBuffer::Device(buffer) => buffer.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_at(&self, location: &Location) -> bool {
        match (self, location) {
            (StateBuffer::Host(_), Location::Host) => true,
            (StateBuffer::Device(buffer), Location::Device(queue)) => buffer.is_on(queue),
            _ => false,
        }
    }

    /// The values, if they are in host memory.
    pub fn as_host_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            StateBuffer::Host(values) => Some(values),
            StateBuffer::Device(_) => None,
        }
    }

    /// The buffer on the device, if it is there.
    pub fn as_device(&self) -> Option<&DeviceBuffer> {
        match self {
            StateBuffer::Host(_) => None,
            StateBuffer::Device(buffer) => Some(buffer),
        }
    }

    /// A copy in host memory. Waits for the device if the buffer is there.
    pub fn to_host(&self, limit: Duration) -> cuda::Result<Vec<f32>> {
        match self {
            StateBuffer::Host(values) => Ok(values.clone()),
            StateBuffer::Device(buffer) => buffer.to_host(limit),
        }
    }

    /// Gives it `count` elements at `location`. Values of another length belong to another bucket and
    /// become zeros. Values that are elsewhere, as a loaded state is, move, which waits for the device.
    pub fn resize_for(
        &mut self,
        count: usize,
        location: &Location,
        limit: Duration,
    ) -> cuda::Result<()> {
        if self.len() == count && self.is_at(location) {
            return Ok(());
        }
        let values = match (self.len() == count, std::mem::take(self)) {
            (false, _) => None,
            (true, StateBuffer::Host(values)) => Some(values),
            (true, StateBuffer::Device(buffer)) => Some(buffer.to_host(limit)?),
        };
        *self = match (location, values) {
            (Location::Host, values) => {
                StateBuffer::Host(values.unwrap_or_else(|| huge_pages::zeros(count)))
            }
            (Location::Device(queue), None) => {
                StateBuffer::Device(DeviceBuffer::zeros(queue, count)?)
            }
            (Location::Device(queue), Some(values)) => {
                StateBuffer::Device(DeviceBuffer::from_host(queue, values, limit)?)
            }
        };
        Ok(())
    }

    /// Becomes a copy of `other`, at the same location, and reuses its own memory if that fits.
    pub fn copy_from(&mut self, other: &StateBuffer) -> cuda::Result<()> {
        match (&mut *self, other) {
            (StateBuffer::Host(own), StateBuffer::Host(other)) => own.clone_from(other),
            (StateBuffer::Device(own), StateBuffer::Device(other)) if own.has_layout_of(other) => {
                own.copy_from(other)?;
            }
            (_, StateBuffer::Host(other)) => *self = StateBuffer::Host(other.clone()),
            (_, StateBuffer::Device(other)) => *self = StateBuffer::Device(other.try_clone()?),
        }
        Ok(())
    }

    /// Multiplies every value; one that would become infinite becomes the largest finite number.
    pub fn rescale(&mut self, factor: f32) -> cuda::Result<()> {
        match self {
            StateBuffer::Host(values) => {
                for value in values {
                    *value = (*value * factor).clamp(f32::MIN, f32::MAX);
                }
                Ok(())
            }
            StateBuffer::Device(buffer) => buffer.rescale(factor),
        }
    }
}
