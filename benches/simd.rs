//! The speed of folding buffers, with portable instructions and the best available, in GB/s of one
//! buffer's bytes. Prints only; nothing passes or fails.

use gflow::simd::element::{Element, Reduction};
use gflow::simd::instruction_set::InstructionSet;
use gflow::simd::reducer::Reducer;
use std::time::{Duration, Instant};

const SIZES: [(&str, usize); 3] = [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("25 MiB", 25 << 20)];
const ELEMENTS: [Element; 5] =
    [Element::F32, Element::F16, Element::BF16, Element::F64, Element::I32];
/// Only the best of many short batches counts: the scheduler interrupts some.
const BATCH_BYTES: usize = 1 << 20;
const BATCHES: usize = 15;
const TIME_FOR_ALL: Duration = Duration::from_millis(30);

/// A buffer aligned for any element. All zeros: they stay zero when folded, so that none becomes
/// subnormal and slow.
fn buffer(bytes: usize) -> Vec<u64> {
    vec![0; bytes.div_ceil(8)]
}

/// Which buffers are sources and destinations.
#[derive(Clone, Copy)]
enum Shape {
    Both,
    First,
    Another,
    FourIntoAll,
}

impl Shape {
    const ALL: [(&str, Shape); 4] = [
        ("both", Shape::Both),
        ("first", Shape::First),
        ("another", Shape::Another),
        ("4 into 4", Shape::FourIntoAll),
    ];
}

fn gigabytes_per_second(reducer: Reducer, shape: Shape, bytes: usize) -> f64 {
    let mut buffers: Vec<Vec<u64>> = (0..4).map(|_| buffer(bytes)).collect();
    let regions: Vec<*mut u8> = buffers.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
    let sources: Vec<*const u8> = regions.iter().map(|region| region.cast_const()).collect();
    let (sources, destinations) = match shape {
        Shape::Both => (&sources[..2], &regions[..2]),
        Shape::First => (&sources[..2], &regions[..1]),
        Shape::Another => (&sources[..2], &regions[2..3]),
        Shape::FourIntoAll => (&sources[..], &regions[..]),
    };
    // SAFETY: all regions are separate, alive, of this size and aligned for any element.
    let fold = || unsafe { reducer.fold(sources, destinations, bytes, true) };
    fold();
    let folds = (BATCH_BYTES / bytes).max(1);
    let mut best = Duration::MAX;
    let start = Instant::now();
    for batch in 0.. {
        if batch >= BATCHES && start.elapsed() > TIME_FOR_ALL {
            break;
        }
        let start = Instant::now();
        (0..folds).for_each(|_| fold());
        best = best.min(start.elapsed());
    }
    (folds * bytes) as f64 / best.as_secs_f64() / 1e9
}

fn main() {
    let best = InstructionSet::best();
    println!("sum, GB/s of one buffer's bytes: portable / {best:?}");
    print!("{:16}", "");
    for (shape, _) in Shape::ALL {
        print!("{shape:>16}");
    }
    println!();
    for element in ELEMENTS {
        for (size, bytes) in SIZES {
            print!("{:8}{size:8}", format!("{element:?}"));
            for (_, shape) in Shape::ALL {
                let speed = |set| {
                    let reducer = Reducer::with(set, element, Reduction::Sum, 2);
                    gigabytes_per_second(reducer.expect("available"), shape, bytes)
                };
                print!("{:>8.1} /{:>6.1}", speed(InstructionSet::Portable), speed(best));
            }
            println!();
        }
    }
}
