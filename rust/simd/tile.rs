//! A tile: room on the stack for the numbers of a short stretch, small enough to stay in the
//! first-level cache beside the stretches of the sources. It is never read before it is written.

use std::mem::MaybeUninit;

const BYTES: usize = 4096;

#[repr(C, align(64))]
pub struct Tile(MaybeUninit<[u8; BYTES]>);

impl Tile {
    #[inline(always)]
    pub fn new() -> Tile {
        Tile(MaybeUninit::uninit())
    }

    /// How many numbers of this type have room.
    #[inline(always)]
    pub const fn room<N>() -> usize {
        BYTES / size_of::<N>()
    }

    /// Fills it with `numbers`, which must not be more than there is room for.
    #[inline(always)]
    pub fn fill<N: Copy>(&mut self, numbers: impl ExactSizeIterator<Item = N>) -> &mut [N] {
        const { assert!(align_of::<N>() <= align_of::<Tile>()) }
        let count = numbers.len().min(Tile::room::<N>());
        let start = self.0.as_mut_ptr().cast::<N>();
        // SAFETY: `count` numbers have room and are aligned; uninitialised is what the type says.
        let room = unsafe { std::slice::from_raw_parts_mut(start.cast::<MaybeUninit<N>>(), count) };
        let mut filled = 0;
        for (place, number) in room.iter_mut().zip(numbers) {
            place.write(number);
            filled += 1;
        }
        // SAFETY: the first `filled` of them were written just now.
        unsafe { std::slice::from_raw_parts_mut(start, filled) }
    }
}
