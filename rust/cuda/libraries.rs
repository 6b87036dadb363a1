//! Finding NCCL and NVRTC: the copy that torch has loaded, so that there is one of it in the process;
//! then the one that came with torch's wheel; then the system's. It must never load a second copy while
//! there is a first, and where it finds none it names every place that it has looked at.

use super::fault::{Fault, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{OsStr, OsString, c_int};
use std::path::{Path, PathBuf};

/// The variable that names the file of NCCL to use.
pub const NCCL_VARIABLE: &str = "GFLOW_NCCL";
/// Only what is loaded already. The value is that of Linux.
const RTLD_NOLOAD: c_int = 4;

/// A library, and where it is from.
pub struct Found {
    pub library: Library,
    pub origin: String,
}

/// What is looked for.
struct Wanted {
    /// What people call it.
    what: &'static str,
    /// What the loader knows it by, the best first, and in which folder it is, below the one that
    /// torch is in, if both are from wheels.
    copies: &'static [(&'static str, &'static str)],
    /// What to do where it is not.
    advice: &'static str,
}

const NCCL: Wanted = Wanted {
    what: "NCCL",
    copies: &[("libnccl.so.2", "nvidia/nccl/lib")],
    advice: "Install a torch that is built for CUDA, or name the file of NCCL in GFLOW_NCCL",
};

/// The wheels for CUDA 12 and 13 have different folders.
const NVRTC: Wanted = Wanted {
    what: "NVRTC, the compiler of CUDA kernels,",
    copies: &[("libnvrtc.so.13", "nvidia/cu13/lib"), ("libnvrtc.so.12", "nvidia/cuda_nvrtc/lib")],
    advice: "Install a torch that is built for CUDA; its wheel brings NVRTC along",
};

pub fn find_nccl() -> Result<Found> {
    let named = std::env::var_os(NCCL_VARIABLE).filter(|path| !path.is_empty());
    find(&NCCL, &places(&NCCL, named, torch_folders(&maps())))
}

pub fn find_nvrtc() -> Result<Found> {
    find(&NVRTC, &places(&NVRTC, None, torch_folders(&maps())))
}

/// What is mapped into this process.
fn maps() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

/// A place to look at.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Among the libraries of this process.
    Loaded(&'static str),
    File(PathBuf),
    /// Wherever the system's loader looks.
    System(&'static str),
}

impl Place {
    fn in_words(&self) -> String {
        match self {
            Place::Loaded(name) => format!("{name} among the libraries that are loaded"),
            Place::File(path) => path.display().to_string(),
            Place::System(name) => format!("{name} in the system's library path"),
        }
    }

    fn open(&self) -> std::result::Result<Library, libloading::Error> {
        let (name, flags) = match self {
            Place::Loaded(name) => (OsStr::new(name), RTLD_NOLOAD),
            Place::File(path) => (path.as_os_str(), 0),
            Place::System(name) => (OsStr::new(name), 0),
        };
        // SAFETY: the initialisers of these libraries do nothing but set up their own variables.
        unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }
    }
}

fn places(wanted: &Wanted, named: Option<OsString>, torch_folders: Vec<PathBuf>) -> Vec<Place> {
    if let Some(path) = named {
        // Who names one wants that one, and no other in its stead.
        return vec![Place::File(path.into())];
    }
    let copies = || wanted.copies.iter();
    let loaded = copies().map(|(name, _)| Place::Loaded(name));
    let beside = torch_folders.iter().flat_map(|torch| {
        copies().map(move |(name, folder)| Place::File(torch.join(folder).join(name)))
    });
    let system = copies().map(|(name, _)| Place::System(name));
    loaded.chain(beside).chain(system).collect()
}

fn find(wanted: &Wanted, places: &[Place]) -> Result<Found> {
    let mut looked_at = Vec::new();
    for place in places {
        match place.open() {
            Ok(library) => return Ok(Found { library, origin: place.in_words() }),
            Err(error) => looked_at.push(format!("{} ({error})", place.in_words())),
        }
    }
    Err(Fault(format!(
        "{} was not found. Looked for {}. {}",
        wanted.what,
        looked_at.join("; "),
        wanted.advice
    )))
}

/// The folders that torch is installed in, from the list of what is mapped into this process: its
/// libraries are in torch/lib there.
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
            places(&NCCL, None, torch_folders(MAPS)),
            [Place::Loaded(name), Place::File(beside.into()), Place::System(name)]
        );
        assert_eq!(
            places(&NCCL, None, torch_folders("")),
            [Place::Loaded(name), Place::System(name)]
        );
    }

    #[test]
    fn a_compiler_that_is_loaded_comes_before_a_newer_one_that_is_not() {
        let places = places(&NVRTC, None, torch_folders(MAPS));
        assert_eq!(places[..2], [Place::Loaded("libnvrtc.so.13"), Place::Loaded("libnvrtc.so.12")]);
        let older = "/opt/env/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
        assert_eq!(places[3], Place::File(older.into()));
        assert_eq!(places.len(), 6);
    }

    #[test]
    fn a_file_that_the_user_names_is_the_only_place() {
        let places = places(&NCCL, Some("/opt/libnccl.so".into()), torch_folders(MAPS));
        assert_eq!(places, [Place::File("/opt/libnccl.so".into())]);
    }

    #[test]
    fn what_is_nowhere_is_refused_with_every_place_that_was_looked_at() {
        let nowhere = [Place::Loaded("libno.so.7"), Place::File("/nowhere/libno.so".into())];
        let Err(Fault(text)) = find(&NCCL, &nowhere) else { panic!("found") };
        let parts = ["libno.so.7 among the libraries", "/nowhere/libno.so", NCCL_VARIABLE];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
