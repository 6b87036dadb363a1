//! Reuses parcels that came back, because new memory costs three times as much as packing. It keeps no
//! more of them than recent exchanges needed.

use super::parcel::Parcel;
use crate::codec::Wire;
use std::time::Instant;

/// After this many exchanges the pool frees the parcels that none of them needed: at a lower density
/// fewer are needed than at the start of the ramp.
const EXCHANGES: usize = 64;

#[derive(Default)]
pub struct ParcelPool {
    spare: Vec<Parcel>,
    /// How many are in use, and the most that were since it last freed some.
    out: usize,
    most_out: usize,
    exchanges: usize,
}

impl ParcelPool {
    /// An empty parcel.
    pub fn take(&mut self, wire: Wire, deadline: Instant) -> Parcel {
        self.out += 1;
        self.most_out = self.most_out.max(self.out);
        Parcel::new(wire, deadline, self.spare.pop())
    }

    pub fn put_back(&mut self, parcel: Parcel) {
        self.out -= 1;
        self.spare.push(parcel);
    }

    /// All parcels of an exchange are back.
    pub fn end_exchange(&mut self) {
        self.exchanges += 1;
        if self.exchanges == EXCHANGES {
            // The parcels used last are at the end, and may still be in the cache.
            let superfluous = self.spare.len().saturating_sub(self.most_out - self.out);
            self.spare.drain(..superfluous);
            (self.most_out, self.exchanges) = (self.out, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `parcels` parcels, puts them back, and returns how many are spare then.
    fn exchange(pool: &mut ParcelPool, parcels: usize) -> usize {
        let out: Vec<_> = (0..parcels).map(|_| pool.take(Wire::F16, Instant::now())).collect();
        out.into_iter().for_each(|parcel| pool.put_back(parcel));
        pool.end_exchange();
        pool.spare.len()
    }

    #[test]
    fn small_exchanges_between_large_ones_take_nothing_from_the_pool() {
        let mut pool = ParcelPool::default();
        for turn in 0..5 * EXCHANGES {
            let parcels = if turn % 3 == 0 { 7 } else { 1 };
            assert_eq!(exchange(&mut pool, parcels), 7);
        }
    }

    #[test]
    fn what_is_not_needed_any_more_is_let_go() {
        let mut pool = ParcelPool::default();
        exchange(&mut pool, 7);
        let kept: Vec<_> = (0..2 * EXCHANGES).map(|_| exchange(&mut pool, 2)).collect();
        assert_eq!((kept[0], kept.last()), (7, Some(&2)));
    }

    #[test]
    fn parcels_that_are_out_count_as_needed() {
        let mut pool = ParcelPool::default();
        let out: Vec<_> = (0..3).map(|_| pool.take(Wire::F16, Instant::now())).collect();
        exchange(&mut pool, 7);
        let kept: Vec<_> = (1..2 * EXCHANGES).map(|_| exchange(&mut pool, 2)).collect();
        assert_eq!((kept[0], kept.last()), (7, Some(&2)), "besides the three that are out");
        out.into_iter().for_each(|parcel| pool.put_back(parcel));
        for _ in 0..EXCHANGES {
            exchange(&mut pool, 1);
        }
        assert_eq!(pool.spare.len(), 3, "as many as were out when it last freed some");
    }
}
