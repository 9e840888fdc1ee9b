//! The steps: which there are, and each as a process of its own.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::report::{Outcome, Report, Step};
use super::{examples, facts, figures, kernels};

/// What is found out in this process: name, and seconds that it may take.
const HERE: [(&str, u64); 16] = [
    ("fact: device", 30),
    ("fact: mappings", 30),
    ("fact: conditions", 30),
    ("fact: order of stores", 60),
    ("fact: what waits for a stream that waits", 60),
    ("fact: operations of a call", 30),
    ("fact: patched graphs", 30),
    ("watchdog", 60),
    ("figure: round trip", 60),
    ("figure: queue cost", 60),
    ("figure: driver calls", 30),
    ("figure: graph replay", 60),
    (GROUPS, 60),
    (BLOCKS, 120),
    ("figure: kernel trigger", 60),
    ("figure: emitter", 60),
];
const GROUPS: &str = "kernels: triggers of warps and blocks";
const BLOCKS: &str = "kernels: puts of many blocks";
/// A step for which nothing is left.
pub const NO_TIME: &str = "the time of the whole is up";
const LOOPS: &str = "figure: loops";

/// Runs one of them, and gives what it found as a line of JSON.
pub fn run_here(name: &str, short: bool) -> Value {
    let found = match name {
        "fact: device" => facts::device(),
        "fact: mappings" => facts::mappings(),
        "fact: conditions" => facts::conditions(),
        "fact: order of stores" => facts::order(short),
        "fact: what waits for a stream that waits" => facts::blocked(),
        "fact: operations of a call" => facts::batches(),
        "fact: patched graphs" => facts::graphs(),
        "watchdog" => figures::watchdog(),
        "figure: round trip" => figures::round_trip(short),
        "figure: queue cost" => figures::queue_cost(short),
        "figure: driver calls" => figures::driver_calls(),
        "figure: graph replay" => figures::graph_replay(short),
        GROUPS => kernels::triggers_of_groups(short),
        BLOCKS => kernels::puts_of_blocks(short),
        "figure: kernel trigger" => kernels::trigger_to_doorbell(short),
        "figure: emitter" => kernels::emitter(short),
        LOOPS => match std::env::current_exe() {
            Ok(here) => figures::loops(&here.with_file_name("doorbell"), short),
            Err(error) => Err(error.into()),
        },
        _ => Err(anyhow::anyhow!("no step {name:?}")),
    };
    match found {
        Ok(found) => json!({"found": found}),
        Err(error) => json!({"failed": format!("{error:#}")}),
    }
}

/// Runs all of them, and the suites.
pub fn run_all(bundle: &Path, short: bool, report: &mut Report) {
    let list = HERE.iter().copied().chain([(LOOPS, 120)]);
    for (name, seconds) in list {
        let began = Instant::now();
        let step = match report.time_for(Duration::from_secs(seconds)) {
            Some(limit) => found_here(name, limit, short),
            None => Step::waived(NO_TIME.into()),
        };
        report.add(Step {
            name: name.to_owned(),
            seconds: began.elapsed().as_secs_f64(),
            ..step
        });
        if name == "fact: device" && report.has(Outcome::Failed) {
            // Nothing below can be.
            return;
        }
    }
    examples::run_all(bundle, short, report);
    for (suite, way) in suites(bundle, short) {
        let began = Instant::now();
        let name = format!("suite: {suite}, {}", way.name);
        let limit = report.time_for(Duration::from_secs(if short { 300 } else { 90 }));
        let step = match limit.map(|limit| run_suite(bundle, &suite, &way, short, limit)) {
            Some(Ok(step)) => step,
            Some(Err(error)) => Step::failed(format!("{error:#}")),
            None => Step::waived(NO_TIME.into()),
        };
        report.add(Step {
            name,
            seconds: began.elapsed().as_secs_f64(),
            ..step
        });
    }
    for (what, tool, arguments) in SANITIZED {
        let began = Instant::now();
        let step = match report.time_for(Duration::from_secs(120)) {
            Some(limit) => sanitizer(bundle, tool, arguments, limit),
            None => Step::waived(NO_TIME.into()),
        };
        report.add(Step {
            name: format!("{what} under compute-sanitizer {tool}"),
            seconds: began.elapsed().as_secs_f64(),
            ..step
        });
    }
}

