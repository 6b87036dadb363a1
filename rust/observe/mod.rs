//! What happened and when: counters, timings, log records.
//!
//! Observing must never slow down what it observes: no function here waits for an exchange, or
//! takes a lock that anyone holds for long.
//!
//! | file | |
//! |---|---|
//! | `counters.rs` | collectives and bytes per group |
//! | `gradient_counters.rs` | gradient exchanges: bytes per bucket, seconds per stage |
//! | `overlap.rs` | communication time hidden behind the backward pass, and exposed |
//! | `log.rs` | log records on their way to Python's `logging` |
//! | `threads.rs` | starts threads with a name and the log context of the starter |

pub mod counters;
pub mod gradient_counters;
pub mod log;
pub mod overlap;
pub mod threads;
