//! The driver: whether there is one, and what it says of the devices. Every function of it that the
//! other files call goes through [`checked`], so that what it refuses is a [`Fault`] in words.

use super::fault::{Fault, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};
use std::sync::OnceLock;

/// CUDA 12.0: what the kernels are compiled by needs it, and streams order memory since before.
const LEAST_VERSION: i32 = 12000;

/// Makes the driver ready, once. It must come before everything else that is asked of it.
pub fn start() -> Result<()> {
    static OUTCOME: OnceLock<Result<()>> = OnceLock::new();
    OUTCOME.get_or_init(start_now).clone()
}

fn start_now() -> Result<()> {
    // SAFETY: loading the driver runs nothing but its initialisers. cudarc panics where it is
    // missing, so it is asked first.
    if !unsafe { sys::is_culib_present() } {
        return Err(Fault(
            "the CUDA driver was not found. Looked for libcuda.so and libcuda.so.1 in the system's \
             library path. Install NVIDIA's driver, and see that this process may use it (in a \
             container: --gpus)"
                .to_string(),
        ));
    }
    checked("cuInit", result::init())?;
    let version = version()?;
    if version < LEAST_VERSION {
        return Err(Fault(format!(
            "the CUDA driver is for CUDA {}, and gflow needs {} or newer: update NVIDIA's driver",
            in_words(version),
            in_words(LEAST_VERSION)
        )));
    }
    Ok(())
}

/// The version of CUDA that the driver is for, as 1000 times the major number and 10 the minor one.
pub fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: it fills in a number.
    checked("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    Ok(version)
}

/// A version as people write it.
pub fn in_words(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// How many devices there are.
pub fn devices() -> Result<i32> {
    start()?;
    checked("cuDeviceGetCount", result::device::get_count())
}

/// What there is to know of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    pub name: String,
    /// Its architecture: (9, 0) for sm_90.
    pub architecture: (u32, u32),
    pub bytes: usize,
    /// Whether memory can be taken and given back in the order of a stream.
    pub has_pools: bool,
}

pub fn describe(device: i32) -> Result<Description> {
    start()?;
    let handle = checked("cuDeviceGet", result::device::get(device))?;
    let attribute = |which: CUdevice_attribute| {
        // SAFETY: the device is one that the driver has just named.
        checked("cuDeviceGetAttribute", unsafe { result::device::get_attribute(handle, which) })
    };
    use CUdevice_attribute as Of;
    let major = attribute(Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Description {
        name: checked("cuDeviceGetName", result::device::get_name(handle))?,
        architecture: (major.unsigned_abs(), minor.unsigned_abs()),
        // SAFETY: as above.
        bytes: checked("cuDeviceTotalMem", unsafe { result::device::total_mem(handle) })?,
        has_pools: attribute(Of::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
    })
}

/// The outcome of a call of the driver, with its name where it failed.
pub(super) fn checked<T>(call: &str, outcome: std::result::Result<T, DriverError>) -> Result<T> {
    outcome.map_err(|error| {
        let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
            text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let (name, meaning) = (text(error.error_name()), text(error.error_string()));
        Fault(format!("{call} failed with {name} ({}): {meaning}", error.0 as u32))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(in_words(12000), "12.0");
        assert_eq!(in_words(13020), "13.2");
    }
}
