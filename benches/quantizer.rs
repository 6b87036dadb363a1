//! The cost of quantising a bucket on one core, without the exchange: encoding it for its owners and
//! decoding the sums, next to a loop that touches the same bytes once, in one interleaved run. Prints
//! only; nothing passes or fails.

use gflow::codec::Gradient;
use gflow::codec::quantizer::{BLOCK, Levels, Quantizer, Stepping, Workspace, follow};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

const BUCKET_BYTES: usize = 25 << 20;
const ELEMENTS: usize = BUCKET_BYTES / size_of::<f32>();
/// Enough that they do not fit into any cache.
const BUCKETS: usize = 6;
const ROUNDS: usize = 9;

struct Bucket {
    gradient: Vec<f32>,
    residual: Vec<f32>,
    sizes: Vec<u16>,
    wire: Vec<u8>,
}

impl Bucket {
    fn new(seed: usize) -> Bucket {
        let mut state = seed as u32 * 2 + 1;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let gradient: Vec<f32> = (0..ELEMENTS).map(|_| random()).collect();
        let residual = (0..ELEMENTS).map(|_| random() * 0.1).collect();
        let mut sizes = vec![0; ELEMENTS];
        for step in 0..16 {
            let mut numbers: Vec<f32> = (0..ELEMENTS).map(|_| random()).collect();
            follow(&mut sizes, &mut Gradient::F32(&mut numbers), step);
        }
        let wire = vec![0; ELEMENTS.div_ceil(BLOCK) * (BLOCK + 2)];
        Bucket { gradient, residual, sizes, wire }
    }

    fn blocks() -> impl Iterator<Item = std::ops::Range<usize>> {
        (0..ELEMENTS).step_by(BLOCK).map(|start| start..ELEMENTS.min(start + BLOCK))
    }

    /// Returns the times of encoding, decoding, and updating the sizes.
    fn step(&mut self, quantizer: &Quantizer, workspace: &mut Workspace) -> [Duration; 3] {
        let each = quantizer.block_bytes();
        let sizes = |range: &std::ops::Range<usize>| match quantizer.uses_sizes {
            true => range.clone(),
            false => 0..0,
        };
        let start = cpu_time();
        for (index, range) in Bucket::blocks().enumerate() {
            let gradient = Gradient::F32(&mut self.gradient[range.clone()]);
            let (sizes, out) = (&self.sizes[sizes(&range)], &mut self.wire[index * each..][..each]);
            quantizer.send(&gradient, &mut self.residual[range], sizes, out, workspace);
        }
        let encoded = cpu_time();
        for (index, range) in Bucket::blocks().enumerate() {
            let mut gradient = Gradient::F32(&mut self.gradient[range.clone()]);
            let (sizes, bytes) = (&self.sizes[sizes(&range)], &self.wire[index * each..][..each]);
            quantizer.deliver(bytes, sizes, &mut gradient, workspace);
        }
        let decoded = cpu_time();
        if quantizer.uses_sizes {
            follow(&mut self.sizes, &mut Gradient::F32(&mut self.gradient), 3);
        }
        [encoded - start, decoded - encoded, cpu_time() - decoded]
    }

    /// Reads and writes what the codec has to, once.
    fn touch(&mut self, uses_sizes: bool) -> Duration {
        let start = cpu_time();
        let all = self.gradient.iter_mut().zip(&mut self.residual);
        if uses_sizes {
            for ((gradient, residual), size) in all.zip(&self.sizes) {
                let sum = *gradient + *residual;
                *residual = sum * 0.5;
                *gradient = sum - f32::from(*size) * 1e-9;
            }
        } else {
            for (gradient, residual) in all {
                let sum = *gradient + *residual;
                *residual = sum * 0.5;
                *gradient = sum;
            }
        }
        cpu_time() - start
    }
}

/// Processor time of this thread: neighbours do not count.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let mut buckets: Vec<Bucket> = (0..BUCKETS).map(Bucket::new).collect();
    let mut workspace = Workspace::default();
    println!(
        "milliseconds for 25 MiB of float32, one core; in brackets: times touching the bytes once"
    );
    for levels in Levels::ALL {
        let quantizer = Quantizer::new(levels, Stepping::Normalized);
        let mut times: [Vec<f64>; 5] = Default::default();
        for round in 0..ROUNDS * BUCKETS {
            let bucket = &mut buckets[round % BUCKETS];
            let touch = bucket.touch(quantizer.uses_sizes);
            let [encode, decode, follow] = bucket.step(&quantizer, &mut workspace);
            let all = [touch, encode, decode, follow, encode + decode + follow];
            for (times, time) in times.iter_mut().zip(all) {
                times.push(time.as_secs_f64() * 1e3);
            }
        }
        let [touch, encode, decode, follow, together] = times.map(median);
        println!(
            "{:8} touch {touch:5.2}  encode {encode:5.2}  decode {decode:5.2}  sizes {follow:5.2}  \
             together {together:5.2} ({:.2}x)",
            levels.name(),
            together / touch
        );
    }
}
