//! The GPUs that this process sees, and their properties.

use crate::cuda::sys::driver::{check, init};
use crate::cuda::sys::fault::Result;
use cudarc::driver::result;
use cudarc::driver::sys::CUdevice_attribute;

pub fn device_count() -> Result<i32> {
    init()?;
    check("cuDeviceGetCount", result::device::get_count())
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    pub name: String,
    /// Major and minor: (9, 0) for sm_90.
    pub compute_capability: (u32, u32),
    pub total_memory: usize,
    /// Whether it supports stream-ordered allocation.
    pub has_memory_pools: bool,
}

impl DeviceProperties {
    pub fn query(device: i32) -> Result<DeviceProperties> {
        init()?;
        let handle = check("cuDeviceGet", result::device::get(device))?;
        let attribute = |which: CUdevice_attribute| {
            // SAFETY: the driver has just returned this handle.
            check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(handle, which) })
        };
        use CUdevice_attribute as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(DeviceProperties {
            name: check("cuDeviceGetName", result::device::get_name(handle))?,
            compute_capability: (major.unsigned_abs(), minor.unsigned_abs()),
            // SAFETY: as above.
            total_memory: check("cuDeviceTotalMem", unsafe { result::device::total_mem(handle) })?,
            has_memory_pools: attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
        })
    }
}
