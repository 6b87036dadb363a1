//! The fabric: all links of one rank to the others of its group.
//!
//! Messages go through shared memory to ranks of the same host, and over the mesh to all others.
//! Tensors go through shared memory within the host and over the ring between hosts. The mesh also
//! connects ranks of one host, because it is the first to notice that a process has died.

use super::local::LocalRanks;
use super::ring::Ring;
use super::topology::Topology;
use crate::sync::lock;
use crate::transport::frame::Goodbye;
use crate::transport::interrupt::Interrupt;
use crate::transport::shm::region::SharedRegion;
use crate::transport::{Failure, Peers, Watch};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub struct Fabric {
    mesh: Box<dyn Peers>,
    topology: Topology,
    /// The ranks of this host, if there are several.
    region: Option<SharedRegion>,
    /// The ring of this rank, if it is a carrier and there are several hosts. An exchange locks it.
    ring: Option<Arc<Mutex<Ring>>>,
    /// The ranks that get messages over the mesh.
    distant: Vec<usize>,
    /// The last message of every rank, including this one.
    inbox: Vec<Vec<u8>>,
}

/// A tensor of up to this many bytes travels with the call itself...
const MOST_INLINE: usize = 32 * 1024;
/// ...unless a rank would then send more than this to other hosts; a ring sends less.
const MOST_INLINE_OUT: usize = 256 * 1024;

/// How long a rank that gave up has to tell the others of its host why.
const TELLING_TIME: Duration = Duration::from_millis(500);
/// Pause between two polls of something that cannot notify.
const POLL_EVERY: Duration = Duration::from_millis(1);

impl Fabric {
    pub fn new(
        mesh: Box<dyn Peers>,
        topology: Topology,
        region: Option<SharedRegion>,
        ring: Option<Ring>,
    ) -> Fabric {
        let here = region.as_ref().map_or(&[][..], SharedRegion::ranks);
        let is_distant = |rank: &usize| *rank != mesh.rank() && !here.contains(rank);
        let distant: Vec<_> = (0..mesh.size()).filter(is_distant).collect();
        let inbox = vec![Vec::new(); mesh.size()];
        let ring = ring.map(|ring| Arc::new(Mutex::new(ring)));
        Fabric { mesh, topology, region, ring, distant, inbox }
    }

    pub fn rank(&self) -> usize {
        self.mesh.rank()
    }

    pub fn size(&self) -> usize {
        self.mesh.size()
    }

    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The largest tensor that travels with the call. Equal on all ranks.
    pub fn inline_bytes(&self) -> usize {
        let hosts = self.topology.hosts();
        let away = |host| self.size() - self.topology.ranks_of(host).len();
        let receivers = (0..hosts).map(away).max().unwrap_or(0);
        MOST_INLINE_OUT.checked_div(receivers).map_or(MOST_INLINE, |most| most.min(MOST_INLINE))
    }

    /// Sends `message` to every rank and collects theirs. Calls pair up in order.
    pub fn swap(&mut self, message: &[u8], deadline: Instant) -> Result<(), Failure> {
        if let Some(region) = &mut self.region {
            region.post(message);
        }
        if !self.distant.is_empty() {
            self.mesh.swap(message, &self.distant, &mut self.inbox, deadline)?;
        }
        if let Some(region) = &self.region {
            region.collect(&mut self.inbox, self.mesh.as_mut(), deadline)?;
        }
        let own = &mut self.inbox[self.mesh.rank()];
        own.clear();
        own.extend_from_slice(message);
        Ok(())
    }

    /// The ranks that carry the same shard as this one, one per host in the order of hosts, this
    /// rank included.
    pub fn carriers_of_this_shard(&self) -> Vec<usize> {
        self.topology.carriers_of_own_shard()
    }

    /// Swaps messages with the ranks of other hosts that carry the same shard.
    pub fn swap_across(&mut self, message: &[u8], deadline: Instant) -> Result<(), Failure> {
        let own = self.mesh.rank();
        let mut others = self.carriers_of_this_shard();
        others.retain(|rank| *rank != own);
        self.mesh.swap(message, &others, &mut self.inbox, deadline)?;
        self.inbox[own].clear();
        self.inbox[own].extend_from_slice(message);
        Ok(())
    }

    /// The messages of the last swap, by rank.
    pub fn inbox(&self) -> &[Vec<u8>] {
        &self.inbox
    }

    /// The ranks of this host, for a collective; `None` if this rank is alone there.
    pub fn local(&mut self, deadline: Instant) -> Option<LocalRanks<'_>> {
        let region = self.region.as_mut()?;
        // If a carrier times out, the others leave it the time to say for whom it waited.
        let several_hosts = self.topology.hosts() > 1;
        let deadline = if several_hosts { deadline + TELLING_TIME } else { deadline };
        Some(LocalRanks { region, watch: self.mesh.as_mut(), deadline })
    }

    /// The ring between hosts, and what its waits must watch.
    pub fn ring(&mut self) -> Option<(MutexGuard<'_, Ring>, &mut dyn Watch)> {
        // A panic ends the group, so a half-done exchange doesn't matter.
        let ring = lock(self.ring.as_ref()?);
        Some((ring, self.mesh.as_mut()))
    }

    /// The ring, for a thread that carries gradients in the background.
    pub fn shared_ring(&self) -> Option<Arc<Mutex<Ring>>> {
        self.ring.clone()
    }

    /// Fails if the group was interrupted, or a peer was lost or gave up. Never waits.
    pub fn check(&mut self) -> Result<(), Failure> {
        self.mesh.check()
    }

    /// The offset in this rank's arena of `bytes` bytes at `address`, if they are there.
    pub fn offset_of(&self, address: *const u8, bytes: usize) -> Option<u64> {
        self.region.as_ref()?.arena().offset_of(address, bytes)
    }

    pub fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure> {
        self.mesh.watch_until(done, limit)
    }

    /// Polls `is_done`, for things that cannot notify, and checks the peers meanwhile. Returns
    /// false at the deadline.
    pub fn poll_until<E: From<Failure>>(
        &mut self,
        deadline: Instant,
        mut is_done: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        while !is_done()? {
            self.check()?;
            if deadline <= Instant::now() {
                return Ok(false);
            }
            std::thread::sleep(POLL_EVERY);
        }
        Ok(true)
    }

    /// Tells every peer that this rank leaves, and why, without waiting for any of them.
    pub fn say_goodbye(&mut self, goodbye: Goodbye) {
        let gave_up = goodbye.gave_up;
        self.mesh.say_goodbye(goodbye);
        if let Some(region) = self.region.as_ref().filter(|_| gave_up) {
            // After the reason was sent, because a peer that sees this looks for it.
            region.give_up();
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::transport::memory;
    use std::sync::Arc;

    /// Fabrics of `size` ranks that are threads and only swap messages, with their interrupts.
    pub fn fabrics(size: usize) -> Vec<(Fabric, Arc<Interrupt>)> {
        let hosts: Vec<_> = (0..size).collect();
        memory::mesh(size)
            .into_iter()
            .enumerate()
            .map(|(rank, (mesh, interrupt))| {
                let topology = Topology::new(&hosts, rank);
                (Fabric::new(Box::new(mesh), topology, None, None), interrupt)
            })
            .collect()
    }
}
