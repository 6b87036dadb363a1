//! The kernels of the quantiser against `codec::quantizer`: whole exchanges of several hosts, bit by
//! bit, of parts, sums, gradients, residuals and sizes.

use super::device::{float, run};
use super::host_kernels::HostArgument;
use super::memory::{Guarded, Typed};
use crate::codec::Gradient;
use crate::codec::quantizer::{
    BLOCK, Content, Levels, Ownership, Quantizer, Stepping, Turn, Workspace, follow, rescale_sizes,
};
use crate::codec::samples::{ELEMENTS, OwnedGradient, bits, gradient, numbers};
use crate::cuda::kernels::{Kernel, launch, rounding_arguments};
use crate::simd::element::Element;
use crate::simd::random::Random;
use half::bf16;
use proptest::prelude::*;
use std::ops::Range;

/// Norms are taken of one block in this many: the same constant is in quantizer.cu.
const SAMPLED: usize = 61;

/// Some processors make such ones.
const UNUSUAL_NAN: f32 = f32::from_bits(0xffb5_4321);

/// The shards of all hosts before an exchange.
#[derive(Debug, Clone)]
struct Shards {
    quantizer: Quantizer,
    element: Element,
    /// By host.
    gradients: Vec<Vec<f32>>,
    residuals: Vec<Vec<f32>>,
    sizes: Vec<u16>,
    /// Where memory begins, in elements behind a boundary.
    offset: usize,
}

/// One host, on which the kernels run.
struct OnDevice {
    quantizer: Quantizer,
    ownership: Ownership,
    element: Element,
    gradient: Typed,
    residual: Guarded<f32>,
    sizes: Guarded<u16>,
}

/// One host, on which `codec` runs.
struct OnCpu {
    quantizer: Quantizer,
    ownership: Ownership,
    gradient: OwnedGradient,
    residual: Vec<f32>,
    sizes: Vec<u16>,
}

impl OnDevice {
    fn elements(&self) -> usize {
        self.residual.content().len()
    }

    fn blocks(&self) -> usize {
        self.elements().div_ceil(BLOCK)
    }

    /// Memory for parts or sums.
    fn room(&self) -> Vec<u8> {
        vec![0xa5; Ownership::room(self.blocks()) * self.quantizer.block_bytes()]
    }

    /// The bytes of what an owner has there.
    fn slots(&self, owner: usize) -> Range<usize> {
        let slots = self.ownership.slots(owner, self.blocks());
        let bytes = self.quantizer.block_bytes();
        slots.start * bytes..slots.end * bytes
    }

    fn sizes(&mut self) -> HostArgument {
        match self.quantizer.uses_sizes {
            true => self.sizes.pointer(),
            false => HostArgument::Pointer(std::ptr::null_mut()),
        }
    }

    /// The arguments that all kernels of an exchange begin with.
    fn shard(&mut self) -> Vec<HostArgument> {
        let elements = HostArgument::Long(self.elements() as u64);
        let levels = HostArgument::Unsigned(self.quantizer.levels as u32);
        vec![self.gradient.pointer(), self.residual.pointer(), self.sizes(), elements, levels]
    }

    fn rounding(&self) -> [HostArgument; 3] {
        let [step, margin] = rounding_arguments(self.quantizer.rounding);
        [step, margin, self.quantizer.feedback].map(HostArgument::Float)
    }

    fn hosts(&self) -> [HostArgument; 2] {
        let Ownership { hosts, host } = self.ownership;
        [HostArgument::Unsigned(hosts as u32), HostArgument::Unsigned(host as u32)]
    }

    /// The parts by owner, and the sampled norms.
    fn send(&mut self) -> (Vec<u8>, Vec<f32>) {
        let mut parts = Guarded::new(&self.room(), 0x5a, 0);
        let mut norms = Guarded::new(&vec![-1.0; 2 * self.blocks().div_ceil(SAMPLED)], 77.0, 0);
        let (rounding, hosts) = (self.rounding(), self.hosts());
        let arguments =
            [&self.shard()[..], &rounding, &hosts, &[parts.pointer(), norms.pointer()]].concat();
        let config = launch::quantize(self.blocks());
        run(Kernel::Send(float(self.element)), config, &arguments);
        (parts.content().to_vec(), norms.content().to_vec())
    }

