//! Numbers that are kept of a bucket: in the memory of the host or on a device, wherever its gradient is.

use crate::cuda;
use crate::cuda::DeviceQueue;
use crate::huge_pages;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub enum Numbers {
    Host(Vec<f32>),
    Device(cuda::DeviceBuffer),
}

/// Where numbers are.
#[derive(Debug, Clone)]
pub enum Home {
    Host,
    Device(Arc<DeviceQueue>),
}

impl Default for Numbers {
    fn default() -> Self {
        Numbers::Host(Vec::new())
    }
}

impl Numbers {
    pub fn len(&self) -> usize {
        match self {
            Numbers::Host(numbers) => numbers.len(),
            Numbers::Device(numbers) => numbers.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn are_at(&self, home: &Home) -> bool {
        match (self, home) {
            (Numbers::Host(_), Home::Host) => true,
            (Numbers::Device(numbers), Home::Device(lane)) => numbers.is_on(lane),
            _ => false,
        }
    }

    /// Those in the memory of the host; none if they are on a device.
    pub fn on_host(&mut self) -> &mut [f32] {
        match self {
            Numbers::Host(numbers) => numbers,
            Numbers::Device(_) => &mut [],
        }
    }

    /// Those on a device, if they are there.
    pub fn on_device(&self) -> Option<&cuda::DeviceBuffer> {
        match self {
            Numbers::Host(_) => None,
            Numbers::Device(numbers) => Some(numbers),
        }
    }

    /// A copy in the memory of the host. If they are on a device, it waits for that.
    pub fn to_host(&self, limit: Duration) -> cuda::Result<Vec<f32>> {
        match self {
            Numbers::Host(numbers) => Ok(numbers.clone()),
            Numbers::Device(numbers) => numbers.to_host(limit),
        }
    }

    /// Makes them so many, at home. Those of another size cannot belong there and become zeros; those
    /// that are elsewhere, as a state that was loaded is, move, which waits for a device.
    pub fn settle(&mut self, count: usize, home: &Home, limit: Duration) -> cuda::Result<()> {
        if self.len() == count && self.are_at(home) {
            return Ok(());
        }
        let values = match (self.len() == count, std::mem::take(self)) {
            (false, _) => None,
            (true, Numbers::Host(values)) => Some(values),
            (true, Numbers::Device(numbers)) => Some(numbers.to_host(limit)?),
        };
        *self = match (home, values) {
            (Home::Host, values) => {
                Numbers::Host(values.unwrap_or_else(|| huge_pages::zeros(count)))
            }
            (Home::Device(lane), None) => Numbers::Device(cuda::DeviceBuffer::zeros(lane, count)?),
            (Home::Device(lane), Some(values)) => {
                Numbers::Device(cuda::DeviceBuffer::from_host(lane, values, limit)?)
            }
        };
        Ok(())
    }

    /// Makes them what others are, in the same place, with the memory that they have if that fits.
    pub fn copy_from(&mut self, others: &Numbers) -> cuda::Result<()> {
        match (&mut *self, others) {
            (Numbers::Host(own), Numbers::Host(others)) => own.clone_from(others),
            (Numbers::Device(own), Numbers::Device(others)) if own.has_layout_of(others) => {
                own.copy_from(others)?;
            }
            (_, Numbers::Host(others)) => *self = Numbers::Host(others.clone()),
            (_, Numbers::Device(others)) => *self = Numbers::Device(others.try_clone()?),
        }
        Ok(())
    }

    /// Multiplies them; what would be infinite becomes the largest number.
    pub fn rescale(&mut self, factor: f32) -> cuda::Result<()> {
        match self {
            Numbers::Host(numbers) => {
                for value in numbers {
                    *value = (*value * factor).clamp(f32::MIN, f32::MAX);
                }
                Ok(())
            }
            Numbers::Device(numbers) => numbers.rescale(factor),
        }
    }
}
