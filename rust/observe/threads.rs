//! How the engine starts its threads: named, so that a debugger and `top -H` show what each is for,
//! and logging for the group of the thread that starts them.

use super::log::in_same_group;
use std::io::Result;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// Starts a thread. Linux shows the first 15 bytes of its name.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Builder::new().name(name.to_string()).spawn(in_same_group(work))
}

/// Starts a thread that ends within `scope`.
pub fn spawn_scoped<'scope, 'env, T: Send + 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.to_string()).spawn_scoped(scope, in_same_group(work))
}