    /// The encoded sums of what this host owns; `received` are the parts of the other hosts.
    fn sum(&mut self, received: &[&[u8]]) -> Vec<u8> {
        let whole_run = Ownership::room(1) * self.quantizer.block_bytes();
        let mut memory = Vec::new();
        for part in received {
            memory.extend_from_slice(part);
            memory.resize(memory.len().next_multiple_of(whole_run), 0x3c);
        }
        let mut received = Guarded::new(&memory, 0x5a, 0);
        let mut sums = Guarded::new(&self.room(), 0x5a, 0);
        let (rounding, hosts) = (self.rounding(), self.hosts());
        let arguments =
            [&self.shard()[..], &rounding, &hosts, &[received.pointer(), sums.pointer()]].concat();
        let owned = self.ownership.slots(self.ownership.host, self.blocks()).len();
        run(Kernel::Sum(float(self.element)), launch::quantize(owned), &arguments);
        let own = self.slots(self.ownership.host);
        let (before, rest) = sums.content().split_at(own.start);
        let (own, after) = rest.split_at(own.len());
        assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "sums of other hosts");
        own.to_vec()
    }

    fn deliver(&mut self, parts: &[u8], sums: &[u8]) {
        let (mut parts, mut sums) = (Guarded::new(parts, 0x5a, 0), Guarded::new(sums, 0x5a, 0));
        let hosts = self.hosts();
        let arguments = [&self.shard()[..], &hosts, &[parts.pointer(), sums.pointer()]].concat();
        let config = launch::quantize(self.blocks());
        run(Kernel::Deliver(float(self.element)), config, &arguments);
    }

    fn follow(&mut self, step: u64) {
        let Turn { first, kept } = Turn::at(step);
        let arguments = [
            self.gradient.pointer(),
            self.sizes.pointer(),
            HostArgument::Long(self.elements() as u64),
            HostArgument::Unsigned(first as u32),
            HostArgument::Float(kept),
        ];
        let config = launch::follow(self.elements(), first);
        run(Kernel::Follow(float(self.element)), config, &arguments);
    }
}

/// Where the next block of each owner goes.
struct Slots {
    next: Vec<usize>,
    block_bytes: usize,
}

impl Slots {
    /// The bytes of the next block of an owner.
    fn next(&mut self, owner: usize) -> Range<usize> {
        let start = self.next[owner] * self.block_bytes;
        self.next[owner] += 1;
        start..start + self.block_bytes
    }
}

impl OnCpu {
    fn blocks(&self) -> usize {
        self.residual.len().div_ceil(BLOCK)
    }

    fn slots(&self) -> Slots {
        let first = |owner| self.ownership.slots(owner, self.blocks()).start;
        let next = (0..self.ownership.hosts).map(first).collect();
        Slots { next, block_bytes: self.quantizer.block_bytes() }
    }

    /// Calls `work` with each block: its index, gradient, residual and sizes.
    fn for_each(&mut self, mut work: impl FnMut(usize, Gradient, &mut [f32], &[u16])) {
        let blocks = self.blocks();
        let OnCpu { quantizer, gradient, residual, sizes, .. } = self;
        let (elements, mut gradient) = (residual.len(), gradient.borrow());
        for block in 0..blocks {
            let range = block * BLOCK..elements.min((block + 1) * BLOCK);
            let sizes = if quantizer.uses_sizes { &sizes[range.clone()] } else { &[] };
            work(block, gradient.part(range.clone()), &mut residual[range], sizes);
        }
    }

    /// The parts by owner, and the sampled norms.
    fn send(&mut self) -> (Vec<u8>, Vec<f32>) {
        let (quantizer, ownership) = (self.quantizer, self.ownership);
        let mut parts = vec![0xa5; Ownership::room(self.blocks()) * quantizer.block_bytes()];
        let mut slots = self.slots();
        let (mut norms, mut workspace) = (Vec::new(), Workspace::default());
        self.for_each(|block, gradient, residual, sizes| {
            let (owner, is_sampled) = (ownership.owner(block), block % SAMPLED == 0);
            let out = &mut parts[slots.next(owner)];
            if owner != ownership.host {
                quantizer.send(&gradient, residual, sizes, out, &mut workspace);
            }
            if is_sampled && owner != ownership.host {
                norms.extend([gradient.l1_norm(), Gradient::F32(residual).l1_norm()]);
            } else if is_sampled {
                norms.extend([0.0, 0.0]);
            }
        });
        (parts, norms.into_iter().map(|norm| norm as f32).collect())
    }

