//! An event: a point in the order of a stream that another stream can wait for, and that the host
//! can poll.

use super::context::Context;
use crate::cuda::sys::driver::{self, check};
use crate::cuda::sys::fault::Result;
use cudarc::driver::result::{DriverError, event};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUresult, CUstream};
use std::sync::Arc;

/// The function that cudarc calls for elapsed times is in drivers since CUDA 12.8.
const TIMING_SINCE: i32 = 12080;

#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: the driver lets any thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Records an event on a stream of this context. Only one with a time can be asked for
    /// [`Event::seconds_since`]; recording it takes a little longer.
    pub(super) fn record(
        context: &Arc<Context>,
        stream: CUstream,
        has_time: bool,
    ) -> Result<Event> {
        let _guard = context.enter()?;
        let flags = match has_time {
            true => CUevent_flags::CU_EVENT_DEFAULT,
            false => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let handle = check("cuEventCreate", event::create(flags))?;
        let event = Event { context: context.clone(), handle };
        // SAFETY: the event is new; the stream is a valid handle of a `Stream`.
        check("cuEventRecord", unsafe { event::record(handle, stream) })?;
        Ok(event)
    }

    /// Whether the driver can measure the time between events.
    pub fn supports_timing() -> Result<bool> {
        Ok(driver::version()? >= TIMING_SINCE)
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }

    /// Whether the stream has reached it; never waits. Errors if the device has failed.
    pub fn is_complete(&self) -> Result<bool> {
        let _guard = self.context.enter()?;
        // SAFETY: the event lives until it is dropped.
        match unsafe { event::query(self.handle) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            outcome => check("cuEventQuery", outcome).map(|()| true),
        }
    }

    /// The device time between two events. Both must have a time and be complete.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let _guard = self.context.enter()?;
        // SAFETY: both events live until they are dropped.
        let milliseconds = unsafe { event::elapsed(earlier.handle, self.handle) };
        Ok(f64::from(check("cuEventElapsedTime", milliseconds)?) / 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.enter() {
            // SAFETY: it is no longer used. The driver frees it once it is complete.
            let _ = unsafe { event::destroy(self.handle) };
        }
    }
}
