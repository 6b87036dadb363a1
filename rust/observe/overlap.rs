//! Measures how much communication time is hidden behind the backward pass, and how much is exposed
//! because the training job waits for it.
//!
//! Gradients are in flight from the call for the first bucket until every bucket called so far is
//! complete. That time is hidden until the backward pass ends, and exposed from then on.

use crate::sync::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

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
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OverlapTimes {
    pub hidden: Duration,
    pub exposed: Duration,
}

impl OverlapTimer {
    /// A bucket was submitted.
    pub fn begin(&self, now: Instant) {
        let mut state = lock(&self.0);
        state.in_flight += 1;
        state.since.get_or_insert(now);
    }

    /// The backward pass has ended: from now on the job waits.
    pub fn backward_ended(&self, now: Instant) {
        let mut state = lock(&self.0);
        if state.in_flight > 0 {
            state.backward_end.get_or_insert(now);
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
    }

    pub fn times(&self) -> OverlapTimes {
        lock(&self.0).times
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
            overlap.begin(at(0));
            overlap.begin(at(1));
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
                overlap.begin(at(pass));
                overlap.begin(at(pass + 4));
                overlap.end(at(pass + 5));
                overlap.backward_ended(at(pass + 6));
                overlap.end(at(pass + 9));
            }
        };
        assert_eq!(times(story), (12, 6));
    }
}
