//! The kernels of kernels.cu: what they are called, and how many threads each is launched with. The
//! kernels rely on these shapes, so a launch must never be made up anywhere else.

use crate::codec::{ChunkGrid, Wire};
use crate::simd::element::Element;
use std::ffi::CStr;

/// As in kernels.cu, where each of these is explained.
const ACCUMULATE_THREADS: u32 = 512;
const SELECT_THREADS: u32 = 1024;
const STREAM_THREADS: u32 = 256;
const QUAD: usize = 4;

/// How many quads a thread of the kernels that stream takes: several are on their way at once then.
const QUADS_PER_THREAD: usize = 4;
const ELEMENTS_PER_BLOCK: usize = STREAM_THREADS as usize * QUAD * QUADS_PER_THREAD;

/// The largest dimensions of a grid.
const MAX_X: usize = (1 << 31) - 1;
const MAX_Y: usize = 65535;

/// Stands for the slot of a chunk that is not sent.
pub const NOT_CHOSEN: u32 = u32::MAX;

/// A float that a kernel reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    F32,
    F16,
    BF16,
}

impl Float {
    pub const ALL: [Float; 3] = [Float::F32, Float::F16, Float::BF16];

    /// None if elements of this type are not compressed.
    pub fn of(element: Element) -> Option<Float> {
        match element {
            Element::F32 => Some(Float::F32),
            Element::F16 => Some(Float::F16),
            Element::BF16 => Some(Float::BF16),
            _ => None,
        }
    }
}

impl From<Wire> for Float {
    fn from(wire: Wire) -> Float {
        match wire {
            Wire::F16 => Float::F16,
            Wire::BF16 => Float::BF16,
            Wire::F32 => Float::F32,
        }
    }
}

/// One of the kernels. What it does is said in kernels.cu and in `compress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    Accumulate(Float),
    Select,
    Pack(Float),
    Unpack { wire: Float, gradient: Float },
    AddVelocity(Float),
    Rescale,
}

impl Kernel {
    /// Every kernel there is.
    pub fn all() -> impl Iterator<Item = Kernel> {
        let of_one =
            |float| [Kernel::Accumulate(float), Kernel::Pack(float), Kernel::AddVelocity(float)];
        let of_two = |wire| Float::ALL.map(|gradient| Kernel::Unpack { wire, gradient });
        let floats = || Float::ALL.into_iter();
        let others = [Kernel::Select, Kernel::Rescale];
        floats().flat_map(of_one).chain(floats().flat_map(of_two)).chain(others)
    }

    /// What it is called in kernels.cu.
    pub fn name(self) -> &'static CStr {
        use Float::{BF16, F16, F32};
        match self {
            Kernel::Accumulate(F32) => c"gflow_accumulate_f32",
            Kernel::Accumulate(F16) => c"gflow_accumulate_f16",
            Kernel::Accumulate(BF16) => c"gflow_accumulate_bf16",
            Kernel::Select => c"gflow_select",
            Kernel::Pack(F32) => c"gflow_pack_f32",
            Kernel::Pack(F16) => c"gflow_pack_f16",
            Kernel::Pack(BF16) => c"gflow_pack_bf16",
            Kernel::Unpack { wire: F16, gradient: F32 } => c"gflow_unpack_f16_f32",
            Kernel::Unpack { wire: F16, gradient: F16 } => c"gflow_unpack_f16_f16",
            Kernel::Unpack { wire: F16, gradient: BF16 } => c"gflow_unpack_f16_bf16",
            Kernel::Unpack { wire: BF16, gradient: F32 } => c"gflow_unpack_bf16_f32",
            Kernel::Unpack { wire: BF16, gradient: F16 } => c"gflow_unpack_bf16_f16",
            Kernel::Unpack { wire: BF16, gradient: BF16 } => c"gflow_unpack_bf16_bf16",
            Kernel::Unpack { wire: F32, gradient: F32 } => c"gflow_unpack_f32_f32",
            Kernel::Unpack { wire: F32, gradient: F16 } => c"gflow_unpack_f32_f16",
            Kernel::Unpack { wire: F32, gradient: BF16 } => c"gflow_unpack_f32_bf16",
            Kernel::AddVelocity(F32) => c"gflow_add_velocity_f32",
            Kernel::AddVelocity(F16) => c"gflow_add_velocity_f16",
            Kernel::AddVelocity(BF16) => c"gflow_add_velocity_bf16",
            Kernel::Rescale => c"gflow_rescale",
        }
    }
}

/// How many blocks of how many threads, and how much shared memory beyond what a kernel has anyway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub grid: (u32, u32, u32),
    pub block: (u32, u32, u32),
    pub shared: u32,
}

