//! `doorbell bench --stream cuda`, run as its users run it. Times are not judged: over the stand-in for the driver they have no meaning.
#![cfg(all(feature = "cuda", not(loom)))]

#[path = "../../../tests/rig/standin.rs"]
mod standin;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use standin::is_standin;
use waived::waived;

const LIMIT: Duration = Duration::from_secs(240);
const QUICK: &str = "--iterations 40 --steps 5 --batches 2 --sizes 64 --kernel-us 0,5";

/// Whether the test is WAIVED: there is no driver.
fn has_no_driver(test: &str) -> bool {
    let missing = doorbell::CudaContext::primary(0).err();
    if let Some(error) = &missing {
        assert!(!is_standin(), "{error}");
        waived(test, &error.to_string());
    }
    missing.is_some()
}

fn device() -> String {
    std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into())
}

fn run(line: &str) -> Output {
    run_with_faults(line, "")
}

/// With a stand-in that fails by these rules.
fn run_with_faults(line: &str, rules: &str) -> Output {
    run_on(&device(), line, rules)
}

fn run_on(device: &str, line: &str, rules: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_doorbell"))
        .args(line.split_whitespace())
        .args(["--device", device])
        .env("DOORBELL_CUDA_STANDIN_FAULTS", rules)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("`{line}` hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn rows_of_both_tests_report_gpu_time() {
    if has_no_driver("rows_of_both_tests_report_gpu_time") {
        return;
    }
    for line in [
        "bench loop --op write",
        "bench loop --op send --validate",
        "bench pingpong",
        "bench pingpong --validate",
        "bench loop --op message --eager-bytes 0 --validate",
        "bench pingpong --op message",
    ] {
        let output = run(&format!("{line} {QUICK} --stream cuda --json"));
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(rows.len(), 4, "{line}");
        for row in rows {
            assert_eq!(row["stream"], "cuda");
            assert_eq!(row["sample"], "batch mean");
            assert!(!row["gpu"].as_str().unwrap().is_empty(), "{row}");
            assert_eq!(row["iterations"], 40);
            let us = row["time_min_us"].as_f64().unwrap();
            // Every batch contains the kernel; the resolution of the device's clock is half a microsecond.
            let kernel = row["kernel_us"].as_f64().unwrap();
            assert!(us >= kernel - 1.0 && us > 0.0, "{line}: {row}");
        }
    }
}

/// A container may have the toolkit's stub before the driver on the search path.
#[test]
fn error_names_the_stub_driver_library() {
    if has_no_driver("error_names_the_stub_driver_library") {
        return;
    }
    // CUDA_ERROR_STUB_LIBRARY
    let output = run_with_faults("bench loop --stream cuda", "cuInit:34");
    let error = text(&output.stderr);
    assert!(
        error.contains("stub") && error.contains("LD_LIBRARY_PATH"),
        "{error}"
    );
}

#[test]
fn memory_option_places_messages_in_gpu_memory() {
    let test = "memory_option_places_messages_in_gpu_memory";
    if has_no_driver(test) {
        return;
    }
    if !device().starts_with("softcx") {
        return waived(test, "only softcx reaches the memory of every GPU");
    }
    for which in ["loop", "pingpong"] {
        let output = run(&format!("bench {which} {QUICK} --stream cuda --memory gpu"));
        let said = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[2].contains("stream=cuda path="), "{said}");
        assert!(lines[3].starts_with("# gpu="), "{said}");
        assert!(lines[3].contains("driver=CUDA-"), "{said}");
        assert!(lines[3].contains("memory=gpu"), "{said}");
        assert_eq!(lines[3].contains("stand-in"), is_standin(), "{said}");
        assert_eq!(lines.len(), 5 + 4, "{said}");
    }
}

