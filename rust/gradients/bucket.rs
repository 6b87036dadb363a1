//! What a rank keeps of one gradient bucket from step to step: the part that was not sent yet, and
//! the velocity if the engine has taken over the momentum. Both are of this rank's shard only, and
//! hold finite numbers only.

use super::numbers::{Home, Numbers};
use crate::codec::Momentum;
use crate::cuda;
use std::time::Duration;

#[derive(Debug, Default)]
pub struct Bucket {
    /// How often it was exchanged.
    pub step: u64,
    /// What was not sent yet; empty until the first step that does not send all.
    pub residual: Numbers,
    /// Empty until there is momentum.
    pub velocity: Numbers,
    kept: Kept,
}

/// A bucket as it can be saved and put back.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct State {
    pub step: u64,
    pub residual: Vec<f32>,
    pub velocity: Vec<f32>,
}

/// How a bucket was before the exchanges that may have to be undone.
#[derive(Debug, Default)]
struct Kept {
    /// Whether there is anything to undo; else this is only memory to use again.
    is_valid: bool,
    residual: Numbers,
    velocity: Numbers,
}

impl Bucket {
    /// What it keeps, in the memory of the host. If that is on a device, it waits for it.
    pub fn state(&self, limit: Duration) -> cuda::Result<State> {
        let (residual, velocity) = (self.residual.to_host(limit)?, self.velocity.to_host(limit)?);
        Ok(State { step: self.step, residual, velocity })
    }

    /// Whether what it keeps has to be brought home before it can be used.
    pub fn is_elsewhere(&self, home: &Home) -> bool {
        [&self.residual, &self.velocity]
            .iter()
            .any(|numbers| !numbers.is_empty() && !numbers.are_at(home))
    }

    /// Makes room for a shard of so many elements, at home. What was kept of another size cannot belong
    /// to it and is dropped.
    pub fn make_room(
        &mut self,
        elements: usize,
        residual: bool,
        momentum: Option<Momentum>,
        home: &Home,
        limit: Duration,
    ) -> cuda::Result<()> {
        if residual {
            self.residual.settle(elements, home, limit)?;
        }
        match momentum {
            Some(_) => self.velocity.settle(elements, home, limit)?,
            None => self.velocity = Numbers::default(),
        }
        Ok(())
    }

    /// Remembers how it is now, before an exchange; unless it remembers how it was before another
    /// one that may have to be undone as well.
    pub fn keep(&mut self) -> cuda::Result<()> {
        if !self.kept.is_valid {
            self.kept.residual.copy_from(&self.residual)?;
            self.kept.velocity.copy_from(&self.velocity)?;
            self.kept.is_valid = true;
        }
        Ok(())
    }

    /// Puts back what it was before the exchanges since [`Bucket::forget_kept`].
    pub fn undo(&mut self) {
        if std::mem::take(&mut self.kept.is_valid) {
            std::mem::swap(&mut self.residual, &mut self.kept.residual);
            std::mem::swap(&mut self.velocity, &mut self.kept.velocity);
        }
    }

    /// What was exchanged so far will not be undone any more.
    pub fn forget_kept(&mut self) {
        self.kept.is_valid = false;
    }

    /// Gives back the memory that [`Bucket::keep`] needs.
    pub fn keep_no_longer(&mut self) {
        self.kept = Kept::default();
    }

    /// Multiplies what is kept: the unit of the gradients has changed by this factor. A scale that grows
    /// without bound must not bring infinity in here.
    pub fn rescale(&mut self, factor: f32) -> cuda::Result<()> {
        self.residual.rescale(factor)?;
        self.velocity.rescale(factor)
    }
}

impl From<State> for Bucket {
    fn from(State { step, residual, velocity }: State) -> Bucket {
        let (residual, velocity) = (Numbers::Host(residual), Numbers::Host(velocity));
        Bucket { step, residual, velocity, kept: Kept::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENTUM: Option<Momentum> = Some(Momentum { factor: 0.9, nesterov: false });

    const LIMIT: Duration = Duration::from_secs(1);

    fn bucket(value: f32) -> Bucket {
        Bucket::from(State { step: 0, residual: vec![value; 3], velocity: vec![-value; 3] })
    }

    fn fill(bucket: &mut Bucket, value: f32) {
        bucket.residual.on_host().fill(value);
        bucket.velocity.on_host().fill(value);
    }

    #[test]
    fn all_exchanges_since_the_last_step_can_be_undone() {
        let mut bucket = bucket(1.0);
        for value in [7.0, 8.0] {
            bucket.keep().unwrap();
            fill(&mut bucket, value);
        }
        bucket.undo();
        let state = bucket.state(LIMIT).unwrap();
        assert_eq!((&state.residual[..], &state.velocity[..]), (&[1.0; 3][..], &[-1.0; 3][..]));
        bucket.undo();
        assert_eq!(bucket.residual.on_host(), [1.0; 3]);
    }

    #[test]
    fn what_was_used_is_not_undone() {
        let mut bucket = bucket(1.0);
        bucket.keep().unwrap();
        fill(&mut bucket, 7.0);
        bucket.forget_kept();
        bucket.undo();
        assert_eq!(bucket.residual.on_host(), [7.0; 3]);
    }

    #[test]
    fn room_is_made_once_and_only_for_what_is_wanted() {
        let mut bucket = Bucket::default();
        let make_room = |bucket: &mut Bucket, residual, momentum| {
            bucket.make_room(3, residual, momentum, &Home::Host, LIMIT).unwrap();
        };
        make_room(&mut bucket, false, None);
        assert!(bucket.residual.is_empty() && bucket.velocity.is_empty());
        make_room(&mut bucket, true, MOMENTUM);
        bucket.residual.on_host()[1] = 5.0;
        bucket.velocity.on_host()[1] = 6.0;
        make_room(&mut bucket, true, MOMENTUM);
        assert_eq!((bucket.residual.on_host()[1], bucket.velocity.on_host()[1]), (5.0, 6.0));
        make_room(&mut bucket, true, None);
        assert!(bucket.velocity.is_empty());
    }

    #[test]
    fn a_new_unit_of_the_gradients_never_makes_infinity() {
        let mut bucket = bucket(1e30);
        bucket.rescale(2.0).unwrap();
        assert_eq!(bucket.residual.on_host(), [2e30; 3]);
        bucket.rescale(1e30).unwrap();
        let State { residual, velocity, .. } = bucket.state(LIMIT).unwrap();
        assert!(residual.iter().chain(&velocity).all(|value| value.is_finite()));
    }
}
