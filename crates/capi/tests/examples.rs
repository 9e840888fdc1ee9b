//! The examples in C and in CUDA C. Those in CUDA C are compiled by nvcc for every architecture; without a GPU they report that and end. Their host
//! code, and the kernels block by block, also run on the CPU (`tests/c/cuda_on_cpu`), triggers with the stand-in for the driver.

mod c_toolchain;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use c_toolchain::{NATIVE_LIBS, build, has, library, root, run, scratch, succeed};
use waived::waived;

const IN_CUDA: [&str; 3] = ["loop", "put_signal", "stencil"];

fn nvcc() -> Option<String> {
    let nvcc = std::env::var("DOORBELL_NVCC").unwrap_or_else(|_| "nvcc".into());
    has(&nvcc).then_some(nvcc)
}

#[test]
fn a_c_program_puts_and_signals_from_its_threads() {
    let program = build(
        &root().join("examples/put_signal.c"),
        "put_signal",
        &["-O2"],
    );
    for arguments in [
        &["8", "200", "256", "softcx"][..],
        &["3", "40", "100000", "softcx"],
        &["4", "100", "1", "softcx,path=proxy"],
    ] {
        // Separate writes may be placed in any order.
        let output = run(Command::new(&program).args(arguments).env(
            "DOORBELL_SOFTCX_FAULT",
            "late-writes-us=50,late-packets-us=50",
        ));
        let numbers: Vec<u64> = arguments[..3]
            .iter()
            .map(|word| word.parse().unwrap())
            .collect();
        let last = format!(
            "PASS: {} bytes arrived behind {} signals",
            numbers.iter().product::<u64>(),
            numbers[0] * numbers[1]
        );
        assert_eq!(output.lines().last(), Some(last.as_str()), "{output}");
    }
    for wrong in [&["0"][..], &["65"], &["1", "1", "x"]] {
        let status = Command::new(&program).args(wrong).output().unwrap().status;
        assert_eq!(status.code(), Some(2), "{wrong:?}");
    }
    let nowhere = Command::new(&program)
        .args(["1", "1", "1", "no such device"])
        .output()
        .unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
}