fn found_here(name: &str, limit: Duration, short: bool) -> Step {
    let Ok(program) = std::env::current_exe() else {
        return Step::failed("where this program lies is not known".into());
    };
    let mut command = Command::new(program);
    command.args(["--step", name]);
    if short {
        command.arg("--short");
    }
    let ended = match run(&mut command, limit) {
        Ok(ended) => ended,
        Err(error) => return Step::failed(format!("{error:#}")),
    };
    let line = ended.said.lines().rev().find(|line| line.starts_with('{'));
    let Some(found) = line.and_then(|line| serde_json::from_str::<Value>(line).ok()) else {
        return Step::failed(ended.complaint());
    };
    match (found.get("found"), found.get("failed")) {
        (Some(found), _) if found.get("waived").is_some() => {
            Step::waived(found["waived"].as_str().unwrap_or_default().to_owned())
        }
        (Some(found), _) => Step::found(found.clone()),
        (None, Some(reason)) => Step::failed(reason.as_str().unwrap_or_default().to_owned()),
        (None, None) => Step::failed(ended.complaint()),
    }
}

/// In which surroundings a suite runs.
#[derive(Clone)]
struct Way {
    name: &'static str,
    /// What `DOORBELL_TEST_STREAM` is to be.
    stream: &'static str,
    device: &'static str,
    behind_the_door: bool,
}

const WAYS: [Way; 6] = [
    Way {
        name: "softcx, direct",
        stream: "cuda",
        device: "softcx",
        behind_the_door: false,
    },
    Way {
        name: "softcx, proxy",
        stream: "cuda",
        device: "softcx,path=proxy",
        behind_the_door: false,
    },
    Way {
        name: "mlx5 behind the preload door",
        stream: "cuda",
        device: "mlx5_0",
        behind_the_door: true,
    },
    Way {
        name: "softcx, direct, programs by a kernel",
        stream: "cuda-kernel",
        device: "softcx",
        behind_the_door: false,
    },
    Way {
        name: "softcx, direct, programs by kernels of an application",
        stream: "cuda-trigger",
        device: "softcx",
        behind_the_door: false,
    },
    Way {
        name: "softcx, proxy, programs by kernels of an application",
        stream: "cuda-trigger",
        device: "softcx,path=proxy",
        behind_the_door: false,
    },
];

/// Each suite of the bundle, each way.
fn suites(bundle: &Path, short: bool) -> Vec<(String, Way)> {
    let mut all = Vec::new();
    for way in WAYS {
        // Files of the bundle: a suite a line.
        let list = match way.stream {
            "cuda-kernel" => "suites.kernel",
            "cuda-trigger" => "suites.trigger",
            _ => "suites",
        };
        let list = std::fs::read_to_string(bundle.join(list)).unwrap_or_default();
        for suite in list.split_whitespace() {
            // All of one kind, and one of the others, are enough to see that they start.
            let shown = if way.behind_the_door {
                "conformance"
            } else {
                "tickets"
            };
            if short && way.name != WAYS[0].name && suite != shown {
                continue;
            }
            all.push((suite.to_owned(), way.clone()));
        }
    }
    all
}

fn run_suite(bundle: &Path, suite: &str, way: &Way, short: bool, limit: Duration) -> Result<Step> {
    let program = bundle.join("bin").join(suite);
    let mut command = if way.behind_the_door {
        let mut door = Command::new(bundle.join("bin/doorbell"));
        door.args([
            "softcx",
            "run",
            "--door",
            "preload",
            "--fabric",
            &format!("check-{}", std::process::id()),
            "--library",
        ]);
        door.arg(bundle.join("lib/libdoorbell_softcx.so"))
            .arg("--")
            .arg(program);
        door
    } else {
        Command::new(program)
    };
    let log = std::env::temp_dir().join(format!("doorbell-waived-{}", std::process::id()));
    let _ = std::fs::remove_file(&log);
    command
        .env("DOORBELL_TEST_STREAM", way.stream)
        .env("DOORBELL_TEST_DEVICE", way.device);
    command.env("DOORBELL_FAULTS", if short { "300" } else { "2000" });
    command.env("DOORBELL_POSTS", if short { "1000" } else { "7000" });
    command.env("DOORBELL_WAIVED_LOG", &log);
    let ended = run(&mut command, limit)?;
    let waived = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    let waived: Vec<String> = waived.lines().map(without_process).collect();
    let Some(result) = ended
        .said
        .lines()
        .rev()
        .find(|line| line.starts_with("test result: "))
    else {
        return Ok(Step {
            waived,
            ..Step::failed(ended.complaint())
        });
    };
    let result = result.to_owned();
    if !ended.success || !result.starts_with("test result: ok.") {
        return Ok(Step {
            waived,
            ..Step::failed(ended.complaint())
        });
    }
    Ok(Step {
        waived,
        ..Step::found(json!(result))
    })
}

