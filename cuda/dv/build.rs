//! Compiles the glue to mlx5dv and has bindgen read its header. Whether there is an rdma-core and a libclang to do so with,
//! doorbell-rdma-core has said before.

use std::path::PathBuf;

fn main() {
    for file in ["dv.h", "dv.c"] {
        println!("cargo::rerun-if-changed={file}");
    }
    cc::Build::new()
        .file("dv.c")
        .std("gnu11")
        .flag_if_supported("-fvisibility=hidden")
        .warnings(true)
        .extra_warnings(true)
        .compile("doorbell_dv");
    println!("cargo::rustc-link-lib=mlx5");
    println!("cargo::rustc-link-lib=ibverbs");
    let bindings = bindgen::Builder::default()
        .header("dv.h")
        .allowlist_item("(doorbell_dv|DOORBELL_DV)_.*")
        // The same types as in the other bindings, so that an object of one goes to the other.
        .blocklist_type("ibv_.*")
        .layout_tests(true)
        .derive_default(true)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate();
    let path = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("dv.rs");
    match bindings.map(|bindings| bindings.write_to_file(&path)) {
        Ok(Ok(())) => {}
        failed => {
            println!("cargo::error=bindings of dv.h: {failed:?}");
        }
    }
}
