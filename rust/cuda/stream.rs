//! A stream that somebody else owns: what is put on it happens in order, some time later. Nothing here
//! waits for that, but for [`Stream::synchronize`], which has a limit.

use super::context::Context;
use super::driver::checked;
use super::event::Event;
use super::fault::{Fault, Result};
use cudarc::driver::result::{self, stream};
use cudarc::driver::sys::{CUdeviceptr, CUstream, CUstreamCaptureStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often [`Stream::synchronize`] looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub struct Stream {
    pub context: Arc<Context>,
    handle: CUstream,
}

// SAFETY: the driver lets any thread put something on a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The stream with this raw handle, which must stay valid as long as this.
    pub fn borrowed(context: &Arc<Context>, handle: u64) -> Stream {
        Stream { context: context.clone(), handle: handle as CUstream }
    }

    pub(super) fn handle(&self) -> CUstream {
        self.handle
    }

    /// The raw handle.
    pub fn raw(&self) -> u64 {
        self.handle as u64
    }

    /// Marks what is on the stream now.
    pub fn record(&self) -> Result<Event> {
        Event::recorded(&self.context, self.handle, false)
    }

    /// The same, with the time at which the device gets there.
    pub(super) fn record_with_time(&self) -> Result<Event> {
        Event::recorded(&self.context, self.handle, true)
    }

    /// What is put on the stream from now on happens after the event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.context.enter()?;
        let flags = cudarc::driver::sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are valid.
        let outcome = unsafe { stream::wait_event(self.handle, event.handle(), flags) };
        checked("cuStreamWaitEvent", outcome)
    }

    /// Whether what is put on the stream is recorded into a graph rather than done.
    pub fn is_capturing(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is valid.
        let status = checked("cuStreamIsCapturing", unsafe { stream::is_capturing(self.handle) })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Waits until all that is on the stream is over.
    pub fn synchronize(&self, limit: Duration) -> Result<()> {
        let (mark, start) = (self.record()?, Instant::now());
        while !mark.is_complete()? {
            if start.elapsed() > limit {
                let waited = limit.as_secs_f64();
                return Err(Fault(format!("the GPU was not done after {waited:.1} s")));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Copies memory of the device.
    ///
    /// # Safety
    /// Both are memory of this device, valid when the stream gets there, and do not overlap.
    pub(super) unsafe fn copy(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { result::memcpy_dtod_async(to, from, bytes, self.handle) };
        checked("cuMemcpyDtoDAsync", outcome)
    }

    /// Fills memory of the device with zeros.
    ///
    /// # Safety
    /// It is memory of this device, valid when the stream gets there.
    pub(super) unsafe fn clear(&self, to: CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { result::memset_d8_async(to, 0, bytes, self.handle) };
        checked("cuMemsetD8Async", outcome)
    }

    /// Copies from the memory of the host, and waits until that is done: the driver may read it later.
    ///
    /// # Safety
    /// `to` is memory of this device, valid when the stream gets there, for as many elements.
    pub(super) unsafe fn upload(
        &self,
        to: CUdeviceptr,
        from: Vec<f32>,
        limit: Duration,
    ) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the caller's promise; the numbers are there until they were read.
        let outcome = unsafe { result::memcpy_htod_async(to, &from, self.handle) };
        checked("cuMemcpyHtoDAsync", outcome)?;
        self.synchronize(limit).inspect_err(|_| {
            // The copy may still come: better never freed than read by the device when it is gone.
            std::mem::forget(from);
        })
    }

    /// Copies to the memory of the host, and waits until that is done.
    ///
    /// # Safety
    /// `from` is memory of this device, valid when the stream gets there, with as many elements.
    pub(super) unsafe fn download(
        &self,
        from: CUdeviceptr,
        elements: usize,
        limit: Duration,
    ) -> Result<Vec<f32>> {
        // First: a stream that never gets there must not be left with memory that is gone.
        self.synchronize(limit)?;
        let mut numbers = vec![0.0; elements];
        if elements > 0 {
            let _entered = self.context.enter()?;
            // SAFETY: the caller's promise; the numbers are there until the wait is over.
            let outcome = unsafe { result::memcpy_dtoh_async(&mut numbers, from, self.handle) };
            checked("cuMemcpyDtoHAsync", outcome)?;
            if let Err(fault) = self.synchronize(limit) {
                // The copy may still come: better never freed than written to by the device.
                std::mem::forget(numbers);
                return Err(fault);
            }
        }
        Ok(numbers)
    }
}
