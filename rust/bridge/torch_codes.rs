//! torch's own numbers for kinds of collective, element types and reductions, as the shim passes
//! them: `c10d::OpType`, `c10::ScalarType` and `c10d::ReduceOp::RedOpType`. Nothing below the
//! bridge knows them.

use crate::collective::call::CollectiveKind;
use crate::collective::types::{DataType, ReduceOp};

/// The kind with this number in `OpType`; `None` for what is no collective of gflow's.
pub(super) fn collective_kind(code: u8) -> Option<CollectiveKind> {
    Some(match code {
        0 => CollectiveKind::Broadcast,
        1 => CollectiveKind::AllReduce,
        2 => CollectiveKind::AllReduceCoalesced,
        3 => CollectiveKind::Reduce,
        4 => CollectiveKind::AllGather,
        5 => CollectiveKind::AllGatherSingle,
        6 => CollectiveKind::AllGatherCoalesced,
        7 => CollectiveKind::Gather,
        8 => CollectiveKind::Scatter,
        9 => CollectiveKind::ReduceScatter,
        10 => CollectiveKind::AllToAllSingle,
        11 => CollectiveKind::AllToAll,
        15 => CollectiveKind::Barrier,
        16 => CollectiveKind::ReduceScatterSingle,
        18 => CollectiveKind::AllReduceSparse,
        19 => CollectiveKind::ReduceScatterSingleCoalesced,
        20 => CollectiveKind::AllGatherSingleCoalesced,
        _ => return None,
    })
}

/// The element type with this number in `ScalarType`.
pub(super) fn data_type(code: u8) -> DataType {
    match code {
        0 => DataType::U8,
        1 => DataType::I8,
        2 => DataType::I16,
        3 => DataType::I32,
        4 => DataType::I64,
        5 => DataType::F16,
        6 => DataType::F32,
        7 => DataType::F64,
        8 => DataType::Complex32,
        9 => DataType::Complex64,
        10 => DataType::Complex128,
        11 => DataType::Bool,
        15 => DataType::BF16,
        other => DataType::Other(other),
    }
}

/// The reduction with this number in `RedOpType`.
pub(super) fn reduce_op(code: u8) -> ReduceOp {
    match code {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Avg,
        2 => ReduceOp::Product,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::BitAnd,
        6 => ReduceOp::BitOr,
        7 => ReduceOp::BitXor,
        8 => ReduceOp::PremulSum,
        other => ReduceOp::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::element::{Element, Reduction};

    #[test]
    fn every_kind_has_one_code() {
        let kinds: Vec<_> = (0..=u8::MAX).filter_map(collective_kind).collect();
        assert_eq!(kinds, CollectiveKind::ALL);
    }

    #[test]
    fn every_element_and_reduction_has_one_code() {
        let elements: Vec<_> = (0..=u8::MAX).filter_map(|code| data_type(code).element()).collect();
        assert_eq!(elements.len(), Element::ALL.len());
        assert!(Element::ALL.iter().all(|element| elements.contains(element)));
        let reductions: Vec<_> =
            (0..=u8::MAX).filter_map(|code| reduce_op(code).reduction()).collect();
        assert_eq!(reductions, Reduction::ALL);
    }

    #[test]
    fn different_codes_are_different_types_and_reductions() {
        for (left, right) in (0..=u8::MAX).zip(1..=u8::MAX) {
            assert_ne!(data_type(left), data_type(right));
            assert_ne!(reduce_op(left), reduce_op(right));
        }
    }
}
