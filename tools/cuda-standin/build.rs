//! Gives the library the name under which programs ask for the driver, and compiles the kernels that are C.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/kernels.c");
    println!("cargo::rerun-if-changed=../../cuda/reduce.h");
    println!("cargo::rerun-if-changed=../../cuda/step.h");
    println!("cargo::rerun-if-changed=../../tools/gpu-check/src/measured.h");
    println!("cargo::rerun-if-changed=../../include");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its threads outlive a `dlclose`, as the driver's do.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    cc::Build::new()
        .file("src/kernels.c")
        .include("../../include")
        .include("../../cuda")
        .opt_level(2)
        .warnings_into_errors(true)
        .compile("doorbell_standin_kernels");
}
