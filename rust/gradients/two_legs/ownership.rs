//! Which host owns which block of a shard. It follows from the block's index in its shard and nothing
//! else, so a host owns the same blocks in every step, whatever they are exchanged with: what it keeps
//! of them stays with it.

/// Adjacent blocks that have the same owner. Few enough that all hosts get a share of a parcel, and
/// enough that memory is read in long runs.
const RUN: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ownership {
    pub hosts: usize,
    /// The index of this host.
    pub host: usize,
}

impl Ownership {
    /// The host that owns this block of a shard.
    pub fn owner(&self, block: usize) -> usize {
        block / RUN % self.hosts
    }
}
