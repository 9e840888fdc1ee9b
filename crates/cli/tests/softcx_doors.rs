//! The doors to the software ConnectX, with programs that need no verbs library: exit codes, signals, process trees, descriptors, and leaks after
//! clients die.

#[path = "../../../tests/door/mod.rs"]
mod door;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use waived::waived;

/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

fn run(options: &[&str], program: &[&str]) -> Command {
    run_on(&fabric(), options, program)
}

fn run_on(fabric: &str, options: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command.args(["softcx", "run", "--fabric", fabric]);
    command.args(options).arg("--").args(program);
    command
}

/// A fabric of its own for each test process.
fn fabric() -> String {
    format!("doors-{}", std::process::id())
}

/// The exit code, and what was written.
fn outcome(mut command: Command) -> (i32, String) {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let id = child.id();
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(child.wait_with_output()));
    let Ok(output) = receive.recv_timeout(LIMIT) else {
        kill(id, "KILL");
        panic!("{command:?} hangs");
    };
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let code = output
        .status
        .code()
        .unwrap_or(-output.status.signal().unwrap_or(0));
    (code, text.into_owned())
}

fn kill(process: u32, signal: &str) {
    let status = Command::new("kill")
        .args(["-s", signal, &process.to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// A run that is still going on.
struct Running {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Running {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, question: &str) -> String {
        writeln!(self.input, "{question}").unwrap();
        self.line()
    }

    fn code(mut self) -> i32 {
        drop(self.input);
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap();
            }
            assert!(start.elapsed() < LIMIT, "it hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The C program beside this file, static; `None` where it cannot be built.
fn client() -> Option<&'static str> {
    static BUILT: OnceLock<Option<String>> = OnceLock::new();
    build(&BUILT, "client.c", "doors-client-static", &["-static"])
}

/// The same, dynamic: for the preload door.
fn dynamic_client() -> Option<&'static str> {
    static BUILT: OnceLock<Option<String>> = OnceLock::new();
    build(&BUILT, "client.c", "doors-client-dynamic", &[])
}

/// The program that calls functions with paths, compiled with the flags of a distribution.
fn path_client() -> Option<&'static str> {
    static BUILT: OnceLock<Option<String>> = OnceLock::new();
    let flags = ["-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"];
    build(&BUILT, "paths.c", "doors-paths", &flags)
}

fn build(
    built: &'static OnceLock<Option<String>>,
    source: &str,
    name: &str,
    flags: &[&str],
) -> Option<&'static str> {
    let compile = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/softcx_doors")
            .join(source);
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let part = door::partial(&program);
        let done = Command::new("cc")
            .args([
                "-std=gnu11",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-O1",
                "-pthread",
            ])
            .args(flags)
            .arg("-o")
            .arg(&part)
            .arg(source)
            .output();
        match done {
            Ok(output) if output.status.success() => {
                fs::rename(&part, &program).unwrap();
                Some(program.to_str().unwrap().to_owned())
            }
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                let missing = said.contains("No such file") || said.contains("cannot find -l");
                assert!(missing, "{said}");
                None
            }
            Err(_) => None,
        }
    };
    built.get_or_init(compile).as_deref()
}

/// The preload door's library, as an argument.
fn library() -> &'static str {
    door::library().to_str().unwrap()
}

/// The doors, as options of the run. An instrumented library cannot be loaded into programs that are not: `scripts/test sanitized` does.
fn doors() -> Vec<Vec<&'static str>> {
    if is_instrumented() {
        return vec![vec![]];
    }
    vec![vec![], vec!["--door", "preload", "--library", library()]]
}

fn is_instrumented() -> bool {
    std::env::var_os("DOORBELL_SANITIZER").is_some()
}

