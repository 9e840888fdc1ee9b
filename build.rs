//! Compiles the kernels, with the feature `cuda` and where there is nvcc, or else clang 19. No policy: other builds need nothing of this.

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

/// What clang compiles for: PTX that drivers of CUDA 12.2 and newer compile for each GPU from Turing on.
const CLANG_PTX: (&str, &str) = ("75", "ptx82");
/// The version that this is written for. Older ones know no PTX with stores to registers of devices; newer ones write other annotations.
const CLANG: &str = "clang++-19";

/// Leaves `kernels.image` in OUT_DIR: what the driver loads, or, without a compiler, a text that it refuses. In that case `DOORBELL_NO_KERNELS`
/// has the reason. `kernels12.image` is that of [`OLDER`], and empty without it.
fn kernels() {
    // The kernels include every header.
    for path in [
        "cuda/kernels.cu",
        "cuda/clang.h",
        "cuda/reduce.h",
        "cuda/step.h",
        "include",
    ] {
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
        None => match find_clang() {
            Some((clang, wanted)) => {
                println!("cargo::rerun-if-changed={}", clang.display());
                compile_by_clang(&clang, &folder, &image).inspect_err(|reason| {
                    assert!(!wanted, "{reason}");
                    println!("cargo::warning=no kernels: {reason}");
                })
            }
            None => Err("there was no nvcc when this was built, and no clang 19".to_owned()),
        },
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

/// clang, and whether it was named.
fn find_clang() -> Option<(PathBuf, bool)> {
    println!("cargo::rerun-if-env-changed=DOORBELL_CLANG");
    if let Some(clang) = set("DOORBELL_CLANG") {
        return Some((clang.into(), true));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|folder| folder.join(CLANG))
        .find(|clang| clang.is_file())
        .map(|clang| (clang, false))
}

/// Compiles to PTX, in two steps: clang 19 has no word for a parameter that stays where the driver has put it (`__grid_constant__`), but its code generator
/// knows the annotation. Without it the kernels would copy their parameters to the stack, up to 16 KiB for each thread that a GPU can have.
fn compile_by_clang(clang: &Path, folder: &Path, image: &Path) -> Result<(), String> {
    let (architecture, version) = CLANG_PTX;
    let features = ["-Xclang", "-target-feature", "-Xclang"];
    let (made, annotated, ptx) = (
        folder.join("kernels.ll"),
        folder.join("annotated.ll"),
        folder.join("kernels.ptx"),
    );
    let mut first = Command::new(clang);
    first.args([
        "-x",
        "cuda",
        "--cuda-device-only",
        "-nocudainc",
        "-nocudalib",
    ]);
    first.args(["-std=c++17", "-O3", "-S", "-emit-llvm", "-D__CUDACC__"]);
    first.args(features).arg(format!("+{version}"));
    first.arg(format!("--cuda-gpu-arch=sm_{architecture}"));
    first.args(["-I", "include", "-include", "cuda/clang.h", "-o"]);
    first.arg(&made).arg("cuda/kernels.cu");
    run(&mut first)?;
    let text = fs::read_to_string(&made).map_err(|error| format!("{}: {error}", made.display()))?;
    let text = annotate(&text).ok_or_else(|| {
        let clang = clang.display();
        format!("{clang} writes annotations of kernels that are not known here; clang 19 is known")
    })?;
    fs::write(&annotated, text).map_err(|error| format!("{}: {error}", annotated.display()))?;
    let mut second = Command::new(clang);
    second.args(["--target=nvptx64-nvidia-cuda", "-x", "ir", "-O3", "-S"]);
    second.args(["-Xclang", "-target-cpu", "-Xclang"]);
    second.arg(format!("sm_{architecture}"));
    second.args(features).arg(format!("+{version}"));
    second.arg("-o").arg(&ptx).arg(&annotated);
    run(&mut second)?;
    let mut bytes = fs::read(&ptx).map_err(|error| format!("{}: {error}", ptx.display()))?;
    // The driver takes PTX as a string.
    bytes.push(0);
    fs::write(image, bytes).map_err(|error| format!("{}: {error}", image.display()))?;
    println!("cargo::rustc-env=DOORBELL_KERNELS=compute_{architecture}");
    println!("cargo::rustc-env=DOORBELL_KERNELS_BY_CLANG=1");
    println!(
        "cargo::warning=there is no nvcc: the kernels are compiled by clang, to PTX; no GPU has executed them"
    );
    Ok(())
}

/// Runs a compiler.
fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{name} does not start: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name} failed: {}", said.replace('\n', "; ")))
}

/// The module with the annotation that each structure that is a kernel's parameter is a grid constant.
fn annotate(module: &str) -> Option<String> {
    let list = module
        .lines()
        .find(|line| line.starts_with("!nvvm.annotations = !{"))?;
    let kernels = module.lines().filter_map(|line| {
        let (name, _) = line
            .split_once("!{ptr @")?
            .1
            .split_once(", !\"kernel\", i32 1}")?;
        Some(name)
    });
    // Numbers of metadata that clang does not come to.
    let mut next = 1_000_000;
    let (mut nodes, mut names) = (String::new(), String::new());
    for kernel in kernels {
        let start = format!(" @{kernel}(");
        let definition = module
            .lines()
            .find(|line| line.starts_with("define ") && line.contains(&start))?;
        let parameters = definition.split_once(&start)?.1;
        let structures: Vec<String> = split_parameters(parameters)
            .iter()
            .enumerate()
            .filter(|(_, parameter)| parameter.contains("byval("))
            .map(|(at, _)| format!("i32 {}", at + 1))
            .collect();
        if structures.is_empty() {
            continue;
        }
        let (values, node) = (next, next + 1);
        next += 2;
        nodes += &format!("!{values} = !{{{}}}\n", structures.join(", "));
        nodes += &format!("!{node} = !{{ptr @{kernel}, !\"grid_constant\", !{values}}}\n");
        names += &format!(", !{node}");
    }
    let all = format!("{}{names}}}", list.strip_suffix('}')?);
    (!nodes.is_empty()).then(|| format!("{}\n{nodes}", module.replacen(list, &all, 1)))
}

/// The parameters of a definition, without what stands in their parentheses' commas.
fn split_parameters(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' if depth == 0 => {
                found.push(&text[start..at]);
                break;
            }
            ')' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found
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
