//! Finding and loading NCCL and NVRTC: first the copy that torch has already loaded, then the one
//! in torch's wheel, then the system's. Loading a second copy beside torch's would break both, so
//! the order matters. If none is found, the error lists every place that was tried.

use super::fault::{Fault, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::ffi::{OsStr, OsString, c_int};
use std::path::{Path, PathBuf};

/// The environment variable that names the NCCL library to use.
pub const NCCL_VARIABLE: &str = "GFLOW_NCCL";
/// Open only what is already loaded. The value is Linux's.
const RTLD_NOLOAD: c_int = 4;

pub struct LoadedLibrary {
    pub library: Library,
    /// Where it was found, for messages.
    pub origin: String,
}

/// How to find a library.
struct LibrarySpec {
    /// Its name in messages.
    what: &'static str,
    /// Pairs of soname and folder, best first. The folder is where its wheel puts it, relative to
    /// the `site-packages` that torch is in.
    copies: &'static [(&'static str, &'static str)],
    /// What to do if it is missing.
    advice: &'static str,
}

const NCCL: LibrarySpec = LibrarySpec {
    what: "NCCL",
    copies: &[("libnccl.so.2", "nvidia/nccl/lib")],
    advice: "Install a torch that is built for CUDA, or name the file of NCCL in GFLOW_NCCL",
};

/// The wheels for CUDA 12 and 13 use different folders.
const NVRTC: LibrarySpec = LibrarySpec {
    what: "NVRTC, the compiler of CUDA kernels,",
    copies: &[("libnvrtc.so.13", "nvidia/cu13/lib"), ("libnvrtc.so.12", "nvidia/cuda_nvrtc/lib")],
    advice: "Install a torch that is built for CUDA; its wheel brings NVRTC along",
};

pub fn load_nccl() -> Result<LoadedLibrary> {
    let named = std::env::var_os(NCCL_VARIABLE).filter(|path| !path.is_empty());
    load(&NCCL, &candidates(&NCCL, named, torch_folders(&maps())))
}

pub fn load_nvrtc() -> Result<LoadedLibrary> {
    load(&NVRTC, &candidates(&NVRTC, None, torch_folders(&maps())))
}

/// The memory map of this process.
fn maps() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

/// Where a library may be.
#[derive(Debug, PartialEq, Eq)]
enum Candidate {
    /// Already loaded into this process.
    Loaded(&'static str),
    File(PathBuf),
    /// Wherever the system's loader looks.
    System(&'static str),
}

impl Candidate {
    fn describe(&self) -> String {
        match self {
            Candidate::Loaded(name) => format!("{name} among the libraries that are loaded"),
            Candidate::File(path) => path.display().to_string(),
            Candidate::System(name) => format!("{name} in the system's library path"),
        }
    }

    fn open(&self) -> std::result::Result<Library, libloading::Error> {
        let (name, flags) = match self {
            Candidate::Loaded(name) => (OsStr::new(name), RTLD_NOLOAD),
            Candidate::File(path) => (path.as_os_str(), 0),
            Candidate::System(name) => (OsStr::new(name), 0),
        };
        // SAFETY: the initialisers of these libraries only set up their own variables.
        unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }
    }
}

/// Where to look, in order. A path the user named is the only candidate: no silent replacement.
fn candidates(
    spec: &LibrarySpec,
    named: Option<OsString>,
    torch_folders: Vec<PathBuf>,
) -> Vec<Candidate> {
    if let Some(path) = named {
        return vec![Candidate::File(path.into())];
    }
    let copies = || spec.copies.iter();
    let loaded = copies().map(|(name, _)| Candidate::Loaded(name));
    let beside_torch = torch_folders.iter().flat_map(|torch| {
        copies().map(move |(name, folder)| Candidate::File(torch.join(folder).join(name)))
    });
    let system = copies().map(|(name, _)| Candidate::System(name));
    loaded.chain(beside_torch).chain(system).collect()
}

fn load(spec: &LibrarySpec, candidates: &[Candidate]) -> Result<LoadedLibrary> {
    let mut tried = Vec::new();
    for candidate in candidates {
        let origin = candidate.describe();
        match candidate.open() {
            Ok(library) => {
                log::debug!("loaded {origin}");
                return Ok(LoadedLibrary { library, origin });
            }
            Err(error) => {
                let attempt = format!("{origin} ({})", reason(&error));
                log::debug!("not there: {attempt}");
                tried.push(attempt);
            }
        }
    }
    Err(Fault(format!(
        "{} was not found. Looked for {}. {}",
        spec.what,
        tried.join("; "),
        spec.advice
    )))
}

/// The loader's message. The error itself only says that it failed.
fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| source.to_string())
}

/// The `site-packages` folders that this process has torch loaded from: its libraries are mapped
/// from torch/lib there.
fn torch_folders(maps: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        let Some(start) = line.find('/') else { continue };
        let path = Path::new(&line[start..]);
        let is_torch = path.file_name().is_some_and(|name| {
            let name = name.to_string_lossy();
            name.starts_with("libtorch") && name.contains(".so")
        });
        let Some(folder) = path.ancestors().nth(3).filter(|_| is_torch) else { continue };
        if path.parent().is_some_and(|parent| parent.ends_with("torch/lib"))
            && !folders.iter().any(|other| other == folder)
        {
            folders.push(folder.to_path_buf());
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f00-7f01 r-xp 0000 08:01 12 /opt/env/site-packages/torch/lib/libtorch_cpu.so
7f01-7f02 r--p 1000 08:01 12 /opt/env/site-packages/torch/lib/libtorch_cpu.so
7f02-7f03 r-xp 0000 08:01 13 /usr/lib/libc.so.6
7f03-7f04 rw-p 0000 00:00 0 [heap]
7f04-7f05 r-xp 0000 08:01 14 /home/me/libtorch.so";

    #[test]
    fn the_copy_of_the_process_comes_first_then_the_wheel_then_the_system() {
        let name = "libnccl.so.2";
        let beside = "/opt/env/site-packages/nvidia/nccl/lib/libnccl.so.2";
        assert_eq!(
            candidates(&NCCL, None, torch_folders(MAPS)),
            [Candidate::Loaded(name), Candidate::File(beside.into()), Candidate::System(name)]
        );
        assert_eq!(
            candidates(&NCCL, None, torch_folders("")),
            [Candidate::Loaded(name), Candidate::System(name)]
        );
    }

    #[test]
    fn a_compiler_that_is_loaded_comes_before_a_newer_one_that_is_not() {
        let candidates = candidates(&NVRTC, None, torch_folders(MAPS));
        assert_eq!(
            candidates[..2],
            [Candidate::Loaded("libnvrtc.so.13"), Candidate::Loaded("libnvrtc.so.12")]
        );
        let older = "/opt/env/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
        assert_eq!(candidates[3], Candidate::File(older.into()));
        assert_eq!(candidates.len(), 6);
    }

    #[test]
    fn a_file_that_the_user_names_is_the_only_place() {
        let candidates = candidates(&NCCL, Some("/opt/libnccl.so".into()), torch_folders(MAPS));
        assert_eq!(candidates, [Candidate::File("/opt/libnccl.so".into())]);
    }

    #[test]
    fn what_is_nowhere_is_refused_with_every_place_that_was_looked_at() {
        let nowhere =
            [Candidate::Loaded("libno.so.7"), Candidate::File("/nowhere/libno.so".into())];
        let Err(Fault(text)) = load(&NCCL, &nowhere) else { panic!("found") };
        let parts = ["libno.so.7 among the libraries", "/nowhere/libno.so", NCCL_VARIABLE];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
