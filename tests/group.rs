//! The ring of `examples/ring.rs` as jobs of processes: with torchrun's variables, under torchrun, `mpirun` and `srun`, and with one rank killed.
//!
//! The test starts itself again as each rank.
#![cfg(all(feature = "group", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // sends signals

mod rig;
#[path = "../examples/ring.rs"]
mod ring;
mod waived;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rig::{Random, from_env};

use doorbell::{
    Access, Cause, DataType, Device, Error, Executor, Group, GroupConfig, HostStream,
    LaunchEnvironment, MatcherConfig, MessageConfig, QueueKind, ReduceOp, Reduction, Region, Token,
    Work,
};

/// Set for a rank: the number of rounds.
const ROUNDS: &str = "DOORBELL_TEST_RING";
/// Set for a job in which a rank kills itself after a few rounds: which one.
const KILLED: &str = "DOORBELL_TEST_KILLED";
const LEN_BYTES: u64 = 40_000;
/// Far longer than any job of these tests, even under a sanitizer: a job that has not ended by then hangs.
const LIMIT: Duration = Duration::from_secs(90);
/// Time in which the other ranks have to end: the deadlines of their waits are 30 s.
const NOTICED: Duration = Duration::from_secs(20);

/// A rank: does nothing unless the process was started as one.
#[test]
fn member() {
    let Ok(rounds) = std::env::var(ROUNDS) else {
        return;
    };
    // A job that torchrun starts again is whole.
    let restarted = std::env::var("TORCHELASTIC_RESTART_COUNT").is_ok_and(|count| count != "0");
    let killed = std::env::var(KILLED).ok().filter(|_| !restarted);
    let killed = killed.map(|rank| rank.parse().unwrap());
    let after = |rank, round| {
        if Some(rank) == killed && round == 3 {
            let own = std::process::id().to_string();
            Command::new("kill").args(["-9", &own]).status().unwrap();
            thread::sleep(LIMIT);
        }
    };
    let done = ring::ring(rounds.parse().unwrap(), LEN_BYTES, LIMIT / 3, after);
    // Bypasses the harness, which would print a backtrace.
    if let Err(error) = done {
        // One write: mpirun puts what the ranks say side by side.
        let said = format!("ended with: {error:#}\n");
        std::io::stderr().write_all(said.as_bytes()).unwrap();
        std::process::exit(1);
    }
}

/// Set for a rank that goes on with the survivors: how many ranks are left at the end.
const LEFT: &str = "DOORBELL_TEST_LEFT";
/// Operations of the last group.
const LAST_ROUNDS: u32 = 50;

/// A rank: does nothing unless the process was started as one.
#[test]
fn survivor() {
    let Ok(left) = std::env::var(LEFT) else {
        return;
    };
    let domain = Device::open("softcx").unwrap().protection_domain();
    let environment = LaunchEnvironment::from_env().unwrap();
    // Where the others do not find rank 0 they say why, before rank 0 gives up and the launcher ends them.
    let seconds = if environment.rank() == 0 { 40 } else { 20 };
    let config = GroupConfig::default().timeout(Duration::from_secs(seconds));
    let mut group = Group::join(&environment, &domain, &config).unwrap();
    group.barrier().unwrap();
    tell("joined\n");
    let left = left.parse().unwrap();
    let mut shrunk = 0;
    while let Err(error) = reduce(&group, left) {
        // A rank may be killed while the others agree.
        while let Err(error) = group.shrink().map(|(smaller, _)| group = smaller) {
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
        }
        shrunk += 1;
        assert!(shrunk < 4, "{error}");
    }
    group.barrier().unwrap();
    let size = group.size();
    group.leave().unwrap();
    tell(&format!("ended with {size} ranks\n"));
    std::process::exit(0);
}

/// Says something to the test that has started this process, at once.
fn tell(what: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(what.as_bytes())
        .and_then(|()| out.flush())
        .unwrap();
}

