//! What this rank measures for the choice of a method, and how the ranks put their numbers together.

use super::ladder::LADDER;
use super::prediction::{BucketMeasure, Measure};
use crate::collective::fabric::Fabric;
use crate::collective::message::{Envelope, Tag};
use crate::observe::overlap::Pass;
use crate::transport::Failure;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;
use zerocopy::byteorder::little_endian::{F64, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Times of sending fewer bytes than this say more about waiting than about the link.
const MANY_BYTES: u64 = 32 << 10;
/// With fewer than this they say nothing at all.
const LEAST_BYTES: u64 = 1 << 10;
/// The most samples of a link that are kept.
const MOST_SAMPLES: usize = 4096;
/// The most buckets that a message tells of. The first of a pass matter least, so the last are told.
const MOST_BUCKETS: usize = 512;

/// Collects how long bytes took to send. Of many times, it keeps the last.
#[derive(Debug, Default)]
pub struct LinkMeter {
    /// Seconds for a byte, of sending many bytes at once.
    of_many: VecDeque<f64>,
    /// The same of fewer bytes; the link itself takes no longer than that.
    of_few: VecDeque<f64>,
}

impl LinkMeter {
    pub fn add(&mut self, bytes: u64, seconds: f64) {
        let samples = match bytes {
            MANY_BYTES.. => &mut self.of_many,
            LEAST_BYTES.. => &mut self.of_few,
            _ => return,
        };
        if samples.len() == MOST_SAMPLES {
            samples.pop_front();
        }
        samples.push_back(seconds / bytes as f64);
    }

    /// Seconds for a byte, from what was sent since the last call; `before` was the result of that. With
    /// few bytes alone it can be seen that the link has become faster, not that it has become slower.
    fn take(&mut self, before: f64) -> f64 {
        let of_few = quick_quarter(std::mem::take(&mut self.of_few));
        match quick_quarter(std::mem::take(&mut self.of_many)) {
            Some(of_many) => of_many,
            None if before == 0.0 => of_few.unwrap_or(0.0),
            None => of_few.map_or(before, |of_few| of_few.min(before)),
        }
    }
}

/// The slowest of the quick quarter of samples: in the others a peer was late.
fn quick_quarter(samples: VecDeque<f64>) -> Option<f64> {
    let mut samples = Vec::from(samples);
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 4).copied()
}

/// A bucket that was exchanged in a pass.
#[derive(Debug, Clone, Copy, Default)]
pub struct MeteredBucket {
    pub elements: u64,
    pub bits_per_element: u32,
    pub within_host_seconds: f64,
}

/// The numbers of one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    step: f64,
    compute: f64,
    backward: f64,
    pub per_byte: f64,
    contention: f64,
    /// Squared errors of the audits since the last choice, and the squares of what they should have been.
    pub audited: [f64; 2],
    per_element: [f64; LADDER.len()],
    buckets: Vec<(u32, BucketMeasure)>,
}

impl Sample {
    /// From the passes since the last choice. Without at least two it is empty.
    pub fn new(
        passes: &[Pass],
        buckets: &BTreeMap<u32, MeteredBucket>,
        link: &mut LinkMeter,
        per_byte_before: f64,
    ) -> Sample {
        let seconds = |duration: std::time::Duration| duration.as_secs_f64();
        let periods = passes.windows(2).map(|pair| seconds(pair[1].start - pair[0].start));
        let pairs = periods.clone().zip(&passes[..passes.len().saturating_sub(1)]);
        let compute = pairs.map(|(period, pass)| (period - seconds(pass.exposed)).max(0.0));
        let mut ready: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for (bucket, when) in passes.iter().flat_map(|pass| &pass.ready) {
            ready.entry(*bucket).or_default().push(seconds(*when));
        }
        let mut measured: Vec<_> = ready
            .into_iter()
            .filter_map(|(number, when)| {
                let metered = buckets.get(&number)?;
                // Of models that take turns, each has its buckets in some of the passes only.
                let share = (when.len() as f64 / passes.len() as f64).min(1.0);
                let bucket = BucketMeasure {
                    ready: median(when),
                    elements: share * metered.elements as f64,
                    bits_per_element: f64::from(metered.bits_per_element),
                    within_host: metered.within_host_seconds,
                };
                Some((number, bucket))
            })
            .collect();
        measured.sort_by(|(_, one), (_, other)| one.ready.total_cmp(&other.ready));
        measured.drain(..measured.len().saturating_sub(MOST_BUCKETS));
        Sample {
            step: median(periods.collect()),
            compute: median(compute.collect()),
            backward: median(passes.iter().map(|pass| seconds(pass.backward)).collect()),
            per_byte: link.take(per_byte_before),
            buckets: measured,
            ..Sample::default()
        }
    }

    pub fn with_costs(self, per_element: [f64; LADDER.len()], contention: f64) -> Sample {
        Sample { per_element, contention, ..self }
    }

