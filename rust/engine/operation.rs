//! What the engine needs of an operation: a way to do it and a way to say that it is over.

use crate::error::{Error, Result};
use crate::transport::interrupt::Interrupt;
use std::sync::Arc;

/// Shared between the queue, the thread that does it and whoever aborts the group.
pub trait Operation: Send + Sync {
    /// Begins a collective after the ranks have agreed, and raises `done` when it is over. Only
    /// the worker calls it; an operation that runs aside has nothing to begin.
    fn start(&self, done: Arc<Interrupt>) -> Result<()>;

    /// Waits for what was begun and returns how it ended.
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
