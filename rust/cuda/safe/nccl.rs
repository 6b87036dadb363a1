//! NCCL as loaded into this process: its calls, with failures in words.
//!
//! Collectives are enqueued on a stream and run there later. A status unknown to this file keeps
//! its number.

use super::memory::DeviceSlice;
use crate::cuda::sys::fault::{Fault, Result};
use crate::cuda::sys::library::{LoadedLibrary, load_nccl};
use crate::cuda::sys::nccl::{
    CommHandle, Config, IN_PROGRESS, NcclFunctions, NcclType, SUCCESS, SUM, StreamHandle,
    UNIQUE_ID_BYTES, UniqueId,
};
use crate::simd::element::Element;
use crate::sync::lock;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

/// Since 2.18, aborting a communicator from another thread is sound; the watchdog does that.
const MIN_VERSION: i32 = 21800;
/// Makes every call of NCCL block, whatever the caller asks for.
const BLOCKING_VARIABLE: &str = "NCCL_COMM_BLOCKING";

impl From<Element> for NcclType {
    fn from(element: Element) -> NcclType {
        match element {
            Element::I8 => NcclType::INT8,
            Element::U8 => NcclType::UINT8,
            Element::I32 => NcclType::INT32,
            Element::I64 => NcclType::INT64,
            Element::F16 => NcclType::FLOAT16,
            Element::F32 => NcclType::FLOAT32,
            Element::F64 => NcclType::FLOAT64,
            Element::BF16 => NcclType::BFLOAT16,
        }
    }
}

/// This rank's membership in a new communicator.
#[derive(Debug, Clone, Copy)]
pub struct CommunicatorRank {
    /// The same on all of its ranks.
    pub id: UniqueId,
    pub ranks: usize,
    pub rank: usize,
}

/// Where a collective is enqueued. Both handles must be valid, and of the same device.
#[derive(Clone, Copy)]
pub struct NcclTarget {
    pub comm: CommHandle,
    pub stream: StreamHandle,
}

pub struct Nccl {
    functions: NcclFunctions,
    pub version: i32,
    /// Where the library was found.
    pub origin: String,
    _library: Library,
}

