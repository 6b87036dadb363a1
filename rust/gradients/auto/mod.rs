//! `method="auto"`: what gradients are sent as, chosen by the shortest time to a loss.
//!
//! A method that sends fewer bits makes a step shorter where the network is the bottleneck, and adds
//! noise to the gradient, as a smaller batch would: with noise `q`, training needs at most `1 + q` times
//! the steps. So the group takes the method with the least *predicted step time × (1 + q)*, and never one
//! that saves no time.
//!
//! The first steps are exact, and every rank measures its steps, its buckets and its link. At a step
//! that all ranks know they tell each other what they measured and draw the same conclusion. They look again at the
//! end of the warm-up, until which only methods that add no noise are taken, and every few hundred steps. A change that has not paid off is taken back, and not tried again for
//! some time. Whether it has, is measured: a step now, against one before it, corrected by what has changed
//! meanwhile (the link may have become slower, and then all steps take longer).
//!
//! | file | what it is |
//! |---|---|
//! | `ladder` | the methods to choose from |
//! | `measuring` | what ranks measure and tell each other |
//! | `costs` | the time that each method takes of this processor |
//! | `prediction` | how long a step will take with each method, and the choice |
//! | `step_count` | the steps of the whole job, by which the choices are timed |

mod costs;
mod ladder;
mod measuring;
mod prediction;
mod step_count;

pub use measuring::{LinkMeter, MeteredBucket};

use super::method::{MaxNoise, Method};
use crate::collective::agreement::AgreedBucket;
use crate::collective::fabric::Fabric;
use crate::observe::overlap::OverlapTimer;
use crate::transport::Failure;
use ladder::{EXPECTED_NOISE, LADDER, MOST_NOISE_IN_WARM_UP, index_of, last};
pub use ladder::{in_warm_up, most_noise};
use measuring::{Sample, combine};
use prediction::Measure;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;
use step_count::StepCount;

/// The first choice needs at least so many measured steps.
const STEPS_TO_MEASURE: u64 = 20;
/// The next look at a choice, and the first after a change.
const STEPS_BETWEEN: u64 = 300;
const STEPS_AFTER_CHANGE: u64 = 60;
/// For how long a method that did not pay off is not tried again.
const STEPS_UNTIL_RETRIED: u64 = 3000;
/// A noisier method has paid off if progress costs less than this fraction of before.
const PAID_OFF: f64 = 0.99;
/// A less noisy one is kept if it costs at most this much.
const AFFORDABLE: f64 = 1.05;
/// Communication counts as hidden if a step waits for it during at most this fraction.
const HIDDEN: f64 = 0.02;
/// What an audit counts beside those before it: each has seen another part of the gradient.
const NEWS: f64 = 0.25;
/// An audit counts only if it has seen something.
const LEAST_AUDITED: f64 = f64::MIN_POSITIVE;

/// How gradients are sent at the moment, and why.
#[derive(Debug)]
pub struct Auto {
    max_noise: MaxNoise,
    /// Those of this group, by which all of this is timed.
    steps: StepCount,
    /// How many of them are left until some bucket is no more warming up.
    warm_up_left: u64,
    /// The same for the buckets of this step so far.
    least_warm_up_left: u64,
    /// By method: the step before which it is not chosen.
    barred_until: [u64; LADDER.len()],
    /// By method: the noise to count with, as expected at first, then as audits have found it.
    noise: [f64; LADDER.len()],
    now: usize,
    /// The step of the next choice; known once a first bucket was seen.
    next: Option<u64>,
    last_change: Option<Change>,
    has_chosen: bool,
    /// Seconds for an element by method; measured before the first choice.
    per_element: Option<[f64; LADDER.len()]>,
    /// Seconds for a byte on this rank's link, as measured last.
    per_byte: f64,
    /// Whether the threads of the training job keep all cores of this host busy.
    cores_are_busy: bool,
    pub link: LinkMeter,
    pub buckets: BTreeMap<u32, MeteredBucket>,
    /// Squared errors of the audits since the last choice, and squares of the exact sums.
    pub audited: [f64; 2],
}

