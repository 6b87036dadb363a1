//! How the elements of a gradient are cut into chunks: by two numbers that all ranks share, and
//! nothing else.

use std::ops::Range;

/// Chunks of `chunk_len` elements each, the last of which may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkGrid {
    pub elements: usize,
    /// Elements per chunk; at least 1.
    pub chunk_len: usize,
}

impl ChunkGrid {
    /// The number of chunks.
    pub fn chunks(&self) -> usize {
        self.elements.div_ceil(self.chunk_len)
    }

    /// The elements of the chunk with this index.
    pub fn range(&self, index: usize) -> Range<usize> {
        let start = |index: usize| index.saturating_mul(self.chunk_len).min(self.elements);
        start(index)..start(index + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_every_element_once(elements in 0usize..10_000, chunk in 1usize..12_000) {
            let grid = ChunkGrid { elements, chunk_len: chunk };
            let mut at = 0;
            for index in 0..grid.chunks() {
                let range = grid.range(index);
                prop_assert_eq!(range.start, at);
                let is_last = index + 1 == grid.chunks();
                prop_assert!(range.len() == chunk || (is_last && !range.is_empty()));
                at = range.end;
            }
            prop_assert_eq!(at, elements);
        }
    }
}
