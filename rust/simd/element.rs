//! What may be reduced, and how: the element types and reductions, with the codes torch gives
//! them. It must never guess: a code it does not know is None, not the nearest thing.

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

    /// The element type with this number in torch's `ScalarType`.
    pub fn from_torch(code: u8) -> Option<Element> {
        match code {
            0 => Some(Element::U8),
            1 => Some(Element::I8),
            3 => Some(Element::I32),
            4 => Some(Element::I64),
            5 => Some(Element::F16),
            6 => Some(Element::F32),
            7 => Some(Element::F64),
            15 => Some(Element::BF16),
            _ => None,
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Element::I8 | Element::U8 => 1,
            Element::F16 | Element::BF16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::F64 | Element::I64 => 8,
        }
    }
}

/// What the ranks' elements are made into.
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

    /// The reduction with this number in torch's `ReduceOp`.
    pub fn from_torch(code: u8) -> Option<Reduction> {
        match code {
            0 => Some(Reduction::Sum),
            1 => Some(Reduction::Avg),
            2 => Some(Reduction::Product),
            3 => Some(Reduction::Min),
            4 => Some(Reduction::Max),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_and_reduction_has_one_code() {
        let elements: Vec<Element> = (0..=255).filter_map(Element::from_torch).collect();
        assert_eq!(elements.len(), Element::ALL.len());
        assert!(Element::ALL.iter().all(|element| elements.contains(element)));
        let reductions: Vec<Reduction> = (0..=255).filter_map(Reduction::from_torch).collect();
        assert_eq!(reductions, Reduction::ALL);
    }
}
