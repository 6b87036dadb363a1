//! `method="auto"`: what gradients are sent as, chosen by the shortest time to a loss.
//!
//! A method that sends fewer bits makes a step shorter where the network is the bottleneck, and adds
//! noise to the gradient, as a smaller batch would: with noise `q`, training needs at most `1 + q` times
//! the steps. So the group takes the method with the least *predicted step time × (1 + q)*, and never one
//! that saves no time.
//!
//! While gradients are exact, every rank measures its steps, its buckets and its link. At a step that all
//! ranks know they tell each other what they measured and draw the same conclusion. After that they look
//! again every few hundred steps. A change that has not paid off is taken back, and not tried again for
//! some time.
//!
//! | file | what it is |
//! |---|---|
//! | `ladder` | the methods to choose from |
//! | `measuring` | what ranks measure and tell each other |
//! | `costs` | the time that each method takes of this processor |
//! | `prediction` | how long a step will take with each method, and the choice |

mod costs;
mod ladder;
mod measuring;
mod prediction;

pub use measuring::{LinkMeter, MeteredBucket};

use super::method::{MaxNoise, Method};
use crate::collective::fabric::Fabric;
use crate::observe::overlap::OverlapTimer;
use crate::transport::Failure;
pub use ladder::most_noise;
use ladder::{LADDER, index_of, last};
use measuring::{Sample, combine};
use prediction::{Measure, noise};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

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
/// An audit counts only if it has seen something.
const LEAST_AUDITED: f64 = f64::MIN_POSITIVE;

/// How gradients are sent at the moment, and why.
#[derive(Debug)]
pub struct Auto {
    max_noise: MaxNoise,
    /// By method: the step before which it is not chosen.
    barred_until: [u64; LADDER.len()],
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
    pub why: Why,
}

/// What decided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// The prediction.
    LeastCost,
    /// What was tried before, this method, made steps no shorter.
    DidNotPayOff(Method),
    /// The method before added more noise than is expected of it.
    TooNoisy { before: Method, noise: f64 },
}

