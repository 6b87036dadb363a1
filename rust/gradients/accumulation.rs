//! Moves a whole shard into its residual, chunk by chunk; a large shard with two threads.
//!
//! This is the one stage that reads all of the gradient. The link is idle until it ends, because chunks
//! can be selected only when all norms are known; so a large shard is worth a second thread for a few
//! milliseconds. More threads were measured not to be faster, and the cores belong to the training job.
//! The results do not depend on which thread does which chunk.

use crate::codec::{ChunkGrid, ChunkNorms, Gradient, Momentum, accumulate};
use crate::observe::threads;
use crate::sync::lock;
use std::sync::Mutex;

/// A thread takes about this many elements at a time. Starting a thread takes as long as some ten
/// thousand.
const PIECE: usize = 1 << 20;

/// Whole chunks of a shard, for one thread.
pub struct ShardSlice<'a> {
    pub gradient: Gradient<'a>,
    pub residual: &'a mut [f32],
    /// Only with momentum.
    pub velocity: Option<(&'a mut [f32], Momentum)>,
    /// Elements in a chunk; the last may be short.
    pub chunk: usize,
}

impl<'a> ShardSlice<'a> {
    /// Moves the gradient into the residual and returns the norms of the chunks. `scratch` holds a copy of
    /// a chunk while it changes.
    pub fn accumulate(mut self, scratch: &mut Vec<f32>) -> Vec<ChunkNorms> {
        if self.gradient.len() < 2 * PIECE.max(self.chunk) {
            return self.accumulate_here(scratch);
        }
        let left = Mutex::new(self.into_pieces().into_iter().enumerate());
        let next = || lock(&left).next();
        let work = |scratch: &mut Vec<f32>| {
            let mut done = Vec::new();
            while let Some((index, mut piece)) = next() {
                done.push((index, piece.accumulate_here(scratch)));
            }
            done
        };
        let mut done = std::thread::scope(|scope| {
            let helper = threads::spawn_scoped(scope, "gflow-helper", || work(&mut Vec::new()));
            let mut done = work(scratch);
            // If it could not be started, this thread has done everything.
            if let Ok(helper) = helper {
                done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            done
        });
        done.sort_unstable_by_key(|(index, _)| *index);
        done.into_iter().flat_map(|(_, norms)| norms).collect()
    }

    fn accumulate_here(&mut self, scratch: &mut Vec<f32>) -> Vec<ChunkNorms> {
        let grid = ChunkGrid { elements: self.gradient.len(), chunk_len: self.chunk };
        scratch.resize(2 * grid.chunk_len.min(grid.elements), 0.0);
        let one = |index| {
            let range = grid.range(index);
            let velocity = self.velocity.as_mut();
            let velocity = velocity.map(|(velocity, by)| (&mut velocity[range.clone()], *by));
            let mut gradient = self.gradient.part(range.clone());
            accumulate(&mut gradient, &mut self.residual[range], velocity, scratch)
        };
        (0..grid.chunks()).map(one).collect()
    }

    /// Splits it into pieces of whole chunks.
    fn into_pieces(mut self) -> Vec<ShardSlice<'a>> {
        let size = PIECE.div_ceil(self.chunk) * self.chunk;
        let mut pieces = Vec::new();
        while self.gradient.len() > size {
            let rest = self.split_off(size);
            pieces.push(std::mem::replace(&mut self, rest));
        }
        pieces.push(self);
        pieces
    }

    /// Keeps the elements before `middle`, and returns the others.
    fn split_off(&mut self, middle: usize) -> ShardSlice<'a> {
        let gradient = self.gradient.split_off(middle);
        let residual = self.residual.split_off_mut(middle..).unwrap_or_default();
        let velocity = self
            .velocity
            .as_mut()
            .map(|(velocity, by)| (velocity.split_off_mut(middle..).unwrap_or_default(), *by));
        ShardSlice { gradient, residual, velocity, chunk: self.chunk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_get_what_one_gets_in_the_same_order() {
        let elements = 6 * PIECE + 17;
        let value = |seed: usize| move |index| ((index * seed) % 1009) as f32 - 500.0;
        for (chunk, momentum) in
            [(1000, None), (PIECE + 3, Some(Momentum { factor: 0.5, nesterov: true }))]
        {
            let once = |by_two: bool| {
                let [mut gradient, mut residual, mut velocity] =
                    [7, 11, 13].map(|seed| (0..elements).map(value(seed)).collect::<Vec<f32>>());
                let mut slice = ShardSlice {
                    gradient: Gradient::F32(&mut gradient),
                    residual: &mut residual,
                    velocity: momentum.map(|momentum| (&mut velocity[..], momentum)),
                    chunk,
                };
                let norms = match by_two {
                    true => slice.accumulate(&mut Vec::new()),
                    false => slice.accumulate_here(&mut Vec::new()),
                };
                (norms, gradient, residual, velocity)
            };
            assert!(once(true) == once(false), "chunks of {chunk}");
        }
    }
}
