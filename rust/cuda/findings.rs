//! Looks for what GPUs need on this machine, for `gflow doctor`. Missing things are findings, not
//! errors.

use super::kernels::compiled;
use super::safe::device::{DeviceProperties, device_count};
use super::safe::nccl::{self, Nccl};
use super::safe::nvrtc::Nvrtc;
use super::sys::driver;
use super::sys::fault::Result;

/// Something that was looked for: what was found, or why it was not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub what: String,
    pub outcome: std::result::Result<String, String>,
}

pub fn probe() -> Vec<Finding> {
    let mut findings = vec![
        finding(
            "CUDA driver",
            driver::init()
                .and_then(|()| driver::version())
                .map(|version| format!("for CUDA {}", driver::format_version(version))),
        ),
        finding(
            "NCCL",
            Nccl::get()
                .map(|nccl| format!("{} ({})", nccl::format_version(nccl.version), nccl.origin)),
        ),
    ];
    let compiler = Nvrtc::get().map(|nvrtc| {
        let newest = nvrtc.architectures.iter().max().copied().unwrap_or(0);
        format!("{}, up to sm_{newest} ({})", nvrtc.format_version(), nvrtc.origin)
    });
    findings.push(finding("NVRTC", compiler));
    let devices = device_count();
    // Without a driver, the first finding says why.
    if driver::init().is_ok() {
        findings.push(finding("GPUs", devices.clone().map(|count| count.to_string())));
    }
    for device in 0..devices.unwrap_or(0) {
        let properties = DeviceProperties::query(device);
        let words = properties.clone().map(|properties| {
            let gigabytes = properties.total_memory as f64 / (1 << 30) as f64;
            let (major, minor) = properties.compute_capability;
            format!("{}, sm_{major}{minor}, {gigabytes:.1} GiB", properties.name)
        });
        findings.push(finding(&format!("GPU {device}"), words));
        if let Ok(properties) = properties {
            let image = compiled(properties.compute_capability);
            let words = image.map(|image| format!("{} bytes", image.len()));
            findings.push(finding(&format!("kernels for GPU {device}"), words));
        }
    }
    findings
}

fn finding(what: &str, outcome: Result<String>) -> Finding {
    Finding { what: what.to_string(), outcome: outcome.map_err(|fault| fault.0) }
}