    /// The numbers of all ranks. `seq` is the number of the collective that comes next.
    pub fn gather(
        &self,
        fabric: &mut Fabric,
        seq: u64,
        deadline: Instant,
    ) -> Result<Vec<Sample>, Failure> {
        fabric.swap(&self.encode(seq), deadline)?;
        let decode = |(rank, message): (usize, &Vec<u8>)| {
            Sample::decode(seq, message).map_err(|reason| Failure::Garbled { rank, reason })
        };
        fabric.inbox().iter().enumerate().map(decode).collect()
    }

    fn encode(&self, seq: u64) -> Vec<u8> {
        let Sample { step, compute, backward, per_byte, contention, audited, per_element, .. } =
            self;
        let layout = Layout {
            step: (*step).into(),
            compute: (*compute).into(),
            backward: (*backward).into(),
            per_byte: (*per_byte).into(),
            contention: (*contention).into(),
            audited: audited.map(F64::from),
            per_element: per_element.map(F64::from),
        };
        let mut message = Envelope::new(Tag::Measures, seq).as_bytes().to_vec();
        message.extend_from_slice(layout.as_bytes());
        for (number, bucket) in &self.buckets {
            let layout = BucketLayout {
                number: (*number).into(),
                bits_per_element: (bucket.bits_per_element as u32).into(),
                ready: bucket.ready.into(),
                elements: bucket.elements.into(),
                within_host: bucket.within_host.into(),
            };
            message.extend_from_slice(layout.as_bytes());
        }
        message
    }

    fn decode(seq: u64, message: &[u8]) -> Result<Sample, String> {
        let damaged = || format!("{} bytes in place of what it measured", message.len());
        let (envelope, rest) = Envelope::open(message).ok_or_else(damaged)?;
        if !envelope.is(Tag::Measures, seq) {
            return Err(format!(
                "it is at something else (#{}) while this rank chooses how to send gradients, \
                 at #{seq}",
                envelope.seq()
            ));
        }
        let (layout, rest) = Layout::ref_from_prefix(rest).map_err(|_| damaged())?;
        let buckets = <[BucketLayout]>::ref_from_bytes(rest).map_err(|_| damaged())?;
        let bucket = |bucket: &BucketLayout| {
            let measure = BucketMeasure {
                ready: sound(bucket.ready),
                elements: sound(bucket.elements),
                bits_per_element: f64::from(bucket.bits_per_element.get()),
                within_host: sound(bucket.within_host),
            };
            (bucket.number.get(), measure)
        };
        Ok(Sample {
            step: sound(layout.step),
            compute: sound(layout.compute),
            backward: sound(layout.backward),
            per_byte: sound(layout.per_byte),
            contention: sound(layout.contention),
            audited: layout.audited.map(sound),
            per_element: layout.per_element.map(sound),
            buckets: buckets.iter().map(bucket).collect(),
        })
    }
}

