//! How many threads each kernel is launched with. The kernels rely on these shapes.

use crate::codec::ChunkGrid;
use crate::codec::quantizer::{BLOCK, TURNS};

/// As in kernels.cu and quantizer.cu, which explain them.
const ACCUMULATE_THREADS: u32 = 512;
const SELECT_THREADS: u32 = 1024;
const STREAM_THREADS: u32 = 256;
const QUANTIZER_THREADS: u32 = 128;
const QUAD: usize = 4;

/// Quads per thread of the streaming kernels, so that several loads are in flight at once.
const QUADS_PER_THREAD: usize = 4;
/// Of the kernels of the quantiser, which give each of its blocks to a warp.
const BLOCKS_AT_ONCE: usize = QUANTIZER_THREADS as usize / 32;
const ELEMENTS_PER_BLOCK: usize = STREAM_THREADS as usize * QUAD * QUADS_PER_THREAD;

/// CUDA's limits on the dimensions of a grid.
const MAX_X: usize = (1 << 31) - 1;
const MAX_Y: usize = 65535;

/// The grid and block of a launch, and its dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    pub grid: (u32, u32, u32),
    pub block: (u32, u32, u32),
    pub shared: u32,
}

impl LaunchConfig {
    /// Whether there is nothing to do. The driver refuses such a launch.
    pub fn is_empty(&self) -> bool {
        self.grid.0 == 0
    }

    fn new(x: usize, y: usize, threads: u32) -> LaunchConfig {
        assert!(x <= MAX_X, "gflow: {x} chunks are too many for a GPU: choose a larger chunk");
        // In y, blocks stride over a chunk, so there can be fewer.
        let (x, y) = (x as u32, y.clamp(1, MAX_Y) as u32);
        LaunchConfig { grid: (x, y, 1), block: (threads, 1, 1), shared: 0 }
    }
}

/// One block per chunk.
pub fn accumulate(grid: ChunkGrid) -> LaunchConfig {
    LaunchConfig::new(grid.chunks(), 1, ACCUMULATE_THREADS)
}

/// One block.
pub fn select() -> LaunchConfig {
    LaunchConfig::new(1, 1, SELECT_THREADS)
}

/// Several blocks for each of the `selected` chunks that are sent.
pub fn pack(grid: ChunkGrid, selected: usize) -> LaunchConfig {
    LaunchConfig::new(selected, blocks_per_chunk(grid), STREAM_THREADS)
}

/// Several blocks for each chunk.
pub fn unpack(grid: ChunkGrid) -> LaunchConfig {
    LaunchConfig::new(grid.chunks(), blocks_per_chunk(grid), STREAM_THREADS)
}

pub fn add_velocity(elements: usize) -> LaunchConfig {
    stream(elements)
}

pub fn rescale(elements: usize) -> LaunchConfig {
    stream(elements)
}

/// A warp for each of so many blocks of the quantiser.
pub fn quantize(blocks: usize) -> LaunchConfig {
    LaunchConfig::new(blocks.div_ceil(BLOCKS_AT_ONCE), 1, QUANTIZER_THREADS)
}

/// A warp for each block of the quantiser whose sizes are updated at this step, if `first` is the
/// first of them.
pub fn follow(elements: usize, first: usize) -> LaunchConfig {
    quantize(elements.div_ceil(BLOCK).saturating_sub(first).div_ceil(TURNS as usize))
}

pub fn scale_sizes(elements: usize) -> LaunchConfig {
    stream(elements)
}

/// Blocks that stride over all elements.
fn stream(elements: usize) -> LaunchConfig {
    LaunchConfig::new(elements.div_ceil(ELEMENTS_PER_BLOCK).min(MAX_X), 1, STREAM_THREADS)
}

fn blocks_per_chunk(grid: ChunkGrid) -> usize {
    grid.chunk_len.min(grid.elements).div_ceil(ELEMENTS_PER_BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_are_those_of_the_source() {
        let source = concat!(include_str!("kernels.cu"), include_str!("quantizer.cu"));
        for (name, value) in [
            ("ACCUMULATE_THREADS", ACCUMULATE_THREADS as usize),
            ("SELECT_THREADS", SELECT_THREADS as usize),
            ("STREAM_THREADS", STREAM_THREADS as usize),
            ("QUANTIZER_THREADS", QUANTIZER_THREADS as usize),
            ("QUAD", QUAD),
            ("BLOCK", BLOCK),
            ("TURNS", TURNS as usize),
        ] {
            let line = format!("const unsigned {name} = {value};");
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn a_grid_without_chunks_is_not_launched() {
        let grid = ChunkGrid { elements: 0, chunk_len: 8 };
        assert!(accumulate(grid).is_empty() && unpack(grid).is_empty() && pack(grid, 0).is_empty());
        assert!(add_velocity(0).is_empty() && rescale(0).is_empty() && scale_sizes(0).is_empty());
        assert!(quantize(0).is_empty() && follow(0, 0).is_empty());
        assert!(follow(3 * BLOCK, 3).is_empty() && follow(3 * BLOCK + 1, 3).grid == (1, 1, 1));
        let grid = ChunkGrid { elements: 1, chunk_len: usize::MAX };
        assert_eq!(accumulate(grid).grid, (1, 1, 1));
        assert_eq!(pack(grid, 1).grid, (1, 1, 1));
    }
}
