//! A typed range of device memory that somebody else owns. It is an address, not a borrow:
//! enqueueing work on one is `unsafe`, because the memory has to outlive that work.

use crate::simd::element::Element;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    pub address: u64,
    pub element: Element,
    /// In elements, not bytes.
    pub count: usize,
}
