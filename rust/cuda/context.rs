//! A context: what the driver needs to know about a device before anything can be done there. It is
//! the primary one, which torch uses too, and is kept until the process ends. Whoever enters it leaves
//! the thread as it was: the caller's thread has a context of its own.
//!
//! While it is entered, what this thread does is none of the business of graphs that others capture:
//! `torch.cuda.graph()` captures in global mode, in which a query or an allocation by any thread of the
//! process would spoil the capture, unless that thread has said that it knows what it does.

use super::driver::{self, checked};
use super::fault::Result;
use cudarc::driver::result::{ctx, device, primary_ctx};
use cudarc::driver::sys::{CUcontext, CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};

#[derive(Debug)]
pub struct Context {
    handle: CUcontext,
}

// SAFETY: a context may be current to any number of threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn primary(device: i32) -> Result<Context> {
        driver::start()?;
        let handle = checked("cuDeviceGet", device::get(device))?;
        // SAFETY: the device is one that the driver has just named. It is never released.
        let handle = checked("cuDevicePrimaryCtxRetain", unsafe { primary_ctx::retain(handle) })?;
        Ok(Context { handle })
    }

    /// Makes it this thread's, until the result is dropped.
    pub fn enter(&self) -> Result<ContextGuard> {
        let before = checked("cuCtxGetCurrent", ctx::get_current())?;
        let mut entered = ContextGuard { before: None, mode: None };
        if before != Some(self.handle) {
            // SAFETY: it was retained and is never released.
            checked("cuCtxSetCurrent", unsafe { ctx::set_current(self.handle) })?;
            entered.before = Some(before.unwrap_or(std::ptr::null_mut()));
        }
        // Here, so that what was entered is left again where this fails.
        entered.mode = Some(exchange_mode(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?);
        Ok(entered)
    }
}

/// Sets how this thread gets on with captures, and returns how it did before.
fn exchange_mode(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode> {
    // SAFETY: it reads a mode and puts another in its place.
    let outcome = unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }.result();
    checked("cuThreadExchangeStreamCaptureMode", outcome)?;
    Ok(mode)
}

/// This thread is in a context. It must be dropped on the same thread.
#[must_use]
pub struct ContextGuard {
    /// What to put back, if it was another one.
    before: Option<CUcontext>,
    /// The capture mode to put back.
    mode: Option<CUstreamCaptureMode>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            // Where that fails there is nothing left to do about it: so below.
            let _ = exchange_mode(mode);
        }
        if let Some(before) = self.before {
            // SAFETY: it was this thread's before; none at all is allowed too. Where that fails there
            // is nothing left to do about it.
            let _ = unsafe { ctx::set_current(before) };
        }
    }
}
