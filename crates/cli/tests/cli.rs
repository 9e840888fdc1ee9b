//! The `doorbell` command, run as its users run it. `scripts/test verbs` runs this behind both doors as well, with
//! DOORBELL_TEST_DEVICE naming the device that is behind them.

#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Far longer than any run of these tests: a run that has not ended by then hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// A row that takes milliseconds.
const QUICK: &str = "--iterations 40 --steps 5 --batches 2";

/// The device that the command is to use.
fn device() -> String {
    std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into())
}

/// The control path that it uses by default. With plain verbs, no stream can ring.
fn control() -> &'static str {
    if device().starts_with("verbs:") {
        "proxy"
    } else {
        "direct"
    }
}

/// `doorbell bench` with a subcommand, on that device.
fn bench(subcommand: &str) -> String {
    format!("bench {subcommand} --device {}", device())
}

fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command
        .args(line.split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A child process that is killed when the test ends.
struct Running {
    child: Child,
    line: String,
}

impl Running {
    fn start(line: &str) -> Self {
        Self::start_with(line, &[])
    }

    fn start_with(line: &str, environment: &[(&str, &str)]) -> Self {
        let environment = environment.iter().copied();
        let child = command(line).envs(environment).spawn().unwrap();
        let line = line.to_owned();
        Self { child, line }
    }

    /// A process that listens, and the address that it prints.
    fn listen(line: &str) -> (Self, String) {
        let mut running = Self::start(&format!("{line} --listen 127.0.0.1:0"));
        let mut said = String::new();
        // Byte by byte, so that the rest stays for the next reader.
        BufReader::with_capacity(1, running.child.stdout.as_mut().unwrap())
            .read_line(&mut said)
            .unwrap();
        let address = said
            .strip_prefix("listening at ")
            .expect(&said)
            .trim()
            .to_owned();
        (running, address)
    }

    fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < LIMIT, "`{}` hangs", self.line);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Exit code, stdout, stderr. The output of these tests is short enough for a pipe to hold.
    fn end(mut self) -> (Option<i32>, String, String) {
        let code = self.wait().code();
        let (mut out, mut err) = (String::new(), String::new());
        let (stdout, stderr) = (self.child.stdout.take(), self.child.stderr.take());
        stdout.unwrap().read_to_string(&mut out).unwrap();
        stderr.unwrap().read_to_string(&mut err).unwrap();
        (code, out, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(line: &str) -> Output {
    let (code, out, err) = Running::start(line).end();
    assert_eq!(code, Some(0), "`{line}`: {err}");
    Output {
        status: ExitStatus::default(),
        stdout: out.into_bytes(),
        stderr: err.into_bytes(),
    }
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).unwrap()
}

fn rows(json: &str) -> Vec<Value> {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

fn check_rows(rows: &[Value], sizes: &[u64], kernels: &[u64]) {
    let mut expected = Vec::new();
    for kernel in kernels {
        for size in sizes {
            for kind in ["sync", "async"] {
                expected.push((*kernel, *size, kind));
            }
        }
    }
    let found: Vec<_> = rows
        .iter()
        .map(|row| {
            let number = |key: &str| row[key].as_u64().unwrap();
            (
                number("kernel_us"),
                number("size_bytes"),
                row["loop"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(found, expected);
    for row in rows {
        assert_eq!(keys(row), COLUMNS);
        let of = |key: &str| row[key].as_f64().unwrap();
        assert!(of("time_min_us") <= of("time_p50_us"), "{row}");
        assert!(of("time_p50_us") <= of("time_p99_us"), "{row}");
        assert!(of("time_p99_us") <= of("time_p999_us"), "{row}");
        assert!(of("time_min_us") >= of("kernel_us"), "{row}");
        assert!(of("time_avg_us") > 0.0 && of("messages_per_s") > 0.0);
        let gb_per_s = of("size_bytes") * of("messages_per_s") / 1e9;
        assert!((of("gb_per_s") - gb_per_s).abs() <= 1e-6, "{row}");
        assert!(of("app_cpu_us") > 0.0, "{row}");
        let numbers = ["iterations", "steps", "batches", "warmup_iterations"];
        assert_eq!(numbers.map(of), [40.0, 5.0, 2.0, 10.0]);
        assert_eq!(
            (&row["device"], &row["stream"], &row["path"]),
            (&device().into(), &"host".into(), &control().into())
        );
        assert_eq!(
            (&row["schema"], &row["version"]),
            (&2.into(), &env!("CARGO_PKG_VERSION").into())
        );
        for key in ["host", "cpu"] {
            assert!(!row[key].as_str().unwrap().is_empty(), "{row}");
        }
    }
}

/// The columns of JSON and CSV, in no order.
const COLUMNS: [&str; 32] = [
    "app_cpu_us",
    "batches",
    "cpu",
    "cpus",
    "device",
    "eager_bytes",
    "gb_per_s",
    "gpu",
    "host",
    "iterations",
    "kernel_us",
    "loop",
    "memory",
    "messages_per_s",
    "no_kernel",
    "op",
    "path",
    "processes",
    "sample",
    "schema",
    "size_bytes",
    "steps",
    "stream",
    "test",
    "time_avg_us",
    "time_min_us",
    "time_p50_us",
    "time_p999_us",
    "time_p99_us",
    "validate",
    "version",
    "warmup_iterations",
];

fn keys(row: &Value) -> Vec<&str> {
    let keys = row.as_object().unwrap().keys();
    let mut keys: Vec<&str> = keys.map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn loop_and_pingpong_in_one_process_report_rows() {
    for test in ["loop", "pingpong"] {
        for op in ["write", "send", "message"] {
            for validate in ["", "--validate"] {
                let line = format!(
                    "{} --op {op} {validate} --sizes 1,64,9001 --kernel-us 0,3 --json {QUICK}",
                    bench(test)
                );
                let rows = rows(&text(run(&line)));
                check_rows(&rows, &[1, 64, 9001], &[0, 3]);
                for row in &rows {
                    assert_eq!((&row["test"], &row["op"]), (&test.into(), &op.into()));
                    assert_eq!(row["validate"], !validate.is_empty());
                    assert_eq!(row["processes"], 1);
                }
            }
        }
    }
}

#[test]
fn loop_and_pingpong_in_two_processes_report_rows() {
    for test in ["loop", "pingpong"] {
        for op in ["write", "send", "message"] {
            for validate in ["", "--validate"] {
                let (other, address) = Running::listen(&bench(test));
                let line = format!(
                    "{} --op {op} {validate} --sizes 8,9001 --kernel-us 2 --json {QUICK} --connect {address}",
                    bench(test)
                );
                let rows = rows(&text(run(&line)));
                check_rows(&rows, &[8, 9001], &[2]);
                assert!(rows.iter().all(|row| row["processes"] == 2));
                let (code, out, err) = other.end();
                assert_eq!((code, &*out), (Some(0), ""), "{err}");
            }
        }
    }
}

#[test]
fn table_header_names_parameters_host_and_device() {
    let line = format!("{} --sizes 8 --kernel-us 0 {QUICK}", bench("loop"));
    let table = text(run(&line));
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 6, "{table}");
    let measured = "bench loop op=write steps=5 batches=2 warmup=10 iterations=40";
    assert!(lines[0].contains(measured), "{table}");
    assert!(lines[1].starts_with("# host="), "{table}");
    let taken_on = format!("# device={} stream=host path={} (", device(), control());
    assert!(lines[2].starts_with(&taken_on), "{table}");
    assert!(lines[3].contains("t_p999[us]") && lines[3].contains("GB/s"));
    assert!(lines[4].contains(" sync ") && lines[5].contains(" async "));
}

#[test]
fn csv_has_the_json_columns_and_one_line_per_row() {
    let line = format!("{} --sizes 8,64 --kernel-us 0 {QUICK}", bench("loop"));
    let csv = text(run(&format!("{line} --csv")));
    let mut lines = csv.lines();
    let mut names: Vec<&str> = lines.next().unwrap().split(',').collect();
    assert_eq!(names[..2], ["schema", "version"]);
    let size = names.iter().position(|name| *name == "size_bytes").unwrap();
    names.sort_unstable();
    assert_eq!(names, COLUMNS);
    let sizes: Vec<&str> = lines.map(|line| fields(line)[size]).collect();
    assert_eq!(sizes, ["8", "8", "64", "64"]);
}

/// The fields of a line of CSV; commas in quotes do not end a field.
fn fields(line: &str) -> Vec<&str> {
    let mut is_quoted = false;
    line.split(|letter: char| {
        is_quoted ^= letter == '"';
        letter == ',' && !is_quoted
    })
    .collect()
}

#[test]
fn a_duration_bounds_each_row_in_one_process_and_in_two() {
    let options = "--sizes 64 --kernel-us 20 --duration-s 0.2 --warmup 7 --steps 5 --json";
    let check = |rows: &[Value]| {
        let loops: Vec<&Value> = rows.iter().map(|row| &row["loop"]).collect();
        assert_eq!(loops, ["sync", "async"]);
        for row in rows {
            assert_eq!(row["warmup_iterations"], 10);
            let iterations = row["iterations"].as_u64().unwrap();
            // At least 20 us each; a busy machine gets through fewer.
            assert!((5..=10_000).contains(&iterations), "{row}");
            assert_eq!(iterations % 5, 0);
        }
    };
    for test in ["loop", "pingpong"] {
        let line = format!("{} {options}", bench(test));
        check(&rows(&text(run(&line))));
        let (other, address) = Running::listen(&bench(test));
        let line = format!("{line} --validate --connect {address}");
        check(&rows(&text(run(&line))));
        let (code, _, err) = other.end();
        assert_eq!(code, Some(0), "{err}");
    }
}

#[test]
fn plot_writes_an_svg() {
    let path = std::env::temp_dir().join(format!("doorbell-cli-{}.svg", std::process::id()));
    let shown = path.to_str().unwrap();
    run(&format!(
        "{} --sizes 8,64 --kernel-us 0 --plot {shown} {QUICK}",
        bench("loop")
    ));
    let svg = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(svg.contains("<svg") && svg.trim_end().ends_with("</svg>"));
    for said in ["bench loop, op write", "GB/s", "p99", "Ratio sync / async"] {
        assert!(svg.contains(said), "{said}");
    }
}

#[test]
fn a_plot_that_cannot_be_written_is_refused_before_measuring() {
    let folder = std::env::temp_dir();
    for (path, code) in [
        ("/nonexistent/out.svg", 1),
        (folder.to_str().unwrap(), 2),
        ("out.png", 2),
    ] {
        // A device that does not exist is reported later.
        let line = format!("bench loop --device mlx5_17 --plot {path}");
        let (status, out, err) = Running::start(&line).end();
        assert_eq!((status, &*out), (Some(code), ""), "`{line}`: {err}");
        assert_eq!(err.lines().count(), 1, "`{line}`: {err}");
        assert!(err.contains("--plot") && err.contains(path), "{err}");
    }
}

#[test]
fn disasm_shows_work_requests_doorbells_and_waits() {
    let plain = text(run(&format!("disasm --device {}", device())));
    for said in [
        "== send of 64 bytes",
        "opcode    0x0a (SEND)",
        "== write of 64 bytes",
        "opcode    0x08 (RDMA_WRITE)",
        "rkey",
        "== wait",
        "mark 0 = 0",
    ] {
        assert!(plain.contains(said), "`{said}` is missing:\n{plain}");
    }
    let is_direct = control() == "direct";
    for (said, rings) in [
        ("doorbell record: send counter = 1", true),
        ("doorbell record: send counter = 2", true),
        ("UAR: ring WQE 0 (SEND)", true),
        ("UAR: ring WQE 1 (RDMA_WRITE)", true),
        ("POLL_NOR     send_cq+0x3c", true),
        ("CQE 0, owner 0", true),
        // A trigger behind its fence, and a count.
        ("FENCE        reads+writes from CPU, seen by system", false),
        ("POLL_GEQ     completed+0x0", false),
    ] {
        assert_eq!(
            plain.contains(said),
            rings == is_direct,
            "`{said}`:\n{plain}"
        );
    }
    // The bytes themselves: ten is the opcode of a send, in the fourth byte; the queue pair's number and two segments follow.
    let qpn = plain.strip_prefix("# endpoint 0x").unwrap();
    let qpn = u32::from_str_radix(qpn.split(' ').next().unwrap(), 16).unwrap();
    let [_, high, middle, low] = qpn.to_be_bytes();
    let first = format!("     0  00 00 00 0a {high:02x} {middle:02x} {low:02x} 02");
    let dump = plain
        .lines()
        .find(|line| line.starts_with("     0  "))
        .unwrap();
    assert!(dump.starts_with(&first), "{dump}");
    let blueflame = text(run(&format!("disasm --blueflame --device {}", device())));
    for said in ["COPY_BLOCK", "by BlueFlame"] {
        assert_eq!(blueflame.contains(said), is_direct, "{blueflame}");
    }
}

#[test]
fn info_lists_devices_streams_paths_and_features() {
    let info = text(run("info"));
    for said in [
        concat!("doorbell ", env!("CARGO_PKG_VERSION")),
        "softcx   software ConnectX in this process: compiled in",
        "group    groups of processes: ",
        "verbs    NICs of rdma-core: ",
        "cuda     CUDA streams: ",
        "host ",
        "host stream: direct (",
    ] {
        assert!(info.contains(said), "`{said}` is missing:\n{info}");
    }
    let kernels = [
        "library made by nvcc ",
        "library made by clang ",
        "library none: ",
    ];
    if cfg!(feature = "cuda") {
        assert!(kernels.iter().any(|said| info.contains(said)), "{info}");
    }
    let (features, devices) = info.split_once("devices\n").unwrap();
    assert_eq!(features.matches("compiled in\n").count(), 4, "{info}");
    assert!(devices.contains("softcx"), "{info}");
}

#[test]
fn info_with_a_device_lists_only_that_device() {
    let device = device();
    let info = text(run(&format!("info --device {device}")));
    let devices = info.split_once("devices\n").unwrap().1;
    assert!(devices.trim_start().starts_with(&device), "{info}");
    let path = format!("host stream: {} (", control());
    assert_eq!(devices.matches(&path).count(), 1, "{info}");
    // The device, its endpoints, the path, and the two paths that are not used.
    assert_eq!(devices.lines().count(), 5, "{info}");
    for control in ["direct", "proxy", "sync"] {
        assert!(devices.contains(control), "{info}");
    }
}

#[test]
fn info_with_protocols_shows_costs_and_the_limit_between_them() {
    let device = device();
    let limit_of = |more: &str| -> u64 {
        let info = text(run(&format!("info --device {device} --protocols{more}")));
        let (_, messages) = info.split_once("messages  up to ").unwrap();
        let limit: u64 = messages.split(' ').next().unwrap().parse().unwrap();
        let rows: Vec<Vec<&str>> = (messages.lines().skip(2))
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(rows.len(), 9, "{info}");
        for row in rows {
            let us = |at: usize| row[at].parse::<f64>().unwrap();
            let len: u64 = row[0].parse().unwrap();
            assert!(us(4) >= us(2) && us(5) >= us(3), "{info}");
            let expected = if len <= limit { "eager" } else { "rendezvous" };
            assert_eq!(row[6], expected, "{info}");
        }
        limit
    };
    limit_of("");
    // A read over a network that takes a second for a round trip costs more than any copy.
    assert_eq!(limit_of(" --round-trip 1000000"), 1 << 20);
    let line = format!("info --device {device} --protocols --round-trip=-1");
    let (code, _, refused) = Running::start(&line).end();
    assert!(
        code == Some(1) && refused.contains("--round-trip -1"),
        "{refused}"
    );
    let (code, _, refused) = Running::start("info --round-trip 1").end();
    assert!(
        code == Some(2) && refused.contains("--protocols"),
        "{refused}"
    );
}

#[test]
fn unknown_device_error_names_it_and_the_alternatives() {
    let listen = "bench pingpong --listen 127.0.0.1:0";
    for line in ["bench loop", listen, "disasm", "info"] {
        // With the devices of this machine, and where libibverbs finds no RDMA device.
        for sysfs in [None, Some("/nonexistent")] {
            let line = format!("{line} --device mlx5_17");
            let mut command = command(&line);
            command.envs(sysfs.map(|path| ("SYSFS_PATH", path)));
            let Output {
                status,
                stdout,
                stderr,
            } = command.output().unwrap();
            let (out, err) = (
                String::from_utf8_lossy(&stdout),
                String::from_utf8_lossy(&stderr),
            );
            assert_eq!(status.code(), Some(1), "`{line}`: {err}");
            // No path is printed; the capabilities of a GPU still are.
            let mut words = out.split(|letter: char| !letter.is_alphanumeric());
            assert!(
                !out.contains("listening") && !words.any(|word| word == "direct"),
                "`{line}`: {out}"
            );
            assert!(
                err.contains("there is no device `mlx5_17`; there are:") && err.contains("softcx"),
                "`{line}`: {err}"
            );
        }
    }
}

#[test]
fn help_and_version_exit_with_success() {
    assert!(text(run("--version")).starts_with("doorbell "));
    assert!(text(run("bench loop --help")).contains("--kernel-us"));
}

#[test]
fn a_missing_subcommand_prints_help() {
    for (line, subcommand) in [("", "bench"), ("bench", "pingpong"), ("softcx", "run")] {
        let help = text(run(line));
        assert!(help.contains("Usage: doorbell"), "`{line}`: {help}");
        assert!(help.contains(subcommand), "`{line}`: {help}");
    }
}

#[test]
fn closed_pipe_ends_the_command_by_sigpipe() {
    for line in [
        "",
        "--help",
        "info",
        "disasm",
        "bench loop --sizes 8 --kernel-us 0",
        "bench loop --sizes 8 --kernel-us 0 --iterations 40 --json",
        "bench loop --listen 127.0.0.1:0",
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = command(line).stdout(writer).spawn().unwrap();
        let line = line.to_owned();
        let mut running = Running { child, line };
        let status = running.wait();
        let mut err = String::new();
        let stderr = running.child.stderr.as_mut().unwrap();
        stderr.read_to_string(&mut err).unwrap();
        let line = &running.line;
        assert_eq!(
            (status.signal(), &*err),
            (Some(libc::SIGPIPE), ""),
            "`{line}`"
        );
    }
}

#[test]
fn invalid_arguments_give_a_one_line_error() {
    for (line, named) in [
        ("frobnicate", "frobnicate"),
        ("bench loop --sizes 0", "--sizes"),
        ("bench loop --sizes 8..9", "power of two"),
        ("bench loop --op read", "--op"),
        ("bench loop --eager-bytes 64", "--op message"),
        (
            "bench loop --steps 4096 --batches 64",
            "--steps times --batches",
        ),
        ("bench loop --listen 127.0.0.1:0 --json", "--json"),
        ("bench pingpong --frequency 3", "--frequency"),
        ("info more", "more"),
        ("bench loop --device", "--device"),
        ("softcx run", "<PROGRAM>"),
        ("softcx run --loss=2 true", "0 to 1"),
        ("softcx run --loss -1 true", "0 to 1"),
        ("softcx run --loss=nan true", "0 to 1"),
        ("softcx run --loss=much true", "--loss"),
        ("softcx run --fault=loss=2 true", "loss=2"),
        ("softcx run --fault=drop=1,frob=1 true", "frob=1"),
    ] {
        let (code, out, err) = Running::start(line).end();
        assert_eq!((code, &*out), (Some(2), ""), "`{line}`: {err}");
        assert_eq!(err.lines().count(), 1, "`{line}`: {err}");
        assert!(err.contains(named), "`{line}`: {err}");
    }
}

#[test]
fn connect_without_a_listener_ends_by_its_deadline() {
    // A port in use on which no socket listens any more: another process could take a free port at any moment.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let port = address.port();
    let _caller = std::net::TcpStream::connect(address).unwrap();
    let _called = listener.accept().unwrap();
    drop(listener);
    let start = Instant::now();
    let line = format!("bench loop --timeout-s 1 --connect 127.0.0.1:{port}");
    let (code, out, err) = Running::start(&line).end();
    assert_eq!((code, &*out), (Some(1), ""), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(
        err.contains(&format!("--connect 127.0.0.1:{port}")),
        "{err}"
    );
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn foreign_connection_does_not_block_the_peer() {
    let (other, address) = Running::listen(&bench("loop"));
    let mut stranger = std::net::TcpStream::connect(&address).unwrap();
    std::io::Write::write_all(&mut stranger, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let line = format!(
        "{} --sizes 64 --kernel-us 0 --iterations 40 --connect {address}",
        bench("loop")
    );
    let (code, _, err) = Running::start(&line).end();
    assert_eq!(code, Some(0), "{err}");
    let (code, _, err) = other.end();
    assert_eq!(code, Some(0), "{err}");
}

/// Both processes of a benchmark, the measuring one through a relay that has it run on another host; and with which device, if it has to say it.
fn across_hosts(device: &str, claimed: Option<&str>) -> [(Option<i32>, String, String); 2] {
    use doorbell::{Channel, Listener};
    let (other, address) = Running::listen(&format!("bench loop {device}"));
    let relay = Listener::bind("127.0.0.1:0").unwrap();
    let address_of_relay = relay.address().unwrap();
    let measuring = Running::start(&format!("bench loop {device} --connect {address_of_relay}"));
    let mut near = relay.accept(LIMIT).unwrap();
    let mut far = Channel::connect(&address, LIMIT).unwrap();
    let mut handshake: Value = serde_json::from_slice(&near.receive(LIMIT).unwrap()).unwrap();
    let identity = &mut handshake["identity"];
    assert!(identity["boot_id"].is_string(), "{identity}");
    identity["boot_id"] = "another".into();
    identity["host"] = "elsewhere".into();
    if claimed.is_some() {
        identity["device"] = claimed.into();
    }
    far.send(handshake.to_string().as_bytes(), LIMIT).unwrap();
    near.send(&far.receive(LIMIT).unwrap(), LIMIT).unwrap();
    [other.end(), measuring.end()]
}

#[test]
fn softcx_across_hosts_is_refused_with_a_remedy() {
    for (device, claimed) in [("--device softcx", None), ("", Some("softcx"))] {
        for (code, _, err) in across_hosts(device, claimed) {
            assert_eq!(code, Some(1), "{err}");
            assert_eq!(err.lines().count(), 1, "{err}");
            let wire = "--device softcx,wire=udp:ADDRESS";
            for said in ["elsewhere", "--device mlx5_0", "doorbell info", wire] {
                assert!(err.contains(said), "`{said}`: {err}");
            }
        }
    }
}

/// Where there is no card, there is nothing to take.
#[test]
fn without_a_name_no_device_of_another_host_is_softcx() {
    if doorbell::Device::list() != ["softcx"] {
        return waived::waived(
            "without_a_name_no_device_of_another_host_is_softcx",
            "this machine has an RDMA device",
        );
    }
    for (code, _, err) in across_hosts("", None) {
        assert_eq!(code, Some(1), "{err}");
        let wire = "--device softcx,wire=udp:127.0.0.1";
        for said in ["elsewhere", "no RDMA device", "doorbell info", wire] {
            assert!(err.contains(said), "`{said}`: {err}");
        }
    }
}

/// It says so.
#[test]
fn without_a_name_processes_of_one_host_take_softcx() {
    let (other, address) = Running::listen("bench loop");
    let line = format!("bench loop --sizes 64 --kernel-us 0 --iterations 40 --connect {address}");
    for (code, _, err) in [Running::start(&line).end(), other.end()] {
        assert_eq!(code, Some(0), "{err}");
        assert!(
            err.contains("device softcx: both processes are on this host"),
            "{err}"
        );
    }
}

/// Of a wire that the other process has, too.
#[test]
fn without_a_name_a_process_takes_the_wire_of_the_other() {
    for (wire, environment) in [("udp", "shm"), ("shm", "udp")] {
        let named = format!("bench loop --device softcx,wire={wire}");
        let (other, address) = Running::listen(&named);
        let line =
            format!("bench loop --sizes 64 --kernel-us 0 --iterations 40 --connect {address}");
        let nameless = Running::start_with(&line, &[("DOORBELL_SOFTCX_WIRE", environment)]);
        for (code, _, err) in [nameless.end(), other.end()] {
            assert_eq!(code, Some(0), "{wire}: {err}");
        }
    }
}

/// Until both connections of `bench --connect` to that address are established, of which the second one comes when the first has been answered.
fn until_connected(address: &str) {
    let port: u16 = address.rsplit_once(':').unwrap().1.parse().unwrap();
    // Local and remote address, and the state; 01 is an established connection.
    let local = format!("0100007F:{port:04X}");
    let start = Instant::now();
    loop {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let is_connection = |line: &&str| {
            let mut words = line.split_whitespace().skip(1);
            words.next() == Some(&local) && words.nth(1) == Some("01")
        };
        if table.lines().filter(is_connection).count() >= 2 {
            return;
        }
        assert!(start.elapsed() < LIMIT, "nobody connects to {address}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_peer_that_is_killed_ends_the_other_process() {
    for (test, options) in [
        ("loop", "--loop sync"),
        ("loop", "--loop async"),
        ("loop", "--loop sync --validate"),
        ("loop", "--loop async --validate"),
        ("loop", "--loop async --op send"),
        ("pingpong", "--loop sync"),
        ("pingpong", "--loop async"),
    ] {
        for kill_listener in [true, false] {
            let (other, address) = Running::listen(&bench("loop"));
            let line = format!(
                "{} {options} --sizes 64 --kernel-us 5 --iterations 10000000 --steps 20 --connect {address}",
                bench(test)
            );
            let measuring = Running::start(&line);
            // `--listen` waits for a peer without a limit, so it does not notice the end of a process that has not connected yet.
            until_connected(&address);
            // In the middle of the row.
            std::thread::sleep(Duration::from_millis(400));
            let (mut killed, left) = if kill_listener {
                (other, measuring)
            } else {
                (measuring, other)
            };
            killed.child.kill().unwrap();
            let start = Instant::now();
            let (code, _, err) = left.end();
            assert_eq!(code, Some(1), "`{line}`: {err}");
            assert_eq!(err.lines().count(), 1, "`{line}`: {err}");
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "`{line}` noticed after {:?}",
                start.elapsed()
            );
        }
    }
}
