//! The primitives that model-checked code is written with: the standard ones, or loom's under
//! `--cfg loom`. Only what the models cover is named here.

#[cfg(loom)]
pub use loom::sync::{Condvar, Mutex, MutexGuard, atomic, atomic::fence};
#[cfg(not(loom))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic, atomic::fence};

/// Tells the processor, or the model, that this thread only waits for another.
pub fn relax() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::hint::spin_loop();
}
