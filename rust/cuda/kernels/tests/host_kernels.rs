//! Runs the kernels on the CPU, for tests: the sources themselves, compiled for the host by the C++
//! compiler that the bridge needs anyway. tests/gpu/host_kernels/ says what this cannot show.

use crate::cuda::kernels::Kernel;
use crate::cuda::kernels::launch::LaunchConfig;
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

type Describe = unsafe extern "C" fn(*mut c_uint) -> *const Description;
type Run = unsafe extern "C" fn(
    *const c_char,
    *const c_uint,
    *const c_uint,
    c_uint,
    *mut *mut c_void,
) -> c_int;

/// `GflowHostKernel` of host_kernels.h.
#[repr(C)]
struct Description {
    name: *const c_char,
    arguments: *const c_char,
}

pub struct HostKernels {
    describe: Symbol<Describe>,
    run: Symbol<Run>,
    _library: Library,
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub enum HostArgument {
    Pointer(*mut c_void),
    Unsigned(u32),
    Long(u64),
    Float(f32),
}

impl HostArgument {
    pub fn of<T>(slice: &mut [T]) -> HostArgument {
        HostArgument::Pointer(slice.as_mut_ptr().cast())
    }

    fn letter(&self) -> u8 {
        match self {
            HostArgument::Pointer(_) => b'p',
            HostArgument::Unsigned(_) => b'u',
            HostArgument::Long(_) => b'l',
            HostArgument::Float(_) => b'f',
        }
    }

    fn address(&mut self) -> *mut c_void {
        match self {
            HostArgument::Pointer(value) => (&raw mut *value).cast(),
            HostArgument::Unsigned(value) => (&raw mut *value).cast(),
            HostArgument::Long(value) => (&raw mut *value).cast(),
            HostArgument::Float(value) => (&raw mut *value).cast(),
        }
    }
}

impl HostKernels {
    pub fn get() -> &'static HostKernels {
        static KERNELS: OnceLock<HostKernels> = OnceLock::new();
        KERNELS.get_or_init(|| {
            let path = build();
            // SAFETY: it has no initialisers, and the types are those of its header.
            unsafe {
                let library = Library::new(&path).expect("what was just built can be loaded");
                let describe = library.get(b"gflow_host_kernels").expect("it is in the header");
                let run = library.get(b"gflow_host_launch").expect("it is in the header");
                HostKernels { describe, run, _library: library }
            }
        })
    }

    /// The name and the argument letters of every kernel.
    pub fn table(&self) -> Vec<(&CStr, &CStr)> {
        let mut count = 0;
        // SAFETY: it returns a static array of `count` descriptions with static strings.
        unsafe {
            let table = (self.describe)(&mut count);
            let table = std::slice::from_raw_parts(table, count as usize);
            let texts = |of: &Description| (CStr::from_ptr(of.name), CStr::from_ptr(of.arguments));
            table.iter().map(texts).collect()
        }
    }

    /// Runs a kernel to completion.
    ///
    /// # Safety
    /// Every pointer is to as much memory as the kernel uses.
    pub unsafe fn launch(&self, kernel: Kernel, launch: LaunchConfig, arguments: &[HostArgument]) {
        let letters: Vec<u8> = arguments.iter().map(HostArgument::letter).collect();
        let table = self.table();
        let described = table.iter().find(|(name, _)| *name == kernel.name());
        let described = described.unwrap_or_else(|| panic!("{kernel:?} is not in the table"));
        assert_eq!(described.1.to_bytes(), letters, "{kernel:?}");
        let (grid, block) = (<[u32; 3]>::from(launch.grid), <[u32; 3]>::from(launch.block));
        let mut arguments = arguments.to_vec();
        let mut addresses: Vec<_> = arguments.iter_mut().map(HostArgument::address).collect();
        // SAFETY: number and types of the arguments were checked; the memory is the caller's
        // promise.
        let status = unsafe {
            let (grid, block) = (grid.as_ptr(), block.as_ptr());
            (self.run)(kernel.name().as_ptr(), grid, block, launch.shared, addresses.as_mut_ptr())
        };
        assert_eq!(status, 0, "{kernel:?} {launch:?}");
    }
}

/// Builds the library next to this test's executable, and returns its path.
fn build() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = root.join("tests/gpu/host_kernels/host_kernels.cpp");
    let own = std::env::current_exe().expect("a test knows its own file");
    let library = own.with_extension("host_kernels.so");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_string());
    // CXX may contain options, as for the `cc` crate, which builds the bridge.
    let mut words = compiler.split_whitespace();
    let program = words.next().unwrap_or("c++");
    // At every run: only the compiler knows whether an included file has changed. Under a name of
    // this process until it is complete, because other processes may build it too.
    let new = own.with_extension(format!("host_kernels.{}.so", std::process::id()));
    let output = Command::new(program)
        .args(words)
        .args(["-std=c++20", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-o"])
        .args([&new, &source])
        .output()
        .unwrap_or_else(|error| panic!("{compiler} could not be run: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler} did not compile {}: {text}", source.display());
    std::fs::rename(&new, &library).expect("a file beside the test can be renamed");
    library
}
