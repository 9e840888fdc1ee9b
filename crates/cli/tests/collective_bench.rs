//! `doorbell bench collective`, run as its users run it: every operation and algorithm with its results checked, between threads and between processes.
//! Times are not judged.
#![cfg(not(loom))]

#[path = "../../../tests/rig/standin.rs"]
mod standin;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::ffi::OsString;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Far longer than any run of these tests: a run that has not ended by then hangs.
const LIMIT: Duration = Duration::from_secs(120);

const OPERATIONS: [&str; 9] = [
    "barrier",
    "broadcast",
    "gather",
    "scatter",
    "all-gather",
    "all-to-all",
    "reduce",
    "reduce-scatter",
    "all-reduce",
];

/// The command. A bundle for another machine has it elsewhere than cargo.
fn program() -> OsString {
    std::env::var_os("DOORBELL_COMMAND").unwrap_or_else(|| env!("CARGO_BIN_EXE_doorbell").into())
}

/// A process that is killed when the test ends.
struct Process(Option<Child>);

impl Process {
    fn start(line: &str, variables: &[(&str, String)]) -> Process {
        let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
        let mut command = Command::new(program());
        command
            .args(["bench", "collective", "--device", &device])
            .args(line.split_whitespace())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for (name, value) in variables {
            command.env(name, value);
        }
        Process(Some(command.spawn().unwrap()))
    }

