//! The hooks that the stand-in's libcuda and libnccl have besides CUDA's and NCCL's functions.

use crate::sync::lock;
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard};

/// Only one test at a time has it, because its devices and counters belong to the process.
pub struct Standin {
    cuda: Library,
    nccl: Library,
    _only: MutexGuard<'static, ()>,
}

impl Standin {
    /// The stand-in in its initial state.
    pub fn ready() -> Standin {
        static ONLY: Mutex<()> = Mutex::new(());
        let only = lock(&ONLY);
        let nccl = std::env::var_os(crate::cuda::NCCL_VARIABLE).expect("its path");
        // SAFETY: both do nothing when they are loaded.
        let (cuda, nccl) = unsafe { (Library::new("libcuda.so.1"), Library::new(nccl)) };
        let standin = Standin {
            cuda: cuda.expect("LD_LIBRARY_PATH leads to the stand-in"),
            nccl: nccl.expect("GFLOW_NCCL is that of the stand-in"),
            _only: only,
        };
        standin.clear();
        standin.delay_streams(0);
        standin.delay_nccl(0);
        standin.set_small(64 << 10);
        standin
    }

    fn hook<T>(library: &Library, name: &str) -> Symbol<T> {
        // SAFETY: the types that are asked for below are those of standin.h.
        let hook = unsafe { library.get(name.as_bytes()) };
        hook.unwrap_or_else(|error| panic!("this is not the stand-in: {error}"))
    }

    pub fn clear(&self) {
        Self::hook::<extern "C" fn()>(&self.cuda, "standin_clear")();
    }

    pub fn delay_streams(&self, microseconds: c_int) {
        Self::hook::<extern "C" fn(c_int)>(&self.cuda, "standin_delay_streams")(microseconds);
    }

    pub fn set_small(&self, bytes: usize) {
        Self::hook::<extern "C" fn(usize)>(&self.nccl, "standin_nccl_set_small")(bytes);
    }

    /// The least time that NCCL takes to enqueue something.
    pub fn delay_nccl(&self, microseconds: c_int) {
        Self::hook::<extern "C" fn(c_int)>(&self.nccl, "standin_nccl_delay_calls")(microseconds);
    }

    /// How many communicators were aborted so far.
    pub fn aborted(&self) -> c_int {
        Self::hook::<extern "C" fn() -> c_int>(&self.nccl, "standin_nccl_aborted")()
    }

    /// How often two streams touched the same memory with no event between them, and the last case.
    pub fn races(&self) -> (c_int, String) {
        let count = Self::hook::<extern "C" fn() -> c_int>(&self.cuda, "standin_races")();
        (count, self.text("standin_last_race"))
    }

    pub fn host_waits(&self) -> u64 {
        Self::hook::<extern "C" fn() -> u64>(&self.cuda, "standin_host_waits")()
    }

    /// Nothing was touched by two streams without an order, or out of bounds.
    pub fn assert_clean(&self) {
        let faults = Self::hook::<extern "C" fn() -> c_int>(&self.cuda, "standin_faults")();
        assert_eq!((faults, self.text("standin_last_fault")), (0, String::new()));
        assert_eq!(self.races(), (0, String::new()));
    }

    /// The next call of this function fails.
    pub fn fail_next(&self, function: &str, code: c_int) {
        type Hook = extern "C" fn(*const c_char, c_int);
        let name = CString::new(function).unwrap();
        Self::hook::<Hook>(&self.cuda, "standin_fail_next")(name.as_ptr(), code);
    }

    pub fn freeze(&self, stream: u64, is_frozen: bool) {
        type Hook = extern "C" fn(*mut c_void, c_int);
        let hook = Self::hook::<Hook>(&self.cuda, "standin_freeze_stream");
        hook(stream as *mut c_void, is_frozen.into());
    }

    pub fn capture(&self, stream: u64, is_capturing: bool) {
        type Hook = extern "C" fn(*mut c_void, c_int);
        let hook = Self::hook::<Hook>(&self.cuda, "standin_capture_stream");
        hook(stream as *mut c_void, is_capturing.into());
    }

    /// From now on this communicator reports this error.
    pub fn set_async_error(&self, communicator: *mut c_void, code: c_int) {
        type Hook = extern "C" fn(*mut c_void, c_int);
        Self::hook::<Hook>(&self.nccl, "standin_nccl_set_async_error")(communicator, code);
    }

    fn text(&self, name: &str) -> String {
        let text = Self::hook::<extern "C" fn() -> *const c_char>(&self.cuda, name)();
        // SAFETY: the stand-in gives a string that stays for now.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
