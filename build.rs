//! Compiles the kernels, with the feature `cuda` and where there is nvcc. No policy: other builds need nothing of this.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        kernels();
    }
}

/// The architectures that the kernels are compiled for, Turing to Blackwell, as far as nvcc knows them.
const ARCHITECTURES: &str = "75,80,86,89,90,100,120";
/// Others in their place, in the same form.
const WANTED: &str = "DOORBELL_CUDA_ARCHITECTURES";
/// GPUs that no other code is for come to theirs by the PTX of this one, if their driver knows the PTX of that nvcc.
const PTX: &str = "90";

/// An nvcc of CUDA 12, for drivers that are older than the first nvcc.
const OLDER: &str = "DOORBELL_NVCC_12";

/// Leaves `kernels.image` in OUT_DIR: what the driver loads, or, without nvcc, a text that it refuses. In that case `DOORBELL_NO_KERNELS`
/// has the reason. `kernels12.image` is that of [`OLDER`], and empty without it.
fn kernels() {
    // The kernels include every header.
    for path in ["cuda/kernels.cu", "cuda/reduce.h", "cuda/step.h", "include"] {
        println!("cargo::rerun-if-changed={path}");
    }
    // Appended by nvcc itself.
    println!("cargo::rerun-if-env-changed=NVCC_APPEND_FLAGS");
    println!("cargo::rerun-if-env-changed=NVCC_PREPEND_FLAGS");
    println!("cargo::rerun-if-env-changed={WANTED}");
    println!("cargo::rerun-if-env-changed={OLDER}");
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let image = folder.join("kernels.image");
    let compiled = match find_nvcc() {
        Some((nvcc, wanted)) => {
            println!("cargo::rerun-if-changed={}", nvcc.display());
            compile(&nvcc, &image, "DOORBELL_KERNELS").inspect_err(|reason| {
                // Who names a compiler wants it; one that happens to be there may be too old.
                assert!(!wanted, "{reason}");
                println!("cargo::warning=no kernels: {reason}");
            })
        }
        None => Err("there was no nvcc when this was built".to_owned()),
    };
    if let Err(reason) = compiled {
        println!("cargo::rustc-env=DOORBELL_NO_KERNELS={reason}");
        fs::write(&image, b"doorbell was built without kernels\0").expect("cargo made the folder");
    }
    let older = folder.join("kernels12.image");
    match set(OLDER).map(PathBuf::from) {
        Some(nvcc) => {
            println!("cargo::rerun-if-changed={}", nvcc.display());
            let compiled = compile(&nvcc, &older, "DOORBELL_KERNELS_12");
            compiled.unwrap_or_else(|reason| panic!("{OLDER}: {reason}"));
        }
        None => fs::write(&older, b"").expect("cargo made the folder"),
    }
}

/// nvcc, and whether it was named.
fn find_nvcc() -> Option<(PathBuf, bool)> {
    for name in ["DOORBELL_NVCC", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if let Some(nvcc) = set("DOORBELL_NVCC") {
        return Some((nvcc.into(), true));
    }
    println!("cargo::rerun-if-env-changed=PATH");
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set);
    let folders = toolkits.map(|toolkit| Path::new(&toolkit).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    folders
        .chain(env::split_paths(&path))
        .map(|folder| folder.join("nvcc"))
        .find(|nvcc| nvcc.is_file())
        .map(|nvcc| (nvcc, false))
}

fn set(name: &str) -> Option<std::ffi::OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Compiles for the architectures that nvcc knows, and sets that variable to them for the crate.
fn compile(nvcc: &Path, image: &Path, variable: &str) -> Result<(), String> {
    let listed = Command::new(nvcc).arg("--list-gpu-code").output();
    // An nvcc that does not say takes all, or none.
    let known = listed.map_or_else(
        |_| String::new(),
        |listed| String::from_utf8_lossy(&listed.stdout).into_owned(),
    );
    let wanted = env::var(WANTED);
    let codes: Vec<_> = wanted
        .as_deref()
        .unwrap_or(ARCHITECTURES)
        .split(',')
        .map(|number| (number, format!("sm_{number}")))
        .filter(|(_, code)| known.is_empty() || known.lines().any(|line| line == code))
        .chain([(PTX, format!("compute_{PTX}"))])
        .collect();
    // For messages, and for the test that looks into the image.
    let names: Vec<&str> = codes.iter().map(|(_, code)| code.as_str()).collect();
    println!("cargo::rustc-env={variable}={}", names.join(" "));
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-o"]);
    command
        .arg(image)
        .args(["-I", "include", "cuda/kernels.cu"]);
    for (number, code) in codes {
        command.arg(format!("-gencode=arch=compute_{number},code={code}"));
    }
    let nvcc = nvcc.display();
    let output = command
        .output()
        .map_err(|error| format!("{nvcc} does not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{nvcc} failed: {}", said.replace('\n', "; ")));
    }
    for line in said.lines() {
        println!("cargo::warning=nvcc: {line}");
    }
    Ok(())
}
