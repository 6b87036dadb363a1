//! NCCL's functions and types, as in its header since version 2.

use libloading::os::unix::{Library, Symbol};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclInProgress`: a call on a non-blocking communicator is still running. Not a failure.
pub const IN_PROGRESS: c_int = 7;
/// `ncclSum`.
pub const SUM: c_int = 0;
pub const UNIQUE_ID_BYTES: usize = 128;

/// `ncclComm_t`.
pub type CommHandle = *mut c_void;
/// `cudaStream_t`.
pub type StreamHandle = *mut c_void;

/// `ncclUniqueId`: what the ranks of a new communicator find each other by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

/// `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclType(pub c_int);

impl NcclType {
    pub const INT8: NcclType = NcclType(0);
    pub const UINT8: NcclType = NcclType(1);
    pub const INT32: NcclType = NcclType(2);
    pub const INT64: NcclType = NcclType(4);
    pub const FLOAT16: NcclType = NcclType(6);
    pub const FLOAT32: NcclType = NcclType(7);
    pub const FLOAT64: NcclType = NcclType(8);
    pub const BFLOAT16: NcclType = NcclType(9);
}

/// The first fields of `ncclConfig_t`, as of version 2.14. Later versions accept the short form and
/// use their defaults for the rest.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// No call waits for other ranks; the caller polls `ncclCommGetAsyncError` instead.
    pub const NON_BLOCKING: Config =
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
}

function_table! { NcclFunctions {
    version = "ncclGetVersion" (*mut c_int) -> c_int;
    unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    init_rank = "ncclCommInitRankConfig" (*mut CommHandle, c_int, UniqueId, c_int, *const Config) -> c_int;
    finalize = "ncclCommFinalize" (CommHandle) -> c_int;
    destroy = "ncclCommDestroy" (CommHandle) -> c_int;
    abort = "ncclCommAbort" (CommHandle) -> c_int;
    async_error = "ncclCommGetAsyncError" (CommHandle, *mut c_int) -> c_int;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
    all_reduce = "ncclAllReduce" (
        *const c_void, *mut c_void, usize, NcclType, c_int, CommHandle, StreamHandle
    ) -> c_int;
    reduce_scatter = "ncclReduceScatter" (
        *const c_void, *mut c_void, usize, NcclType, c_int, CommHandle, StreamHandle
    ) -> c_int;
    all_gather = "ncclAllGather" (
        *const c_void, *mut c_void, usize, NcclType, CommHandle, StreamHandle
    ) -> c_int;
    reduce = "ncclReduce" (
        *const c_void, *mut c_void, usize, NcclType, c_int, c_int, CommHandle, StreamHandle
    ) -> c_int;
    broadcast = "ncclBroadcast" (
        *const c_void, *mut c_void, usize, NcclType, c_int, CommHandle, StreamHandle
    ) -> c_int;
    send = "ncclSend" (*const c_void, usize, NcclType, c_int, CommHandle, StreamHandle) -> c_int;
    recv = "ncclRecv" (*mut c_void, usize, NcclType, c_int, CommHandle, StreamHandle) -> c_int;
    error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    last_error = "ncclGetLastError" (CommHandle) -> *const c_char;
} }
