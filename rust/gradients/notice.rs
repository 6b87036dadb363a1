//! What the user is told, once, about how gradients are sent.

use super::auto::Choice;
use super::config::CompressionStarted;
use crate::codec::Coding;
use std::fmt;

#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// The first bucket was compressed.
    Started(CompressionStarted),
    /// What `method="auto"` has chosen for this group.
    Chosen(Choice),
}

/// How to switch it off.
const HOW_TO_STOP: &str = "All other tensors stay exact. To switch it off: GFLOW_COMPRESS=off, or \
                           pg_options=gflow.Options(compress=\"off\")";

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Started(started) => write!(f, "{started}. {HOW_TO_STOP}"),
            Notice::Chosen(choice) if choice.compresses() => write!(f, "{choice}. {HOW_TO_STOP}"),
            Notice::Chosen(choice) => write!(f, "{choice}"),
        }
    }
}

impl fmt::Display for CompressionStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CompressionStarted { hosts, coding, ramp_steps, ratio } = self;
        write!(f, "from this step on gradients are compressed between the {hosts} hosts: ")?;
        let when = match ramp_steps {
            0 => String::new(),
            steps => format!(" after a ramp of {steps} steps"),
        };
        match coding {
            Coding::Chunks { density, wire } if *density < 1.0 => {
                // Rounded to 4 digits after the point.
                let percent = (density * 1e6).round() / 1e4;
                write!(
                    f,
                    "the most important {percent}% of their chunks are sent{when}, as {}, and the \
                     rest is kept and sent later",
                    wire.name()
                )?;
            }
            Coding::Chunks { wire, .. } => write!(f, "they are sent as {}{when}", wire.name())?,
            Coding::Quantized(quantizer) => write!(
                f,
                "every element is sent as {} ({} levels){when}, and what rounding leaves of it is \
                 kept for the next step",
                quantizer.levels.name(),
                2 * u32::from(quantizer.levels.largest()) + 1,
            )?,
        }
        write!(f, ": about {ratio:.0}x fewer bytes")
    }
}
