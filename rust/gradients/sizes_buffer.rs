//! The sizes of a bucket's elements (see `codec::quantizer`), as bf16, in host memory or on a device,
//! wherever its gradient is.

use super::state_buffer::Location;
use crate::codec::quantizer::rescale_sizes;
use crate::cuda::{self, DeviceSizes};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub enum SizesBuffer {
    /// Shared with the parcels under way, and with a backup until they change.
    Host(Arc<Vec<u16>>),
    Device(DeviceSizes),
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
            SizesBuffer::Device(sizes) => sizes.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_at(&self, location: &Location) -> bool {
        match (self, location) {
            (SizesBuffer::Host(_), Location::Host) => true,
            (SizesBuffer::Device(sizes), Location::Device(queue)) => sizes.is_on(queue),
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

    /// The sizes on the device, if they are there.
    pub fn as_device(&self) -> Option<&DeviceSizes> {
        match self {
            SizesBuffer::Host(_) => None,
            SizesBuffer::Device(sizes) => Some(sizes),
        }
    }

    /// A copy in host memory. Waits for the device if they are there.
    pub fn to_host(&self, limit: Duration) -> cuda::Result<Vec<u16>> {
        match self {
            SizesBuffer::Host(sizes) => Ok(sizes.to_vec()),
            SizesBuffer::Device(sizes) => sizes.to_host(limit),
        }
    }

    /// Gives it `count` sizes at `location`. Those of another number belong to another bucket and become
    /// zeros. Those that are elsewhere move, which waits for the device.
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
                SizesBuffer::Device(DeviceSizes::zeros(queue, count)?)
            }
            (Location::Device(queue), Some(sizes)) => {
                SizesBuffer::Device(DeviceSizes::from_host(queue, sizes, limit)?)
            }
        };
        Ok(())
    }

    /// Becomes a copy of `other`, at the same location.
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

    /// Multiplies all sizes: the unit of the gradients has changed by this factor.
    pub fn rescale(&mut self, factor: f32) -> cuda::Result<()> {
        match self {
            SizesBuffer::Host(sizes) => {
                let sizes: &mut Vec<u16> = Arc::make_mut(sizes);
                rescale_sizes(sizes, factor);
                Ok(())
            }
            SizesBuffer::Device(sizes) => sizes.rescale(factor),
        }
    }
}