/// A change of method, until it is known whether it has paid off.
#[derive(Debug)]
struct Change {
    from: usize,
    /// What progress cost before.
    cost: f64,
    /// What was measured before.
    measure: Measure,
}

impl Change {
    /// What progress would cost now without the change: what it cost before, and as much more or less as
    /// the link has changed since makes of it by prediction. All else that was measured may be different
    /// because of the change.
    fn cost_without_it(&self, per_byte: f64) -> f64 {
        let then = self.measure.predict(self.from);
        let now = Measure { per_byte, ..self.measure.clone() }.predict(self.from);
        if then > 0.0 { self.cost * now / then } else { self.cost }
    }
}

/// The outcome of a choice, for the user.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    pub method: Method,
    /// A measured step, in seconds.
    pub measured_step: f64,
    /// A step as predicted with exact gradients, rounded ones, and with this method.
    pub exact_step: f64,
    pub rounded_step: f64,
    pub chosen_step: f64,
    /// What of an exact step would be spent waiting for gradients.
    pub exact_exposed: f64,
    pub why: Why,
}

/// What decided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// The prediction.
    LeastCost,
    /// With what was tried before, this method, steps are no shorter.
    DoesNotPayOff(Method),
    /// The method before added more noise than is expected of it.
    TooNoisy { before: Method, noise: f64 },
}

impl Auto {
    pub fn new(max_noise: MaxNoise, cores_are_busy: bool) -> Auto {
        Auto {
            max_noise,
            steps: StepCount::default(),
            warm_up_left: u64::MAX,
            least_warm_up_left: u64::MAX,
            barred_until: [0; LADDER.len()],
            noise: EXPECTED_NOISE,
            now: 0,
            next: None,
            last_change: None,
            has_chosen: false,
            per_element: None,
            per_byte: 0.0,
            cores_are_busy,
            link: LinkMeter::default(),
            buckets: BTreeMap::new(),
            audited: [0.0; 2],
        }
    }

    /// What gradients are sent as now.
    pub fn method(&self) -> Method {
        LADDER[self.now]
    }

    /// Continues with the method of a saved state. What was measured before belongs to another training.
    pub fn set_method(&mut self, method: Method) {
        self.now = index_of(method).min(last(self.max_noise));
        self.barred_until = [0; LADDER.len()];
        self.noise = EXPECTED_NOISE;
        self.next = None;
        self.last_change = None;
        self.audited = [0.0; 2];
    }

    /// Takes the next method with less noise that may be chosen, because this one loses too much.
    fn step_up(&mut self) {
        self.bar(self.now);
        self.now = self.allowed_up_to(self.now);
        self.last_change = None;
    }

    /// The noisiest method that may be chosen, up to this one.
    fn allowed_up_to(&self, method: usize) -> usize {
        (0..=method).rev().find(|method| self.is_allowed(*method)).unwrap_or(0)
    }

    fn bar(&mut self, method: usize) {
        self.barred_until[method] = self.steps.now() + STEPS_UNTIL_RETRIED;
    }

    fn is_allowed(&self, method: usize) -> bool {
        let last = match self.warm_up_left {
            0 => last(self.max_noise),
            _ => last(self.max_noise).min(index_of(MOST_NOISE_IN_WARM_UP)),
        };
        method <= last && self.barred_until[method] <= self.steps.now()
    }

    /// The next choice is made after so many steps, but not later than at the end of the warm-up.
    fn look_again_after(&mut self, steps: u64) {
        let steps = if self.warm_up_left > 0 { steps.min(self.warm_up_left) } else { steps };
        self.next = Some(self.steps.now() + steps);
    }

