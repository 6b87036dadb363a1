//! What the engine needs of a collective: a way to do it and a way to say that it is over.

use crate::error::{Error, Result};

/// Shared between the queue, the thread that runs it and whoever aborts the group.
pub trait Operation: Send + Sync {
    /// Moves the data. Called once, by the group's worker, after the ranks have agreed.
    fn run(&self) -> Result<()>;

    /// Releases whoever waits, with the error if there is one. Only the first call counts.
    /// Returns whether [`Operation::notify`] is still owed.
    fn settle(&self, error: Option<&Error>) -> bool;

    /// Completes the Future. It runs the user's callbacks, so it may take any time, call back
    /// into this group, and wait for operations that are still queued.
    fn notify(&self);
}
