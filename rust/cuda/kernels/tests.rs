//! Every kernel of kernels.cu, run on the CPU from the same source, against `compress`: bit by bit.
//!
//! All memory that a kernel is given has a margin, which must be as it was; and may begin at an
//! address that is no multiple of 16 bytes.

use super::host::{HostArgument, HostKernels};
use super::launch::{self, LaunchConfig};
use super::{Float, Kernel, NOT_CHOSEN, norm_limit};
use crate::codec::samples::{bits, gradient, lengths, numbers};
use crate::codec::{
    ChunkGrid, Gradient, Momentum, Wire, accumulate, add_norms, add_partial_sum, add_velocity,
    fill, pack, return_unpack_error, scale_for, select, unpack,
};
use crate::simd::element::Element;
use crate::simd::random::Random;
use half::{bf16, f16};
use proptest::prelude::*;
use std::ffi::c_void;
use std::fmt::Debug;

const ELEMENTS: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

// --- memory --------------------------------------------------------------------------------------

const MARGIN: usize = 16;

/// Some elements, with a margin on both sides, so many elements past an address that is aligned for
/// everything.
#[derive(Debug)]
struct Guarded<T> {
    memory: Vec<T>,
    offset: usize,
    start: usize,
    count: usize,
    margin: T,
}

/// At another address, but as far past an aligned one.
impl<T: Copy + PartialEq + Debug> Clone for Guarded<T> {
    fn clone(&self) -> Guarded<T> {
        Guarded::new(self.content(), self.margin, self.offset)
    }
}

impl<T: Copy + PartialEq + Debug> Guarded<T> {
    fn new(content: &[T], margin: T, offset: usize) -> Guarded<T> {
        let mut memory = vec![margin; content.len() + 2 * MARGIN + offset + 16];
        let start = memory.as_ptr().align_offset(16) + MARGIN + offset;
        memory[start..start + content.len()].copy_from_slice(content);
        Guarded { memory, offset, start, count: content.len(), margin }
    }

    fn pointer(&mut self) -> HostArgument {
        HostArgument::of(&mut self.memory[self.start..])
    }

    /// The elements, once the margins are found to be as they were.
    fn content(&self) -> &[T] {
        let (before, rest) = self.memory.split_at(self.start);
        let (content, after) = rest.split_at(self.count);
        let is_margin = |element: &T| *element == self.margin;
        assert!(before.iter().chain(after).all(is_margin), "something beside was written");
        content
    }
}

/// The elements of a gradient of any type, on the CPU and as a kernel is given them.
#[derive(Debug, Clone)]
enum Typed {
    F32(Guarded<f32>),
    Sixteen(Element, Guarded<u16>),
}

impl Typed {
    fn new(element: Element, numbers: &[f32], offset: usize) -> Typed {
        match element {
            Element::F32 => Typed::F32(Guarded::new(numbers, 77.0, offset)),
            _ => {
                let narrow = |number: &f32| match element {
                    Element::F16 => f16::from_f32_const(*number).to_bits(),
                    _ => bf16::from_f32_const(*number).to_bits(),
                };
                let narrow: Vec<u16> = numbers.iter().map(narrow).collect();
                Typed::Sixteen(element, Guarded::new(&narrow, 0xa5a5, offset))
            }
        }
    }

    fn pointer(&mut self) -> HostArgument {
        match self {
            Typed::F32(memory) => memory.pointer(),
            Typed::Sixteen(_, memory) => memory.pointer(),
        }
    }

    /// What the CPU works on: a copy.
    fn owned(&self) -> Owned {
        match self {
            Typed::F32(memory) => Owned::F32(memory.content().to_vec()),
            Typed::Sixteen(element, memory) => Owned::Sixteen(*element, memory.content().to_vec()),
        }
    }
}

/// A gradient on the CPU.
#[derive(Debug, Clone)]
enum Owned {
    F32(Vec<f32>),
    Sixteen(Element, Vec<u16>),
}

