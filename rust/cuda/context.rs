//! A context: what the driver needs to know about a device before anything can be done there. It is
//! the primary one, which torch uses too, and is kept until the process ends. Whoever enters it leaves
//! the thread as it was: the caller's thread has a context of its own.

use super::driver::{self, checked};
use super::fault::Result;
use cudarc::driver::result::{ctx, device, primary_ctx};
use cudarc::driver::sys::CUcontext;

#[derive(Debug)]
pub struct Context {
    handle: CUcontext,
}

// SAFETY: a context may be current to any number of threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn of(device: i32) -> Result<Context> {
        driver::start()?;
        let handle = checked("cuDeviceGet", device::get(device))?;
        // SAFETY: the device is one that the driver has just named. It is never released.
        let handle = checked("cuDevicePrimaryCtxRetain", unsafe { primary_ctx::retain(handle) })?;
        Ok(Context { handle })
    }

    /// Makes it this thread's, until the result is dropped.
    pub fn enter(&self) -> Result<Entered> {
        let before = checked("cuCtxGetCurrent", ctx::get_current())?;
        if before == Some(self.handle) {
            return Ok(Entered { before: None });
        }
        // SAFETY: it was retained and is never released.
        checked("cuCtxSetCurrent", unsafe { ctx::set_current(self.handle) })?;
        Ok(Entered { before: Some(before.unwrap_or(std::ptr::null_mut())) })
    }
}

/// This thread is in a context. It must be dropped on the same thread.
#[must_use]
pub struct Entered {
    /// What to put back, if it was another one.
    before: Option<CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was this thread's before; none at all is allowed too. Where that fails there
            // is nothing left to do about it.
            let _ = unsafe { ctx::set_current(before) };
        }
    }
}