/// Bytes of each of the four memories of the operations: longer than an eager message, for three ranks and more.
const SHARE: u64 = 60_000;

/// Carries collective operations out, one after the other: until one fails, or some times if there are only so many ranks.
fn reduce(group: &Group, left: u32) -> doorbell::Result<()> {
    let size = group.size();
    let stream = HostStream::new("survivor")?;
    let region = Region::alloc(group.domain(), 4 * SHARE, Access::ALL)?;
    let memory = |at, len| region.slice(at * SHARE, len);
    let ones = vec![1_i64; SHARE as usize / 8];
    region.write_values(0, &ones)?;
    let mut communicator = group.communicator(None, 1, &MessageConfig::default())?;
    let sum = Reduction::new(DataType::I64, ReduceOp::Sum);
    let (block, lens) = (SHARE / 40 * 8, vec![SHARE / 40 * 8; size as usize]);
    let whole = block * u64::from(size);
    let operations = [
        communicator.all_reduce(&memory(0, 8)?, &memory(1, 8)?, sum, None)?,
        communicator.all_reduce(&memory(0, SHARE)?, &memory(1, SHARE)?, sum, None)?,
        communicator.all_gather(None, &memory(2, whole)?, &lens, None)?,
        communicator.all_to_all(&memory(2, whole)?, &memory(3, whole)?, None)?,
        communicator.broadcast(&memory(3, SHARE)?, size - 1, None)?,
        communicator.barrier(None)?,
    ];
    for round in 0_u32.. {
        if size == left && round == LAST_ROUNDS {
            break;
        }
        let mut tickets = Vec::new();
        for operation in &operations {
            tickets.push(communicator.launch(&stream, operation)?);
        }
        for ticket in tickets {
            ticket.wait(Some(LIMIT))?;
        }
        let mut sums = vec![0; SHARE as usize / 8];
        region.read_values(SHARE, &mut sums)?;
        assert!(sums.iter().all(|sum| *sum == i64::from(size)));
        region.fill(SHARE, SHARE, 0)?;
    }
    communicator.finish(Some(LIMIT))
}

/// Kills two of five processes, and stops some for a while, at random moments.
#[test]
fn survivors_of_killed_processes_go_on() {
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| u64::from(now.subsec_nanos()));
    let first = from_env("DOORBELL_SEED", nanos);
    for seed in first..first + from_env("DOORBELL_KILLS", 4) / 2 {
        let mut random = Random(seed);
        let mut job = job_of(5, |command| {
            command.args(SURVIVOR).env(LEFT, "3");
        });
        job[0].wait_for("joined");
        while job.len() > 3 {
            thread::sleep(Duration::from_millis(random.below(500)));
            // Without the rank that hosts the store the others cannot agree, so that one is only stopped.
            let which = random.below(job.len() as u64) as usize;
            let is_stopped = random.below(2) == 0;
            if is_stopped {
                job[which].signal(libc::SIGSTOP);
                thread::sleep(Duration::from_millis(random.below(1500)));
            }
            if which > 0 && random.below(3) > 0 {
                drop(job.remove(which));
            } else if is_stopped {
                job[which].signal(libc::SIGCONT);
            }
        }
        for process in job {
            let output = process.end(LIMIT);
            let said = text(&output);
            assert!(output.status.success(), "DOORBELL_SEED={seed}: {said}");
            let ended = said.contains("ended with 3 ranks");
            assert!(ended, "DOORBELL_SEED={seed}: {said}");
        }
    }
}

/// Set for a rank that exchanges addresses through the store of its launcher.
const EXCHANGES: &str = "DOORBELL_TEST_EXCHANGES";

