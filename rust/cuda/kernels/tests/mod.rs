//! Every kernel, run on the CPU from the same source, against `codec`: bit by bit.

mod device;
mod host_kernels;
mod memory;
mod quantizer;
mod reference;
mod samples;

use super::launch;
use super::{Kernel, NOT_SELECTED, norm_limit};
use crate::codec::samples::{OwnedGradient, bits, exact_bits, lengths, numbers};
use crate::codec::{ChunkGrid, Momentum, Wire, add_norms, add_partial_sum, add_velocity, select};
use crate::simd::element::Element;
use crate::simd::random::Random;
use device::{Device, float, run, select_on_device};
use half::{bf16, f16};
use host_kernels::{HostArgument, HostKernels};
use memory::{Guarded, Typed};
use proptest::prelude::*;
use reference::Host;
use samples::{large_devices, small_devices, wires};

fn check_accumulation(mut device: Device) {
    let mut host = Host::of(&device);
    let norms = device.accumulate();
    let expected = host.accumulate();
    assert_eq!(exact_bits(&norms.0), exact_bits(&expected.0), "norms of the residual");
    assert_eq!(exact_bits(&norms.1), exact_bits(&expected.1), "norms of the gradient");
    host.assert_equals(&device, "after accumulation");
}

/// A whole step of several hosts, by the kernels and by `codec`. Both use the ring of the CPU, but
/// drop what a hop rounds off, as NCCL does.
fn check_step(mut devices: Vec<Device>, count: usize, wire: Wire) {
    let mut hosts: Vec<Host> = devices.iter().map(Host::of).collect();
    let mut sums = vec![0.0; devices[0].grid.chunks()];
    for (device, host) in devices.iter_mut().zip(&mut hosts) {
        let norms = device.accumulate();
        assert_eq!(exact_bits(&norms.0), exact_bits(&host.accumulate().0));
        add_norms(&mut sums, &norms.0);
    }
    let (selected, slots) = select_on_device(&sums, count);
    let mut expected = Vec::new();
    select(&sums, count, &mut expected);
    assert_eq!(selected, expected);

    let mut summed: Option<Vec<u8>> = None;
    for (device, host) in devices.iter_mut().zip(&mut hosts) {
        let mut sent = device.pack(&sums, &selected, wire, 0);
        assert_eq!(sent, host.pack(&sums, &selected, wire), "on the wire");
        host.assert_equals(device, "after packing");
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
        host.assert_equals(device, "at the end");
    }
    let delivered = |device: &Device| device.gradient.owned().exact_bits();
    let first = delivered(&devices[0]);
    assert!(devices.iter().all(|device| delivered(device) == first), "all hosts get the same");
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
        let selected: Vec<u32> = (0..total.len() as u32).filter(|index| index % 3 != 1).collect();
        let sent = device.pack(&total, &selected, wire, offset);
        prop_assert_eq!(sent, host.pack(&total, &selected, wire));
        host.assert_equals(&device, "after packing");
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
        let slot = |i| if i % 4 == 3 { NOT_SELECTED } else { i - i / 4 };
        let slots: Vec<u32> = (0..chunks as u32).map(slot).collect();
        // Any bits, infinities and NaNs included.
        let bytes = chunks * device.grid.chunk_len * wire.element_bytes();
        let wire_bytes: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let mut host = Host::of(&device);
        device.unpack(&sums, &slots, wire, &wire_bytes, keeps_rest);
        host.unpack(&sums, &slots, wire, &wire_bytes, keeps_rest);
        host.assert_equals(&device, "after unpacking");
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
            host.assert_equals(&device, "after a dense step");
        }
    }

    #[test]
    fn rescaling_is_that_of_the_cpu(
        values in lengths().prop_flat_map(numbers), offset in 0usize..4,
        factor in prop_oneof![0.0f32..4.0, Just(1e30), Just(1e-30), Just(65536.0)],
    ) {
        // As `rescale` in rust/gradients.
        let expected: Vec<f32> =
            values.iter().map(|value| (value * factor).clamp(f32::MIN, f32::MAX)).collect();
        let mut memory = Guarded::new(&values, 77.0, offset);
        let arguments =
            [memory.pointer(), HostArgument::Long(values.len() as u64), HostArgument::Float(factor)];
        run(Kernel::Rescale, launch::rescale(values.len()), &arguments);
        prop_assert_eq!(exact_bits(memory.content()), exact_bits(&expected));
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
    let (selected, slots) = select_on_device(sums, count);
    let mut expected = Vec::new();
    select(sums, count, &mut expected);
    assert_eq!(selected, expected);
    for (index, slot) in slots.iter().enumerate() {
        let place = selected.iter().position(|selected| *selected as usize == index);
        assert_eq!(*slot, place.map_or(NOT_SELECTED, |place| place as u32), "chunk {index}");
    }
}

#[test]
fn selection_among_more_chunks_than_threads_is_that_of_the_cpu() {
    let mut random = Random(9);
    // Random values, few distinct values (ties across blocks of threads), a single value.
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
        // For this sum the scale is 1.
        device.unpack(&[32768.0], &[0], wire, &bytes, false);
        let expected: Vec<f32> = all.iter().map(|bits| widen(*bits)).collect();
        assert_eq!(device.gradient.owned().bits(), bits(&expected), "{wire:?}");
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
    // Every exponent, with mantissas at and next to a tie of either type or a carry, or with a NaN
    // payload only in the bits that are cut off.
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
        // With a zero gradient and factor 1, the result is the velocity, rounded to the element type.
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
        let expected: Vec<f32> = all.iter().map(|number| narrow(number + 0.0)).collect();
        assert_eq!(gradient.owned().bits(), bits(&expected), "{element:?}");
    }
}

#[test]
fn a_norm_that_was_limited_leaves_room_for_elements_beyond_it() {
    // Two hosts: one has an element larger than the cap on its norm.
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
    let OwnedGradient::F32(delivered) = device.gradient.owned() else { panic!("it is f32") };
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
