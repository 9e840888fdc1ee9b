//! What each path brings against the file that was sent, and how often it copied each byte.

use std::process::Output;

#[cfg(feature = "cuda")]
use std::process::Command;

use serde_json::Value;

use super::{Launcher, example_with_fault, folder};
#[cfg(feature = "cuda")]
use super::{program, waived};

const CHUNK: u64 = 1000;

#[test]
fn every_path_brings_the_file_with_as_many_copies_as_it_says() {
    let test = "every_path_brings_the_file_with_as_many_copies_as_it_says";
    for launcher in Launcher::all(test) {
        check_bytes_and_copies(launcher);
    }
}

/// Memory of the stand-in's GPU, and that of a GPU if there is one. The copies are the same in number.
#[cfg(feature = "cuda")]
#[test]
fn every_path_brings_the_file_from_one_gpu_to_another() {
    let test = "every_path_brings_the_file_from_one_gpu_to_another";
    let run = |names: &[&str], environment: &[(&str, &str)]| -> Output {
        let mut command = Command::new(program("copies"));
        command
            .args(names)
            .args(["--memory", "gpu", "--ranks", "2"]);
        command.envs(environment.iter().copied()).output().unwrap()
    };
    // `cargo build --workspace` puts the stand-in next to the examples' folder.
    let examples = program("copies");
    let built = examples.ancestors().nth(2).unwrap();
    let standin = built.join("libdoorbell_cuda_standin.so");
    if standin.exists() {
        let libraries = folder("copies_standin");
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::os::unix::fs::symlink(&standin, libraries.join(name)).unwrap();
        }
        let environment = [
            ("LD_LIBRARY_PATH", libraries.to_str().unwrap()),
            ("DOORBELL_CUDA_STANDIN", "1"),
        ];
        check_bytes_and_copies_of("copies_standin_gpu", |names| run(names, &environment));
    } else {
        waived(&format!("{test} (stand-in)"), "the stand-in is not built");
    }
    if doorbell::CudaContext::primary(0).is_ok() {
        check_bytes_and_copies_of("copies_gpu", |names| run(names, &[]));
    } else {
        waived(&format!("{test} (GPU)"), "there is no GPU");
    }
}

fn check_bytes_and_copies(launcher: Launcher) {
    // Two ranks have a transfer; the others have nothing to do.
    check_bytes_and_copies_of("copies", |arguments| {
        launcher.example(4, "copies", &[&["--ranks", "4"], arguments].concat())
    });
}

fn check_bytes_and_copies_of(name: &str, run: impl Fn(&[&str]) -> Output) {
    let folder = folder(name);
    let (input, out) = (folder.join("input"), folder.join("out.json"));
    // No whole number of chunks, and more of them than slots.
    let bytes: Vec<u8> = (0..9_731_u32).map(|at| ((at * at) >> 5) as u8).collect();
    std::fs::write(&input, &bytes).unwrap();
    let [input, file] = [&input, &out].map(|path| path.to_str().unwrap());
    let arguments = [
        "--input",
        input,
        "--out",
        file,
        "--transfers",
        "3",
        "--chunk-bytes",
        "1000",
        "--slots",
        "2",
    ];
    let output = run(&arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let rows: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    let expected = [
        ("staged", 3),
        ("shared", 2),
        ("registered", 0),
        ("direct", 0),
    ];
    assert_eq!(rows.as_array().unwrap().len(), expected.len());
    for (row, (path, copies)) in rows.as_array().unwrap().iter().zip(expected) {
        assert!(
            std::fs::read(out.with_extension(path)).unwrap() == bytes,
            "{path}: other bytes"
        );
        assert_eq!(row["path"], path);
        let (len, transfers) = (bytes.len() as u64, 3);
        assert_eq!(row["copied_bytes"], copies * len * transfers, "{path}");
        assert_eq!(
            row["copies"],
            copies * len.div_ceil(CHUNK) * transfers,
            "{path}"
        );
        // Besides the program's own count: the bytes of WRITEs whose addresses are those of the applications' memory at both ends. Nobody has to copy them.
        let direct = if copies == 0 { len * transfers } else { 0 };
        assert_eq!(row["direct_bytes"], direct, "{path}");
        // At both ends, for each transfer or once.
        let registrations = match path {
            "registered" => 2 * transfers,
            "direct" => 2,
            _ => 0,
        };
        assert_eq!(row["registrations"], registrations, "{path}");
        check_unfinished(row);
    }
}

/// With two slots, one WRITE at most has no completion when a slot is written again, and none when memory is deregistered.
fn check_unfinished(row: &Value) {
    assert!(row["unfinished_at_reuse"].as_u64().unwrap() <= 1, "{row}");
    assert_eq!(row["unfinished_at_deregistration"], 0, "{row}");
}

/// The receiver makes three sends for each of the four paths: where its memory is, that it has a chunk, and what it has counted. One of the first two fails with the paths that register the memory of
/// the applications: each side has an error while the memory is registered, and deregisters it before it gives it back.
#[test]
fn memory_is_deregistered_when_a_transfer_fails() {
    for number in [7, 8, 10, 11] {
        let fault = format!("send={number}:0x22");
        let output = example_with_fault(&fault, "copies", &["--bytes=1000", "--transfers=1"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{fault}");
        assert!(error.contains("(syndrome 0x"), "{fault}: {error}");
        assert!(!error.contains("is still registered"), "{fault}: {error}");
    }
}

/// Packets of the software ConnectX take two milliseconds. In that time the next chunk is copied, unless the sender has lost its core at each of 30 chunks. The completion of a WRITE takes longer
/// than the posts of two, so a sender that does not wait for it has two without one.
#[test]
fn a_chunk_is_copied_while_another_one_is_on_the_wire() {
    let file = folder("copies_delayed").join("out.json");
    let arguments = "--bytes 10000 --transfers 3 --chunk-bytes 1000 --slots 2 --out";
    let mut arguments: Vec<&str> = arguments.split(' ').collect();
    arguments.push(file.to_str().unwrap());
    let output = example_with_fault("delay-us=2000", "copies", &arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    for (path, has_chunks) in [
        ("staged", true),
        ("shared", true),
        ("registered", false),
        ("direct", false),
    ] {
        let mut rows = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row.get(1) == Some(&path));
        let row = row.unwrap_or_else(|| panic!("{text}"));
        let overlapped: u64 = row.last().unwrap().parse().unwrap();
        // The first chunk of each of 3 transfers has none before it.
        let expected = if has_chunks { 1..=27 } else { 0..=0 };
        assert!(expected.contains(&overlapped), "{path}: {text}");
    }
    let rows: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    rows.as_array().unwrap().iter().for_each(check_unfinished);
}