/// A rank: does nothing unless the process was started as one.
#[test]
fn exchanger() {
    if std::env::var(EXCHANGES).is_err() {
        return;
    }
    let domain = Device::open("softcx").unwrap().protection_domain();
    let environment = LaunchEnvironment::from_env().unwrap();
    // A later group of the same job has values of its own.
    for round in 0..2 {
        let config = GroupConfig::default();
        let group = Group::join(&environment, &domain, &config).unwrap();
        let (rank, size, store) = (group.rank(), group.size(), group.store());
        let list = store.gather(&[rank as u8], LIMIT).unwrap();
        assert_eq!(list.concat(), (0..size as u8).collect::<Vec<_>>());
        reduce_once(&group);
        let exchanges = store.launcher_exchanges();
        group.leave().unwrap();
        tell(&format!("round {round} had {exchanges} exchanges\n"));
    }
    std::process::exit(0);
}

/// A sum of all ranks, with a communicator and a matcher of all of them.
fn reduce_once(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    let stream = HostStream::new("exchanger").unwrap();
    let region = Region::alloc(group.domain(), 16, Access::ALL).unwrap();
    let memory = |at| region.slice(at, 8).unwrap();
    region.write_values(0, &[i64::from(rank) + 1]).unwrap();
    let config = MessageConfig::default();
    let mut communicator = group.communicator(None, 1, &config).unwrap();
    drop(group.matcher(None, 2, &MatcherConfig::default()).unwrap());
    let sum = Reduction::new(DataType::I64, ReduceOp::Sum);
    let operation = communicator.all_reduce(&memory(0), &memory(8), sum, None);
    let ticket = communicator.launch(&stream, &operation.unwrap()).unwrap();
    ticket.wait(Some(LIMIT)).unwrap();
    let mut total = [0_i64];
    region.read_values(8, &mut total).unwrap();
    assert_eq!(total, [i64::from(size * (size + 1) / 2)]);
    communicator.finish(Some(LIMIT)).unwrap();
    group.barrier().unwrap();
}

const MEMBER: [&str; 3] = ["--exact", "member", "--nocapture"];
const SURVIVOR: [&str; 3] = ["--exact", "survivor", "--nocapture"];

/// A child process that is killed when the test ends.
struct Rank(Option<Child>);

impl Rank {
    fn start(command: &mut Command) -> Rank {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        Rank(Some(child.unwrap()))
    }

    /// Reads what it prints up to the end of a line with that text. Byte by byte, so that the rest stays for the next reader.
    fn wait_for(&mut self, text: &str) {
        let stdout = self.0.as_mut().unwrap().stdout.as_mut().unwrap();
        let mut lines = BufReader::with_capacity(1, stdout).lines();
        assert!(
            lines.any(|line| line.unwrap().contains(text)),
            "no `{text}`"
        );
    }

    /// Sends it a signal.
    fn signal(&self, number: i32) {
        let child = self.0.as_ref().unwrap();
        // SAFETY: sends a signal to a child that is not waited for yet.
        assert_eq!(unsafe { libc::kill(child.id() as i32, number) }, 0);
    }

    fn end(mut self, within: Duration) -> Output {
        let began = Instant::now();
        let child = self.0.as_mut().unwrap();
        while child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < within, "it hangs");
            thread::sleep(Duration::from_millis(5));
        }
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A job that is described by torchrun's variables.
fn torchrun(size: u32, rounds: u64, killed: Option<u32>) -> Vec<Rank> {
    job_of(size, |command| {
        command.args(MEMBER).env(ROUNDS, rounds.to_string());
        killed.map(|killed| command.env(KILLED, killed.to_string()));
    })
}

fn job_of(size: u32, prepare: impl Fn(&mut Command)) -> Vec<Rank> {
    // This process's own address, and ports of this call's. None that was bound to find out that it is free: a child that another test
    // forks just then would keep it.
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, b, c, d] = std::process::id().to_be_bytes();
    let address = format!("127.{b}.{c}.{d}");
    // The store takes the port behind that of torch.
    let port = NEXT.fetch_add(2, Ordering::Relaxed);
    let start = |rank: u32| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("MASTER_ADDR", &address)
            .env("MASTER_PORT", port.to_string())
            .env("DOORBELL_TOKEN", "of this test");
        prepare(&mut command);
        Rank::start(&mut command)
    };
    (0..size).map(start).collect()
}

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!(
        "{}{}",
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(err)
    )
}

