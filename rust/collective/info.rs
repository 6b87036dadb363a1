//! A collective of a group: its number there, and the call that this rank made.

use super::call::Call;

#[derive(Debug)]
pub struct CollectiveInfo {
    /// The number of this collective in its group, from 1.
    pub seq: u64,
    pub call: Call,
}
