//! Compiling the kernels for a GPU, once per machine: the image is kept in the disk cache. The
//! source, which is kernels.cu with quantizer.cu behind it, is part of this library, and no option changes what the kernels calculate.

use crate::cuda::safe::disk_cache;
use crate::cuda::safe::nvrtc::Nvrtc;
use crate::cuda::sys::fault::{Fault, Result};
use std::time::Instant;

const SOURCE: &str = concat!(
    include_str!("kernels.cu"),
    "\n#line 1 \"quantizer.cu\"\n",
    include_str!("quantizer.cu")
);
const NAME: &std::ffi::CStr = c"kernels.cu";

/// The CPU neither fuses multiply and add nor flushes subnormals, and divides and takes roots exactly.
/// All but the first are NVRTC's defaults.
const OPTIONS: [&str; 5] =
    ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17"];

/// The kernels' image (a CUBIN) for a GPU of this compute capability.
pub fn compiled(compute_capability: (u32, u32)) -> Result<Vec<u8>> {
    let nvrtc = Nvrtc::get()?;
    let target = target_for(compute_capability, &nvrtc.architectures).ok_or_else(|| {
        let (major, minor) = compute_capability;
        let supported: Vec<String> = nvrtc
            .architectures
            .iter()
            .map(|known| format!("{}.{}", known / 10, known % 10))
            .collect();
        Fault(format!(
            "the GPU is of compute capability {major}.{minor}, and NVRTC {} ({}) compiles for {} \
             only. Install a torch that is built for this GPU",
            nvrtc.format_version(),
            nvrtc.origin,
            supported.join(", ")
        ))
    })?;
    let options = options_for(target);
    let name = format!("kernels-sm_{target}");
    let (all_options, version) = (options.join(" "), nvrtc.format_version());
    let key = [SOURCE.as_bytes(), all_options.as_bytes(), version.as_bytes()];
    disk_cache::get_or_build(disk_cache::folder().as_deref(), &name, &key, || {
        let start = Instant::now();
        let (image, _log) = nvrtc.compile(SOURCE, NAME, &options)?;
        let seconds = start.elapsed().as_secs_f64();
        log::info!(
            "compiled the kernels for sm_{target} in {seconds:.1} s ({} bytes)",
            image.len()
        );
        Ok(image)
    })
}

fn options_for(target: u32) -> Vec<String> {
    let target = format!("--gpu-architecture=sm_{target}");
    OPTIONS.into_iter().map(str::to_string).chain([target]).collect()
}

/// The best target that runs on this GPU: its own, or the nearest older one of the same major
/// version.
fn target_for((major, minor): (u32, u32), supported: &[u32]) -> Option<u32> {
    let runs = |known: &u32| known / 10 == major && known % 10 <= minor;
    supported.iter().copied().filter(runs).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::Kernel;

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

    /// Each kernel in the compiler's log: its name, and the text that follows.
    fn by_kernel(log: &str) -> Vec<(&str, &str)> {
        let parts = log.split("Compiling entry function '").skip(1);
        parts.map(|part| part.split_once('\'').expect("a name ends with a quote")).collect()
    }

    /// Checks that all kernels compile for this GPU, and that none spills registers to memory.
    fn check_kernels_for(target: u32) {
        let options = [options_for(target), vec!["--ptxas-options=-v".to_string()]].concat();
        let (image, log) = Nvrtc::get().unwrap().compile(SOURCE, NAME, &options).unwrap();
        assert!(image.starts_with(b"\x7fELF"));
        let (mut found, mut kernels) = (by_kernel(&log), Vec::new());
        kernels.extend(Kernel::all().map(|kernel| kernel.name().to_str().unwrap()));
        found.sort();
        kernels.sort();
        assert_eq!(found.iter().map(|(name, _)| *name).collect::<Vec<_>>(), kernels, "{log}");
        for (name, said) in found {
            let none = " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
            assert!(said.contains(none) && !said.contains("lmem"), "{name}: {said}");
            let symbol = [name.as_bytes(), b"\0"].concat();
            assert!(image.windows(symbol.len()).any(|bytes| bytes == symbol), "{name}");
        }
    }

    /// One test per architecture, so that they run in parallel.
    macro_rules! compiles_for {
        ($($test:ident: $target:literal),* $(,)?) => {
            $(
                #[test]
                #[ignore = "needs NVRTC, which comes with torch: make test runs it"]
                fn $test() {
                    check_kernels_for($target);
                }
            )*
        };
    }

    compiles_for! {
        nvrtc_compiles_all_kernels_without_spills_for_sm_75: 75,
        nvrtc_compiles_all_kernels_without_spills_for_sm_80: 80,
        nvrtc_compiles_all_kernels_without_spills_for_sm_86: 86,
        nvrtc_compiles_all_kernels_without_spills_for_sm_89: 89,
        nvrtc_compiles_all_kernels_without_spills_for_sm_90: 90,
        nvrtc_compiles_all_kernels_without_spills_for_sm_100: 100,
        nvrtc_compiles_all_kernels_without_spills_for_sm_120: 120,
    }

    #[test]
    #[ignore = "needs NVRTC, which comes with torch: make test runs it"]
    fn nvrtc_fuses_no_product_with_a_sum_and_flushes_nothing() {
        let ptx = Nvrtc::get().unwrap().ptx(SOURCE, NAME, &options_for(80)).unwrap();
        // The roundings are explicit, so no later pass may fuse them either.
        assert!(ptx.contains("mul.rn.f32") && ptx.contains("add.rn.f32"));
        for wrong in ["fma.", "mad.f32", "mul.f32", "add.f32", "sub.f32", ".ftz"] {
            assert!(!ptx.contains(wrong), "{wrong}");
        }
        assert!(ptx.contains("ld.global.v4.") && ptx.contains("st.global.v4."));
    }

    #[test]
    #[ignore = "needs NVRTC, which comes with torch: make test runs it"]
    fn nvrtc_says_what_is_wrong_with_a_source() {
        let Err(Fault(text)) = Nvrtc::get().unwrap().compile("so not CUDA", c"wrong.cu", &[])
        else {
            panic!("it was compiled")
        };
        assert!(text.contains("wrong.cu(1)") && text.contains("libnvrtc"), "{text}");
    }

    #[test]
    #[ignore = "needs NVRTC, which comes with torch: make test runs it"]
    fn nvrtc_is_asked_for_gpus_that_it_knows_only() {
        let Err(Fault(text)) = compiled((3, 5)) else { panic!("it was compiled") };
        assert!(text.contains("capability 3.5") && text.contains("9.0"), "{text}");
        assert!(compiled((9, 0)).unwrap().starts_with(b"\x7fELF"));
    }
}
