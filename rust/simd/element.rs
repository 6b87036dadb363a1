//! The element types that can be reduced, and the reductions.

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32,
    F64,
    F16,
    BF16,
    I8,
    U8,
    I32,
    I64,
}

impl Element {
    pub const ALL: [Element; 8] = [
        Element::F32,
        Element::F64,
        Element::F16,
        Element::BF16,
        Element::I8,
        Element::U8,
        Element::I32,
        Element::I64,
    ];

    pub fn bytes(self) -> usize {
        match self {
            Element::I8 | Element::U8 => 1,
            Element::F16 | Element::BF16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::F64 | Element::I64 => 8,
        }
    }
}

/// How the ranks' elements are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Avg,
    Product,
    Min,
    Max,
}

impl Reduction {
    pub const ALL: [Reduction; 5] =
        [Reduction::Sum, Reduction::Avg, Reduction::Product, Reduction::Min, Reduction::Max];
}
