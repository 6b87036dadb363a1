//! Measures how much communication time is hidden behind the backward pass, and how much is exposed
//! because the training job waits for it.
//!
//! Gradients are in flight from the call for the first bucket until every bucket called so far is
//! complete. That time is hidden until the backward pass ends, and exposed from then on.
//!
//! It also keeps a record of each of the last passes, from which the engine predicts what another way to
//! send gradients would save.

use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How many passes are remembered.
const MOST_PASSES: usize = 64;

/// A backward pass that exchanged gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct Pass {
    /// When its first bucket was called.
    pub start: Instant,
    /// How long after that the backward pass ended.
    pub backward: Duration,
    /// How long the job then waited for gradients.
    pub exposed: Duration,
    /// When each bucket was called, since the start, by its number.
    pub ready: Vec<(u32, Duration)>,
}

#[derive(Debug, Default)]
pub struct OverlapTimer(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    /// Since when anything is in flight.
    since: Option<Instant>,
    /// When the backward pass ended, if something was in flight then.
    backward_end: Option<Instant>,
    times: OverlapTimes,
    /// The pass that is going on: it ends with its last bucket and its backward pass, whatever is later.
    current: Option<Pass>,
    has_backward_ended: bool,
    passes: VecDeque<Pass>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OverlapTimes {
    pub hidden: Duration,
    pub exposed: Duration,
}

impl OverlapTimer {
    /// The bucket with this number was submitted.
    pub fn begin(&self, bucket: u32, now: Instant) {
        let mut state = lock(&self.0);
        let new =
            Pass { start: now, backward: Duration::ZERO, exposed: Duration::ZERO, ready: vec![] };
        let pass = state.current.get_or_insert(new);
        pass.ready.push((bucket, now.saturating_duration_since(pass.start)));
        state.in_flight += 1;
        state.since.get_or_insert(now);
    }

    /// The backward pass has ended: from now on the job waits.
    pub fn backward_ended(&self, now: Instant) {
        let mut state = lock(&self.0);
        if let Some(pass) = &mut state.current {
            pass.backward = now.saturating_duration_since(pass.start);
            state.has_backward_ended = true;
        }
        if state.in_flight > 0 {
            state.backward_end.get_or_insert(now);
        } else {
            state.end_pass(now);
        }
    }

    /// A bucket is complete.
    pub fn end(&self, now: Instant) {
        let mut state = lock(&self.0);
        state.in_flight = state.in_flight.saturating_sub(1);
        if state.in_flight > 0 {
            return;
        }
        let wait_start = state.backward_end.take().unwrap_or(now);
        if let Some(since) = state.since.take() {
            state.times.hidden += wait_start.saturating_duration_since(since);
            state.times.exposed += now.saturating_duration_since(wait_start.max(since));
        }
        if state.has_backward_ended {
            state.end_pass(now);
        }
    }

    /// The last passes, oldest first; they are forgotten then.
    pub fn take_passes(&self) -> Vec<Pass> {
        std::mem::take(&mut lock(&self.0).passes).into()
    }

    pub fn times(&self) -> OverlapTimes {
        lock(&self.0).times
    }
}

impl State {
    fn end_pass(&mut self, now: Instant) {
        self.has_backward_ended = false;
        let Some(mut pass) = self.current.take() else { return };
        pass.exposed = now.saturating_duration_since(pass.start + pass.backward);
        if self.passes.len() == MOST_PASSES {
            self.passes.pop_front();
        }
        self.passes.push_back(pass);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(story: impl Fn(&OverlapTimer, &dyn Fn(u64) -> Instant)) -> (u64, u64) {
        let (overlap, start) = (OverlapTimer::default(), Instant::now());
        story(&overlap, &|second| start + Duration::from_secs(second));
        let times = overlap.times();
        (times.hidden.as_secs(), times.exposed.as_secs())
    }

    #[test]
    fn what_ends_before_the_backward_pass_is_hidden() {
        let story = |overlap: &OverlapTimer, at: &dyn Fn(u64) -> Instant| {
            overlap.begin(1, at(0));
            overlap.begin(1, at(1));
            overlap.end(at(2));
            overlap.end(at(3));
            overlap.backward_ended(at(5));
        };
        assert_eq!(times(story), (3, 0));
    }

    #[test]
    fn what_ends_after_the_backward_pass_is_exposed_from_its_end_on() {
        let story = |overlap: &OverlapTimer, at: &dyn Fn(u64) -> Instant| {
            for pass in [0, 100] {
                overlap.begin(1, at(pass));
                overlap.begin(1, at(pass + 4));
                overlap.end(at(pass + 5));
                overlap.backward_ended(at(pass + 6));
                overlap.end(at(pass + 9));
            }
        };
        assert_eq!(times(story), (12, 6));
    }

    #[test]
    fn a_pass_is_recorded_with_the_times_since_its_first_bucket() {
        let (overlap, start) = (OverlapTimer::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        // Everything is hidden in the first pass, and 2 s are exposed in the second.
        for (pass, last) in [(0, 3), (100, 107)] {
            overlap.begin(7, at(pass));
            overlap.end(at(pass + 1));
            overlap.begin(8, at(pass + 2));
            if last < 100 {
                overlap.end(at(last));
            }
            overlap.backward_ended(at(pass + 5));
            if last >= 100 {
                overlap.end(at(last));
            }
        }
        let passes = overlap.take_passes();
        let seconds = Duration::from_secs;
        for (pass, exposed) in passes.iter().zip([0, 2]) {
            assert_eq!(pass.backward, seconds(5));
            assert_eq!(pass.exposed, seconds(exposed));
            assert_eq!(pass.ready, [(7, seconds(0)), (8, seconds(2))]);
        }
        assert_eq!(passes.iter().map(|pass| pass.start).collect::<Vec<_>>(), [at(0), at(100)]);
        assert_eq!(overlap.take_passes(), []);
    }
}
