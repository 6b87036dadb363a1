//! The traits that kernels are generic over: numbers, and how elements in memory become numbers.
//!
//! Everything here is `#[inline(always)]`, so that it is compiled for the instruction set of the
//! kernel it ends up in. Nothing here may panic: integer overflow wraps.

/// Plain old data: may be reinterpreted as bytes and back.
///
/// # Safety
/// Every bit pattern is a valid value, and there are no padding bytes.
pub unsafe trait Pod: Copy {}

/// A number or a vector of numbers.
pub trait Number: Pod {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// The smaller one; NaN if either is. Of two equal ones, `other` (zeros differ in sign).
    fn smaller(self, other: Self) -> Self;
    /// The larger one, in the same way.
    fn larger(self, other: Self) -> Self;
}

/// A number that can be divided: floats to nearest, integers toward zero.
pub trait Divisible: Number {
    fn divide(self, by: usize) -> Self;
}

/// A single-precision float or a vector of them.
pub trait Float: Number {
    /// The same number in every lane.
    fn splat(number: f32) -> Self;
    fn subtract(self, other: Self) -> Self;
    fn abs(self) -> Self;
    /// `yes` where `self` is finite, `no` where it is not.
    fn select_if_finite(self, yes: Self, no: Self) -> Self;
}

/// An element as stored in memory, or as many as fit a vector.
pub trait Stored: Pod {
    /// The type used for calculations: the type itself or a wider one.
    type Number: Number;
    /// The number of elements.
    const COUNT: usize;
    fn widen(self) -> Self::Number;
    /// The nearest value that can be stored, ties to even.
    fn narrow(number: Self::Number) -> Self;
}

/// Two numbers or vectors, adjacent in memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Pair<N>(pub N, pub N);

// SAFETY: both are of one type, so there is no padding between them.
unsafe impl<T: Pod> Pod for Pair<T> {}

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
    fn splat(number: f32) -> Self {
        Pair(N::splat(number), N::splat(number))
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        Pair(self.0.subtract(other.0), self.1.subtract(other.1))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Pair(self.0.abs(), self.1.abs())
    }

    #[inline(always)]
    fn select_if_finite(self, yes: Self, no: Self) -> Self {
        Pair(self.0.select_if_finite(yes.0, no.0), self.1.select_if_finite(yes.1, no.1))
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
    fn splat(number: f32) -> Self {
        number
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        self - other
    }

    #[inline(always)]
    fn abs(self) -> Self {
        self.abs()
    }

    #[inline(always)]
    fn select_if_finite(self, yes: Self, no: Self) -> Self {
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
                // If `other` is NaN the comparison is false, which picks it.
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
                // Wider, because the divisor may not fit into the type.
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

macro_rules! pod {
    ($($number:ty),*) => {
        $(
            // SAFETY: a primitive number.
            unsafe impl Pod for $number {}
        )*
    };
}

pod!(f32, f64, i8, u8, u16, i32, i64);
float!(f32);
float!(f64);
integer!(i8);
integer!(u8);
integer!(i32);
integer!(i64);
stored_as_itself!(f32, f64, i8, u8, i32, i64);
