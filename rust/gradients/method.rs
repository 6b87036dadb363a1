//! The methods by which gradients can be sent, and how much noise one may add, as the user names them.

use crate::codec::Wire;
use crate::codec::quantizer::Levels;
use std::fmt;

/// What the user wants gradients to be sent as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// What promises the shortest time to a loss: see `auto`.
    Auto,
    /// Exactly.
    Exact,
    /// All elements, rounded to this format.
    Rounded(Wire),
    /// All elements, with a few levels.
    Quantized(Levels),
    /// The most important chunks, after GradientFlow; the others wait.
    Chunks,
}

impl Method {
    /// The method with this name in the options.
    pub fn from_name(name: &str) -> Option<Method> {
        match name {
            "auto" => Some(Method::Auto),
            "exact" => Some(Method::Exact),
            "chunks" => Some(Method::Chunks),
            _ => {
                let rounded = Wire::from_name(name).map(|wire| match wire {
                    Wire::F32 => Method::Exact,
                    _ => Method::Rounded(wire),
                });
                rounded.or_else(|| Levels::from_name(name).map(Method::Quantized))
            }
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Auto => "auto",
            Method::Exact => "exact",
            Method::Rounded(wire) => wire.name(),
            Method::Quantized(levels) => levels.name(),
            Method::Chunks => "chunks",
        })
    }
}

/// How much noise the user accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxNoise {
    /// Nothing but the rounding of fp16.
    None,
    /// At most that of five levels.
    Low,
    Any,
}

impl MaxNoise {
    /// The limit with this name in the options.
    pub fn from_name(name: &str) -> Option<MaxNoise> {
        match name {
            "none" => Some(MaxNoise::None),
            "low" => Some(MaxNoise::Low),
            "any" => Some(MaxNoise::Any),
            _ => None,
        }
    }
}
