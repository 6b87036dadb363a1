//! A range of typed elements in device memory that somebody else owns. It is an address, not a borrow:
//! whoever enqueues work on it promises that the memory outlives that work.

use crate::simd::element::Element;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    pub address: u64,
    pub element: Element,
    /// In elements, not bytes.
    pub count: usize,
}
