//! One collective as this rank called it: the part of a call that the ranks have to agree on.
//!
//! The codes are torch's own (`c10d::OpType`, `c10::ScalarType`, `c10d::ReduceOp::RedOpType`), so
//! the shim passes them through unchanged. A code that is not known here is refused, never guessed.

use crate::error::Error;
use std::fmt;
use std::time::Duration;

/// The kinds of collective, with torch's `OpType` codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum CollectiveKind {
    Broadcast = 0,
    AllReduce = 1,
    AllReduceCoalesced = 2,
    Reduce = 3,
    AllGather = 4,
    AllGatherSingle = 5,
    AllGatherCoalesced = 6,
    Gather = 7,
    Scatter = 8,
    ReduceScatter = 9,
    AllToAllSingle = 10,
    AllToAll = 11,
    Barrier = 15,
    ReduceScatterSingle = 16,
    AllReduceSparse = 18,
    ReduceScatterSingleCoalesced = 19,
    AllGatherSingleCoalesced = 20,
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
        CollectiveKind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// The name a Python user knows it by.
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

    /// Whether the ranks combine elements, so that they must name the same reduction.
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
    /// torch's `ScalarType` code of the first tensor.
    pub dtype: u8,
    /// torch's `RedOpType` code; 0 where nothing is reduced.
    pub reduce_op: u8,
    pub root: u32,
    pub tensors: u32,
    /// Elements over all tensors; 0 for the all-to-alls, which may differ from rank to rank.
    pub numel: u64,
    /// A hash of each tensor's type and size, so that lists are told apart whose sums are equal.
    pub layout: u64,
    /// Where the tensors are: 0 in the memory of the host, n on the n-th device that this rank has
    /// opened for the group. Its n-th device exchanges with the n-th of the others.
    pub device_slot: u32,
}

/// The device that a call's tensors are on, as the caller knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnDevice {
    /// The number of the device in this process.
    pub device: i32,
    /// The raw handle of the stream that the caller's work on the tensors is on.
    pub stream: u64,
}

/// What one rank asks the others to do together with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub view: View,
    /// Whether this rank holds the tensor to be a gradient bucket. Rank-local: see `agreement`.
    pub gradient: bool,
    /// The number of that bucket, by which what was not sent of it is found again; 0 if it has
    /// none, and then it is exchanged exactly.
    pub bucket: u32,
    /// Bytes of tensor data on this rank, for the counters only.
    pub bytes: u64,
    /// `None` for tensors in the memory of the host.
    pub on_device: Option<OnDevice>,
    /// For the all-to-alls: elements for each rank, and elements expected from each. Else empty.
    pub sends: Vec<u64>,
    pub receives: Vec<u64>,
    /// Why this rank cannot take part, after its name: "has wrong arguments: …"; empty if it can.
    pub complaint: String,
    pub timeout: Duration,
}

impl Call {
    /// This rank cannot take part: the others are told why, unless they hear of something else already.
    pub fn complain_of(&mut self, error: &Error) {
        if self.complaint.is_empty() {
            self.complaint = format!("cannot take part: {error}");
        }
    }
}

/// The Python name of a torch `ScalarType` code.
pub fn dtype_name(code: u8) -> String {
    let name = match code {
        0 => "uint8",
        1 => "int8",
        2 => "int16",
        3 => "int32",
        4 => "int64",
        5 => "float16",
        6 => "float32",
        7 => "float64",
        8 => "complex32",
        9 => "complex64",
        10 => "complex128",
        11 => "bool",
        15 => "bfloat16",
        other => return format!("dtype #{other}"),
    };
    name.to_string()
}

/// The name of a torch `RedOpType` code.
pub fn reduce_op_name(code: u8) -> String {
    const NAMES: [&str; 9] =
        ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"];
    match NAMES.get(usize::from(code)) {
        Some(name) => (*name).to_string(),
        None => format!("reduce op #{code}"),
    }
}

/// In words: "all_reduce of 4 elements of float32 with SUM".
impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        match self.kind {
            CollectiveKind::Barrier => return Ok(()),
            CollectiveKind::AllToAll | CollectiveKind::AllToAllSingle => {
                write!(f, " of {}", dtype_name(self.dtype))?;
            }
            _ if self.tensors > 1 => {
                let dtype = dtype_name(self.dtype);
                write!(f, " of {} tensors, {} elements of {dtype}", self.tensors, self.numel)?;
                write!(f, " (layout {:08x})", self.layout as u32)?;
            }
            _ => write!(f, " of {} elements of {}", self.numel, dtype_name(self.dtype))?,
        }
        if self.kind.reduces() {
            write!(f, " with {}", reduce_op_name(self.reduce_op))?;
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
                dtype: 6,
                reduce_op: 0,
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
        let broadcast = View { kind: CollectiveKind::Broadcast, root: 3, dtype: 3, ..view.clone() };
        assert_eq!(broadcast.to_string(), "broadcast of 4 elements of int32, root 3");
        let second = View { device_slot: 2, ..broadcast };
        assert!(second.to_string().ends_with("root 3, on the 2. GPU that it uses in this group"));
        let barrier = View { kind: CollectiveKind::Barrier, ..view };
        assert_eq!(barrier.to_string(), "barrier");
    }
}
