//! Huge pages for memory that is read from one end to the other: fewer TLB misses, and the CPU's
//! prefetching doesn't stop every 4 KiB.

use rustix::mm::{Advice, madvise};

/// The size of a huge page on most systems. Buffers of less than two aren't worth a call.
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4 << 10;

/// Asks for huge pages where this memory hasn't been touched yet. The kernel may decline.
///
/// # Safety
/// The memory must be mapped and private to this process. Its content doesn't change.
pub unsafe fn prefer(address: *mut u8, bytes: usize) {
    if bytes < 2 * HUGE_PAGE {
        return;
    }
    let start = (address as usize).next_multiple_of(PAGE);
    let end = (address as usize + bytes) / PAGE * PAGE;
    // SAFETY: whole pages of the caller's memory; the advice doesn't change their content.
    let _ = unsafe { madvise(start as *mut _, end - start, Advice::LinuxHugepage) };
}

/// Zeros, in huge pages if possible.
pub fn zeros(count: usize) -> Vec<f32> {
    let mut zeros = vec![0.0; count];
    // SAFETY: the vector's own memory, still untouched zero pages.
    unsafe { prefer(zeros.as_mut_ptr().cast(), count * size_of::<f32>()) };
    zeros
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_its_content() {
        for count in [0, 1, 1 << 20, (3 << 20) + 17] {
            let mut zeros = zeros(count);
            assert!(zeros.len() == count && zeros.iter().all(|zero| *zero == 0.0));
            zeros.iter_mut().enumerate().for_each(|(index, value)| *value = index as f32);
            // SAFETY: as in `zeros`.
            unsafe { prefer(zeros.as_mut_ptr().cast(), count * 4) };
            assert!(zeros.iter().enumerate().all(|(index, value)| *value == index as f32));
        }
    }
}
