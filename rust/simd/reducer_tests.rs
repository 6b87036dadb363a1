//! Compares folds with a plain loop, for every element type, reduction, instruction set and layout.

use super::*;
use crate::simd::random::Random;
use half::{bf16, f16};
use proptest::prelude::*;

#[test]
fn a_reducer_knows_its_element() {
    for element in Element::ALL {
        let reducer = Reducer::new(element, Reduction::Sum, 2);
        assert_eq!(reducer.element_bytes(), element.bytes());
    }
}

/// The plain fold that the kernels must agree with, element by element.
fn plain_fold<T: Copy, const BYTES: usize>(
    sources: &[Vec<u8>],
    read: impl Fn([u8; BYTES]) -> T,
    join: impl Fn(T, T) -> T,
    finish: impl Fn(T) -> T,
    write: impl Fn(T) -> [u8; BYTES],
) -> Vec<u8> {
    let mut folded = Vec::new();
    for start in (0..sources[0].len()).step_by(BYTES) {
        let element = |source: &Vec<u8>| read(source[start..start + BYTES].try_into().unwrap());
        let joined = sources.iter().map(element).reduce(&join).unwrap();
        folded.extend(write(finish(joined)));
    }
    folded
}

fn expected(
    element: Element,
    reduction: Reduction,
    sources: &[Vec<u8>],
    divisor: Option<usize>,
) -> Vec<u8> {
    macro_rules! float {
        ($float:ty, $read:expr, $write:expr) => {{
            let join = |a: $float, b: $float| match reduction {
                Reduction::Sum | Reduction::Avg => a + b,
                Reduction::Product => a * b,
                _ if a.is_nan() => a,
                _ if b.is_nan() => b,
                Reduction::Min => [b, a][usize::from(a < b)],
                Reduction::Max => [b, a][usize::from(a > b)],
            };
            let finish = |sum: $float| divisor.map_or(sum, |ranks| sum / ranks as $float);
            plain_fold(sources, $read, join, finish, $write)
        }};
    }
    macro_rules! integer {
        ($integer:ty) => {{
            let join = |a: $integer, b: $integer| match reduction {
                Reduction::Sum | Reduction::Avg => a.wrapping_add(b),
                Reduction::Product => a.wrapping_mul(b),
                Reduction::Min => a.min(b),
                Reduction::Max => a.max(b),
            };
            let finish = |sum: $integer| match divisor {
                Some(ranks) => (i128::from(sum) / ranks as i128) as $integer,
                None => sum,
            };
            let (read, write) = (<$integer>::from_ne_bytes, <$integer>::to_ne_bytes);
            plain_fold(sources, read, join, finish, write)
        }};
    }
    match element {
        Element::F32 => float!(f32, f32::from_ne_bytes, f32::to_ne_bytes),
        Element::F64 => float!(f64, f64::from_ne_bytes, f64::to_ne_bytes),
        Element::F16 => {
            float!(f32, |bytes| f16::from_ne_bytes(bytes).to_f32_const(), |number| {
                f16::from_f32_const(number).to_ne_bytes()
            })
        }
        Element::BF16 => {
            float!(f32, |bytes| bf16::from_ne_bytes(bytes).to_f32_const(), |number| {
                bf16::from_f32_const(number).to_ne_bytes()
            })
        }
        Element::I8 => integer!(i8),
        Element::U8 => integer!(u8),
        Element::I32 => integer!(i32),
        Element::I64 => integer!(i64),
    }
}

/// Makes all NaNs the same: their payload depends on the order in which the compiler adds.
fn with_one_nan(element: Element, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for element_bytes in bytes.chunks_exact_mut(element.bytes()) {
        let is_nan = match (element, &*element_bytes) {
            (Element::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]).is_nan(),
            (Element::F64, bytes) => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
            (Element::F16, &[a, b]) => f16::from_ne_bytes([a, b]).is_nan(),
            (Element::BF16, &[a, b]) => bf16::from_ne_bytes([a, b]).is_nan(),
            _ => false,
        };
        if is_nan {
            element_bytes.fill(0xff);
        }
    }
    bytes
}

impl Random {
    /// An element with random bits, an ordinary number, or a special one.
    fn element(&mut self, element: Element) -> Vec<u8> {
        let ordinary = (self.next() as i32) as f64 / 1e8;
        let specials = [0.0, -0.0, 1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65504.0];
        let number = match self.next() % 8 {
            0 | 1 => return self.next().to_ne_bytes()[..element.bytes()].to_vec(),
            2 => specials[self.next() as usize % specials.len()],
            _ => ordinary,
        };
        match element {
            Element::F32 => (number as f32).to_ne_bytes().to_vec(),
            Element::F64 => number.to_ne_bytes().to_vec(),
            Element::F16 => f16::from_f64_const(number).to_ne_bytes().to_vec(),
            Element::BF16 => bf16::from_f64_const(number).to_ne_bytes().to_vec(),
            _ => self.next().to_ne_bytes()[..element.bytes()].to_vec(),
        }
    }
}

/// A region inside a larger buffer, which shows whether its neighbours were touched.
struct Region {
    memory: Vec<u64>,
    start: usize,
    bytes: usize,
}

