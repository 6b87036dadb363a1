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
    /// How it was before its last exchange, if that may have to be undone.
    kept: Option<Kept>,
}

#[derive(Debug)]
struct Kept {
    /// The backward pass whose exchange followed.
    pass: u64,
    residual: Vec<f32>,
    velocity: Vec<f32>,
}

impl Bucket {
    /// A bucket as it was when its state was saved.
    pub fn new(step: u64, residual: Vec<f32>, velocity: Vec<f32>) -> Bucket {
        Bucket { step, residual, velocity, kept: None }
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

    /// Remembers how it is now, before an exchange of `pass`. What an earlier exchange of a pass
    /// that `is_to_be_undone` has left is older and stays.
    pub fn keep(&mut self, pass: u64, is_to_be_undone: impl Fn(u64) -> bool) {
        if self.kept.as_ref().is_some_and(|kept| is_to_be_undone(kept.pass)) {
            return;
        }
        let mut kept =
            self.kept.take().unwrap_or(Kept { pass, residual: Vec::new(), velocity: Vec::new() });
        kept.pass = pass;
        kept.residual.clone_from(&self.residual);
        kept.velocity.clone_from(&self.velocity);
        self.kept = Some(kept);
    }

    /// Puts back what it was before the exchange of a pass that `is_to_be_undone`.
    pub fn undo(&mut self, is_to_be_undone: impl Fn(u64) -> bool) {
        if let Some(kept) = self.kept.take_if(|kept| is_to_be_undone(kept.pass)) {
            self.residual = kept.residual;
            self.velocity = kept.velocity;
        }
    }

    /// Gives back what [`Bucket::keep`] needs.
    pub fn keep_no_longer(&mut self) {
        self.kept = None;
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
    fn an_exchange_can_be_undone_and_another_pass_cannot() {
        let mut bucket = bucket(1.0);
        bucket.keep(7, |_| false);
        bucket.residual.fill(9.0);
        bucket.velocity.fill(9.0);
        bucket.undo(|pass| pass == 6);
        assert_eq!(bucket.residual, [9.0; 3]);
        bucket.undo(|pass| pass == 7);
        assert_eq!((bucket.residual, bucket.velocity), (vec![1.0; 3], vec![-1.0; 3]));
    }

    #[test]
    fn what_is_to_be_undone_is_not_forgotten_for_a_later_pass() {
        let mut bucket = bucket(1.0);
        bucket.keep(7, |_| false);
        bucket.residual.fill(9.0);
        bucket.keep(8, |pass| pass == 7);
        bucket.undo(|pass| pass == 7);
        assert_eq!(bucket.residual, [1.0; 3]);
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
