//! One collective as this rank called it, and the part of it that all ranks must have in common.

use super::types::{DataType, ReduceOp};
use crate::error::Error;
use std::fmt;
use std::time::Duration;

/// The kinds of collective. The number of each is its code in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum CollectiveKind {
    Broadcast,
    AllReduce,
    AllReduceCoalesced,
    Reduce,
    AllGather,
    AllGatherSingle,
    AllGatherCoalesced,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAllSingle,
    AllToAll,
    Barrier,
    ReduceScatterSingle,
    AllReduceSparse,
    ReduceScatterSingleCoalesced,
    AllGatherSingleCoalesced,
}

impl CollectiveKind {
    pub const ALL: [CollectiveKind; 17] = [
        CollectiveKind::Broadcast,
        CollectiveKind::AllReduce,
        CollectiveKind::AllReduceCoalesced,
        CollectiveKind::Reduce,
        CollectiveKind::AllGather,
        CollectiveKind::AllGatherSingle,
        CollectiveKind::AllGatherCoalesced,
        CollectiveKind::Gather,
        CollectiveKind::Scatter,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAllSingle,
        CollectiveKind::AllToAll,
        CollectiveKind::Barrier,
        CollectiveKind::ReduceScatterSingle,
        CollectiveKind::AllReduceSparse,
        CollectiveKind::ReduceScatterSingleCoalesced,
        CollectiveKind::AllGatherSingleCoalesced,
    ];

    pub fn from_code(code: u8) -> Option<CollectiveKind> {
        CollectiveKind::ALL.get(usize::from(code)).copied()
    }

    /// Its name in Python.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::Broadcast => "broadcast",
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::AllReduceCoalesced => "all_reduce_coalesced",
            CollectiveKind::Reduce => "reduce",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::AllGatherSingle => "all_gather_into_tensor",
            CollectiveKind::AllGatherCoalesced => "all_gather_coalesced",
            CollectiveKind::Gather => "gather",
            CollectiveKind::Scatter => "scatter",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllToAllSingle => "all_to_all_single",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Barrier => "barrier",
            CollectiveKind::ReduceScatterSingle => "reduce_scatter_tensor",
            CollectiveKind::AllReduceSparse => "all_reduce of a sparse tensor",
            CollectiveKind::ReduceScatterSingleCoalesced => "reduce_scatter_tensor_coalesced",
            CollectiveKind::AllGatherSingleCoalesced => "all_gather_into_tensor_coalesced",
        }
    }

    /// Whether it reduces, so that the ranks must name the same reduction.
    pub fn reduces(self) -> bool {
        matches!(
            self,
            CollectiveKind::AllReduce
                | CollectiveKind::AllReduceCoalesced
                | CollectiveKind::AllReduceSparse
                | CollectiveKind::Reduce
                | CollectiveKind::ReduceScatter
                | CollectiveKind::ReduceScatterSingle
                | CollectiveKind::ReduceScatterSingleCoalesced
        )
    }

    /// Whether one rank is the source or the destination.
    pub fn has_root(self) -> bool {
        matches!(
            self,
            CollectiveKind::Broadcast
                | CollectiveKind::Reduce
                | CollectiveKind::Gather
                | CollectiveKind::Scatter
        )
    }
}

/// The part of a call that must be the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    pub kind: CollectiveKind,
    /// The type of the first tensor.
    pub dtype: DataType,
    /// `Sum` where nothing is reduced.
    pub reduce_op: ReduceOp,
    pub root: u32,
    pub tensors: u32,
    /// Elements over all tensors; 0 for the all-to-alls, which may differ from rank to rank.
    pub numel: u64,
    /// A hash of the types and sizes of all tensors, to tell apart lists with equal sums.
    pub layout: u64,
    /// Where the tensors are: 0 for host memory, n for the n-th device that this rank has opened
    /// for the group. It exchanges with the n-th devices of the others.
    pub device_slot: u32,
}

impl View {
    /// Whether, if its tensor belongs to a gradient bucket, it is not that bucket but counts how many
    /// ranks used each parameter of the bucket's model.
    pub fn counts_uses(&self) -> bool {
        self.kind == CollectiveKind::AllReduce && self.dtype == DataType::I32
    }
}

