//! Keeps the C interface of `doorbell` out of this library: a program that links `libdoorbell.so` is to use that one, not the
//! copy that lies before it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
