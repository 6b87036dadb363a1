//! A byte slice as blocks of floats. The tail is loaded into one more block, padded with zeros, and
//! kernels treat it like any other, so the end of a slice is calculated like its middle.
//!
//! Blocks need no alignment.

use super::number::Pod;
use std::mem::MaybeUninit;

/// The floats of an `S`, at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub struct Block<S: Pod>(pub S);

/// The whole blocks of `bytes`, and the tail.
#[inline(always)]
pub fn blocks<S: Pod>(bytes: &[u8]) -> (&[Block<S>], &[u8]) {
    let (whole, tail) = bytes.split_at(bytes.len() - bytes.len() % size_of::<S>());
    let count = whole.len() / size_of::<S>();
    // SAFETY: that many blocks fit into the bytes, need no alignment, and may hold any bits.
    (unsafe { std::slice::from_raw_parts(whole.as_ptr().cast(), count) }, tail)
}

/// The whole blocks of `bytes`, and the tail.
#[inline(always)]
pub fn blocks_mut<S: Pod>(bytes: &mut [u8]) -> (&mut [Block<S>], &mut [u8]) {
    let (whole, tail) = bytes.split_at_mut(bytes.len() - bytes.len() % size_of::<S>());
    let count = whole.len() / size_of::<S>();
    // SAFETY: as for `blocks`; the borrow is the only one.
    (unsafe { std::slice::from_raw_parts_mut(whole.as_mut_ptr().cast(), count) }, tail)
}

impl<S: Pod> Block<S> {
    /// The tail of a slice, at most a block, padded with zeros.
    #[inline(always)]
    pub fn load_tail(tail: &[u8]) -> Block<S> {
        assert!(tail.len() <= size_of::<S>());
        let mut block = MaybeUninit::<Block<S>>::zeroed();
        // SAFETY: the tail fits; all bytes are initialised, and a block may hold any bits.
        unsafe {
            block.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(tail.as_ptr(), tail.len());
            block.assume_init()
        }
    }

    /// Stores the part of the block that belongs to the tail of a slice.
    #[inline(always)]
    pub fn store_tail(&self, tail: &mut [u8]) {
        assert!(tail.len() <= size_of::<S>());
        let from = (&raw const self.0).cast::<u8>();
        // SAFETY: the block has at least that many bytes and doesn't overlap the slice.
        unsafe { tail.as_mut_ptr().copy_from_nonoverlapping(from, tail.len()) };
    }
}

/// How far ahead to prefetch: the CPU's own prefetching stops at the end of a page.
const PREFETCH_DISTANCE: usize = 4096;

/// Prefetches the memory a page after this block into the L2 cache. A hint only: harmless past the
/// end of the buffer. Makes passes over large buffers 7 % faster (measured).
#[inline(always)]
pub fn prefetch<S: Pod>(block: &Block<S>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        const CACHE_LINE: usize = 64;
        let ahead = (&raw const *block).cast::<i8>().wrapping_add(PREFETCH_DISTANCE);
        for line in 0..size_of::<S>().div_ceil(CACHE_LINE) {
            // SAFETY: the instruction accepts any address, and every x86-64 CPU has it.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * CACHE_LINE)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (block, PREFETCH_DISTANCE);
}

/// Memory that is needed soon: prefetched a part at a time while something else is computed. All at once
/// would fill the CPU's queue of misses, and the loads behind it would wait.
#[derive(Debug, Clone, Copy)]
pub struct Upcoming {
    start: usize,
    bytes_of_part: usize,
}

impl Upcoming {
    pub const NOTHING: Upcoming = Upcoming { start: 0, bytes_of_part: 0 };

    /// As much memory as these elements take, right after them, in so many parts. It need not exist.
    #[inline(always)]
    pub fn after<T>(elements: &[T], parts: usize) -> Upcoming {
        let start = elements.as_ptr_range().end.addr();
        Upcoming { start, bytes_of_part: size_of_val(elements) / parts }
    }

    /// Prefetches the part with this index, of at most two cache lines.
    #[inline(always)]
    pub fn prefetch(&self, part: usize) {
        let first = self.start + part * self.bytes_of_part;
        #[cfg(target_arch = "x86_64")]
        for address in [first, first + self.bytes_of_part / 2] {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: the instruction accepts any address, and every x86-64 CPU has it.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = first;
    }
}

pub fn bytes_of<T: Pod>(elements: &[T]) -> &[u8] {
    // SAFETY: the memory of the elements, whose bytes are all initialised.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

pub fn bytes_of_mut<T: Pod>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as for `bytes_of`; any bytes written are valid elements.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// The bytes as elements; None if they aren't aligned or not a whole number of elements.
pub fn elements_of_mut<T: Pod>(bytes: &mut [u8]) -> Option<&mut [T]> {
    // SAFETY: any bits are a valid element.
    match unsafe { bytes.align_to_mut() } {
        ([], elements, []) => Some(elements),
        _ => None,
    }
}
