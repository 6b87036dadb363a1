//! The reference: the quantiser in plain scalar code. The kernels are tested against it, so it shares
//! no arithmetic with them: its 16-bit floats are those of the `half` crate, its symbols are packed
//! one at a time, and it rounds by the standard library.

use super::levels::{BLOCK, Levels};
use super::rules::{Quantizer, Rounding};
use half::bf16;

/// What became of a block that was encoded.
#[derive(Debug, Clone)]
pub struct Encoded {
    pub bytes: Vec<u8>,
    /// What is left of it; `None` if it was not finite.
    pub left: Option<Vec<f32>>,
}

/// gradient + feedback * residual
pub fn due(gradient: &[f32], residual: &[f32], feedback: f32) -> Vec<f32> {
    gradient
        .iter()
        .zip(residual)
        .map(|(gradient, residual)| gradient + feedback * residual)
        .collect()
}

/// The step of each element: its size and 2 % of the mean size. `None` if all steps are the same.
pub fn steps(sizes: &[u16]) -> Option<Vec<f32>> {
    let sizes: Vec<f32> = sizes.iter().map(|size| bf16::from_bits(*size).to_f32()).collect();
    let floor = sum(&sizes) / sizes.len() as f32 * 0.02;
    let has_steps = !sizes.is_empty() && floor >= f32::MIN_POSITIVE;
    has_steps.then(|| sizes.iter().map(|size| size + floor).collect())
}

/// Encodes what is due of a block.
pub fn encode(quantizer: &Quantizer, due: &[f32], sizes: &[u16]) -> Encoded {
    let largest_symbol = f32::from(quantizer.levels.largest());
    if let Some(poison) = poison(due) {
        let mut bytes = vec![0; quantizer.block_bytes()];
        bytes[..2].copy_from_slice(&bf16::from_f32(poison).to_bits().to_le_bytes());
        return Encoded { bytes, left: None };
    }
    let steps = steps(sizes);
    let over_steps: Vec<f32> = match &steps {
        Some(steps) => due.iter().zip(steps).map(|(due, step)| due / step).collect(),
        None => due.to_vec(),
    };
    let multiples = multiples(quantizer.levels);
    let round = |number: f32, inverse: f32| nearest(quantizer.levels, &multiples, number * inverse);
    let (level, chosen): (f32, Vec<f32>) = match quantizer.rounding {
        Rounding::ToMaximum => {
            let level = bf16::from_f32(largest(&over_steps) / largest_symbol).to_f32();
            let inverse = if level > f32::MIN_POSITIVE { 1.0 / level } else { 0.0 };
            (level, over_steps.iter().map(|number| round(*number, inverse)).collect())
        }
        Rounding::Unbiased { step, margin } => {
            let (unit, numbers) = in_ordinary_unit(over_steps);
            let squares = product(&numbers, &numbers);
            if squares == 0.0 {
                (0.0, vec![0.0; due.len()])
            } else {
                let step = step * (squares / due.len() as f32).sqrt();
                let chosen: Vec<f32> =
                    numbers.iter().map(|number| round(*number, 1.0 / step)).collect();
                let reach = multiples.last().unwrap() + margin;
                let within = |number: &f32| (number * (1.0 / step)).clamp(-reach, reach);
                let within: Vec<f32> = numbers.iter().map(within).collect();
                let level = product(&within, &within) / product(&within, &chosen) * step * unit;
                // The largest finite bf16.
                (level.min(bf16::MAX.to_f32()), chosen)
            }
        }
    };
    let level = bf16::from_f32(level);
    let mut bytes = level.to_bits().to_le_bytes().to_vec();
    let symbols = |index: usize| match chosen.get(index) {
        Some(one) => multiples.iter().position(|multiple| multiple == one).unwrap(),
        None => largest_symbol as usize,
    };
    let symbols: Vec<usize> = (0..BLOCK).map(symbols).collect();
    bytes.extend(pack(quantizer.levels, &symbols));
    let sent = values(&chosen, level.to_f32(), steps.as_deref());
    let left = due.iter().zip(sent).map(|(due, sent)| due - sent).collect();
    Encoded { bytes, left: Some(left) }
}

