//! The bridge: the one room where C++ and Rust meet.
//!
//! Every entry from C++ that does anything goes through [`guard`], so that a panic becomes an error
//! and the error a C++ exception; a panic that reached cxx would abort the process. C++ exceptions arrive here as
//! errors with their message. Nothing is decided here.

use crate::codec::Momentum;
use crate::codec::Schedule;
use crate::codec::Wire;
use crate::collective::assembly::{Assembled, Census, assemble};
use crate::collective::call::{self, Call, Kind, OnDevice, View};
use crate::collective::hosts;
use crate::collective::span::{Memory, Span};
use crate::collective::topology::Topology;
use crate::cuda::Fault;
use crate::cuda::findings::{self, Finding};
use crate::engine::Engine;
use crate::engine::operation::Operation;
use crate::error::{Error, Result};
use crate::fork;
use crate::gradients::{Gradients, Method, State};
use crate::huge_pages;
use crate::observe::gradients::{BucketCounts, Stage};
use crate::transport::handshake::{KEY_BYTES, Key};
use crate::transport::interrupt::Interrupt;
use crate::transport::shm::arena::{Allocation, Arena};
use crate::transport::shm::passing::Entrance;
use crate::transport::tcp::ConnectError;
use crate::transport::tcp::reception::{Listener, Reception};
use cxx::SharedPtr;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

#[cxx::bridge(namespace = "gflow")]
mod ffi {
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

    /// How gradients are exchanged; the fields are those of `engine::gradients::Method`.
    struct Compression {
        /// Whether what crosses hosts is compressed at all.
        is_on: bool,
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

    /// Where a rank stands among the hosts of its group.
    struct Place {
        hosts: usize,
        carriers: usize,
        host: usize,
        place: usize,
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

    /// All that is needed to join a group.
    struct Membership {
        group: String,
        rank: u32,
        /// One per rank: how messages name it.
        labels: Vec<String>,
        /// One per rank: where it listens, "address:port".
        addresses: Vec<String>,
        /// One per rank: ranks with the same word share memory if they can.
        hosts: Vec<String>,
        /// One per rank: where it takes the memory of others; empty if it cannot.
        entrances: Vec<String>,
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

        type Door;
        fn open_door(address: &str) -> Result<Box<Door>>;
        fn address(self: &Door) -> String;
        fn entrance(self: &Door) -> String;

        type Group;
        fn join_group(door: Box<Door>, membership: &Membership) -> Result<Box<Group>>;
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
        fn topology(self: &Group) -> Result<Place>;
        fn shard_of(self: &Group, bytes: usize) -> Result<ByteRange>;
        fn bucket_state(self: &Group, number: u32, timeout_ms: u64) -> Result<BucketState>;
        fn load_bucket(
            self: &Group,
            number: u32,
            state: BucketState,
            timeout_ms: u64,
        ) -> Result<()>;
        fn set_momentum(self: &Group, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()>;
        fn keep_for_undo(self: &Group, is_wanted: bool, timeout_ms: u64) -> Result<()>;
        fn take_note_of_step(
            self: &Group,
            skipped: bool,
            factor: f32,
            timeout_ms: u64,
        ) -> Result<()>;
        fn abort(self: &Group, why: &str) -> Result<()>;
        fn close(self: &Group) -> Result<()>;

        type SharedMemory;
        fn address(self: &SharedMemory) -> usize;

        unsafe fn prefer_huge_pages(address: *mut u8, bytes: usize);
        fn dtype_name(code: u8) -> Result<String>;
        fn look_for_gpus() -> Result<Vec<Finding>>;
        fn close_all_groups() -> Result<()>;
        fn before_fork();
        fn after_fork_in_parent();
        fn after_fork_in_child();
        fn provoke(what: &str) -> Result<()>;
    }
}

// SAFETY: the C++ class documents its methods as callable from any thread.
unsafe impl Send for ffi::Operation {}
// SAFETY: as above; it locks what more than one thread may touch at a time.
unsafe impl Sync for ffi::Operation {}

/// Runs an entry so that nothing but a `Result` leaves it.
fn guard<T>(entry: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(entry)).unwrap_or_else(|payload| Err(Error::from_panic(payload)))
}

/// How C++ says that a collective is over.
struct Done(Arc<Interrupt>);

impl Done {
    fn raise(&self) {
        self.0.raise();
    }
}

/// Where the ranks of a group that is being made can come in.
struct Door {
    listener: Listener,
    /// For the memory of ranks of the same host; none where there are no such sockets.
    entrance: Option<Entrance>,
}

fn open_door(address: &str) -> Result<Box<Door>> {
    guard(|| {
        let failed = |why: String| Error::Connect(format!("cannot listen on {address}: {why}"));
        let ip: IpAddr = address.parse().map_err(|_| failed("not an IP address".into()))?;
        let listener = Listener::bind(ip).map_err(|error| failed(error.to_string()))?;
        Ok(Box::new(Door { listener, entrance: Entrance::open().ok() }))
    })
}

impl Door {
    fn address(&self) -> String {
        self.listener.address().to_string()
    }

