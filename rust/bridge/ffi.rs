//! The types and functions that cross between C++ and Rust, for cxx to generate both sides of.
//!
//! It only declares; the functions are in the other files of this folder. C++ includes the
//! generated header as "rust/bridge/ffi.rs.h".

use super::call::Done;
use super::endpoint::{Endpoint, open_endpoint};
use super::group::{Group, close_all_groups, join_group};
use super::log::{next_log_records, start_log, stop_log};
use super::memory::{SharedMemory, prefer_huge_pages};
use super::process::{
    after_fork_in_child, after_fork_in_parent, before_fork, dtype_name, look_for_gpus, provoke,
};

pub(super) use generated::*;

#[cxx::bridge(namespace = "gflow")]
mod generated {
    /// One collective as C++ describes it; the fields are those of `collective::call`.
    struct CallDescription {
        kind: u8,
        dtype: u8,
        reduce_op: u8,
        gradient: bool,
        bucket: u32,
        root: u32,
        tensors: u32,
        numel: u64,
        layout: u64,
        bytes: u64,
        timeout_ms: u64,
        /// The device that the tensors are on; -1 for the memory of the host.
        device: i32,
        /// The raw handle of the stream that the caller's work on them is on.
        stream: u64,
        complaint: String,
        sends: Vec<u64>,
        receives: Vec<u64>,
    }

    /// How gradients are exchanged; the fields are those of `gradients::Method`.
    struct Compression {
        enabled: bool,
        density: f64,
        chunk: u64,
        warmup_steps: u64,
        ramp_steps: u64,
        wire: String,
        fusion_bytes: u64,
        momentum: f32,
    }

    /// What this rank keeps of a gradient bucket.
    struct BucketState {
        step: u64,
        residual: Vec<f32>,
        velocity: Vec<f32>,
    }

    /// Where a rank is among the hosts of its group.
    struct Position {
        hosts: usize,
        carriers: usize,
        host: usize,
        /// Its index among the ranks of its host.
        local_rank: usize,
    }

    /// A part of a bucket, in bytes.
    struct ByteRange {
        start: usize,
        end: usize,
    }

    struct BucketMetrics {
        number: u32,
        steps: u64,
        gradient_bytes: u64,
        carried_bytes: u64,
        wire_bytes: u64,
        density: f64,
        residual_ratio: f64,
    }

    struct StageSeconds {
        name: String,
        seconds: f64,
    }

    struct KindCount {
        name: String,
        count: u64,
    }

    struct MetricsSnapshot {
        hosts: u64,
        ranks_here: u64,
        gradient_buckets: u64,
        gradient_bytes: u64,
        exact_tensors: u64,
        exact_bytes: u64,
        by_kind: Vec<KindCount>,
        compresses: bool,
        buckets: Vec<BucketMetrics>,
        /// Of buckets that are gone, and of norms: carried and sent.
        other_carried_bytes: u64,
        other_wire_bytes: u64,
        stages: Vec<StageSeconds>,
        hidden_seconds: f64,
        exposed_seconds: f64,
    }

    /// What a rank has to know to join a group.
    struct GroupConfig {
        name: String,
        rank: u32,
        /// One per rank: how messages name it.
        labels: Vec<String>,
        /// One per rank: where it listens, "address:port".
        addresses: Vec<String>,
        /// One per rank: ranks with the same word share memory if they can.
        hosts: Vec<String>,
        /// One per rank: the name of its Unix socket for passing memory; empty if it has none.
        fd_sockets: Vec<String>,
        key: Vec<u8>,
        timeout_ms: u64,
        compression: Compression,
    }

    /// Something that was looked for on this machine, for `gflow doctor`.
    struct Finding {
        what: String,
        /// What was found, or why it was not.
        found: String,
        is_there: bool,
    }

