//! The state of all buckets, which has to survive from step to step, by bucket number.

use super::bucket::{Bucket, BucketState, HostBuffers, Remembered};
use super::unused::{Kept, ModelLayout};
use crate::codec::quantizer::Stepping;
use crate::cuda;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Default)]
pub struct BucketStore {
    buckets: BTreeMap<u32, Bucket>,
    /// Whether the exchanges of a step that the training job skips have to be undone.
    can_undo: bool,
    /// Whether the state before the last exchange has to be known if the group fails.
    keeps_last_step: bool,
    /// Of models whose steps may leave parameters unused.
    layouts: Vec<ModelLayout>,
    /// What the optimizer does with all gradients, if the user says so.
    stepping_of_all: Option<Stepping>,
    /// What it does with those of each bucket, as far as this rank knows.
    steppings: BTreeMap<u32, Stepping>,
}

impl BucketStore {
    /// A bucket, new if it was never exchanged.
    pub fn entry(&mut self, number: u32) -> &mut Bucket {
        self.buckets.entry(number).or_default()
    }

    pub fn get(&self, number: u32) -> Option<&Bucket> {
        self.buckets.get(&number)
    }

    /// How often this bucket was exchanged.
    pub fn step_of(&self, number: u32) -> u64 {
        self.get(number).map_or(0, |bucket| bucket.step)
    }

    /// Drops the state of buckets that are gone.
    pub fn forget(&mut self, numbers: &[u32]) {
        for number in numbers {
            self.buckets.remove(number);
            self.steppings.remove(number);
            self.layouts.retain(|layout| !layout.has_bucket(*number));
        }
    }

    /// What the optimizer does with a bucket, as far as this rank knows.
    pub fn stepping_of(&self, number: u32) -> Option<Stepping> {
        self.stepping_of_all.or_else(|| self.steppings.get(&number).copied())
    }

    /// Sets what the optimizer does with these buckets; without any, what it does with all, whatever is
    /// said of single ones.
    pub fn set_stepping(&mut self, buckets: &[u32], stepping: Option<Stepping>) {
        if buckets.is_empty() {
            self.stepping_of_all = stepping;
        }
        for number in buckets {
            match stepping {
                Some(stepping) => self.steppings.insert(*number, stepping),
                None => self.steppings.remove(number),
            };
        }
    }

    /// Where the parameters of a model are whose steps may leave some unused.
    pub fn add_layout(&mut self, layout: ModelLayout) {
        self.layouts.push(layout);
    }

    /// Whether steps may leave parameters in this bucket unused. All ranks get the same answer.
    pub fn may_be_unused(&self, bucket: u32) -> bool {
        self.layouts.iter().any(|layout| layout.has_bucket(bucket))
    }

    /// Takes back what was delivered for parameters that no rank used, of the model with this bucket.
    /// `used` counts the ranks that used each parameter. Only on one host of those that carry a shard it
    /// `keeps_sum`.
    ///
    /// # Safety
    /// The model's Reducer waits for these counts: it does not touch what it takes for unused meanwhile.
    pub unsafe fn take_back_unused(&mut self, bucket: u32, used: &[i32], keeps_sum: bool) {
        let BucketStore { buckets, layouts, .. } = self;
        let Some(layout) = layouts.iter().find(|layout| layout.has_bucket(bucket)) else { return };
        for part in layout.unused(used) {
            let Some(bucket) = buckets.get_mut(&part.bucket) else { continue };
            let Some(delivered) = bucket.delivered.clone() else { continue };
            let Some(HostBuffers { residual, velocity, .. }) = bucket.as_host_mut() else {
                continue;
            };
            // SAFETY: the Reducer has this bucket; the caller vouches for the rest.
            unsafe { delivered.take_back(Kept { residual, velocity }, &part.elements, keeps_sum) };
        }
    }

    /// What each bucket has to remember before it is exchanged.
    pub fn remembered(&self) -> Remembered {
        match (self.can_undo, self.keeps_last_step) {
            (true, _) => Remembered::LastCommit,
            (false, true) => Remembered::LastExchange,
            (false, false) => Remembered::None,
        }
    }

    /// From now on, the state of the last complete step is known even after a failure. It takes as much
    /// memory as there is state.
    pub fn keep_last_step(&mut self) {
        self.keeps_last_step = true;
    }

    /// Whether exchanges can be undone from now on. It takes as much memory as there is state.
    pub fn keep_for_undo(&mut self, is_wanted: bool) {
        self.can_undo = is_wanted;
        self.buckets.values_mut().for_each(Bucket::drop_backup);
    }

    /// The training job has decided about the gradients exchanged since the last call, and changed their
    /// unit by `factor`. If it `skipped` the step, they were not used, so their exchanges are undone.
    pub fn record_step(&mut self, skipped: bool, factor: f32) -> cuda::Result<()> {
        for bucket in self.buckets.values_mut() {
            if skipped {
                bucket.undo();
            }
            bucket.commit();
            if factor != 1.0 {
                bucket.rescale(factor)?;
            }
        }
        Ok(())
    }

    /// For a group that has failed: the newest state of a bucket after at most `step` exchanges, all
    /// complete. If that is not remembered, the state as it is.
    pub fn state_until(
        &self,
        number: u32,
        step: u64,
        limit: Duration,
    ) -> cuda::Result<BucketState> {
        let Some(bucket) = self.get(number) else { return Ok(BucketState::default()) };
        if bucket.is_beyond(step, self.remembered()) {
            log::warn!(
                "what is kept of bucket {number} is what the failed step has left of it; with \
                 keep_last_step=\"on\" it would be that of the last complete step"
            );
        }
        bucket.state_until(step, self.remembered(), limit)
    }

    /// The state of a bucket; empty if it was never exchanged. May wait for a device.
    pub fn state_of(&self, number: u32, limit: Duration) -> cuda::Result<BucketState> {
        self.get(number).map_or(Ok(BucketState::default()), |bucket| bucket.state(limit))
    }

    /// Replaces the state of a bucket by one that was saved, of which some rank keeps a residual if it
    /// `owes`.
    pub fn load(&mut self, number: u32, state: BucketState, owes: bool) {
        self.buckets.insert(number, Bucket::from(state).owes(owes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADAM: Option<Stepping> = Some(Stepping::Normalized);
    const SGD: Option<Stepping> = Some(Stepping::Proportional);

    #[test]
    fn how_the_optimizer_steps_is_known_by_bucket_until_it_is_gone() {
        let mut store = BucketStore::default();
        store.set_stepping(&[1, 2], ADAM);
        store.set_stepping(&[3], SGD);
        assert_eq!([1, 2, 3, 4].map(|number| store.stepping_of(number)), [ADAM, ADAM, SGD, None]);
        store.set_stepping(&[2], None);
        store.forget(&[3]);
        assert_eq!([1, 2, 3].map(|number| store.stepping_of(number)), [ADAM, None, None]);
    }

    #[test]
    fn what_the_user_says_of_all_buckets_counts_and_a_loaded_state_changes_nothing() {
        let mut store = BucketStore::default();
        store.set_stepping(&[1], ADAM);
        store.load(1, BucketState::default(), false);
        assert_eq!([1, 2].map(|number| store.stepping_of(number)), [ADAM, None]);
        store.set_stepping(&[], SGD);
        assert_eq!([1, 2].map(|number| store.stepping_of(number)), [SGD, SGD]);
    }
}