/// What every rank prints at the end of a successful job.
fn good(rank: u32, size: u32, rounds: u64) -> String {
    let total = rounds * u64::from(size) * LEN_BYTES;
    format!("rank {rank} of {size}: {total} bytes, all of them right")
}

#[test]
fn ring_starts_from_torchrun_variables() {
    let began = torchrun(4, 20, None);
    for (rank, process) in (0..).zip(began) {
        let output = process.end(LIMIT);
        let said = text(&output);
        assert!(output.status.success(), "rank {rank}: {said}");
        assert!(said.contains(&good(rank, 4, 20)), "rank {rank}: {said}");
    }
}

/// Kills an ordinary rank, and the one that hosts the store.
#[test]
fn every_rank_names_the_killed_rank() {
    for killed in [2, 0] {
        let mut job = torchrun(4, u64::MAX >> 40, Some(killed));
        let first = job.remove(killed as usize).end(LIMIT);
        assert!(!first.status.success(), "{}", text(&first));
        for process in job {
            let output = process.end(NOTICED);
            let said = text(&output);
            assert_eq!(output.status.code(), Some(1), "{said}");
            let named = format!("ended with: rank {killed} of the group: ");
            assert!(said.contains(&named), "{said}");
        }
    }
}

fn mpirun(rounds: u64, more: &[&str], killed: Option<u32>) -> Output {
    mpirun_of(4, more, |command| {
        command.args(MEMBER).env(ROUNDS, rounds.to_string());
        killed.map(|killed| command.env(KILLED, killed.to_string()));
    })
}

fn mpirun_of(size: u32, more: &[&str], prepare: impl Fn(&mut Command)) -> Output {
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "-n"])
        .arg(size.to_string())
        .args(more)
        .arg(std::env::current_exe().unwrap());
    // Variables of a launcher of this process are not for the job.
    for name in [
        "RANK",
        "WORLD_SIZE",
        "DOORBELL_RANK",
        "DOORBELL_MASTER_ADDR",
    ] {
        command.env_remove(name);
    }
    prepare(&mut command);
    Rank::start(&mut command).end(LIMIT)
}

fn has_mpirun(test: &str) -> bool {
    let version = Command::new("mpirun").arg("--version").output();
    match version {
        Ok(output) if text(&output).contains("Open MPI") => return true,
        Ok(_) => waived::waived(test, "mpirun is not that of Open MPI"),
        Err(error) => waived::waived(test, &format!("mpirun: {error}")),
    }
    false
}

#[test]
fn ring_starts_under_mpirun() {
    if !has_mpirun("ring_starts_under_mpirun") {
        return;
    }
    let output = mpirun(20, &[], None);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for rank in 0..4 {
        assert!(said.contains(&good(rank, 4, 20)), "rank {rank}: {said}");
    }
}

/// As on several hosts, where no folder is common to all ranks: rank 0 tells the PMIx server where it is.
#[test]
fn ring_starts_under_mpirun_by_pmix() {
    let test = "ring_starts_under_mpirun_by_pmix";
    if !has_mpirun(test) {
        return;
    }
    let without_folder = ["env", "-u", "PMIX_SERVER_TMPDIR"];
    let output = mpirun(20, &without_folder, None);
    let said = text(&output);
    if said.contains("there is no libpmix.so.2") {
        return waived::waived(test, "there is no libpmix.so.2");
    }
    assert!(output.status.success(), "{said}");
    for rank in 0..4 {
        assert!(said.contains(&good(rank, 4, 20)), "rank {rank}: {said}");
    }
}

