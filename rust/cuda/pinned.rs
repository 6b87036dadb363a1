//! DeviceMemory of the host that a device writes to by itself, some time later. It is kept for the next who needs
//! some and never given back: nobody knows what a device that stands still may yet write.

use super::context::Context;
use super::driver::checked;
use super::fault::Result;
use super::stream::Stream;
use cudarc::driver::result;
use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use std::sync::{Mutex, PoisonError};

/// Words of 32 bits.
#[derive(Debug)]
pub struct PinnedBuffer {
    address: *mut u32,
    words: usize,
}

// SAFETY: it is plain memory, valid in the whole process for as long as that lives.
unsafe impl Send for PinnedBuffer {}

/// What nobody needs now.
static SPARE: Mutex<Vec<PinnedBuffer>> = Mutex::new(Vec::new());

impl PinnedBuffer {
    /// At least so many words, of which nobody knows what is in them.
    pub fn take(context: &Context, words: usize) -> Result<PinnedBuffer> {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = spare.iter().position(|one| one.words >= words);
        if let Some(position) = fits {
            return Ok(spare.swap_remove(position));
        }
        drop(spare);
        let _entered = context.enter()?;
        // A little more than asked for: the next exchange may be a little larger.
        let words = words.next_power_of_two().max(1024);
        // SAFETY: nothing is read of it before it was written.
        let taken =
            unsafe { result::malloc_host(words * size_of::<u32>(), CU_MEMHOSTALLOC_PORTABLE) };
        Ok(PinnedBuffer { address: checked("cuMemHostAlloc", taken)?.cast(), words })
    }

    /// Has the device copy so many words from its memory to here, from word `first` on, when the stream
    /// gets there.
    ///
    /// # Safety
    /// `from` is memory of the stream's device with as many words, valid when the stream gets there.
    pub unsafe fn fill(
        &mut self,
        stream: &Stream,
        first: usize,
        words: usize,
        from: u64,
    ) -> Result<()> {
        assert!(first + words <= self.words, "gflow: there is scratch for what is copied");
        let _entered = stream.context.enter()?;
        // SAFETY: the words are there, and nobody reads them before the stream has got there.
        let to = unsafe { std::slice::from_raw_parts_mut(self.address.add(first), words) };
        // SAFETY: the caller's promise; the memory is never given back.
        let copied = unsafe { result::memcpy_dtoh_async(to, from, stream.handle()) };
        checked("cuMemcpyDtoHAsync", copied)
    }

    /// So many words.
    ///
    /// # Safety
    /// They were all filled, and the stream has got past that.
    pub unsafe fn words(&self, words: usize) -> &[u32] {
        assert!(words <= self.words, "gflow: there are as many words");
        // SAFETY: they are there, and by the caller's promise nobody writes them any more.
        unsafe { std::slice::from_raw_parts(self.address, words) }
    }

    /// Keeps it for the next who needs some. The device must be done with it.
    pub fn keep(self) {
        SPARE.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }
}
