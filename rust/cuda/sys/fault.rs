//! An error from the GPU, its driver, NCCL or NVRTC, in words: never a bare status code.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault(pub String);

pub type Result<T> = std::result::Result<T, Fault>;

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}