/// Whether the ranks share a folder or not.
#[test]
fn addresses_go_through_the_pmix_server() {
    let test = "addresses_go_through_the_pmix_server";
    if !has_mpirun(test) {
        return;
    }
    let without_folder = ["env", "-u", "PMIX_SERVER_TMPDIR"];
    for (size, more) in [(4, &[][..]), (3, &without_folder)] {
        let output = mpirun_of(size, more, |command| {
            command.args(["--exact", "exchanger", "--nocapture"]);
            command.env(EXCHANGES, "1");
        });
        let said = text(&output);
        if said.contains("there is no libpmix.so.2") {
            return waived::waived(test, "there is no libpmix.so.2");
        }
        assert!(output.status.success(), "{size}: {said}");
        check_exchanges(&said, size, 2);
    }
}

/// The queues of a communicator and a matcher.
fn check_exchanges(said: &str, ranks: u32, exchanges: u32) {
    for round in 0..2 {
        let good = format!("round {round} had {exchanges} exchanges");
        assert_eq!(said.matches(&good).count(), ranks as usize, "{said}");
    }
}

/// Slurm's own launcher, on one node and on two whose names are no hosts. With PMIx, rank 0 and the queues are found by the job's servers; without it, rank 0 at the
/// address that a step of one node has.
#[test]
fn ring_and_exchanges_start_under_srun() {
    let test = "ring_and_exchanges_start_under_srun";
    let srun = |nodes: u32, mpi: &str, more: &[&str], set: (&str, &str)| {
        let mut command = Command::new("scripts/slurm");
        command.args([
            &nodes.to_string(),
            "srun",
            "--ntasks=4",
            "--kill-on-bad-exit=1",
        ]);
        command.args([format!("--nodes={nodes}"), format!("--mpi={mpi}")]);
        command.arg(std::env::current_exe().unwrap()).args(more);
        command.env(set.0, set.1);
        // Where this process belongs to a job itself.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLURM_")) {
            command.env_remove(name);
        }
        let output = Rank::start(&mut command).end(LIMIT);
        (output.status.code(), text(&output))
    };
    let exchanger = ["--exact", "exchanger", "--nocapture"];
    for (nodes, mpi, exchanges) in [(2, "pmix", 2), (1, "none", 0)] {
        let (code, said) = srun(nodes, mpi, &MEMBER, (ROUNDS, "20"));
        let unavailable = code == Some(69) || said.contains("Invalid MPI type 'pmix'");
        if unavailable {
            return waived::waived(
                test,
                "slurmctld, slurmd, slurm-client, munge or libpmix-dev is missing",
            );
        }
        assert_eq!(code, Some(0), "{nodes} {mpi}: {said}");
        for rank in 0..4 {
            let good = good(rank, 4, 20);
            assert!(said.contains(&good), "{nodes} {mpi}: rank {rank}: {said}");
        }
        let (code, said) = srun(nodes, mpi, &exchanger, (EXCHANGES, "1"));
        assert_eq!(code, Some(0), "{nodes} {mpi}: {said}");
        check_exchanges(&said, 4, exchanges);
    }
    // Without PMIx nothing else tells where the first node is.
    let (code, said) = srun(2, "none", &SURVIVOR, (LEFT, "4"));
    assert!(code != Some(0), "{said}");
    assert!(
        said.contains("`n1:") && said.contains("DOORBELL_MASTER_ADDR"),
        "{said}"
    );
}

