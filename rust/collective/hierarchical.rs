//! Hierarchical collectives: first within each host, at the speed of memory, then between hosts,
//! each carrier with its own shard, then within each host again.
//!
//! With one host only the first phase is left, with one rank per host only the second. All ranks of
//! the group call these functions, after they have agreed.

use super::fabric::Fabric;
use super::local::OwnedSpan;
use super::partition::partition;
use super::ring::Combine;
use super::span::Span;
use super::topology::Topology;
use crate::simd::reducer::Reducer;
use crate::transport::Failure;
use std::ops::Range;
use std::time::Instant;

/// Replaces `tensor` by the reduction over all ranks. `in_arenas` are the tensors of this host by
/// local rank, if all of them live in shared memory.
pub fn all_reduce(
    fabric: &mut Fabric,
    tensor: Span,
    in_arenas: Option<&[Span]>,
    reducer: &Reducer,
    deadline: Instant,
) -> Result<(), Failure> {
    if fabric.topology().hosts() == 1 {
        return match (fabric.local(deadline), in_arenas) {
            (None, _) => {
                // SAFETY: with a single rank, nothing else accesses the tensor.
                unsafe { reducer.fold(&[tensor.address], &[tensor.address], tensor.bytes, true) };
                Ok(())
            }
            (Some(mut local), Some(tensors)) => local.all_reduce_in_place(tensors, reducer),
            (Some(mut local), None) => local.all_reduce(tensor, reducer),
        };
    }
    reduce_within(fabric, tensor, in_arenas, reducer, deadline)?;
    reduce_across(fabric, tensor, reducer, deadline)?;
    distribute_within(fabric, tensor, in_arenas, deadline)
}

/// Phase 1, within the host: every carrier reduces its shard into its own tensor.
pub fn reduce_within(
    fabric: &mut Fabric,
    tensor: Span,
    in_arenas: Option<&[Span]>,
    reducer: &Reducer,
    deadline: Instant,
) -> Result<(), Failure> {
    let carriers = fabric.topology().carriers();
    let Some(mut local) = fabric.local(deadline) else { return Ok(()) };
    match in_arenas {
        Some(tensors) => {
            local.reduce_in_place(tensors, carriers, reducer);
            Ok(())
        }
        None => local.reduce(tensor, carriers, reducer),
    }
}

/// Phase 2, between hosts: every carrier reduces its shard over all hosts.
pub fn reduce_across(
    fabric: &mut Fabric,
    tensor: Span,
    reducer: &Reducer,
    deadline: Instant,
) -> Result<(), Failure> {
    let Some(mut shard) = own_shard(fabric.topology(), tensor) else { return Ok(()) };
    let Some((mut ring, watch)) = fabric.ring() else { return Ok(()) };
    // SAFETY: until the shards are distributed, only this rank touches this one.
    ring.all_reduce(unsafe { shard.as_mut_slice() }, reducer, watch, deadline)
}

/// Phase 3, within the host: every rank gets all shards.
pub fn distribute_within(
    fabric: &mut Fabric,
    tensor: Span,
    in_arenas: Option<&[Span]>,
    deadline: Instant,
) -> Result<(), Failure> {
    let carriers = fabric.topology().carriers();
    let Some(mut local) = fabric.local(deadline) else { return Ok(()) };
    match in_arenas {
        Some(tensors) => local.distribute(tensors, carriers),
        None => local.publish(&carried_shards(tensor, carriers)),
    }
}

/// The shard of `tensor` that this rank carries between hosts, if it is a carrier.
pub fn own_shard(topology: &Topology, tensor: Span) -> Option<Span> {
    shard_range(topology, tensor.bytes).map(|range| tensor.subspan(range))
}

/// The same, as a range of a tensor of `bytes` bytes.
pub fn shard_range(topology: &Topology, bytes: usize) -> Option<Range<usize>> {
    let range = || partition(bytes, topology.carriers(), topology.local_rank());
    topology.is_carrier().then(range)
}

/// Copies `tensor` of rank `root` to all others.
pub fn broadcast(
    fabric: &mut Fabric,
    tensor: Span,
    root: usize,
    deadline: Instant,
) -> Result<(), Failure> {
    let (root_host, root_local_rank) = fabric.topology().find(root);
    let at_root = fabric.topology().host() == root_host;
    let carriers = fabric.topology().carriers();

    if let Some(mut local) = fabric.local(deadline).filter(|_| at_root) {
        local.publish(&[OwnedSpan { owner: root_local_rank, span: tensor }])?;
    }
    let shard = own_shard(fabric.topology(), tensor);
    if let (Some(mut own), Some((mut ring, watch))) = (shard, fabric.ring()) {
        // SAFETY: the ranks of this host touch only their own tensors now.
        ring.broadcast(unsafe { own.as_mut_slice() }, root_host, watch, deadline)?;
    }
    if let Some(mut local) = fabric.local(deadline).filter(|_| !at_root) {
        local.publish(&carried_shards(tensor, carriers))?;
    }
    Ok(())
}

/// Fills `outputs`, one per rank, with the inputs of the ranks; that of this rank is already there.
/// Only for hosts with equally many ranks.
pub fn all_gather(fabric: &mut Fabric, outputs: &[Span], deadline: Instant) -> Result<(), Failure> {
    let topology = fabric.topology().clone();
    let local_rank = topology.local_rank();
    if let Some((mut ring, watch)) = fabric.ring() {
        let mut of_hosts: Vec<Span> = (0..topology.hosts())
            .map(|host| outputs[topology.ranks_of(host)[local_rank]])
            .collect();
        // SAFETY: outputs do not overlap, and no other rank touches them.
        let mut blocks: Vec<_> =
            of_hosts.iter_mut().map(|output| unsafe { output.as_mut_slice() }).collect();
        ring.all_gather(&mut blocks, watch, deadline)?;
    }
    if let Some(mut local) = fabric.local(deadline) {
        for host in 0..topology.hosts() {
            let ranks = topology.ranks_of(host).iter().enumerate();
            let spans: Vec<_> =
                ranks.map(|(owner, rank)| OwnedSpan { owner, span: outputs[*rank] }).collect();
            local.publish(&spans)?;
        }
    }
    Ok(())
}

impl Combine for Reducer {
    fn element_bytes(&self) -> usize {
        Reducer::element_bytes(self)
    }

    fn combine(&self, own: &mut [u8], incoming: &[u8], finish: bool) {
        let bytes = own.len().min(incoming.len());
        let own = own.as_mut_ptr();
        // SAFETY: both hold whole elements at aligned addresses and do not overlap.
        unsafe { self.fold(&[incoming.as_ptr(), own], &[own], bytes, finish) };
    }

    fn finish(&self, own: &mut [u8]) {
        let (bytes, own) = (own.len(), own.as_mut_ptr());
        // SAFETY: as above.
        unsafe { self.fold(&[own], &[own], bytes, true) };
    }
}

/// The shards of a tensor, each with its carrier on this host.
fn carried_shards(tensor: Span, carriers: usize) -> Vec<OwnedSpan> {
    let shard =
        |owner| OwnedSpan { owner, span: tensor.subspan(partition(tensor.bytes, carriers, owner)) };
    (0..carriers).map(shard).collect()
}