impl Owned {
    fn borrow(&mut self) -> Gradient<'_> {
        match self {
            Owned::F32(numbers) => Gradient::F32(numbers),
            Owned::Sixteen(Element::F16, bits) => Gradient::F16(bits),
            Owned::Sixteen(_, bits) => Gradient::BF16(bits),
        }
    }

    /// The bits of every element, with one NaN for all.
    fn bits(&self) -> Vec<u32> {
        match self {
            Owned::F32(numbers) => bits(numbers),
            Owned::Sixteen(Element::F16, halves) => {
                bits(&halves.iter().map(|x| f16::from_bits(*x).to_f32_const()).collect::<Vec<_>>())
            }
            Owned::Sixteen(_, halves) => {
                bits(&halves.iter().map(|x| bf16::from_bits(*x).to_f32_const()).collect::<Vec<_>>())
            }
        }
    }

    /// The same without making NaNs equal.
    fn exact_bits(&self) -> Vec<u32> {
        match self {
            Owned::F32(numbers) => exact_bits(numbers),
            Owned::Sixteen(_, halves) => halves.iter().map(|half| u32::from(*half)).collect(),
        }
    }
}

fn exact_bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

fn null() -> HostArgument {
    HostArgument::Pointer(std::ptr::null_mut::<c_void>())
}

fn run(kernel: Kernel, config: LaunchConfig, arguments: &[HostArgument]) {
    if !config.is_empty() {
        // SAFETY: the tests here give every kernel memory of the sizes that they tell it.
        unsafe { HostKernels::get().launch(kernel, config, arguments) };
    }
}

fn float(element: Element) -> Float {
    Float::of(element).expect("an element that is compressed")
}

// --- the kernels, as they are called -------------------------------------------------------------

/// What a host keeps and is given, as a kernel sees it.
#[derive(Debug, Clone)]
struct Device {
    grid: ChunkGrid,
    element: Element,
    gradient: Typed,
    residual: Guarded<f32>,
    velocity: Guarded<f32>,
    momentum: Option<Momentum>,
    clears_velocity: bool,
    clamp: f32,
}

impl Device {
    fn chunk(&self) -> HostArgument {
        HostArgument::Unsigned(self.grid.chunk_len as u32)
    }

    fn elements(&self) -> HostArgument {
        HostArgument::Long(self.grid.elements as u64)
    }

    /// The norms of residual and gradient.
    fn accumulate(&mut self) -> (Vec<f32>, Vec<f32>) {
        let blank = vec![-7.0; self.grid.chunks()];
        let (mut norms, mut gradient_norms) =
            (Guarded::new(&blank, 77.0, 0), Guarded::new(&blank, 77.0, 1));
        let momentum = self.momentum.unwrap_or(Momentum { factor: 0.0, nesterov: false });
        let arguments = [
            self.gradient.pointer(),
            self.residual.pointer(),
            if self.momentum.is_some() { self.velocity.pointer() } else { null() },
            self.elements(),
            self.chunk(),
            HostArgument::Float(momentum.factor),
            HostArgument::Unsigned(momentum.nesterov.into()),
            HostArgument::Float(self.clamp),
            norms.pointer(),
            gradient_norms.pointer(),
        ];
        let kernel = Kernel::Accumulate(float(self.element));
        run(kernel, launch::accumulate(self.grid), &arguments);
        (norms.content().to_vec(), gradient_norms.content().to_vec())
    }

