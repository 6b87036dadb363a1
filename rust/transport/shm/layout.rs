//! The memory layout of a rank's segment.
//!
//! ```text
//! 0            the control block
//! MESSAGES_AT  two slots for messages
//! BLOCKS_AT    slots for blocks of tensors that pass through
//! HEAP_AT      the tensors that live in the arena
//! ```

use crate::transport::frame::MAX_PAYLOAD;

/// The longest message that ranks of one host can swap.
pub const MESSAGE_BYTES: usize = MAX_PAYLOAD;
/// This many blocks of a tensor can be in flight: being filled, combined or emptied.
pub const BLOCK_SLOTS: usize = 4;
/// Small enough that blocks stay in the cache that the ranks share, large enough that a rank which
/// has to wait for a core does not wait often. (25 MiB on 2 cores: with 128 KiB less than half as
/// fast for 2 ranks, with 2 MiB a third slower for 4.)
pub const BLOCK_BYTES: usize = 512 * 1024;

const PAGE: usize = 4096;
pub const MESSAGE_SLOTS: usize = 2;
pub const MESSAGE_STRIDE: usize = MESSAGE_BYTES + PAGE;
pub const MESSAGES_AT: usize = PAGE;
pub const BLOCKS_AT: usize = MESSAGES_AT + MESSAGE_SLOTS * MESSAGE_STRIDE;
/// Where the heap begins, and the least that a segment must hold.
pub const HEAP_AT: usize = BLOCKS_AT + BLOCK_SLOTS * BLOCK_BYTES;
