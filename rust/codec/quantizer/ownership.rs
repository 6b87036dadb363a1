//! Which host owns which block of a shard. It follows from the block's index in its shard and nothing
//! else, so a host owns the same blocks in every step, whatever they are exchanged with: what it keeps
//! of them stays with it.

/// Adjacent blocks that have the same owner. Few enough that all hosts get a share of a parcel, and
/// enough that memory is read in long runs.
pub const RUN: usize = 16;

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
    /// How many of a shard's `blocks` this host owns.
    pub fn owned_by(&self, host: usize, blocks: usize) -> usize {
        let round = RUN * self.hosts;
        blocks / round * RUN + (blocks % round).saturating_sub(RUN * host).min(RUN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_one_owner() {
        for hosts in 1..5 {
            let ownership = Ownership { hosts, host: 0 };
            for blocks in (0..200).chain([1000, 1001]) {
                for host in 0..hosts {
                    let owned = (0..blocks).filter(|block| ownership.owner(*block) == host);
                    assert_eq!(ownership.owned_by(host, blocks), owned.count());
                }
            }
        }
    }
}