    /// The bytes on the wire, with a slot for each chosen chunk.
    fn pack(&mut self, sums: &[f32], chosen: &[u32], wire: Wire, offset: usize) -> Vec<u8> {
        let each = wire.element_bytes();
        let blank = vec![0xa5; chosen.len() * self.grid.chunk_len * each];
        // The offset in elements, of which a margin of bytes knows nothing.
        let mut out = Guarded::new(&blank, 0x5a, offset * each);
        let (mut sums, mut chosen) = (sums.to_vec(), chosen.to_vec());
        let arguments = [
            self.residual.pointer(),
            if self.momentum.is_some() { self.velocity.pointer() } else { null() },
            self.elements(),
            self.chunk(),
            HostArgument::of(&mut sums),
            HostArgument::of(&mut chosen),
            HostArgument::Unsigned(chosen.len() as u32),
            HostArgument::Unsigned(self.clears_velocity.into()),
            HostArgument::Float(self.clamp),
            out.pointer(),
        ];
        run(Kernel::Pack(wire.into()), launch::pack(self.grid, chosen.len()), &arguments);
        out.content().to_vec()
    }

    fn unpack(&mut self, sums: &[f32], slots: &[u32], wire: Wire, bytes: &[u8], keeps_rest: bool) {
        let (mut sums, mut slots) = (sums.to_vec(), slots.to_vec());
        let mut wire_memory = Guarded::new(bytes, 0x5a, 0);
        let arguments = [
            wire_memory.pointer(),
            if keeps_rest { self.residual.pointer() } else { null() },
            self.elements(),
            self.chunk(),
            HostArgument::of(&mut sums),
            HostArgument::of(&mut slots),
            HostArgument::Float(self.clamp),
            self.gradient.pointer(),
        ];
        let kernel = Kernel::Unpack { wire: wire.into(), gradient: float(self.element) };
        run(kernel, launch::unpack(self.grid), &arguments);
        assert_eq!(wire_memory.content(), bytes, "what came over the wire is only read");
    }
}

/// The chosen chunks, and of every chunk its place among them.
fn select_on_device(sums: &[f32], count: usize) -> (Vec<u32>, Vec<u32>) {
    let room = count.min(sums.len());
    let mut chosen = Guarded::new(&vec![7; room], 0xa5a5, 0);
    let mut slots = Guarded::new(&vec![7; sums.len()], 0xa5a5, 0);
    let mut sums = sums.to_vec();
    let arguments = [
        HostArgument::of(&mut sums),
        HostArgument::Unsigned(sums.len() as u32),
        HostArgument::Unsigned(count as u32),
        chosen.pointer(),
        slots.pointer(),
    ];
    run(Kernel::Select, launch::select(), &arguments);
    (chosen.content().to_vec(), slots.content().to_vec())
}

// --- the same on the CPU --------------------------------------------------------------------------

/// What a host keeps and is given, as `compress` sees it.
#[derive(Debug, Clone)]
struct Host {
    grid: ChunkGrid,
    gradient: Owned,
    residual: Vec<f32>,
    velocity: Vec<f32>,
    momentum: Option<Momentum>,
    clears_velocity: bool,
    clamp: f32,
}

impl Host {
    fn of(device: &Device) -> Host {
        Host {
            grid: device.grid,
            gradient: device.gradient.owned(),
            residual: device.residual.content().to_vec(),
            velocity: device.velocity.content().to_vec(),
            momentum: device.momentum,
            clears_velocity: device.clears_velocity,
            clamp: device.clamp,
        }
    }

    fn accumulate(&mut self) -> (Vec<f32>, Vec<f32>) {
        let mut room = vec![0.0; 2 * self.grid.chunk_len];
        let mut both = (Vec::new(), Vec::new());
        for range in (0..self.grid.chunks()).map(|index| self.grid.range(index)) {
            let velocity = &mut self.velocity[range.clone()];
            let momentum = self.momentum.map(|momentum| (velocity, momentum));
            let residual = &mut self.residual[range.clone()];
            let mut whole = self.gradient.borrow();
            let mut part = whole.part(range);
            let norms = accumulate(&mut part, residual, momentum, &mut room);
            // A kernel clears what is poisoned too; here that is the caller's business.
            fill(&mut part, 0.0);
            let is_finite = norms.residual.is_finite();
            both.0.push(if is_finite { norms.residual.min(self.clamp) } else { norms.residual });
            both.1.push(norms.gradient);
        }
        both
    }

