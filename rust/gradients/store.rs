//! The state of all buckets, which has to survive from step to step, by bucket number.

use super::bucket::{Bucket, BucketState};
use crate::cuda;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Default)]
pub struct BucketStore {
    buckets: BTreeMap<u32, Bucket>,
    /// Whether the exchanges of a step that the training job skips have to be undone.
    can_undo: bool,
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
        }
    }

    pub fn can_undo(&self) -> bool {
        self.can_undo
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

    /// The state of a bucket; empty if it was never exchanged. May wait for a device.
    pub fn state_of(&self, number: u32, limit: Duration) -> cuda::Result<BucketState> {
        self.get(number).map_or(Ok(BucketState::default()), |bucket| bucket.state(limit))
    }

    /// Replaces the state of a bucket by one that was saved.
    pub fn load(&mut self, number: u32, state: BucketState) {
        self.buckets.insert(number, Bucket::from(state));
    }
}