#[test]
fn exit_codes_and_signals_are_reported_as_by_a_shell() {
    for door in doors() {
        for (program, expected) in [
            (&["true"][..], 0),
            (&["sh", "-c", "exit 7"], 7),
            (&["sh", "-c", "exit 255"], 255),
            (&["/nonexistent/program"], 127),
            (&["/etc/passwd"], 126),
            // Options after the program's name are passed to it.
            (&["printf", "--help"], 0),
        ] {
            let (code, text) = outcome(run(&door, program));
            assert_eq!(code, expected, "{program:?}: {text}");
        }
    }
    for (signal, code) in [("KILL", 137), ("TERM", 143), ("SEGV", 139)] {
        let script = format!("kill -{signal} $$");
        assert_eq!(outcome(run(&[], &["sh", "-c", &script])).0, code);
    }
}

#[test]
fn signals_reach_the_program() {
    let script =
        "trap 'exit 9' TERM; trap 'echo usr1' USR1; echo ready; while :; do sleep 0.02; done";
    let mut running = Running::start(run(&[], &["sh", "-c", script]));
    assert_eq!(running.line(), "ready");
    kill(running.child.id(), "USR1");
    assert_eq!(running.line(), "usr1");
    kill(running.child.id(), "TERM");
    assert_eq!(running.code(), 9);
}

#[test]
fn supervisor_stays_until_orphaned_processes_end() {
    let script = "(sleep 0.3; stat -c %F /dev/infiniband/uverbs0) & exit 3";
    let (code, text) = outcome(run(&[], &["sh", "-c", script]));
    assert_eq!((code, text.as_str()), (3, "character special file\n"));
    // Signals are forwarded to them then: after the program has ended and was reaped, so that its process id is free.
    let script = "(trap 'echo orphan; exit' TERM; while kill -0 $$; do sleep 0.02; done 2>/dev/null
        echo ready; while :; do sleep 0.02; done) & exit 4";
    let mut running = Running::start(run(&[], &["sh", "-c", script]));
    assert_eq!(running.line(), "ready");
    kill(running.child.id(), "TERM");
    assert_eq!(running.line(), "orphan");
    assert_eq!(running.code(), 4);
}

/// The command itself, to be run as a program.
const DOORBELL: &str = env!("CARGO_BIN_EXE_doorbell");

#[test]
fn nested_run_with_same_options_joins_the_outer_run() {
    let look = "echo $SYSFS_PATH; stat -c %F /dev/infiniband/uverbs0; exit 7";
    let fabric = fabric();
    for options in [
        &[][..],
        &["--fabric", &fabric],
        &["--fabric", &fabric, "--link", "eth", "--loss", "0.5"],
    ] {
        let outer = ["--link", "eth", "--loss", "0.5"];
        let script = "echo $SYSFS_PATH; exec \"$@\"";
        let mut inner = vec!["sh", "-c", script, "sh", DOORBELL, "softcx", "run"];
        inner.extend(options);
        inner.extend(["--", "sh", "-c", look]);
        let (code, text) = outcome(run(&outer, &inner));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((code, lines.len()), (7, 3), "{options:?}: {text}");
        assert!(lines[0].starts_with('/') && lines[0] == lines[1], "{text}");
        assert_eq!(lines[2], "character special file");
    }
    // The outer run still serves processes left behind.
    let script = "(sleep 0.2; stat -c %F /dev/infiniband/uverbs0) & exit 3";
    let (code, text) = outcome(run(
        &[],
        &[DOORBELL, "softcx", "run", "--", "sh", "-c", script],
    ));
    assert_eq!((code, text.as_str()), (3, "character special file\n"));
    for program in ["/nonexistent", "/etc/passwd"] {
        let alone = outcome(run(&[], &[program]));
        let within = outcome(run(&[], &[DOORBELL, "softcx", "run", "--", program]));
        assert_eq!(within, alone);
    }
}

#[test]
fn nested_run_with_other_options_is_refused() {
    let fabric = fabric();
    let there = format!("--fabric {fabric}, not other");
    for (option, value, said) in [
        ("--fabric", "other", there.as_str()),
        ("--link", "eth", "--link ib, not eth"),
        ("--loss", "0.1", "no --loss, not 0.1"),
        ("--delay-us", "7", "--delay-us 5, not 7"),
        ("--fault", "drop=3", "no --fault, not drop=3"),
        ("--trace", "/tmp/x", "no --trace, not /tmp/x"),
    ] {
        let inner = [DOORBELL, "softcx", "run", option, value, "--", "true"];
        let (code, text) = outcome(run(&["--delay-us", "5"], &inner));
        assert_eq!(code, 125, "{text}");
        assert!(
            text.contains(said) && text.contains("--door preload"),
            "{text}"
        );
    }
    // Without the environment that describes the outer run.
    let inner = ["env", "-i", DOORBELL, "softcx", "run", "--", "true"];
    let (code, text) = outcome(run(&[], &inner));
    assert_eq!(code, 125);
    assert!(text.contains("--door preload"), "{text}");
}