    fn entrance(&self) -> String {
        self.entrance.as_ref().map_or(String::new(), |entrance| entrance.name().to_string())
    }
}

/// One rank's part of a process group.
struct Group {
    engine: Arc<Engine>,
    topology: Topology,
    arena: Option<Arc<Arena>>,
    notice: String,
    compresses: bool,
}

/// Memory of a tensor that the ranks of this host share; without an address where they do not.
struct SharedMemory(Option<Allocation>);

impl SharedMemory {
    fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |allocation| allocation.address() as usize)
    }
}

/// Every group of this process, so that all can be closed before the interpreter ends.
static GROUPS: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

fn join_group(door: Box<Door>, membership: &ffi::Membership) -> Result<Box<Group>> {
    guard(|| {
        let timeout = milliseconds(membership.timeout_ms);
        let interrupt = Interrupt::new()
            .map(Arc::new)
            .map_err(|error| Error::Connect(format!("no event descriptor: {error}")))?;
        let addresses = parse_addresses(&membership.addresses)?;
        let key: Key = membership.key.as_slice().try_into().map_err(|_| {
            let length = membership.key.len();
            Error::Connect(format!("a group key of {length} bytes, expected {KEY_BYTES}"))
        })?;
        let rank = membership.rank as usize;
        let deadline = Instant::now() + timeout;
        let Door { listener, entrance } = *door;
        let reception =
            Reception::open(listener, rank, addresses, key, deadline, interrupt.clone())
                .map_err(|error| Error::Connect(format!("cannot take connections: {error}")))?;
        let census =
            Census { hosts: membership.hosts.clone(), entrances: membership.entrances.clone() };
        let Assembled { fabric, arena, notice } =
            assemble(reception, entrance, &census, &key, deadline)
                .map_err(|error| unreachable_ranks(&error, membership, timeout))?;
        let topology = fabric.topology().clone();
        let labels = membership.labels.clone();
        let method = read_method(&membership.compression, topology.hosts())?;
        let compresses = method.is_some();
        let gradients = Gradients::new(method, momentum(membership.compression.momentum, false));
        let engine = Engine::start(&membership.group, labels, fabric, gradients, interrupt)?;
        let engine = Arc::new(engine);
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&engine));
        Ok(Box::new(Group { engine, topology, arena, notice, compresses }))
    })
}

/// How gradients are exchanged between so many hosts, if they are to be compressed there.
fn read_method(compression: &ffi::Compression, hosts: usize) -> Result<Option<Method>> {
    if !compression.is_on || hosts == 1 {
        return Ok(None);
    }
    let wire = Wire::from_name(&compression.wire).ok_or_else(|| {
        Error::Connect(format!("{:?} is no element type for the wire", compression.wire))
    })?;
    let schedule = Schedule {
        density: compression.density,
        warmup_steps: compression.warmup_steps,
        ramp_steps: compression.ramp_steps,
    };
    let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let (chunk, fusion_bytes) = (size(compression.chunk).max(1), size(compression.fusion_bytes));
    Ok(Some(Method { schedule, chunk, wire, fusion_bytes }))
}

fn momentum(factor: f32, nesterov: bool) -> Option<Momentum> {
    (factor != 0.0).then_some(Momentum { factor, nesterov })
}

fn parse_addresses(addresses: &[String]) -> Result<Vec<SocketAddr>> {
    let parse = |address: &String| {
        address.parse().map_err(|_| Error::Connect(format!("not an address: {address:?}")))
    };
    addresses.iter().map(parse).collect()
}