impl Auto {
    pub fn new(max_noise: MaxNoise, cores_are_busy: bool) -> Auto {
        Auto {
            max_noise,
            barred_until: [0; LADDER.len()],
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

    /// Continues with the method of a saved state.
    pub fn set_method(&mut self, method: Method) {
        self.now = index_of(method).min(last(self.max_noise));
    }

    /// Takes the next method with less noise that may be chosen, because this one loses too much.
    fn step_up(&mut self, step: u64) {
        self.bar(self.now, step);
        self.now = (0..self.now).rev().find(|method| self.is_allowed(*method, step)).unwrap_or(0);
        self.last_change = None;
    }

    fn bar(&mut self, method: usize, step: u64) {
        self.barred_until[method] = step.saturating_add(STEPS_UNTIL_RETRIED);
    }

    fn is_allowed(&self, method: usize, step: u64) -> bool {
        method <= last(self.max_noise) && self.barred_until[method] <= step
    }

    /// Whether a choice is due before a bucket is exchanged at this step. All ranks get the same answer.
    /// `warmup_steps` are exact.
    pub fn is_due(&mut self, step: u64, warmup_steps: u64) -> bool {
        let first = || warmup_steps.max(step.saturating_add(STEPS_TO_MEASURE));
        step >= *self.next.get_or_insert_with(first)
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
        let audited = (squares > LEAST_AUDITED).then(|| (self.now, errors / squares));
        log::debug!("measured by all ranks: {measure:?}");
        Ok(self.decide(&measure, audited, at.step))
    }

    /// The choice, from numbers that all ranks share.
    fn decide(
        &mut self,
        measure: &Measure,
        audited: Option<(usize, f64)>,
        step: u64,
    ) -> Option<Choice> {
        self.next = Some(step.saturating_add(STEPS_BETWEEN));
        if measure.step == 0.0 || measure.buckets.is_empty() {
            // Nothing was measured: the job has not trained since the last choice.
            self.next = Some(step.saturating_add(STEPS_TO_MEASURE));
            return None;
        }
        let noise = noise(audited);
        let before = self.now;
        if most_noise(&LADDER[before].to_string()).is_some_and(|most| noise[before] > most) {
            self.step_up(step);
            let why = Why::TooNoisy { before: LADDER[before], noise: noise[before] };
            return Some(self.choice(measure, why));
        }
        let cost = measure.step * (1.0 + noise[before]);
        if let Some(change) = self.last_change.take() {
            let limit = if before > change.from { PAID_OFF } else { AFFORDABLE };
            if cost > change.cost * limit {
                self.bar(before, step);
                self.now = change.from;
                return Some(self.choice(measure, Why::DidNotPayOff(LADDER[before])));
            }
        }
        self.now = measure.choose(before, &noise, |method| self.is_allowed(method, step));
        let is_first = !std::mem::replace(&mut self.has_chosen, true);
        if self.now != before {
            self.last_change = Some(Change { from: before, cost });
            self.next = Some(step.saturating_add(STEPS_AFTER_CHANGE));
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
            why,
        }
    }
}

/// When a choice is made.
#[derive(Debug, Clone, Copy)]
pub struct At {
    pub step: u64,
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
        if let Why::DidNotPayOff(method) = self.why {
            write!(
                f,
                "sending gradients as {method} did not pay off (a step takes {}): they are sent as \
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
            write!(
                f,
                "communication is hidden: not compressing (a step is predicted to take {}, and \
                 {} with fp16)",
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

    fn auto(max_noise: MaxNoise) -> Auto {
        let mut auto = Auto::new(max_noise, false);
        assert!(!auto.is_due(0, 100));
        auto
    }

    #[test]
    fn the_first_choice_comes_after_the_warm_up_and_after_enough_steps() {
        let mut fresh = auto(MaxNoise::Low);
        assert!(!fresh.is_due(99, 100) && fresh.is_due(100, 100));
        let mut resumed = Auto::new(MaxNoise::Low, false);
        assert!(!resumed.is_due(5000, 100));
        assert!(!resumed.is_due(5019, 100) && resumed.is_due(5020, 100));
    }

    #[test]
    fn a_hidden_exchange_stays_exact_and_the_user_is_told_once() {
        let mut auto = auto(MaxNoise::Low);
        let hidden = measure(0.005, 0.1);
        let told = auto.decide(&hidden, None, 100).unwrap().to_string();
        assert!(told.starts_with("communication is hidden: not compressing"), "{told}");
        assert_eq!(auto.method(), Method::Exact);
        assert_eq!(auto.decide(&hidden, None, 400), None);
    }

    #[test]
    fn a_slow_link_is_answered_and_what_pays_off_is_kept() {
        let mut auto = auto(MaxNoise::Low);
        let told = auto.decide(&measure(1.0, 1.09), None, 100).unwrap();
        assert!(matches!(auto.method(), Method::Quantized(_)), "{told}");
        assert!(!auto.is_due(159, 100) && auto.is_due(160, 100));
        let method = auto.method();
        assert_eq!(auto.decide(&measure(1.0, told.chosen_step), None, 160), None);
        assert_eq!(auto.method(), method);
        assert!(!auto.is_due(459, 100) && auto.is_due(460, 100));
        // The link became fast.
        auto.decide(&measure(0.001, 0.1), None, 460).unwrap();
        assert_eq!(auto.method(), Method::Exact);
    }

    #[test]
    fn a_change_that_does_not_pay_off_is_taken_back_and_not_tried_again_for_some_time() {
        let mut auto = auto(MaxNoise::Low);
        let slow = measure(1.0, 1.09);
        auto.decide(&slow, None, 100).unwrap();
        let tried = auto.method();
        let told = auto.decide(&slow, None, 160).unwrap();
        assert_eq!((told.method, told.why), (Method::Exact, Why::DidNotPayOff(tried)));
        auto.decide(&slow, None, 460);
        assert_ne!(auto.method(), tried);
    }

    #[test]
    fn exact_gradients_that_did_not_pay_off_are_not_tried_again_for_some_time() {
        let mut auto = auto(MaxNoise::Low);
        auto.decide(&measure(1.0, 1.09), None, 100).unwrap();
        let compressed = auto.method();
        // The link seems to have become fast, but it has not.
        auto.decide(&measure(0.001, 0.5), None, 160);
        assert_eq!(auto.method(), Method::Exact);
        let told = auto.decide(&measure(0.001, 1.09), None, 220).unwrap();
        assert_eq!((told.method, told.why), (compressed, Why::DidNotPayOff(Method::Exact)));
        auto.decide(&measure(0.001, 0.5), None, 520);
        assert_ne!(auto.method(), Method::Exact);
    }

    #[test]
    fn a_method_that_adds_too_much_noise_gives_way_to_one_that_may_be_chosen() {
        let mut auto = auto(MaxNoise::Low);
        auto.set_method(Method::Quantized(Levels::Quinary));
        auto.bar(index_of(Method::Quantized(Levels::Int3)), 100);
        let audited = Some((index_of(auto.method()), 1.0));
        let told = auto.decide(&measure(1.0, 0.5), audited, 200).unwrap();
        let before = Method::Quantized(Levels::Quinary);
        assert_eq!(told.why, Why::TooNoisy { before, noise: 1.0 });
        assert_eq!(told.method, Method::Quantized(Levels::Int4));
        assert!(told.to_string().contains("more noise"), "{told}");
    }

    #[test]
    fn noise_that_was_measured_counts_and_stepping_up_is_for_some_time() {
        let mut auto = auto(MaxNoise::Low);
        auto.decide(&measure(1.0, 1.09), None, 100).unwrap();
        let (before, index) = (auto.method(), auto.now);
        auto.step_up(150);
        assert_eq!(auto.now, index - 1);
        auto.decide(&measure(1.0, 0.3), None, 400);
        assert_ne!(auto.method(), before);
    }

    #[test]
    fn without_anything_measured_nothing_changes() {
        let mut auto = auto(MaxNoise::Any);
        assert_eq!(auto.decide(&Measure::default(), None, 100), None);
        assert_eq!(auto.method(), Method::Exact);
        assert!(!auto.is_due(119, 100) && auto.is_due(120, 100));
    }
}