/// An environment variable that the provider obeys.
#[test]
fn provider_variable_that_changes_work_requests_is_refused() {
    let info = [DOORBELL, "info", "--device", "mlx5_0"];
    let with = |variable: &'static str| {
        let mut inner = vec!["env", variable];
        inner.extend(info);
        outcome(run(&[], &inner))
    };
    let (code, text) = with("MLX5_CQE_SIZE=128");
    if text.contains("without the feature") {
        return waived("softcx_doors", "built without the feature `verbs`");
    }
    assert_eq!(code, 0, "{text}");
    let (code, text) = with("MLX5_QP_SIGNATURE=1");
    assert_ne!(code, 0, "{text}");
    assert!(text.contains("MLX5_QP_SIGNATURE"), "{text}");
}

/// As on a host one of whose ports is down: the others are listed.
#[test]
fn info_lists_a_device_that_cannot_be_used_with_the_reason() {
    let inner = ["env", "MLX5_QP_SIGNATURE=1", DOORBELL, "info"];
    let (code, text) = outcome(run(&[], &inner));
    if text.contains("NICs of rdma-core: not compiled in") {
        return waived("softcx_doors", "built without the feature `verbs`");
    }
    assert_eq!(code, 0, "{text}");
    let devices = text.split_once("devices\n").unwrap().1;
    assert!(
        devices.contains("software ConnectX in this process"),
        "{text}"
    );
    let refused = devices
        .lines()
        .find(|line| line.contains("mlx5_0"))
        .unwrap();
    assert!(refused.contains("MLX5_QP_SIGNATURE"), "{text}");
}

#[test]
fn nested_doors_use_the_inner_device() {
    if is_instrumented() {
        return waived(
            "softcx_doors",
            "the preload door has a stage of its own under a sanitizer",
        );
    }
    let look = "stat -c %F /dev/infiniband/uverbs0; echo \"$SYSFS_PATH $DOORBELL_SOFTCX_FABRIC $LD_PRELOAD\"; \
                cat /sys/class/infiniband/mlx5_0/ports/1/link_layer";
    let preload = ["--door", "preload", "--library", library()];
    let mut inner = vec![DOORBELL, "softcx", "run"];
    inner.extend(preload);
    inner.extend(["--", "sh", "-c", look]);
    let (code, text) = outcome(run(&["--link", "eth"], &inner));
    let shown = format!(" {} {}", fabric(), library());
    let expected = format!("character special file\n{shown}\nEthernet\n");
    assert_eq!((code, text), (0, expected));
    // The inner door serves the device, on the fabric of the outer one.
    let look = format!(
        "test -n \"$SYSFS_PATH\" && ! grep -q libdoorbell_softcx /proc/self/maps && {look}"
    );
    let inner = [DOORBELL, "softcx", "run", "--", "sh", "-c", &look];
    let (code, text) = outcome(run(&preload, &inner));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(code, 0, "{text}");
    assert_eq!(
        (lines[0], lines[2]),
        ("character special file", "InfiniBand")
    );
    assert!(lines[1].ends_with(&format!(" {} ", fabric())), "{text}");
}

#[test]
fn a_static_program_finds_the_device_by_every_name() {
    let Some(client) = client() else {
        return waived(
            "softcx_doors",
            "no C compiler, static C library or RDMA headers",
        );
    };
    for what in ["ways", "family"] {
        let (code, text) = outcome(run(&[], &[client, what]));
        assert_eq!((code, text.as_str()), (0, ""), "{what}");
    }
}