fn unreachable_ranks(
    error: &ConnectError,
    membership: &ffi::Membership,
    timeout: Duration,
) -> Error {
    let name =
        |rank: &usize| format!("{} at {}", membership.labels[*rank], membership.addresses[*rank]);
    let missing: Vec<_> = error.missing.iter().map(name).collect();
    Error::Connect(format!(
        "{} could not connect with {} within {:.1} s ({}). If the addresses are of the wrong \
         network, set GFLOW_IFNAME to the interface that the hosts share; a firewall between \
         them must let all ports through",
        membership.labels[membership.rank as usize],
        missing.join(", "),
        timeout.as_secs_f64(),
        error.last
    ))
}

impl Group {
    fn notice(&self) -> String {
        self.notice.clone()
    }

    /// Whether gradients that cross hosts are compressed. If so, every all-reduce of one dense
    /// tensor on a device comes here, else none does.
    fn compresses(&self) -> bool {
        self.compresses
    }

    /// Makes a device ready, once, before its first call. The exchanges go on `stream`, a raw
    /// handle that stays valid as long as the group. It waits for no other rank.
    fn open_device(&self, device: i32, stream: u64) -> Result<()> {
        guard(|| self.engine.open_device(device, stream))
    }

    fn submit(
        &self,
        call: ffi::CallDescription,
        operation: SharedPtr<ffi::Operation>,
    ) -> Result<u64> {
        guard(|| self.engine.submit(read_call(call)?, Arc::new(CxxOperation(operation))))
    }

    fn submit_and_wait(
        &self,
        call: ffi::CallDescription,
        operation: SharedPtr<ffi::Operation>,
    ) -> Result<u64> {
        guard(|| self.engine.submit_and_wait(read_call(call)?, Arc::new(CxxOperation(operation))))
    }

    fn allocate(&self, bytes: usize) -> Result<Box<SharedMemory>> {
        guard(|| {
            // Of a group that has failed, a rank may still be writing into what it took for ours.
            let arena = self.arena.as_ref().filter(|_| self.engine.check_usable().is_ok());
            let allocation = arena.and_then(|arena| arena.allocate(bytes));
            Ok(Box::new(SharedMemory(allocation)))
        })
    }

    fn submit_aside(&self, operation: SharedPtr<ffi::Operation>) -> Result<()> {
        guard(|| self.engine.submit_aside(Arc::new(CxxOperation(operation))))
    }

    fn check_usable(&self) -> Result<()> {
        guard(|| self.engine.check_usable())
    }

    fn fence(&self, timeout_ms: u64) -> Result<()> {
        guard(|| self.engine.fence(milliseconds(timeout_ms)))
    }

    fn seq(&self) -> Result<u64> {
        guard(|| Ok(self.engine.seq()))
    }

    fn metrics(&self) -> Result<ffi::MetricsSnapshot> {
        guard(|| {
            let counts = self.engine.counts();
            let (gradients, times) = self.engine.gradient_counts();
            let by_kind = counts.by_kind.into_iter();
            let bucket = |(number, bucket): (u32, BucketCounts)| ffi::BucketMetrics {
                number,
                steps: bucket.steps,
                gradient_bytes: bucket.gradient_bytes,
                carried_bytes: bucket.carried_bytes,
                wire_bytes: bucket.wire_bytes,
                density: bucket.density,
                residual_ratio: bucket.residual_ratio,
            };
            let stage = |(stage, seconds): (Stage, f64)| ffi::StageSeconds {
                name: stage.name().to_string(),
                seconds,
            };
            Ok(ffi::MetricsSnapshot {
                hosts: self.topology.hosts() as u64,
                ranks_here: self.topology.local_ranks().len() as u64,
                gradient_buckets: counts.gradient_buckets,
                gradient_bytes: counts.gradient_bytes,
                exact_tensors: counts.exact_tensors,
                exact_bytes: counts.exact_bytes,
                by_kind: by_kind
                    .map(|(kind, count)| ffi::KindCount { name: kind.name().to_string(), count })
                    .collect(),
                compresses: self.compresses,
                buckets: gradients.buckets.into_iter().map(bucket).collect(),
                other_carried_bytes: gradients.gone.carried_bytes,
                other_wire_bytes: gradients.gone.wire_bytes + gradients.norm_bytes,
                stages: Stage::ALL.into_iter().zip(gradients.seconds).map(stage).collect(),
                hidden_seconds: times.hidden.as_secs_f64(),
                exposed_seconds: times.exposed.as_secs_f64(),
            })
        })
    }

