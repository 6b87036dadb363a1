//! The sizes of a bucket's elements, as bf16, in host memory or on a device, wherever its gradient is. They
//! are empty until a quantiser needs them.

use super::state_buffer::Location;
use crate::codec::quantizer::rescale_sizes;
use crate::cuda::{self, DeviceBuffer};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub enum SizesBuffer {
    /// Shared with the parcels under way.
    Host(Arc<Vec<u16>>),
    Device(DeviceBuffer<u16>),
}

impl Default for SizesBuffer {
    fn default() -> Self {
        SizesBuffer::Host(Arc::default())
    }
}

impl SizesBuffer {
    pub fn len(&self) -> usize {
        match self {
            SizesBuffer::Host(sizes) => sizes.len(),
            SizesBuffer::Device(buffer) => buffer.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_at(&self, location: &Location) -> bool {
        match (self, location) {
            (SizesBuffer::Host(_), Location::Host) => true,
            (SizesBuffer::Device(buffer), Location::Device(queue)) => buffer.is_on(queue),
            _ => false,
        }
    }

    /// The sizes, if they are in host memory.
    pub fn as_host_mut(&mut self) -> Option<&mut Arc<Vec<u16>>> {
        match self {
            SizesBuffer::Host(sizes) => Some(sizes),
            SizesBuffer::Device(_) => None,
        }
    }

    /// The buffer on the device, if it is there.
    pub fn as_device(&self) -> Option<&DeviceBuffer<u16>> {
        match self {
            SizesBuffer::Host(_) => None,
            SizesBuffer::Device(buffer) => Some(buffer),
        }
    }

    /// A copy in host memory. Waits for the device if the sizes are there.
    pub fn to_host(&self, limit: Duration) -> cuda::Result<Vec<u16>> {
        match self {
            SizesBuffer::Host(sizes) => Ok(sizes.to_vec()),
            SizesBuffer::Device(buffer) => buffer.to_host(limit),
        }
    }

    /// Gives it `count` sizes at `location`. Sizes of another number of elements belong to another bucket
    /// and become zeros. Sizes that are elsewhere, as those of a loaded state are, move, which waits for
    /// the device.
    pub fn resize_for(
        &mut self,
        count: usize,
        location: &Location,
        limit: Duration,
    ) -> cuda::Result<()> {
        if self.len() == count && self.is_at(location) {
            return Ok(());
        }
        let sizes = match self.len() == count {
            false => None,
            true => Some(self.to_host(limit)?),
        };
        *self = match (location, sizes) {
            (Location::Host, sizes) => {
                SizesBuffer::Host(Arc::new(sizes.unwrap_or_else(|| vec![0; count])))
            }
            (Location::Device(queue), None) => {
                SizesBuffer::Device(DeviceBuffer::zeros(queue, count)?)
            }
            (Location::Device(queue), Some(sizes)) => {
                SizesBuffer::Device(DeviceBuffer::from_host(queue, sizes, limit)?)
            }
        };
        Ok(())
    }

    /// Becomes a copy of `other`, at the same location, and reuses its own memory if that fits.
    pub fn copy_from(&mut self, other: &SizesBuffer) -> cuda::Result<()> {
        match (&mut *self, other) {
            (SizesBuffer::Device(own), SizesBuffer::Device(other)) if own.has_layout_of(other) => {
                own.copy_from(other)?;
            }
            (_, SizesBuffer::Host(other)) => *self = SizesBuffer::Host(other.clone()),
            (_, SizesBuffer::Device(other)) => *self = SizesBuffer::Device(other.try_clone()?),
        }
        Ok(())
    }

    /// Multiplies every size: the unit of the gradients has changed by this factor.
    pub fn rescale(&mut self, factor: f32) -> cuda::Result<()> {
        match self {
            SizesBuffer::Host(sizes) => {
                let sizes: &mut Vec<u16> = Arc::make_mut(sizes);
                rescale_sizes(sizes, factor);
                Ok(())
            }
            SizesBuffer::Device(buffer) => buffer.rescale(factor),
        }
    }
}
