//! Pinned host memory that a device copies to. It is reused but never freed: a device that hangs
//! may still write to it.

use super::context::Context;
use super::stream::Stream;
use crate::cuda::sys::driver::check;
use crate::cuda::sys::fault::Result;
use crate::sync::lock;
use cudarc::driver::result;
use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use std::sync::Mutex;

/// A buffer of 32-bit words.
#[derive(Debug)]
pub struct PinnedBuffer {
    address: *mut u32,
    words: usize,
}

// SAFETY: it is plain memory, mapped until the process ends.
unsafe impl Send for PinnedBuffer {}

/// Buffers that are free for reuse.
static FREE: Mutex<Vec<PinnedBuffer>> = Mutex::new(Vec::new());

impl PinnedBuffer {
    /// An uninitialised buffer of at least `words` words.
    pub fn acquire(context: &Context, words: usize) -> Result<PinnedBuffer> {
        let mut free = lock(&FREE);
        let fitting = free.iter().position(|buffer| buffer.words >= words);
        if let Some(position) = fitting {
            return Ok(free.swap_remove(position));
        }
        drop(free);
        let _guard = context.enter()?;
        // A little more than needed: the next exchange may be a little larger.
        let words = words.next_power_of_two().max(1024);
        // SAFETY: nothing reads it before it is written.
        let allocated =
            unsafe { result::malloc_host(words * size_of::<u32>(), CU_MEMHOSTALLOC_PORTABLE) };
        Ok(PinnedBuffer { address: check("cuMemHostAlloc", allocated)?.cast(), words })
    }

    /// Enqueues a copy of `words` words from device memory to here, starting at word `first`.
    ///
    /// # Safety
    /// `from` is memory of the stream's device with that many words, valid when the stream gets
    /// there.
    pub unsafe fn copy_from_device(
        &mut self,
        stream: &Stream,
        first: usize,
        words: usize,
        from: u64,
    ) -> Result<()> {
        assert!(first + words <= self.words, "gflow: there is room for what is copied");
        let _guard = stream.context.enter()?;
        // SAFETY: the range is within the buffer, and nothing reads it before the copy is done.
        let to = unsafe { std::slice::from_raw_parts_mut(self.address.add(first), words) };
        // SAFETY: the caller's promise; the buffer is never freed.
        let copied = unsafe { result::memcpy_dtoh_async(to, from, stream.handle()) };
        check("cuMemcpyDtoHAsync", copied)
    }

    /// The first `words` words.
    ///
    /// # Safety
    /// All of them were copied to, and those copies are complete.
    pub unsafe fn words(&self, words: usize) -> &[u32] {
        assert!(words <= self.words, "gflow: there are as many words");
        // SAFETY: they are within the buffer, and the caller guarantees that nothing
        // writes to them.
        unsafe { std::slice::from_raw_parts(self.address, words) }
    }

    /// Makes it free for reuse. The device must be done with it.
    pub fn release(self) {
        lock(&FREE).push(self);
    }
}
