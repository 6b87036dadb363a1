//! Entries that concern the whole process.

use super::{guard, torch_codes, types};
use crate::cuda::{self, Finding};
use crate::error::{Error, Result};
use crate::fork;

/// The Python name of a torch type, for messages that C++ writes.
pub(super) fn dtype_name(code: u8) -> Result<String> {
    guard(|| Ok(torch_codes::data_type(code).to_string()))
}

/// The GPU path's requirements, and whether this machine meets them.
pub(super) fn look_for_gpus() -> Result<Vec<types::Finding>> {
    guard(|| {
        let finding = |Finding { what, outcome }: Finding| {
            let is_there = outcome.is_ok();
            types::Finding { what, found: outcome.unwrap_or_else(|why| why), is_there }
        };
        Ok(cuda::probe().into_iter().map(finding).collect())
    })
}

// Fork handlers: they cannot fail, and a panic could not be caught where they run.

pub(super) fn before_fork() {
    fork::before();
}

pub(super) fn after_fork_in_parent() {
    fork::after_in_parent();
}

pub(super) fn after_fork_in_child() {
    fork::after_in_child();
}

/// Fails on purpose, so that `gflow doctor` and the tests can see that failures arrive.
pub(super) fn provoke(what: &str) -> Result<()> {
    guard(|| match what {
        "error" => Err(Error::Operation("gflow: a Rust error, provoked on purpose".into())),
        "panic" => panic!("provoked on purpose"),
        other => Err(Error::Operation(format!("gflow: cannot provoke {other:?}: error or panic"))),
    })
}