/// The worst of what all ranks have measured. The same numbers in the same order give the same result.
pub fn combine(samples: &[Sample], hosts: usize) -> Measure {
    let worst = |of: fn(&Sample) -> f64| samples.iter().map(of).fold(0.0, f64::max);
    let mut per_element = [0.0; LADDER.len()];
    let mut buckets: BTreeMap<u32, BucketMeasure> = BTreeMap::new();
    for sample in samples {
        for (worst, one) in per_element.iter_mut().zip(sample.per_element) {
            *worst = one.max(*worst);
        }
        for (number, one) in &sample.buckets {
            let worst = buckets.entry(*number).or_default();
            *worst = BucketMeasure {
                ready: worst.ready.max(one.ready),
                elements: worst.elements.max(one.elements),
                bits_per_element: worst.bits_per_element.max(one.bits_per_element),
                within_host: worst.within_host.max(one.within_host),
            };
        }
    }
    let mut buckets: Vec<_> = buckets.into_values().collect();
    buckets.sort_by(|one, other| one.ready.total_cmp(&other.ready));
    Measure {
        step: worst(|sample| sample.step),
        compute: worst(|sample| sample.compute),
        backward: worst(|sample| sample.backward),
        per_byte: worst(|sample| sample.per_byte),
        per_element,
        contention: worst(|sample| sample.contention),
        buckets,
        hosts: hosts as f64,
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    step: F64,
    compute: F64,
    backward: F64,
    per_byte: F64,
    contention: F64,
    audited: [F64; 2],
    per_element: [F64; LADDER.len()],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct BucketLayout {
    number: U32,
    bits_per_element: U32,
    ready: F64,
    elements: F64,
    within_host: F64,
}

/// A number of a peer; 0 in place of one that cannot have been measured.
fn sound(number: F64) -> f64 {
    // Products of a few such numbers stay finite.
    const LARGEST: f64 = 1e30;
    let number = number.get();
    if (0.0..=LARGEST).contains(&number) { number } else { 0.0 }
}

/// 0 without any numbers.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn the_times_of_a_link_are_the_last_ones() {
        let mut link = LinkMeter::default();
        (0..MOST_SAMPLES).for_each(|_| link.add(1 << 20, 1.0));
        (0..MOST_SAMPLES).for_each(|_| link.add(1 << 20, 2.0));
        assert_eq!(link.take(5.0), 2.0 / f64::from(1 << 20));
        assert_eq!(link.take(5.0), 5.0);
    }

    #[test]
    fn a_few_bytes_tell_that_a_link_has_become_faster_but_not_that_it_has_become_slower() {
        let mut link = LinkMeter::default();
        for (seconds, expected) in [(0.002, 1e-6), (0.02, 1e-6), (0.001, 5e-7)] {
            link.add(2000, seconds);
            assert_eq!(link.take(1e-6), expected);
        }
        link.add(2000, 0.001);
        link.add(1_000_000, 3.0);
        assert_eq!(link.take(1e-6), 3e-6);
        link.add(2000, 0.002);
        assert_eq!(link.take(0.0), 1e-6, "all that is known is better than nothing");
    }

    fn sample(buckets: usize) -> Sample {
        let bucket = |number: usize| {
            let measure = BucketMeasure {
                ready: 0.1 * number as f64,
                elements: 1e6,
                bits_per_element: 32.0,
                within_host: 1e-3,
            };
            (number as u32, measure)
        };
        Sample {
            step: 0.4,
            compute: 0.3,
            backward: 0.2,
            per_byte: 8e-9,
            contention: 0.5,
            audited: [0.25, 2.0],
            per_element: [1e-9; LADDER.len()],
            buckets: (0..buckets).map(bucket).collect(),
        }
    }

    #[test]
    fn a_sample_survives_the_wire() {
        for buckets in [0, 1, 7] {
            let sample = sample(buckets);
            assert_eq!(Sample::decode(9, &sample.encode(9)), Ok(sample));
        }
    }

    #[test]
    fn a_rank_at_another_collective_is_told_from_one_that_measures() {
        let told = Sample::decode(9, &sample(1).encode(8)).unwrap_err();
        assert!(told.contains("(#8) while this rank chooses"), "{told}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..300), is_measure in any::<bool>()
        ) {
            let mut bytes = bytes;
            if is_measure && bytes.len() > 16 {
                bytes.splice(..16, Envelope::new(Tag::Measures, 9).as_bytes().iter().copied());
            }
            if let Ok(sample) = Sample::decode(9, &bytes) {
                let predicted = combine(&[sample], 2).predict(3);
                prop_assert!(!predicted.is_nan());
            }
        }
    }

    #[test]
    fn of_all_ranks_the_worst_numbers_count_in_whatever_order_they_come() {
        let slow = Sample { per_byte: 1e-6, step: 0.9, ..sample(2) };
        let fast = sample(3);
        let both = combine(&[slow.clone(), fast.clone()], 2);
        assert_eq!(both, combine(&[fast, slow], 2));
        assert_eq!((both.per_byte, both.step, both.buckets.len()), (1e-6, 0.9, 3));
    }

    #[test]
    fn a_late_peer_does_not_make_a_link_slow() {
        let mut link = LinkMeter::default();
        for seconds in [0.010, 0.011, 0.9, 0.5, 0.012] {
            link.add(1_000_000, seconds);
        }
        link.add(10, 0.5);
        assert_eq!(link.take(1.0), 0.011 / 1e6);
    }

    #[test]
    fn a_step_is_measured_from_pass_to_pass_and_computing_is_what_is_not_waiting() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let pass = |number: u64| Pass {
            start: start + ms(100 * number),
            backward: ms(40),
            exposed: ms(30),
            ready: vec![(5, ms(0)), (6, ms(25))],
        };
        let metered =
            MeteredBucket { elements: 10, bits_per_element: 32, within_host_seconds: 0.0 };
        let buckets = BTreeMap::from([(5, metered), (6, metered)]);
        let passes: Vec<_> = (0..5).map(pass).collect();
        let sample = Sample::new(&passes, &buckets, &mut LinkMeter::default(), 3e-9);
        let close = |number: f64, expected: f64| assert!((number - expected).abs() < 1e-9);
        close(sample.step, 0.1);
        close(sample.compute, 0.07);
        close(sample.backward, 0.04);
        close(sample.buckets[1].1.ready, 0.025);
        assert_eq!(sample.per_byte, 3e-9);
        // A model that trains in every other step has half of its elements in an average pass.
        let every_other = |(index, pass): (usize, &Pass)| Pass {
            ready: if index % 2 == 0 { vec![] } else { pass.ready.clone() },
            ..pass.clone()
        };
        let passes: Vec<_> = passes[1..].iter().enumerate().map(every_other).collect();
        let half = Sample::new(&passes, &buckets, &mut LinkMeter::default(), 3e-9);
        close(half.buckets[1].1.elements, 5.0);
        let none = Sample::new(&[], &buckets, &mut LinkMeter::default(), 0.0);
        assert_eq!((none.step, none.buckets.len()), (0.0, 0));
    }
}
