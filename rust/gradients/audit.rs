//! The audit: now and then, a part of one bucket is also summed exactly beside the real exchange, and what
//! was delivered is compared with it. It tells the user, and the choice of a method, what compression costs
//! on this very training.
//!
//! An audit runs over a few successive steps of one bucket. For a single step it says how large the error
//! is; for all of them together, how much of it the feedback of residuals has made up for. Every carrier
//! audits its own shard. All ranks know from the step alone whether a bucket is audited.

use super::norms::sum_over_hosts;
use crate::codec::Coding;
use crate::collective::agreement::AgreedBucket;
use crate::collective::fabric::Fabric;
use crate::observe::gradient_counters::Certificate;
use crate::transport::Failure;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Instant;

/// Successive steps of an audit.
const STEPS: u64 = 8;
/// The most elements of a shard that are audited: few enough to cost nothing that could be measured.
const MOST_ELEMENTS: usize = 1 << 16;

/// Audits the buckets of a group in turn.
#[derive(Debug, Default)]
pub struct Audits {
    /// Steps from one audit to the next; 0 for none.
    every: u64,
    /// All buckets that were ever compressed. It is the same on all ranks, so none is ever removed.
    known: BTreeSet<u32>,
    under_way: Option<Audit>,
}

/// An audit of one bucket.
#[derive(Debug)]
struct Audit {
    bucket: u32,
    /// What it is sent as; an audit of several would tell of none.
    coding: Coding,
    first_step: u64,
    elements: Range<usize>,
    /// The exact sum of the step that is being exchanged.
    exact: Vec<f32>,
    /// Sums over the steps.
    all_exact: Vec<f64>,
    all_delivered: Vec<f64>,
    steps: u64,
    squares: Squares,
}

/// Sums of squares and products, of what was delivered and what is exact.
#[derive(Debug, Clone, Copy, Default)]
struct Squares {
    exact: f64,
    delivered: f64,
    products: f64,
    errors: f64,
}

impl Squares {
    fn add(&mut self, delivered: f64, exact: f64) {
        self.exact += exact * exact;
        self.delivered += delivered * delivered;
        self.products += exact * delivered;
        self.errors += (delivered - exact) * (delivered - exact);
    }

    fn cosine(&self) -> f64 {
        let lengths = (self.exact * self.delivered).sqrt();
        if lengths > 0.0 { self.products / lengths } else { 1.0 }
    }

    fn noise(&self) -> f64 {
        if self.exact > 0.0 { self.errors / self.exact } else { 0.0 }
    }
}

/// The result of an audit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finding {
    pub certificate: Certificate,
    /// The squared errors of all steps, and the squares of the exact sums.
    pub squares: [f64; 2],
}

impl Audits {
    pub fn new(every: u64) -> Audits {
        Audits { every, ..Audits::default() }
    }

    /// Whether a bucket that is compressed at this step is audited. All ranks get the same answer.
    pub fn concern(&mut self, bucket: &AgreedBucket) -> bool {
        self.known.insert(bucket.number);
        if self.every == 0 || bucket.step % self.every >= STEPS {
            return false;
        }
        let turn = (bucket.step / self.every) as usize % self.known.len();
        self.known.iter().nth(turn) == Some(&bucket.number)
    }

    /// Sums a part of this rank's shard exactly over the hosts, before the real exchange of the bucket, as
    /// `coding`. `read` gives elements of the shard. `seq` is the number of the collective.
    pub fn begin(
        &mut self,
        bucket: &AgreedBucket,
        coding: Coding,
        shard_elements: usize,
        read: impl FnOnce(Range<usize>) -> Vec<f32>,
        fabric: &mut Fabric,
        (seq, deadline): (u64, Instant),
    ) -> Result<(), Failure> {
        let audit = match self.under_way.take() {
            Some(audit) if audit.fits(bucket, coding, shard_elements) => audit,
            // Another part of the bucket each time that its turn comes.
            _ => {
                let turn = bucket.step / self.every.max(1) / self.known.len().max(1) as u64;
                Audit::new(bucket, coding, shard_elements, turn)
            }
        };
        let audit = self.under_way.insert(audit);
        audit.exact = read(audit.elements.clone());
        sum_over_hosts(fabric, seq, &mut audit.exact, deadline)?;
        Ok(())
    }

