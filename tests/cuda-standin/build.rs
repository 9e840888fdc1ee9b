//! Gives the library the name under which programs ask for the driver.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its threads outlive a `dlclose`, as the driver's do.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // C sources of kernels come here: what the device kernel is compiled from, compiled for the host.
}
