//! The operations that folds are compiled for. An operation must not depend on an element's
//! position or on the number of elements: the tail of a buffer is folded like its middle.

use super::number::{Divisible, Number};

pub trait ReduceOp<N> {
    /// Whether `finish` changes anything. If not, a single source is simply copied.
    const FINISHES: bool = false;

    fn combine(first: N, second: N) -> N;

    /// Applied to the folded number before it is stored.
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

impl<N: Number> ReduceOp<N> for Sum {
    #[inline(always)]
    fn combine(first: N, second: N) -> N {
        first.add(second)
    }
}

impl<N: Divisible> ReduceOp<N> for Average {
    const FINISHES: bool = true;

    #[inline(always)]
    fn combine(first: N, second: N) -> N {
        first.add(second)
    }

    #[inline(always)]
    fn finish(folded: N, ranks: usize) -> N {
        folded.divide(ranks)
    }
}

impl<N: Number> ReduceOp<N> for Product {
    #[inline(always)]
    fn combine(first: N, second: N) -> N {
        first.multiply(second)
    }
}

impl<N: Number> ReduceOp<N> for Min {
    #[inline(always)]
    fn combine(first: N, second: N) -> N {
        first.smaller(second)
    }
}

impl<N: Number> ReduceOp<N> for Max {
    #[inline(always)]
    fn combine(first: N, second: N) -> N {
        first.larger(second)
    }
}
