//! What holds of the quantiser for any gradient, and that all instruction sets agree with the
//! reference to the bit.

use super::levels::{Int3, Int4, Int8, Packing, Quinary, Ternary};
use super::{
    BLOCK, Content, Levels, Quantizer, Rounding, Stepping, Workspace, follow, reference, sizes,
};
use crate::codec::Gradient;
use crate::codec::samples::{ELEMENTS, OwnedGradient, available_sets, bits, gradient, numbers};
use crate::simd::element::Element;
use half::bf16;
use proptest::prelude::*;

fn quantizers() -> impl Strategy<Value = Quantizer> {
    let both = (
        prop::sample::select(&Levels::ALL[..]),
        prop::sample::select(&[Stepping::Normalized, Stepping::Proportional][..]),
    );
    both.prop_map(|(levels, stepping)| Quantizer::new(levels, stepping))
}

fn counts() -> impl Strategy<Value = usize> {
    prop_oneof![prop::sample::select(vec![1, 2, 31, 33, 639, 640]), 1..=BLOCK]
}

/// The sizes of a block, as numbers of any magnitude that occurs, or none yet.
fn some_sizes(count: usize) -> impl Strategy<Value = Vec<u16>> {
    let from = |size: f32| bf16::from_f32(size.abs().min(1e17)).to_bits();
    let ordinary = prop::collection::vec(0.0f32..1.0, count);
    prop_oneof![
        1 => Just(vec![0; count]),
        3 => ordinary.prop_map(move |sizes| sizes.into_iter().map(from).collect()),
        2 => numbers(count).prop_map(move |sizes| sizes.into_iter().map(from).collect::<Vec<_>>()),
    ]
}

/// A block of one host.
#[derive(Debug, Clone)]
struct Sample {
    quantizer: Quantizer,
    element: Element,
    gradient: OwnedGradient,
    residual: Vec<f32>,
    sizes: Vec<u16>,
}

fn samples(
    gradients: impl Fn(usize) -> BoxedStrategy<Vec<f32>> + Clone,
) -> impl Strategy<Value = Sample> {
    (quantizers(), counts(), prop::sample::select(&ELEMENTS[..])).prop_flat_map(
        move |(quantizer, count, element)| {
            let parts = (gradients(count), numbers(count), some_sizes(count));
            parts.prop_map(move |(gradient, residual, sizes)| Sample {
                quantizer,
                element,
                gradient: OwnedGradient::new(element, &gradient),
                residual,
                sizes: if quantizer.uses_sizes { sizes } else { Vec::new() },
            })
        },
    )
}

impl Sample {
    fn due(&self) -> Vec<f32> {
        reference::due(&self.gradient.numbers(), &self.residual, self.quantizer.feedback)
    }

    fn is_finite(&self) -> bool {
        self.due().iter().all(|number| number.is_finite())
    }

    /// Sends the block. Returns its bytes and the new residual.
    fn send(&mut self, workspace: &mut Workspace) -> (Vec<u8>, Vec<f32>) {
        let Sample { quantizer, residual, sizes, .. } = self;
        let (mut out, mut residual) = (vec![0xaa; quantizer.block_bytes()], residual.clone());
        quantizer.send(&self.gradient.borrow(), &mut residual, sizes, &mut out, workspace);
        (out, residual)
    }

    /// What the owner gets of the block.
    fn arrived(&self, bytes: &[u8], workspace: &mut Workspace) -> Vec<f32> {
        let mut sum = vec![0.0; self.residual.len()];
        self.quantizer.add(bytes, &self.sizes, &mut sum, workspace);
        sum
    }
}

fn any_gradient(count: usize) -> BoxedStrategy<Vec<f32>> {
    gradient(count).boxed()
}

/// Finite numbers whose sums do not overflow.
fn moderate(count: usize) -> BoxedStrategy<Vec<f32>> {
    let halved = |number: f32| number / 8.0;
    numbers(count).prop_map(move |numbers| numbers.into_iter().map(halved).collect()).boxed()
}

fn difference(left: &[f32], right: &[f32]) -> Vec<f32> {
    left.iter().zip(right).map(|(left, right)| left - right).collect()
}

