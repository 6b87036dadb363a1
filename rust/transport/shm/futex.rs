//! A word that a process can sleep on until another process changes it.
//!
//! Normally this is Linux's futex, in memory that processes share. In a loom model it is what the
//! kernel promises: comparing the word and falling asleep is one atomic step.

#[cfg(not(loom))]
mod kernel {

    use rustix::event::Timespec;
    use rustix::thread::futex::{Flags, wait, wake};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    #[repr(transparent)]
    pub struct Futex(AtomicU32);

    impl Futex {
        #[cfg(test)]
        pub fn new(value: u32) -> Futex {
            Futex(AtomicU32::new(value))
        }

        pub fn load(&self) -> u32 {
            self.0.load(Ordering::Acquire)
        }

        /// Sleeps if the word is still `value`; wakes after `limit`, or spuriously.
        pub fn sleep_while(&self, value: u32, limit: Duration) {
            let limit = Timespec::try_from(limit).ok();
            // Not FUTEX_PRIVATE: another process wakes it. The caller looks again whatever ends
            // the sleep.
            let _ = wait(&self.0, Flags::empty(), value, limit.as_ref());
        }

        pub fn bump_and_wake(&self) {
            self.0.fetch_add(1, Ordering::Release);
            let _ = wake(&self.0, Flags::empty(), 1);
        }
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::{Condvar, Mutex};
    use std::time::Duration;

    pub struct Futex {
        word: Mutex<u32>,
        changed: Condvar,
    }

    impl Futex {
        pub fn new(value: u32) -> Futex {
            Futex { word: Mutex::new(value), changed: Condvar::new() }
        }

        pub fn load(&self) -> u32 {
            *self.word.lock().unwrap()
        }

        pub fn sleep_while(&self, value: u32, _limit: Duration) {
            let word = self.word.lock().unwrap();
            if *word == value {
                drop(self.changed.wait(word).unwrap());
            }
        }

        pub fn bump_and_wake(&self) {
            *self.word.lock().unwrap() += 1;
            self.changed.notify_one();
        }
    }
}

#[cfg(not(loom))]
pub use kernel::Futex;
#[cfg(loom)]
pub use model::Futex;
