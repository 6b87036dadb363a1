//! Compiling the kernels for the GPU at hand, at first use, and once for all processes to come: the
//! image is kept in a cache on disk. There is no other source than kernels.cu, which is part of this
//! library, and no option that changes what is calculated.

use super::cache;
use super::fault::{Fault, Result};
use super::nvrtc::Nvrtc;

const SOURCE: &str = include_str!("kernels.cu");
const NAME: &std::ffi::CStr = c"kernels.cu";

/// The CPU neither fuses a product with a sum nor flushes subnormal numbers, and divides exactly. All
/// but the first are what NVRTC does anyway.
const OPTIONS: [&str; 4] = ["--fmad=false", "--ftz=false", "--prec-div=true", "--std=c++17"];

/// The image (a CUBIN) of the kernels for a GPU of this compute capability.
pub fn compiled(architecture: (u32, u32)) -> Result<Vec<u8>> {
    let nvrtc = Nvrtc::get()?;
    let target = target_for(architecture, &nvrtc.architectures).ok_or_else(|| {
        let (major, minor) = architecture;
        let supported: Vec<String> = nvrtc
            .architectures
            .iter()
            .map(|known| format!("{}.{}", known / 10, known % 10))
            .collect();
        Fault(format!(
            "the GPU is of compute capability {major}.{minor}, and NVRTC {} ({}) compiles for {} \
             only. Install a torch that is built for this GPU",
            nvrtc.version_in_words(),
            nvrtc.origin,
            supported.join(", ")
        ))
    })?;
    let options: Vec<String> = OPTIONS
        .into_iter()
        .map(str::to_string)
        .chain([format!("--gpu-architecture=sm_{target}")])
        .collect();
    let name = format!("kernels-sm_{target}");
    let (all_options, version) = (options.join(" "), nvrtc.version_in_words());
    let parts = [SOURCE.as_bytes(), all_options.as_bytes(), version.as_bytes()];
    cache::get_or_make(cache::folder().as_deref(), &name, &parts, || {
        nvrtc.compile(SOURCE, NAME, &options).map(|(image, _log)| image)
    })
}

/// What to compile for, so that it runs on this GPU: itself, or else the nearest one before it of the
/// same major number.
fn target_for((major, minor): (u32, u32), supported: &[u32]) -> Option<u32> {
    let runs = |known: &u32| known / 10 == major && known % 10 <= minor;
    supported.iter().copied().filter(runs).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_for_the_gpu_itself_or_for_one_before_it_of_its_kind() {
        let supported = [75, 80, 86, 89, 90, 100, 103, 120];
        for (gpu, target) in [
            ((7, 5), Some(75)),
            ((8, 0), Some(80)),
            ((8, 9), Some(89)),
            ((8, 7), Some(86)),
            ((10, 1), Some(100)),
            ((12, 1), Some(120)),
            ((7, 0), None),
            ((6, 1), None),
            ((13, 0), None),
        ] {
            assert_eq!(target_for(gpu, &supported), target, "{gpu:?}");
        }
    }
}
