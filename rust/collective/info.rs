//! A collective of a group: its number there, and the call that this rank made.

use super::call::Call;
use std::fmt;

#[derive(Debug)]
pub struct CollectiveInfo {
    /// The number of this collective in its group, from 1.
    pub seq: u64,
    pub call: Call,
}

/// "all_reduce of 4 elements of float32 with SUM #7".
impl fmt::Display for CollectiveInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.call.view, self.seq)
    }
}