    /// As `scale_for`, but for what was limited.
    fn scale(&self, sum: f32, wire: Wire) -> f32 {
        let is_limited = sum.is_finite() && sum >= self.clamp;
        scale_for(if is_limited { f32::MAX } else { sum }, wire)
    }

    fn pack(&mut self, sums: &[f32], chosen: &[u32], wire: Wire) -> Vec<u8> {
        let slot_bytes = self.grid.chunk_len * wire.element_bytes();
        let mut out = vec![0; chosen.len() * slot_bytes];
        for (chunk, slot) in chosen.iter().zip(out.chunks_mut(slot_bytes.max(1))) {
            let (range, sum) = (self.grid.range(*chunk as usize), sums[*chunk as usize]);
            if sum.is_finite() {
                let scale = self.scale(sum, wire);
                let slot = &mut slot[..range.len() * wire.element_bytes()];
                pack(&mut self.residual[range.clone()], scale, wire, slot);
                if self.momentum.is_some() && self.clears_velocity {
                    self.velocity[range].fill(0.0);
                }
            }
        }
        out
    }

    fn unpack(&mut self, sums: &[f32], slots: &[u32], wire: Wire, bytes: &[u8], keeps_rest: bool) {
        let slot_bytes = self.grid.chunk_len * wire.element_bytes();
        for (index, (sum, slot)) in sums.iter().zip(slots).enumerate() {
            let (range, scale) = (self.grid.range(index), self.scale(*sum, wire));
            let mut whole = self.gradient.borrow();
            let mut part = whole.part(range.clone());
            if !sum.is_finite() {
                fill(&mut part, *sum);
            } else if *slot != NOT_CHOSEN {
                let start = *slot as usize * slot_bytes;
                let bytes = &bytes[start..start + range.len() * wire.element_bytes()];
                unpack(bytes, wire, scale, &mut part);
                let residual = keeps_rest.then(|| &mut self.residual[range]);
                return_unpack_error(bytes, wire, scale, &mut part, residual);
            }
        }
    }

    fn assert_is(&self, device: &Device, when: &str) {
        assert_eq!(device.gradient.owned().bits(), self.gradient.bits(), "gradient {when}");
        let residual = device.residual.content();
        assert_eq!(exact_bits(residual), exact_bits(&self.residual), "residual {when}");
        let velocity = device.velocity.content();
        assert_eq!(exact_bits(velocity), exact_bits(&self.velocity), "velocity {when}");
    }
}

// --- samples -------------------------------------------------------------------------------------

fn momenta() -> impl Strategy<Value = Option<Momentum>> {
    let some = (prop_oneof![Just(0.0f32), Just(0.9), 0.0f32..1.0], any::<bool>());
    prop::option::of(some.prop_map(|(factor, nesterov)| Momentum { factor, nesterov }))
}

fn elements() -> impl Strategy<Value = Element> {
    prop::sample::select(ELEMENTS.to_vec())
}

fn wires() -> impl Strategy<Value = Wire> {
    prop::sample::select(Wire::ALL.to_vec())
}

/// A host with few elements, of every kind of number.
fn small_devices() -> impl Strategy<Value = Device> {
    let numbers =
        lengths().prop_flat_map(|length| (gradient(length), numbers(length), numbers(length)));
    let clamp = prop::sample::select(vec![f32::MAX, norm_limit(2), norm_limit(64), 2.0]);
    (numbers, 1usize..200, elements(), momenta(), clamp, (0usize..4, 0usize..4, any::<bool>()))
        .prop_map(|((gradient, residual, velocity), chunk, element, momentum, clamp, offsets)| {
            Device {
                grid: ChunkGrid {
                    elements: residual.len(),
                    chunk_len: chunk.min(residual.len().max(1)),
                },
                element,
                gradient: Typed::new(element, &gradient, offsets.0),
                residual: Guarded::new(&residual, 77.0, offsets.1),
                velocity: Guarded::new(&velocity, 77.0, offsets.1),
                momentum,
                clears_velocity: offsets.2,
                clamp,
            }
        })
}

