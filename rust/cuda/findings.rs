//! What the GPU path needs of a machine, and whether it is there: for `gflow doctor`. It must never
//! fail: what is missing is what it is asked for.

use super::fault::Result;
use super::nccl::{self, Nccl};
use super::nvrtc::Nvrtc;
use super::{compiler, driver};

/// Something that was looked for, and what was found or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub what: String,
    pub outcome: std::result::Result<String, String>,
}

pub fn probe() -> Vec<Finding> {
    let mut findings = vec![
        finding(
            "CUDA driver",
            driver::start()
                .and_then(|()| driver::version())
                .map(|version| format!("for CUDA {}", driver::in_words(version))),
        ),
        finding(
            "NCCL",
            Nccl::get().map(|nccl| format!("{} ({})", nccl::in_words(nccl.version), nccl.origin)),
        ),
    ];
    let compiler = Nvrtc::get().map(|nvrtc| {
        let newest = nvrtc.architectures.iter().max().copied().unwrap_or(0);
        format!("{}, up to sm_{newest} ({})", nvrtc.version_in_words(), nvrtc.origin)
    });
    findings.push(finding("NVRTC", compiler));
    let devices = driver::devices();
    // Why there is no driver was said.
    if driver::start().is_ok() {
        findings.push(finding("GPUs", devices.clone().map(|count| count.to_string())));
    }
    for device in 0..devices.unwrap_or(0) {
        let description = driver::describe(device);
        let words = description.clone().map(|of| {
            let gigabytes = of.bytes as f64 / (1 << 30) as f64;
            let (major, minor) = of.architecture;
            format!("{}, sm_{major}{minor}, {gigabytes:.1} GiB", of.name)
        });
        findings.push(finding(&format!("GPU {device}"), words));
        if let Ok(of) = description {
            let compiled = compiler::compiled(of.architecture);
            let words = compiled.map(|image| format!("{} bytes", image.len()));
            findings.push(finding(&format!("kernels for GPU {device}"), words));
        }
    }
    findings
}

fn finding(what: &str, outcome: Result<String>) -> Finding {
    Finding { what: what.to_string(), outcome: outcome.map_err(|fault| fault.0) }
}
