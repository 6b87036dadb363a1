//! Random numbers for tests that need more of them than proptest can generate quickly. The same
//! seed, which must not be zero, gives the same numbers.

/// xorshift64: fast enough to make every element of every case.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
