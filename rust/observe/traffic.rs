//! How much of the time in which gradients are under way is hidden behind the backward pass, and how
//! much of it the training job waits.
//!
//! Gradients are under way from the call for the first bucket until the last of those called is
//! complete. Until the backward pass has ended that time is hidden, from then on it is exposed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub struct Traffic(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    under_way: usize,
    /// Since when anything is under way.
    since: Option<Instant>,
    /// When the backward pass ended while something was under way.
    waited_for_since: Option<Instant>,
    times: Times,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    pub hidden: Duration,
    pub exposed: Duration,
}

impl Traffic {
    /// A bucket was handed over.
    pub fn begin(&self, now: Instant) {
        let mut state = self.lock();
        state.under_way += 1;
        state.since.get_or_insert(now);
    }

    /// The backward pass is over: from now on somebody waits.
    pub fn backward_ended(&self, now: Instant) {
        let mut state = self.lock();
        if state.under_way > 0 {
            state.waited_for_since.get_or_insert(now);
        }
    }

    /// A bucket is complete.
    pub fn end(&self, now: Instant) {
        let mut state = self.lock();
        state.under_way = state.under_way.saturating_sub(1);
        if state.under_way > 0 {
            return;
        }
        let waited = state.waited_for_since.take().unwrap_or(now);
        if let Some(since) = state.since.take() {
            state.times.hidden += waited.saturating_duration_since(since);
            state.times.exposed += now.saturating_duration_since(waited.max(since));
        }
    }

    pub fn times(&self) -> Times {
        self.lock().times
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Valid after every statement, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(story: impl Fn(&Traffic, &dyn Fn(u64) -> Instant)) -> (u64, u64) {
        let (traffic, start) = (Traffic::default(), Instant::now());
        story(&traffic, &|second| start + Duration::from_secs(second));
        let times = traffic.times();
        (times.hidden.as_secs(), times.exposed.as_secs())
    }

    #[test]
    fn what_ends_before_the_backward_pass_is_hidden() {
        let story = |traffic: &Traffic, at: &dyn Fn(u64) -> Instant| {
            traffic.begin(at(0));
            traffic.begin(at(1));
            traffic.end(at(2));
            traffic.end(at(3));
            traffic.backward_ended(at(5));
        };
        assert_eq!(times(story), (3, 0));
    }

    #[test]
    fn what_ends_after_the_backward_pass_is_exposed_from_its_end_on() {
        let story = |traffic: &Traffic, at: &dyn Fn(u64) -> Instant| {
            for pass in [0, 100] {
                traffic.begin(at(pass));
                traffic.begin(at(pass + 4));
                traffic.end(at(pass + 5));
                traffic.backward_ended(at(pass + 6));
                traffic.end(at(pass + 9));
            }
        };
        assert_eq!(times(story), (12, 6));
    }
}
