//! How gradients are quantised with each kind of levels, for each kind of optimizer.

use super::levels::{BLOCK, LEVEL_BYTES, Levels};

/// How a block is rounded to levels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rounding {
    /// The largest element gets the largest symbol, so none is cut off.
    ToMaximum,
    /// A step is this multiple of the block's root mean square, and the level is chosen so that
    /// the sum does not shrink. Only an element that is more than `margin` steps beyond the outermost
    /// multiple counts as if it were there: else a few outliers, which no symbol can reach, would
    /// raise the level of all others. What is not sent of them is left for later.
    Unbiased { step: f32, margin: f32 },
}

/// What the optimizer does with a gradient, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepping {
    /// Every element is divided by its usual size, as in Adam: small elements matter as much as
    /// large ones.
    Normalized = 1,
    /// The step is proportional to the gradient, as in SGD.
    Proportional = 2,
}

impl Stepping {
    /// Its name in the options.
    pub fn from_name(name: &str) -> Option<Stepping> {
        match name {
            "normalized" => Some(Stepping::Normalized),
            "proportional" => Some(Stepping::Proportional),
            _ => None,
        }
    }

    /// What its code stands for, `stepping as u16`; `None` for any other.
    pub fn from_code(code: u16) -> Option<Stepping> {
        [Stepping::Normalized, Stepping::Proportional].into_iter().find(|it| *it as u16 == code)
    }
}

/// How gradients are quantised. All ranks of a group must use the same at the same step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantizer {
    pub levels: Levels,
    pub rounding: Rounding,
    /// The fraction of a residual that is added to the next gradient.
    pub feedback: f32,
    /// Whether steps follow the sizes of elements.
    pub uses_sizes: bool,
}

impl Quantizer {
    /// The quantiser with these levels. The constants are what trainings were best with
    /// (docs/codecs.md).
    pub fn new(levels: Levels, stepping: Stepping) -> Quantizer {
        let margin = match stepping {
            // A gradient that is somewhat smaller everywhere is the same to such an optimizer, and
            // the less outliers count, the less noise there is.
            Stepping::Normalized => 0.0,
            Stepping::Proportional => 1.0,
        };
        let unbiased = |step| Rounding::Unbiased { step, margin };
        let rounding = match levels {
            Levels::Int8 => Rounding::ToMaximum,
            Levels::Int4 => unbiased(0.4),
            Levels::Int3 => unbiased(0.5),
            Levels::Quinary => unbiased(0.75),
            Levels::Ternary => unbiased(1.25),
        };
        // With sizes, three levels are too coarse for the largest elements, and those are what an
        // optimizer that steps in proportion steps by.
        let uses_sizes = !matches!(
            (levels, stepping),
            (Levels::Int8, _) | (Levels::Ternary, Stepping::Proportional)
        );
        let feedback = if levels == Levels::Int8 { 1.0 } else { 0.75 };
        Quantizer { levels, rounding, feedback, uses_sizes }
    }

    /// Bytes of a block on the wire; a shorter block at the end of a gradient takes as many.
    pub fn block_bytes(&self) -> usize {
        LEVEL_BYTES + self.levels.packed_bytes()
    }

    pub fn bits_per_element(&self) -> f64 {
        8.0 * self.block_bytes() as f64 / BLOCK as f64
    }
}
