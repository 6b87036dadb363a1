//! Moving a whole shard into its residual: chunk by chunk, and a large one by two threads.
//!
//! This is the one stage that goes through all of the gradient. The link waits for its end, because
//! nothing can be chosen before all norms are known; so a large shard is worth a second thread for
//! the few milliseconds that it takes. The results do not depend on who does which chunk.

use crate::compress::{Gradient, Grid, Momentum, Norms, accumulate};
use std::sync::{Mutex, PoisonError};

/// Shards with more elements than this are done by two threads. Starting one takes as long as some
/// ten thousand elements.
const LARGE: usize = 2 << 20;

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
    pub fn accumulate(mut self, room: &mut Vec<f32>) -> Vec<Norms> {
        if self.gradient.len() <= LARGE || self.gradient.len() < 2 * self.chunk {
            return self.accumulate_here(room);
        }
        let second = Mutex::new(Some(self.split_off_half()));
        // Whoever comes first does it.
        let do_second = |room: &mut Vec<f32>| {
            let second = second.lock().unwrap_or_else(PoisonError::into_inner).take();
            second.map(|mut second| second.accumulate_here(room))
        };
        std::thread::scope(|scope| {
            let helper = std::thread::Builder::new().name("gflow-helper".to_string());
            let helper = helper.spawn_scoped(scope, || do_second(&mut Vec::new()));
            let mut norms = self.accumulate_here(room);
            // The helper may not have begun, or not be there at all: then it is done here.
            let done_here = do_second(room);
            let done_there = helper.ok().and_then(|helper| {
                helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            norms.extend(done_here.or(done_there).into_iter().flatten());
            norms
        })
    }

    fn accumulate_here(&mut self, room: &mut Vec<f32>) -> Vec<Norms> {
        let grid = Grid { elements: self.gradient.len(), chunk: self.chunk };
        room.resize(2 * grid.chunk.min(grid.elements), 0.0);
        let one = |index| {
            let range = grid.range(index);
            let velocity = self.velocity.as_mut();
            let velocity = velocity.map(|(velocity, by)| (&mut velocity[range.clone()], *by));
            let mut gradient = self.gradient.part(range.clone());
            accumulate(&mut gradient, &mut self.residual[range], velocity, room)
        };
        (0..grid.chunks()).map(one).collect()
    }

    /// Keeps the first half of the chunks, and returns the others.
    fn split_off_half(&mut self) -> Stretch<'a> {
        let grid = Grid { elements: self.gradient.len(), chunk: self.chunk };
        let middle = grid.chunks() / 2 * self.chunk;
        let gradient = self.gradient.split_off(middle);
        let residual = self.residual.split_off_mut(middle..).unwrap_or_default();
        let velocity = self
            .velocity
            .as_mut()
            .map(|(velocity, by)| (velocity.split_off_mut(middle..).unwrap_or_default(), *by));
        Stretch { gradient, residual, velocity, chunk: self.chunk }
    }
}
