//! The kernels of the quantiser: whole exchanges of several hosts, by the kernels and by
//! `codec::quantizer`, bit by bit.

use super::device::{float, run};
use super::host_kernels::HostArgument;
use super::memory::{Guarded, Typed};
use crate::codec::quantizer::{
    BLOCK, Content, Levels, Ownership, Quantizer, RUN, SAMPLED, Stepping, Workspace, first_turn,
    follow, kept_at, rescale_sizes,
};
use crate::codec::samples::{ELEMENTS, OwnedGradient, bits};
use crate::cuda::kernels::{Kernel, launch, number_of};
use crate::simd::element::Element;
use crate::simd::half_precision::BF16;
use crate::simd::number::Stored;
use crate::simd::random::Random;
use HostArgument::{Float, Long, Unsigned};
use proptest::prelude::*;
use std::ops::Range;

/// What a host has of a shard.
#[derive(Clone)]
struct Shard {
    element: Element,
    gradient: Typed,
    residual: Guarded<f32>,
    sizes: Guarded<u16>,
}

/// The same for the CPU.
struct OnCpu {
    gradient: OwnedGradient,
    residual: Vec<f32>,
    sizes: Vec<u16>,
}

fn elements_of(block: usize, elements: usize) -> Range<usize> {
    block * BLOCK..elements.min((block + 1) * BLOCK)
}

fn null() -> HostArgument {
    HostArgument::Pointer(std::ptr::null_mut())
}

/// An exchange of one shard, as one host sees it.
#[derive(Clone, Copy)]
struct Exchange {
    quantizer: Quantizer,
    ownership: Ownership,
    elements: usize,
}

impl Exchange {
    fn blocks(&self) -> usize {
        self.elements.div_ceil(BLOCK)
    }

    fn owned_by(&self, host: usize) -> usize {
        self.ownership.owned_by(host, self.blocks())
    }

    /// Where the bytes of a block are, as the host calculates it: blocks come by owner.
    fn place(&self, block: usize) -> Range<usize> {
        let owner = self.ownership.owner(block);
        let first: usize = (0..owner).map(|host| self.owned_by(host)).sum();
        let before = (0..block).filter(|block| self.ownership.owner(*block) == owner).count();
        let bytes = self.quantizer.block_bytes();
        (first + before) * bytes..(first + before + 1) * bytes
    }

    /// The bytes of the blocks of this host.
    fn region(&self, host: usize) -> Range<usize> {
        let first: usize = (0..host).map(|host| self.owned_by(host)).sum();
        let bytes = self.quantizer.block_bytes();
        first * bytes..(first + self.owned_by(host)) * bytes
    }

