//! What the engine needs of an operation: a way to do it and a way to say that it is over.

use crate::collective::span::Memory;
use crate::error::{Error, Result};
use crate::transport::interrupt::Interrupt;
use std::sync::Arc;

/// Shared between the queue, the thread that does it and whoever aborts the group.
pub trait Operation: Send + Sync {
    /// Makes the tensors such that they can be exchanged. It comes first, and once.
    fn prepare(&self) -> Result<()>;

    /// The memory of its tensors, contiguous, valid until [`Operation::finish`] has returned.
    /// For a collective that the engine does itself; it is asked for once.
    fn open(&self) -> Result<Memory>;

    /// Begins a collective on the inner backend, after the ranks have agreed, and raises `done`
    /// when it is over. An operation that runs aside has nothing to begin.
    fn start(&self, done: Arc<Interrupt>) -> Result<()>;

    /// Waits for what was begun and returns how it ended; puts the results where they belong.
    fn finish(&self) -> Result<()>;

    /// Whether it failed because a connection did.
    fn broke_connection(&self) -> bool;

    /// Releases whoever waits, with the error if there is one. Only the first call counts.
    /// Returns whether [`Operation::notify`] is still owed.
    fn settle(&self, error: Option<&Error>) -> bool;

    /// Completes the Future. It runs the user's callbacks, so it may take any time, call back
    /// into this group, and wait for operations that are still queued.
    fn notify(&self);
}
