//! Numbers: what can be calculated with, and how an element in memory becomes one.
//!
//! Everything here is `#[inline(always)]`, so that it is compiled for the instruction set of the
//! kernel it ends up in. Nothing here may panic: an overflow of integers wraps.

/// A number, or a register full of them.
pub trait Number: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// The smaller; a NaN if either is one. Of two equal ones, `other` (zeros differ in sign).
    fn smaller(self, other: Self) -> Self;
    /// The larger, in the same way.
    fn larger(self, other: Self) -> Self;
}

/// A number that can be divided: floats exactly as they can, integers towards zero.
pub trait Divisible: Number {
    fn divide(self, by: usize) -> Self;
}

/// One element in memory, or as many as a register holds.
pub trait Stored: Copy {
    /// What it is calculated with: itself, or something wider.
    type Number: Number;
    /// How many elements this is.
    const COUNT: usize;
    fn widen(self) -> Self::Number;
    /// The nearest that can be stored, ties to even.
    fn narrow(number: Self::Number) -> Self;
}

/// Two numbers, or registers of them, from two places next to each other in memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Pair<N>(pub N, pub N);

impl<N: Number> Number for Pair<N> {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Pair(self.0.add(other.0), self.1.add(other.1))
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        Pair(self.0.multiply(other.0), self.1.multiply(other.1))
    }

    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        Pair(self.0.smaller(other.0), self.1.smaller(other.1))
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        Pair(self.0.larger(other.0), self.1.larger(other.1))
    }
}

impl<N: Divisible> Divisible for Pair<N> {
    #[inline(always)]
    fn divide(self, by: usize) -> Self {
        Pair(self.0.divide(by), self.1.divide(by))
    }
}

macro_rules! float {
    ($float:ty) => {
        impl Number for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                // With `other` a NaN the comparison fails, which picks it.
                let smaller = if self < other { self } else { other };
                if self.is_nan() { self } else { smaller }
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                let larger = if self > other { self } else { other };
                if self.is_nan() { self } else { larger }
            }
        }

        impl Divisible for $float {
            #[inline(always)]
            fn divide(self, by: usize) -> Self {
                self / by as $float
            }
        }
    };
}

macro_rules! integer {
    ($integer:ty) => {
        impl Number for $integer {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
        }

        impl Divisible for $integer {
            #[inline(always)]
            fn divide(self, by: usize) -> Self {
                // Wider, because the number of ranks may not fit into the type.
                (self as i64).wrapping_div(by as i64) as $integer
            }
        }
    };
}

macro_rules! stored_as_itself {
    ($($number:ty),*) => {
        $(impl Stored for $number {
            type Number = Self;
            const COUNT: usize = 1;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(number: Self) -> Self {
                number
            }
        })*
    };
}

float!(f32);
float!(f64);
integer!(i8);
integer!(u8);
integer!(i32);
integer!(i64);
stored_as_itself!(f32, f64, i8, u8, i32, i64);
