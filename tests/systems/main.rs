//! The programs of `examples/systems`: each does its work on small data, and what it writes is compared with a reference.
//!
//! Only in optimised builds, because the programs compute, and poll: `scripts/test systems`.
#![cfg(all(
    feature = "group",
    feature = "softcx",
    not(loom),
    not(debug_assertions)
))]

mod block_write;
mod copies;
mod data_parallel_training;
mod pipeline_training;
mod remote_memory;
mod rendezvous;
mod rpc;
mod shuffle;
#[path = "../waived/mod.rs"]
mod waived;

use waived::waived;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// What starts the ranks of a program.
#[derive(Debug, Clone, Copy)]
enum Launcher {
    /// The program.
    Itself,
    Mpirun,
    Torchrun,
}

impl Launcher {
    /// The program itself, and the launchers of this machine. Those that are not installed are waived.
    fn all(test: &str) -> Vec<Launcher> {
        let missing = |program: &str, arguments: &[&str], said: &str| {
            let output = Command::new(program).args(arguments).output();
            !output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(said))
        };
        let mut all = vec![Launcher::Itself];
        if missing("mpirun", &["--version"], "Open MPI") {
            waived(
                &format!("{test} (mpirun)"),
                "there is no mpirun of Open MPI",
            );
        } else {
            all.push(Launcher::Mpirun);
        }
        if missing(PYTHON, &["-m", TORCHRUN, "--help"], "--nproc_per_node") {
            let reason = "torch is not installed (Debian: python3-torch)";
            waived(&format!("{test} (torchrun)"), reason);
        } else {
            all.push(Launcher::Torchrun);
        }
        all
    }

    /// Runs an example on so many ranks.
    fn example(self, ranks: usize, name: &str, arguments: &[&str]) -> Output {
        let program = program(name);
        let ranks = ranks.to_string();
        let mut command = match self {
            Launcher::Itself => Command::new(&program),
            Launcher::Mpirun => {
                let mut command = Command::new("mpirun");
                command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks]);
                command.arg(&program);
                command
            }
            Launcher::Torchrun => {
                let mut command = Command::new(PYTHON);
                command.args(["-m", TORCHRUN, "--no_python"]);
                // A port of its own. `--standalone` of torch 1.13 takes port 29400 for every job of the host.
                command.args(["--rdzv_backend", "c10d"]);
                command.args(["--rdzv_endpoint", "localhost:0"]);
                command.args(["--nproc_per_node", &ranks, "--monitor_interval", "1"]);
                // torch 1.13 with Python 3.11 knows neither no redirection nor that of both outputs. What is redirected is printed as well.
                command.args(["-r", "1", "-t", "1", "--log_dir"]);
                command.arg(env!("CARGO_TARGET_TMPDIR")).arg(&program);
                command
            }
        };
        let output = command.args(arguments).output();
        let mut output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        if let Launcher::Torchrun = self {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let lines = text.lines().map(|line| match line.split_once("]:") {
                Some((rank, line)) if rank.starts_with("[default") => line,
                _ => line,
            });
            output.stdout = lines.collect::<Vec<&str>>().join("\n").into_bytes();
        }
        output
    }
}

/// The interpreter of the system's packages, and torch's launcher.
const PYTHON: &str = "/usr/bin/python3";
const TORCHRUN: &str = "torch.distributed.run";

/// The program of an example: `cargo build --release --examples` puts it next to the tests.
fn program(name: &str) -> PathBuf {
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    folder.pop();
    folder.join("examples").join(name)
}

/// Runs an example, which starts its own ranks.
fn example(name: &str, arguments: &[&str]) -> Output {
    Launcher::Itself.example(0, name, arguments)
}

