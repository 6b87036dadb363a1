//! The state that a rank keeps of one gradient bucket from step to step: the residual (what was not sent
//! yet), the velocity if the engine has taken over the momentum, and the sizes of its elements if a
//! quantiser follows them. All cover this rank's shard only, and hold finite numbers only.

use super::config::{Treatment, WhyExact};
use super::sizes_buffer::SizesBuffer;
use super::state_buffer::{Location, StateBuffer};
use super::unused::Delivered;
use crate::codec::Momentum;
use crate::cuda;
use crate::simd::half_precision::BF16;
use crate::simd::number::Stored;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Default)]
pub struct Bucket {
    /// How often it was exchanged, with the exchange under way.
    pub step: u64,
    /// How many of these exchanges are complete.
    completed: u64,
    /// Whether an exchange has begun to change its state and is not complete.
    is_changing: bool,
    /// The part of past gradients not sent yet; empty until the first step that does not send everything.
    pub residual: StateBuffer,
    /// Empty until there is momentum.
    pub velocity: StateBuffer,
    /// How large each element usually is.
    pub sizes: SizesBuffer,
    backup: Backup,
    /// What the last exchange delivered, unless that was exact.
    pub delivered: Option<Delivered>,
    /// How it was exchanged last, to log changes only.
    treated: Option<Treatment>,
    /// Whether some rank may keep a residual of it, so that an exact exchange has to bring that. All
    /// ranks say the same.
    may_owe: bool,
    /// The same as of [`Bucket::commit`].
    might_owe: bool,
}

/// A bucket's state in host memory, as it is saved and loaded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BucketState {
    pub step: u64,
    pub residual: Vec<f32>,
    pub velocity: Vec<f32>,
    pub sizes: Vec<f32>,
}

/// A bucket's buffers, if they are in host memory.
pub struct HostBuffers<'a> {
    pub residual: &'a mut [f32],
    /// Empty without momentum.
    pub velocity: &'a mut [f32],
    /// Empty unless a quantiser follows sizes.
    pub sizes: &'a mut Arc<Vec<u16>>,
}

/// Which states a bucket remembers, to go back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remembered {
    None,
    /// The state before the last exchange.
    LastExchange,
    /// The state before all exchanges since [`Bucket::commit`].
    LastCommit,
}

/// The state before the exchanges that may have to be undone.
#[derive(Debug, Default)]
struct Backup {
    /// Whether there is anything to undo. If not, this is only memory to reuse.
    is_valid: bool,
    /// How many exchanges were complete.
    completed: u64,
    residual: StateBuffer,
    velocity: StateBuffer,
    sizes: SizesBuffer,
}

/// The buffers that a bucket needs for its next exchange.
pub struct Needed<'a> {
    /// Elements of this rank's shard.
    pub elements: usize,
    /// Whether the exchange leaves a residual.
    pub residual: bool,
    /// Whether the exchange follows the sizes of elements.
    pub sizes: bool,
    pub momentum: Option<Momentum>,
    pub location: &'a Location,
    /// How long to wait for a device that has the state of this bucket.
    pub limit: Duration,
}

impl Bucket {
    /// Its state in host memory. Waits for the device if the state is there.
    pub fn state(&self, limit: Duration) -> cuda::Result<BucketState> {
        let Bucket { step, residual, velocity, sizes, .. } = self;
        copy_state(*step, residual, velocity, sizes, limit)
    }

    /// Its newest state after at most `step` exchanges, all complete; if it does not remember that, the
    /// state as it is.
    pub fn state_until(
        &self,
        step: u64,
        remembered: Remembered,
        limit: Duration,
    ) -> cuda::Result<BucketState> {
        // Exchanges that were not committed are part of a step that is not complete.
        let is_uncommitted = remembered == Remembered::LastCommit && self.backup.is_valid;
        let is_wanted = self.completed <= step && !self.is_changing && !is_uncommitted;
        if !is_wanted && remembered != Remembered::None && self.backup.is_valid {
            let Backup { completed, residual, velocity, sizes, .. } = &self.backup;
            return copy_state(*completed, residual, velocity, sizes, limit);
        }
        let step = if self.is_changing { self.step } else { self.completed };
        copy_state(step, &self.residual, &self.velocity, &self.sizes, limit)
    }