impl Nccl {
    /// NCCL of this process. Searched for until it is found, then kept.
    pub fn get() -> Result<&'static Nccl> {
        static NCCL: Mutex<Option<&'static Nccl>> = Mutex::new(None);
        let mut loaded = lock(&NCCL);
        match *loaded {
            Some(nccl) => Ok(nccl),
            None => {
                let nccl: &'static Nccl = Box::leak(Box::new(Nccl::load(load_nccl()?)?));
                Ok(*loaded.insert(nccl))
            }
        }
    }

    fn load(LoadedLibrary { library, origin }: LoadedLibrary) -> Result<Nccl> {
        let functions = NcclFunctions::load(&library)
            .map_err(|error| Fault(format!("NCCL in {origin} cannot be used: {error}")))?;
        let mut version = 0;
        // SAFETY: it writes one integer.
        let status = unsafe { (functions.version)(&mut version) };
        let nccl = Nccl { functions, version, origin, _library: library };
        nccl.check("ncclGetVersion", status, None)?;
        if version < MIN_VERSION {
            return Err(Fault(format!(
                "NCCL in {} is version {}, and gflow needs {} or newer",
                nccl.origin,
                format_version(version),
                format_version(MIN_VERSION)
            )));
        }
        log::info!("using NCCL {} ({})", format_version(version), nccl.origin);
        Ok(nccl)
    }

    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: it fills in the id.
        let status = unsafe { (self.functions.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", status, None)?;
        Ok(id)
    }

    /// Errors if the environment forces NCCL's calls to block.
    pub fn ensure_non_blocking(&self) -> Result<()> {
        match std::env::var(BLOCKING_VARIABLE).as_deref().map(is_one) {
            Ok(true) => Err(Fault(format!(
                "{BLOCKING_VARIABLE}=1 makes NCCL wait in every call for as long as it likes, and a rank \
                 that is lost could not be noticed. Take it out of the environment"
            ))),
            _ => Ok(()),
        }
    }

    /// Starts to connect the ranks of a new communicator. Its device is that of the current
    /// context.
    pub fn init_rank(&self, own: CommunicatorRank) -> Result<CommHandle> {
        let mut comm = std::ptr::null_mut();
        let (id, ranks, rank) = (own.id, to_c_int(own.ranks)?, to_c_int(own.rank)?);
        let config = Config::NON_BLOCKING;
        // SAFETY: it fills in a handle and copies the configuration.
        let status = unsafe { (self.functions.init_rank)(&mut comm, ranks, id, rank, &config) };
        self.check("ncclCommInitRankConfig", status, None).inspect_err(|_| {
            if !comm.is_null() {
                // SAFETY: NCCL has just made it, and it isn't shared yet.
                let _ = unsafe { self.abort(comm) };
            }
        })?;
        Ok(comm)
    }

    /// Starts to shut a communicator down in order: it finishes its work first.
    ///
    /// # Safety
    /// The handle is valid, nothing more is enqueued with it, and no other thread uses it now.
    pub unsafe fn finalize(&self, comm: CommHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.finalize)(comm) };
        self.check("ncclCommFinalize", status, Some(comm))
    }

    /// Frees a communicator that was finalized.
    ///
    /// # Safety
    /// The handle is valid and no longer in use.
    pub unsafe fn destroy(&self, comm: CommHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.destroy)(comm) };
        self.check("ncclCommDestroy", status, None)
    }

    /// Ends a communicator and whatever it is doing, without the other ranks.
    ///
    /// # Safety
    /// The handle is valid, and no new call uses it.
    pub unsafe fn abort(&self, comm: CommHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.abort)(comm) };
        self.check("ncclCommAbort", status, None)
    }

    /// Whether the host's part of what was started last is done. Errors if anything has failed
    /// since.
    ///
    /// # Safety
    /// The handle is valid, and no other thread uses it now: NCCL cleans up in this call.
    pub unsafe fn is_ready(&self, comm: CommHandle) -> Result<bool> {
        let mut status = SUCCESS;
        // SAFETY: it writes one integer.
        let outcome = unsafe { (self.functions.async_error)(comm, &mut status) };
        self.check("ncclCommGetAsyncError", outcome, None)?;
        self.check("what NCCL was at", status, Some(comm))?;
        Ok(status != IN_PROGRESS)
    }

    /// Fuses the collectives that `work` enqueues into one NCCL group.
    pub fn group(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: it has no preconditions.
        self.check("ncclGroupStart", unsafe { (self.functions.group_start)() }, None)?;
        let outcome = work();
        // SAFETY: as above. Even if the work failed: a group that was started must be ended.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.group_end)() }, None);
        outcome.and(ended)
    }

    /// In-place all-reduce (sum).
    ///
    /// # Safety
    /// For this and all collectives below: the elements are memory of the target's device, valid
    /// when the stream gets there.
    pub unsafe fn all_reduce(&self, slice: DeviceSlice, on: NcclTarget) -> Result<()> {
        let (at, count, dtype) = arguments(slice);
        let all_reduce = &self.functions.all_reduce;
        // SAFETY: the caller's promise.
        let status = unsafe { all_reduce(at, at, count, dtype, SUM, on.comm, on.stream) };
        self.check("ncclAllReduce", status, Some(on.comm))
    }

    /// Reduce-scatter (sum). `all` is the address of equal slices for every rank; this rank gets
    /// the sum of its slice in `own`.
    ///
    /// # Safety
    /// As above, for all slices.
    pub unsafe fn reduce_scatter(&self, all: u64, own: DeviceSlice, on: NcclTarget) -> Result<()> {
        let (at, count, dtype) = arguments(own);
        let (all, reduce_scatter) = (all as *const c_void, &self.functions.reduce_scatter);
        // SAFETY: the caller's promise.
        let status = unsafe { reduce_scatter(all, at, count, dtype, SUM, on.comm, on.stream) };
        self.check("ncclReduceScatter", status, Some(on.comm))
    }

    /// All-gather of every rank's `own` slice, in rank order, to the address `all`.
    ///
    /// # Safety
    /// As above, for all slices.
    pub unsafe fn all_gather(&self, all: u64, own: DeviceSlice, on: NcclTarget) -> Result<()> {
        let (at, count, dtype) = arguments(own);
        let (all, all_gather) = (all as *mut c_void, &self.functions.all_gather);
        // SAFETY: the caller's promise.
        let status = unsafe { all_gather(at, all, count, dtype, on.comm, on.stream) };
        self.check("ncclAllGather", status, Some(on.comm))
    }

    /// In-place reduce (sum) to rank `root`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn reduce(&self, slice: DeviceSlice, root: usize, on: NcclTarget) -> Result<()> {
        let ((at, count, dtype), root) = (arguments(slice), to_c_int(root)?);
        let reduce = &self.functions.reduce;
        // SAFETY: the caller's promise.
        let status = unsafe { reduce(at, at, count, dtype, SUM, root, on.comm, on.stream) };
        self.check("ncclReduce", status, Some(on.comm))
    }

    /// In-place broadcast from rank `root`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn broadcast(&self, slice: DeviceSlice, root: usize, on: NcclTarget) -> Result<()> {
        let ((at, count, dtype), root) = (arguments(slice), to_c_int(root)?);
        let broadcast = &self.functions.broadcast;
        // SAFETY: the caller's promise.
        let status = unsafe { broadcast(at, at, count, dtype, root, on.comm, on.stream) };
        self.check("ncclBroadcast", status, Some(on.comm))
    }

    /// Sends a slice to rank `to`, which receives as much. Call it in a group with what this rank
    /// receives meanwhile.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn send(&self, slice: DeviceSlice, to: usize, on: NcclTarget) -> Result<()> {
        let ((at, count, dtype), to) = (arguments(slice), to_c_int(to)?);
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.send)(at, count, dtype, to, on.comm, on.stream) };
        self.check("ncclSend", status, Some(on.comm))
    }

    /// Receives a slice from rank `from`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn recv(&self, slice: DeviceSlice, from: usize, on: NcclTarget) -> Result<()> {
        let ((at, count, dtype), from) = (arguments(slice), to_c_int(from)?);
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.recv)(at, count, dtype, from, on.comm, on.stream) };
        self.check("ncclRecv", status, Some(on.comm))
    }

    fn check(&self, call: &str, status: c_int, comm: Option<CommHandle>) -> Result<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL returns static strings, or null.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        // SAFETY: it takes any number.
        let meaning = text(unsafe { (self.functions.error_string)(status) });
        // SAFETY: the handle is the caller's; NCCL takes null too.
        let last =
            text(unsafe { (self.functions.last_error)(comm.unwrap_or(std::ptr::null_mut())) });
        let last = if last.is_empty() { last } else { format!(". NCCL says: {}", last.trim()) };
        Err(Fault(format!("{call} failed with status {status}: {meaning}{last}")))
    }
}

/// A slice in the form that NCCL's functions take.
fn arguments(slice: DeviceSlice) -> (*mut c_void, usize, NcclType) {
    (slice.address as *mut c_void, slice.count, slice.element.into())
}

/// Whether NCCL parses this value as 1, in any base.
fn is_one(value: &str) -> bool {
    let digits = value.trim().trim_start_matches('+').to_ascii_lowercase();
    digits.strip_prefix("0x").unwrap_or(&digits).trim_start_matches('0') == "1"
}

/// A version as "2.18.3".
pub fn format_version(version: i32) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

fn to_c_int(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Fault(format!("{value} is too large a number for NCCL")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_one_is_known_in_every_base() {
        assert!(["1", " 1 ", "01", "+1", "0x1", "0X01"].into_iter().all(is_one));
        assert!(!["0", "", "-1", "10", "0x10", "true"].into_iter().any(is_one));
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(format_version(21803), "2.18.3");
        assert_eq!(format_version(22907), "2.29.7");
    }
}
