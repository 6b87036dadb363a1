//! The engine of a group: a queue of collectives, one worker thread that runs them with the other ranks,
//! a courier for gradients that cross hosts, and a pool of threads for whatever may block.
//!
//! | file | what it is |
//! |---|---|
//! | `group` | joining a group, and what was agreed on then |
//! | `handle` | [`Engine`]: submit, wait, read the counters |
//! | `lifecycle` | abort and close |
//! | `state` | saving and loading what is kept of gradients |
//! | `worker` | the thread that takes tasks and completes them |
//! | `run` | one collective: get ready, agree, carry it out |
//! | `watch` | how the courier and the devices' watchdog check the group |
//! | `failure` | from a failure to the error that the user sees |
//! | `shared`, `activity` | what the worker and the callers share |
//! | `queue`, `operation`, `blocking_pool` | what these are built from |

mod activity;
mod blocking_pool;
mod failure;
pub mod group;
mod handle;
mod lifecycle;
pub mod operation;
mod queue;
mod run;
mod shared;
mod state;
#[cfg(test)]
mod tests;
mod watch;
mod worker;

pub use handle::Engine;
