//! The stock of parcels: those that came back are filled again, because new memory costs three times
//! as much as packing. It must not keep more of them than there is use for.

use super::parcel::Parcel;
use crate::codec::Wire;
use std::time::Instant;

/// After this many exchanges it lets go of what was not needed in any of them: at a lower density
/// fewer are needed than at the start of the ramp.
const EXCHANGES: usize = 64;

#[derive(Default)]
pub struct Stock {
    spare: Vec<Parcel>,
    /// How many are out, and the most that have been since it last let go of some.
    out: usize,
    most_out: usize,
    exchanges: usize,
}

impl Stock {
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
            // Those that were used last are the last, and may still be in the cache.
            let superfluous = self.spare.len().saturating_sub(self.most_out - self.out);
            self.spare.drain(..superfluous);
            (self.most_out, self.exchanges) = (self.out, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many parcels, puts them back, and returns how many are in stock then.
    fn exchange(stock: &mut Stock, parcels: usize) -> usize {
        let out: Vec<_> = (0..parcels).map(|_| stock.take(Wire::F16, Instant::now())).collect();
        out.into_iter().for_each(|parcel| stock.put_back(parcel));
        stock.end_exchange();
        stock.spare.len()
    }

    #[test]
    fn small_exchanges_between_large_ones_take_nothing_from_the_stock() {
        let mut stock = Stock::default();
        for turn in 0..5 * EXCHANGES {
            let parcels = if turn % 3 == 0 { 7 } else { 1 };
            assert_eq!(exchange(&mut stock, parcels), 7);
        }
    }

    #[test]
    fn what_is_not_needed_any_more_is_let_go() {
        let mut stock = Stock::default();
        exchange(&mut stock, 7);
        let kept: Vec<_> = (0..2 * EXCHANGES).map(|_| exchange(&mut stock, 2)).collect();
        assert_eq!((kept[0], kept.last()), (7, Some(&2)));
    }

    #[test]
    fn parcels_that_are_out_count_as_needed() {
        let mut stock = Stock::default();
        let out: Vec<_> = (0..3).map(|_| stock.take(Wire::F16, Instant::now())).collect();
        exchange(&mut stock, 7);
        let kept: Vec<_> = (1..2 * EXCHANGES).map(|_| exchange(&mut stock, 2)).collect();
        assert_eq!((kept[0], kept.last()), (7, Some(&2)), "beside the three that are out");
        out.into_iter().for_each(|parcel| stock.put_back(parcel));
        for _ in 0..EXCHANGES {
            exchange(&mut stock, 1);
        }
        assert_eq!(stock.spare.len(), 3, "as many as were out when it last let go of some");
    }
}
