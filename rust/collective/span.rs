//! A span: address and length of one tensor's memory.

use std::ops::Range;

/// Bytes that belong to an operation while it runs. Nothing else in this process touches them
/// meanwhile; ranks of the same host may, as the steps of a collective allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub address: *mut u8,
    pub bytes: usize,
}

// SAFETY: a span is just an address; each access says why it is sound.
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

    /// The address of a byte of this span, or its end.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes);
        // SAFETY: just checked to be within the span.
        unsafe { self.address.add(offset) }
    }

    /// The bytes `range` of this span.
    pub fn subspan(&self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.bytes);
        Span { address: self.at(range.start), bytes: range.end - range.start }
    }

    /// # Safety
    /// Nobody may write the bytes while the slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        if self.bytes == 0 {
            // An empty tensor may have no address.
            return &[];
        }
        // SAFETY: the memory is valid while the operation runs; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    /// The slice borrows this span, but spans can be copied: that alone does not make it unique.
    ///
    /// # Safety
    /// Nobody else may touch the bytes while the slice lives.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }

    /// Fills this span with a copy of what is at `from`.
    ///
    /// # Safety
    /// `from` must be readable for as many bytes and not overlap this span. Nobody may write there
    /// or touch this span meanwhile.
    pub unsafe fn copy_from(&self, from: *const u8) {
        // SAFETY: as the caller vouches.
        unsafe { from.copy_to_nonoverlapping(self.address, self.bytes) }
    }

    /// Copies this span to `to`.
    ///
    /// # Safety
    /// `to` must be writable for as many bytes and not overlap this span. Nobody may touch that
    /// memory or write this span meanwhile.
    pub unsafe fn copy_to(&self, to: *mut u8) {
        // SAFETY: as the caller vouches.
        unsafe { self.address.copy_to_nonoverlapping(to, self.bytes) }
    }
}