/// A host with chunks that are longer than a tile, or than all that registers hold. Its numbers are
/// made of a seed: so many are too much for proptest. Some chunks are poisoned.
fn large_devices() -> impl Strategy<Value = Device> {
    let chunk = prop_oneof![
        2 => prop::sample::select(vec![1024usize, 4096, 8192, 32768, 36864]),
        1 => 1000usize..9000,
        1 => prop::sample::select(vec![4095, 4097, 4100, 32764, 32769, 40000, 65536]),
    ];
    let bad = prop::option::weighted(0.4, (any::<prop::sample::Index>(), 0usize..3));
    (chunk, 0.1f64..2.6, any::<u64>(), bad, elements(), momenta(), prop::option::of(1usize..4))
        .prop_map(|(chunk, chunks, seed, bad, element, momentum, offset)| {
            let elements = ((chunk as f64 * chunks) as usize).max(1);
            let mut random = Random(seed | 1);
            let mut gradient = random.numbers(elements);
            if let Some((place, kind)) = bad {
                gradient[place.index(elements)] =
                    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
            }
            Device {
                grid: ChunkGrid { elements, chunk_len: chunk },
                element,
                gradient: Typed::new(element, &gradient, offset.unwrap_or(0)),
                residual: Guarded::new(&random.numbers(elements), 77.0, 0),
                velocity: Guarded::new(&random.numbers(elements), 77.0, 0),
                momentum,
                clears_velocity: seed % 2 == 0,
                clamp: f32::MAX,
            }
        })
}

