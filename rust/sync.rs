//! Primitives for model-checked code: the standard ones, or loom's under `--cfg loom`. Only code
//! that a model covers should import them.

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