    fn sizes<'a>(&self, sizes: &'a [u16], range: &Range<usize>) -> &'a [u16] {
        if self.quantizer.uses_sizes { &sizes[range.clone()] } else { &[] }
    }

    fn wire(&self) -> Guarded<u8> {
        Guarded::new(&vec![0xa5; self.blocks() * self.quantizer.block_bytes()], 0x5a, 0)
    }

    /// The arguments that all kernels have, from the sizes on to the levels.
    fn common(&self, shard: &mut Shard) -> [HostArgument; 4] {
        let sizes = if self.quantizer.uses_sizes { shard.sizes.pointer() } else { null() };
        let elements = Long(self.elements as u64);
        let kind = Unsigned(number_of(self.quantizer.levels));
        [sizes, elements, Unsigned(float(shard.element).number()), kind]
    }

    fn how(&self) -> [HostArgument; 4] {
        let Ownership { hosts, host } = self.ownership;
        let step = self.quantizer.unbiased_step().unwrap_or(0.0);
        let ownership = [Unsigned(hosts as u32), Unsigned(host as u32)];
        [Float(self.quantizer.feedback), Float(step), ownership[0], ownership[1]]
    }

    /// Returns the parts by place, and the norms of sampled blocks of residual and gradient.
    fn quantize(&self, shard: &mut Shard) -> (Guarded<u8>, Vec<f32>, Vec<f32>) {
        let samples = vec![-7.0; self.blocks().div_ceil(SAMPLED)];
        let (mut norms, mut of_gradient) =
            (Guarded::new(&samples, 77.0, 0), Guarded::new(&samples, 77.0, 1));
        let mut parts = self.wire();
        let memory = [shard.gradient.pointer(), shard.residual.pointer()];
        let out = [parts.pointer(), norms.pointer(), of_gradient.pointer()];
        let arguments = [&memory[..], &self.common(shard), &self.how(), &out].concat();
        run(Kernel::Quantize, launch::quantizer(self.blocks()), &arguments);
        (parts, norms.content().to_vec(), of_gradient.content().to_vec())
    }

    /// Adds up what the others sent, one host's after another's.
    fn sum(&self, shard: &mut Shard, received: &[u8]) -> Guarded<u8> {
        let mut sums = self.wire();
        let mut received = Guarded::new(received, 0x5a, 0);
        let memory = [shard.gradient.pointer(), shard.residual.pointer()];
        let wire = [received.pointer(), sums.pointer()];
        let arguments = [&memory[..], &self.common(shard), &self.how(), &wire].concat();
        let config = launch::quantizer(self.owned_by(self.ownership.host));
        run(Kernel::Sum, config, &arguments);
        sums
    }

    fn deliver(&self, shard: &mut Shard, sums: &[u8], parts: &mut Guarded<u8>) {
        let mut sums = Guarded::new(sums, 0x5a, 0);
        let wire = [sums.pointer(), parts.pointer(), shard.residual.pointer()];
        let last = [self.how()[2], self.how()[3], shard.gradient.pointer()];
        let arguments = [&wire[..], &self.common(shard), &last].concat();
        run(Kernel::Deliver, launch::quantizer(self.blocks()), &arguments);
    }

    /// All of it on the CPU: the same stages for all hosts. Returns the parts by host, and the sums.
    fn on_cpu(&self, hosts: &mut [OnCpu]) -> (Vec<Vec<u8>>, Vec<u8>) {
        let (quantizer, workspace) = (self.quantizer, &mut Workspace::default());
        let bytes = self.blocks() * quantizer.block_bytes();
        let (mut parts, mut sums) = (vec![vec![0; bytes]; hosts.len()], vec![0; bytes]);
        for block in 0..self.blocks() {
            let (range, place) = (elements_of(block, self.elements), self.place(block));
            let owner = self.ownership.owner(block);
            let mut sum = vec![0.0; range.len()];
            for (host, one) in hosts.iter_mut().enumerate() {
                let (mut gradient, residual) =
                    (one.gradient.borrow(), &mut one.residual[range.clone()]);
                let (gradient, out) =
                    (gradient.part(range.clone()), &mut parts[host][place.clone()]);
                let sizes = self.sizes(&one.sizes, &range);
                match host == owner {
                    true => quantizer.start_sum(&gradient, residual, &mut sum),
                    false => quantizer.send(&gradient, residual, sizes, out, workspace),
                }
            }
            let sizes = self.sizes(&hosts[owner].sizes, &range).to_vec();
            for (_, part) in parts.iter().enumerate().filter(|(host, _)| *host != owner) {
                quantizer.add(&part[place.clone()], &sizes, &mut sum, workspace);
            }
            let (element, out) =
                (hosts[owner].gradient.borrow().element(), &mut sums[place.clone()]);
            quantizer.send_sum(&mut sum, element, &sizes, out, workspace);
            for (host, one) in hosts.iter_mut().enumerate() {
                let residual = &mut one.residual[range.clone()];
                let mut gradient = one.gradient.borrow();
                let mut gradient = gradient.part(range.clone());
                match (quantizer.content(&sums[place.clone()]), host == owner) {
                    (Content::Numbers, true) => residual.copy_from_slice(&sum),
                    (Content::Poisoned, false) => {
                        let sent = &parts[host][place.clone()];
                        quantizer.take_back(sent, &sizes, &gradient, residual, workspace);
                    }
                    _ => {}
                }
                quantizer.deliver(&sums[place.clone()], &sizes, &mut gradient, workspace);
            }
        }
        (parts, sums)
    }
}

/// Updates the sizes of a shard from what was delivered at this step.
fn follow_on_device(shard: &mut Shard, elements: usize, step: u64) {
    let first = first_turn(step);
    let arguments = [
        shard.sizes.pointer(),
        shard.gradient.pointer(),
        Long(elements as u64),
        Unsigned(float(shard.element).number()),
        Unsigned(first as u32),
        Float(kept_at(step)),
    ];
    run(Kernel::FollowSizes, launch::follow_sizes(elements, first), &arguments);
}

