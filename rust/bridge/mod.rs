//! Where C++ and Rust meet: one file for each thing that crosses.
//!
//! | file | what crosses |
//! |---|---|
//! | `types` | the types, as cxx generates them for both sides |
//! | `entries` | the functions that C++ calls, all declared in one place |
//! | `endpoint` | the sockets of a group that is being made |
//! | `group` | a group: joining it, its state, closing it |
//! | `call` | a collective: its description in, its outcome out |
//! | `memory` | memory for gradient buckets |
//! | `state` | what is kept of gradients between steps |
//! | `metrics` | counters |
//! | `log` | log records |
//! | `process` | what concerns the whole process: forks, GPUs, deliberate failures |
//! | `torch_codes` | torch's numbers for kinds of collective, element types and reductions |
//!
//! This folder translates types and makes no decisions. Every entry from C++ that can fail runs in
//! [`guard`], which turns a panic into an error, and cxx turns that into a C++ exception. A panic
//! that reached cxx would abort the process. C++ exceptions arrive here as errors with their
//! message.

mod call;
mod endpoint;
mod entries;
mod group;
mod log;
mod memory;
mod metrics;
mod process;
mod state;
mod torch_codes;
mod types;

use crate::error::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Runs an entry from C++ and turns a panic into an error.
fn guard<T>(entry: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(entry)).unwrap_or_else(|payload| Err(Error::from_panic(payload)))
}

/// A timeout from Python, capped so that adding it to an `Instant` cannot overflow.
fn milliseconds(value: u64) -> Duration {
    const TEN_YEARS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    Duration::from_millis(value).min(TEN_YEARS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_panic_in_an_entry_becomes_an_error_with_its_message() {
        let text = process::provoke("panic").unwrap_err().to_string();
        assert!(text.contains("provoked on purpose") && text.contains("please report"), "{text}");
    }

    #[test]
    fn the_longest_timeout_still_gives_a_point_in_time() {
        assert!(Instant::now().checked_add(milliseconds(u64::MAX)).is_some());
    }
}