    /// Compares what was delivered of the bucket with the exact sum. Returns the result after the last of
    /// its steps.
    pub fn end(
        &mut self,
        bucket: &AgreedBucket,
        read: impl FnOnce(Range<usize>) -> Vec<f32>,
    ) -> Option<Finding> {
        let audit = self.under_way.as_mut().filter(|audit| audit.bucket == bucket.number)?;
        let exact = std::mem::take(&mut audit.exact);
        let delivered = read(audit.elements.clone());
        // A step that a scaler will skip says nothing.
        if exact.iter().chain(&delivered).all(|number| number.is_finite()) {
            audit.compare(&delivered, &exact);
        }
        let next = bucket.step + 1;
        if next < audit.first_step + STEPS && next % self.every < STEPS {
            return None;
        }
        let audit = self.under_way.take()?;
        (audit.steps > 0).then(|| audit.finding())
    }
}

impl Audit {
    fn new(bucket: &AgreedBucket, coding: Coding, shard_elements: usize, turn: u64) -> Audit {
        let length = shard_elements.min(MOST_ELEMENTS);
        let parts = shard_elements.div_ceil(MOST_ELEMENTS).max(1);
        // The last part begins early enough to be as long as the others.
        let start = (turn as usize % parts * length).min(shard_elements - length);
        Audit {
            bucket: bucket.number,
            coding,
            first_step: bucket.step,
            elements: start..start + length,
            exact: Vec::new(),
            all_exact: vec![0.0; length],
            all_delivered: vec![0.0; length],
            steps: 0,
            squares: Squares::default(),
        }
    }

    /// Whether this step of the bucket belongs to the audit.
    fn fits(&self, bucket: &AgreedBucket, coding: Coding, shard_elements: usize) -> bool {
        self.bucket == bucket.number
            && self.coding == coding
            && bucket.step < self.first_step + STEPS
            && self.elements.end <= shard_elements
    }

    fn compare(&mut self, delivered: &[f32], exact: &[f32]) {
        let sums = self.all_delivered.iter_mut().zip(&mut self.all_exact);
        for ((all_delivered, all_exact), (delivered, exact)) in
            sums.zip(delivered.iter().zip(exact))
        {
            let (delivered, exact) = (f64::from(*delivered), f64::from(*exact));
            *all_delivered += delivered;
            *all_exact += exact;
            self.squares.add(delivered, exact);
        }
        self.steps += 1;
    }

