//! Topology: which ranks are on which host, and who carries what between hosts.
//!
//! It is computed by every rank from the same list, so that all agree without asking.

/// The ranks of a group by host. Hosts are in the order of their lowest rank, ranks ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    hosts: Vec<Vec<usize>>,
    /// The host of this rank, and its local_rank there.
    host: usize,
    local_rank: usize,
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

    /// The position of this rank's host among the hosts.
    pub fn host(&self) -> usize {
        self.host
    }

    /// The local_rank of this rank on its host.
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

    /// The host and the local_rank of any rank.
    pub fn find(&self, rank: usize) -> (usize, usize) {
        let local_rank = |ranks: &Vec<usize>| ranks.iter().position(|other| *other == rank);
        let mut hosts = self.hosts.iter().enumerate();
        hosts
            .find_map(|(host, ranks)| local_rank(ranks).map(|local_rank| (host, local_rank)))
            .expect("every rank has a host")
    }

    /// How many ranks of each host carry a shard to the next host. A host with fewer ranks than
    /// others sets the number for all, because shards are carried between ranks of equal local_rank.
    pub fn carriers(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().expect("there is a host")
    }

    /// Whether this rank carries a shard.
    pub fn is_carrier(&self) -> bool {
        self.local_rank < self.carriers()
    }

    /// Whether every host has as many ranks.
    pub fn is_even(&self) -> bool {
        self.hosts.iter().all(|ranks| ranks.len() == self.hosts[0].len())
    }

    /// The ranks after and before this one in its ring of hosts.
    pub fn neighbours(&self) -> (usize, usize) {
        let count = self.hosts.len();
        let at = |host: usize| self.hosts[host % count][self.local_rank];
        (at(self.host + 1), at(self.host + count - 1))
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
        assert_eq!(Topology::new(&hosts, 1).neighbours(), (3, 5));
        assert_eq!(Topology::new(&hosts, 4).neighbours(), (0, 2));
        let two = Topology::new(&[0, 1], 0);
        assert_eq!(two.neighbours(), (1, 1));
    }
}
