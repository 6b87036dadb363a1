//! NCCL's functions, as far as they are used here. The types are those of its header, which has kept
//! them since version 2. A status that is not known here keeps its number.

use super::device_slice::DeviceSlice;
use super::fault::{Fault, Result};
use super::libraries::{Found, find_nccl};
use crate::codec::Wire;
use crate::simd::element::Element;
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

/// Aborting a communicator from another thread, which the watchdog does, is sound since this one.
const LEAST_VERSION: i32 = 21800;
const SUCCESS: c_int = 0;
/// Something that was begun goes on; it is no failure.
const IN_PROGRESS: c_int = 7;
/// Makes NCCL wait inside of its calls, whatever the caller asks for.
const BLOCKING_VARIABLE: &str = "NCCL_COMM_BLOCKING";
const SUM: c_int = 0;
pub const UNIQUE_ID_BYTES: usize = 128;

/// A communicator of NCCL's.
pub type Handle = *mut c_void;
/// A stream of CUDA's.
pub type Stream = *mut c_void;

/// What the ranks of a new communicator know each other by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

/// This rank's place in a communicator that is being made.
#[derive(Debug, Clone, Copy)]
pub struct CommunicatorRank {
    /// The same on all of its ranks.
    pub id: UniqueId,
    pub ranks: usize,
    pub rank: usize,
}

/// An element as NCCL numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclType(c_int);

impl From<Element> for NcclType {
    fn from(element: Element) -> NcclType {
        NcclType(match element {
            Element::I8 => 0,
            Element::U8 => 1,
            Element::I32 => 2,
            Element::I64 => 4,
            Element::F16 => 6,
            Element::F32 => 7,
            Element::F64 => 8,
            Element::BF16 => 9,
        })
    }
}

/// The element type that a wire format is made of.
pub fn element_of(wire: Wire) -> Element {
    match wire {
        Wire::F16 => Element::F16,
        Wire::BF16 => Element::BF16,
        Wire::F32 => Element::F32,
    }
}

/// A slice as NCCL's functions take it.
fn arguments(slice: DeviceSlice) -> (*mut c_void, usize, c_int) {
    (slice.address as *mut c_void, slice.count, NcclType::from(slice.element).0)
}

/// What something is put on: a communicator, and a stream of its device. Both must be valid.
#[derive(Clone, Copy)]
pub struct On {
    pub handle: Handle,
    pub stream: Stream,
}

/// What a new communicator should be like: the part of NCCL's own that is as old as version 2.14, and that
/// all since accept. What it does not say is as NCCL would have it.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// No call waits for other ranks; what was begun is asked for.
    const NON_BLOCKING: Config =
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
}

macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($field: Symbol<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            fn of(library: &Library) -> std::result::Result<Functions, libloading::Error> {
                Ok(Functions {
                    // SAFETY: the type is that of NCCL's header.
                    $($field: unsafe { library.get($name.as_bytes()) }?,)*
                })
            }
        }
    };
}

functions! {
    version = "ncclGetVersion" (*mut c_int) -> c_int;
    unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    init_rank = "ncclCommInitRankConfig" (*mut Handle, c_int, UniqueId, c_int, *const Config) -> c_int;
    finalize = "ncclCommFinalize" (Handle) -> c_int;
    destroy = "ncclCommDestroy" (Handle) -> c_int;
    abort = "ncclCommAbort" (Handle) -> c_int;
    async_error = "ncclCommGetAsyncError" (Handle, *mut c_int) -> c_int;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    reduce_scatter = "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> c_int;
    reduce = "ncclReduce" (*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, Stream) -> c_int;
    broadcast = "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    last_error = "ncclGetLastError" (Handle) -> *const c_char;
}

pub struct Nccl {
    functions: Functions,
    pub version: i32,
    pub origin: String,
    _library: Library,
}

