//! Numbers: what can be calculated with, and how an element in memory becomes one.
//!
//! Everything here is `#[inline(always)]`, so that it is compiled for the instruction set of the
//! kernel it ends up in. Nothing here may panic: an overflow of integers wraps.

/// What is only bits: memory may be taken for it, and it for memory.
///
/// # Safety
/// Any bits are a value of it, and it has no byte without a value.
pub unsafe trait Plain: Copy {}

/// A number, or a register full of them.
pub trait Number: Plain {
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

/// A float of single precision, or registers of them.
pub trait Float: Number {
    /// The same number everywhere.
    fn all(number: f32) -> Self;
    fn subtract(self, other: Self) -> Self;
    fn magnitude(self) -> Self;
    /// `yes` where `self` is finite, `no` where it is not.
    fn pick_if_finite(self, yes: Self, no: Self) -> Self;
}

/// One element in memory, or as many as a register holds.
pub trait Stored: Plain {
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

// SAFETY: the second follows the first without a gap, for both are of one type.
unsafe impl<T: Plain> Plain for Pair<T> {}

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

impl<N: Float> Float for Pair<N> {
    #[inline(always)]
    fn all(number: f32) -> Self {
        Pair(N::all(number), N::all(number))
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        Pair(self.0.subtract(other.0), self.1.subtract(other.1))
    }

    #[inline(always)]
    fn magnitude(self) -> Self {
        Pair(self.0.magnitude(), self.1.magnitude())
    }

    #[inline(always)]
    fn pick_if_finite(self, yes: Self, no: Self) -> Self {
        Pair(self.0.pick_if_finite(yes.0, no.0), self.1.pick_if_finite(yes.1, no.1))
    }
}

impl<S: Stored> Stored for Pair<S> {
    type Number = Pair<S::Number>;
    const COUNT: usize = 2 * S::COUNT;

    #[inline(always)]
    fn widen(self) -> Self::Number {
        Pair(self.0.widen(), self.1.widen())
    }

    #[inline(always)]
    fn narrow(number: Self::Number) -> Self {
        Pair(S::narrow(number.0), S::narrow(number.1))
    }
}

impl Float for f32 {
    #[inline(always)]
    fn all(number: f32) -> Self {
        number
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        self - other
    }

    #[inline(always)]
    fn magnitude(self) -> Self {
        self.abs()
    }

    #[inline(always)]
    fn pick_if_finite(self, yes: Self, no: Self) -> Self {
        if self.abs() < f32::INFINITY { yes } else { no }
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

macro_rules! plain {
    ($($number:ty),*) => {
        $(
            // SAFETY: a primitive number.
            unsafe impl Plain for $number {}
        )*
    };
}

plain!(f32, f64, i8, u8, u16, i32, i64);
float!(f32);
float!(f64);
integer!(i8);
integer!(u8);
integer!(i32);
integer!(i64);
stored_as_itself!(f32, f64, i8, u8, i32, i64);
