//! The float format in which a gradient travels.

/// A float format on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    F16,
    BF16,
    F32,
}

impl Wire {
    pub const ALL: [Wire; 3] = [Wire::F16, Wire::BF16, Wire::F32];

    pub fn element_bytes(self) -> usize {
        match self {
            Wire::F16 | Wire::BF16 => 2,
            Wire::F32 => 4,
        }
    }

    /// Its name in the options.
    pub fn name(self) -> &'static str {
        match self {
            Wire::F16 => "fp16",
            Wire::BF16 => "bf16",
            Wire::F32 => "fp32",
        }
    }

    pub fn from_name(name: &str) -> Option<Wire> {
        Wire::ALL.into_iter().find(|wire| wire.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wire_has_one_name() {
        for wire in Wire::ALL {
            assert_eq!(Wire::from_name(wire.name()), Some(wire));
        }
        assert_eq!(Wire::from_name("fp8"), None);
        assert_eq!(Wire::from_name("FP16"), None);
    }
}
