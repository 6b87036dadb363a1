//! NVRTC as loaded into this process: compiles CUDA C++ source to an image for one GPU
//! architecture. Needs neither a GPU nor the driver.

use crate::cuda::sys::fault::{Fault, Result};
use crate::cuda::sys::library::{LoadedLibrary, load_nvrtc};
use crate::cuda::sys::nvrtc::{COMPILATION_ERROR, NvrtcFunctions, ProgramHandle, SUCCESS};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

pub struct Nvrtc {
    functions: NvrtcFunctions,
    /// Major and minor.
    pub version: (u32, u32),
    /// The architectures that it compiles for: 10 * major + minor.
    pub architectures: Vec<u32>,
    /// Where the library was found.
    pub origin: String,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Nvrtc {
    /// NVRTC of this process. Searched for once.
    pub fn get() -> Result<&'static Nvrtc> {
        static NVRTC: OnceLock<Result<Nvrtc>> = OnceLock::new();
        NVRTC.get_or_init(|| load_nvrtc().and_then(Nvrtc::new)).as_ref().map_err(Fault::clone)
    }

    fn new(LoadedLibrary { library, origin }: LoadedLibrary) -> Result<Nvrtc> {
        let functions = NvrtcFunctions::load(&library).map_err(|error| {
            Fault(format!("NVRTC ({origin}) is older than that of CUDA 11.2: {error}"))
        })?;
        let mut nvrtc =
            Nvrtc { functions, version: (0, 0), architectures: vec![], origin, _library: library };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: it writes two integers.
        let status = unsafe { (nvrtc.functions.version)(&mut major, &mut minor) };
        nvrtc.check("nvrtcVersion", status)?;
        // SAFETY: it writes one integer.
        nvrtc.check("nvrtcGetNumSupportedArchs", unsafe {
            (nvrtc.functions.count_architectures)(&mut count)
        })?;
        let mut architectures: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for the count it has just returned.
        nvrtc.check("nvrtcGetSupportedArchs", unsafe {
            (nvrtc.functions.architectures)(architectures.as_mut_ptr())
        })?;
        let unsigned = |number: c_int| u32::try_from(number).unwrap_or(0);
        nvrtc.version = (unsigned(major), unsigned(minor));
        nvrtc.architectures = architectures.into_iter().map(unsigned).collect();
        log::info!("using NVRTC {} ({})", nvrtc.format_version(), nvrtc.origin);
        Ok(nvrtc)
    }

    /// Compiles a source to a CUBIN. Returns the compiler's log with it.
    pub fn compile(
        &self,
        source: &str,
        name: &CStr,
        options: &[String],
    ) -> Result<(Vec<u8>, String)> {
        let source = c_string(source)?;
        let (program, log) = Program::compile(self, &source, name, options)?;
        let (size, image) = (&self.functions.image_bytes, &self.functions.image);
        Ok((program.output("nvrtcGetCUBIN", size, image)?, log))
    }

    /// Compiles a source to PTX, which can be read.
    #[cfg(test)]
    pub fn ptx(&self, source: &str, name: &CStr, options: &[String]) -> Result<String> {
        let source = c_string(source)?;
        let (program, _) = Program::compile(self, &source, name, options)?;
        let missing = |error: libloading::Error| Fault(error.to_string());
        // SAFETY: the types are those of NVRTC's header.
        let (size, ptx): (GetSize, GetOutput) = unsafe {
            let size = self._library.get(b"nvrtcGetPTXSize").map_err(missing)?;
            (size, self._library.get(b"nvrtcGetPTX").map_err(missing)?)
        };
        Ok(String::from_utf8_lossy(&program.output("nvrtcGetPTX", &size, &ptx)?).into_owned())
    }

    /// The version as "12.8".
    pub fn format_version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    fn check(&self, call: &str, status: c_int) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: it takes any number and returns a static string, or null.
        let meaning = unsafe {
            let meaning = (self.functions.error_string)(status);
            if meaning.is_null() { c"no message" } else { CStr::from_ptr(meaning) }
        };
        let meaning = meaning.to_string_lossy();
        Err(Fault(format!("{call} of NVRTC ({}) failed: {meaning} ({status})", self.origin)))
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Fault("a zero byte in what is compiled".to_string()))
}

/// A compiled program; destroyed on drop.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: ProgramHandle,
}

type GetSize = Symbol<unsafe extern "C" fn(ProgramHandle, *mut usize) -> c_int>;
type GetOutput = Symbol<unsafe extern "C" fn(ProgramHandle, *mut c_char) -> c_int>;

impl<'a> Program<'a> {
    /// Compiles a source. Returns the compiler's log with it.
    fn compile(
        nvrtc: &'a Nvrtc,
        source: &'a CStr,
        name: &CStr,
        options: &[String],
    ) -> Result<(Program<'a>, String)> {
        let functions = &nvrtc.functions;
        let options: Vec<CString> =
            options.iter().map(|option| c_string(option)).collect::<Result<_>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Program { nvrtc, handle: null_mut() };
        // SAFETY: both strings are null-terminated, the source outlives the program, and there are
        // no headers.
        nvrtc.check("nvrtcCreateProgram", unsafe {
            let (source, name) = (source.as_ptr(), name.as_ptr());
            (functions.create)(&mut program.handle, source, name, 0, null(), null())
        })?;
        // SAFETY: the program is valid, and so are that many options.
        let status = unsafe {
            (functions.compile)(program.handle, options.len() as c_int, options.as_ptr())
        };
        // If the log can't be read, still report the status.
        let log = program.output("nvrtcGetProgramLog", &functions.log_bytes, &functions.log);
        let log = String::from_utf8_lossy(&log.unwrap_or_default()).replace('\0', "");
        if status == COMPILATION_ERROR {
            return Err(Fault(format!(
                "NVRTC {} ({}) did not compile the kernels: {}",
                nvrtc.format_version(),
                nvrtc.origin,
                log.trim()
            )));
        }
        nvrtc.check("nvrtcCompileProgram", status)?;
        Ok((program, log))
    }

    /// Reads an output of the program: its size from one function, its bytes from another.
    fn output(&self, call: &str, size: &GetSize, output: &GetOutput) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is valid; it writes one integer.
        self.nvrtc.check(call, unsafe { size(self.handle, &mut bytes) })?;
        let mut buffer = vec![0u8; bytes];
        // SAFETY: there is room for the size it has just returned.
        self.nvrtc.check(call, unsafe { output(self.handle, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: it is no longer used. A failure can't be handled.
            let _ = unsafe { (self.nvrtc.functions.destroy)(&mut self.handle) };
        }
    }
}