/// The device that the tensors of a call are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnDevice {
    /// Its number in this process.
    pub device: i32,
    /// Raw handle of the stream on which the caller works on the tensors.
    pub stream: u64,
}

/// A collective as this rank called it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub view: View,
    /// Whether this rank takes the tensor for a gradient bucket. Ranks may differ: see `agreement`.
    pub gradient: bool,
    /// Number of that bucket, under which its residual is kept; 0 for none: then the tensor is
    /// exchanged exactly. If the tensor counts uses of parameters, a bucket of their model.
    pub bucket: u32,
    /// Bytes of tensor data on this rank, for the counters.
    pub bytes: u64,
    /// `None` for tensors in host memory.
    pub on_device: Option<OnDevice>,
    /// For the all-to-alls: elements for each rank, and elements expected from each. Else empty.
    pub sends: Vec<u64>,
    pub receives: Vec<u64>,
    /// Why this rank cannot take part, as a predicate: "has wrong arguments: …"; empty if it can.
    pub complaint: String,
    pub timeout: Duration,
}

impl Call {
    /// Records why this rank cannot take part, unless there is a reason already.
    pub fn complain_of(&mut self, error: &Error) {
        if self.complaint.is_empty() {
            self.complaint = format!("cannot take part: {error}");
        }
    }
}

/// In words: "all_reduce of 4 elements of float32 with SUM".
impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        match self.kind {
            CollectiveKind::Barrier => return Ok(()),
            CollectiveKind::AllToAll | CollectiveKind::AllToAllSingle => {
                write!(f, " of {}", self.dtype)?;
            }
            _ if self.tensors > 1 => {
                let View { tensors, numel, dtype, .. } = self;
                write!(f, " of {tensors} tensors, {numel} elements of {dtype}")?;
                write!(f, " (layout {:08x})", self.layout as u32)?;
            }
            _ => write!(f, " of {} elements of {}", self.numel, self.dtype)?,
        }
        if self.kind.reduces() {
            write!(f, " with {}", self.reduce_op)?;
        }
        if self.kind.has_root() {
            write!(f, ", root {}", self.root)?;
        }
        match self.device_slot {
            0 => Ok(()),
            1 => f.write_str(", on its GPU"),
            n => write!(f, ", on the {n}. GPU that it uses in this group"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A call for tests: `numel` floats, summed.
    pub fn all_reduce(numel: u64) -> Call {
        Call {
            view: View {
                kind: CollectiveKind::AllReduce,
                dtype: DataType::F32,
                reduce_op: ReduceOp::Sum,
                root: 0,
                tensors: 1,
                numel,
                layout: numel,
                device_slot: 0,
            },
            gradient: false,
            bucket: 0,
            bytes: numel * 4,
            on_device: None,
            sends: Vec::new(),
            receives: Vec::new(),
            complaint: String::new(),
            timeout: Duration::from_secs(10),
        }
    }

    #[test]
    fn every_kind_is_found_by_its_own_code_and_no_other() {
        for code in 0..=u8::MAX {
            match CollectiveKind::from_code(code) {
                Some(kind) => assert_eq!(kind as u8, code),
                None => assert!(CollectiveKind::ALL.iter().all(|kind| *kind as u8 != code)),
            }
        }
    }

    #[test]
    fn a_view_reads_like_the_call_that_was_made() {
        let view = all_reduce(4).view;
        assert_eq!(view.to_string(), "all_reduce of 4 elements of float32 with SUM");
        let broadcast =
            View { kind: CollectiveKind::Broadcast, root: 3, dtype: DataType::I32, ..view.clone() };
        assert_eq!(broadcast.to_string(), "broadcast of 4 elements of int32, root 3");
        let second = View { device_slot: 2, ..broadcast };
        assert!(second.to_string().ends_with("root 3, on the 2. GPU that it uses in this group"));
        let barrier = View { kind: CollectiveKind::Barrier, ..view };
        assert_eq!(barrier.to_string(), "barrier");
    }
}
