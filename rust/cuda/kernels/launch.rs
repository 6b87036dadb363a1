//! How many threads each kernel is launched with. The kernels rely on these shapes.

use crate::codec::ChunkGrid;
use crate::codec::quantizer::{self, BLOCK};

/// As in kernels.cu, which explains them.
const ACCUMULATE_THREADS: u32 = 512;
const SELECT_THREADS: u32 = 1024;
const STREAM_THREADS: u32 = 256;
const WARP: u32 = 32;
const QUAD: usize = 4;
/// As in quantizer.cu.
const QUANTIZER_THREADS: u32 = 128;
const TURNS: usize = quantizer::TURNS as usize;

/// Quads per thread of the streaming kernels, so that several loads are in flight at once.
const QUADS_PER_THREAD: usize = 4;
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

pub fn rescale_sizes(elements: usize) -> LaunchConfig {
    stream(elements)
}

/// A warp for each of these blocks of a quantiser.
pub fn quantizer(blocks: usize) -> LaunchConfig {
    let warps = (QUANTIZER_THREADS / WARP) as usize;
    LaunchConfig::new(blocks.div_ceil(warps), 1, QUANTIZER_THREADS)
}

/// A warp for each block whose turn it is, from block `first` on.
pub fn follow_sizes(elements: usize, first: usize) -> LaunchConfig {
    quantizer(elements.div_ceil(BLOCK).saturating_sub(first).div_ceil(TURNS))
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
    use crate::codec::quantizer::{RUN, SAMPLED};

    #[test]
    fn the_constants_are_those_of_the_source() {
        let source = [include_str!("kernels.cu"), include_str!("quantizer.cu")].concat();
        for (name, value) in [
            ("ACCUMULATE_THREADS", ACCUMULATE_THREADS as usize),
            ("SELECT_THREADS", SELECT_THREADS as usize),
            ("STREAM_THREADS", STREAM_THREADS as usize),
            ("QUAD", QUAD),
            ("WARP", WARP as usize),
            ("QUANTIZER_THREADS", QUANTIZER_THREADS as usize),
            ("QUANTIZED", BLOCK),
            ("TURNS", TURNS),
            ("RUN", RUN),
            ("SAMPLED", SAMPLED),
        ] {
            let line = format!("const unsigned {name} = {value};");
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn a_grid_without_chunks_is_not_launched() {
        let grid = ChunkGrid { elements: 0, chunk_len: 8 };
        assert!(accumulate(grid).is_empty() && unpack(grid).is_empty() && pack(grid, 0).is_empty());
        assert!(add_velocity(0).is_empty() && rescale(0).is_empty());
        assert!(rescale_sizes(0).is_empty() && quantizer(0).is_empty());
        assert!(follow_sizes(0, 0).is_empty() && follow_sizes(5 * BLOCK, 5).is_empty());
        assert_eq!(follow_sizes(5 * BLOCK + 1, 5).grid, (1, 1, 1));
        let grid = ChunkGrid { elements: 1, chunk_len: usize::MAX };
        assert_eq!(accumulate(grid).grid, (1, 1, 1));
        assert_eq!(pack(grid, 1).grid, (1, 1, 1));
    }
}
