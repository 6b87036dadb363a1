//! The plan: how the engine carries out a collective, if it does so itself.
//!
//! It depends only on the call, on which the ranks agree, and on the topology, which is the same
//! for all, so every rank makes the same plan. A call without a plan goes to the inner backend.

use super::agreement::Agreed;
use super::call::{CollectiveKind, View};
use super::fabric::Fabric;
use super::hierarchical;
use super::span::{Memory, Span};
use super::topology::Topology;
use crate::simd::reducer::Reducer;
use crate::transport::Failure;
use std::time::Instant;

#[derive(Clone, Copy)]
pub enum Plan {
    AllReduce(Reducer),
    Broadcast { root: usize },
    AllGather,
    Barrier,
}

impl Plan {
    /// The plan for a call; `None` if the inner backend has to carry it out.
    pub fn of(view: &View, size: usize, topology: &Topology) -> Option<Plan> {
        match view.kind {
            CollectiveKind::Barrier => Some(Plan::Barrier),
            _ if view.tensors != 1 => None,
            CollectiveKind::AllReduce => {
                let element = view.dtype.element()?;
                let reduction = view.reduce_op.reduction()?;
                Some(Plan::AllReduce(Reducer::new(element, reduction, size)))
            }
            CollectiveKind::Broadcast => {
                let root = usize::try_from(view.root).ok().filter(|root| *root < size)?;
                Some(Plan::Broadcast { root })
            }
            CollectiveKind::AllGather | CollectiveKind::AllGatherSingle if topology.is_even() => {
                Some(Plan::AllGather)
            }
            _ => None,
        }
    }

    /// The tensor that travels with a small call; empty on ranks that contribute nothing.
    pub fn inline_tensor(&self, memory: &Memory, rank: usize) -> Span {
        match self {
            Plan::AllReduce(_) => memory.outputs[0],
            Plan::Broadcast { root } if *root == rank => memory.outputs[0],
            Plan::AllGather => memory.inputs[0],
            Plan::Broadcast { .. } | Plan::Barrier => Span { bytes: 0, ..NOWHERE },
        }
    }

    /// The size that decides whether a call is small: what each rank contributes or gets.
    pub fn bytes(&self, memory: &Memory) -> usize {
        match self {
            Plan::AllReduce(_) | Plan::Broadcast { .. } => memory.outputs[0].bytes,
            Plan::AllGather => memory.inputs[0].bytes,
            Plan::Barrier => 0,
        }
    }

    /// Splits a single output tensor of an all-gather into one per rank.
    pub fn arrange(&self, memory: &mut Memory, size: usize) {
        if matches!(self, Plan::AllGather) && memory.outputs.len() == 1 {
            let (whole, each) = (memory.outputs[0], memory.inputs[0].bytes);
            memory.outputs =
                (0..size).map(|rank| whole.subspan(rank * each..(rank + 1) * each)).collect();
        }
    }

    /// Completes a small collective from the tensors that came with the calls, by rank.
    pub fn complete(&self, memory: &Memory, inline: &[&[u8]]) {
        match self {
            Plan::AllReduce(reducer) => {
                let element = reducer.element_bytes();
                let aligned: Vec<_> =
                    inline.iter().map(|bytes| Aligned::new(bytes, element)).collect();
                let sources: Vec<_> = aligned.iter().map(Aligned::address).collect();
                let output = memory.outputs[0];
                // SAFETY: every rank sent as many bytes as the tensor has, which was checked when
                // they were received, and the messages are this rank's copies.
                unsafe { reducer.fold(&sources, &[output.address], output.bytes, true) };
            }
            Plan::Broadcast { root } => {
                // SAFETY: as above. On the root it is a copy of its own tensor.
                unsafe { memory.outputs[0].copy_from(inline[*root].as_ptr()) };
            }
            Plan::AllGather => {
                for (output, bytes) in memory.outputs.iter().zip(inline) {
                    // SAFETY: as above; there is one output per rank, as large as each input.
                    unsafe { output.copy_from(bytes.as_ptr()) };
                }
            }
            Plan::Barrier => {}
        }
    }

    /// Carries out a collective that is not small.
    pub fn carry_out(
        &self,
        fabric: &mut Fabric,
        memory: &Memory,
        agreed: &Agreed,
        deadline: Instant,
    ) -> Result<(), Failure> {
        match self {
            Plan::AllReduce(reducer) => {
                let tensor = memory.outputs[0];
                let in_arenas = tensors_in_arenas(fabric, tensor, agreed, deadline)?;
                hierarchical::all_reduce(fabric, tensor, in_arenas.as_deref(), reducer, deadline)
            }
            Plan::Broadcast { root } => {
                hierarchical::broadcast(fabric, memory.outputs[0], *root, deadline)
            }
            Plan::AllGather => {
                let (input, own) = (memory.inputs[0], memory.outputs[fabric.rank()]);
                if input.address != own.address {
                    // SAFETY: both are this rank's; `copy_to` allows them to overlap.
                    unsafe { input.address.copy_to(own.address, own.bytes) };
                }
                hierarchical::all_gather(fabric, &memory.outputs, deadline)
            }
            Plan::Barrier => Ok(()),
        }
    }
}

/// Bytes at an address that is aligned for their elements: in place, or copied.
enum Aligned<'a> {
    Here(&'a [u8]),
    Copy(Vec<u64>),
}

impl Aligned<'_> {
    fn new(bytes: &[u8], element_bytes: usize) -> Aligned<'_> {
        if (bytes.as_ptr() as usize).is_multiple_of(element_bytes) {
            return Aligned::Here(bytes);
        }
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        Aligned::Copy(words.collect())
    }

    fn address(&self) -> *const u8 {
        match self {
            Aligned::Here(bytes) => bytes.as_ptr(),
            Aligned::Copy(words) => words.as_ptr().cast(),
        }
    }
}

const NOWHERE: Span = Span { address: std::ptr::null_mut(), bytes: 0 };

/// The tensors of this host by local rank, if each lives in the arena of its rank.
pub fn tensors_in_arenas(
    fabric: &mut Fabric,
    own: Span,
    agreed: &Agreed,
    deadline: Instant,
) -> Result<Option<Vec<Span>>, Failure> {
    let Some(local) = fabric.local(deadline) else { return Ok(None) };
    let mut tensors = Vec::with_capacity(local.region.ranks().len());
    for (local_rank, rank) in local.region.ranks().iter().enumerate() {
        let Some(offset) = agreed.offsets[*rank] else { return Ok(None) };
        let Some(address) = local.region.tensor(local_rank, offset, own.bytes) else {
            let reason = format!("it names a tensor at {offset}, outside of its memory");
            return Err(Failure::Garbled { rank: *rank, reason });
        };
        tensors.push(Span { address, bytes: own.bytes });
    }
    Ok(Some(tensors))
}
