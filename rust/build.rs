//! Compiles the C++ half of the cxx bridge. It must not need torch's headers: `cargo build` and
//! `cargo test` work without Python or torch on the machine.

const BRIDGES: [&str; 2] = ["rust/bridge/types.rs", "rust/bridge/entries.rs"];

fn main() {
    // The generated headers, such as "rust/bridge/types.rs.h", are below target/cxxbridge/gflow.
    cxx_build::CFG.include_prefix = "gflow";
    cxx_build::bridges(BRIDGES).include("csrc").std("c++20").compile("gflow_bridge");
    for bridge in BRIDGES {
        println!("cargo:rerun-if-changed={bridge}");
    }
    println!("cargo:rerun-if-changed=csrc/bridge/operation.h");
}
