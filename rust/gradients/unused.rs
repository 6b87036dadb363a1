//! Takes back what was delivered for parameters that no rank used in a step.
//!
//! With `find_unused_parameters`, DDP throws that away. Which parameters they are, it tells only after
//! the buckets were exchanged: it adds up how many ranks used each, in one more all-reduce. When that
//! is done, the delivered values still lie in the buckets. They go back into what is kept, so that it
//! is as if the exchange had left these parameters out.

use crate::codec::{Coding, Gradient, Momentum, fill};
use crate::collective::span::Span;
use crate::simd::element::Element;
use std::ops::Range;

/// Where the parameters of a model are in its buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLayout {
    /// How many parameters the model has.
    pub parameters: usize,
    pub parts: Vec<Part>,
}

/// A parameter in a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub bucket: u32,
    /// The index of the parameter in its model.
    pub parameter: usize,
    /// Its elements in the bucket.
    pub elements: Range<usize>,
}

impl ModelLayout {
    pub fn has_bucket(&self, number: u32) -> bool {
        self.parts.iter().any(|part| part.bucket == number)
    }

    /// The parts of those parameters that no rank used; `used` counts, by parameter, the ranks that did.
    /// Counts of another model give nothing.
    pub fn unused(&self, used: &[i32]) -> impl Iterator<Item = &Part> {
        let fits = used.len() == self.parameters;
        self.parts.iter().filter(move |part| fits && used.get(part.parameter) == Some(&0))
    }
}

/// What the last exchange of a bucket delivered.
#[derive(Debug, Clone)]
pub struct Delivered {
    /// The memory of the bucket, which lives at least as long as the backward pass of this exchange.
    pub span: Span,
    pub element: Element,
    /// The elements of this rank's shard.
    pub shard: Range<usize>,
    pub coding: Coding,
    pub momentum: Option<Momentum>,
}

/// What is kept of a shard.
pub struct Kept<'a> {
    pub residual: &'a mut [f32],
    /// Empty without momentum.
    pub velocity: &'a mut [f32],
}

impl Delivered {
    /// Takes back some elements of the bucket into what is kept of this rank's shard, and leaves zeros
    /// there. What was delivered is the sum of all hosts, so only one of them keeps it.
    ///
    /// # Safety
    /// The bucket's memory is alive, and nobody else uses these elements.
    pub unsafe fn take_back(&self, kept: Kept, elements: &Range<usize>, keeps_sum: bool) {
        let mut span = self.span;
        // SAFETY: as the caller guarantees.
        let Some(mut all) = Gradient::from_bytes(unsafe { span.as_mut_slice() }, self.element)
        else {
            return;
        };
        if elements.end > all.len() {
            return;
        }
        let own = elements.start.max(self.shard.start)..elements.end.min(self.shard.end);
        if !own.is_empty() {
            let came = all.part(own.clone()).widened();
            let start = self.shard.start;
            self.restore(kept, own.start - start..own.end - start, &came, keeps_sum);
        }
        fill(&mut all.part(elements.clone()), 0.0);
    }

    /// Restores what is kept of some elements of the shard, from what came for them.
    fn restore(&self, kept: Kept, own: Range<usize>, came: &[f32], keeps_sum: bool) {
        // The exchange has left only this part of what was kept before.
        let feedback = self.coding.feedback();
        let Some(residual) = kept.residual.get_mut(own.clone()) else { return };
        let velocity = kept.velocity.get_mut(own).unwrap_or_default();
        for (index, (residual, came)) in residual.iter_mut().zip(came).enumerate() {
            // Where infinity or NaN came, nothing was taken from what is kept.
            if !came.is_finite() {
                continue;
            }
            let mut added = 0.0;
            if let (Some(velocity), Some(momentum)) = (velocity.get_mut(index), self.momentum) {
                // An optimizer does not touch the momentum of a parameter without a gradient either.
                added = if momentum.nesterov { momentum.factor * *velocity } else { *velocity };
                *velocity = (*velocity / momentum.factor).clamp(f32::MIN, f32::MAX);
            }
            let sum = if keeps_sum { *came } else { 0.0 };
            *residual = ((*residual - added + sum) / feedback).clamp(f32::MIN, f32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Wire;
    use crate::codec::quantizer::{Levels, Quantizer, Stepping};

    const CHUNKS: Coding = Coding::Chunks { density: 0.5, wire: Wire::F32 };

    /// The residual and velocity after `elements` of a bucket of five were taken back, of which this
    /// rank carries the second to fourth; and what is left in the bucket.
    fn taken_back(
        coding: Coding,
        momentum: Option<Momentum>,
        elements: Range<usize>,
        keeps_sum: bool,
    ) -> (Vec<f32>, Vec<f32>, [f32; 5]) {
        let mut values = [1.0, 2.0, f32::INFINITY, 4.0, 5.0];
        let (mut residual, mut velocity) = (vec![10.0, 20.0, 30.0], vec![3.0; 3]);
        let kept = Kept { residual: &mut residual, velocity: &mut velocity };
        let span = Span::of(crate::simd::blocks::bytes_of_mut(&mut values));
        let (element, shard) = (Element::F32, 1..4);
        let delivered = Delivered { span, element, shard, coding, momentum };
        // SAFETY: nobody else knows the values.
        unsafe { delivered.take_back(kept, &elements, keeps_sum) };
        (residual, velocity, values)
    }

    #[test]
    fn one_host_keeps_the_finite_sum_of_its_shard() {
        let (residual, velocity, left) = taken_back(CHUNKS, None, 0..4, true);
        assert_eq!(residual, [12.0, 20.0, 34.0]);
        assert_eq!((velocity, left), (vec![3.0; 3], [0.0, 0.0, 0.0, 0.0, 5.0]));
        let (residual, _, left) = taken_back(CHUNKS, None, 3..5, false);
        assert_eq!((residual, left[3..].to_vec()), (vec![10.0, 20.0, 30.0], vec![0.0; 2]));
    }

    #[test]
    fn the_momentum_of_the_step_is_taken_back_too() {
        let momentum = Some(Momentum { factor: 0.5, nesterov: false });
        let (residual, velocity, _) = taken_back(CHUNKS, momentum, 1..3, false);
        assert_eq!((residual, velocity), (vec![7.0, 20.0, 30.0], vec![6.0, 3.0, 3.0]));
    }

    #[test]
    fn a_part_that_was_fed_back_becomes_the_whole_again() {
        let quantizer = Quantizer::new(Levels::Int3, Stepping::Normalized);
        let (residual, _, _) = taken_back(Coding::Quantized(quantizer), None, 0..5, true);
        // What was delivered, and what is kept of it: 2 + 10 and 4 + 30.
        let whole = |due: f32| due / quantizer.feedback;
        assert_eq!(residual, [whole(12.0), 20.0, whole(34.0)]);
    }

    #[test]
    fn counts_of_another_model_name_nothing() {
        let part = |parameter, elements| Part { bucket: 7, parameter, elements };
        let layout = ModelLayout { parameters: 2, parts: vec![part(1, 0..3), part(0, 3..5)] };
        assert!(layout.has_bucket(7) && !layout.has_bucket(8));
        let unused: Vec<_> = layout.unused(&[0, 2]).collect();
        assert_eq!(unused, [&part(0, 3..5)]);
        assert_eq!(layout.unused(&[0, 0, 0]).count(), 0);
    }
}