impl Random {
    /// Of both signs and of sizes that differ by thousands, so that sums round.
    fn numbers(&mut self, count: usize) -> Vec<f32> {
        let mut number = || {
            let bits = self.next();
            let mantissa = (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            mantissa * 2f32.powi((bits & 15) as i32 - 8)
        };
        (0..count).map(|_| number()).collect()
    }
}

// --- tests ---------------------------------------------------------------------------------------

fn check_accumulation(mut device: Device) {
    let mut host = Host::of(&device);
    let norms = device.accumulate();
    let norms_then = host.accumulate();
    assert_eq!(exact_bits(&norms.0), exact_bits(&norms_then.0), "norms of the residual");
    assert_eq!(exact_bits(&norms.1), exact_bits(&norms_then.1), "norms of the gradient");
    host.assert_is(&device, "after accumulation");
}

/// A whole step of some hosts on one side by kernels, on the other by `compress`. The ring of both
/// is that of the CPU, but nothing that a hop rounds off comes back: NCCL gives nothing back.
fn check_step(mut devices: Vec<Device>, count: usize, wire: Wire) {
    let mut hosts: Vec<Host> = devices.iter().map(Host::of).collect();
    let mut sums = vec![0.0; devices[0].grid.chunks()];
    for (device, host) in devices.iter_mut().zip(&mut hosts) {
        let norms = device.accumulate();
        assert_eq!(exact_bits(&norms.0), exact_bits(&host.accumulate().0));
        add_norms(&mut sums, &norms.0);
    }
    let (chosen, slots) = select_on_device(&sums, count);
    let mut chosen_then = Vec::new();
    select(&sums, count, &mut chosen_then);
    assert_eq!(chosen, chosen_then);

    let mut summed: Option<Vec<u8>> = None;
    for (device, host) in devices.iter_mut().zip(&mut hosts) {
        let mut sent = device.pack(&sums, &chosen, wire, 0);
        assert_eq!(sent, host.pack(&sums, &chosen, wire), "on the wire");
        host.assert_is(device, "after packing");
        if let Some(incoming) = summed {
            let mut rounded_off = vec![0.0; sent.len() / wire.element_bytes()];
            add_partial_sum(&mut sent, &incoming, wire, &mut rounded_off);
        }
        summed = Some(sent);
    }
    let summed = summed.expect("there is a host");
    for (index, (device, host)) in devices.iter_mut().zip(&mut hosts).enumerate() {
        device.unpack(&sums, &slots, wire, &summed, index == 0);
        host.unpack(&sums, &slots, wire, &summed, index == 0);
        host.assert_is(device, "at the end");
    }
    let delivered = |device: &Device| device.gradient.owned().exact_bits();
    let first = delivered(&devices[0]);
    assert!(devices.iter().all(|device| delivered(device) == first), "all are given the same");
}

proptest! {
    #[test]
    fn accumulation_is_that_of_the_cpu(device in small_devices()) {
        check_accumulation(device);
    }

    #[test]
    fn a_step_is_that_of_the_cpu(
        device in small_devices(), other in any::<u64>(), hosts in 1usize..4, count in 0usize..12,
        wire in wires(),
    ) {
        let mut random = Random(other | 1);
        let mut devices = vec![device];
        for _ in 1..hosts {
            let numbers = random.numbers(devices[0].grid.elements);
            let mut another = devices[0].clone();
            another.gradient = Typed::new(another.element, &numbers, 1);
            devices.push(another);
        }
        check_step(devices, count, wire);
    }

    #[test]
    fn packing_is_that_of_the_cpu_wherever_the_wire_begins(
        mut device in small_devices(), offset in 0usize..4, wire in wires(),
        sums in prop::collection::vec(prop_oneof![
            4 => 0.0f32..1e9, 1 => Just(0.0), 1 => Just(f32::MAX), 1 => Just(f32::INFINITY),
            1 => Just(f32::NAN), 1 => 1e-40f32..1e-30,
        ], 1000),
    ) {
        // Sums of other ranks count too, so those here need not be the norms of these residuals,
        // but they must be large enough for them.
        let mut host = Host::of(&device);
        let (norms, sums) = (device.accumulate().0, &sums[..device.grid.chunks()]);
        host.accumulate();
        let mut total = norms.clone();
        add_norms(&mut total, sums);
        let chosen: Vec<u32> = (0..total.len() as u32).filter(|index| index % 3 != 1).collect();
        let sent = device.pack(&total, &chosen, wire, offset);
        prop_assert_eq!(sent, host.pack(&total, &chosen, wire));
        host.assert_is(&device, "after packing");
    }

    #[test]
    fn unpacking_any_sums_is_that_of_the_cpu(
        mut device in small_devices(), wire in wires(), keeps_rest in any::<bool>(),
        seed in any::<u64>(), sum in prop_oneof![
            3 => 0.0f32..1e9, 1 => Just(f32::MAX), 1 => Just(f32::INFINITY), 1 => Just(f32::NAN)
        ],
    ) {
        let mut random = Random(seed | 1);
        let chunks = device.grid.chunks();
        let sums: Vec<f32> = (0..chunks).map(|i| if i % 2 == 0 { sum } else { i as f32 }).collect();
        let chosen = (0..chunks as u32).map(|i| if i % 4 == 3 { NOT_CHOSEN } else { i - i / 4 });
        let slots: Vec<u32> = chosen.collect();
        // Any bits, also such as are infinite or NaN.
        let bytes = chunks * device.grid.chunk_len * wire.element_bytes();
        let wire_bytes: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let mut host = Host::of(&device);
        device.unpack(&sums, &slots, wire, &wire_bytes, keeps_rest);
        host.unpack(&sums, &slots, wire, &wire_bytes, keeps_rest);
        host.assert_is(&device, "after unpacking");
    }

    #[test]
    fn selection_is_that_of_the_cpu(
        sums in prop::collection::vec(prop_oneof![
            4 => prop::sample::select(vec![0.0, -0.0, 1.0, 2.0, 1e-40, f32::MAX]),
            4 => 0.0f32..1e6,
            2 => (0u32..0x7f80_0000).prop_map(f32::from_bits),
            1 => -1e3f32..0.0,
            1 => prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN]),
        ], 0..300),
        count in 0usize..330,
    ) {
        check_selection(&sums, count);
    }

    #[test]
    fn a_dense_step_is_that_of_the_cpu(device in small_devices(), factor in 0.0f32..1.0) {
        for nesterov in [false, true] {
            let (mut device, momentum) = (device.clone(), Momentum { factor, nesterov });
            let mut host = Host::of(&device);
            add_velocity(&mut host.gradient.borrow(), &mut host.velocity, momentum);
            let arguments = [
                device.gradient.pointer(),
                device.velocity.pointer(),
                device.elements(),
                HostArgument::Float(factor),
                HostArgument::Unsigned(nesterov.into()),
            ];
            let config = launch::add_velocity(device.grid.elements);
            run(Kernel::AddVelocity(float(device.element)), config, &arguments);
            host.assert_is(&device, "after a dense step");
        }
    }

    #[test]
    fn rescaling_is_that_of_the_cpu(
        values in lengths().prop_flat_map(numbers), offset in 0usize..4,
        factor in prop_oneof![0.0f32..4.0, Just(1e30), Just(1e-30), Just(65536.0)],
    ) {
        // As `Bucket::rescale` does it.
        let then: Vec<f32> =
            values.iter().map(|value| (value * factor).clamp(f32::MIN, f32::MAX)).collect();
        let mut memory = Guarded::new(&values, 77.0, offset);
        let arguments =
            [memory.pointer(), HostArgument::Long(values.len() as u64), HostArgument::Float(factor)];
        run(Kernel::Rescale, launch::rescale(values.len()), &arguments);
        prop_assert_eq!(exact_bits(memory.content()), exact_bits(&then));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn accumulation_of_long_chunks_is_that_of_the_cpu(device in large_devices()) {
        check_accumulation(device);
    }

    #[test]
    fn a_step_with_long_chunks_is_that_of_the_cpu(
        device in large_devices(), count in 0usize..4, wire in wires(),
    ) {
        check_step(vec![device], count, wire);
    }
}

