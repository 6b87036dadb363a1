//! The cost of compressing and decompressing a bucket on one core, without the exchange, next to a
//! loop that touches every byte once, in one interleaved run. Prints only; nothing passes or fails.

use gflow::codec::{
    ChunkGrid, Gradient, Schedule, Wire, accumulate, add_partial_sum, chunks_to_send, fill, pack,
    return_hop_error, scale_for, select, unpack,
};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

const BUCKET_BYTES: usize = 25 << 20;
const CHUNK: usize = 32768;
const SCHEDULE: Schedule = Schedule { density: 0.1, warmup_steps: 0, ramp_steps: 0 };
const WIRE: Wire = Wire::F16;
/// Enough that their gradients and residuals don't fit into any cache.
const MANY_BUCKETS: usize = 10;
const ROUNDS: usize = 15;

/// A rank's state for a bucket, and where DDP copies the result.
struct Bucket {
    gradient: Vec<f32>,
    residual: Vec<f32>,
    copy: Vec<f32>,
}

/// Buffers reused for every bucket.
struct Scratch {
    undo: Vec<f32>,
    sums: Vec<f32>,
    chosen: Vec<u32>,
    wire: Vec<u8>,
    incoming: Vec<u8>,
    error: Vec<f32>,
}

/// How the gradient of unsent chunks is zeroed.
#[derive(Clone, Copy, PartialEq)]
enum Zeros {
    /// By `accumulate`, as it moves into the residual.
    Early,
    /// After the exchange.
    Late,
    /// After the exchange, with non-temporal stores.
    Streamed,
}

const STAGES: [&str; 10] = [
    "touch once",
    "accumulate all",
    "select",
    "pack chosen",
    "return error",
    "unpack chosen",
    "zero the rest",
    "together",
    "DDP copies it out",
    "(add in one hop)",
];

type Times = [Duration; STAGES.len()];

impl Bucket {
    fn new(seed: usize) -> Bucket {
        let elements = BUCKET_BYTES / size_of::<f32>();
        let mut state = seed as u32 * 2 + 1;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let gradient = (0..elements).map(|_| random()).collect();
        let residual = (0..elements).map(|_| random()).collect();
        Bucket { gradient, residual, copy: vec![1.0; elements] }
    }

    fn step(&mut self, scratch: &mut Scratch, zeros: Zeros) -> Times {
        let mut times = Times::default();
        let mut gradient = Gradient::F32(&mut self.gradient);
        let grid = ChunkGrid { elements: gradient.len(), chunk_len: CHUNK };
        let start = cpu_time();
        let mut last = start;
        let mut lap = |stage: &str, times: &mut Times| {
            let now = cpu_time();
            times[index(stage)] = now - last;
            last = now;
        };

        scratch.sums.clear();
        for chunk in 0..grid.chunks() {
            let range = grid.range(chunk);
            let residual = &mut self.residual[range.clone()];
            let norms = accumulate(&mut gradient.part(range), residual, None, &mut scratch.undo);
            scratch.sums.push(norms.residual);
        }
        lap("accumulate all", &mut times);

        let density = SCHEDULE.density_at(0).expect("it is sparse from the start");
        select(&scratch.sums, chunks_to_send(grid.chunks(), density), &mut scratch.chosen);
        lap("select", &mut times);

        let bytes = |slot: usize| slot * CHUNK * WIRE.element_bytes();
        let chosen = scratch.chosen.iter().enumerate();
        let chosen = chosen.map(|(slot, chunk)| {
            let range = grid.range(*chunk as usize);
            let end = bytes(slot) + range.len() * WIRE.element_bytes();
            (bytes(slot)..end, range, scale_for(scratch.sums[*chunk as usize], WIRE))
        });
        for (bytes, range, scale) in chosen.clone() {
            pack(&mut self.residual[range], scale, WIRE, &mut scratch.wire[bytes]);
        }
        lap("pack chosen", &mut times);

        for (bytes, range, scale) in chosen.clone() {
            let start = bytes.start / WIRE.element_bytes();
            let error = &scratch.error[start..start + range.len()];
            return_hop_error(&mut self.residual[range], error, scale);
        }
        lap("return error", &mut times);

        for (bytes, range, scale) in chosen.clone() {
            unpack(&scratch.wire[bytes], WIRE, scale, &mut gradient.part(range));
        }
        lap("unpack chosen", &mut times);

        if zeros != Zeros::Early {
            for chunk in (0..grid.chunks() as u32).filter(|i| !scratch.chosen.contains(i)) {
                match (zeros, gradient.part(grid.range(chunk as usize))) {
                    (Zeros::Streamed, Gradient::F32(numbers)) => stream_zeros(numbers),
                    (_, mut part) => fill(&mut part, 0.0),
                }
            }
        }
        lap("zero the rest", &mut times);
        times[index("together")] = cpu_time() - start;

        let start = cpu_time();
        self.copy.copy_from_slice(&self.gradient);
        times[index("DDP copies it out")] = cpu_time() - start;

        let start = cpu_time();
        add_partial_sum(&mut scratch.wire, &scratch.incoming, WIRE, &mut scratch.error);
        times[index("(add in one hop)")] = cpu_time() - start;
        times
    }

