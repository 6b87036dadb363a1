//! An event: a mark in the order of a stream, which another stream can wait for, or which somebody
//! can ask whether it was reached. Asking never waits.

use super::context::Context;
use super::driver::checked;
use super::fault::Result;
use cudarc::driver::result::{DriverError, event};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUresult, CUstream};
use std::sync::Arc;

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
    /// Marks what is on a stream of this context now. `stream` is one of its raw handles. Only one with
    /// a time can be asked when it was reached, and it takes a little longer.
    pub(super) fn recorded(
        context: &Arc<Context>,
        stream: CUstream,
        has_time: bool,
    ) -> Result<Event> {
        let _entered = context.enter()?;
        let flags = match has_time {
            true => CUevent_flags::CU_EVENT_DEFAULT,
            false => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let handle = checked("cuEventCreate", event::create(flags))?;
        let event = Event { context: context.clone(), handle };
        // SAFETY: the event is new, and the stream is the caller's promise.
        checked("cuEventRecord", unsafe { event::record(handle, stream) })?;
        Ok(event)
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }

    /// Whether all that was on the stream is over; an error if the device has failed.
    pub fn is_complete(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is there until it is dropped.
        match unsafe { event::query(self.handle) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            outcome => checked("cuEventQuery", outcome).map(|()| true),
        }
    }

    /// How long it was from when the device had reached the other one until it reached this; both have a
    /// time, and were reached.
    pub(super) fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let _entered = self.context.enter()?;
        // SAFETY: both events are there until they are dropped.
        let milliseconds = unsafe { event::elapsed(earlier.handle, self.handle) };
        Ok(f64::from(checked("cuEventElapsedTime", milliseconds)?) / 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: nobody has it any more. The driver lets go of it when it was reached; where it
            // fails, nothing is left to do.
            let _ = unsafe { event::destroy(self.handle) };
        }
    }
}
