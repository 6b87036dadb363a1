//! The types that cross between C++ and Rust. cxx generates both sides from these declarations;
//! C++ includes "rust/bridge/types.rs.h".

use crate::transport::interrupt::Interrupt;
use std::sync::Arc;

pub(super) use declared::*;

#[cxx::bridge(namespace = "gflow")]
mod declared {
    /// What a rank has to know to join a group. The lists have one entry per rank.
    struct GroupConfig {
        name: String,
        rank: u32,
        /// How messages name the rank.
        labels: Vec<String>,
        /// Where it listens, "address:port".
        addresses: Vec<String>,
        /// Ranks with the same host share memory if they can.
        hosts: Vec<String>,
        /// The name of its Unix socket for passing memory; empty if it has none.
        fd_sockets: Vec<String>,
        key: Vec<u8>,
        timeout_ms: u64,
        compression: Compression,
    }

    /// How gradients are exchanged; the fields are those of `gradients::CompressionConfig`.
    struct Compression {
        enabled: bool,
        method: String,
        density: f64,
        chunk: u64,
        warmup_steps: u64,
        ramp_steps: u64,
        wire: String,
        fusion_bytes: u64,
        momentum: f32,
        max_noise: String,
        audit_steps: u64,
        /// Whether the threads of the training job keep all cores of this host busy.
        cores_are_busy: bool,
    }

    /// Where a rank is among the hosts of its group.
    struct Position {
        hosts: usize,
        carriers: usize,
        host: usize,
        /// Its index among the ranks of its host.
        local_rank: usize,
    }

    /// One collective as torch called it; the fields are those of `collective::call`.
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
        /// The device of the tensors; -1 for host memory.
        device: i32,
        /// The raw handle of the caller's current stream there.
        stream: u64,
        complaint: String,
        sends: Vec<u64>,
        receives: Vec<u64>,
    }

    /// The memory of one tensor, on the host or on the device that the call names.
    struct TensorSpan {
        address: usize,
        bytes: usize,
    }

    /// The memory of a collective's tensors.
    struct TensorSpans {
        inputs: Vec<TensorSpan>,
        outputs: Vec<TensorSpan>,
    }

    /// The state that this rank keeps for a gradient bucket.
    struct BucketState {
        step: u64,
        residual: Vec<f32>,
        velocity: Vec<f32>,
        sizes: Vec<f32>,
    }

    /// A part of a bucket, in bytes.
    struct ByteRange {
        start: usize,
        end: usize,
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
        /// Bytes of norms, and of buckets that no longer exist.
        other_carried_bytes: u64,
        other_wire_bytes: u64,
        stages: Vec<StageSeconds>,
        hidden_seconds: f64,
        exposed_seconds: f64,
        /// What gradients were sent as last; empty before the first exchange.
        method: String,
        /// Empty, or one.
        certificates: Vec<Certificate>,
    }

    /// What the last audit found; the fields are those of `observe::gradient_counters::Certificate`.
    struct Certificate {
        bucket: u32,
        step: u64,
        steps: u64,
        method: String,
        cosine: f64,
        relative_error: f64,
        noise: f64,
        window_cosine: f64,
        window_relative_error: f64,
    }

    struct KindCount {
        name: String,
        count: u64,
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

    /// One thing that `gflow doctor` looked for on this machine.
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

    unsafe extern "C++" {
        include!("bridge/operation.h");
        type Operation;
        fn prepare(&self) -> Result<()>;
        fn open(&self) -> Result<TensorSpans>;
        fn start(&self, done: Box<Done>) -> Result<()>;
        fn finish(&self) -> Result<()>;
        fn broke_connection(&self) -> bool;
        fn complete(&self, error: &str, as_thrown: bool) -> Result<bool>;
        fn notify(&self) -> Result<()>;
    }

    extern "Rust" {
        type Done;
        fn raise(self: &Done);
    }

    // For the signatures in `entries`.
    impl SharedPtr<Operation> {}
    impl Vec<Finding> {}
    impl Vec<LogRecord> {}
}

/// How C++ reports that a collective on the inner backend has ended.
pub(super) struct Done(pub(super) Arc<Interrupt>);

impl Done {
    fn raise(&self) {
        self.0.raise();
    }
}

// SAFETY: the C++ class documents its methods as callable from any thread.
unsafe impl Send for Operation {}
// SAFETY: as above; it locks the state that several threads may touch.
unsafe impl Sync for Operation {}