    /// Whether it holds more than `step` complete exchanges, and does not remember what was before.
    pub fn is_beyond(&self, step: u64, remembered: Remembered) -> bool {
        let remembers = remembered != Remembered::None && self.backup.is_valid;
        (self.is_changing || self.completed > step) && !remembers
    }

    /// Whether an exact exchange has to bring what some rank may keep of it.
    pub fn may_owe(&self) -> bool {
        self.may_owe
    }

    /// Its state was loaded, and some rank may keep a residual of it.
    pub fn owes(mut self, may_owe: bool) -> Bucket {
        (self.may_owe, self.might_owe) = (may_owe, may_owe);
        self
    }

    /// Notes how it is exchanged, and logs it if that has changed. If it `may_be_unused`, what is delivered
    /// of it may be taken back, and owed again.
    pub fn note_treatment(&mut self, number: u32, treatment: Treatment, may_be_unused: bool) {
        match treatment {
            Treatment::Compressed(_) => self.may_owe = true,
            Treatment::Exact(WhyExact::Method) => self.may_owe &= may_be_unused,
            // These leave what is kept as it is.
            Treatment::Exact(_) => {}
        }
        if self.treated.replace(treatment).is_some_and(|before| before.is_like(treatment)) {
            return;
        }
        match treatment {
            Treatment::Compressed(coding) => log::info!("bucket {number} is compressed: {coding}"),
            Treatment::Exact(why) => log::info!("bucket {number} is exchanged exactly: {why}"),
        }
    }

    /// Whether its state has to move before it can be used at `location`.
    pub fn is_elsewhere(&self, location: &Location) -> bool {
        let is_elsewhere = |buffer: &StateBuffer| !buffer.is_empty() && !buffer.is_at(location);
        is_elsewhere(&self.residual)
            || is_elsewhere(&self.velocity)
            || (!self.sizes.is_empty() && !self.sizes.is_at(location))
    }

    pub fn as_host_mut(&mut self) -> Option<HostBuffers<'_>> {
        let residual = self.residual.as_host_mut()?;
        Some(HostBuffers {
            residual,
            velocity: self.velocity.as_host_mut()?,
            sizes: self.sizes.as_host_mut()?,
        })
    }

    /// Makes the buffers fit for an exchange. State of another size belongs to another bucket and is
    /// dropped.
    pub fn make_room(&mut self, needed: &Needed) -> cuda::Result<()> {
        let Needed { elements, residual, sizes, momentum, location, limit } = *needed;
        if sizes {
            self.sizes.resize_for(elements, location, limit)?;
        } else if !self.sizes.is_empty() {
            // They may be needed later.
            self.sizes.resize_for(self.sizes.len(), location, limit)?;
        }
        if residual {
            self.residual.resize_for(elements, location, limit)?;
        }
        match momentum {
            Some(_) => self.velocity.resize_for(elements, location, limit)?,
            None => self.velocity = StateBuffer::default(),
        }
        Ok(())
    }

    /// An exchange changes its state from now on. Remembers the state before, unless it still remembers
    /// the state before an earlier exchange that may have to be undone too.
    pub fn begin_change(&mut self, remembered: Remembered) -> cuda::Result<()> {
        let is_due = match remembered {
            Remembered::None => false,
            Remembered::LastExchange => true,
            Remembered::LastCommit => !self.backup.is_valid,
        };
        if is_due {
            self.backup.residual.copy_from(&self.residual)?;
            self.backup.velocity.copy_from(&self.velocity)?;
            self.backup.sizes.copy_from(&self.sizes)?;
            self.backup.completed = self.completed;
            self.backup.is_valid = true;
        }
        self.is_changing = true;
        Ok(())
    }

    /// The exchange is complete, and with it `step` exchanges.
    pub fn end_change(&mut self, step: u64) {
        self.completed = step;
        self.is_changing = false;
    }

    /// Goes back to the state before the exchanges since [`Bucket::commit`].
    pub fn undo(&mut self) {
        self.may_owe = self.might_owe;
        if std::mem::take(&mut self.backup.is_valid) {
            std::mem::swap(&mut self.residual, &mut self.backup.residual);
            std::mem::swap(&mut self.velocity, &mut self.backup.velocity);
            std::mem::swap(&mut self.sizes, &mut self.backup.sizes);
        }
    }

    /// The exchanges so far can no longer be undone.
    pub fn commit(&mut self) {
        self.might_owe = self.may_owe;
        self.backup.is_valid = false;
    }

    /// Frees the memory that [`Bucket::begin_change`] needs.
    pub fn drop_backup(&mut self) {
        self.backup = Backup::default();
        self.might_owe = self.may_owe;
    }

    /// Multiplies its state: the unit of the gradients has changed by this factor. A scale that grows
    /// without bound must not make anything infinite.
    pub fn rescale(&mut self, factor: f32) -> cuda::Result<()> {
        self.sizes.rescale(factor)?;
        self.residual.rescale(factor)?;
        self.velocity.rescale(factor)
    }
}