    fn end_of_pass(&self) -> Result<()> {
        guard(|| {
            self.engine.end_of_pass();
            Ok(())
        })
    }

    fn flush(&self) -> Result<()> {
        guard(|| {
            self.engine.flush();
            Ok(())
        })
    }

    fn announcement(&self) -> Result<String> {
        guard(|| Ok(self.engine.announcement().unwrap_or_default()))
    }

    fn forget(&self, buckets: &[u32]) -> Result<()> {
        guard(|| {
            self.engine.forget(buckets);
            Ok(())
        })
    }

    fn topology(&self) -> Result<ffi::Place> {
        guard(|| {
            Ok(ffi::Place {
                hosts: self.topology.hosts(),
                carriers: self.topology.carriers(),
                host: self.topology.host(),
                place: self.topology.place(),
            })
        })
    }

    /// The part of a bucket of so many bytes that this rank carries to other hosts.
    fn shard_of(&self, bytes: usize) -> Result<ffi::ByteRange> {
        guard(|| {
            let range = hosts::shard_range(&self.topology, bytes).unwrap_or(0..0);
            Ok(ffi::ByteRange { start: range.start, end: range.end })
        })
    }

    fn bucket_state(&self, number: u32, timeout_ms: u64) -> Result<ffi::BucketState> {
        guard(|| {
            let limit = milliseconds(timeout_ms);
            let state = self.engine.bucket_state(number, limit)?;
            let State { step, residual, velocity } =
                state.map_err(|fault| self.on_device("saving what is kept of a bucket", fault))?;
            Ok(ffi::BucketState { step, residual, velocity })
        })
    }

    fn load_bucket(&self, number: u32, state: ffi::BucketState, timeout_ms: u64) -> Result<()> {
        guard(|| {
            let ffi::BucketState { step, residual, velocity } = state;
            if residual.iter().chain(&velocity).any(|number| !number.is_finite()) {
                // It would stay for ever, and keep its chunk from ever being sent.
                let what = format!("gflow: the state of bucket {number} has infinity or NaN in it");
                return Err(Error::Operation(what));
            }
            self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.load(number, State { step, residual, velocity });
            })
        })
    }

    fn set_momentum(&self, factor: f32, nesterov: bool, timeout_ms: u64) -> Result<()> {
        guard(|| {
            self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.set_momentum(momentum(factor, nesterov));
            })
        })
    }

    fn keep_for_undo(&self, is_wanted: bool, timeout_ms: u64) -> Result<()> {
        guard(|| {
            self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.keep_for_undo(is_wanted);
            })
        })
    }

    fn take_note_of_step(&self, skipped: bool, factor: f32, timeout_ms: u64) -> Result<()> {
        guard(|| {
            let noted = self.engine.with_gradients(milliseconds(timeout_ms), |gradients| {
                gradients.take_note_of_step(skipped, factor)
            })?;
            noted.map_err(|fault| self.on_device("taking note of a step", fault))
        })
    }

    /// The error for what a device refused, outside of any collective.
    fn on_device(&self, doing: &str, fault: Fault) -> Error {
        let rank = self.engine.label().to_string();
        Error::Device { rank, doing: doing.to_string(), reason: fault.0 }
    }

    fn abort(&self, why: &str) -> Result<()> {
        guard(|| {
            self.engine.abort(why);
            Ok(())
        })
    }

    fn close(&self) -> Result<()> {
        guard(|| {
            self.engine.close();
            Ok(())
        })
    }
}

fn read_call(call: ffi::CallDescription) -> Result<Call> {
    let kind = Kind::from_code(call.kind).ok_or_else(|| {
        Error::Operation(format!("gflow: unknown kind of collective, code {}", call.kind))
    })?;
    let view = View {
        kind,
        dtype: call.dtype,
        reduce_op: call.reduce_op,
        root: call.root,
        tensors: call.tensors,
        numel: call.numel,
        layout: call.layout,
        // The engine knows which of this rank's devices it is.
        lane: 0,
    };
    Ok(Call {
        view,
        gradient: call.gradient,
        bucket: call.bucket,
        bytes: call.bytes,
        on_device: (call.device >= 0)
            .then_some(OnDevice { device: call.device, stream: call.stream }),
        sends: call.sends,
        receives: call.receives,
        complaint: match call.complaint.as_str() {
            "" => String::new(),
            what => format!("has wrong arguments: {what}"),
        },
        timeout: milliseconds(call.timeout_ms),
    })
}

