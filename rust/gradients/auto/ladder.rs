//! The methods to choose from, from exact to the noisiest, and how much noise each adds.

use crate::codec::Wire;
use crate::codec::quantizer::{Levels, Quantizer, Stepping};
use crate::gradients::method::{MaxNoise, Method};

/// From exact to the noisiest. Each sends fewer bytes than the one before.
pub const LADDER: [Method; 7] = [
    Method::Exact,
    Method::Rounded(Wire::F16),
    Method::Quantized(Levels::Int8),
    Method::Quantized(Levels::Int4),
    Method::Quantized(Levels::Int3),
    Method::Quantized(Levels::Quinary),
    Method::Quantized(Levels::Ternary),
];

/// By method: the variance that it adds to a gradient, relative to the gradient's own, as audits found it
/// in `gflow bench quality` (docs/codecs.md). A method with noise `q` needs at most `1 + q` times the
/// steps.
pub const EXPECTED_NOISE: [f64; LADDER.len()] = [0.0, 0.0, 0.001, 0.05, 0.15, 0.25, 0.6];

/// So many times what is expected of a method, no audit of the benchmark found: the most was four, in
/// embeddings of rare words, which did no harm.
const UNEXPECTED: f64 = 5.0;
/// So much is too little to matter with any method.
const NEGLIGIBLE: f64 = 0.01;

/// The noise of a method that is still as expected; `None` for one that is not in the ladder. Above
/// it the user is warned, and `auto` takes a method with less.
pub fn most_noise(method: &str) -> Option<f64> {
    let index = LADDER.iter().position(|one| one.to_string() == method)?;
    Some(NEGLIGIBLE + UNEXPECTED * EXPECTED_NOISE[index])
}

/// The index of the noisiest method that may be chosen.
pub fn last(max_noise: MaxNoise) -> usize {
    let noisiest = match max_noise {
        MaxNoise::None => Method::Rounded(Wire::F16),
        MaxNoise::Low => Method::Quantized(Levels::Quinary),
        MaxNoise::Any => Method::Quantized(Levels::Ternary),
    };
    index_of(noisiest)
}

/// The place of a method in the ladder; that of exact for one that is not in it.
pub fn index_of(method: Method) -> usize {
    LADDER.iter().position(|one| *one == method).unwrap_or(0)
}

/// The noisiest method that may be chosen in the warm-up. It adds no noise that could be measured
/// (docs/codecs.md); those with more cost the most loss in the first steps of a training.
pub const MOST_NOISE_IN_WARM_UP: Method = Method::Quantized(Levels::Int8);

/// What a bucket that is warming up is sent as while this method is chosen.
pub fn in_warm_up(chosen: Method) -> Method {
    LADDER[index_of(chosen).min(index_of(MOST_NOISE_IN_WARM_UP))]
}

/// Bits on the wire for each element of a gradient that has `bits` itself.
pub fn bits_on_wire(method: Method, bits: f64) -> f64 {
    match method {
        Method::Rounded(wire) => bits.min(8.0 * wire.element_bytes() as f64),
        Method::Quantized(levels) => {
            Quantizer::new(levels, Stepping::Proportional).bits_per_element()
        }
        _ => bits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_method_sends_less_than_the_one_before_and_adds_no_less_noise() {
        let bits: Vec<_> = LADDER.iter().map(|method| bits_on_wire(*method, 32.0)).collect();
        assert!(bits.windows(2).all(|pair| pair[1] < pair[0]), "{bits:?}");
        assert!(EXPECTED_NOISE.windows(2).all(|pair| pair[1] >= pair[0]));
    }

    /// The trainings in benches/quality.jsonl are what the limits are made from: none of them is warned of.
    #[test]
    fn no_audit_of_the_benchmark_found_more_than_is_allowed() {
        let mut audits = 0;
        for one in include_str!("../../../benches/quality.jsonl").split("\"method\": \"") {
            let Some((method, rest)) = one.split_once("\", \"noise\": ") else { continue };
            let noise: f64 = rest.split([',', '}']).next().unwrap().parse().unwrap();
            let Some(most) = most_noise(method) else { continue };
            assert!(noise <= most, "{method}: {noise} of {most}");
            audits += 1;
        }
        assert!(audits > 300, "{audits}");
    }

    #[test]
    fn the_limits_of_noise_stop_where_they_say() {
        let last = |name: &str| LADDER[last(MaxNoise::from_name(name).unwrap())];
        assert_eq!(last("none"), Method::Rounded(Wire::F16));
        assert_eq!(last("low"), Method::Quantized(Levels::Quinary));
        assert_eq!(last("any"), Method::Quantized(Levels::Ternary));
        assert_eq!(MaxNoise::from_name("much"), None);
    }
}