const NEIGHBOUR: u8 = 0xa5;

impl Region {
    fn new(content: &[u8], start: usize) -> Region {
        let words = (start + content.len()).div_ceil(8) + 8;
        let memory = vec![u64::from_ne_bytes([NEIGHBOUR; 8]); words];
        let mut region = Region { memory, start, bytes: content.len() };
        // SAFETY: the content fits into the words after the start.
        unsafe { region.pointer().copy_from(content.as_ptr(), content.len()) };
        region
    }

    fn pointer(&mut self) -> *mut u8 {
        // SAFETY: the start is inside the memory.
        unsafe { self.memory.as_mut_ptr().cast::<u8>().add(self.start) }
    }

    fn content(&self) -> Vec<u8> {
        let all: Vec<u8> = self.memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let end = self.start + self.bytes;
        let mut neighbours = all[..self.start].iter().chain(&all[end..]);
        assert!(neighbours.all(|byte| *byte == NEIGHBOUR), "wrote outside of the region");
        all[self.start..end].to_vec()
    }
}

/// The layout of the sources and destinations of one call.
#[derive(Debug, Clone)]
struct Layout {
    sources: usize,
    /// Whether each source is also a destination.
    kept: Vec<bool>,
    others: usize,
    backwards: bool,
    elements: usize,
    /// How many elements each region is off from the alignment of a register.
    offsets: Vec<usize>,
}

fn layouts() -> impl Strategy<Value = Layout> {
    // Two sources are the most common call and have the most special cases.
    let sources = prop_oneof![Just(2), 1usize..=8];
    // Mostly within a tile, sometimes over several.
    let elements = prop_oneof![9 => 0usize..300, 1 => 0usize..9000];
    (sources, elements).prop_flat_map(|(sources, elements)| {
        let kept =
            prop_oneof![Just(vec![true; sources]), prop::collection::vec(any::<bool>(), sources)];
        let offsets = prop::collection::vec(0usize..17, sources + 3);
        (kept, 0usize..=3, any::<bool>(), offsets).prop_map(
            move |(kept, others, backwards, offsets)| Layout {
                sources,
                kept,
                others,
                backwards,
                elements,
                offsets,
            },
        )
    })
}

fn check(reducer: Reducer, layout: &Layout, sources: &[Vec<u8>], expected: &[u8], finish: bool) {
    let element = reducer.element;
    let bytes = layout.elements * element.bytes();
    let blank = vec![0; bytes];
    let contents = sources.iter().chain(std::iter::repeat_n(&blank, layout.others));
    let mut regions: Vec<Region> = contents
        .zip(&layout.offsets)
        .map(|(content, offset)| Region::new(content, offset * element.bytes()))
        .collect();
    let pointers: Vec<*mut u8> = regions.iter_mut().map(Region::pointer).collect();
    let from: Vec<*const u8> =
        pointers[..layout.sources].iter().map(|to| to.cast_const()).collect();
    let is_destination = |index: usize| layout.kept.get(index).copied().unwrap_or(true);
    let mut to: Vec<*mut u8> = (0..pointers.len())
        .filter(|index| is_destination(*index))
        .map(|index| pointers[index])
        .collect();
    if layout.backwards {
        to.reverse();
    }
    // SAFETY: each region is a separate buffer of that size, aligned to whole elements.
    unsafe { reducer.fold(&from, &to, bytes, finish) };
    let expected = with_one_nan(element, expected);
    for (index, region) in regions.iter().enumerate() {
        let content = region.content();
        if is_destination(index) {
            assert_eq!(with_one_nan(element, &content), expected, "region {index}");
        } else {
            assert_eq!(content, sources[index], "a source that is no destination changed");
        }
    }
}

proptest! {
    /// Every element type and reduction, with every instruction set of this CPU.
    #[test]
    fn a_fold_is_the_plain_fold(
        layout in layouts(),
        seed in 1..u64::MAX,
        finish in any::<bool>(),
        ranks in 1usize..9,
    ) {
        let mut random = Random(seed);
        for element in Element::ALL {
            let mut source =
                || (0..layout.elements).flat_map(|_| random.element(element)).collect();
            let sources: Vec<Vec<u8>> = (0..layout.sources).map(|_| source()).collect();
            for reduction in Reduction::ALL {
                let divides = finish && reduction == Reduction::Avg;
                let divisor = divides.then_some(ranks);
                let expected = expected(element, reduction, &sources, divisor);
                for set in InstructionSet::ALL.iter().filter(|set| set.is_available()) {
                    let reducer = Reducer::with(*set, element, reduction, ranks).unwrap();
                    check(reducer, &layout, &sources, &expected, finish);
                }
            }
        }
    }
}

#[test]
fn a_source_given_twice_counts_twice() {
    let mut numbers = [1.5f32, -2.0, 8.0];
    let region = numbers.as_mut_ptr().cast::<u8>();
    let reducer = Reducer::new(Element::F32, Reduction::Sum, 2);
    // SAFETY: one region of 12 bytes, which is both sources and the destination.
    unsafe { reducer.fold(&[region, region], &[region], 12, true) };
    assert_eq!(numbers, [3.0, -4.0, 16.0]);
}