    /// The encoded sums of what this host owns; `received` are the parts of the other hosts.
    fn sum(&mut self, received: &[&[u8]]) -> Vec<u8> {
        let (quantizer, ownership) = (self.quantizer, self.ownership);
        let element = self.gradient.borrow().element();
        let (mut slot, mut encoded, mut workspace) = (0, Vec::new(), Workspace::default());
        self.for_each(|block, gradient, residual, sizes| {
            if ownership.owner(block) != ownership.host {
                return;
            }
            let bytes = slot * quantizer.block_bytes()..(slot + 1) * quantizer.block_bytes();
            slot += 1;
            let mut sum = vec![0.0; residual.len()];
            quantizer.start_sum(&gradient, residual, &mut sum);
            for part in received {
                quantizer.add(&part[bytes.clone()], sizes, &mut sum, &mut workspace);
            }
            let mut out = vec![0; bytes.len()];
            quantizer.send_sum(&mut sum, element, sizes, &mut out, &mut workspace);
            if quantizer.content(&out) == Content::Numbers {
                residual.copy_from_slice(&sum);
            }
            encoded.extend(out);
        });
        encoded
    }

    fn deliver(&mut self, parts: &[u8], sums: &[u8]) {
        let (quantizer, ownership) = (self.quantizer, self.ownership);
        let (mut slots, mut workspace) = (self.slots(), Workspace::default());
        self.for_each(|block, mut gradient, residual, sizes| {
            let owner = ownership.owner(block);
            let slot = slots.next(owner);
            let is_poisoned = quantizer.content(&sums[slot.clone()]) == Content::Poisoned;
            if is_poisoned && owner != ownership.host {
                let sent = &parts[slot.clone()];
                quantizer.take_back(sent, sizes, &gradient, residual, &mut workspace);
            }
            quantizer.deliver(&sums[slot], sizes, &mut gradient, &mut workspace);
        });
    }
}

impl Shards {
    fn hosts(&self) -> impl Iterator<Item = Ownership> {
        let hosts = self.gradients.len();
        (0..hosts).map(move |host| Ownership { hosts, host })
    }

    fn on_device(&self) -> Vec<OnDevice> {
        let one = |ownership: Ownership| OnDevice {
            quantizer: self.quantizer,
            ownership,
            element: self.element,
            gradient: Typed::new(self.element, &self.gradients[ownership.host], self.offset),
            residual: Guarded::new(&self.residuals[ownership.host], 77.0, self.offset),
            sizes: Guarded::new(&self.sizes, 0xa5a5, self.offset),
        };
        self.hosts().map(one).collect()
    }

    fn on_cpu(&self) -> Vec<OnCpu> {
        let one = |ownership: Ownership| OnCpu {
            quantizer: self.quantizer,
            ownership,
            gradient: OwnedGradient::new(self.element, &self.gradients[ownership.host]),
            residual: self.residuals[ownership.host].clone(),
            sizes: self.sizes.clone(),
        };
        self.hosts().map(one).collect()
    }
}

fn assert_same(device: &OnDevice, cpu: &OnCpu, when: &str) {
    assert_eq!(device.gradient.owned().bits(), cpu.gradient.bits(), "gradient {when}");
    assert_eq!(bits(device.residual.content()), bits(&cpu.residual), "residual {when}");
    assert_eq!(device.sizes.content(), cpu.sizes, "sizes {when}");
}