    fn finding(&self) -> Finding {
        let mut whole = Squares::default();
        for (delivered, exact) in self.all_delivered.iter().zip(&self.all_exact) {
            whole.add(*delivered, *exact);
        }
        let noise = self.squares.noise();
        Finding {
            certificate: Certificate {
                bucket: self.bucket,
                step: self.first_step,
                steps: self.steps,
                method: self.coding.name(),
                cosine: self.squares.cosine(),
                relative_error: noise.sqrt(),
                noise,
                window_cosine: whole.cosine(),
                window_relative_error: whole.noise().sqrt(),
            },
            squares: [self.squares.errors, self.squares.exact],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Wire;
    use crate::collective::fabric::tests::fabrics;
    use std::time::Duration;

    const EVERY: u64 = 20;

    fn bucket(number: u32, step: u64) -> AgreedBucket {
        AgreedBucket { number, step, on_all_ranks: true, stepping: None }
    }

    /// Two hosts audit a bucket of four elements; `deliver` makes what a step delivers of the exact sum.
    fn audit(deliver: fn(u64, f32) -> f32) -> Finding {
        let coding = |_| Coding::Chunks { density: 1.0, wire: Wire::F16 };
        audit_of(coding, deliver)
    }

    /// The same, sent as `coding` says for each step.
    fn audit_of(coding: fn(u64) -> Coding, deliver: fn(u64, f32) -> f32) -> Finding {
        std::thread::scope(|scope| {
            let hosts: Vec<_> = fabrics(2)
                .into_iter()
                .map(|(mut fabric, _interrupt)| {
                    scope.spawn(move || {
                        let mut audits = Audits::new(EVERY);
                        let mut findings = Vec::new();
                        for step in 0..2 * EVERY {
                            let bucket = bucket(3, step);
                            if !audits.concern(&bucket) {
                                continue;
                            }
                            let at = (step, Instant::now() + Duration::from_secs(10));
                            let own = |range: Range<usize>| vec![0.5; range.len()];
                            audits.begin(&bucket, coding(step), 4, own, &mut fabric, at).unwrap();
                            let delivered =
                                |range: Range<usize>| vec![deliver(step, 1.0); range.len()];
                            findings.extend(audits.end(&bucket, delivered));
                        }
                        assert_eq!(findings.len(), 2);
                        findings[0]
                    })
                })
                .collect();
            let findings: Vec<_> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
            assert_eq!(findings[0], findings[1]);
            findings[0]
        })
    }

    #[test]
    fn what_is_delivered_exactly_has_no_noise() {
        let Finding { certificate, squares } = audit(|_, exact| exact);
        assert_eq!((certificate.bucket, certificate.step, certificate.steps), (3, 0, STEPS));
        assert_eq!((certificate.cosine, certificate.noise), (1.0, 0.0));
        assert_eq!(certificate.window_relative_error, 0.0);
        assert_eq!(squares, [0.0, 4.0 * STEPS as f64]);
    }

    #[test]
    fn errors_that_are_made_up_for_in_the_next_step_are_in_the_step_but_not_in_the_window() {
        let early_or_late =
            |step, exact: f32| if step % 2 == 0 { 1.5 * exact } else { 0.5 * exact };
        let Certificate { noise, relative_error, window_relative_error, .. } =
            audit(early_or_late).certificate;
        assert_eq!((noise, relative_error, window_relative_error), (0.25, 0.5, 0.0));
    }

    #[test]
    fn a_gradient_that_shrinks_is_seen_in_the_window_too() {
        let Certificate { cosine, window_cosine, window_relative_error, .. } =
            audit(|_, exact| 0.5 * exact).certificate;
        assert_eq!((cosine, window_cosine, window_relative_error), (1.0, 1.0, 0.5));
    }

    #[test]
    fn infinity_and_nan_are_left_out() {
        let finding = audit(|step, exact| if step == 2 { f32::NAN } else { exact });
        assert_eq!((finding.certificate.steps, finding.certificate.noise), (STEPS - 1, 0.0));
    }

    #[test]
    fn steps_of_another_method_are_left_out() {
        let coding = |step| {
            let wire = if step < 3 { Wire::BF16 } else { Wire::F16 };
            Coding::Chunks { density: 1.0, wire }
        };
        let coarse_at_first = |step, exact| if step < 3 { 0.0 } else { exact };
        let Certificate { step, steps, method, noise, .. } =
            audit_of(coding, coarse_at_first).certificate;
        assert_eq!((step, steps, method, noise), (3, STEPS - 3, "fp16", 0.0));
    }

    #[test]
    fn every_part_of_a_bucket_has_its_turn() {
        let coding = Coding::Chunks { density: 1.0, wire: Wire::F16 };
        let elements = 2 * MOST_ELEMENTS + 5;
        let parts = (0..4).map(|turn| Audit::new(&bucket(1, 0), coding, elements, turn).elements);
        let starts: Vec<_> = parts.map(|part| part.start).collect();
        assert_eq!(starts, [0, MOST_ELEMENTS, MOST_ELEMENTS + 5, 0]);
    }

    #[test]
    fn buckets_take_turns_and_none_is_audited_if_that_is_off() {
        let mut audits = Audits::new(EVERY);
        let mut audited = Vec::new();
        for step in 0..6 * EVERY {
            audited.extend((1..=3).filter(|number| audits.concern(&bucket(*number, step))));
        }
        // In the first step only the first bucket is known.
        let turns: Vec<_> = [1, 2, 3, 1, 2, 3].map(|number| [number; STEPS as usize]).concat();
        assert_eq!(audited, turns);
        let mut off = Audits::new(0);
        assert!((0..100).all(|step| !off.concern(&bucket(1, step))));
    }
}
