//! What a gradient is sent as in one step, and what holds of every codec.

use super::quantizer::Quantizer;
use super::wire::Wire;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Coding {
    /// This fraction of its chunks, rounded to the format of the wire; the others wait. With all of
    /// them it is the plain cast of a gradient.
    Chunks { density: f64, wire: Wire },
    /// All elements, each with a few levels.
    Quantized(Quantizer),
}

impl Coding {
    /// The fraction of elements that is sent.
    pub fn density(&self) -> f64 {
        match self {
            Coding::Chunks { density, .. } => *density,
            Coding::Quantized(_) => 1.0,
        }
    }

    /// The part of a residual that is added to the next gradient. The rest is let go.
    pub fn feedback(&self) -> f32 {
        match self {
            Coding::Chunks { .. } => 1.0,
            Coding::Quantized(quantizer) => quantizer.feedback,
        }
    }

    /// Whether all of a gradient is sent as it is, with all that was kept.
    pub fn is_exact(&self) -> bool {
        matches!(self, Coding::Chunks { density, wire: Wire::F32 } if *density >= 1.0)
    }

    /// Whether it needs the sizes of elements.
    pub fn uses_sizes(&self) -> bool {
        matches!(self, Coding::Quantized(Quantizer { uses_sizes: true, .. }))
    }

    /// Its name in the options.
    pub fn name(&self) -> &'static str {
        match self {
            Coding::Chunks { density, wire } if *density >= 1.0 => wire.name(),
            Coding::Chunks { .. } => "chunks",
            Coding::Quantized(quantizer) => quantizer.levels.name(),
        }
    }

    /// Bits on the wire for each element of a gradient.
    pub fn bits_per_element(&self) -> f64 {
        match self {
            Coding::Chunks { density, wire } => density * 8.0 * wire.element_bytes() as f64,
            Coding::Quantized(quantizer) => quantizer.bits_per_element(),
        }
    }
}

impl fmt::Display for Coding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Coding::Chunks { density, wire } if *density < 1.0 => {
                write!(f, "{density} of its chunks are sent, as {}", wire.name())
            }
            _ => f.write_str(self.name()),
        }
    }
}