/// A whole exchange of several hosts, by the kernels and by `codec`.
fn check_exchange(shards: &Shards, step: u64) {
    let (mut devices, mut cpus) = (shards.on_device(), shards.on_cpu());
    let hosts = devices.len();
    let mut parts = Vec::new();
    for (device, cpu) in devices.iter_mut().zip(&mut cpus) {
        let ((sent, norms), (expected, expected_norms)) = (device.send(), cpu.send());
        assert_eq!(sent, expected, "parts");
        for (norm, expected) in norms.iter().zip(&expected_norms) {
            assert!((norm - expected).abs() <= 1e-5 * expected || norm == expected, "{norms:?}");
        }
        assert_same(device, cpu, "after sending");
        parts.push(sent);
    }
    let mut sums = Vec::new();
    for (host, (device, cpu)) in devices.iter_mut().zip(&mut cpus).enumerate() {
        let others = (0..hosts).filter(|other| *other != host);
        let received: Vec<&[u8]> = others.map(|other| &parts[other][device.slots(host)]).collect();
        let summed = device.sum(&received);
        assert_eq!(summed, cpu.sum(&received), "sums");
        assert_same(device, cpu, "after summing");
        sums.resize(device.room().len(), 0xa5);
        sums[device.slots(host)].copy_from_slice(&summed);
    }
    for ((device, cpu), parts) in devices.iter_mut().zip(&mut cpus).zip(&parts) {
        device.deliver(parts, &sums);
        cpu.deliver(parts, &sums);
        assert_same(device, cpu, "after delivery");
        device.follow(step);
        follow(&mut cpu.sizes, &mut cpu.gradient.borrow(), step);
        assert_same(device, cpu, "in the end");
    }
}

fn quantizers() -> impl Strategy<Value = Quantizer> {
    let both = (
        prop::sample::select(&Levels::ALL[..]),
        prop::sample::select(&[Stepping::Normalized, Stepping::Proportional][..]),
    );
    both.prop_map(|(levels, stepping)| Quantizer::new(levels, stepping))
}

fn size(number: f32) -> u16 {
    bf16::from_f32(number.abs().min(1e17)).to_bits()
}

fn some_sizes(count: usize) -> impl Strategy<Value = Vec<u16>> {
    let ordinary = prop::collection::vec(0.0f32..1.0, count);
    prop_oneof![
        1 => Just(vec![0; count]),
        3 => ordinary.prop_map(|sizes| sizes.into_iter().map(size).collect()),
        2 => numbers(count).prop_map(|sizes| sizes.into_iter().map(size).collect::<Vec<_>>()),
        // Most are new.
        1 => (numbers(count), 2usize..700).prop_map(|(sizes, apart)| {
            let sizes = sizes.into_iter().enumerate();
            sizes.map(|(at, one)| if at % apart == 1 { size(one) } else { 0 }).collect()
        }),
    ]
}

/// One block, or little more, of all kinds of numbers.
fn small_shards() -> impl Strategy<Value = Shards> {
    let count = prop_oneof![
        prop::sample::select(vec![1, 2, 31, 32, 33, 639, 640, 641]),
        1..=BLOCK,
        BLOCK..3 * BLOCK
    ];
    (quantizers(), prop::sample::select(&ELEMENTS[..]), 1usize..4, count, 0usize..4).prop_flat_map(
        |(quantizer, element, hosts, count, offset)| {
            let gradients = prop::collection::vec(gradient(count), hosts);
            let residuals = prop::collection::vec(numbers(count), hosts);
            (gradients, residuals, some_sizes(count)).prop_map(
                move |(gradients, residuals, sizes)| Shards {
                    quantizer,
                    element,
                    gradients,
                    residuals,
                    sizes,
                    offset,
                },
            )
        },
    )
}