/// The numbers of a block, or the infinity or NaN that all of them are.
pub fn decode(quantizer: &Quantizer, bytes: &[u8], sizes: &[u16], count: usize) -> Vec<f32> {
    let level = bf16::from_bits(u16::from_le_bytes([bytes[0], bytes[1]])).to_f32();
    if !level.is_finite() {
        return vec![level; count];
    }
    let symbols = unpack(quantizer.levels, &bytes[2..]);
    let multiple = |symbol: &usize| multiple(quantizer.levels, *symbol);
    let chosen: Vec<f32> = symbols[..count].iter().map(multiple).collect();
    values(&chosen, level, steps(sizes).as_deref())
}

/// What the symbols stand for, in multiples of the level.
pub fn multiples(levels: Levels) -> Vec<f32> {
    match levels {
        Levels::Int3 => vec![-4.5, -2.25, -1.0, 0.0, 1.0, 2.25, 4.5],
        Levels::Quinary => vec![-2.5, -1.0, 0.0, 1.0, 2.5],
        _ => {
            let largest = i16::from(levels.largest());
            (-largest..=largest).map(f32::from).collect()
        }
    }
}

/// The multiple that a symbol stands for, also one that no encoder writes.
fn multiple(levels: Levels, symbol: usize) -> f32 {
    match levels {
        Levels::Int3 | Levels::Quinary => {
            let multiples = multiples(levels);
            multiples[symbol.min(multiples.len() - 1)]
        }
        _ => symbol as f32 - f32::from(levels.largest()),
    }
}

/// The multiple that is nearest to a number.
fn nearest(levels: Levels, multiples: &[f32], number: f32) -> f32 {
    if !matches!(levels, Levels::Int3 | Levels::Quinary) {
        let largest = f32::from(levels.largest());
        return number.clamp(-largest, largest).round_ties_even() + 0.0;
    }
    let distance = |multiple: f32| f64::from(number) - f64::from(multiple);
    let nearer = |one: &f32, other: &f32| {
        let distances = [one, other].map(|multiple| distance(*multiple).abs());
        distances[0].total_cmp(&distances[1]).then(one.abs().total_cmp(&other.abs()))
    };
    multiples.iter().copied().min_by(nearer).unwrap()
}

/// Packs symbols one at a time.
pub fn pack(levels: Levels, symbols: &[usize]) -> Vec<u8> {
    match levels {
        Levels::Int8 => symbols.iter().map(|symbol| *symbol as u8).collect(),
        Levels::Int4 => (0..320).map(|at| (symbols[at] + 16 * symbols[at + 320]) as u8).collect(),
        Levels::Int3 => {
            let word =
                |at: usize| (0..4).map(|plane| symbols[at + 160 * plane] << (3 * plane)).sum();
            write_words(&(0..160).map(word).collect::<Vec<usize>>())
        }
        Levels::Quinary => {
            let digits = |at: usize| (0..5).map(move |plane| symbols[at + 128 * plane]);
            let word =
                |at| (digits(at).fold(0, |number, digit| 5 * number + digit) * 4096).div_ceil(3125);
            write_words(&(0..128).map(word).collect::<Vec<usize>>())
        }
        Levels::Ternary => {
            let digits = |at: usize| (0..5).map(move |plane| symbols[at + 128 * plane]);
            let byte =
                |at| (digits(at).fold(0, |number, digit| 3 * number + digit) * 256).div_ceil(243);
            (0..128).map(|at| byte(at) as u8).collect()
        }
    }
}

/// Unpacks symbols one at a time.
pub fn unpack(levels: Levels, bytes: &[u8]) -> Vec<usize> {
    let mut symbols = vec![0; BLOCK];
    for (index, symbol) in symbols.iter_mut().enumerate() {
        // The digits of a fraction of `whole` in some base, the first one first.
        let digit = |mut fraction: usize, base: usize, whole: usize, plane: usize| {
            for _ in 0..plane {
                fraction = fraction * base % whole;
            }
            fraction * base / whole
        };
        *symbol = match levels {
            Levels::Int8 => usize::from(bytes[index]),
            Levels::Int4 => usize::from(bytes[index % 320]) >> (index / 320 * 4) & 15,
            Levels::Int3 => word(bytes, index % 160) >> (index / 160 * 3) & 7,
            Levels::Quinary => digit(word(bytes, index % 128), 5, 4096, index / 128),
            Levels::Ternary => digit(usize::from(bytes[index % 128]), 3, 256, index / 128),
        };
    }
    symbols
}

