//! Memory that the ranks of one host share: each has a segment, and maps those of the others.
//!
//! What a peer writes is never trusted further than that it stays mapped and is bounded before it
//! is used. Nothing in here has a name in the file system, so a job that is killed leaves nothing
//! behind.

pub mod arena;
pub mod blocks;
pub mod counter;
pub mod event_count;
pub mod fd_exchange;
mod futex;
pub mod region;
pub mod segment;
mod unix_link;