#[test]
fn loop_batches_are_launched_as_graphs() {
    let test = "loop_batches_are_launched_as_graphs";
    if has_no_driver(test) {
        return;
    }
    // One batch is one launch; and sizes and kernels change, so that there is more than one graph.
    for batches in ["--steps 5 --batches 2", "--steps 40 --batches 1"] {
        let line = format!(
            "bench loop --stream cuda --graph --sizes 8,4K --kernel-us 0,5 --iterations 400 {batches}"
        );
        let output = run(&format!("{line} --json"));
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(rows.len(), 8, "{line}");
        for row in rows {
            assert_eq!(row["stream"], "cuda-graph");
            assert_eq!(row["iterations"], 400);
            let us = row["time_min_us"].as_f64().unwrap();
            let kernel = row["kernel_us"].as_f64().unwrap();
            assert!(us >= kernel - 1.0 && us > 0.0, "{line}: {row}");
        }
    }
    // Calibration launches the same graph, and a graph is recorded without a warm-up too.
    let line = "bench loop --stream cuda --graph --loop async --sizes 8 --kernel-us 5 --duration-s 0.05 --warmup 0 --csv";
    let output = run(line);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).lines().count(), 2);
    let output = run(&format!(
        "bench loop {QUICK} --stream cuda --graph --loop async"
    ));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(said.contains("stream=cuda-graph path="), "{said}");
    assert!(said.contains(" graph=on"), "{said}");
}

#[test]
fn graph_is_recorded_once_per_case_and_launched_once_per_batch() {
    let test = "graph_is_recorded_once_per_case_and_launched_once_per_batch";
    if has_no_driver(test) {
        return;
    }
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    // Two cases, each of 2 batches to warm up and 8 that are measured, of 5 steps.
    let line = "bench loop --iterations 40 --steps 5 --batches 2 --sizes 64,128 --kernel-us 0 --stream cuda --graph --loop async";
    for (function, nth, is_made) in [
        ("cuGraphInstantiateWithFlags", 2, true),
        ("cuGraphInstantiateWithFlags", 3, false),
        // The first of the second case: nothing is in flight.
        ("cuGraphLaunch", 11, true),
        ("cuGraphLaunch", 21, false),
        // One more launch checks whether kernels work at all.
        ("cuLaunchKernel", 1 + 10, true),
        ("cuLaunchKernel", 1 + 11, false),
    ] {
        let output = run_with_faults(line, &format!("{function}:999,nth={nth}"));
        let said = text(&output.stderr);
        assert_eq!(
            output.status.success(),
            !is_made,
            "{function} {nth}: {said}"
        );
        let where_it_fails = "loop, 128 bytes, kernel 0 us: warm-up: cu";
        assert_eq!(
            said.contains(where_it_fails),
            is_made,
            "{function} {nth}: {said}"
        );
    }
}

#[test]
fn trigger_kernel_option_rings_from_kernels() {
    let test = "trigger_kernel_option_rings_from_kernels";
    if has_no_driver(test) {
        return;
    }
    for line in [
        "bench loop --op write",
        "bench loop --op send --validate",
        "bench pingpong",
        "bench pingpong --validate",
    ] {
        let line = format!("{line} {QUICK} --stream cuda --trigger kernel");
        let output = run(&format!("{line} --json"));
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(rows.len(), 4, "{line}");
        for row in rows {
            assert_eq!(row["stream"], "cuda-trigger");
            assert_eq!(row["iterations"], 40);
            let us = row["time_min_us"].as_f64().unwrap();
            let kernel = row["kernel_us"].as_f64().unwrap();
            assert!(us >= kernel - 1.0 && us > 0.0, "{line}: {row}");
        }
    }
    let output = run(&format!(
        "bench loop {QUICK} --stream cuda --trigger kernel --loop async"
    ));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(said.contains("stream=cuda-trigger path="), "{said}");
    assert!(said.contains(" trigger=kernel"), "{said}");
}

#[test]
fn trigger_kernel_option_is_refused_on_the_sync_path() {
    if has_no_driver("trigger_kernel_option_is_refused_on_the_sync_path")
        || !device().starts_with("softcx")
    {
        return;
    }
    let line = format!("bench loop {QUICK} --stream cuda --trigger kernel");
    let output = run_on("softcx,path=sync", &line, "");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("kernels cannot ring on the sync path"),
        "{said}"
    );
}

