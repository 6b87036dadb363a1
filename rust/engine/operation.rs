//! The engine's view of an operation: how to carry it out, and how to report that it is complete.

use crate::collective::span::Memory;
use crate::error::{Error, Result};
use crate::transport::interrupt::Interrupt;
use std::sync::Arc;

/// Shared by the queue, the thread that runs it, and anyone who aborts the group.
pub trait Operation: Send + Sync {
    /// Makes the tensors ready to be exchanged. Called first, and once.
    fn prepare(&self) -> Result<()>;

    /// The memory of its tensors, contiguous, valid until [`Operation::finish`] has returned. Called at
    /// most once, for a collective that the engine carries out itself.
    fn open(&self) -> Result<Memory>;

    /// Starts a collective on the inner backend, after the ranks have agreed, and raises `done` when it
    /// is complete. An operation that runs aside has nothing to start.
    fn start(&self, done: Arc<Interrupt>) -> Result<()>;

    /// Waits for what was started and returns its outcome; puts the results where they belong.
    fn finish(&self) -> Result<()>;

    /// Whether it failed because a connection did.
    fn broke_connection(&self) -> bool;

    /// Releases all waiters, with the error if there is one. Only the first call counts. Returns whether
    /// [`Operation::notify`] is still due.
    fn complete(&self, error: Option<&Error>) -> bool;

    /// Completes the Future. It runs the user's callbacks, so it may take any time, call back into this
    /// group, and wait for operations that are still queued.
    fn notify(&self);
}