/// Asks for huge pages for a tensor that has just been made.
///
/// # Safety
/// As for [`huge_pages::prefer`].
unsafe fn prefer_huge_pages(address: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { huge_pages::prefer(address, bytes) };
}

/// The Python name of a torch type, for messages that C++ writes.
fn dtype_name(code: u8) -> Result<String> {
    guard(|| Ok(call::dtype_name(code)))
}

/// What the GPU path needs, and whether it is on this machine.
fn look_for_gpus() -> Result<Vec<ffi::Finding>> {
    guard(|| {
        let finding = |Finding { what, outcome }: Finding| {
            let is_there = outcome.is_ok();
            ffi::Finding { what, found: outcome.unwrap_or_else(|why| why), is_there }
        };
        Ok(findings::look().into_iter().map(finding).collect())
    })
}

/// Closes whatever groups are still open. For the end of the interpreter.
fn close_all_groups() -> Result<()> {
    guard(|| {
        let groups = std::mem::take(&mut *GROUPS.lock().unwrap_or_else(PoisonError::into_inner));
        for group in groups.iter().filter_map(Weak::upgrade) {
            group.close_for_good();
        }
        Ok(())
    })
}

// The handlers of a fork. They cannot fail, and run where nothing may be caught.

fn before_fork() {
    fork::before();
}

fn after_fork_in_parent() {
    fork::after_in_parent();
}

fn after_fork_in_child() {
    fork::after_in_child();
}

/// Fails on purpose, so that `gflow doctor` and the tests can see that failures arrive.
fn provoke(what: &str) -> Result<()> {
    guard(|| match what {
        "error" => Err(Error::Operation("gflow: a Rust error, provoked on purpose".into())),
        "panic" => panic!("provoked on purpose"),
        other => Err(Error::Operation(format!("gflow: cannot provoke {other:?}: error or panic"))),
    })
}

/// A timeout from Python, bounded so that adding it to a point in time cannot overflow.
fn milliseconds(value: u64) -> Duration {
    const TEN_YEARS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    Duration::from_millis(value).min(TEN_YEARS)
}

/// A collective of the C++ side.
struct CxxOperation(SharedPtr<ffi::Operation>);

impl Operation for CxxOperation {
    fn prepare(&self) -> Result<()> {
        self.0.prepare().map_err(thrown)
    }

    fn open(&self) -> Result<Memory> {
        let spans = self.0.open().map_err(thrown)?;
        let read = |list: Vec<ffi::TensorSpan>| {
            list.into_iter()
                .map(|span| Span { address: span.address as *mut u8, bytes: span.bytes })
                .collect()
        };
        Ok(Memory { inputs: read(spans.inputs), outputs: read(spans.outputs) })
    }

    fn start(&self, done: Arc<Interrupt>) -> Result<()> {
        self.0.start(Box::new(Done(done))).map_err(thrown)
    }

    fn finish(&self) -> Result<()> {
        self.0.finish().map_err(thrown)
    }

    fn broke_connection(&self) -> bool {
        self.0.broke_connection()
    }

    fn settle(&self, error: Option<&Error>) -> bool {
        let text = error.map(Error::to_string).unwrap_or_default();
        // An exception here means that there is nothing left to complete.
        self.0.settle(&text, matches!(error, Some(Error::Operation(_)))).unwrap_or(false)
    }

    fn notify(&self) {
        // A Future keeps what its callbacks threw; what arrives here has nowhere to go.
        let _ = self.0.notify();
    }
}

fn thrown(exception: cxx::Exception) -> Error {
    Error::Operation(exception.what().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_an_entry_becomes_an_error_with_its_message() {
        let text = provoke("panic").unwrap_err().to_string();
        assert!(text.contains("provoked on purpose") && text.contains("please report"), "{text}");
    }

    #[test]
    fn an_address_that_is_none_is_refused_with_what_came() {
        let text = open_door("eth0").err().unwrap().to_string();
        assert!(text.contains("cannot listen on eth0: not an IP address"), "{text}");
    }

    #[test]
    fn the_longest_timeout_still_gives_a_point_in_time() {
        assert!(Instant::now().checked_add(milliseconds(u64::MAX)).is_some());
    }
}
