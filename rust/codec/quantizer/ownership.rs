//! Which host owns which block of a shard. It follows from the block's index in its shard and nothing
//! else, so a host owns the same blocks in every step, whatever they are exchanged with: what it keeps
//! of them stays with it.

use std::ops::Range;

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

    /// Where the blocks of an owner are, if the `blocks` of a shard are put into the order of their
    /// owners, with room for whole runs: then they begin where memory is aligned.
    pub fn slots(&self, owner: usize, blocks: usize) -> Range<usize> {
        let start = self.first(owner, blocks);
        let room = self.first(owner + 1, blocks) - start;
        // The last run may be short.
        let runs = blocks.div_ceil(RUN);
        let has_last = runs > 0 && self.owner(blocks - 1) == owner;
        start..start + room - if has_last { runs * RUN - blocks } else { 0 }
    }

    /// The room for the blocks of all owners.
    pub fn room(blocks: usize) -> usize {
        blocks.next_multiple_of(RUN)
    }

    fn first(&self, owner: usize, blocks: usize) -> usize {
        let runs = blocks.div_ceil(RUN);
        (runs / self.hosts * owner + owner.min(runs % self.hosts)) * RUN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slots_of_an_owner_are_as_many_as_the_blocks_it_owns_and_begin_with_a_run() {
        for hosts in 1..6 {
            let ownership = Ownership { hosts, host: 0 };
            for blocks in (0..200).chain([1000, 1001]) {
                let mut end = 0;
                for owner in 0..hosts {
                    let slots = ownership.slots(owner, blocks);
                    let owned = (0..blocks).filter(|block| ownership.owner(*block) == owner);
                    assert_eq!(slots.len(), owned.count(), "{owner} of {hosts}, {blocks}");
                    assert_eq!(slots.start, end, "{owner} of {hosts}, {blocks}");
                    end = Ownership::room(slots.end);
                }
                assert_eq!(end, Ownership::room(blocks));
            }
        }
    }
}