    /// Whether a choice is due before this bucket is exchanged. It is asked once for every bucket, and all
    /// ranks get the same answer. A bucket is warming up for `warmup_steps`.
    pub fn is_due(&mut self, bucket: &AgreedBucket, warmup_steps: u64) -> bool {
        if self.steps.note(bucket.number) {
            // Of the whole step before; this one has just begun.
            self.warm_up_left = self.least_warm_up_left.saturating_sub(1);
            self.least_warm_up_left = u64::MAX;
        }
        let left = warmup_steps.saturating_sub(bucket.step);
        self.least_warm_up_left = self.least_warm_up_left.min(left);
        let now = self.steps.now();
        now >= *self.next.get_or_insert(now + STEPS_TO_MEASURE)
    }

    /// Chooses with all other ranks, before the collective with this number. Returns what to tell the
    /// user, if there is anything new.
    pub fn choose(
        &mut self,
        fabric: &mut Fabric,
        overlap: &OverlapTimer,
        at: At,
    ) -> Result<Option<Choice>, Failure> {
        let per_element = *self.per_element.get_or_insert_with(costs::measure);
        let contention = if self.cores_are_busy { 1.0 } else { 0.0 };
        let passes = overlap.take_passes();
        let mut sample = Sample::new(&passes, &self.buckets, &mut self.link, self.per_byte)
            .with_costs(per_element, contention);
        sample.audited = std::mem::take(&mut self.audited);
        self.per_byte = sample.per_byte;
        let samples = sample.gather(fabric, at.seq, at.deadline)?;
        let measure = combine(&samples, fabric.topology().hosts());
        let [errors, squares] =
            [0, 1].map(|index| samples.iter().map(|sample| sample.audited[index]).sum::<f64>());
        let audited = (squares > LEAST_AUDITED).then(|| errors / squares);
        log::debug!("measured by all ranks: {measure:?}");
        Ok(self.decide(&measure, audited))
    }

    /// The choice, from numbers that all ranks share. `audited` is the noise that audits have found of the
    /// method in use since the last choice.
    fn decide(&mut self, measure: &Measure, audited: Option<f64>) -> Option<Choice> {
        let before = self.now;
        if let Some(noise) = audited {
            let most = most_noise(&LADDER[before].to_string());
            if most.is_some_and(|most| noise > most) {
                self.look_again_after(STEPS_BETWEEN);
                self.step_up();
                return Some(self.choice(measure, Why::TooNoisy { before: LADDER[before], noise }));
            }
            self.noise[before] += NEWS * (noise - self.noise[before]);
        }
        if measure.step == 0.0 || measure.buckets.is_empty() {
            // Nothing was measured: the job has not trained since the last choice.
            self.look_again_after(STEPS_TO_MEASURE);
            return None;
        }
        self.look_again_after(STEPS_BETWEEN);
        let measure = &measure.without_the_work_of(before);
        let cost = measure.step * (1.0 + self.noise[before]);
        if let Some(change) = self.last_change.take() {
            let limit = if before > change.from { PAID_OFF } else { AFFORDABLE };
            if cost > change.cost_without_it(measure.per_byte) * limit {
                // If only the link has changed, it may change again.
                if cost > change.cost * limit {
                    self.bar(before);
                }
                self.now = self.allowed_up_to(change.from);
                return Some(self.choice(measure, Why::DoesNotPayOff(LADDER[before])));
            }
        }
        self.now = measure.choose(before, &self.noise, |method| self.is_allowed(method));
        let is_first = !std::mem::replace(&mut self.has_chosen, true);
        if self.now != before {
            self.last_change = Some(Change { from: before, cost, measure: measure.clone() });
            self.look_again_after(STEPS_AFTER_CHANGE);
        }
        (is_first || self.now != before).then(|| self.choice(measure, Why::LeastCost))
    }

    fn choice(&self, measure: &Measure, why: Why) -> Choice {
        Choice {
            method: self.method(),
            measured_step: measure.step,
            exact_step: measure.predict(0),
            rounded_step: measure.predict(1),
            chosen_step: measure.predict(self.now),
            exact_exposed: measure.exposed(0),
            why,
        }
    }
}

