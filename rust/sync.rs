//! Primitives for model-checked code: the standard ones, or loom's under `--cfg loom`. Only code
//! that a model covers should import them. All other code takes the standard ones, and [`lock`].

#[cfg(loom)]
pub use loom::sync::{Condvar, Mutex, MutexGuard, atomic, atomic::fence};
#[cfg(not(loom))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic, atomic::fence};

/// Hints to the processor, or the model, that this thread spins.
pub fn relax() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::hint::spin_loop();
}

/// Locks a mutex, poisoned or not. All our locks protect data that is valid after every statement, or
/// that nobody uses after a panic because the group has failed.
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