proptest! {
    #[test]
    fn all_instruction_sets_and_the_reference_send_the_same(mut sample in samples(any_gradient)) {
        let expected = reference::encode(&sample.quantizer, &sample.due(), &sample.sizes);
        let left = expected.left.clone().unwrap_or_else(|| sample.residual.clone());
        for set in available_sets() {
            let (bytes, residual) = sample.send(&mut Workspace::with(set));
            prop_assert_eq!(&bytes, &expected.bytes, "{:?}", set);
            prop_assert_eq!(bits(&residual), bits(&left), "{:?}", set);
        }
    }

    #[test]
    fn all_instruction_sets_and_the_reference_decode_the_same(
        sample in samples(any_gradient),
        bytes in prop::collection::vec(any_byte(), BLOCK + 2),
    ) {
        let Sample { quantizer, element, sizes, residual, .. } = &sample;
        let bytes = &bytes[..quantizer.block_bytes()];
        let expected = reference::decode(quantizer, bytes, sizes, residual.len());
        let stored = OwnedGradient::new(*element, &expected);
        for set in available_sets() {
            let mut workspace = Workspace::with(set);
            let mut delivered = sample.gradient.clone();
            quantizer.deliver(bytes, sizes, &mut delivered.borrow(), &mut workspace);
            prop_assert_eq!(delivered.bits(), stored.bits(), "{:?}", set);
            let mut sum = residual.clone();
            quantizer.add(bytes, sizes, &mut sum, &mut workspace);
            let added: Vec<f32> = residual.iter().zip(&expected).map(|(a, b)| a + b).collect();
            prop_assert_eq!(bits(&sum), bits(&added), "{:?}", set);
        }
    }

    #[test]
    fn all_instruction_sets_and_the_reference_follow_the_same(
        (sizes, delivered) in counts().prop_flat_map(|count| (some_sizes(count), any_gradient(count))),
        element in prop::sample::select(&ELEMENTS[..]),
        time in 1u64..9,
    ) {
        let mut delivered = OwnedGradient::new(element, &delivered);
        let mut expected = sizes.clone();
        reference::follow(&mut expected, &delivered.numbers(), time);
        prop_assert!(expected.iter().all(|size| bf16::from_bits(*size).is_finite()));
        for set in available_sets() {
            let mut followed = sizes.clone();
            sizes::follow_with(set, &mut followed, &mut delivered.borrow(), 8 * (time - 1));
            prop_assert_eq!(&followed, &expected, "{:?}", set);
        }
    }

    /// What is sent and what is left are what was due, to the rounding of one addition.
    #[test]
    fn what_is_not_sent_is_left(mut sample in samples(moderate)) {
        let mut workspace = Workspace::default();
        let feedback = f64::from(sample.quantizer.feedback);
        let (bytes, left) = sample.send(&mut workspace);
        let sent = sample.arrived(&bytes, &mut workspace);
        let gradient = sample.gradient.numbers();
        for index in 0..left.len() {
            let kept = feedback * f64::from(sample.residual[index]);
            let due = f64::from(gradient[index]) + kept;
            let (sent, left) = (f64::from(sent[index]), f64::from(left[index]));
            if !due.is_finite() || !sample.is_finite() {
                continue;
            }
            let size = f64::from(gradient[index]).abs() + kept.abs() + sent.abs() + left.abs();
            let error = (sent + left - due).abs();
            prop_assert!(error <= size * 1e-7 + 1e-44, "{} + {} for {}", sent, left, due);
        }
    }

    /// The level that is sent keeps the projection on what was due, so that nothing shrinks. Only
    /// outliers count as smaller than they are.
    #[test]
    fn unbiased_levels_keep_the_projection(mut sample in samples(|count| {
        let most = prop_oneof![9 => -1.0f32..1.0, 1 => -30.0f32..30.0];
        prop::collection::vec(most, count).boxed()
    })) {
        let Rounding::Unbiased { step, margin } = sample.quantizer.rounding else { return Ok(()) };
        sample.residual.fill(0.0);
        let mut workspace = Workspace::default();
        let (bytes, _) = sample.send(&mut workspace);
        let sent = sample.arrived(&bytes, &mut workspace);
        let steps = reference::steps(&sample.sizes).unwrap_or(vec![1.0; sent.len()]);
        let over_steps = |numbers: &[f32]| -> Vec<f64> {
            numbers.iter().zip(&steps).map(|(number, step)| f64::from(number / step)).collect()
        };
        let (due, sent) = (over_steps(&sample.due()), over_steps(&sent));
        // What overflows counts as the largest number, which is not what was due.
        prop_assume!(due.iter().all(|due| due.is_finite()));
        let mean_square = due.iter().map(|due| due * due).sum::<f64>() / due.len() as f64;
        let largest = reference::multiples(sample.quantizer.levels).pop().unwrap();
        let reach = f64::from(step) * mean_square.sqrt() * f64::from(largest + margin);
        let (mut squares, mut projection) = (0.0, 0.0);
        for (due, sent) in due.iter().zip(&sent) {
            let within = due.clamp(-reach, reach);
            squares += within * within;
            projection += within * sent;
        }
        // The level has 8 bits.
        prop_assert!((projection - squares).abs() <= squares / 200.0, "{} {}", projection, squares);
    }

    #[test]
    fn no_bytes_are_out_of_range(bytes in prop::collection::vec(any_byte(), BLOCK)) {
        fn unpack<P: Packing>(levels: Levels, bytes: &[u8]) {
            let mut symbols = [0; BLOCK];
            P::unpack(&bytes[..P::PACKED_BYTES], &mut symbols);
            assert!(symbols.iter().all(|symbol| u16::from(*symbol) <= 2 * u16::from(P::LARGEST) + 1));
            let expected = reference::unpack(levels, &bytes[..P::PACKED_BYTES]);
            assert!(symbols.iter().zip(expected).all(|(symbol, it)| usize::from(*symbol) == it));
        }
        unpack::<Int8>(Levels::Int8, &bytes);
        unpack::<Int4>(Levels::Int4, &bytes);
        unpack::<Int3>(Levels::Int3, &bytes);
        unpack::<Quinary>(Levels::Quinary, &bytes);
        unpack::<Ternary>(Levels::Ternary, &bytes);
    }

    #[test]
    fn symbols_survive_packing(numbers in prop::collection::vec(any_byte(), BLOCK)) {
        fn survive<P: Packing>(levels: Levels, numbers: &[u8]) {
            let mut symbols = [0; BLOCK];
            for (symbol, number) in symbols.iter_mut().zip(numbers) {
                *symbol = (u16::from(*number) % (2 * u16::from(P::LARGEST) + 1)) as u8;
            }
            let mut packed = vec![0; P::PACKED_BYTES];
            P::pack(&symbols, &mut packed);
            assert_eq!(packed, reference::pack(levels, &symbols.map(usize::from)));
            let mut unpacked = [0xaa; BLOCK];
            P::unpack(&packed, &mut unpacked);
            assert_eq!(unpacked, symbols);
        }
        survive::<Int8>(Levels::Int8, &numbers);
        survive::<Int4>(Levels::Int4, &numbers);
        survive::<Int3>(Levels::Int3, &numbers);
        survive::<Quinary>(Levels::Quinary, &numbers);
        survive::<Ternary>(Levels::Ternary, &numbers);
    }

    /// All hosts deliver the same, and what is left on all of them is what is missing.
    #[test]
    fn hosts_deliver_the_same_and_lose_nothing(
        quantizer in quantizers(),
        elements in prop::sample::select(vec![1usize, 639, 640, 641, 2000]),
        element in prop::sample::select(&ELEMENTS[..]),
        hosts in 2usize..5,
        seed in any::<u64>(),
    ) {
        let mut random = seed | 1;
        let mut all: Vec<Host> =
            (0..hosts).map(|_| Host::new(element, elements, &mut random)).collect();
        for step in 0..10 {
            let expected = due_of_all(&quantizer, &all);
            exchange(&quantizer, &mut all, step);
            for host in &all[1..] {
                prop_assert_eq!(host.gradient.exact_bits(), all[0].gradient.exact_bits());
                prop_assert_eq!(&host.sizes, &all[0].sizes);
            }
            let delivered = all[0].gradient.numbers();
            for (index, due) in expected.iter().enumerate() {
                let left: f64 = all.iter().map(|host| f64::from(host.residual[index])).sum();
                let total = f64::from(delivered[index]) + left;
                prop_assert!((total - due).abs() < 1e-4, "{} of {}", total, due);
            }
            all.iter_mut().for_each(|host| host.gradient = random_gradient(element, elements, &mut random));
        }
        prop_assert_eq!(all[0].sizes.iter().any(|size| *size != 0), quantizer.uses_sizes);
    }

    /// Infinity or NaN on any host reaches the whole block on all, and changes nothing that is kept.
    #[test]
    fn infinity_and_nan_reach_the_whole_block_and_nothing_else(
        quantizer in quantizers(),
        element in prop::sample::select(&ELEMENTS[..]),
        poison in prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN]),
        poisoned_host in 0usize..3,
        index in 0usize..2000,
    ) {
        let (elements, mut random) = (2000, index as u64 + 1);
        let mut all: Vec<Host> =
            (0..3).map(|_| Host::new(element, elements, &mut random)).collect();
        (0..8).for_each(|step| exchange(&quantizer, &mut all, step));
        let mut numbers = all[poisoned_host].gradient.numbers();
        numbers[index] = poison;
        all[poisoned_host].gradient = OwnedGradient::new(element, &numbers);
        let before = all.clone();
        exchange(&quantizer, &mut all, 8 - (index / BLOCK) as u64);
        let block = index / BLOCK * BLOCK..elements.min((index / BLOCK + 1) * BLOCK);
        for (at_host, host) in all.iter().enumerate() {
            for (at, number) in host.gradient.numbers().into_iter().enumerate() {
                let is_as_it_should = match (block.contains(&at), poison.is_nan()) {
                    (true, true) => number.is_nan(),
                    (true, false) => !number.is_finite(),
                    (false, _) => number.is_finite(),
                };
                prop_assert!(is_as_it_should, "{}: {}", at, number);
            }
            prop_assert!(host.residual.iter().all(|number| number.is_finite()));
            // Of the poisoned block, nothing is kept of this step: the owner keeps what it had, and
            // the others what they would have added.
            let part = match block.start / BLOCK % all.len() == at_host || at_host == poisoned_host {
                true => 1.0,
                false => quantizer.feedback,
            };
            let own = before[at_host].gradient.numbers();
            for at in block.clone() {
                let error = (host.residual[at] - part * before[at_host].residual[at]).abs();
                let most = if own[at].is_finite() { 1e-6 * (1.0 + own[at].abs()) } else { 0.0 };
                prop_assert!(error <= most, "host {}, element {}: {}", at_host, at, error);
            }
            // The turn was that of the poisoned block.
            if quantizer.uses_sizes {
                prop_assert_eq!(&host.sizes[block.clone()], &before[0].sizes[block.clone()]);
            }
        }
    }

    /// Nothing overflows into what is kept, however large or small numbers are.
    #[test]
    fn residuals_and_sizes_stay_finite(mut sample in samples(|count| numbers(count).boxed())) {
        let Sample { quantizer, element, .. } = sample;
        let mut workspace = Workspace::default();
        let (bytes, residual) = sample.send(&mut workspace);
        prop_assert!(residual.iter().all(|number| number.is_finite()));
        let content = quantizer.content(&bytes);
        let expected = if sample.is_finite() { Content::Numbers } else { Content::Poisoned };
        prop_assert_eq!(content, expected);
        let (mut sum, mut out) = (sample.due(), bytes.clone());
        quantizer.send_sum(&mut sum, element, &sample.sizes, &mut out, &mut workspace);
        prop_assert_eq!(&bytes, &out);
        if content == Content::Numbers {
            prop_assert!(sum.iter().all(|number| number.is_finite()));
        }
        let mut delivered = sample.gradient.clone();
        quantizer.deliver(&out, &sample.sizes, &mut delivered.borrow(), &mut workspace);
        if quantizer.uses_sizes {
            follow(&mut sample.sizes, &mut delivered.borrow(), 0);
            prop_assert!(sample.sizes.iter().all(|size| bf16::from_bits(*size).is_finite()));
        }
    }
}

