//! Moving a whole shard into its residual: chunk by chunk, and a large one by two threads.
//!
//! This is the one stage that goes through all of the gradient. The link waits for its end, because
//! nothing can be chosen before all norms are known; so a large shard is worth a second thread for
//! the few milliseconds that it takes. More were measured not to be faster, and the cores are the
//! training job's. The results do not depend on who does which chunk.

use crate::codec::{ChunkGrid, ChunkNorms, Gradient, Momentum, accumulate};
use std::sync::{Mutex, PoisonError};

/// What a thread takes at a time has about this many elements. Starting a thread takes as long as
/// some ten thousand.
const PIECE: usize = 1 << 20;

/// What one thread goes through: whole chunks of a shard.
pub struct Stretch<'a> {
    pub gradient: Gradient<'a>,
    pub residual: &'a mut [f32],
    /// With momentum only.
    pub velocity: Option<(&'a mut [f32], Momentum)>,
    /// Elements in a chunk; the last may be short.
    pub chunk: usize,
}

impl<'a> Stretch<'a> {
    /// Moves the gradient into the residual and returns the norms of the chunks. `room` is used to
    /// remember a chunk while it is changed.
    pub fn accumulate(mut self, room: &mut Vec<f32>) -> Vec<ChunkNorms> {
        if self.gradient.len() < 2 * PIECE.max(self.chunk) {
            return self.accumulate_here(room);
        }
        let left = Mutex::new(self.into_pieces().into_iter().enumerate());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = |room: &mut Vec<f32>| {
            let mut done = Vec::new();
            while let Some((index, mut piece)) = next() {
                done.push((index, piece.accumulate_here(room)));
            }
            done
        };
        let mut done = std::thread::scope(|scope| {
            let helper = std::thread::Builder::new().name("gflow-helper".to_string());
            let helper = helper.spawn_scoped(scope, || work(&mut Vec::new()));
            let mut done = work(room);
            // If it could not be started, all is done by now.
            if let Ok(helper) = helper {
                done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            done
        });
        done.sort_unstable_by_key(|(index, _)| *index);
        done.into_iter().flat_map(|(_, norms)| norms).collect()
    }

    fn accumulate_here(&mut self, room: &mut Vec<f32>) -> Vec<ChunkNorms> {
        let grid = ChunkGrid { elements: self.gradient.len(), chunk_len: self.chunk };
        room.resize(2 * grid.chunk_len.min(grid.elements), 0.0);
        let one = |index| {
            let range = grid.range(index);
            let velocity = self.velocity.as_mut();
            let velocity = velocity.map(|(velocity, by)| (&mut velocity[range.clone()], *by));
            let mut gradient = self.gradient.part(range.clone());
            accumulate(&mut gradient, &mut self.residual[range], velocity, room)
        };
        (0..grid.chunks()).map(one).collect()
    }

    /// The same in pieces of whole chunks.
    fn into_pieces(mut self) -> Vec<Stretch<'a>> {
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
    fn split_off(&mut self, middle: usize) -> Stretch<'a> {
        let gradient = self.gradient.split_off(middle);
        let residual = self.residual.split_off_mut(middle..).unwrap_or_default();
        let velocity = self
            .velocity
            .as_mut()
            .map(|(velocity, by)| (velocity.split_off_mut(middle..).unwrap_or_default(), *by));
        Stretch { gradient, residual, velocity, chunk: self.chunk }
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
                let mut stretch = Stretch {
                    gradient: Gradient::F32(&mut gradient),
                    residual: &mut residual,
                    velocity: momentum.map(|momentum| (&mut velocity[..], momentum)),
                    chunk,
                };
                let norms = match by_two {
                    true => stretch.accumulate(&mut Vec::new()),
                    false => stretch.accumulate_here(&mut Vec::new()),
                };
                (norms, gradient, residual, velocity)
            };
            assert!(once(true) == once(false), "chunks of {chunk}");
        }
    }
}