/// A line `test@process: reason` of tests/waived, for people.
fn without_process(line: &str) -> String {
    match line.split_once(": ") {
        Some((test, reason)) => format!("{}: {reason}", test.split('@').next().unwrap_or(test)),
        None => line.to_owned(),
    }
}

/// What runs under compute-sanitizer: for people, the tool, and the program of the bundle with its arguments.
const SANITIZED: [(&str, &str, &[&str]); 7] = [
    (
        "kernels",
        "memcheck",
        &["cuda_kernels", "--test-threads", "1"],
    ),
    (
        "triggers",
        "memcheck",
        &["kernel_trigger", "--test-threads", "1"],
    ),
    (
        "triggers",
        "racecheck",
        &["kernel_trigger", "--test-threads", "1"],
    ),
    (
        "puts of many blocks",
        "memcheck",
        &["gpu_check", "--short", "--step", BLOCKS],
    ),
    (
        "puts of many blocks",
        "racecheck",
        &["gpu_check", "--short", "--step", BLOCKS],
    ),
    (
        "triggers of warps and blocks",
        "memcheck",
        &["gpu_check", "--short", "--step", GROUPS],
    ),
    (
        "triggers of warps and blocks",
        "racecheck",
        &["gpu_check", "--short", "--step", GROUPS],
    ),
];

fn sanitizer(bundle: &Path, tool: &str, arguments: &[&str], limit: Duration) -> Step {
    let places =
        ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"].map(std::path::PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path).chain(places);
    let Some(folder) = folders.find(|folder| folder.join("compute-sanitizer").is_file()) else {
        return Step::waived("compute-sanitizer is not here".into());
    };
    let [program, arguments @ ..] = arguments else {
        return Step::waived("nothing was named".into());
    };
    let program = bundle.join("bin").join(program);
    if !program.is_file() {
        return Step::waived(format!("the bundle has no {}", program.display()));
    }
    let mut command = Command::new(folder.join("compute-sanitizer"));
    command
        .args(["--error-exitcode", "9", "--tool", tool])
        .arg(program)
        .args(arguments);
    match run(&mut command, limit) {
        // A step says in its line what became of it.
        Ok(ended) if ended.said.contains("{\"waived\":") => {
            Step::waived("the program had nothing to run".into())
        }
        Ok(ended) if ended.success && !ended.said.contains("{\"failed\":") => {
            Step::found(json!("no errors"))
        }
        Ok(ended) => Step::failed(ended.complaint()),
        Err(error) => Step::failed(format!("{error:#}")),
    }
}

/// How a process ended.
pub struct Ended {
    pub success: bool,
    pub in_time: bool,
    pub status: String,
    pub said: String,
}

impl Ended {
    /// What to report of one that failed: the end of what it said.
    pub fn complaint(&self) -> String {
        let how = if self.in_time {
            self.status.clone()
        } else {
            "HANG: it was ended at its time limit".into()
        };
        let lines: Vec<&str> = self.said.lines().collect();
        let tail = lines[lines.len().saturating_sub(30)..].join("\n");
        format!("{how}\n{tail}")
    }
}

/// Runs it, for no longer than that.
pub fn run(command: &mut Command, limit: Duration) -> Result<Ended> {
    use std::os::unix::process::CommandExt;
    // A group of its own, so that all that it has started ends with it.
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("no pipes");
    };
    let read = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let (out, err) = (read(Box::new(out)), read(Box::new(err)));
    let start = Instant::now();
    let mut in_time = true;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > limit {
            in_time = false;
            // SAFETY: the group of a child that was not waited for yet.
            unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
            break child.wait()?;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let said = format!(
        "{}\n{}",
        err.join().unwrap_or_default(),
        out.join().unwrap_or_default()
    );
    Ok(Ended {
        success: status.success() && in_time,
        in_time,
        status: status.to_string(),
        said,
    })
}