/// The store of torchrun's agent, as torch itself makes it: rank 0 writes there where it is, and all ranks their addresses.
#[test]
fn ring_starts_by_the_store_of_torch() {
    let test = "ring_starts_by_the_store_of_torch";
    const AGENT: &str = "import sys, datetime
from torch.distributed import TCPStore
store = TCPStore('127.0.0.1', 0, None, True, datetime.timedelta(seconds=60), False)
print(store.port, flush=True)
sys.stdin.read()";
    // The interpreter of the system's packages.
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", AGENT]).stdin(Stdio::piped());
    python.stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut agent) = python.spawn() else {
        return waived::waived(test, "there is no /usr/bin/python3");
    };
    let mut port = String::new();
    let mut said = BufReader::new(agent.stdout.take().unwrap());
    said.read_line(&mut port).unwrap();
    let agent = Rank(Some(agent));
    let Ok(port) = port.trim().parse::<u16>() else {
        return waived::waived(test, "torch is not installed (Debian: python3-torch)");
    };
    let job = |prepare: &dyn Fn(&mut Command)| {
        job_of(3, |command| {
            command
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("TORCHELASTIC_USE_AGENT_STORE", "True")
                .env("TORCHELASTIC_RUN_ID", "a job");
            prepare(command);
        })
    };
    let ring = job(&|command| {
        command.args(MEMBER).env(ROUNDS, "20");
    });
    for (rank, process) in (0..).zip(ring) {
        let output = process.end(LIMIT);
        let said = text(&output);
        assert!(output.status.success(), "rank {rank}: {said}");
        assert!(said.contains(&good(rank, 3, 20)), "rank {rank}: {said}");
    }
    // And other addresses.
    let exchange = job(&|command| {
        command.args(["--exact", "exchanger", "--nocapture"]);
        // Another job's keys.
        command
            .env(EXCHANGES, "1")
            .env("TORCHELASTIC_RESTART_COUNT", "1");
    });
    for process in exchange {
        let output = process.end(LIMIT);
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        check_exchanges(&said, 1, 2);
    }
    drop(agent);
}

/// torchrun itself, which ends a job of which one rank was killed, and starts it again.
#[test]
fn ring_starts_under_torchrun_and_again_after_a_rank_was_killed() {
    let test = "ring_starts_under_torchrun_and_again_after_a_rank_was_killed";
    let logs = std::env::temp_dir().join(format!("doorbell-torchrun-{}", std::process::id()));
    // The interpreter of the system's packages. Only standard output is redirected: torch 1.13 knows neither none nor both with Python 3.11.
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-m", "torch.distributed.run"])
        // A port of its own. `--standalone` of torch 1.13 takes port 29400 for every job of the host.
        .args(["--rdzv_backend", "c10d"])
        .args(["--rdzv_endpoint", "localhost:0"])
        .args(["--no_python", "--nproc_per_node", "4"])
        .args([
            "--monitor_interval",
            "1",
            "--max_restarts",
            "1",
            "-r",
            "1",
            "-t",
            "1",
            "--log_dir",
        ])
        .arg(&logs)
        .arg(std::env::current_exe().unwrap())
        .args(MEMBER)
        .env(ROUNDS, "20")
        .env(KILLED, "2");
    let mut run = || {
        let output = Rank::start(&mut command).end(LIMIT);
        let _ = std::fs::remove_dir_all(&logs);
        let said = text(&output);
        (output, said)
    };
    let (mut output, mut said) = run();
    // The agent looks for a free port and leaves it. Before rank 0 binds it, another process may have got it.
    for _ in 0..2 {
        if said.contains("Address already in use") {
            (output, said) = run();
        }
    }
    if said.contains("No module named 'torch'") {
        return waived::waived(test, "torch is not installed (Debian: python3-torch)");
    }
    assert!(output.status.success(), "{said}");
    for rank in 0..4 {
        let good = good(rank, 4, 20);
        assert_eq!(said.matches(&good).count(), 1, "rank {rank}: {said}");
    }
    let named = "ended with: rank 2 of the group: ";
    assert!(said.contains(named), "{said}");
}

#[test]
fn every_rank_names_the_rank_killed_under_mpirun() {
    if !has_mpirun("every_rank_names_the_rank_killed_under_mpirun") {
        return;
    }
    // Otherwise mpirun itself ends the others first.
    let output = mpirun(u64::MAX >> 40, &["--enable-recovery"], Some(1));
    let said = text(&output);
    let named = said.matches("ended with: rank 1 of the group: ").count();
    assert_eq!(named, 3, "{said}");
}

