//! Compiles the C++ half of the cxx bridge. It must never need torch's headers: `cargo build` and
//! `cargo test` work without a Python or a torch on the machine.

fn main() {
    // Generated headers are included as "rust/bridge/ffi.rs.h" below target/cxxbridge/gflow.
    cxx_build::CFG.include_prefix = "gflow";
    cxx_build::bridge("rust/bridge/ffi.rs").include("csrc").std("c++20").compile("gflow_bridge");
    println!("cargo:rerun-if-changed=rust/bridge/ffi.rs");
    println!("cargo:rerun-if-changed=csrc/bridge/operation.h");
}