/// Shards of many blocks, so that every host owns some. The numbers come from a seed. Some blocks are
/// poisoned on some host.
fn large_shards() -> impl Strategy<Value = Shards> {
    let bad = prop::collection::vec((any::<prop::sample::Index>(), 0usize..4, 0usize..4), 0..4);
    let count =
        prop_oneof![1usize..20_000, 40_000usize..60_000, (1usize..80).prop_map(|n| n * BLOCK)];
    let kind = (quantizers(), prop::sample::select(&ELEMENTS[..]));
    (kind, 2usize..5, count, any::<u64>(), bad).prop_map(
        |((quantizer, element), hosts, count, seed, bad)| {
            let mut random = Random(seed | 1);
            let mut gradients: Vec<Vec<f32>> = (0..hosts).map(|_| random.numbers(count)).collect();
            for (place, host, kind) in bad {
                gradients[host % hosts][place.index(count)] =
                    [f32::NAN, UNUSUAL_NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
            }
            let residuals = (0..hosts).map(|_| random.numbers(count)).collect();
            let sizes = random.numbers(count).into_iter().map(size).collect();
            Shards { quantizer, element, gradients, residuals, sizes, offset: 0 }
        },
    )
}

proptest! {
    #[test]
    fn an_exchange_of_any_numbers_is_that_of_the_cpu(shards in small_shards(), step in 0u64..40) {
        check_exchange(&shards, step);
    }

    #[test]
    fn any_bytes_are_decoded_as_on_the_cpu(
        shards in small_shards(), seed in any::<u64>(), level in any::<u16>(),
    ) {
        let mut random = Random(seed | 1);
        for (mut device, mut cpu) in shards.on_device().into_iter().zip(shards.on_cpu()) {
            let block_bytes = device.quantizer.block_bytes();
            let mut bytes = || {
                let mut bytes = device.room();
                bytes.fill_with(|| random.next() as u8);
                for block in bytes.chunks_mut(block_bytes) {
                    // A level that is finite more often than not.
                    let level = level ^ u16::from(block[5] & 3);
                    block[..2].copy_from_slice(&level.to_le_bytes());
                }
                bytes
            };
            let (parts, sums) = (bytes(), bytes());
            device.deliver(&parts, &sums);
            cpu.deliver(&parts, &sums);
            assert_same(&device, &cpu, "after delivery");
        }
    }

    #[test]
    fn sizes_are_rescaled_as_on_the_cpu(
        sizes in (1usize..3000).prop_flat_map(some_sizes),
        factor in prop_oneof![0.0f32..4.0, Just(1e30), Just(1e-30), Just(65536.0)],
    ) {
        let mut expected = sizes.clone();
        rescale_sizes(&mut expected, factor);
        let mut memory = Guarded::new(&sizes, 0xa5a5, 1);
        let elements = HostArgument::Long(sizes.len() as u64);
        let arguments = [memory.pointer(), elements, HostArgument::Float(factor)];
        run(Kernel::ScaleSizes, launch::scale_sizes(sizes.len()), &arguments);
        prop_assert_eq!(memory.content(), &expected[..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn an_exchange_of_many_blocks_is_that_of_the_cpu(shards in large_shards(), step in 0u64..40) {
        check_exchange(&shards, step);
    }
}

#[test]
fn every_level_takes_part_in_some_exchange() {
    // So that none is left out by chance: with and without sizes, in all types.
    for levels in Levels::ALL {
        for stepping in [Stepping::Normalized, Stepping::Proportional] {
            for element in ELEMENTS {
                let mut random = Random(levels as u64 + 3);
                let mut numbers = || random.numbers(21_000);
                let sizes = numbers().into_iter().map(size).collect();
                let shards = Shards {
                    quantizer: Quantizer::new(levels, stepping),
                    element,
                    gradients: vec![numbers(), numbers(), numbers()],
                    residuals: vec![numbers(), numbers(), numbers()],
                    sizes,
                    offset: 1,
                };
                check_exchange(&shards, 3);
            }
        }
    }
}

#[test]
fn numbers_of_every_magnitude_are_exchanged_as_on_the_cpu() {
    for exponent in (-149..=127).step_by(2) {
        for levels in Levels::ALL {
            let scale = 2f64.powi(exponent);
            let mut random = Random(exponent.unsigned_abs().into());
            let mut numbers = || -> Vec<f32> {
                // At most 1 before they are scaled.
                let numbers = random.numbers(700).into_iter();
                numbers.map(|number| (f64::from(number / 128.0) * scale) as f32).collect()
            };
            let shards = Shards {
                quantizer: Quantizer::new(levels, Stepping::Proportional),
                element: Element::F32,
                gradients: vec![numbers(), numbers()],
                residuals: vec![numbers(), numbers()],
                sizes: vec![0; 700],
                offset: 0,
            };
            check_exchange(&shards, 0);
        }
    }
}

#[test]
fn the_samples_of_norms_are_of_the_same_blocks() {
    let source = include_str!("../quantizer.cu");
    assert!(source.contains(&format!("const unsigned SAMPLED = {SAMPLED};")));
}