/// Joins a group of two ranks in this process, which meets at that port.
fn join(rank: u32, port: u16) -> Group {
    let [_, b, c, d] = std::process::id().to_be_bytes();
    let address = format!("127.{b}.{c}.{d}:{port}");
    let token = Token::new("of this test");
    let environment = LaunchEnvironment::new(rank, 2, &address, token).unwrap();
    let domain = Device::open("softcx").unwrap().protection_domain();
    Group::join(&environment, &domain, &GroupConfig::default()).unwrap()
}

/// The end of the store is no failure of a rank that has left.
#[test]
fn taken_endpoint_works_after_its_rank_has_left() {
    let one = |rank| {
        let group = join(rank, 19_998);
        let endpoint = group.take_endpoint(1 - rank).unwrap();
        group.leave().unwrap();
        endpoint
    };
    let (mut a, mut b) = thread::scope(|scope| {
        let b = scope.spawn(|| one(1));
        (one(0), b.join().unwrap())
    });
    // Time for what the ends of the connections may cause.
    thread::sleep(Duration::from_millis(100));
    assert_eq!((a.failure(), b.failure()), (None, None));
    let memory = Region::alloc(b.domain(), 64, Access::ALL).unwrap();
    b.post_recv(1, &[memory.slice(0, 64).unwrap()]).unwrap();
    a.post_send(&Work::send_inline(&[7; 64])).unwrap();
    b.wait_cq(QueueKind::Recv, Some(LIMIT)).unwrap();
    assert!(memory.is_filled_with(0, 64, 7).unwrap());
}

/// Otherwise a wait of its own for a message of another rank, whose endpoints are aborted, would not end.
#[test]
fn rank_that_drops_its_group_has_its_own_endpoints_aborted() {
    let one = |rank| {
        let group = join(rank, 19_997);
        let endpoint = group.take_endpoint(1 - rank).unwrap();
        group.barrier().unwrap();
        (group, endpoint)
    };
    let ((zero, a), (one, b)) = thread::scope(|scope| {
        let other = scope.spawn(|| one(1));
        (one(0), other.join().unwrap())
    });
    drop(one);
    for endpoint in [&a, &b] {
        let began = Instant::now();
        while endpoint.failure().is_none() && began.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(endpoint.failure().unwrap().cause, Cause::Rank(1));
    }
    assert!(zero.check().is_err());
}

/// The ticket, the stream and a poll name the dead rank, without a call to the group.
#[test]
fn waits_for_a_dead_rank_name_it() {
    let one = |rank| {
        let mut group = join(rank, 19_999);
        let peer = 1 - group.rank();
        group.endpoint(peer).unwrap();
        group.barrier().unwrap();
        if group.rank() == 1 {
            // The other rank usually waits by then.
            thread::sleep(Duration::from_millis(300));
            return;
        }
        // Refused if the group knows already.
        let Ok(endpoint) = group.endpoint(peer) else {
            return;
        };
        let stream = HostStream::new("waits").unwrap();
        let names = |error: Error| {
            let (Error::Work(work)
            | Error::Asynchronous {
                work: Some(work), ..
            }) = &error
            else {
                panic!("{error:?}");
            };
            assert_eq!(work.cause, Cause::Rank(1), "{error}");
            assert!(error.to_string().contains("rank 1 of the group"), "{error}");
        };
        // Once the rank is found dead, these fail as well, and name it.
        let queued = endpoint.post_recv(1, &[]).and_then(|received| {
            Ok((received, endpoint.stream_wait_cq(&stream, QueueKind::Recv)?))
        });
        match queued {
            Ok((received, waits)) => {
                names(stream.synchronize(Some(LIMIT)).unwrap_err());
                names(received.wait(Some(LIMIT)).unwrap_err());
                names(waits.wait(Some(LIMIT)).unwrap_err());
            }
            Err(error) => names(error),
        }
        names(endpoint.wait_cq(QueueKind::Recv, Some(LIMIT)).unwrap_err());
    };
    thread::scope(|scope| {
        scope.spawn(|| one(1));
        one(0);
    });
}