    /// Reads and writes the bytes that the method has to, once.
    fn touch(&mut self) -> Duration {
        let start = cpu_time();
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has AVX-512, as just checked.
            unsafe { swap_wide(&mut self.gradient, &mut self.residual) };
            return cpu_time() - start;
        }
        swap(&mut self.gradient, &mut self.residual);
        cpu_time() - start
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn swap_wide(a: &mut [f32], b: &mut [f32]) {
    swap(a, b);
}

#[inline(always)]
fn swap(a: &mut [f32], b: &mut [f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        (*a, *b) = (*b, *a);
    }
}

fn index(stage: &str) -> usize {
    STAGES.iter().position(|name| *name == stage).expect("a stage of the table")
}

#[cfg(target_arch = "x86_64")]
fn stream_zeros(numbers: &mut [f32]) {
    use std::arch::x86_64::{__m128, _mm_setzero_ps, _mm_sfence, _mm_stream_ps};
    // SAFETY: any bits are floats.
    let (before, registers, after) = unsafe { numbers.align_to_mut::<__m128>() };
    before.fill(0.0);
    after.fill(0.0);
    for register in registers {
        // SAFETY: aligned for a register.
        unsafe { _mm_stream_ps((&raw mut *register).cast(), _mm_setzero_ps()) };
    }
    // SAFETY: every x86-64 CPU has it. Orders those stores before all later ones.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn stream_zeros(numbers: &mut [f32]) {
    numbers.fill(0.0);
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// This thread's CPU time: other processes may be running too.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn run(title: &str, count: usize) {
    let mut buckets: Vec<Bucket> = (0..count).map(Bucket::new).collect();
    let elements = BUCKET_BYTES / size_of::<f32>();
    let chunks =
        chunks_to_send(ChunkGrid { elements, chunk_len: CHUNK }.chunks(), SCHEDULE.density);
    let mut scratch = Scratch {
        undo: vec![0.0; CHUNK],
        sums: Vec::new(),
        chosen: Vec::new(),
        wire: vec![0; chunks * CHUNK * WIRE.element_bytes()],
        incoming: vec![0; chunks * CHUNK * WIRE.element_bytes()],
        error: vec![0.0; chunks * CHUNK],
    };
    let variants = [Zeros::Early, Zeros::Late, Zeros::Streamed];
    let mut touched = Vec::new();
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (zeros, times) in variants.iter().zip(&mut times) {
            for _ in 0..MANY_BUCKETS / count {
                touched.extend(buckets.iter_mut().map(Bucket::touch));
                times.extend(buckets.iter_mut().map(|bucket| bucket.step(&mut scratch, *zeros)));
            }
        }
    }
    let touched = median(touched);
    println!("{title}: median ms of CPU time (and ratio to touching once); how zeros are written");
    println!("{:20}{:>16}{:>16}{:>16}", "", "accumulate", "fill", "non-temporal");
    for (stage, name) in STAGES.iter().enumerate() {
        print!("{name:20}");
        for times in &times {
            let of_stage = times.iter().map(|times: &Times| times[stage]).collect();
            let time = if stage == 0 { touched } else { median(of_stage) };
            print!("{time:>9.3}{:>7}", format!("({:.2})", time / touched));
        }
        println!();
    }
}

fn main() {
    let megabytes = BUCKET_BYTES >> 20;
    println!(
        "a bucket of {megabytes} MiB, chunks of {CHUNK}, density {}, {}",
        SCHEDULE.density,
        WIRE.name()
    );
    run("memory", MANY_BUCKETS);
    run("cache", 1);
}
