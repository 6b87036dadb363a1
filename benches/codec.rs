//! What compressing and decompressing a bucket costs on one core, without the exchange, beside a
//! loop that touches every byte once, in one interleaved run. It only prints: nothing may pass or
//! fail by it.

use gflow::codec::{
    Gradient, Grid, Schedule, Wire, accumulate, fill, hop, pack, scale_for, schedule, select,
    unpack,
};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

const BUCKET_BYTES: usize = 25 << 20;
const CHUNK: usize = 32768;
const SCHEDULE: Schedule = Schedule { density: 0.1, warmup_steps: 0, ramp_steps: 0 };
const WIRE: Wire = Wire::F16;
/// Gradients and residuals of so many buckets do not fit into any cache.
const MANY_BUCKETS: usize = 10;
const ROUNDS: usize = 15;

/// What a rank has of a bucket, and where DDP copies the result.
struct Bucket {
    gradient: Vec<f32>,
    residual: Vec<f32>,
    copy: Vec<f32>,
}

/// What is used again for every bucket.
struct Room {
    undo: Vec<f32>,
    sums: Vec<f32>,
    chosen: Vec<u32>,
    wire: Vec<u8>,
    incoming: Vec<u8>,
    rounded_off: Vec<f32>,
}

/// How the gradient of unsent chunks becomes zero.
#[derive(Clone, Copy, PartialEq)]
enum Zeros {
    /// As it is moved into the residual.
    Early,
    /// After the exchange.
    Late,
    /// After the exchange, past the cache.
    Streamed,
}

const STAGES: [&str; 10] = [
    "touch once",
    "accumulate all",
    "select",
    "pack chosen",
    "take back",
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

    fn step(&mut self, room: &mut Room, zeros: Zeros) -> Times {
        let mut times = Times::default();
        let mut gradient = Gradient::F32(&mut self.gradient);
        let grid = Grid { elements: gradient.len(), chunk: CHUNK };
        let start = cpu_time();
        let mut last = start;
        let mut lap = |stage: &str, times: &mut Times| {
            let now = cpu_time();
            times[index(stage)] = now - last;
            last = now;
        };

        room.sums.clear();
        for chunk in 0..grid.chunks() {
            let range = grid.range(chunk);
            let residual = &mut self.residual[range.clone()];
            let norms = accumulate(&mut gradient.part(range), residual, None, &mut room.undo);
            room.sums.push(norms.sum);
        }
        lap("accumulate all", &mut times);

        let density = SCHEDULE.density_at(0).expect("it is sparse from the start");
        select(&room.sums, schedule::count(grid.chunks(), density), &mut room.chosen);
        lap("select", &mut times);

        let bytes = |place: usize| place * CHUNK * WIRE.element_bytes();
        let chosen = room.chosen.iter().enumerate();
        let chosen = chosen.map(|(place, chunk)| {
            let range = grid.range(*chunk as usize);
            let end = bytes(place) + range.len() * WIRE.element_bytes();
            (bytes(place)..end, range, scale_for(room.sums[*chunk as usize], WIRE))
        });
        for (bytes, range, scale) in chosen.clone() {
            pack(&mut self.residual[range], scale, WIRE, &mut room.wire[bytes]);
        }
        lap("pack chosen", &mut times);

        for (bytes, range, scale) in chosen.clone() {
            let start = bytes.start / WIRE.element_bytes();
            let rounded_off = &room.rounded_off[start..start + range.len()];
            hop::take_back(&mut self.residual[range], rounded_off, scale);
        }
        lap("take back", &mut times);

        for (bytes, range, scale) in chosen.clone() {
            unpack(&room.wire[bytes], WIRE, scale, &mut gradient.part(range));
        }
        lap("unpack chosen", &mut times);

        if zeros != Zeros::Early {
            for chunk in (0..grid.chunks() as u32).filter(|i| !room.chosen.contains(i)) {
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
        hop::add(&mut room.wire, &room.incoming, WIRE, &mut room.rounded_off);
        times[index("(add in one hop)")] = cpu_time() - start;
        times
    }

    /// The bytes that the method must read and write, once.
    fn touch(&mut self) -> Duration {
        let start = cpu_time();
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: it is here.
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
        // SAFETY: a register's place, so aligned.
        unsafe { _mm_stream_ps((&raw mut *register).cast(), _mm_setzero_ps()) };
    }
    // SAFETY: every x86-64 has it. It puts those stores in order with all later ones.
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

/// The time that this thread has had a core: somebody else may want it too.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn run(title: &str, count: usize) {
    let mut buckets: Vec<Bucket> = (0..count).map(Bucket::new).collect();
    let elements = BUCKET_BYTES / size_of::<f32>();
    let chunks = schedule::count(Grid { elements, chunk: CHUNK }.chunks(), SCHEDULE.density);
    let mut room = Room {
        undo: vec![0.0; CHUNK],
        sums: Vec::new(),
        chosen: Vec::new(),
        wire: vec![0; chunks * CHUNK * WIRE.element_bytes()],
        incoming: vec![0; chunks * CHUNK * WIRE.element_bytes()],
        rounded_off: vec![0.0; chunks * CHUNK],
    };
    let variants = [Zeros::Early, Zeros::Late, Zeros::Streamed];
    let mut touched = Vec::new();
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (zeros, times) in variants.iter().zip(&mut times) {
            for _ in 0..MANY_BUCKETS / count {
                touched.extend(buckets.iter_mut().map(Bucket::touch));
                times.extend(buckets.iter_mut().map(|bucket| bucket.step(&mut room, *zeros)));
            }
        }
    }
    let touched = median(touched);
    println!("{title}: median ms of CPU time (and ratio to touching once); how zeros come");
    println!("{:20}{:>16}{:>16}{:>16}", "", "accumulate", "fill", "past the cache");
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
