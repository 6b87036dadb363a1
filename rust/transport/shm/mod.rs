//! Memory that the ranks of one host share: each has a segment, and maps those of the others.
//!
//! Values written by a peer are bounds-checked before use and not trusted otherwise. Segments
//! and sockets have no name in the file system, so a killed job leaves nothing behind.
//!
//! | file | what it is |
//! |---|---|
//! | `segment` | memory that other processes can map: a sealed memfd |
//! | `layout` | what lies where in a segment |
//! | `blocks`, `arena` | the heap of a segment, where tensors live |
//! | `counter`, `futex`, `event_count` | how ranks see each other's progress, and sleep until it comes |
//! | `region` | the segments of a host's ranks, with swaps of messages and steps in common |
//! | `unix_link`, `fd_exchange` | how ranks give each other their segments |

pub mod arena;
pub mod blocks;
pub mod counter;
pub mod event_count;
pub mod fd_exchange;
mod futex;
pub mod layout;
pub mod region;
pub mod segment;
mod unix_link;