#[test]
fn both_doors_answer_path_calls_alike() {
    let Some(client) = path_client() else {
        return waived("softcx_doors", "no C compiler or C library headers");
    };
    let texts: Vec<String> = doors()
        .iter()
        .map(|door| {
            // One after the other on the same fabric, so that the node is the same.
            let (code, text) = outcome(run_on(&format!("{}-paths", fabric()), door, &[client]));
            assert_eq!(code, 0, "{door:?}: {text}");
            text
        })
        .collect();
    let node = "/dev/infiniband/uverbs0";
    let folder = "/sys/class/infiniband/mlx5_0";
    let function = "devices/pci5c0f:00/5c0f:00:00.0";
    for expected in [
        format!("open(RDWR|CLOEXEC) {node}: ok type 20000 flags 1"),
        format!("open(RDONLY) {node}: ok type 20000 flags 0"),
        format!("open(PATH) {node}: ok type 20000 flags 0"),
        format!("open(DIRECTORY) {node}: ENOTDIR"),
        format!("fopen(r+) {node}: ok"),
        format!("opendir {node}: ENOTDIR"),
        format!("access(RW) {node}: ok"),
        format!("euidaccess(X) {node}: EACCES"),
        format!("readlink {node}: EINVAL"),
        format!("realpath /dev/./infiniband/../infiniband//uverbs0: ok{node}"),
        format!("getxattr {node}: EOPNOTSUPP"),
        "llistxattr /sys/class/infiniband/mlx5_1: ENOENT".into(),
        format!("lstat {node}: ok mode 20666 links 1 rdev 231:192"),
        "opendir /dev/infiniband: ok . .. rdma_cm uverbs0".into(),
        "stat dev/infiniband/uverbs0: ok mode 20666 links 1 rdev 231:192".into(),
        "access(F) /dev/infiniband/umad0: ENOENT".into(),
        "fopen(r) /sys/class/misc/rdma_cm/abi_version: ok 4".into(),
        "opendir sys/class/infiniband: ok . .. mlx5_0".into(),
        "scandir /sys/class/infiniband: ok 3".into(),
        format!("access(W) {folder}/node_type: EACCES"),
        format!("open(WRONLY|CREAT|TRUNC) {folder}/node_type: EACCES"),
        format!("fopen(r) {folder}/node_type: ok 1: CA"),
        format!("readlink {folder}/device: ok../../../5c0f:00:00.0"),
        format!("readlink {folder}: ok../../{function}/infiniband/mlx5_0"),
        format!("readlink {folder}/node_type: EINVAL"),
        format!("realpath(NULL) {folder}/device: ok/sys/{function}"),
        format!("realpath {folder}: ok/sys/{function}/infiniband/mlx5_0"),
        format!("realpath /sys/bus/pci/devices/5c0f:00:00.0: ok/sys/{function}"),
        "realpath /sys/bus/pci/devices: ok/sys/bus/pci/devices".into(),
        "fopen(r) /sys/bus/pci/devices/5c0f:00:00.0/vendor: ok 0x15b3".to_string(),
        format!(
            "canonicalize_file_name {folder}/device/../../pci5c0f:00/5c0f:00:00.0/irq: ok/sys/{function}/irq"
        ),
        format!("open(RDONLY) {folder}/device/../node_guid: ENOENT"),
        format!("realpath {folder}/node_type/x: ENOTDIR"),
        "access(F) /sys/class/infiniband/mlx5_1: ENOENT".into(),
        "openat from infiniband/uverbs0: ok type 20000 flags 0".into(),
        "fstatat from uverbs0: ok mode 20666 links 1 rdev 231:192".into(),
        "openat from infiniband/mlx5_0/node_type: ok type 100000 flags 0".into(),
    ] {
        for text in &texts {
            assert!(text.lines().any(|line| line == expected), "{expected}");
        }
    }
    for (one, other) in texts.iter().zip(texts.iter().skip(1)) {
        let differ =
            |(one, other): (&str, &str)| (one != other).then(|| format!("{one} | {other}"));
        let differences: Vec<String> = one.lines().zip(other.lines()).filter_map(differ).collect();
        assert!(differences.is_empty(), "{differences:#?}");
        assert_eq!(one.lines().count(), other.lines().count());
    }
}

