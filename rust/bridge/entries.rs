//! Every function that C++ calls. cxx generates both sides from these declarations; the functions
//! themselves are in the files next to this one. C++ includes "rust/bridge/entries.rs.h".

use super::endpoint::{Endpoint, open_endpoint};
use super::group::{Group, close_all_groups, join_group};
use super::log::{next_log_records, start_log, stop_log};
use super::memory::{SharedMemory, prefer_huge_pages};
use super::process::{
    after_fork_in_child, after_fork_in_parent, before_fork, dtype_name, look_for_gpus, provoke,
};

#[cxx::bridge(namespace = "gflow")]
mod declared {
    unsafe extern "C++" {
        include!("gflow/rust/bridge/types.rs.h");
        type BucketState = crate::bridge::types::BucketState;
        type ByteRange = crate::bridge::types::ByteRange;
        type CallDescription = crate::bridge::types::CallDescription;
        type Finding = crate::bridge::types::Finding;
        type GroupConfig = crate::bridge::types::GroupConfig;
        type LogRecord = crate::bridge::types::LogRecord;
        type MetricsSnapshot = crate::bridge::types::MetricsSnapshot;
        type Operation = crate::bridge::types::Operation;
        type Position = crate::bridge::types::Position;
    }

    extern "Rust" {
        // endpoint.rs
        type Endpoint;
        fn open_endpoint(address: &str) -> Result<Box<Endpoint>>;
        fn address(self: &Endpoint) -> String;
        fn fd_socket(self: &Endpoint) -> String;

        // group.rs
        type Group;
        fn join_group(endpoint: Box<Endpoint>, config: &GroupConfig) -> Result<Box<Group>>;
        fn close_all_groups() -> Result<()>;
        fn notice(self: &Group) -> String;
        fn compresses(self: &Group) -> bool;
        fn position(self: &Group) -> Result<Position>;
        fn seq(self: &Group) -> Result<u64>;
        fn open_device(self: &Group, device: i32, stream: u64) -> Result<()>;
        fn check_usable(self: &Group) -> Result<()>;
        fn fence(self: &Group, timeout_ms: u64) -> Result<()>;
        fn abort(self: &Group, why: &str) -> Result<()>;
        fn close(self: &Group) -> Result<()>;

        // call.rs
        fn submit(
            self: &Group,
            call: CallDescription,
            operation: SharedPtr<Operation>,
        ) -> Result<u64>;
        fn submit_and_wait(
            self: &Group,
            call: CallDescription,
            operation: SharedPtr<Operation>,
        ) -> Result<u64>;
        fn submit_aside(self: &Group, operation: SharedPtr<Operation>) -> Result<()>;
        fn flush(self: &Group) -> Result<()>;
        fn end_of_pass(self: &Group) -> Result<()>;

        // memory.rs
        type SharedMemory;
        fn allocate(self: &Group, bytes: usize) -> Result<Box<SharedMemory>>;
        fn address(self: &SharedMemory) -> usize;
        unsafe fn prefer_huge_pages(address: *mut u8, bytes: usize);

        // state.rs
        fn forget(self: &Group, buckets: &[u32]) -> Result<()>;
        fn shard_of(self: &Group, bytes: usize) -> Result<ByteRange>;
        fn bucket_state(
            self: &Group,
            number: u32,
            step: u64,
            timeout_ms: u64,
        ) -> Result<BucketState>;
        fn load_bucket(
            self: &Group,
            number: u32,
            state: BucketState,
            owes: bool,
            timeout_ms: u64,
        ) -> Result<()>;
        fn set_momentum(self: &Group, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()>;
        fn set_stepping(
            self: &Group,
            stepping: &str,
            buckets: &[u32],
            timeout_ms: u64,
        ) -> Result<()>;
        fn chosen_method(self: &Group, timeout_ms: u64) -> Result<String>;
        fn set_chosen_method(self: &Group, method: &str, timeout_ms: u64) -> Result<()>;
        fn keep_for_undo(self: &Group, enabled: bool, timeout_ms: u64) -> Result<()>;
        fn add_layout(
            self: &Group,
            parameters: usize,
            buckets: &[u32],
            indices: &[u32],
            numels: &[u64],
        ) -> Result<()>;
        fn keep_last_step(self: &Group, timeout_ms: u64) -> Result<()>;
        fn record_step(self: &Group, skipped: bool, factor: f32, timeout_ms: u64) -> Result<()>;

        // metrics.rs
        fn metrics(self: &Group) -> Result<MetricsSnapshot>;
        fn announcement(self: &Group) -> Result<String>;
        fn name(self: &Group) -> String;

        // log.rs
        fn start_log(level: u8) -> Result<()>;
        fn next_log_records() -> Result<Vec<LogRecord>>;
        fn stop_log() -> Result<()>;

        // process.rs
        fn dtype_name(code: u8) -> Result<String>;
        fn look_for_gpus() -> Result<Vec<Finding>>;
        fn before_fork();
        fn after_fork_in_parent();
        fn after_fork_in_child();
        fn provoke(what: &str) -> Result<()>;
    }
}
