//! Topology: which ranks are on which host, and which of them carry data between hosts.
//!
//! Every rank computes it from the same list, so all agree without communication.

use std::fmt;

/// The ranks of a group by host. Hosts are in the order of their lowest rank, ranks ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    hosts: Vec<Vec<usize>>,
    /// The host of this rank, and its index there.
    host: usize,
    local_rank: usize,
}

/// The ranks beside a rank in its ring of hosts. With two hosts they are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbours {
    pub next: usize,
    pub previous: usize,
}

impl Topology {
    /// `host_of` names the host of each rank: any words, compared for equality.
    pub fn new<T: PartialEq>(host_of: &[T], rank: usize) -> Topology {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (rank, name) in host_of.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| host_of[ranks[0]] == *name) {
                Some(ranks) => ranks.push(rank),
                None => hosts.push(vec![rank]),
            }
        }
        let host = hosts.iter().position(|ranks| ranks.contains(&rank)).expect("rank has a host");
        let local_rank =
            hosts[host].iter().position(|other| *other == rank).expect("just found there");
        Topology { hosts, host, local_rank }
    }

    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Index of this rank's host among the hosts.
    pub fn host(&self) -> usize {
        self.host
    }

    /// Index of this rank on its host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The ranks of a host.
    pub fn ranks_of(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The ranks of this rank's host.
    pub fn local_ranks(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// Host and local rank of any rank.
    pub fn find(&self, rank: usize) -> (usize, usize) {
        let local_rank = |ranks: &Vec<usize>| ranks.iter().position(|other| *other == rank);
        let mut hosts = self.hosts.iter().enumerate();
        hosts
            .find_map(|(host, ranks)| local_rank(ranks).map(|local_rank| (host, local_rank)))
            .expect("every rank has a host")
    }

    /// How many ranks of each host carry a shard to the next host. The host with the fewest ranks
    /// decides, because a shard moves between equal local ranks.
    pub fn carriers(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().expect("there is a host")
    }

    /// Whether this rank carries a shard.
    pub fn is_carrier(&self) -> bool {
        self.local_rank < self.carriers()
    }

    /// The ranks that carry the same shard as this one, which is a carrier: one per host, in the
    /// order of hosts, this rank included.
    pub fn carriers_of_own_shard(&self) -> Vec<usize> {
        self.hosts.iter().map(|ranks| ranks[self.local_rank]).collect()
    }

    /// Whether all hosts have equally many ranks.
    pub fn is_even(&self) -> bool {
        self.hosts.iter().all(|ranks| ranks.len() == self.hosts[0].len())
    }

    /// The neighbours of this rank in its ring of hosts.
    pub fn neighbours(&self) -> Neighbours {
        let count = self.hosts.len();
        let at = |host: usize| self.hosts[host % count][self.local_rank];
        Neighbours { next: at(self.host + 1), previous: at(self.host + count - 1) }
    }
}

/// For the log: "rank 3 of 8 on host 1 of 2, ranks by host: [0, 1] [2, 3]".
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size: usize = self.hosts.iter().map(Vec::len).sum();
        let rank = self.hosts[self.host][self.local_rank];
        let (host, hosts) = (self.host + 1, self.hosts.len());
        write!(f, "rank {rank} of {size} on host {host} of {hosts}, ranks by host:")?;
        self.hosts.iter().try_for_each(|ranks| write!(f, " {ranks:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_found_by_name_in_the_order_of_their_ranks() {
        let topology = Topology::new(&["b", "a", "b", "a", "a"], 4);
        assert_eq!(topology.hosts, [vec![0, 2], vec![1, 3, 4]]);
        assert_eq!((topology.host(), topology.local_rank()), (1, 2));
        assert_eq!(topology.carriers(), 2);
        assert!(!topology.is_even() && !topology.is_carrier());
        assert_eq!(topology.find(3), (1, 1));
    }

    #[test]
    fn neighbours_have_the_same_place_on_the_hosts_beside() {
        let hosts = [0, 0, 1, 1, 2, 2];
        let neighbours = |topology: Topology| {
            let Neighbours { next, previous } = topology.neighbours();
            (next, previous)
        };
        assert_eq!(neighbours(Topology::new(&hosts, 1)), (3, 5));
        assert_eq!(neighbours(Topology::new(&hosts, 4)), (0, 2));
        assert_eq!(neighbours(Topology::new(&[0, 1], 0)), (1, 1));
    }
}