/// Runs a command in a mount namespace with its own `/dev/shm`, which `setup` prepares.
fn with_own_shared_memory(setup: &str, run: &Command) -> Option<(i32, String)> {
    let unshare = ["-m", "-rm"].into_iter().find(|flags| {
        let mount = ["sh", "-c", "mount -t tmpfs tmpfs /dev/shm"];
        let tried = Command::new("unshare").arg(flags).args(mount).output();
        tried.is_ok_and(|output| output.status.success())
    })?;
    let mut command = Command::new("unshare");
    command.args([unshare, "sh", "-c", &format!("{setup}; exec \"$@\""), "sh"]);
    command.arg(run.get_program()).args(run.get_args());
    Some(outcome(command))
}

#[test]
fn full_shared_memory_error_names_the_file() {
    for door in doors() {
        // For the table of the fabric; then for the description of the device.
        for size in ["4k", "24k"] {
            let setup = format!("mount -t tmpfs -o size={size} tmpfs /dev/shm");
            let run = run(&door, &["ls", "/dev/infiniband"]);
            let Some((code, text)) = with_own_shared_memory(&setup, &run) else {
                return waived("softcx_doors (full /dev/shm)", "this user may not mount");
            };
            // The supervisor's code, or that of ls, which finds no device.
            assert!([125, 2].contains(&code), "{door:?} {size}: {code} {text}");
            let named = text.contains("no room for") && text.contains("in /dev/shm/doorbell-");
            assert!(named, "{door:?} {size}: {text}");
        }
    }
}

#[test]
fn a_folder_of_another_user_in_shared_memory_is_refused_by_name() {
    let user = fs::metadata("/proc/self").unwrap().uid();
    for door in doors() {
        let setup = format!(
            "mount -t tmpfs tmpfs /dev/shm && mkdir /dev/shm/doorbell-{user} && chown 54321 /dev/shm/doorbell-{user} || exit 77; \
             unset XDG_RUNTIME_DIR"
        );
        let run = run(&door, &["ls", "/dev/infiniband"]);
        match with_own_shared_memory(&setup, &run) {
            None | Some((77, _)) => {
                return waived(
                    "softcx_doors (another user)",
                    "this user may not mount or chown",
                );
            }
            Some((code, text)) => {
                assert!([125, 2].contains(&code), "{door:?}: {code} {text}");
                assert!(text.contains("belongs to user 54321"), "{door:?}: {text}");
            }
        }
    }
}

/// Usual command line programs.
#[test]
fn shell_scripts_see_the_device_through_both_doors() {
    for door in doors() {
        for (script, expected) in [
            ("ls /dev/infiniband", "rdma_cm\nuverbs0\n"),
            ("ls -l /dev/infiniband/uverbs0 | cut -c 1", "c\n"),
            (
                "ls /sys/class/infiniband /sys/class/infiniband_verbs | sort",
                "\n/sys/class/infiniband:\n/sys/class/infiniband_verbs:\nabi_version\nmlx5_0\nuverbs0\n",
            ),
            (
                "test -c /dev/infiniband/uverbs0 -a -r /dev/infiniband/uverbs0 && echo yes",
                "yes\n",
            ),
            ("cat /sys/class/infiniband/*/ports/*/state", "4: ACTIVE\n"),
            (
                "realpath /sys/class/infiniband/mlx5_0/device",
                "/sys/devices/pci5c0f:00/5c0f:00:00.0\n",
            ),
            (
                "at=/sys/class/infiniband/mlx5_0/device; cat $at/vendor $at/device $at/numa_node && test -n \"$(cat $at/local_cpus)\" && wc -l < $at/resource",
                "0x15b3\n0x1021\n-1\n13\n",
            ),
            (
                "find /sys/devices/pci5c0f:00 -name lid",
                "/sys/devices/pci5c0f:00/5c0f:00:00.0/infiniband/mlx5_0/ports/1/lid\n",
            ),
            (
                "cat /sys/bus/pci/devices/*/class | grep -c 0x020700; test -e /sys/bus/pci/devices/5c0f:00:00.0/driver/5c0f:00:00.0",
                "1\n",
            ),
            (
                "cd / && cat sys/class/infiniband/mlx5_0/node_type",
                "1: CA\n",
            ),
        ] {
            for shell in ["sh", "bash"] {
                let (code, text) = outcome(run(&door, &[shell, "-c", script]));
                assert_eq!(
                    (code, text.as_str()),
                    (0, expected),
                    "{door:?} {shell}: {script}"
                );
            }
        }
    }
}