/// Runs an example, which starts its own ranks, and whose software ConnectX has this fault.
fn example_with_fault(fault: &str, name: &str, arguments: &[&str]) -> Output {
    let program = program(name);
    let mut command = Command::new(&program);
    command.env("DOORBELL_SOFTCX_FAULT", fault).args(arguments);
    let output = command.output();
    output.unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

/// A port that nobody listens at.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// One rank of a job that the test starts itself, behind the words of another command if there are any.
fn rank_by_hand(prefix: &[&str], name: &str, (rank, size): (u32, u32), port: u16) -> Command {
    let mut words = prefix.iter().map(OsString::from).collect::<Vec<_>>();
    words.push(program(name).into());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command.env("DOORBELL_RANK", rank.to_string());
    command.env("DOORBELL_SIZE", size.to_string());
    command.env("DOORBELL_MASTER_ADDR", "127.0.0.1");
    command.env("DOORBELL_MASTER_PORT", port.to_string());
    command.env("DOORBELL_TOKEN", format!("{}-{port}", std::process::id()));
    command
}

/// A folder of the test's own, empty.
fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join("systems")
        .join(test);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// What an SVG file that a program has drawn shows.
struct Drawing {
    /// The names of all elements.
    elements: Vec<String>,
    texts: Vec<String>,
}

impl Drawing {
    /// Reads the file, and fails unless it is one `svg` element with well-formed ones inside.
    fn read(file: &Path) -> Drawing {
        let content = std::fs::read_to_string(file)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let (mut elements, mut texts, mut open) = (Vec::new(), Vec::new(), Vec::<String>::new());
        let mut rest = content.trim();
        while let Some(start) = rest.find('<') {
            let text = rest[..start].trim();
            if !text.is_empty() {
                assert!(!open.is_empty(), "`{text}` is outside of the drawing");
                texts.push(text.to_owned());
            }
            // No attribute of these files has a `>` in it.
            let end = start + rest[start..].find('>').expect("a tag has an end");
            let tag = &rest[start + 1..end];
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "an end tag");
                continue;
            }
            let name = tag.split(|c: char| !c.is_alphanumeric()).next().unwrap();
            assert!(tag.matches('"').count().is_multiple_of(2), "<{tag}>");
            assert!(
                !open.is_empty() || elements.is_empty(),
                "<{tag}> behind the end"
            );
            elements.push(name.to_owned());
            if !tag.ends_with('/') {
                open.push(name.to_owned());
            }
        }
        assert!(rest.is_empty() && open.is_empty(), "`{rest}`, {open:?}");
        assert_eq!(elements[0], "svg");
        Drawing { elements, texts }
    }

    fn count(&self, element: &str) -> usize {
        self.elements.iter().filter(|name| *name == element).count()
    }

    fn has_texts(&self, texts: &[&str]) {
        for text in texts {
            assert!(
                self.texts.iter().any(|t| t == text),
                "{text}: {:?}",
                self.texts
            );
        }
    }
}

/// Rank 0 of a job that has no other rank must not wait for one. `shuffle` needs no other.
#[test]
fn programs_refuse_a_job_of_one_rank() {
    for (name, said) in [
        (
            "block_write",
            "a client and at least one replica are needed",
        ),
        ("copies", "a transfer has two ranks"),
        ("remote_memory", "the memory has 2 to 64 ranks, not 1"),
        ("rendezvous", "there must be 2 to 33 ranks, not 1"),
        ("rpc", "a server and a rank with clients are needed"),
    ] {
        let begin = Instant::now();
        let mut command = rank_by_hand(&[], name, (0, 1), free_port());
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{name}: {output:?}");
        assert!(error.contains(said), "{name}: {error}");
        assert!(begin.elapsed() < Duration::from_secs(20), "{name}");
    }
}

/// The other programs' figures are read where their values are tested.
#[test]
fn programs_draw_what_they_did() {
    for (name, arguments, texts) in [
        (
            "shuffle",
            "--ranks 3 --splits 3 --records 300 --partitions 3 --rounds 1",
            &[
                "rank 0",
                "rank 2",
                "map",
                "fetch by READ",
                "sort",
                "fetch by message",
            ][..],
        ),
        (
            "block_write",
            "--block-bytes 100000 --rounds 1",
            &["rank 0", "rank 3", "RDMA", "TCP"],
        ),
        (
            "rendezvous",
            "--ranks 3 --tensors 2 --elements 100 --steps 2",
            &["rank 0", "rank 2", "READ", "message"],
        ),
        (
            "copies",
            "--bytes 1000,10000 --transfers 2",
            &["staged", "shared", "registered", "direct"],
        ),
    ] {
        let svg = folder("drawings").join("figure.svg");
        let drawn = ["--svg", svg.to_str().unwrap()];
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let output = example(name, &[&arguments[..], &drawn].concat());
        assert!(output.status.success(), "{name}: {output:?}");
        let drawing = Drawing::read(&svg);
        drawing.has_texts(texts);
        // What is drawn, and its place in the legend.
        let shapes = drawing.count("polyline") + drawing.count("rect");
        assert!(shapes >= 2 * (texts.len() - 2), "{name}");
    }
}