impl Nccl {
    /// NCCL, which is looked for until it is found, and then stays.
    pub fn get() -> Result<&'static Nccl> {
        static FOUND: Mutex<Option<&'static Nccl>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        match *found {
            Some(nccl) => Ok(nccl),
            None => {
                let nccl: &'static Nccl = Box::leak(Box::new(Nccl::load(find_nccl()?)?));
                Ok(*found.insert(nccl))
            }
        }
    }

    fn load(Found { library, origin }: Found) -> Result<Nccl> {
        let functions = Functions::of(&library)
            .map_err(|error| Fault(format!("NCCL in {origin} cannot be used: {error}")))?;
        let mut version = 0;
        // SAFETY: it fills in a number.
        let status = unsafe { (functions.version)(&mut version) };
        let nccl = Nccl { functions, version, origin, _library: library };
        nccl.check("ncclGetVersion", status, None)?;
        if version < LEAST_VERSION {
            return Err(Fault(format!(
                "NCCL in {} is version {}, and gflow needs {} or newer",
                nccl.origin,
                in_words(version),
                in_words(LEAST_VERSION)
            )));
        }
        Ok(nccl)
    }

    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: it fills in an id.
        let status = unsafe { (self.functions.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", status, None)?;
        Ok(id)
    }

    /// Fails where the environment makes NCCL wait inside of its calls, whatever it is asked for.
    pub fn ensure_non_blocking(&self) -> Result<()> {
        match std::env::var(BLOCKING_VARIABLE).as_deref().map(is_one) {
            Ok(true) => Err(Fault(format!(
                "{BLOCKING_VARIABLE}=1 makes NCCL wait in every call for as long as it likes, and a rank \
                 that is lost could not be noticed. Take it out of the environment"
            ))),
            _ => Ok(()),
        }
    }

    /// Begins to meet the other ranks of a new communicator. The device is that of the context that this
    /// thread is in.
    pub fn init_rank(&self, own: CommunicatorRank) -> Result<Handle> {
        let mut handle = std::ptr::null_mut();
        let (id, ranks, rank) = (own.id, number(own.ranks)?, number(own.rank)?);
        let config = Config::NON_BLOCKING;
        // SAFETY: it fills in a handle; the configuration is copied.
        let status = unsafe { (self.functions.init_rank)(&mut handle, ranks, id, rank, &config) };
        self.check("ncclCommInitRankConfig", status, None).inspect_err(|_| {
            if !handle.is_null() {
                // SAFETY: NCCL has made it, and nobody has it.
                let _ = unsafe { self.abort(handle) };
            }
        })?;
        Ok(handle)
    }

    /// Begins to leave a communicator in order: what it is at is finished first.
    ///
    /// # Safety
    /// The handle is valid, nothing is put on streams with it any more, and nobody else uses it now.
    pub unsafe fn finalize(&self, handle: Handle) -> Result<()> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.finalize)(handle) };
        self.check("ncclCommFinalize", status, Some(handle))
    }

    /// Gives a communicator back that was left in order.
    ///
    /// # Safety
    /// The handle is valid, and nobody uses it any more.
    pub unsafe fn destroy(&self, handle: Handle) -> Result<()> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.destroy)(handle) };
        self.check("ncclCommDestroy", status, None)
    }

    /// Ends a communicator, and with it whatever it is at, without the other ranks.
    ///
    /// # Safety
    /// The handle is valid, and nobody begins anything with it any more.
    pub unsafe fn abort(&self, handle: Handle) -> Result<()> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.abort)(handle) };
        self.check("ncclCommAbort", status, None)
    }

    /// Whether what was begun has been done, as far as the host has to do with it; what has gone wrong
    /// since, where nobody waited for it, is an error.
    ///
    /// # Safety
    /// The handle is valid, and nobody else uses it now: NCCL clears up behind what was begun.
    pub unsafe fn is_ready(&self, handle: Handle) -> Result<bool> {
        let mut status = SUCCESS;
        // SAFETY: it fills in a number.
        let outcome = unsafe { (self.functions.async_error)(handle, &mut status) };
        self.check("ncclCommGetAsyncError", outcome, None)?;
        self.check("what NCCL was at", status, Some(handle))?;
        Ok(status != IN_PROGRESS)
    }

    /// Makes one of what is put on streams in `work`: NCCL may then do it at once.
    pub fn group(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: it needs nothing.
        self.check("ncclGroupStart", unsafe { (self.functions.group_start)() }, None)?;
        let outcome = work();
        // Also if that failed: what was started must be ended.
        // SAFETY: as above.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.group_end)() }, None);
        outcome.and(ended)
    }

    /// The elements become the sum over all ranks.
    ///
    /// # Safety
    /// The elements are memory of the device, valid when the stream gets there: so in all of these.
    pub unsafe fn all_reduce(&self, elements: DeviceSlice, on: On) -> Result<()> {
        let (at, count, kind) = arguments(elements);
        let all_reduce = &self.functions.all_reduce;
        // SAFETY: the caller's promise.
        let status = unsafe { all_reduce(at, at, count, kind, SUM, on.handle, on.stream) };
        self.check("ncclAllReduce", status, Some(on.handle))
    }

    /// Of as many elements for every rank, which begin at `all`, this rank's own become the sum.
    ///
    /// # Safety
    /// As above, for all of them.
    pub unsafe fn reduce_scatter(&self, all: u64, own: DeviceSlice, on: On) -> Result<()> {
        let (at, count, kind) = arguments(own);
        let (all, reduce_scatter) = (all as *const c_void, &self.functions.reduce_scatter);
        // SAFETY: the caller's promise.
        let status = unsafe { reduce_scatter(all, at, count, kind, SUM, on.handle, on.stream) };
        self.check("ncclReduceScatter", status, Some(on.handle))
    }

    /// Every rank gets the own elements of all, each in its place after `all`.
    ///
    /// # Safety
    /// As above, for all of them.
    pub unsafe fn all_gather(&self, all: u64, own: DeviceSlice, on: On) -> Result<()> {
        let (at, count, kind) = arguments(own);
        let (all, all_gather) = (all as *mut c_void, &self.functions.all_gather);
        // SAFETY: the caller's promise.
        let status = unsafe { all_gather(at, all, count, kind, on.handle, on.stream) };
        self.check("ncclAllGather", status, Some(on.handle))
    }

    /// The elements of rank `root` become the sum.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn reduce(&self, elements: DeviceSlice, root: usize, on: On) -> Result<()> {
        let ((at, count, kind), root) = (arguments(elements), number(root)?);
        let reduce = &self.functions.reduce;
        // SAFETY: the caller's promise.
        let status = unsafe { reduce(at, at, count, kind, SUM, root, on.handle, on.stream) };
        self.check("ncclReduce", status, Some(on.handle))
    }

    /// The elements become those of rank `root`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn broadcast(&self, elements: DeviceSlice, root: usize, on: On) -> Result<()> {
        let ((at, count, kind), root) = (arguments(elements), number(root)?);
        let broadcast = &self.functions.broadcast;
        // SAFETY: the caller's promise.
        let status = unsafe { broadcast(at, at, count, kind, root, on.handle, on.stream) };
        self.check("ncclBroadcast", status, Some(on.handle))
    }

    fn check(&self, call: &str, status: c_int, of: Option<Handle>) -> Result<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL gives strings that stay, or none.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        // SAFETY: any number may be asked for.
        let meaning = text(unsafe { (self.functions.error_string)(status) });
        // SAFETY: the handle is the caller's; NCCL takes none as well.
        let last = text(unsafe { (self.functions.last_error)(of.unwrap_or(std::ptr::null_mut())) });
        let last = if last.is_empty() { last } else { format!(". NCCL says: {}", last.trim()) };
        Err(Fault(format!("{call} failed with status {status}: {meaning}{last}")))
    }
}

/// Whether NCCL reads this as 1, in whatever base.
fn is_one(value: &str) -> bool {
    let digits = value.trim().trim_start_matches('+').to_ascii_lowercase();
    digits.strip_prefix("0x").unwrap_or(&digits).trim_start_matches('0') == "1"
}

/// A version as people write it.
pub fn in_words(version: i32) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

fn number(value: usize) -> Result<c_int> {
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
        assert_eq!(in_words(21803), "2.18.3");
        assert_eq!(in_words(22907), "2.29.7");
    }

    #[test]
    fn every_wire_is_the_element_of_its_name() {
        for (wire, element) in
            [(Wire::F16, Element::F16), (Wire::BF16, Element::BF16), (Wire::F32, Element::F32)]
        {
            assert_eq!(NcclType::from(element_of(wire)), NcclType::from(element));
        }
    }
}
