//! How long this processor takes for an element with each method, measured once on a few blocks.

use super::ladder::LADDER;
use crate::codec::Gradient;
use crate::codec::quantizer::{BLOCK, Quantizer, Stepping, Workspace};
use crate::gradients::method::Method;
use std::time::Instant;

const BLOCKS: usize = 32;
/// The first rounds warm up caches and the clock of the processor; the fastest counts.
const ROUNDS: usize = 5;
/// What a cast to 16 bits and back costs in seconds: it is bound by memory, and hard to measure on a few
/// blocks.
const ROUNDING: f64 = 0.5e-9;
/// Real gradients come from memory, not from the cache.
const FROM_MEMORY: f64 = 1.5;

/// Seconds for an element, by method.
pub fn measure() -> [f64; LADDER.len()] {
    LADDER.map(|method| match method {
        Method::Quantized(levels) => {
            FROM_MEMORY * quantizing(&Quantizer::new(levels, Stepping::Normalized))
        }
        Method::Rounded(_) => ROUNDING,
        _ => 0.0,
    })
}

fn quantizing(quantizer: &Quantizer) -> f64 {
    let mut gradient: Vec<f32> = (0..BLOCK).map(|index| (index as f32 * 0.7).sin()).collect();
    let (mut residual, sizes) = (vec![0.0; BLOCK], vec![0x3f80; BLOCK]);
    let sizes = if quantizer.uses_sizes { &sizes[..] } else { &[] };
    let mut bytes = vec![0; quantizer.block_bytes()];
    let mut sum = vec![0.0; BLOCK];
    let mut workspace = Workspace::default();
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..BLOCKS {
            let mut gradient = Gradient::F32(&mut gradient);
            // As for one of two hosts: once encoded, once added, once delivered.
            quantizer.send(&gradient, &mut residual, sizes, &mut bytes, &mut workspace);
            quantizer.add(&bytes, sizes, &mut sum, &mut workspace);
            quantizer.deliver(&bytes, sizes, &mut gradient, &mut workspace);
        }
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    fastest / (BLOCKS * BLOCK) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_but_exact_costs_something() {
        let costs = measure();
        assert_eq!(costs[0], 0.0);
        assert!(costs[1..].iter().all(|cost| *cost > 0.0 && *cost < 1e-3), "{costs:?}");
    }
}
