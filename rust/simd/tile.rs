//! A tile: scratch space on the stack for the intermediate results of a few elements, small enough
//! to stay in the L1 cache next to the sources. It is never read before it is written.

use std::mem::MaybeUninit;

const BYTES: usize = 4096;

#[repr(C, align(64))]
pub struct Tile(MaybeUninit<[u8; BYTES]>);

impl Tile {
    #[inline(always)]
    pub fn new() -> Tile {
        Tile(MaybeUninit::uninit())
    }

    /// How many numbers of this type fit.
    #[inline(always)]
    pub const fn capacity<N>() -> usize {
        BYTES / size_of::<N>()
    }

    /// Stores `numbers`, of which there must be no more than the capacity, and returns them.
    #[inline(always)]
    pub fn fill<N: Copy>(&mut self, numbers: impl ExactSizeIterator<Item = N>) -> &mut [N] {
        const { assert!(align_of::<N>() <= align_of::<Tile>()) }
        let count = numbers.len().min(Tile::capacity::<N>());
        let start = self.0.as_mut_ptr().cast::<N>();
        // SAFETY: `count` numbers fit and are aligned; the type says that they are uninitialised.
        let slots =
            unsafe { std::slice::from_raw_parts_mut(start.cast::<MaybeUninit<N>>(), count) };
        let mut filled = 0;
        for (slot, number) in slots.iter_mut().zip(numbers) {
            slot.write(number);
            filled += 1;
        }
        // SAFETY: the first `filled` slots were just written.
        unsafe { std::slice::from_raw_parts_mut(start, filled) }
    }
}