    /// A record of the engine's log, for Python's `logging`.
    struct LogRecord {
        /// 1 for errors, up to 4 for debug.
        level: u8,
        module: String,
        group: String,
        /// -1 for a record that is about no group.
        rank: i64,
        text: String,
        /// Seconds since 1970.
        created: f64,
    }

    /// The memory of one tensor: of the host, or of the device that the call names.
    struct TensorSpan {
        address: usize,
        bytes: usize,
    }

    /// The memory of a collective's tensors.
    struct TensorSpans {
        inputs: Vec<TensorSpan>,
        outputs: Vec<TensorSpan>,
    }

    unsafe extern "C++" {
        include!("bridge/operation.h");
        type Operation;
        fn prepare(&self) -> Result<()>;
        fn open(&self) -> Result<TensorSpans>;
        fn start(&self, done: Box<Done>) -> Result<()>;
        fn finish(&self) -> Result<()>;
        fn broke_connection(&self) -> bool;
        fn settle(&self, error: &str, as_thrown: bool) -> Result<bool>;
        fn notify(&self) -> Result<()>;
    }

    extern "Rust" {
        type Done;
        fn raise(self: &Done);

        type Endpoint;
        fn open_endpoint(address: &str) -> Result<Box<Endpoint>>;
        fn address(self: &Endpoint) -> String;
        fn fd_socket(self: &Endpoint) -> String;

        type Group;
        fn join_group(endpoint: Box<Endpoint>, config: &GroupConfig) -> Result<Box<Group>>;
        fn notice(self: &Group) -> String;
        fn compresses(self: &Group) -> bool;
        fn open_device(self: &Group, device: i32, stream: u64) -> Result<()>;
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
        fn allocate(self: &Group, bytes: usize) -> Result<Box<SharedMemory>>;
        fn submit_aside(self: &Group, operation: SharedPtr<Operation>) -> Result<()>;
        fn check_usable(self: &Group) -> Result<()>;
        fn fence(self: &Group, timeout_ms: u64) -> Result<()>;
        fn seq(self: &Group) -> Result<u64>;
        fn metrics(self: &Group) -> Result<MetricsSnapshot>;
        fn end_of_pass(self: &Group) -> Result<()>;
        fn flush(self: &Group) -> Result<()>;
        fn announcement(self: &Group) -> Result<String>;
        fn forget(self: &Group, buckets: &[u32]) -> Result<()>;
        fn position(self: &Group) -> Result<Position>;
        fn shard_of(self: &Group, bytes: usize) -> Result<ByteRange>;
        fn bucket_state(self: &Group, number: u32, timeout_ms: u64) -> Result<BucketState>;
        fn load_bucket(
            self: &Group,
            number: u32,
            state: BucketState,
            timeout_ms: u64,
        ) -> Result<()>;
        fn set_momentum(self: &Group, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()>;
        fn keep_for_undo(self: &Group, enabled: bool, timeout_ms: u64) -> Result<()>;
        fn record_step(self: &Group, skipped: bool, factor: f32, timeout_ms: u64) -> Result<()>;
        fn abort(self: &Group, why: &str) -> Result<()>;
        fn close(self: &Group) -> Result<()>;

        type SharedMemory;
        fn address(self: &SharedMemory) -> usize;

        unsafe fn prefer_huge_pages(address: *mut u8, bytes: usize);
        fn dtype_name(code: u8) -> Result<String>;
        fn look_for_gpus() -> Result<Vec<Finding>>;
        fn close_all_groups() -> Result<()>;
        fn start_log(level: u8);
        fn next_log_records() -> Result<Vec<LogRecord>>;
        fn stop_log();
        fn before_fork();
        fn after_fork_in_parent();
        fn after_fork_in_child();
        fn provoke(what: &str) -> Result<()>;
    }
}

// SAFETY: the C++ class documents its methods as callable from any thread.
unsafe impl Send for Operation {}
// SAFETY: as above; it locks the state that several threads may touch.
unsafe impl Sync for Operation {}
