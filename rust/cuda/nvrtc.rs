//! NVRTC's functions, as far as they are used here: source goes in, an image for one kind of GPU comes
//! out. It needs no GPU and no driver. A status that is not known here keeps its number.

use super::fault::{Fault, Result};
use super::libraries::{Found, find_nvrtc};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

const SUCCESS: c_int = 0;
/// The source or an option was refused, and the log says why.
const COMPILATION: c_int = 6;

/// A program of NVRTC's.
type Handle = *mut c_void;

macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($field: Symbol<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            fn load(library: &Library) -> std::result::Result<Functions, libloading::Error> {
                // SAFETY: these are the types in NVRTC's header, which has kept them since CUDA 11.2.
                unsafe { Ok(Functions { $($field: library.get($name)?,)* }) }
            }
        }
    };
}

functions! {
    error_string = b"nvrtcGetErrorString" (c_int) -> *const c_char;
    version = b"nvrtcVersion" (*mut c_int, *mut c_int) -> c_int;
    count_architectures = b"nvrtcGetNumSupportedArchs" (*mut c_int) -> c_int;
    architectures = b"nvrtcGetSupportedArchs" (*mut c_int) -> c_int;
    create = b"nvrtcCreateProgram" (
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    ) -> c_int;
    destroy = b"nvrtcDestroyProgram" (*mut Handle) -> c_int;
    compile = b"nvrtcCompileProgram" (Handle, c_int, *const *const c_char) -> c_int;
    log_bytes = b"nvrtcGetProgramLogSize" (Handle, *mut usize) -> c_int;
    log = b"nvrtcGetProgramLog" (Handle, *mut c_char) -> c_int;
    image_bytes = b"nvrtcGetCUBINSize" (Handle, *mut usize) -> c_int;
    image = b"nvrtcGetCUBIN" (Handle, *mut c_char) -> c_int;
}

pub struct Nvrtc {
    functions: Functions,
    /// Major and minor number.
    pub version: (u32, u32),
    /// The kinds of GPU that it compiles for: 10 times the major number and the minor one.
    pub architectures: Vec<u32>,
    /// Where it is from.
    pub origin: String,
    /// The functions are of no use without it.
    _library: Library,
}

impl Nvrtc {
    /// The copy of this process, which is looked for once.
    pub fn get() -> Result<&'static Nvrtc> {
        static OUTCOME: OnceLock<Result<Nvrtc>> = OnceLock::new();
        OUTCOME.get_or_init(|| find_nvrtc().and_then(Nvrtc::new)).as_ref().map_err(Fault::clone)
    }

    fn new(Found { library, origin }: Found) -> Result<Nvrtc> {
        let functions = Functions::load(&library).map_err(|error| {
            Fault(format!("NVRTC ({origin}) is older than that of CUDA 11.2: {error}"))
        })?;
        let mut nvrtc =
            Nvrtc { functions, version: (0, 0), architectures: vec![], origin, _library: library };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: it fills in two numbers.
        nvrtc.checked("nvrtcVersion", unsafe {
            (nvrtc.functions.version)(&mut major, &mut minor)
        })?;
        // SAFETY: it fills in a number.
        nvrtc.checked("nvrtcGetNumSupportedArchs", unsafe {
            (nvrtc.functions.count_architectures)(&mut count)
        })?;
        let mut architectures: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for as many as it has just said.
        nvrtc.checked("nvrtcGetSupportedArchs", unsafe {
            (nvrtc.functions.architectures)(architectures.as_mut_ptr())
        })?;
        let number = |number: c_int| u32::try_from(number).unwrap_or(0);
        nvrtc.version = (number(major), number(minor));
        nvrtc.architectures = architectures.into_iter().map(number).collect();
        Ok(nvrtc)
    }

    /// The image (a CUBIN) that comes of the source with these options, and the compiler's log.
    pub fn compile(
        &self,
        source: &str,
        name: &CStr,
        options: &[String],
    ) -> Result<(Vec<u8>, String)> {
        let no_zero = |text: &str| {
            CString::new(text).map_err(|_| Fault("a zero byte in what is compiled".to_string()))
        };
        let source = no_zero(source)?;
        let options =
            options.iter().map(|option| no_zero(option)).collect::<Result<Vec<CString>>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Program { nvrtc: self, handle: null_mut() };
        // SAFETY: both texts end with a zero and live as long as the program; there are no headers.
        self.checked("nvrtcCreateProgram", unsafe {
            let handle = &mut program.handle;
            (self.functions.create)(handle, source.as_ptr(), name.as_ptr(), 0, null(), null())
        })?;
        // SAFETY: the program is there, and so are as many options.
        let status = unsafe {
            let count = options.len() as c_int;
            (self.functions.compile)(program.handle, count, options.as_ptr())
        };
        let log =
            program.bytes("nvrtcGetProgramLog", &self.functions.log_bytes, &self.functions.log);
        let log = log.map(|log| String::from_utf8_lossy(&log).trim_end_matches('\0').to_string());
        if status == COMPILATION {
            return Err(Fault(format!(
                "NVRTC {} ({}) did not compile the kernels: {}",
                self.version_in_words(),
                self.origin,
                log?.trim()
            )));
        }
        self.checked("nvrtcCompileProgram", status)?;
        let (bytes, image) = (&self.functions.image_bytes, &self.functions.image);
        Ok((program.bytes("nvrtcGetCUBIN", bytes, image)?, log?))
    }

    /// The version as people write it.
    pub fn version_in_words(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    fn checked(&self, what: &str, status: c_int) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: any number may be asked for; what comes back is a text that stays, or nothing.
        let words = unsafe {
            let words = (self.functions.error_string)(status);
            if words.is_null() { c"no message" } else { CStr::from_ptr(words) }
        };
        let words = words.to_string_lossy();
        Err(Fault(format!("{what} of NVRTC ({}) failed: {words} ({status})", self.origin)))
    }
}

/// A program, until it is dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

type Count = Symbol<unsafe extern "C" fn(Handle, *mut usize) -> c_int>;
type Fill = Symbol<unsafe extern "C" fn(Handle, *mut c_char) -> c_int>;

impl Program<'_> {
    /// What one function of NVRTC says the number of bytes of, and another one fills in.
    fn bytes(&self, what: &str, count: &Count, fill: &Fill) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is there; it fills in a number.
        self.nvrtc.checked(what, unsafe { count(self.handle, &mut bytes) })?;
        let mut room = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as it has just said.
        self.nvrtc.checked(what, unsafe { fill(self.handle, room.as_mut_ptr().cast()) })?;
        Ok(room)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: nobody has it any more. If it fails there is nothing left to do.
            let _ = unsafe { (self.nvrtc.functions.destroy)(&mut self.handle) };
        }
    }
}
