//! The reduction that the ring applies to arriving data.

/// A reduction of bytes that hold elements.
pub trait Combine: Sync {
    /// Size of an element; a divisor of 64.
    fn element_bytes(&self) -> usize;

    /// own = incoming op own, for as many whole elements as both have. With `finish` these are then
    /// all contributions.
    fn combine(&self, own: &mut [u8], incoming: &[u8], finish: bool);

    /// Finishes data that is the only contribution.
    fn finish(&self, own: &mut [u8]);
}
