//! The weight of what a rank carries in an exchange: how much of it is new, and how much stays behind.

/// As L1 norms of this rank; what is not finite has none.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Weight {
    pub gradient: f64,
    /// What stays behind.
    pub unsent: f64,
}

impl Weight {
    /// What stays behind over the gradient; 0 where there is no gradient.
    pub fn ratio(self) -> f64 {
        if self.gradient > 0.0 { self.unsent / self.gradient } else { 0.0 }
    }
}