#[test]
fn trigger_build_option_builds_work_requests_in_kernels() {
    let test = "trigger_build_option_builds_work_requests_in_kernels";
    if has_no_driver(test) {
        return;
    }
    for line in [
        "bench loop",
        "bench loop --validate",
        "bench pingpong",
        "bench pingpong --validate",
    ] {
        let line = format!("{line} {QUICK} --stream cuda --loop async --trigger build");
        let output = run(&format!("{line} --json"));
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(rows.len(), 2, "{line}");
        for row in rows {
            assert_eq!(row["stream"], "cuda-build");
            let us = row["time_min_us"].as_f64().unwrap();
            let kernel = row["kernel_us"].as_f64().unwrap();
            assert!(us >= kernel - 1.0 && us > 0.0, "{line}: {row}");
        }
    }
}

/// One launch a step, whose kernel also rings. Between the steps the stream has no operations except the counts of batches.
#[test]
fn step_with_trigger_kernel_is_one_launch() {
    let test = "step_with_trigger_kernel_is_one_launch";
    if has_no_driver(test) {
        return;
    }
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    // 2 batches to warm up and 8 that are measured, of 5 steps; one more launch checks whether kernels work at all.
    let line = "bench loop --iterations 40 --steps 5 --batches 2 --sizes 64 --kernel-us 3 --stream cuda --trigger kernel --loop async";
    for (nth, is_made) in [(1 + 50, true), (1 + 51, false)] {
        let output = run_with_faults(line, &format!("cuLaunchKernel:999,nth={nth}"));
        let said = text(&output.stderr);
        assert_eq!(output.status.success(), !is_made, "{nth}: {said}");
    }
}

#[test]
fn conflicting_cuda_options_are_refused() {
    for (line, reason) in [
        ("--memory gpu", "--stream cuda"),
        ("--memory gpu --stream cuda --validate", "--memory host"),
        ("--graph", "--graph needs --stream cuda"),
        ("--graph --stream cuda --op send", "--op write"),
        ("--graph --stream cuda --validate", "excludes --validate"),
        ("--graph --stream cuda --listen 127.0.0.1:0", "--listen"),
        ("--stream gpu", "possible values: host, cuda"),
        ("--trigger build --stream cuda", "--loop async"),
        ("--trigger kernel", "--trigger needs --stream cuda"),
        ("--trigger kernel --stream cuda --graph", "excludes --graph"),
        ("--trigger kernel --stream cuda --loop sync", "--loop async"),
    ] {
        let output = run(&format!("bench loop {line}"));
        assert_eq!(output.status.code(), Some(2), "{line}");
        let said = text(&output.stderr);
        assert!(said.contains(reason), "{line}: {said}");
    }
    let output = run("bench loop --stream cuda --gpu 10000");
    assert_eq!(output.status.code(), Some(1));
}

/// A process without privilege cannot have a GPU ring a card: `doorbell info` shows the path that is taken instead, and what it would take.
#[cfg(feature = "verbs")]
#[test]
fn info_shows_the_path_of_a_process_without_privilege() {
    let test = "info_shows_the_path_of_a_process_without_privilege";
    if !is_standin() || device() != "softcx" {
        return waived(test, "no stand-in for the driver, or a device of its own");
    }
    let info = |has: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_doorbell"))
            .args(["softcx", "run", "--door", "preload", "--fabric"])
            .arg(format!("info-{}", std::process::id()))
            .args(["--", env!("CARGO_BIN_EXE_doorbell")])
            .args(["info", "--device", "mlx5_0"])
            .env("DOORBELL_CUDA_STANDIN_HAS", has)
            .output()
            .unwrap();
        let said = text(&output.stdout);
        assert!(output.status.success(), "{said}{}", text(&output.stderr));
        let path = said.lines().find(|line| line.trim().starts_with("path"));
        path.unwrap_or_else(|| panic!("{said}")).to_owned()
    };
    let without = info("");
    assert!(
        without.contains("host and CUDA streams: proxy (a thread"),
        "{without}"
    );
    assert!(
        without.contains("not direct: ") && without.contains("CAP_SYS_ADMIN"),
        "{without}"
    );
    let with = info("iomemory");
    assert!(with.contains("host and CUDA streams: direct ("), "{with}");
}
