//! A stream that is owned elsewhere. Calls return as soon as the work is enqueued, except the few
//! that say that they wait; those take a timeout.

use super::context::Context;
use super::event::Event;
use crate::cuda::sys::driver::check;
use crate::cuda::sys::fault::{Fault, Result};
use cudarc::driver::result::{self, stream};
use cudarc::driver::sys::{CUdeviceptr, CUstream, CUstreamCaptureStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often [`Stream::synchronize`] polls.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A number that is copied to and from device memory: any bits are valid.
pub trait Number: Copy + Default {}
impl Number for f32 {}
impl Number for u16 {}

#[derive(Debug)]
pub struct Stream {
    pub context: Arc<Context>,
    handle: CUstream,
}

// SAFETY: the driver lets any thread enqueue on a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Wraps a raw stream handle, which must stay valid for as long as this value.
    pub fn borrowed(context: &Arc<Context>, handle: u64) -> Stream {
        Stream { context: context.clone(), handle: handle as CUstream }
    }

    pub(in crate::cuda) fn handle(&self) -> CUstream {
        self.handle
    }

    /// The raw handle.
    pub fn raw(&self) -> u64 {
        self.handle as u64
    }

    /// Records an event behind what is on the stream now.
    pub fn record(&self) -> Result<Event> {
        Event::record(&self.context, self.handle, false)
    }

    /// Like [`Stream::record`], with the time at which the device gets there.
    pub fn record_with_time(&self) -> Result<Event> {
        Event::record(&self.context, self.handle, true)
    }

    /// Makes what is enqueued from now on run after the event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _guard = self.context.enter()?;
        let flags = cudarc::driver::sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are valid.
        let outcome = unsafe { stream::wait_event(self.handle, event.handle(), flags) };
        check("cuStreamWaitEvent", outcome)
    }

    /// Whether the stream is being captured into a graph.
    pub fn is_capturing(&self) -> Result<bool> {
        let _guard = self.context.enter()?;
        // SAFETY: the stream is valid.
        let status = check("cuStreamIsCapturing", unsafe { stream::is_capturing(self.handle) })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Waits until everything that is on the stream now has run.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let (end, start) = (self.record()?, Instant::now());
        while !end.is_complete()? {
            if start.elapsed() > timeout {
                let waited = timeout.as_secs_f64();
                return Err(Fault(format!("the GPU was not done after {waited:.1} s")));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Enqueues a copy within device memory.
    ///
    /// # Safety
    /// Both ranges are memory of this device, valid when the stream gets there, and do not overlap.
    pub unsafe fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _guard = self.context.enter()?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { result::memcpy_dtod_async(to, from, bytes, self.handle) };
        check("cuMemcpyDtoDAsync", outcome)
    }

    /// Enqueues zeroing device memory.
    ///
    /// # Safety
    /// It is memory of this device, valid when the stream gets there.
    pub unsafe fn zero(&self, to: CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _guard = self.context.enter()?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { result::memset_d8_async(to, 0, bytes, self.handle) };
        check("cuMemsetD8Async", outcome)
    }

    /// Copies from host memory, and waits until the stream has done it.
    ///
    /// # Safety
    /// `to` is memory of this device with room for all elements, valid when the stream gets there.
    pub unsafe fn upload<T: Number>(
        &self,
        to: CUdeviceptr,
        from: Vec<T>,
        timeout: Duration,
    ) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let _guard = self.context.enter()?;
        // SAFETY: the caller's promise; `from` lives until the copy is done, or forever.
        let outcome = unsafe { result::memcpy_htod_async(to, &from, self.handle) };
        check("cuMemcpyHtoDAsync", outcome)?;
        self.synchronize(timeout).inspect_err(|_| {
            // The device may still read it: leak it rather than free it under the copy.
            std::mem::forget(from);
        })
    }

    /// Copies to host memory, and waits until the stream has done it.
    ///
    /// # Safety
    /// `from` is memory of this device with that many elements, valid when the stream gets there.
    pub unsafe fn download<T: Number>(
        &self,
        from: CUdeviceptr,
        elements: usize,
        timeout: Duration,
    ) -> Result<Vec<T>> {
        // First: enqueue nothing into host memory behind work that never ends.
        self.synchronize(timeout)?;
        let mut values = vec![T::default(); elements];
        if elements > 0 {
            let _guard = self.context.enter()?;
            // SAFETY: the caller's promise; `values` lives until the copy is done, or forever.
            let outcome = unsafe { result::memcpy_dtoh_async(&mut values, from, self.handle) };
            check("cuMemcpyDtoHAsync", outcome)?;
            if let Err(fault) = self.synchronize(timeout) {
                // The device may still write to it: leak it.
                std::mem::forget(values);
                return Err(fault);
            }
        }
        Ok(values)
    }
}