fn check_exchange(quantizer: Quantizer, mut shards: Vec<Shard>, step: u64) -> Vec<Shard> {
    let hosts = shards.len();
    let elements = shards[0].residual.content().len();
    let of_host = |host| Exchange { quantizer, ownership: Ownership { hosts, host }, elements };
    let on_cpu = |shard: &Shard| OnCpu {
        gradient: shard.gradient.owned(),
        residual: shard.residual.content().to_vec(),
        sizes: shard.sizes.content().to_vec(),
    };
    let mut expected: Vec<OnCpu> = shards.iter().map(on_cpu).collect();
    let (expected_parts, expected_sums) = of_host(0).on_cpu(&mut expected);

    let mut parts = Vec::new();
    for (host, shard) in shards.iter_mut().enumerate() {
        let exchange = of_host(host);
        let before = on_cpu(shard);
        let (encoded, norms, of_gradient) = exchange.quantize(shard);
        for other in (0..hosts).filter(|other| *other != host) {
            let region = exchange.region(other);
            assert_eq!(encoded.content()[region.clone()], expected_parts[host][region], "parts");
        }
        let own = exchange.region(host);
        assert!(encoded.content()[own].iter().all(|byte| *byte == 0xa5), "its own are not encoded");
        check_norms(&exchange, &before, shard, &norms, &of_gradient);
        parts.push(encoded);
    }
    let mut sums = vec![0; expected_sums.len()];
    for (host, shard) in shards.iter_mut().enumerate() {
        let region = of_host(host).region(host);
        let others = parts.iter().enumerate().filter(|(other, _)| *other != host);
        let received: Vec<u8> =
            others.flat_map(|(_, part)| part.content()[region.clone()].to_vec()).collect();
        let encoded = of_host(host).sum(shard, &received);
        sums[region.clone()].copy_from_slice(&encoded.content()[region]);
    }
    assert_eq!(sums, expected_sums, "sums");
    for (host, (shard, expected)) in shards.iter_mut().zip(&mut expected).enumerate() {
        of_host(host).deliver(shard, &sums, &mut parts[host]);
        let gradient = shard.gradient.owned();
        assert_eq!(gradient.exact_bits(), expected.gradient.exact_bits(), "delivered to {host}");
        let residual = shard.residual.content();
        assert_eq!(bits(residual), bits(&expected.residual), "residual of {host}");
        follow_on_device(shard, elements, step);
        follow(&mut expected.sizes, &mut expected.gradient.borrow(), step);
        assert_eq!(shard.sizes.content(), expected.sizes, "sizes of {host}");
    }
    shards
}

#[test]
fn sums_beyond_the_type_of_a_gradient_are_delivered_as_its_largest_number() {
    for (element, largest) in [(Element::F16, 65504.0), (Element::BF16, 3.3895314e38)] {
        let shard = Shard {
            element,
            gradient: Typed::new(element, &[0.9 * largest; 100], 0),
            residual: Guarded::new(&[0.0; 100], 77.0, 0),
            sizes: Guarded::new(&[0; 100], 0xa5a5, 0),
        };
        let hosts = if element == Element::F16 { 2 } else { 1 };
        let quantizer = Quantizer::new(Levels::Int8, Stepping::Normalized);
        for shard in check_exchange(quantizer, vec![shard; hosts], 0) {
            assert!(shard.residual.content().iter().all(|number| number.is_finite()));
            let delivered = shard.gradient.owned().numbers();
            assert!(delivered.iter().all(|number| *number >= 0.89 * largest), "{delivered:?}");
        }
    }
}

/// Norms are for the metrics: they are added up in another order than on the CPU.
fn check_norms(
    exchange: &Exchange,
    before: &OnCpu,
    after: &Shard,
    norms: &[f32],
    of_gradient: &[f32],
) {
    let norm = |numbers: &[f32]| {
        let finite = numbers.iter().filter(|number| number.is_finite());
        finite.map(|number| f64::from(number.abs())).sum::<f64>()
    };
    let is_near = |norm: f32, expected: f64| {
        let expected_by_type = expected as f32;
        norm == expected_by_type || (f64::from(norm) - expected).abs() <= 1e-5 * expected
    };
    let gradient = before.gradient.numbers();
    for (index, block) in (0..exchange.blocks()).step_by(SAMPLED).enumerate() {
        let range = elements_of(block, exchange.elements);
        let is_own = exchange.ownership.owner(block) == exchange.ownership.host;
        let of = |numbers: &[f32]| if is_own { 0.0 } else { norm(&numbers[range.clone()]) };
        let (expected, expected_of_gradient) = (of(after.residual.content()), of(&gradient));
        assert!(is_near(norms[index], expected), "{} is not {expected}", norms[index]);
        assert!(is_near(of_gradient[index], expected_of_gradient), "{}", of_gradient[index]);
    }
}