fn check_selection(sums: &[f32], count: usize) {
    let (chosen, slots) = select_on_device(sums, count);
    let mut chosen_then = Vec::new();
    select(sums, count, &mut chosen_then);
    assert_eq!(chosen, chosen_then);
    for (index, slot) in slots.iter().enumerate() {
        let place = chosen.iter().position(|chosen| *chosen as usize == index);
        assert_eq!(*slot, place.map_or(NOT_CHOSEN, |place| place as u32), "chunk {index}");
    }
}

#[test]
fn selection_among_more_chunks_than_threads_is_that_of_the_cpu() {
    let mut random = Random(9);
    // Random ones, few different ones (ties across blocks of threads), and one value only.
    let random_sums: Vec<f32> = random.numbers(5000).iter().map(|x| x.abs()).collect();
    let few: Vec<f32> = (0..5000).map(|_| (random.next() % 3) as f32).collect();
    let poisoned: Vec<f32> =
        (0..3000).map(|i| if i % 3 == 0 { f32::NAN } else { i as f32 }).collect();
    for sums in [random_sums, few, vec![1.5; 4097], poisoned, vec![f32::NAN; 1500]] {
        for count in [0, 1, 2, 31, 32, 33, 1023, 1024, 1025, 2500, sums.len() - 1, sums.len(), 9999]
        {
            check_selection(&sums, count);
        }
    }
}

#[test]
fn every_half_and_bfloat_widens_as_in_the_half_crate() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = all.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
    for (wire, widen) in [
        (Wire::F16, (|bits| f16::from_bits(bits).to_f32_const()) as fn(u16) -> f32),
        (Wire::BF16, |bits| bf16::from_bits(bits).to_f32_const()),
    ] {
        let mut device = device_of(&vec![0.0; all.len()], &vec![0.0; all.len()]);
        // With this sum the scale is 1.
        device.unpack(&[32768.0], &[0], wire, &bytes, false);
        let then: Vec<f32> = all.iter().map(|bits| widen(*bits)).collect();
        assert_eq!(device.gradient.owned().bits(), bits(&then), "{wire:?}");
    }
}