impl From<BucketState> for Bucket {
    fn from(BucketState { step, residual, velocity, sizes }: BucketState) -> Bucket {
        let (residual, velocity) = (StateBuffer::Host(residual), StateBuffer::Host(velocity));
        let sizes = sizes.into_iter().map(|size| BF16::narrow(size).0).collect();
        let sizes = SizesBuffer::Host(Arc::new(sizes));
        Bucket { step, completed: step, residual, velocity, sizes, ..Bucket::default() }
    }
}

fn copy_state(
    step: u64,
    residual: &StateBuffer,
    velocity: &StateBuffer,
    sizes: &SizesBuffer,
    limit: Duration,
) -> cuda::Result<BucketState> {
    let (residual, velocity) = (residual.to_host(limit)?, velocity.to_host(limit)?);
    let sizes = sizes.to_host(limit)?.into_iter().map(|size| BF16(size).widen()).collect();
    Ok(BucketState { step, residual, velocity, sizes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Coding, Wire};

    const MOMENTUM: Option<Momentum> = Some(Momentum { factor: 0.9, nesterov: false });

    const LIMIT: Duration = Duration::from_secs(1);

    fn bucket(value: f32) -> Bucket {
        let (residual, velocity) = (vec![value; 3], vec![-value; 3]);
        Bucket::from(BucketState { step: 0, residual, velocity, sizes: Vec::new() })
    }

    fn fill(bucket: &mut Bucket, value: f32) {
        bucket.residual.as_host_mut().unwrap().fill(value);
        bucket.velocity.as_host_mut().unwrap().fill(value);
    }

    #[test]
    fn all_exchanges_since_the_last_step_can_be_undone() {
        let mut bucket = bucket(1.0);
        for value in [7.0, 8.0] {
            bucket.begin_change(Remembered::LastCommit).unwrap();
            fill(&mut bucket, value);
        }
        bucket.undo();
        let state = bucket.state(LIMIT).unwrap();
        assert_eq!((&state.residual[..], &state.velocity[..]), (&[1.0; 3][..], &[-1.0; 3][..]));
        bucket.undo();
        assert_eq!(bucket.residual.as_host_mut().unwrap(), [1.0; 3]);
    }

    #[test]
    fn what_was_used_is_not_undone() {
        let mut bucket = bucket(1.0);
        bucket.begin_change(Remembered::LastCommit).unwrap();
        fill(&mut bucket, 7.0);
        bucket.commit();
        bucket.undo();
        assert_eq!(bucket.residual.as_host_mut().unwrap(), [7.0; 3]);
    }

    #[test]
    fn what_is_kept_is_owed_until_an_exact_exchange_has_brought_it() {
        let compressed = Treatment::Compressed(Coding::Chunks { density: 0.1, wire: Wire::F16 });
        let exact = Treatment::Exact(WhyExact::Method);
        let mut bucket = bucket(1.0);
        assert!(!bucket.may_owe());
        for treatment in [compressed, Treatment::Exact(WhyExact::WarmUp)] {
            bucket.note_treatment(1, treatment, false);
            assert!(bucket.may_owe());
        }
        bucket.commit();
        bucket.note_treatment(1, exact, false);
        assert!(!bucket.may_owe());
        // The step was skipped, so it has brought nothing.
        bucket.undo();
        assert!(bucket.may_owe());
        bucket.note_treatment(1, exact, false);
        bucket.commit();
        bucket.undo();
        assert!(!bucket.may_owe());
        // What an exact exchange brought may have been taken back.
        bucket.note_treatment(1, compressed, true);
        bucket.note_treatment(1, exact, true);
        assert!(bucket.may_owe());
    }

    /// The step and the first value of the state after at most `step` exchanges.
    fn until(bucket: &Bucket, step: u64, remembered: Remembered) -> (u64, f32) {
        let state = bucket.state_until(step, remembered, LIMIT).unwrap();
        (state.step, state.residual[0])
    }

    /// Exchanges a bucket, which leaves `value`; without the last stage if it is torn.
    fn exchange(bucket: &mut Bucket, value: f32, remembered: Remembered, is_torn: bool) {
        bucket.step += 1;
        bucket.begin_change(remembered).unwrap();
        fill(bucket, value);
        if !is_torn {
            bucket.end_change(bucket.step);
        }
    }

    #[test]
    fn the_state_before_an_exchange_is_there_during_and_after_it() {
        let remembered = Remembered::LastExchange;
        let mut bucket = bucket(1.0);
        exchange(&mut bucket, 2.0, remembered, false);
        assert_eq!(until(&bucket, u64::MAX, remembered), (1, 2.0));
        assert_eq!(until(&bucket, 0, remembered), (0, 1.0));
        exchange(&mut bucket, 3.0, remembered, true);
        assert_eq!(until(&bucket, u64::MAX, remembered), (1, 2.0));
    }

    #[test]
    fn a_bucket_that_waits_for_its_exchange_has_the_state_of_the_last() {
        let mut bucket = bucket(1.0);
        exchange(&mut bucket, 2.0, Remembered::LastExchange, false);
        bucket.step += 1;
        assert_eq!(until(&bucket, u64::MAX, Remembered::LastExchange), (1, 2.0));
    }

    #[test]
    fn exchanges_since_the_last_commit_are_no_complete_step() {
        let remembered = Remembered::LastCommit;
        let mut bucket = bucket(1.0);
        for value in [2.0, 3.0] {
            exchange(&mut bucket, value, remembered, false);
            assert_eq!(until(&bucket, u64::MAX, remembered), (0, 1.0));
        }
        bucket.commit();
        assert_eq!(until(&bucket, u64::MAX, remembered), (2, 3.0));
    }

    #[test]
    fn what_is_not_remembered_is_given_as_it_is() {
        let mut bucket = bucket(1.0);
        exchange(&mut bucket, 2.0, Remembered::None, true);
        assert_eq!(until(&bucket, 0, Remembered::None), (1, 2.0));
        assert!(bucket.is_beyond(u64::MAX, Remembered::None));
    }

    #[test]
    fn room_is_made_once_and_only_for_what_is_wanted() {
        let mut bucket = Bucket::default();
        let make_room = |bucket: &mut Bucket, residual, momentum| {
            let (location, limit) = (&Location::Host, LIMIT);
            let needed = Needed { elements: 3, residual, sizes: false, momentum, location, limit };
            bucket.make_room(&needed).unwrap();
        };
        make_room(&mut bucket, false, None);
        assert!(bucket.residual.is_empty() && bucket.velocity.is_empty());
        make_room(&mut bucket, true, MOMENTUM);
        bucket.residual.as_host_mut().unwrap()[1] = 5.0;
        bucket.velocity.as_host_mut().unwrap()[1] = 6.0;
        make_room(&mut bucket, true, MOMENTUM);
        assert_eq!(
            (bucket.residual.as_host_mut().unwrap()[1], bucket.velocity.as_host_mut().unwrap()[1]),
            (5.0, 6.0)
        );
        make_room(&mut bucket, true, None);
        assert!(bucket.velocity.is_empty());
    }

    #[test]
    fn a_new_unit_of_the_gradients_never_makes_infinity() {
        let mut bucket = bucket(1e30);
        bucket.rescale(2.0).unwrap();
        assert_eq!(bucket.residual.as_host_mut().unwrap(), [2e30; 3]);
        bucket.rescale(1e30).unwrap();
        let BucketState { residual, velocity, .. } = bucket.state(LIMIT).unwrap();
        assert!(residual.iter().chain(&velocity).all(|value| value.is_finite()));
    }
}
