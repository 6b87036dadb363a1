//! Predicts how long a step takes with another method, and chooses one. Pure: the same numbers give
//! the same choice on every rank.

use super::ladder::{LADDER, bits_on_wire};

/// A method has to save this much of a step to be worth its noise.
const LEAST_GAIN: f64 = 0.02;
/// A noisier method than now has to save this much, so that the choice does not go back and forth.
const LEAST_GAIN_OF_CHANGE: f64 = 0.05;
/// Packing and sending run side by side; this much of the shorter one still adds to the longer.
const NOT_OVERLAPPED: f64 = 0.25;

/// A bucket, as all ranks together have measured it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BucketMeasure {
    /// When the last rank had called it, since the first bucket of the pass.
    pub ready: f64,
    /// Elements that a carrier exchanges with other hosts.
    pub elements: f64,
    pub bits_per_element: f64,
    /// The time for sums within the host, and for handing them out.
    pub within_host: f64,
}

/// A step, as all ranks together have measured it: of each number the worst. All times in seconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measure {
    /// From step to step.
    pub step: f64,
    /// The same without waiting for gradients.
    pub compute: f64,
    /// From the first bucket to the end of the backward pass.
    pub backward: f64,
    /// Of a byte that a carrier sends.
    pub per_byte: f64,
    /// By method: processor time for an element.
    pub per_element: [f64; LADDER.len()],
    /// The fraction of that which the training job loses, because all cores are busy.
    pub contention: f64,
    pub buckets: Vec<BucketMeasure>,
    pub hosts: f64,
}

impl Measure {
    /// The time of a step with this method.
    pub fn predict(&self, method: usize) -> f64 {
        self.compute + self.contention * self.processor(method) + self.exposed(method)
    }

    /// The same for a job that does not work for this method, which it did while it was measured.
    pub fn without_the_work_of(&self, method: usize) -> Measure {
        let work = self.contention * self.processor(method);
        Measure { compute: (self.compute - work).max(0.0), ..self.clone() }
    }

    /// The processor time of a step with this method.
    fn processor(&self, method: usize) -> f64 {
        let elements: f64 = self.buckets.iter().map(|bucket| bucket.elements).sum();
        elements * self.per_element[method]
    }

    /// The time that a step waits for gradients after its backward pass.
    pub fn exposed(&self, method: usize) -> f64 {
        let mut clock = 0.0f64;
        // A ring and two legs move as many bytes.
        let journeys = 2.0 * (self.hosts - 1.0) / self.hosts;
        for bucket in &self.buckets {
            let bits = bits_on_wire(LADDER[method], bucket.bits_per_element);
            let wire = journeys * bucket.elements * bits / 8.0 * self.per_byte;
            let work = bucket.elements * self.per_element[method];
            let exchange = wire.max(work) + NOT_OVERLAPPED * wire.min(work);
            clock = clock.max(bucket.ready) + bucket.within_host + exchange;
        }
        (clock - self.backward).max(0.0)
    }

    /// The time to make as much progress as in an exact step.
    pub fn cost(&self, method: usize, noise: &[f64; LADDER.len()]) -> f64 {
        self.predict(method) * (1.0 + noise[method])
    }

    /// The method with the least cost among those that are `allowed`, or one with less noise that costs
    /// about as much; `now` if the difference is small.
    pub fn choose(
        &self,
        now: usize,
        noise: &[f64; LADDER.len()],
        allowed: impl Fn(usize) -> bool,
    ) -> usize {
        let candidates: Vec<usize> = (0..LADDER.len()).filter(|method| allowed(*method)).collect();
        let costs: Vec<_> = candidates.iter().map(|method| self.cost(*method, noise)).collect();
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let is_good = |cost: f64| cost <= least * (1.0 + LEAST_GAIN);
        let best = candidates.iter().zip(&costs).find(|(_, cost)| is_good(**cost));
        let Some((&best, &cost)) = best else { return 0 };
        let needed = if best > now { 1.0 - LEAST_GAIN_OF_CHANGE } else { 1.0 };
        match cost < self.cost(now, noise) * needed || !allowed(now) || best < now {
            true => best,
            false => now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradients::auto::ladder::EXPECTED_NOISE;

    /// Two hosts, three buckets of 5 million elements, 0.3 s of backward pass.
    fn measure(gbit: f64) -> Measure {
        let bucket = |ready| BucketMeasure {
            ready,
            elements: 5e6,
            bits_per_element: 32.0,
            within_host: 0.0,
        };
        Measure {
            step: 0.5,
            compute: 0.5,
            backward: 0.3,
            per_byte: 8e-9 / gbit,
            per_element: [0.0, 0.5e-9, 2e-9, 2e-9, 2.5e-9, 2.5e-9, 2.5e-9],
            contention: 0.0,
            buckets: vec![bucket(0.0), bucket(0.15), bucket(0.29)],
            hosts: 2.0,
        }
    }

    fn choose(gbit: f64, now: usize) -> usize {
        measure(gbit).choose(now, &EXPECTED_NOISE, |method| method <= 5)
    }

    #[test]
    fn the_slower_the_link_the_fewer_bits_are_chosen() {
        let chosen: Vec<_> = [1000.0, 20.0, 5.0, 1.0, 0.1].map(|gbit| choose(gbit, 0)).into();
        assert_eq!(chosen[0], 0, "a hidden exchange stays exact");
        assert!(chosen.windows(2).all(|pair| pair[0] <= pair[1]), "{chosen:?}");
        assert!(chosen[4] >= 4, "{chosen:?}");
    }

    #[test]
    fn a_method_that_is_not_allowed_is_never_chosen() {
        for gbit in [0.01, 0.1, 1.0, 10.0] {
            let chosen = measure(gbit).choose(0, &EXPECTED_NOISE, |method| method <= 1);
            assert!(chosen <= 1);
            assert_eq!(measure(gbit).choose(4, &EXPECTED_NOISE, |_| false), 0);
        }
    }

    #[test]
    fn noise_is_paid_for_with_steps() {
        // At 50 Mbit/s three levels are the fastest step, and would be chosen if they added nothing.
        let measure = measure(0.05);
        let any = |_| true;
        assert_eq!(measure.choose(0, &[0.0; LADDER.len()], any), 6);
        let mut noise = EXPECTED_NOISE;
        noise[6] = 3.0;
        assert!(measure.choose(0, &noise, any) < 6);
    }

    #[test]
    fn what_saves_nothing_is_given_up_and_a_small_gain_changes_nothing() {
        assert_eq!(choose(1000.0, 4), 0);
        let measure = measure(1.0);
        let (noise, best) = (EXPECTED_NOISE, choose(1.0, 0));
        for now in 1..best {
            let gain = measure.cost(now, &noise) / measure.cost(best, &noise);
            let expected = if gain * (1.0 - LEAST_GAIN_OF_CHANGE) > 1.0 { best } else { now };
            assert_eq!(measure.choose(now, &noise, |method| method <= 5), expected);
        }
    }

    #[test]
    fn busy_cores_make_work_count_even_where_it_is_hidden() {
        let busy = Measure { contention: 1.0, ..measure(1000.0) };
        assert!(busy.predict(4) > measure(1000.0).predict(4) + 0.03);
    }
}
