//! Compiles the kernels, with the feature `cuda` and where there is nvcc, or else clang 19; or takes them from a file of `scripts/kernels-image`. Other builds need nothing
//! of this.

use std::collections::BTreeMap;
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

/// A file of `scripts/kernels-image`, which is taken in place of a compiler.
const FILE: &str = "DOORBELL_KERNELS_FILE";

/// If it is set, there are no kernels, whatever compilers and files there are: what `--without-kernels` of scripts/install-c and scripts/wheel sets.
const WITHOUT: &str = "DOORBELL_WITHOUT_KERNELS";

/// What the kernels are made of: a file of other sources may have other parameters. Headers of the host alone are not among them.
const SOURCES: [&str; 6] = [
    "cuda/kernels.cu",
    "cuda/clang.h",
    "cuda/reduce.h",
    "cuda/step.h",
    "include/doorbell.h",
    "include/doorbell",
];

/// What a compiler has made, besides the image.
struct Made {
    /// For messages, and for the test that looks into the image.
    codes: String,
    /// Name and version.
    compiler: String,
}

/// Leaves `kernels.image` in OUT_DIR: what the driver loads, or, without a compiler, a text that it refuses. In that case `DOORBELL_NO_KERNELS`
/// has the reason. `kernels12.image` is that of [`OLDER`], and empty without it. `kernels.file` has both, for builds without a compiler.
fn kernels() {
    // The kernels include every header.
    for path in SOURCES.iter().chain(&["include"]) {
        println!("cargo::rerun-if-changed={path}");
    }
    // Appended by nvcc itself.
    println!("cargo::rerun-if-env-changed=NVCC_APPEND_FLAGS");
    println!("cargo::rerun-if-env-changed=NVCC_PREPEND_FLAGS");
    for name in [WANTED, OLDER, FILE, WITHOUT] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    if set(WITHOUT).is_some() {
        return leave_out(&folder, &format!("{WITHOUT} was set when this was built"));
    }
    if let Some(file) = set(FILE).map(PathBuf::from) {
        println!("cargo::rerun-if-changed={}", file.display());
        let taken = KernelsFile::read(&file).and_then(|file| file.unpack(&folder));
        return taken.unwrap_or_else(|reason| panic!("{FILE}: {}: {reason}", file.display()));
    }
    let image = folder.join("kernels.image");
    let compiled = match find_nvcc() {
        Some((nvcc, wanted)) => {
            println!("cargo::rerun-if-changed={}", nvcc.display());
            compile(&nvcc, &image).inspect_err(|reason| {
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
    let older = folder.join("kernels12.image");
    let compiled_older = match set(OLDER).map(PathBuf::from) {
        Some(nvcc) => {
            println!("cargo::rerun-if-changed={}", nvcc.display());
            let compiled = compile(&nvcc, &older);
            Some(compiled.unwrap_or_else(|reason| panic!("{OLDER}: {reason}")))
        }
        None => {
            fs::write(&older, b"").expect("cargo made the folder");
            None
        }
    };
    let made = match compiled {
        Ok(made) => made,
        Err(reason) => return leave_out(&folder, &reason),
    };
    let file = KernelsFile {
        made,
        older: compiled_older,
        image: fs::read(&image).expect("just written"),
        older_image: fs::read(&older).expect("just written"),
    };
    file.describe("");
    fs::write(folder.join("kernels.file"), file.to_bytes()).expect("cargo made the folder");
}

/// Leaves what a build without kernels has in their place.
fn leave_out(folder: &Path, reason: &str) {
    println!("cargo::rustc-env=DOORBELL_NO_KERNELS={reason}");
    for (name, bytes) in [
        (
            "kernels.image",
            b"doorbell was built without kernels\0".as_slice(),
        ),
        ("kernels12.image", b""),
    ] {
        fs::write(folder.join(name), bytes).expect("cargo made the folder");
    }
    // An earlier build's, which scripts/kernels-image would take for this one's.
    let file = folder.join("kernels.file");
    if file.exists() {
        fs::remove_file(file).expect("a build script made it");
    }
}

/// Kernels in one file: lines of text up to an empty one, then the two images. The first line ends with the checksum of everything behind it.
struct KernelsFile {
    made: Made,
    older: Option<Made>,
    image: Vec<u8>,
    older_image: Vec<u8>,
}

impl KernelsFile {
    const HEAD: &str = "doorbell kernels, checksum ";

    fn to_bytes(&self) -> Vec<u8> {
        let mut lines = vec![
            (
                "version",
                env::var("CARGO_PKG_VERSION").expect("cargo sets it"),
            ),
            ("sources", format!("{:016x}", sources())),
            ("compiler", self.made.compiler.clone()),
            ("codes", self.made.codes.clone()),
            ("bytes", self.image.len().to_string()),
        ];
        if let Some(older) = &self.older {
            lines.push(("older-compiler", older.compiler.clone()));
            lines.push(("older-codes", older.codes.clone()));
        }
        let text: String = lines
            .iter()
            .map(|(name, value)| format!("{name} {value}\n"))
            .collect();
        let rest = [text.as_bytes(), b"\n", &self.image, &self.older_image].concat();
        let head = format!("{}{:016x}\n", KernelsFile::HEAD, fnv(FNV_START, &rest));
        [head.as_bytes(), &rest].concat()
    }

    /// The file, if it is whole and of these sources.
    fn read(path: &Path) -> Result<KernelsFile, String> {
        let bytes = fs::read(path).map_err(|error| error.to_string())?;
        let broken = || "this is no file of scripts/kernels-image, or it is damaged".to_owned();
        let rest = bytes
            .strip_prefix(KernelsFile::HEAD.as_bytes())
            .ok_or_else(broken)?;
        let (checksum, rest) = rest.split_at_checked(17).ok_or_else(broken)?;
        if checksum != format!("{:016x}\n", fnv(FNV_START, rest)).as_bytes() {
            return Err(broken());
        }
        let end = rest.windows(2).position(|two| two == b"\n\n");
        let (text, images) = rest.split_at(end.ok_or_else(broken)?);
        let text = String::from_utf8(text.to_vec()).map_err(|_| broken())?;
        let lines: BTreeMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .collect();
        let line = |name| lines.get(name).map(|value| (*value).to_owned());
        let need = |name| line(name).ok_or_else(broken);
        let (version, own) = (need("version")?, env::var("CARGO_PKG_VERSION").ok());
        if own.as_ref() != Some(&version) {
            let own = own.unwrap_or_default();
            return Err(format!("it is of version {version}, and this is {own}"));
        }
        if need("sources")? != format!("{:016x}", sources()) {
            return Err(format!(
                "its kernels were made of other sources of version {version}, whose parameters may be laid out in another way"
            ));
        }
        let len = need("bytes")?.parse().map_err(|_| broken())?;
        let (image, older_image) = images[2..].split_at_checked(len).ok_or_else(broken)?;
        let made = |compiler, codes| {
            let (compiler, codes) = (line(compiler)?, line(codes)?);
            Some(Made { codes, compiler })
        };
        Ok(KernelsFile {
            made: made("compiler", "codes").ok_or_else(broken)?,
            older: made("older-compiler", "older-codes"),
            image: image.to_vec(),
            older_image: older_image.to_vec(),
        })
    }

    fn unpack(&self, folder: &Path) -> Result<(), String> {
        self.describe(", from a file");
        for (name, bytes) in [
            ("kernels.image", &self.image),
            ("kernels12.image", &self.older_image),
        ] {
            fs::write(folder.join(name), bytes).map_err(|error| error.to_string())?;
        }
        fs::write(folder.join("kernels.file"), self.to_bytes()).map_err(|error| error.to_string())
    }

    /// Tells the crate what it contains.
    fn describe(&self, from: &str) {
        let Made { codes, compiler } = &self.made;
        println!("cargo::rustc-env=DOORBELL_KERNELS={codes}");
        let older = self.older.as_ref();
        let and = older.map_or_else(String::new, |older| format!(" and {}", older.compiler));
        println!("cargo::rustc-env=DOORBELL_KERNELS_COMPILER={compiler}{and}{from}");
        if compiler.starts_with("clang") {
            println!("cargo::rustc-env=DOORBELL_KERNELS_BY_CLANG=1");
        }
        if let Some(older) = older {
            println!("cargo::rustc-env=DOORBELL_KERNELS_12={}", older.codes);
        }
    }
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a, which finds damage and other sources. It is no protection against a forged file.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(hash, step)
}

/// A number for the names and contents of [`SOURCES`].
fn sources() -> u64 {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = SOURCES.iter().map(PathBuf::from).collect();
    while let Some(path) = folders.pop() {
        match fs::read_dir(&path) {
            Ok(entries) => folders.extend(entries.flatten().map(|entry| entry.path())),
            Err(_) => files.push(path),
        }
    }
    files.sort();
    files.iter().fold(FNV_START, |hash, path| {
        let name = path.to_string_lossy();
        let text = fs::read(path).unwrap_or_else(|error| panic!("{name}: {error}"));
        fnv(fnv(hash, name.as_bytes()), &text)
    })
}

/// Which version of a compiler this is, as far as it says so: behind the last of these words.
fn version_of(compiler: &Path, word: &str) -> String {
    let output = Command::new(compiler).arg("--version").output();
    let said = output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    );
    let version = said.rsplit_once(word).map(|(_, rest)| {
        let is_part = |letter: char| letter.is_ascii_digit() || letter == '.';
        let end = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
        rest[..end].to_owned()
    });
    let is_one = |version: &String| !version.is_empty();
    version
        .filter(is_one)
        .unwrap_or("of unknown version".into())
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
fn compile_by_clang(clang: &Path, folder: &Path, image: &Path) -> Result<Made, String> {
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
    println!(
        "cargo::warning=there is no nvcc: the kernels are compiled by clang, to PTX; no GPU has executed them"
    );
    Ok(Made {
        codes: format!("compute_{architecture}"),
        compiler: format!("clang {}", version_of(clang, "clang version ")),
    })
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

/// Compiles for the architectures that nvcc knows.
fn compile(nvcc: &Path, image: &Path) -> Result<Made, String> {
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
    let names: Vec<&str> = codes.iter().map(|(_, code)| code.as_str()).collect();
    let made = Made {
        codes: names.join(" "),
        compiler: format!("nvcc {}", version_of(nvcc, ", V")),
    };
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
    Ok(made)
}
