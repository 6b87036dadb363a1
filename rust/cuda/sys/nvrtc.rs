//! NVRTC's functions, as in its header since CUDA 11.2.

use libloading::os::unix::{Library, Symbol};
use std::ffi::{c_char, c_int, c_void};

/// `NVRTC_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `NVRTC_ERROR_COMPILATION`: the source or an option was refused; the log says why.
pub const COMPILATION_ERROR: c_int = 6;

/// `nvrtcProgram`.
pub type ProgramHandle = *mut c_void;

function_table! { NvrtcFunctions {
    error_string = "nvrtcGetErrorString" (c_int) -> *const c_char;
    version = "nvrtcVersion" (*mut c_int, *mut c_int) -> c_int;
    count_architectures = "nvrtcGetNumSupportedArchs" (*mut c_int) -> c_int;
    architectures = "nvrtcGetSupportedArchs" (*mut c_int) -> c_int;
    create = "nvrtcCreateProgram" (
        *mut ProgramHandle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    ) -> c_int;
    destroy = "nvrtcDestroyProgram" (*mut ProgramHandle) -> c_int;
    compile = "nvrtcCompileProgram" (ProgramHandle, c_int, *const *const c_char) -> c_int;
    log_bytes = "nvrtcGetProgramLogSize" (ProgramHandle, *mut usize) -> c_int;
    log = "nvrtcGetProgramLog" (ProgramHandle, *mut c_char) -> c_int;
    image_bytes = "nvrtcGetCUBINSize" (ProgramHandle, *mut usize) -> c_int;
    image = "nvrtcGetCUBIN" (ProgramHandle, *mut c_char) -> c_int;
} }
