//! The CUDA driver: initialising it, its version, and turning its status codes into [`Fault`]s.

use super::fault::{Fault, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::sync::OnceLock;

/// CUDA 12.0. The kernels need a compiler that new; stream-ordered memory is older.
const MIN_VERSION: i32 = 12000;

/// Initialises the driver, once. Call it before anything else of the driver.
pub fn init() -> Result<()> {
    static OUTCOME: OnceLock<Result<()>> = OnceLock::new();
    OUTCOME.get_or_init(init_now).clone()
}

fn init_now() -> Result<()> {
    // SAFETY: loading the driver only runs its initialisers. Ask first: cudarc panics if it is
    // missing.
    if !unsafe { sys::is_culib_present() } {
        return Err(Fault(
            "the CUDA driver was not found. Looked for libcuda.so and libcuda.so.1 in the system's \
             library path. Install NVIDIA's driver, and see that this process may use it (in a \
             container: --gpus)"
                .to_string(),
        ));
    }
    check("cuInit", result::init())?;
    let version = version()?;
    if version < MIN_VERSION {
        return Err(Fault(format!(
            "the CUDA driver is for CUDA {}, and gflow needs {} or newer: update NVIDIA's driver",
            format_version(version),
            format_version(MIN_VERSION)
        )));
    }
    log::info!("using the CUDA driver for CUDA {}", format_version(version));
    Ok(())
}

/// The CUDA version that the driver supports: 1000 * major + 10 * minor.
pub fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: it writes one integer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    Ok(version)
}

/// A version as "12.8".
pub fn format_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The outcome of a driver call; a failure names the call.
pub fn check<T>(call: &str, outcome: std::result::Result<T, DriverError>) -> Result<T> {
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
        assert_eq!(format_version(12000), "12.0");
        assert_eq!(format_version(13020), "13.2");
    }
}