/// Without a GPU the program prints only that.
#[test]
fn examples_in_cuda_compile_for_every_architecture() {
    let test = "examples_in_cuda_compile_for_every_architecture";
    let Some(nvcc) = nvcc() else {
        return waived(test, "nvcc is not installed");
    };
    if std::env::var("CFLAGS").is_ok_and(|flags| flags.contains("-fsanitize")) {
        return waived(test, "the library has a sanitizer that nvcc does not link");
    }
    for name in IN_CUDA {
        let program = scratch(&format!("{name}_cuda"));
        let mut command = Command::new(&nvcc);
        command.args([
            "-std=c++17",
            "-O2",
            "-Werror",
            "all-warnings",
            "-Xcompiler",
            "-Wall,-Wextra",
        ]);
        // In parallel.
        command.args(["-t", "0"]);
        for architecture in [75, 80, 86, 89, 90] {
            command.arg(format!(
                "-gencode=arch=compute_{architecture},code=sm_{architecture}"
            ));
        }
        command.arg("-I").arg(root().join("include"));
        command.arg(root().join(format!("examples/{name}.cu")));
        command.arg(library("a"));
        // nvcc needs this option for a file name without one of its suffixes.
        for native in NATIVE_LIBS {
            command.args(["-Xlinker", native]);
        }
        // What scripts/setup-cuda brings has no lib64, where nvcc looks.
        if let Some(folder) = PathBuf::from(&nvcc).ancestors().nth(2) {
            command.arg("-L").arg(folder.join("lib"));
        }
        succeed(command.arg("-o").arg(&program));
        let output = Command::new(&program).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let last = said.lines().last().unwrap_or("").to_owned();
        match output.status.code() {
            Some(77) => {
                let reason = last
                    .strip_prefix("WAIVED: ")
                    .unwrap_or_else(|| panic!("{said}"));
                waived(&format!("examples/{name}.cu"), reason);
            }
            Some(0) => assert!(last.starts_with("PASS: "), "{said}"),
            _ => panic!(
                "{name}: {}\n{said}{}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            ),
        }
    }
}

/// The source with launches as calls of `LAUNCH`.
fn without_brackets(source: &str) -> String {
    let mut text = String::new();
    let mut rest = source;
    while let Some(open) = rest.find("<<<") {
        let name = rest[..open]
            .rfind(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap()
            + 1;
        let close = open + rest[open..].find(">>>(").unwrap();
        let configuration: Vec<&str> = rest[open + 3..close].split(", ").collect();
        let [blocks, threads, "0", stream] = configuration[..] else {
            panic!("{configuration:?}");
        };
        text.push_str(&rest[..name]);
        text.push_str(&format!(
            "LAUNCH({}, {blocks}, {threads}, {stream}, ",
            &rest[name..open]
        ));
        rest = &rest[close + 4..];
    }
    text + rest
}

/// Kernels of the processor execute triggers as well, whose memory the stand-in for the driver has.
fn has_triggers() -> bool {
    cfg!(feature = "cuda") && std::env::var_os("DOORBELL_CUDA_STANDIN").is_some()
}

fn build_on_cpu(name: &str) -> PathBuf {
    let source = fs::read_to_string(root().join(format!("examples/{name}.cu"))).unwrap();
    let path = scratch(&format!("{name}_on_cpu.cpp"));
    fs::write(&path, without_brackets(&source)).unwrap();
    let program = scratch(&format!("{name}_on_cpu"));
    let mut command = Command::new("g++");
    command.args([
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-O2",
    ]);
    if !has_triggers() {
        command.arg("-DWITHOUT_TRIGGERS");
    }
    // The replacements for CUDA's headers, and for the header that only nvcc compiles, come first in the path.
    for folder in ["crates/capi/tests/c/cuda_on_cpu", "include"] {
        command.arg("-I").arg(root().join(folder));
    }
    if let Ok(flags) = std::env::var("CFLAGS") {
        command.args(flags.split_whitespace());
    }
    command.arg(&path).arg(library("a")).args(NATIVE_LIBS);
    succeed(command.arg("-o").arg(&program));
    program
}

fn last_line(output: &str) -> &str {
    output.lines().last().unwrap_or("")
}

#[test]
fn examples_in_cuda_run_on_a_processor() {
    let test = "examples_in_cuda_run_on_a_processor";
    if !has("g++") {
        return waived(test, "g++ is not installed");
    }
    if !has_triggers() {
        waived(
            &format!("{test}, triggered"),
            "triggers take the feature `cuda` and the stand-in for the driver: scripts/test cuda has them",
        );
    }
    for device in ["softcx", "softcx,path=proxy"] {
        let program = build_on_cpu("loop");
        let output = run(Command::new(&program).args(["5000", "45", device]));
        let expected = format!(
            "PASS: all {} bytes arrived as they were sent; async takes ",
            2 * 5000 * 55
        );
        assert!(last_line(&output).starts_with(&expected), "{output}");
        let program = build_on_cpu("put_signal");
        let output = run(Command::new(&program)
            .args(["20", "15", "300", device])
            .env(
                "DOORBELL_SOFTCX_FAULT",
                "late-writes-us=50,late-packets-us=50",
            ));
        assert!(
            output.contains("built: 15 rounds of 20 blocks on one queue\n"),
            "{output}"
        );
        assert_eq!(
            output.contains("triggered: 15 rounds\n"),
            has_triggers(),
            "{output}"
        );
        assert_eq!(
            last_line(&output),
            "PASS: every byte was there behind its signal"
        );
        let program = build_on_cpu("stencil");
        let output = run(Command::new(&program).args([
            "--steps", "75", "--rounds", "2", "--device", device, "3x2", "17x10", "64x64",
        ]));
        assert_eq!(output.matches("stencil ").count(), 3, "{output}");
        assert_eq!(output.contains("triggered"), has_triggers(), "{output}");
        assert_eq!(output.matches(" device ").count(), 3, "{output}");
        assert_eq!(
            last_line(&output),
            "PASS: all variants agree with the grid in one piece, bit for bit"
        );
        for wrong in ["3x3", "2x2", "x", "4x4x4"] {
            let status = Command::new(&program).arg(wrong).output().unwrap().status;
            assert_eq!(status.code(), Some(2), "{wrong}");
        }
    }
}