    fn end(mut self, what: &str) -> Output {
        let began = Instant::now();
        let mut child = self.0.take().unwrap();
        while child.try_wait().unwrap().is_none() {
            if began.elapsed() > LIMIT {
                let _ = child.kill();
                panic!("`{what}` hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn run(line: &str) -> Output {
    Process::start(line, &[]).end(line)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a run prints that must succeed.
fn printed(line: &str) -> String {
    let output = run(line);
    assert!(
        output.status.success(),
        "`{line}`: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

fn rows(json: &str) -> Vec<Value> {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

/// Asserts what every row has.
fn check(rows: &[Value], op: &str, ranks: u32) {
    for row in rows {
        assert_eq!((&row["op"], &row["ranks"]), (&op.into(), &ranks.into()));
        assert_eq!(row["wrong"], 0, "{row}");
        let number = |name: &str| {
            row[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{name}: {row}"))
        };
        let (size, time) = (number("size_bytes"), number("time_us"));
        assert!(time > 0.0 && number("app_cpu_us") > 0.0, "{row}");
        let algbw = size / time / 1e3;
        assert!(
            (number("algbw_gb_per_s") - algbw).abs() <= algbw * 0.01 + 2e-6,
            "{row}"
        );
        assert!(
            number("busbw_gb_per_s") <= number("algbw_gb_per_s") * 2.0 + 1e-6,
            "{row}"
        );
        let reduces = op.contains("reduce");
        assert_eq!(row["redop"].is_string(), reduces, "{row}");
    }
}

/// The algorithms in the rows, once each.
fn algorithms(rows: &[Value]) -> Vec<String> {
    let mut names: Vec<String> = rows
        .iter()
        .map(|row| row["algorithm"].as_str().unwrap().to_owned())
        .collect();
    names.dedup();
    names.sort_unstable();
    names.dedup();
    names
}

#[test]
fn every_operation_and_algorithm_gives_checked_rows() {
    for op in OPERATIONS {
        let found: Vec<usize> = [1, 3, 4]
            .map(|ranks| {
                let is_matched = ranks == 3;
                let matched = if is_matched { "--matched" } else { "" };
                let line = format!(
                    "{matched} --op {op} --ranks {ranks} --root {} --algorithm all --sizes 4,1000 --eager-bytes 300 --iterations 5 --warmup 3 --in-flight 3 --check --json",
                    ranks - 1
                );
                let rows = rows(&printed(&line));
                check(&rows, op, ranks);
                assert!(rows.iter().all(|row| row["matched"] == is_matched));
                let algorithms = algorithms(&rows);
                let sizes = if op == "barrier" { 1 } else { 2 };
                assert_eq!(rows.len(), sizes * 2 * algorithms.len(), "{op}: {algorithms:?}");
                algorithms.len()
            })
            .into();
        // Some need a number of ranks that is a power of two.
        let expected = match op {
            "all-reduce" => [4, 4, 4],
            "all-gather" => [3, 2, 3],
            "reduce-scatter" => [2, 1, 2],
            "broadcast" | "gather" | "scatter" => [3, 3, 3],
            "reduce" | "all-to-all" => [2, 2, 2],
            _ => [1, 1, 1],
        };
        assert_eq!(found, expected, "{op}");
    }
}

#[test]
fn every_type_and_reduction_is_checked() {
    for data in ["f16", "bf16", "f32", "f64", "i32", "i64", "u8"] {
        for reduce in ["sum", "min", "max", "avg"] {
            let line = format!(
                "--type {data} --reduce {reduce} --ranks 3 --sizes 96 --iterations 2 --warmup 0 --loop sync --in-place --check --json"
            );
            let rows = rows(&printed(&line));
            check(&rows, "all-reduce", 3);
            assert_eq!(
                (&rows[0]["type"], &rows[0]["redop"]),
                (&data.into(), &reduce.into())
            );
        }
    }
}

#[test]
fn table_has_the_columns_of_nccl_tests_and_csv_those_of_json() {
    let line = "--ranks 2 --sizes 8,64 --iterations 3 --warmup 1 --loop async";
    let table = printed(line);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 6, "{table}");
    assert!(
        lines[0].contains("bench collective op=all-reduce in_flight=16"),
        "{table}"
    );
    assert!(
        lines[2].starts_with("# ranks=2 processes=1 device="),
        "{table}"
    );
    let names: Vec<&str> = lines[3].split_whitespace().collect();
    assert_eq!(names[..4], ["#size[B]", "count", "type", "redop"]);
    let values: Vec<&str> = lines[4].split_whitespace().collect();
    assert_eq!(values.len(), names.len(), "{table}");
    assert_eq!(values[..5], ["8", "2", "f32", "sum", "-1"]);
    let wrong = names.iter().position(|name| *name == "#wrong").unwrap();
    assert_eq!(values[wrong], "N/A");

    let csv = printed(&format!("{line} --csv"));
    let json = rows(&printed(&format!("{line} --json")));
    let mut names: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    let mut keys: Vec<&str> = json[0]
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    keys.sort_unstable();
    assert_eq!(names, keys);
    assert_eq!(csv.lines().count(), 3);
}

#[test]
fn plot_has_a_line_for_each_algorithm_and_loop() {
    let path = std::env::temp_dir().join(format!("doorbell-collective-{}.svg", std::process::id()));
    let line = format!(
        "--ranks 3 --sizes 8,64 --iterations 3 --warmup 1 --algorithm all --plot {}",
        path.display()
    );
    printed(&line);
    let svg = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    for name in [
        "ring, sync",
        "recursive-doubling, async",
        "parameter-server, async",
        "Bus bandwidth",
    ] {
        assert!(svg.contains(name), "{name}");
    }
    // A barrier has no sizes.
    let output = run(&format!(
        "--op barrier --ranks 2 --iterations 2 --plot {}",
        path.display()
    ));
    let _ = std::fs::remove_file(&path);
    assert!(
        text(&output.stderr).contains("over the size"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn what_does_not_apply_is_one_line() {
    for (line, code, named) in [
        ("--op gather --in-place", 2, "--in-place"),
        ("--op broadcast --root 4", 2, "--root"),
        ("--ranks 3 --group", 2, "--group"),
        (
            "--op reduce-scatter --ranks 3 --algorithm recursive-halving",
            1,
            "recursive-halving",
        ),
        (
            "--ranks 21 --type bf16 --check --sizes 2 --iterations 1",
            1,
            "bf16",
        ),
        ("--group", 1, "--group"),
    ] {
        let output = run(line);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "`{line}`: {err}");
        assert_eq!(err.lines().count(), 1, "`{line}`: {err}");
        assert!(err.contains(named), "`{line}`: {err}");
    }
}

/// The variables of each rank of a job on this host.
fn job(size: u32) -> Vec<Vec<(&'static str, String)>> {
    // This process's own address, and ports of this call's. None that was bound to find out that it is free: a child that another test
    // forks just then would keep it.
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, b, c, d] = std::process::id().to_be_bytes();
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    let of_rank = |rank: u32| {
        vec![
            ("DOORBELL_RANK", rank.to_string()),
            ("DOORBELL_SIZE", size.to_string()),
            ("DOORBELL_MASTER_ADDR", format!("127.{b}.{c}.{d}")),
            ("DOORBELL_MASTER_PORT", port.to_string()),
            ("DOORBELL_TOKEN", "of this test".into()),
        ]
    };
    (0..size).map(of_rank).collect()
}

#[test]
fn processes_of_a_group_are_ranks_and_the_first_prints() {
    for op in ["all-reduce", "all-to-all", "barrier"] {
        let line = format!(
            "--group --op {op} --measure-costs --sizes 8,9000 --iterations 5 --check --json"
        );
        let ranks: Vec<Process> = job(3)
            .iter()
            .map(|variables| Process::start(&line, variables))
            .collect();
        for (rank, process) in (0..).zip(ranks) {
            let output = process.end(&line);
            let (out, err) = (text(&output.stdout), text(&output.stderr));
            assert!(output.status.success(), "{op}, rank {rank}: {err}");
            match rank {
                0 => {
                    let rows = rows(&out);
                    check(&rows, op, 3);
                    assert!(rows.iter().all(|row| row["processes"] == 3));
                    assert!(rows.iter().all(|row| row["measured_costs"] == true));
                }
                _ => assert_eq!(out, ""),
            }
        }
    }
}

#[test]
fn a_killed_process_is_named_by_the_others() {
    let line = "--group --sizes 64 --iterations 10000000";
    let mut ranks: Vec<Process> = job(3)
        .iter()
        .map(|variables| Process::start(line, variables))
        .collect();
    // In the middle of the row. A rank that has not joined by then would be missed after a minute.
    std::thread::sleep(Duration::from_millis(1500));
    drop(ranks.remove(1));
    for process in ranks {
        let output = process.end(line);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains("rank 1"), "{err}");
    }
}

/// Streams of a GPU carry out what those of the host do.
#[cfg(feature = "cuda")]
#[test]
fn cuda_streams_move_and_reduce() {
    if let Err(error) = doorbell::CudaContext::primary(0) {
        // Without a driver there are no such streams: the command says so.
        assert!(!standin::is_standin(), "{error}");
        let output = run("--stream cuda");
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        return;
    }
    for (op, options, algorithms) in [
        ("barrier", "", 1),
        ("broadcast", "", 3),
        ("all-gather", "--in-place", 3),
        ("all-reduce", "", 4),
        ("all-to-all", "", 2),
    ] {
        let line = format!(
            "--stream cuda --op {op} {options} --ranks 4 --algorithm all --sizes 64,9000 --iterations 4 --warmup 1 --in-flight 2 --check --json"
        );
        let rows = rows(&printed(&line));
        check(&rows, op, 4);
        assert!(rows.iter().all(|row| row["stream"] == "cuda"));
        let sizes = if op == "barrier" { 1 } else { 2 };
        assert_eq!(rows.len(), sizes * 2 * algorithms, "{op}");
    }
}
