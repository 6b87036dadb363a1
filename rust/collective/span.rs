//! A span: the memory of one tensor, as the engine sees it.

use std::ops::Range;

/// Bytes that belong to an operation for as long as it runs. Nobody else in this process touches
/// them meanwhile; ranks of the same host may, between the steps of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub address: *mut u8,
    pub bytes: usize,
}

// SAFETY: a span is an address; what may be done with the memory is said where it is used.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

/// The tensors of one operation: what it reads, and what it fills or changes in place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    pub inputs: Vec<Span>,
    pub outputs: Vec<Span>,
}

impl Span {
    pub fn of(bytes: &mut [u8]) -> Span {
        Span { address: bytes.as_mut_ptr(), bytes: bytes.len() }
    }

    /// The address of a byte of this span, or of its end.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes);
        // SAFETY: just checked to be within the memory that the span stands for.
        unsafe { self.address.add(offset) }
    }

    /// A part of this span.
    pub fn part(&self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.bytes);
        Span { address: self.at(range.start), bytes: range.end - range.start }
    }

    /// The bytes themselves.
    ///
    /// # Safety
    /// Nobody else may touch them while the slice lives.
    pub unsafe fn as_slice<'a>(&self) -> &'a mut [u8] {
        if self.bytes == 0 {
            // An empty tensor may have no address.
            return &mut [];
        }
        // SAFETY: the memory is valid as long as the operation runs; the caller vouches for the
        // rest.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }

    /// Copies `bytes` from elsewhere into this span, which must be as long.
    ///
    /// # Safety
    /// `from` must be readable for that many bytes, overlap nothing of this span, and nobody may
    /// write the one or touch the other meanwhile.
    pub unsafe fn copy_from(&self, from: *const u8) {
        // SAFETY: as the caller vouches.
        unsafe { from.copy_to_nonoverlapping(self.address, self.bytes) }
    }

    /// Copies this span to memory elsewhere.
    ///
    /// # Safety
    /// `to` must be writable for as many bytes, overlap nothing of this span, and nobody may write
    /// the one or touch the other meanwhile.
    pub unsafe fn copy_to(&self, to: *mut u8) {
        // SAFETY: as the caller vouches.
        unsafe { self.address.copy_to_nonoverlapping(to, self.bytes) }
    }
}