/// Blocks of all kinds: ordinary ones, tiny and huge ones, zeros, constants, any bits, and some
/// with infinity or NaN.
fn nasty_numbers(random: &mut Random, elements: usize, may_be_poisoned: bool) -> Vec<f32> {
    let mut numbers = random.numbers(elements);
    for block in numbers.chunks_mut(BLOCK) {
        let any_bits = |random: &mut Random| {
            let number = f32::from_bits(random.next() as u32);
            if number.is_finite() { number } else { 1.0 }
        };
        match random.next() % 12 {
            0 => block.fill(0.0),
            1 => block.fill(any_bits(random)),
            2 => block.iter_mut().for_each(|number| *number = any_bits(random)),
            3 => block.iter_mut().for_each(|number| *number *= 1e-40),
            4 => block.iter_mut().for_each(|number| *number *= 1e36),
            5 => block.iter_mut().for_each(|number| *number *= 1e-20),
            6 => block[0] = 1e30,
            7 if may_be_poisoned => {
                let bad = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                let place = random.next() as usize % block.len();
                block[place] = bad[random.next() as usize % 4];
            }
            _ => {}
        }
    }
    numbers
}

fn sizes(random: &mut Random, elements: usize) -> Vec<u16> {
    let numbers = nasty_numbers(random, elements, false);
    // As large as those of `follow` at most. Every sixth block is new.
    let size = |(index, number): (usize, &f32)| match index / BLOCK % 6 {
        3 => 0,
        _ => BF16::narrow(number.abs().min(1e17)).0,
    };
    numbers.iter().enumerate().map(size).collect()
}

fn quantizers() -> impl Strategy<Value = Quantizer> {
    let levels = prop::sample::select(Levels::ALL.to_vec());
    let stepping = prop::sample::select(vec![Stepping::Normalized, Stepping::Proportional]);
    (levels, stepping).prop_map(|(levels, stepping)| Quantizer::new(levels, stepping))
}

fn lengths() -> impl Strategy<Value = usize> {
    let round = RUN * BLOCK;
    prop_oneof![
        2 => 1usize..3 * BLOCK,
        1 => prop::sample::select(vec![BLOCK - 1, BLOCK, BLOCK + 1, round, round + 1, 2 * round]),
        3 => round..5 * round,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_exchange_of_quantised_blocks_is_that_of_the_cpu(
        quantizer in quantizers(), hosts in 1usize..5, elements in lengths(),
        element in prop::sample::select(ELEMENTS.to_vec()), offset in 0usize..3,
        seed in any::<u64>(), step in 0u64..16,
    ) {
        let random = &mut Random(seed | 1);
        // All hosts have the same sizes.
        let sizes = sizes(random, elements);
        let shards = (0..hosts).map(|_| {
            let gradient = nasty_numbers(random, elements, true);
            let residual = nasty_numbers(random, elements, false);
            Shard {
                element,
                gradient: Typed::new(element, &gradient, offset),
                residual: Guarded::new(&residual, 77.0, offset),
                sizes: Guarded::new(&sizes, 0xa5a5, offset),
            }
        });
        check_exchange(quantizer, shards.collect(), step);
    }

    #[test]
    fn new_units_of_sizes_are_those_of_the_cpu(
        elements in 0usize..3000, offset in 0usize..4, seed in any::<u64>(),
        factor in prop_oneof![0.0f32..4.0, Just(1e30), Just(1e-30), Just(65536.0)],
    ) {
        let mut expected = sizes(&mut Random(seed | 1), elements);
        let mut memory = Guarded::new(&expected, 0xa5a5, offset);
        let arguments = [memory.pointer(), Long(elements as u64), Float(factor)];
        run(Kernel::RescaleSizes, launch::rescale_sizes(elements), &arguments);
        rescale_sizes(&mut expected, factor);
        prop_assert_eq!(memory.content(), expected);
    }
}
