//! What the feature `verbs` needs of the system, looked for before anything is compiled against it: what is missing is one line that
//! names the package, and not the end of another crate's panic. Names of packages are Debian's.
//!
//! A crate of its own, and without dependencies: so that it is ready before rdma-sys's build script, whose bindgen takes long to compile,
//! and, with more that waits for it, comes first.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest libclang that the bindgen inside rdma-sys 0.3.0 can read headers with.
const LIBCLANG_MAX: u32 = 15;

fn main() {
    if let Err(missing) = check() {
        println!("cargo::error={missing}");
    }
}

/// The first thing that is missing, with the way to get it.
fn check() -> Result<(), String> {
    for variable in [
        "CC",
        "LIBCLANG_PATH",
        "PKG_CONFIG_PATH",
        "PKG_CONFIG_LIBDIR",
    ] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let need = |what: &str, package: &str| {
        format!(
            "the feature `verbs` needs {what}: apt install {package} (scripts/setup-verbs installs all that it needs)"
        )
    };
    let pkg_config = |arguments: &[&str]| {
        let program = std::env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
        Command::new(program)
            .args(arguments)
            .output()
            .is_ok_and(|output| output.status.success())
    };
    if !pkg_config(&["--version"]) {
        return Err(need("the program pkg-config", "pkg-config"));
    }
    // The versions that rdma-sys asks for.
    for (library, version, package) in [
        ("libibverbs", "1.8.28", "libibverbs-dev"),
        ("librdmacm", "1.2.28", "librdmacm-dev"),
    ] {
        if !pkg_config(&[&format!("--atleast-version={version}"), library]) {
            return Err(need(&format!("{library} {version} of rdma-core"), package));
        }
    }
    if !preprocesses("#include <infiniband/mlx5dv.h>\n") {
        return Err(need("the header <infiniband/mlx5dv.h>", "libibverbs-dev"));
    }
    match libclang() {
        None => Err(need("a libclang of version 15 or older", "libclang-14-dev")),
        Some((version, path)) if version > LIBCLANG_MAX => Err(format!(
            "rdma-sys cannot use libclang {version} ({}), only {LIBCLANG_MAX} and older: apt install libclang-14-dev, and set LIBCLANG_PATH=/usr/lib/llvm-14/lib (or: eval \"$(scripts/setup-verbs)\")",
            path.display()
        )),
        Some(_) => Ok(()),
    }
}

fn preprocesses(source: &str) -> bool {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let file = out.join("probe.c");
    // A compiler that is not there is for the shim to say, and a folder that cannot be written to as well.
    if std::fs::write(&file, source).is_err() {
        return true;
    }
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(compiler).arg("-E").arg(&file).output();
    output.is_ok_and(|output| output.status.success())
}

/// The libclang that clang-sys will load: the one that `LIBCLANG_PATH` names, or else the newest where it looks.
fn libclang() -> Option<(u32, PathBuf)> {
    if let Some(path) = std::env::var_os("LIBCLANG_PATH").map(PathBuf::from) {
        if path.is_file() {
            return Some((version(&path), path));
        }
        return newest_in(&[path]);
    }
    let mut folders = Vec::new();
    let llvm_config = std::env::var_os("LLVM_CONFIG_PATH").unwrap_or_else(|| "llvm-config".into());
    if let Ok(output) = Command::new(llvm_config).arg("--libdir").output() {
        folders.push(PathBuf::from(
            String::from_utf8_lossy(&output.stdout).trim(),
        ));
    }
    for root in [
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/local/lib64",
    ] {
        folders.push(root.into());
        let below = children(Path::new(root));
        folders.extend(below.iter().flat_map(|folder| children(folder)));
        folders.extend(below);
    }
    newest_in(&folders)
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect()
}

fn newest_in(folders: &[PathBuf]) -> Option<(u32, PathBuf)> {
    let files = folders
        .iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok());
    files
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // Not libclang-cpp, which is another library.
            let versioned = name.strip_prefix("libclang-");
            (name.starts_with("libclang.so")
                || versioned.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())))
                && name.contains(".so")
        })
        .map(|path| (version(&path), path))
        .max_by_key(|(version, _)| *version)
}

/// The major version in the name behind the links, such as `libclang-14.so.14.0.6` or `libclang.so.16`; 0 if there is none.
fn version(path: &Path) -> u32 {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = real.file_name().unwrap_or_default().to_string_lossy();
    let digits: String = name
        .chars()
        .skip_while(|letter| !letter.is_ascii_digit())
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap_or(0)
}