/// `ibstat` reads the state there.
#[test]
fn sysfs_has_the_state_of_the_link() {
    for door in doors() {
        for (link, down) in [("ib", "2: Polling"), ("eth", "3: Disabled")] {
            let script = "port=/sys/class/infiniband/mlx5_0/ports/1
                for wanted in DOWN ACTIVE; do
                    until read state < $port/state && test \"${state#*: }\" = $wanted; do :; done
                    read phys_state < $port/phys_state
                    echo $state, $phys_state
                done";
            let mut options = door.to_vec();
            options.extend(["--link", link, "--fault", "down-ms=200+1000"]);
            let (code, text) = outcome(run(&options, &["timeout", "60", "sh", "-c", script]));
            let expected = format!("1: DOWN, {down}\n4: ACTIVE, 5: LinkUp\n");
            assert_eq!((code, text), (0, expected), "{door:?} {link}");
        }
    }
}

#[test]
fn unusual_programs_are_served() {
    let Some(client) = client() else {
        return waived(
            "softcx_doors",
            "no C compiler, static C library or RDMA headers",
        );
    };
    for what in [
        "many", "storm", "headless", "confined", "spawned", "trapped",
    ] {
        let (code, text) = outcome(run(&[], &[client, what]));
        assert_eq!(code, 0, "{what}: {text}");
        match text.as_str() {
            "" => {}
            "no right to\n" => waived("softcx_doors (chroot)", "this user may not"),
            _ => panic!("{what}: {text}"),
        }
    }
}

#[test]
fn clients_killed_during_calls_leave_nothing_behind() {
    let Some(client) = client() else {
        return waived(
            "softcx_doors",
            "no C compiler, static C library or RDMA headers",
        );
    };
    let mut running = Running::start(run(&[], &[client, "deaths"]));
    let supervisor = running.child.id();
    assert_eq!(running.ask("5"), "done");
    let before = settled(supervisor);
    assert_eq!(running.ask("200"), "done");
    back_to(&before, supervisor);
    assert_eq!(running.code(), 0);
}

#[test]
fn forked_child_behind_the_preload_door_has_its_own_device() {
    let Some(client) = dynamic_client() else {
        return waived("softcx_doors", "no C compiler or RDMA headers");
    };
    let Some(preload) = doors().into_iter().nth(1) else {
        return waived(
            "softcx_doors",
            "the preload door has a stage of its own under a sanitizer",
        );
    };
    let (code, text) = outcome(run(&preload, &[client, "family"]));
    assert_eq!((code, text.as_str()), (0, ""));
}

/// The memory monitors of libfabric and UCX change the code of libc's functions while threads may be in them. `fi_pingpong` died of it in one of some 500 runs.
#[test]
fn threads_behind_the_preload_door_do_not_unmap_by_libc() {
    static BUILT: OnceLock<Option<String>> = OnceLock::new();
    let Some(client) = build(&BUILT, "hooked.c", "doors-hooked", &["-rdynamic"]) else {
        return waived("softcx_doors", "no C compiler or RDMA headers");
    };
    let Some(preload) = doors().into_iter().nth(1) else {
        return waived(
            "softcx_doors",
            "the preload door has a stage of its own under a sanitizer",
        );
    };
    let (code, text) = outcome(run(&preload, &[client]));
    assert_eq!((code, text.as_str()), (0, ""));
}

