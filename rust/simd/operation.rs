//! The operations that a kernel is compiled for. An operation must never depend on where an
//! element lies or on how many there are: the tail of a buffer is folded like its middle.

use super::number::{Divisible, Number};

pub trait Operation<N> {
    /// Whether `finish` changes anything; a lone source that it does not change is only copied.
    const FINISHES: bool = false;

    fn join(first: N, second: N) -> N;

    /// What is done to the folded number before it is stored.
    #[inline(always)]
    fn finish(folded: N, _ranks: usize) -> N {
        folded
    }
}

pub struct Sum;
/// The sum, divided by the number of ranks.
pub struct Average;
pub struct Product;
pub struct Min;
pub struct Max;

impl<N: Number> Operation<N> for Sum {
    #[inline(always)]
    fn join(first: N, second: N) -> N {
        first.add(second)
    }
}

impl<N: Divisible> Operation<N> for Average {
    const FINISHES: bool = true;

    #[inline(always)]
    fn join(first: N, second: N) -> N {
        first.add(second)
    }

    #[inline(always)]
    fn finish(folded: N, ranks: usize) -> N {
        folded.divide(ranks)
    }
}

impl<N: Number> Operation<N> for Product {
    #[inline(always)]
    fn join(first: N, second: N) -> N {
        first.multiply(second)
    }
}

impl<N: Number> Operation<N> for Min {
    #[inline(always)]
    fn join(first: N, second: N) -> N {
        first.smaller(second)
    }
}

impl<N: Number> Operation<N> for Max {
    #[inline(always)]
    fn join(first: N, second: N) -> N {
        first.larger(second)
    }
}
