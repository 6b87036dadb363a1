//! The element types and reductions that a call can name, including those that only the inner
//! backend carries out. Which of them the engine computes itself is said by [`DataType::element`]
//! and [`ReduceOp::reduction`].

use crate::simd::element::{Element, Reduction};
use std::fmt;

/// The element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    F32,
    F64,
    Complex32,
    Complex64,
    Complex128,
    Bool,
    BF16,
    /// A type that has no name here, by the caller's own number. Ranks can compare it.
    Other(u8),
}

/// How the elements of the ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    Sum,
    Avg,
    Product,
    Min,
    Max,
    BitAnd,
    BitOr,
    BitXor,
    PremulSum,
    /// A reduction that has no name here, by the caller's own number. Ranks can compare it.
    Other(u8),
}

/// The position in this list is the code in messages. Names are Python's.
const DATA_TYPES: [(DataType, &str); 13] = [
    (DataType::U8, "uint8"),
    (DataType::I8, "int8"),
    (DataType::I16, "int16"),
    (DataType::I32, "int32"),
    (DataType::I64, "int64"),
    (DataType::F16, "float16"),
    (DataType::F32, "float32"),
    (DataType::F64, "float64"),
    (DataType::Complex32, "complex32"),
    (DataType::Complex64, "complex64"),
    (DataType::Complex128, "complex128"),
    (DataType::Bool, "bool"),
    (DataType::BF16, "bfloat16"),
];

/// The position in this list is the code in messages. Names are Python's.
const REDUCE_OPS: [(ReduceOp, &str); 9] = [
    (ReduceOp::Sum, "SUM"),
    (ReduceOp::Avg, "AVG"),
    (ReduceOp::Product, "PRODUCT"),
    (ReduceOp::Min, "MIN"),
    (ReduceOp::Max, "MAX"),
    (ReduceOp::BitAnd, "BAND"),
    (ReduceOp::BitOr, "BOR"),
    (ReduceOp::BitXor, "BXOR"),
    (ReduceOp::PremulSum, "PREMUL_SUM"),
];

/// Codes from here on stand for `Other`.
const OTHER: u16 = 0x100;

impl DataType {
    /// The type as the engine computes with it; `None` if only the inner backend does.
    pub fn element(self) -> Option<Element> {
        Some(match self {
            DataType::U8 => Element::U8,
            DataType::I8 => Element::I8,
            DataType::I32 => Element::I32,
            DataType::I64 => Element::I64,
            DataType::F16 => Element::F16,
            DataType::F32 => Element::F32,
            DataType::F64 => Element::F64,
            DataType::BF16 => Element::BF16,
            _ => return None,
        })
    }

    /// The number that stands for it in a message.
    pub fn code(self) -> u16 {
        match self {
            DataType::Other(number) => OTHER + u16::from(number),
            named => code_in(&DATA_TYPES, named),
        }
    }

    pub fn from_code(code: u16) -> Option<DataType> {
        named_or_other(&DATA_TYPES, code, DataType::Other)
    }
}

impl ReduceOp {
    /// The reduction as the engine computes it; `None` if only the inner backend does.
    pub fn reduction(self) -> Option<Reduction> {
        Some(match self {
            ReduceOp::Sum => Reduction::Sum,
            ReduceOp::Avg => Reduction::Avg,
            ReduceOp::Product => Reduction::Product,
            ReduceOp::Min => Reduction::Min,
            ReduceOp::Max => Reduction::Max,
            _ => return None,
        })
    }

    /// The number that stands for it in a message.
    pub fn code(self) -> u16 {
        match self {
            ReduceOp::Other(number) => OTHER + u16::from(number),
            named => code_in(&REDUCE_OPS, named),
        }
    }

    pub fn from_code(code: u16) -> Option<ReduceOp> {
        named_or_other(&REDUCE_OPS, code, ReduceOp::Other)
    }
}

fn code_in<T: PartialEq>(names: &[(T, &str)], value: T) -> u16 {
    let position = names.iter().position(|(named, _)| *named == value);
    position.expect("all but `Other` are listed") as u16
}

fn named_or_other<T: Copy>(names: &[(T, &str)], code: u16, other: fn(u8) -> T) -> Option<T> {
    match names.get(usize::from(code)) {
        Some((named, _)) => Some(*named),
        None => u8::try_from(code.checked_sub(OTHER)?).ok().map(other),
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataType::Other(number) => write!(f, "dtype #{number}"),
            named => f.write_str(DATA_TYPES[usize::from(named.code())].1),
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReduceOp::Other(number) => write!(f, "reduce op #{number}"),
            named => f.write_str(REDUCE_OPS[usize::from(named.code())].1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_and_reduction_has_a_code_of_its_own() {
        let types: Vec<_> = (0..=u16::MAX).filter_map(DataType::from_code).collect();
        assert_eq!(types.len(), DATA_TYPES.len() + 256);
        assert!(types.iter().all(|one| DataType::from_code(one.code()) == Some(*one)));
        let ops: Vec<_> = (0..=u16::MAX).filter_map(ReduceOp::from_code).collect();
        assert_eq!(ops.len(), REDUCE_OPS.len() + 256);
        assert!(ops.iter().all(|one| ReduceOp::from_code(one.code()) == Some(*one)));
    }

    #[test]
    fn the_engine_computes_with_every_element_and_reduction_that_simd_has() {
        let elements: Vec<_> = DATA_TYPES.iter().filter_map(|(one, _)| one.element()).collect();
        assert_eq!(elements.len(), Element::ALL.len());
        assert!(Element::ALL.iter().all(|element| elements.contains(element)));
        let reductions: Vec<_> = REDUCE_OPS.iter().filter_map(|(op, _)| op.reduction()).collect();
        assert_eq!(reductions, Reduction::ALL);
    }

    #[test]
    fn what_has_no_name_is_told_by_its_number() {
        assert_eq!(DataType::Other(44).to_string(), "dtype #44");
        assert_eq!(ReduceOp::Other(9).to_string(), "reduce op #9");
        assert_eq!(DataType::BF16.to_string(), "bfloat16");
    }
}