fn any_byte() -> impl Strategy<Value = u8> {
    prop_oneof![4 => any::<u8>(), 1 => Just(0), 1 => Just(0xff)]
}

/// A host of an exchange.
#[derive(Debug, Clone)]
struct Host {
    gradient: OwnedGradient,
    residual: Vec<f32>,
    sizes: Vec<u16>,
}

impl Host {
    fn new(element: Element, elements: usize, random: &mut u64) -> Host {
        let gradient = random_gradient(element, elements, random);
        Host { gradient, residual: vec![0.0; elements], sizes: vec![0; elements] }
    }
}

/// Elements of different sizes, each with its own one.
fn random_gradient(element: Element, elements: usize, random: &mut u64) -> OwnedGradient {
    let mut next = || {
        *random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*random >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let number = |index: usize| next() / (1 + index % 7) as f32;
    OwnedGradient::new(element, &(0..elements).map(number).collect::<Vec<f32>>())
}

/// What is due of all hosts together.
fn due_of_all(quantizer: &Quantizer, hosts: &[Host]) -> Vec<f64> {
    let mut due = vec![0.0; hosts[0].residual.len()];
    for host in hosts {
        for ((due, gradient), residual) in
            due.iter_mut().zip(host.gradient.numbers()).zip(&host.residual)
        {
            *due += f64::from(gradient) + f64::from(quantizer.feedback) * f64::from(*residual);
        }
    }
    due
}

/// A whole exchange in memory: both legs for every block, and the sizes.
fn exchange(quantizer: &Quantizer, hosts: &mut [Host], step: u64) {
    let elements = hosts[0].residual.len();
    let mut workspace = Workspace::default();
    for (block, start) in (0..elements).step_by(BLOCK).enumerate() {
        let range = start..elements.min(start + BLOCK);
        let owner = block % hosts.len();
        let sizes = match quantizer.uses_sizes {
            true => hosts[0].sizes[range.clone()].to_vec(),
            false => Vec::new(),
        };
        let mut sum = vec![0.0; range.len()];
        let mut parts = vec![vec![0; quantizer.block_bytes()]; hosts.len()];
        for (index, host) in hosts.iter_mut().enumerate() {
            let mut gradient = host.gradient.borrow();
            let gradient = gradient.part(range.clone());
            let residual = &mut host.residual[range.clone()];
            match index == owner {
                true => quantizer.start_sum(&gradient, residual, &mut sum),
                false => {
                    quantizer.send(&gradient, residual, &sizes, &mut parts[index], &mut workspace);
                }
            }
        }
        for (_, part) in parts.iter().enumerate().filter(|(index, _)| *index != owner) {
            quantizer.add(part, &sizes, &mut sum, &mut workspace);
        }
        let element = hosts[0].gradient.borrow().element();
        let mut out = vec![0; quantizer.block_bytes()];
        quantizer.send_sum(&mut sum, element, &sizes, &mut out, &mut workspace);
        for (index, host) in hosts.iter_mut().enumerate() {
            let mut gradient = host.gradient.borrow();
            let mut gradient = gradient.part(range.clone());
            let residual = &mut host.residual[range.clone()];
            match (quantizer.content(&out), index == owner) {
                (Content::Numbers, true) => residual.copy_from_slice(&sum),
                (Content::Poisoned, false) => {
                    let part = &parts[index];
                    quantizer.take_back(part, &sizes, &gradient, residual, &mut workspace);
                }
                _ => {}
            }
            quantizer.deliver(&out, &sizes, &mut gradient, &mut workspace);
        }
    }
    if quantizer.uses_sizes {
        hosts.iter_mut().for_each(|host| {
            follow(&mut host.sizes, &mut host.gradient.borrow(), step);
        });
    }
}

/// Blocks that are all alike: what is delivered of them is as near as the level's 8 bits allow.
#[test]
fn blocks_of_one_number_arrive_as_they_are() {
    let mut workspace = Workspace::default();
    for levels in Levels::ALL {
        let quantizer = Quantizer::new(levels, Stepping::Normalized);
        let sizes = if quantizer.uses_sizes { vec![0; BLOCK] } else { Vec::new() };
        for number in [0.0, 1.0, -3.0, 1e-20, 1e-30, 1e30, 3e38, -3e38] {
            let (mut gradient, mut residual) = ([number; BLOCK], [0.0; BLOCK]);
            let mut out = vec![0; quantizer.block_bytes()];
            let mut gradient = Gradient::F32(&mut gradient);
            quantizer.send(&gradient, &mut residual, &sizes, &mut out, &mut workspace);
            quantizer.deliver(&out, &sizes, &mut gradient, &mut workspace);
            let Gradient::F32(delivered) = gradient else { unreachable!() };
            for delivered in delivered {
                let error = (f64::from(*delivered) - f64::from(number)).abs();
                assert!(
                    error <= f64::from(number).abs() / 250.0,
                    "{levels:?} {number} {delivered}"
                );
            }
        }
    }
}

/// Too small for a level: nothing is sent, and all of it is left.
#[test]
fn denormal_blocks_are_left() {
    let number = f32::from_bits(5);
    for levels in Levels::ALL {
        let quantizer = Quantizer::new(levels, Stepping::Normalized);
        let sizes = if quantizer.uses_sizes { vec![0; BLOCK] } else { Vec::new() };
        let (mut gradient, mut residual) = ([number; BLOCK], [0.0; BLOCK]);
        let (mut out, mut sum) = (vec![0; quantizer.block_bytes()], [0.0; BLOCK]);
        let mut workspace = Workspace::default();
        let gradient = Gradient::F32(&mut gradient);
        quantizer.send(&gradient, &mut residual, &sizes, &mut out, &mut workspace);
        quantizer.add(&out, &sizes, &mut sum, &mut workspace);
        assert_eq!((sum, residual), ([0.0; BLOCK], [number; BLOCK]), "{levels:?}");
    }
}

#[test]
fn what_f16_cannot_hold_is_infinity_and_leaves_nothing() {
    for levels in Levels::ALL {
        let quantizer = Quantizer::new(levels, Stepping::Normalized);
        let sizes = if quantizer.uses_sizes { vec![0; 3] } else { Vec::new() };
        let (mut sum, mut out) = ([7e4, -7e4, 7e4], vec![0; quantizer.block_bytes()]);
        let mut workspace = Workspace::default();
        quantizer.send_sum(&mut sum, Element::F16, &sizes, &mut out, &mut workspace);
        assert_eq!(sum, [0.0; 3], "{levels:?}");
        let mut delivered = [0; 3];
        quantizer.deliver(&out, &sizes, &mut Gradient::F16(&mut delivered), &mut workspace);
        assert_eq!(delivered, [0x7c00, 0xfc00, 0x7c00], "{levels:?}");
    }
}

/// The first update of a block is the mean of its mean square and the element's own, the next ones
/// count the same, and later ones fade.
#[test]
fn sizes_start_from_the_mean_square_of_the_block() {
    let (mut alternating, mut zeros) = (vec![0.0; 2 * BLOCK], vec![0.0; 2 * BLOCK]);
    (0..2 * BLOCK).step_by(2).for_each(|index| alternating[index] = 2.0);
    let mut sizes = vec![0; 2 * BLOCK];
    let squares = |sizes: &[u16], index: usize| bf16::from_bits(sizes[index]).to_f32().powi(2);
    follow(&mut sizes, &mut Gradient::F32(&mut alternating), 0);
    // The mean square is 2.
    assert!((squares(&sizes, 0) - 3.0).abs() < 0.02 && (squares(&sizes, 1) - 1.0).abs() < 0.01);
    assert!(sizes[BLOCK..].iter().all(|size| *size == 0), "the second block has another turn");
    follow(&mut sizes, &mut Gradient::F32(&mut zeros), 8);
    assert!((squares(&sizes, 0) - 2.0).abs() < 0.03, "{}", squares(&sizes, 0));
    follow(&mut sizes, &mut Gradient::F32(&mut zeros), 8000);
    assert!((squares(&sizes, 0) - 2.0 * 0.850_763).abs() < 0.03, "{}", squares(&sizes, 0));
    follow(&mut sizes, &mut Gradient::F32(&mut alternating), 9 * 8 + 7);
    assert!((squares(&sizes, BLOCK) - 3.0).abs() < 0.02, "a new block at a late step");
}

#[test]
fn sizes_follow_the_unit_of_gradients_and_stay_finite() {
    let of = |sizes: &[f32]| -> Vec<u16> {
        sizes.iter().map(|size| bf16::from_f32(*size).to_bits()).collect()
    };
    let mut sizes = of(&[0.0, 1.0, 3e-20, 2e16]);
    super::rescale_sizes(&mut sizes, 0.5);
    assert_eq!(sizes, of(&[0.0, 0.5, 1.5e-20, 1e16]));
    super::rescale_sizes(&mut sizes, f32::MAX);
    assert_eq!(sizes, of(&[0.0, 1e17, 1e17, 1e17]));
}

#[test]
fn what_was_sent_of_a_poisoned_block_is_taken_back() {
    for levels in Levels::ALL {
        let quantizer = Quantizer::new(levels, Stepping::Normalized);
        let mut random = 1;
        let mut gradient = random_gradient(Element::F32, BLOCK, &mut random);
        let kept = random_gradient(Element::F32, BLOCK, &mut random).numbers();
        let sizes = if quantizer.uses_sizes { vec![0; BLOCK] } else { Vec::new() };
        let (mut residual, mut out) = (kept.clone(), vec![0; quantizer.block_bytes()]);
        let (gradient, mut workspace) = (gradient.borrow(), Workspace::default());
        quantizer.send(&gradient, &mut residual, &sizes, &mut out, &mut workspace);
        quantizer.take_back(&out, &sizes, &gradient, &mut residual, &mut workspace);
        let faded: Vec<f32> = kept.iter().map(|number| quantizer.feedback * number).collect();
        assert!(difference(&residual, &faded).iter().all(|error| error.abs() < 1e-6), "{levels:?}");
    }
}
