//! Compiles the shim: the C that emits work queue entries.

fn main() {
    for file in [
        "build.rs",
        "shim/shim.c",
        "include/doorbell/detail/bytecode.h",
        "include/doorbell/detail/wqe.h",
    ] {
        println!("cargo::rerun-if-changed={file}");
    }
    cc::Build::new()
        .file("shim/shim.c")
        .include("include")
        .std("c11")
        // Always optimised: the emitter is on the hot path of debug builds' tests as well, and gets the same code in all of them.
        .opt_level(2)
        // Debug information would bring frame pointers with it: they cost instructions and the backtraces do not need them.
        .force_frame_pointer(false)
        // What is exported by a library that contains the shim is the C interface, not the shim.
        .flag_if_supported("-fvisibility=hidden")
        .warnings(true)
        .extra_warnings(true)
        .compile("doorbell_shim");
}