/// Updates the sizes of a block for this time, counted from 1.
pub fn follow(sizes: &mut [u16], delivered: &[f32], time: u64) {
    if poison(delivered).is_some() {
        return;
    }
    let numbers: Vec<f32> = delivered.iter().map(|number| number.clamp(-1e17, 1e17)).collect();
    let is_new = sizes.iter().all(|size| *size == 0);
    let mean = product(&numbers, &numbers) / sizes.len() as f32;
    for (size, number) in sizes.iter_mut().zip(numbers) {
        let before = bf16::from_bits(*size).to_f32();
        let before = if is_new { mean } else { before * before };
        let time = if is_new { 1.0 } else { time as f32 };
        let kept = (time / (time + 1.0)).min(0.850_763);
        let squares = kept * before + (1.0 - kept) * (number * number);
        *size = bf16::from_f32(squares.sqrt()).to_bits();
    }
}

fn values(chosen: &[f32], level: f32, steps: Option<&[f32]>) -> Vec<f32> {
    let value = |(index, multiple): (usize, &f32)| {
        let step = steps.map_or(1.0, |steps| steps[index]);
        (multiple * level * step).clamp(f32::MIN, f32::MAX)
    };
    chosen.iter().enumerate().map(value).collect()
}

/// NaN if there is one, otherwise infinity if there is one, whatever its sign.
fn poison(numbers: &[f32]) -> Option<f32> {
    if numbers.iter().any(|number| number.is_nan()) {
        return Some(f32::NAN);
    }
    numbers.iter().any(|number| number.is_infinite()).then_some(f32::INFINITY)
}

fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |largest, number| number.abs().max(largest))
}

/// The numbers in a unit, a power of two, in which their squares can be added.
fn in_ordinary_unit(numbers: Vec<f32>) -> (f32, Vec<f32>) {
    let squares = product(&numbers, &numbers);
    if (1e-30..=1e30).contains(&squares) {
        return (1.0, numbers);
    }
    let numbers: Vec<f32> =
        numbers.into_iter().map(|number| number.clamp(f32::MIN, f32::MAX)).collect();
    let largest = largest(&numbers);
    if largest < f32::MIN_POSITIVE {
        return (1.0, vec![0.0; numbers.len()]);
    }
    let exponent = f64::from(largest).log2().floor() as i32;
    let unit = 2f32.powi(exponent.clamp(-123, 122));
    (unit, numbers.into_iter().map(|number| number / unit).collect())
}

fn product(left: &[f32], right: &[f32]) -> f32 {
    sum(&left.iter().zip(right).map(|(left, right)| left * right).collect::<Vec<f32>>())
}

/// A sum in the order of the kernels: 32 partial sums, of every 32nd number, then halves to halves.
fn sum(numbers: &[f32]) -> f32 {
    let lane = |lane| numbers.iter().skip(lane).step_by(32).fold(0.0, |sum, number| sum + number);
    let mut lanes: Vec<f32> = (0..32).map(lane).collect();
    while lanes.len() > 1 {
        let upper = lanes.split_off(lanes.len() / 2);
        lanes = lanes.iter().zip(upper).map(|(lower, upper)| lower + upper).collect();
    }
    lanes[0]
}

fn write_words(words: &[usize]) -> Vec<u8> {
    let (first, second) = words.split_at(words.len() / 2);
    let low = first.iter().map(|word| word % 256);
    let middle = first.iter().zip(second).map(|(first, second)| first / 256 + second % 16 * 16);
    let high = second.iter().map(|word| word / 16);
    low.chain(middle).chain(high).map(|byte| byte as u8).collect()
}

fn word(bytes: &[u8], at: usize) -> usize {
    let half = bytes.len() / 3;
    let byte = |at: usize| usize::from(bytes[at]);
    match at < half {
        true => byte(at) + byte(half + at) % 16 * 256,
        false => byte(at) / 16 + byte(half + at) * 16,
    }
}
