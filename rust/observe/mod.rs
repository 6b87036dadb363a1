//! What happened and when: counters, times of the stages of an exchange, log records.
//!
//! Watching never slows down what it watches: no function here waits for an exchange or takes a lock
//! that one holds for long.

pub mod counters;
pub mod gradients;
pub mod log;
pub mod threads;
pub mod traffic;