#[test]
fn a_thousand_opens_leave_nothing_behind() {
    let (Some(fixed), Some(dynamic)) = (client(), dynamic_client()) else {
        return waived(
            "softcx_doors",
            "no C compiler, static C library or RDMA headers",
        );
    };
    for (door, client) in doors().into_iter().zip([fixed, dynamic]) {
        let mut running = Running::start(run(&door, &[client, "cycles"]));
        // The supervisor, or the program itself, which replaced it.
        let process = running.child.id();
        assert_eq!(running.ask("50"), "done");
        let before = settled(process);
        assert_eq!(running.ask("1000"), "done");
        let after = back_to(&before, process);
        let grown = after.resident_kib.saturating_sub(before.resident_kib);
        if is_instrumented() {
            waived(
                "softcx_doors (resident bytes of a supervisor)",
                "a sanitizer keeps freed memory for a while",
            );
        } else {
            assert!(grown < 2048, "{grown} KiB more");
        }
        assert_eq!(running.code(), 0);
    }
}

struct Resources {
    descriptors: usize,
    threads: usize,
    resident_kib: u64,
}

/// Resources of a process once they no longer change: contexts are released shortly after their last close.
fn settled(process: u32) -> Resources {
    let mut last = usize::MAX;
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(20));
        let now = resources(process).descriptors;
        if now == last {
            break;
        }
        last = now;
    }
    resources(process)
}

/// Resources of a process once they are no more than before. A wait for no changes would not suffice for a process that is not scheduled.
fn back_to(before: &Resources, process: u32) -> Resources {
    let start = Instant::now();
    loop {
        let now = resources(process);
        if now.descriptors <= before.descriptors && now.threads <= before.threads {
            return now;
        }
        assert!(
            start.elapsed() < LIMIT,
            "{} descriptors and {} threads, before {} and {}",
            now.descriptors,
            now.threads,
            before.descriptors,
            before.threads
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn resources(process: u32) -> Resources {
    let count = |what: &str| {
        fs::read_dir(format!("/proc/{process}/{what}"))
            .unwrap()
            .count()
    };
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    Resources {
        descriptors: count("fd"),
        threads: count("task"),
        resident_kib: resident.trim().trim_end_matches(" kB").parse().unwrap(),
    }
}

#[test]
fn killed_client_releases_its_resources() {
    let Some(client) = client() else {
        return waived(
            "softcx_doors",
            "no C compiler, static C library or RDMA headers",
        );
    };
    let script = format!(
        "for clients in 1 '1 2 3 4'; do read go; for i in $clients; do '{client}' hold & done; read go; kill -9 $(jobs -p); wait; echo killed; done; read go"
    );
    let mut running = Running::start(run(&[], &["bash", "-c", &script]));
    let supervisor = running.child.id();
    // One client first, so that the supervisor has allocated what it needs once. Even if its context is not released yet, four clients hold more.
    assert_eq!(running.ask("go"), "held");
    assert_eq!(running.ask("go"), "killed");
    let before = settled(supervisor);
    assert_eq!(running.ask("go"), "held");
    for _ in 0..3 {
        assert_eq!(running.line(), "held");
    }
    assert!(resources(supervisor).descriptors > before.descriptors);
    assert_eq!(running.ask("go"), "killed");
    back_to(&before, supervisor);
    assert_eq!(running.code(), 1);
}

#[test]
fn device_tree_is_removed_even_after_a_killed_run() {
    let shown = |running: &mut Running| PathBuf::from(running.line());
    let script = ["sh", "-c", "echo $SYSFS_PATH; read go"];
    let mut running = Running::start(run(&[], &script));
    let tree = shown(&mut running);
    assert!(tree.join("class/infiniband").is_dir(), "{tree:?}");
    assert_eq!(running.code(), 1);
    assert!(!tree.exists());
    let mut running = Running::start(run(&[], &script));
    let tree = shown(&mut running);
    assert!(tree.join("class/infiniband").is_dir(), "{tree:?}");
    kill(running.child.id(), "KILL");
    running.child.wait().unwrap();
    // Any run removes it, including those of other tests and processes: it may be gone already, or another run may be removing it.
    let start = Instant::now();
    loop {
        assert_eq!(outcome(run(&[], &["true"])).0, 0);
        if !tree.exists() {
            break;
        }
        assert!(
            start.elapsed() < LIMIT,
            "the next run does not clear it away"
        );
    }
}
