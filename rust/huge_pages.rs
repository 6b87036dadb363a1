//! Huge pages for memory that is gone through from one end to the other: fewer misses of the
//! processor's table of pages, and its prefetching does not stop at every 4 KiB.

use rustix::mm::{Advice, madvise};

/// The size of a huge page on most systems; less than a few of them is not worth a call.
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4 << 10;

/// Asks the system for huge pages where this memory has not been touched yet. It may decline.
///
/// # Safety
/// The memory must be there, and private to this process. Its content stays what it is.
pub unsafe fn prefer(address: *mut u8, bytes: usize) {
    if bytes < 2 * HUGE_PAGE {
        return;
    }
    let start = (address as usize).next_multiple_of(PAGE);
    let end = (address as usize + bytes) / PAGE * PAGE;
    // SAFETY: whole pages of the caller's memory; the advice changes no content.
    let _ = unsafe { madvise(start as *mut _, end - start, Advice::LinuxHugepage) };
}

/// Zeros in memory of which the system was asked to make huge pages.
pub fn zeros(count: usize) -> Vec<f32> {
    let mut zeros = vec![0.0; count];
    // SAFETY: the vector's own memory; its zeros are pages that nobody has touched.
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
