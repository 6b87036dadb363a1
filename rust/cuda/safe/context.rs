//! The primary context of a device, which torch uses too. It is retained for the life of the
//! process.
//!
//! Threads enter it for as long as they hold a [`ContextGuard`], which then restores the thread's
//! own context. Meanwhile the thread's stream capture mode is "relaxed": `torch.cuda.graph()`
//! captures in global mode, where a query or allocation on any other thread would invalidate the
//! capture unless that thread opted out.

use crate::cuda::sys::driver::{self, check};
use crate::cuda::sys::fault::Result;
use cudarc::driver::result::{ctx, device, primary_ctx};
use cudarc::driver::sys::{CUcontext, CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};

#[derive(Debug)]
pub struct Context {
    handle: CUcontext,
}

// SAFETY: a context may be current on any number of threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn primary(device: i32) -> Result<Context> {
        driver::init()?;
        let handle = check("cuDeviceGet", device::get(device))?;
        // SAFETY: the driver has just returned this handle. The context is never released.
        let handle = check("cuDevicePrimaryCtxRetain", unsafe { primary_ctx::retain(handle) })?;
        Ok(Context { handle })
    }

    /// Makes it current on this thread until the guard is dropped.
    pub fn enter(&self) -> Result<ContextGuard> {
        let previous = check("cuCtxGetCurrent", ctx::get_current())?;
        let mut guard = ContextGuard { previous: None, capture_mode: None };
        if previous != Some(self.handle) {
            // SAFETY: it was retained and is never released.
            check("cuCtxSetCurrent", unsafe { ctx::set_current(self.handle) })?;
            guard.previous = Some(previous.unwrap_or(std::ptr::null_mut()));
        }
        // Last: if this fails, dropping the guard restores the context.
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        guard.capture_mode = Some(exchange_capture_mode(relaxed)?);
        Ok(guard)
    }
}

/// Sets this thread's capture mode and returns the previous one.
fn exchange_capture_mode(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode> {
    // SAFETY: it reads the mode and overwrites it with the previous one.
    let outcome = unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }.result();
    check("cuThreadExchangeStreamCaptureMode", outcome)?;
    Ok(mode)
}

/// A context is current on this thread. Drop it on the same thread.
#[must_use]
pub struct ContextGuard {
    /// The context to restore, if another one was current.
    previous: Option<CUcontext>,
    capture_mode: Option<CUstreamCaptureMode>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        // Nothing can be done if either call fails.
        if let Some(mode) = self.capture_mode {
            let _ = exchange_capture_mode(mode);
        }
        if let Some(previous) = self.previous {
            // SAFETY: it was current on this thread before; null is allowed too.
            let _ = unsafe { ctx::set_current(previous) };
        }
    }
}
