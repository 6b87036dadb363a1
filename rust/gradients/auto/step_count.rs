//! The steps of the whole job. Every bucket counts its own, but a group may have several models: some
//! train less often than others, some are wrapped anew, and some go on with the count of a loaded state.

use std::collections::BTreeSet;

/// Counts steps by the buckets that are exchanged: one that comes again begins the next step. All ranks
/// exchange the same buckets in the same order, so all count the same.
#[derive(Debug, Default)]
pub struct StepCount {
    steps: u64,
    /// The buckets of this step so far.
    seen: BTreeSet<u32>,
}

impl StepCount {
    /// Notes the next bucket. Returns whether it begins a step.
    pub fn note(&mut self, bucket: u32) -> bool {
        let begins = !self.seen.insert(bucket);
        if begins {
            self.seen.clear();
            self.seen.insert(bucket);
            self.steps += 1;
        }
        begins
    }

    /// The number of the step that this bucket belongs to, from 0.
    pub fn now(&self) -> u64 {
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(buckets: &[u32]) -> u64 {
        let mut count = StepCount::default();
        let begun = buckets.iter().filter(|bucket| count.note(**bucket)).count();
        assert_eq!(begun as u64, count.now());
        count.now()
    }

    #[test]
    fn a_bucket_that_comes_again_begins_the_next_step() {
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[1, 2, 3]), 0);
        assert_eq!(count(&[1, 2, 3, 1]), 1);
        assert_eq!(count(&[1, 2, 3, 1, 2, 3, 1]), 2);
    }

    #[test]
    fn models_that_take_turns_step_together() {
        assert_eq!(count(&[1, 2, 7, 8, 1, 2, 7, 8, 1]), 2);
    }

    #[test]
    fn new_buckets_go_on_with_the_step_of_the_old_ones() {
        assert_eq!(count(&[1, 2, 1, 2, 5, 6, 5]), 2);
    }
}