impl Launch {
    /// Whether there is nothing to do. The driver refuses such a launch.
    pub fn is_empty(&self) -> bool {
        self.grid.0 == 0
    }

    fn new(x: usize, y: usize, threads: u32) -> Launch {
        assert!(x <= MAX_X, "gflow: {x} chunks are too many for a GPU: choose a larger chunk");
        // A number of parts that take turns, so it can be fewer.
        let (x, y) = (x as u32, y.clamp(1, MAX_Y) as u32);
        Launch { grid: (x, y, 1), block: (threads, 1, 1), shared: 0 }
    }
}

/// A block for each chunk.
pub fn accumulate(grid: ChunkGrid) -> Launch {
    Launch::new(grid.chunks(), 1, ACCUMULATE_THREADS)
}

/// One block.
pub fn select() -> Launch {
    Launch::new(1, 1, SELECT_THREADS)
}

/// A block for each part of each of the `count` chunks that are sent.
pub fn pack(grid: ChunkGrid, count: usize) -> Launch {
    Launch::new(count, parts(grid), STREAM_THREADS)
}

/// A block for each part of each chunk.
pub fn unpack(grid: ChunkGrid) -> Launch {
    Launch::new(grid.chunks(), parts(grid), STREAM_THREADS)
}

pub fn add_velocity(elements: usize) -> Launch {
    stream(elements)
}

pub fn rescale(elements: usize) -> Launch {
    stream(elements)
}

/// Blocks that take turns with all elements.
fn stream(elements: usize) -> Launch {
    Launch::new(elements.div_ceil(ELEMENTS_PER_BLOCK).min(MAX_X), 1, STREAM_THREADS)
}

fn parts(grid: ChunkGrid) -> usize {
    grid.chunk_len.min(grid.elements).div_ceil(ELEMENTS_PER_BLOCK)
}

/// What a norm is limited to before NCCL adds those of so many hosts: no sum of finite norms is
/// infinite then, which would look like a poisoned chunk.
///
/// NCCL adds in an order that nobody knows, and rounds. With a power of two for each host every
/// partial sum is at most a multiple of that power, which a float can express, and so rounding never
/// takes it beyond.
pub fn largest_norm(hosts: usize) -> f32 {
    if hosts <= 1 {
        return f32::MAX;
    }
    let exponent = 127 - hosts.next_power_of_two().trailing_zeros();
    f32::from_bits((127 + exponent) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        let mut names: Vec<_> = Kernel::all().map(Kernel::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!((count, names.len()), (20, 20));
    }

    #[test]
    fn the_constants_are_those_of_the_source() {
        let source = include_str!("kernels.cu");
        for (name, value) in [
            ("ACCUMULATE_THREADS", ACCUMULATE_THREADS as usize),
            ("SELECT_THREADS", SELECT_THREADS as usize),
            ("STREAM_THREADS", STREAM_THREADS as usize),
            ("QUAD", QUAD),
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
        let grid = ChunkGrid { elements: 1, chunk_len: usize::MAX };
        assert_eq!(accumulate(grid).grid, (1, 1, 1));
        assert_eq!(pack(grid, 1).grid, (1, 1, 1));
    }

    #[test]
    fn one_host_has_no_limit_but_that_of_the_type() {
        assert_eq!(largest_norm(1), f32::MAX);
        assert_eq!(largest_norm(2), 2f32.powi(126));
        assert_eq!(largest_norm(3), 2f32.powi(125));
        assert_eq!(largest_norm(1024), 2f32.powi(117));
    }

    proptest! {
        #[test]
        fn limited_norms_never_add_up_to_infinity_in_any_order(
            mut norms in prop::collection::vec(
                prop_oneof![Just(f32::MAX), 0.0f32..1.0, 1e37f32..3e38], 1..200
            ),
        ) {
            let limit = largest_norm(norms.len());
            norms.iter_mut().for_each(|norm| *norm = norm.min(limit));
            let forwards = norms.iter().fold(0.0f32, |sum, norm| sum + norm);
            let backwards = norms.iter().rev().fold(0.0f32, |sum, norm| sum + norm);
            prop_assert!(forwards.is_finite() && backwards.is_finite());
            // By halves, as a tree adds.
            let mut tree = norms.clone();
            while tree.len() > 1 {
                tree = tree.chunks(2).map(|pair| pair.iter().sum()).collect();
            }
            prop_assert!(tree[0].is_finite());
            // Who was limited can still be told from the sum.
            if norms.contains(&limit) {
                prop_assert!(forwards >= limit && backwards >= limit && tree[0] >= limit);
            }
        }
    }
}