/// When a choice is made.
#[derive(Debug, Clone, Copy)]
pub struct At {
    /// The number of the collective that waits for it.
    pub seq: u64,
    pub deadline: Instant,
}

impl Choice {
    pub fn compresses(&self) -> bool {
        self.method != Method::Exact
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| format!("{:.0} ms", seconds * 1e3);
        if let Why::DoesNotPayOff(method) = self.why {
            write!(
                f,
                "sending gradients as {method} does not pay off (a step takes {}): they are sent as \
                 {} again",
                ms(self.measured_step),
                self.method
            )
        } else if let Why::TooNoisy { before, noise } = self.why {
            write!(
                f,
                "sending gradients as {before} adds more noise to this training than is expected of it \
                 ({noise:.3}): from this step on they are sent as {}",
                self.method
            )
        } else if self.method == Method::Exact {
            let why = match self.exact_exposed <= HIDDEN * self.exact_step {
                true => "communication is hidden",
                false => "it would not pay off",
            };
            write!(
                f,
                "{why}: not compressing (a step is predicted to take {}, and {} with fp16)",
                ms(self.exact_step),
                ms(self.rounded_step)
            )
        } else {
            write!(
                f,
                "from this step on gradients are sent as {}: a step is predicted to take {}, {} with \
                 exact gradients, {} with fp16",
                self.method,
                ms(self.chosen_step),
                ms(self.exact_step),
                ms(self.rounded_step)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::prediction::BucketMeasure;
    use super::*;
    use crate::codec::quantizer::Levels;
    use crate::collective::fabric::tests::fabrics;
    use proptest::prelude::*;
    use std::time::Duration;

    /// A step of 100 ms without waiting, and a bucket that takes `wire` seconds when it is exact.
    fn measure(wire: f64, step: f64) -> Measure {
        let bucket =
            BucketMeasure { ready: 0.05, elements: 1e6, bits_per_element: 32.0, within_host: 0.0 };
        Measure {
            step,
            compute: 0.1,
            backward: 0.06,
            per_byte: wire / 4e6,
            buckets: vec![bucket],
            hosts: 2.0,
            ..Measure::default()
        }
    }

    /// Before its first step, with a warm-up of 100.
    fn auto(max_noise: MaxNoise) -> Auto {
        let mut auto = Auto::new(max_noise, false);
        assert!(!is_due(&mut auto, 0));
        auto
    }

    /// Exchanges one bucket until this step. Returns whether a choice is due there.
    fn is_due(auto: &mut Auto, step: u64) -> bool {
        loop {
            let bucket = AgreedBucket { number: 1, step, on_all_ranks: true, stepping: None };
            let is_due = auto.is_due(&bucket, 100);
            if auto.steps.now() >= step {
                return is_due;
            }
        }
    }

    /// Decides at this step.
    fn decide(auto: &mut Auto, measure: &Measure, step: u64) -> Option<Choice> {
        is_due(auto, step);
        auto.decide(measure, None)
    }

    #[test]
    fn the_first_choice_comes_after_enough_steps_and_one_more_after_the_warm_up() {
        let mut fresh = auto(MaxNoise::Low);
        assert!(!is_due(&mut fresh, 19) && is_due(&mut fresh, 20));
        let slow = measure(1.0, 1.09);
        let chosen = fresh.decide(&slow, None).unwrap();
        assert_eq!(chosen.method, MOST_NOISE_IN_WARM_UP);
        assert!(!is_due(&mut fresh, 79) && is_due(&mut fresh, 80));
        fresh.decide(&Measure { step: chosen.chosen_step, ..slow.clone() }, None);
        assert_eq!(fresh.method(), MOST_NOISE_IN_WARM_UP);
        assert!(!is_due(&mut fresh, 99) && is_due(&mut fresh, 100));
        fresh.decide(&Measure { step: chosen.chosen_step, ..slow }, None).unwrap();
        assert!(fresh.now > index_of(MOST_NOISE_IN_WARM_UP));
        let mut resumed = Auto::new(MaxNoise::Low, false);
        let bucket = |step| AgreedBucket { number: 1, step, on_all_ranks: true, stepping: None };
        assert!((5000..5020).all(|step| !resumed.is_due(&bucket(step), 100)));
        assert!(resumed.is_due(&bucket(5020), 100));
    }

    #[test]
    fn a_loaded_state_of_earlier_steps_does_not_stop_the_choices() {
        let mut auto = auto(MaxNoise::Low);
        let measure = measure(1.0, 1.09);
        for step in [20, 320, 5000] {
            decide(&mut auto, &measure, step);
        }
        auto.set_method(Method::Exact);
        let loaded = |step| AgreedBucket { number: 9, step, on_all_ranks: true, stepping: None };
        let due = (200..).find(|step| auto.is_due(&loaded(*step), 100));
        assert_eq!(due, Some(200 + STEPS_TO_MEASURE));
        assert!(auto.decide(&measure, None).is_some());
    }

    #[test]
    fn a_hidden_exchange_stays_exact_and_the_user_is_told_once() {
        let mut auto = auto(MaxNoise::Low);
        let hidden = measure(0.005, 0.1);
        let told = decide(&mut auto, &hidden, 100).unwrap().to_string();
        assert!(told.starts_with("communication is hidden: not compressing"), "{told}");
        assert_eq!(auto.method(), Method::Exact);
        assert_eq!(decide(&mut auto, &hidden, 400), None);
    }

    #[test]
    fn communication_that_would_not_be_shorter_is_not_called_hidden() {
        let mut auto = auto(MaxNoise::Low);
        // All cores are busy, and every method costs more than it saves.
        let busy =
            Measure { per_element: [1e-7; LADDER.len()], contention: 1.0, ..measure(0.05, 0.14) };
        let told = decide(&mut auto, &busy, 100).unwrap();
        assert_eq!(auto.method(), Method::Exact, "{told}");
        assert!(told.to_string().starts_with("it would not pay off: not compressing"), "{told}");
    }

    #[test]
    fn a_slow_link_is_answered_and_what_pays_off_is_kept() {
        let mut auto = auto(MaxNoise::Low);
        let told = decide(&mut auto, &measure(1.0, 1.09), 100).unwrap();
        assert!(matches!(auto.method(), Method::Quantized(_)), "{told}");
        assert!(!is_due(&mut auto, 159) && is_due(&mut auto, 160));
        let method = auto.method();
        assert_eq!(auto.decide(&measure(1.0, told.chosen_step), None), None);
        assert_eq!(auto.method(), method);
        assert!(!is_due(&mut auto, 459) && is_due(&mut auto, 460));
        // The link became fast.
        auto.decide(&measure(0.001, 0.1), None).unwrap();
        assert_eq!(auto.method(), Method::Exact);
    }

    #[test]
    fn a_change_that_does_not_pay_off_is_taken_back_and_not_tried_again_for_some_time() {
        let mut auto = auto(MaxNoise::Low);
        let slow = measure(1.0, 1.09);
        decide(&mut auto, &slow, 100).unwrap();
        let tried = auto.method();
        let told = decide(&mut auto, &slow, 160).unwrap();
        assert_eq!((told.method, told.why), (Method::Exact, Why::DoesNotPayOff(tried)));
        decide(&mut auto, &slow, 460);
        assert_ne!(auto.method(), tried);
    }

    #[test]
    fn a_link_that_slows_down_after_a_change_does_not_take_the_change_back() {
        let mut auto = auto(MaxNoise::Low);
        // Steps of 0.19 s become shorter; then the link carries a tenth of what it did.
        let chosen = decide(&mut auto, &measure(0.1, 0.19), 100).unwrap();
        assert!(chosen.compresses(), "{chosen}");
        let slower = measure(1.0, 0.0);
        let step = slower.predict(index_of(chosen.method));
        assert!(step > 0.19, "the step is longer than before the change");
        decide(&mut auto, &Measure { step, ..slower }, 160);
        assert_ne!(auto.method(), Method::Exact);
    }

    #[test]
    fn a_method_whose_work_slows_the_job_down_is_taken_back() {
        let mut auto = auto(MaxNoise::Low);
        let exact = measure(0.2, 0.29);
        decide(&mut auto, &exact, 100).unwrap();
        assert_ne!(auto.method(), Method::Exact);
        // Nothing waits any more, but all cores are busy, and the job computes for longer.
        let busy = Measure { compute: 0.33, step: 0.33, ..exact };
        decide(&mut auto, &busy, 160);
        assert_eq!(auto.method(), Method::Exact);
    }

    #[test]
    fn a_new_model_that_warms_up_does_not_change_how_the_others_are_sent() {
        let mut auto = auto(MaxNoise::Low);
        let slow = measure(1.0, 1.09);
        let chosen = decide(&mut auto, &slow, 200).unwrap();
        assert!(auto.now > index_of(MOST_NOISE_IN_WARM_UP), "{chosen}");
        let paid_off = Measure { step: chosen.chosen_step, ..slow };
        let bucket =
            |number, step| AgreedBucket { number, step, on_all_ranks: true, stepping: None };
        let method = auto.method();
        for step in 0..90 {
            for bucket in [bucket(7, step), bucket(1, 200 + step)] {
                if auto.is_due(&bucket, 100) {
                    auto.decide(&paid_off, None);
                }
            }
            assert_eq!(auto.method(), method, "step {step} of the new model");
        }
    }

    #[test]
    fn exact_gradients_that_did_not_pay_off_are_not_tried_again_for_some_time() {
        let mut auto = auto(MaxNoise::Low);
        let slow = measure(1.0, 1.09);
        let compressed = decide(&mut auto, &slow, 100).unwrap();
        decide(&mut auto, &Measure { step: compressed.chosen_step, ..slow }, 160);
        assert_eq!(auto.method(), compressed.method);
        // It seems as if the link had become fast, but steps with exact gradients take longer.
        let (short, long) = (measure(0.001, 0.5), measure(0.001, 1.09));
        decide(&mut auto, &short, 460);
        assert_eq!(auto.method(), Method::Exact);
        let told = decide(&mut auto, &long, 520).unwrap();
        let why = Why::DoesNotPayOff(Method::Exact);
        assert_eq!((told.method, told.why), (compressed.method, why));
        decide(&mut auto, &short, 820);
        assert_ne!(auto.method(), Method::Exact);
    }

    #[test]
    fn a_method_that_adds_too_much_noise_gives_way_to_one_that_may_be_chosen() {
        let mut auto = auto(MaxNoise::Low);
        is_due(&mut auto, 200);
        auto.set_method(Method::Quantized(Levels::Quinary));
        auto.bar(index_of(Method::Quantized(Levels::Int3)));
        let told = auto.decide(&measure(1.0, 0.5), Some(2.0)).unwrap();
        let before = Method::Quantized(Levels::Quinary);
        assert_eq!(told.why, Why::TooNoisy { before, noise: 2.0 });
        assert_eq!(told.method, Method::Quantized(Levels::Int4));
        assert!(told.to_string().contains("more noise"), "{told}");
    }

    #[test]
    fn noise_that_was_found_counts_in_later_choices_too() {
        let mut auto = auto(MaxNoise::Any);
        let slow = measure(100.0, 100.09);
        decide(&mut auto, &slow, 100).unwrap();
        let chosen = auto.now;
        // Noisier than expected, but not beyond all measure.
        let found = 2.0 * EXPECTED_NOISE[chosen];
        let paid_off = Measure { step: slow.predict(chosen), ..slow };
        auto.decide(&paid_off, Some(found));
        let counted = auto.noise[chosen];
        assert!((EXPECTED_NOISE[chosen]..found).contains(&counted));
        auto.decide(&paid_off, None);
        assert_eq!(auto.noise[chosen], counted);
    }

    #[test]
    fn stepping_up_is_for_some_time() {
        let mut auto = auto(MaxNoise::Low);
        decide(&mut auto, &measure(1.0, 1.09), 100).unwrap();
        let (before, index) = (auto.method(), auto.now);
        auto.step_up();
        assert_eq!(auto.now, index - 1);
        decide(&mut auto, &measure(1.0, 0.3), 400);
        assert_ne!(auto.method(), before);
    }

    #[test]
    fn without_anything_measured_nothing_changes() {
        let mut auto = auto(MaxNoise::Any);
        assert_eq!(decide(&mut auto, &Measure::default(), 100), None);
        assert_eq!(auto.method(), Method::Exact);
        assert!(!is_due(&mut auto, 119) && is_due(&mut auto, 120));
    }

    /// What a rank measures until the next choice: seconds of a step, of its backward pass, of waiting
    /// after it, and of a byte on its link; and squares of errors that an audit has found.
    type Measured = (f64, f64, f64, f64, f64);

    fn measured() -> impl Strategy<Value = Measured> {
        (0.01..1.0f64, 0.1..0.9f64, 0.0..1.0f64, -10.0..-6.0f64, 0.0..0.5f64).prop_map(
            |(step, backward, exposed, per_byte, errors)| {
                (step, backward * step, exposed * step, 10f64.powf(per_byte), errors)
            },
        )
    }

    /// Lets a rank measure this, with two buckets in every step.
    fn let_measure(auto: &mut Auto, overlap: &OverlapTimer, start: Instant, measured: Measured) {
        let (step, backward, exposed, per_byte, errors) = measured;
        for pass in 0..4 {
            let at = |seconds| start + Duration::from_secs_f64(seconds + f64::from(pass) * step);
            overlap.begin(1, at(0.0));
            overlap.begin(2, at(backward / 2.0));
            overlap.backward_ended(at(backward));
            overlap.end(at(backward));
            overlap.end(at(backward + exposed));
        }
        auto.link.add(1 << 20, per_byte * f64::from(1 << 20));
        auto.audited = [errors, 1.0];
        let metered =
            MeteredBucket { elements: 10_000_000, bits_per_element: 32, within_host_seconds: 0.0 };
        auto.buckets = BTreeMap::from([(1, metered), (2, metered)]);
    }

    /// The methods that a rank of a group has chosen, look by look, from what it has measured.
    fn methods_of_rank(mut fabric: Fabric, looks: &[Measured]) -> Vec<Method> {
        let (mut auto, overlap) = (auto(MaxNoise::Any), OverlapTimer::default());
        let mut step = 0;
        let choose = |(look, measured): (usize, &Measured)| {
            let_measure(&mut auto, &overlap, Instant::now(), *measured);
            while !is_due(&mut auto, step) {
                step += 1;
            }
            let deadline = Instant::now() + Duration::from_secs(30);
            auto.choose(&mut fabric, &overlap, At { seq: look as u64, deadline }).unwrap();
            auto.method()
        };
        looks.iter().enumerate().map(choose).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn ranks_that_measure_different_things_choose_the_same_at_the_same_steps(
            looks in proptest::collection::vec(proptest::collection::vec(measured(), 8), 2..5),
        ) {
            let chosen: Vec<_> = std::thread::scope(|scope| {
                let ranks: Vec<_> = fabrics(looks.len())
                    .into_iter()
                    .zip(&looks)
                    .map(|((fabric, _), looks)| scope.spawn(|| methods_of_rank(fabric, looks)))
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            prop_assert!(chosen.windows(2).all(|pair| pair[0] == pair[1]), "{chosen:?}");
        }
    }
}
