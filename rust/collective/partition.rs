//! Cuts bytes into partitions. The cut depends on nothing but the length and the number of
//! partitions, so it is the same on every rank.

use std::ops::Range;

/// Partitions begin at multiples of this many bytes: a cache line, and a multiple of every element.
pub const ALIGNMENT: usize = 64;

/// The `index`-th range of [`partitions`].
pub fn partition(length: usize, count: usize, index: usize) -> Range<usize> {
    let units = length.div_ceil(ALIGNMENT);
    let (each, longer) = (units / count, units % count);
    let start = |index: usize| {
        let units_before = each * index + longer.min(index);
        units_before.saturating_mul(ALIGNMENT).min(length)
    };
    start(index)..start(index + 1)
}

/// `count` adjacent ranges that cover `0..length`. Their sizes differ by at most `ALIGNMENT`,
/// except that the last ones may be short or empty.
pub fn partitions(length: usize, count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).map(move |index| partition(length, count, index))
}

/// The same ranges, as slices of `bytes`.
pub fn partition_slice(mut bytes: &mut [u8], count: usize) -> impl Iterator<Item = &mut [u8]> {
    partitions(bytes.len(), count).map(move |range| {
        let (partition, rest) = std::mem::take(&mut bytes).split_at_mut(range.len());
        bytes = rest;
        partition
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_everything_once_aligned_and_evenly(
            length in 0usize..100_000, count in 1usize..20
        ) {
            let chunks: Vec<_> = partitions(length, count).collect();
            prop_assert_eq!(chunks.len(), count);
            let mut at = 0;
            for chunk in &chunks {
                prop_assert_eq!(chunk.start, at);
                prop_assert!(chunk.is_empty() || chunk.start % ALIGNMENT == 0);
                at = chunk.end;
            }
            prop_assert_eq!(at, length);
            let longest = chunks.iter().map(ExactSizeIterator::len).max().unwrap();
            prop_assert!(longest < (length / count + 2 * ALIGNMENT));
            // All but the last with anything in it are at most one unit shorter.
            let filled = chunks.iter().filter(|chunk| !chunk.is_empty()).count();
            for chunk in &chunks[..filled.saturating_sub(1)] {
                prop_assert!(chunk.len() + ALIGNMENT >= longest);
            }
            let mut bytes = vec![0; length];
            let slices: Vec<_> = partition_slice(&mut bytes, count).map(|slice| slice.len()).collect();
            let ranges: Vec<_> = chunks.iter().map(ExactSizeIterator::len).collect();
            prop_assert_eq!(slices, ranges);
        }
    }
}
