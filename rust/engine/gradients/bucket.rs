//! What a rank keeps of one gradient bucket from step to step: the part that was not sent yet, and
//! the velocity if the engine has taken over the momentum. Both are of this rank's shard only, and
//! hold finite numbers only.

use crate::compress::Momentum;
use crate::huge_pages;

#[derive(Debug, Default)]
pub struct Bucket {
    /// How often it was exchanged.
    pub step: u64,
    /// What was not sent yet; empty until the first step that does not send all.
    pub residual: Vec<f32>,
    /// Empty until there is momentum.
    pub velocity: Vec<f32>,
    kept: Kept,
}

/// How a bucket was before the exchanges that may have to be undone.
#[derive(Debug, Default)]
struct Kept {
    /// Whether there is anything to undo; else this is only memory to use again.
    is_valid: bool,
    residual: Vec<f32>,
    velocity: Vec<f32>,
}

impl Bucket {
    /// A bucket as it was when its state was saved.
    pub fn new(step: u64, residual: Vec<f32>, velocity: Vec<f32>) -> Bucket {
        Bucket { step, residual, velocity, kept: Kept::default() }
    }

    /// Makes room for a shard of so many elements. What was kept of another size cannot belong to
    /// it and is dropped.
    pub fn make_room(&mut self, elements: usize, residual: bool, momentum: Option<Momentum>) {
        let fit = |kept: &mut Vec<f32>, wanted: bool| {
            if wanted && kept.len() != elements {
                *kept = huge_pages::zeros(elements);
            }
        };
        fit(&mut self.residual, residual);
        fit(&mut self.velocity, momentum.is_some());
        if momentum.is_none() {
            self.velocity = Vec::new();
        }
    }

    /// Remembers how it is now, before an exchange; unless it remembers how it was before another
    /// one that may have to be undone as well.
    pub fn keep(&mut self) {
        if !self.kept.is_valid {
            self.kept.is_valid = true;
            self.kept.residual.clone_from(&self.residual);
            self.kept.velocity.clone_from(&self.velocity);
        }
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

    /// Multiplies what is kept: the unit of the gradients has changed by this factor.
    pub fn rescale(&mut self, factor: f32) {
        for value in self.residual.iter_mut().chain(&mut self.velocity) {
            let scaled = *value * factor;
            // A scale that grows without bound must not bring infinity in here.
            *value = scaled.clamp(f32::MIN, f32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENTUM: Option<Momentum> = Some(Momentum { factor: 0.9, nesterov: false });

    fn bucket(value: f32) -> Bucket {
        Bucket { residual: vec![value; 3], velocity: vec![-value; 3], ..Bucket::default() }
    }

    #[test]
    fn all_exchanges_since_the_last_step_can_be_undone() {
        let mut bucket = bucket(1.0);
        for value in [7.0, 8.0] {
            bucket.keep();
            bucket.residual.fill(value);
            bucket.velocity.fill(value);
        }
        bucket.undo();
        assert_eq!((&bucket.residual[..], &bucket.velocity[..]), (&[1.0; 3][..], &[-1.0; 3][..]));
        bucket.undo();
        assert_eq!(bucket.residual, [1.0; 3]);
    }

    #[test]
    fn what_was_used_is_not_undone() {
        let mut bucket = bucket(1.0);
        bucket.keep();
        bucket.residual.fill(7.0);
        bucket.forget_kept();
        bucket.undo();
        assert_eq!(bucket.residual, [7.0; 3]);
    }

    #[test]
    fn room_is_made_once_and_only_for_what_is_wanted() {
        let mut bucket = Bucket::default();
        bucket.make_room(3, false, None);
        assert!(bucket.residual.is_empty() && bucket.velocity.is_empty());
        bucket.make_room(3, true, MOMENTUM);
        bucket.residual[1] = 5.0;
        bucket.velocity[1] = 6.0;
        bucket.make_room(3, true, MOMENTUM);
        assert_eq!((bucket.residual[1], bucket.velocity[1]), (5.0, 6.0));
        bucket.make_room(3, true, None);
        assert!(bucket.velocity.is_empty());
    }

    #[test]
    fn a_new_unit_of_the_gradients_never_makes_infinity() {
        let mut bucket = bucket(1e30);
        bucket.rescale(2.0);
        assert_eq!(bucket.residual, [2e30; 3]);
        bucket.rescale(1e30);
        assert!(bucket.residual.iter().chain(&bucket.velocity).all(|value| value.is_finite()));
    }
}