/// One chunk of f32.
fn device_of(gradient: &[f32], velocity: &[f32]) -> Device {
    Device {
        grid: ChunkGrid { elements: gradient.len(), chunk_len: gradient.len() },
        element: Element::F32,
        gradient: Typed::new(Element::F32, gradient, 0),
        residual: Guarded::new(&vec![0.0; gradient.len()], 77.0, 0),
        velocity: Guarded::new(velocity, 77.0, 0),
        momentum: None,
        clears_velocity: false,
        clamp: f32::MAX,
    }
}

#[test]
fn ties_limits_and_nans_narrow_as_in_the_half_crate() {
    // Every exponent, with each mantissa that is or is beside a tie of either type or a carry, or
    // that keeps a NaN's payload only in bits that are lost.
    let mut mantissas = vec![0, 0x40_0000, 0x7f_ffff, 0x7f_f000, 0x7f_8000];
    for bit in 0..23 {
        let tie: u32 = 1 << bit;
        mantissas.extend([tie, tie - 1, tie + 1, (tie * 3) & 0x7f_ffff, 0x7f_ffff - tie]);
    }
    let all = (0..512u32).flat_map(|top| mantissas.iter().map(move |low| (top << 23) | low));
    let all: Vec<f32> = all.map(f32::from_bits).collect();
    for (element, narrow) in [
        (Element::F16, (|x| f16::from_f32_const(x).to_f32_const()) as fn(f32) -> f32),
        (Element::BF16, |x| bf16::from_f32_const(x).to_f32_const()),
    ] {
        // A velocity without a factor is the gradient, rounded to its type.
        let mut velocity = Guarded::new(&all, 77.0, 0);
        let mut gradient = Typed::new(element, &vec![0.0; all.len()], 0);
        let arguments = [
            gradient.pointer(),
            velocity.pointer(),
            HostArgument::Long(all.len() as u64),
            HostArgument::Float(1.0),
            HostArgument::Unsigned(0),
        ];
        let config = launch::add_velocity(all.len());
        run(Kernel::AddVelocity(float(element)), config, &arguments);
        let then: Vec<f32> = all.iter().map(|number| narrow(number + 0.0)).collect();
        assert_eq!(gradient.owned().bits(), bits(&then), "{element:?}");
    }
}

#[test]
fn a_norm_that_was_limited_leaves_room_for_elements_beyond_it() {
    // Two hosts: one has an element that is larger than what its norm is limited to.
    let clamp = norm_limit(2);
    let mut device = Device { clamp, ..device_of(&[3e38, 1.0, 0.0, -2e38], &[0.0; 4]) };
    let (norms, _) = device.accumulate();
    assert_eq!(norms, [clamp]);
    let sent = device.pack(&norms, &[0], Wire::F16, 0);
    let sent: Vec<f16> =
        sent.as_chunks().0.iter().map(|bytes| f16::from_ne_bytes(*bytes)).collect();
    assert!(sent.iter().all(|number| number.is_finite()), "{sent:?}");
    device.unpack(
        &norms,
        &[0],
        Wire::F16,
        &sent.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>(),
        false,
    );
    let Owned::F32(delivered) = device.gradient.owned() else { panic!("it is f32") };
    let total: Vec<f64> = delivered
        .iter()
        .zip(device.residual.content())
        .map(|(a, b)| f64::from(*a) + f64::from(*b))
        .collect();
    assert_eq!(total, [f64::from(3e38f32), 1.0, 0.0, f64::from(-2e38f32)]);
}

#[test]
fn the_table_of_the_host_has_every_kernel_and_no_other() {
    let mut table: Vec<_> =
        HostKernels::get().table().into_iter().map(|(name, _)| name.to_owned()).collect();
    let mut kernels: Vec<_> = Kernel::all().map(|kernel| kernel.name().to_owned()).collect();
    table.sort();
    kernels.sort();
    assert_eq!(table, kernels);
}
