//! How long a large group takes to meet on one host: `cargo bench --bench group`. The figure to reach: 1,000 ranks have joined the store and
//! have the addresses of all within 5 s.
//!
//! Every rank is a thread of this process with a connection of its own, and so is the store: that takes three file descriptors a rank, so
//! that `ulimit -n 4096` may have to come first.
//!
//! Before that, jobs of `DOORBELL_BENCH_PROCESSES` processes (32 if that is not set) make communicators of all ranks. The addresses of their queues go in turns through the
//! group's own store and through the store of a launcher: PMIx where there is `mpirun` of Open MPI, torch's `TCPStore` where `/usr/bin/python3` has torch.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group};
use doorbell::{
    Address, Device, Group, GroupConfig, LaunchEnvironment, MessageConfig, Store, Token,
};

const SOON: Duration = Duration::from_secs(60);
const SIZE: u32 = 1000;

/// Until the last rank had the addresses of all.
fn meet() -> Duration {
    let free = TcpListener::bind("127.0.0.1:0").expect("bind");
    let at = free.local_addr().expect("getsockname").to_string();
    drop(free);
    let began = Instant::now();
    let rank = move |environment: LaunchEnvironment| {
        let store = Store::join(&environment, SOON).expect("join");
        let address = [environment.rank() as u8; Address::BYTES];
        let list = store.gather(&address, SOON).expect("gather");
        let took = began.elapsed();
        for (rank, bytes) in list.iter().enumerate() {
            assert_eq!(bytes, &[rank as u8; Address::BYTES]);
        }
        store.leave(SOON).expect("leave");
        took
    };
    let start = |number| {
        let environment = LaunchEnvironment::new(number, SIZE, &at, Token::new("bench"))
            .expect("launch environment");
        let builder = thread::Builder::new().stack_size(256 << 10);
        builder
            .spawn(move || rank(environment))
            .expect("start of a thread")
    };
    let threads: Vec<_> = (0..SIZE).map(start).collect();
    let times = threads.into_iter().map(|t| t.join().expect("a rank"));
    times.max().unwrap_or_default()
}

fn ranks(c: &mut Criterion) {
    let mut group = c.benchmark_group("group");
    group.sample_size(10);
    group.bench_function("1,000 ranks join and have the addresses of all", |bench| {
        bench.iter_custom(|rounds| (0..rounds).map(|_| meet()).sum());
    });
    group.finish();
}

criterion_group!(benches, ranks);
/// Set for a process of a job: the name of the launcher's store.
const IN_JOB: &str = "DOORBELL_BENCH_IN_JOB";
/// Set for a process of a job whose launcher has no place for rank 0 but its store: the port of the group that does not use that.
const OWN_PORT: &str = "DOORBELL_BENCH_PORT";
/// Communicators that are made through either store.
const ROUNDS: usize = 9;

/// A rank of a job: makes communicators in turns, and tells how long the slowest rank took.
fn rank_of_job(launcher: &str) {
    let through_launcher = LaunchEnvironment::from_env().expect("launch environment");
    // Without these variables the group does not know of the launcher's store, and finds rank 0 by others.
    let hidden = ["PMIX_NAMESPACE", "TORCHELASTIC_USE_AGENT_STORE"];
    let lookup = |name: &str| match name {
        "DOORBELL_MASTER_ADDR" => std::env::var(OWN_PORT).ok().map(|_| "127.0.0.1".into()),
        "DOORBELL_MASTER_PORT" => std::env::var(OWN_PORT).ok(),
        _ => std::env::var(name).ok().filter(|_| !hidden.contains(&name)),
    };
    let own = LaunchEnvironment::from_vars(&lookup).expect("launch environment");
    let domain = Device::open("softcx").expect("device").protection_domain();
    let config = GroupConfig::default().timeout(SOON);
    let join = |place| Group::join(&place, &domain, &config).expect("join");
    let groups = [own, through_launcher].map(join);
    let mut times = [[Duration::ZERO; ROUNDS]; 2];
    for round in 0..ROUNDS {
        for (group, times) in groups.iter().zip(&mut times) {
            groups[0].barrier().expect("barrier");
            let began = Instant::now();
            let config = MessageConfig::default();
            let made = group.communicator(None, round as u64, &config);
            let took = (began.elapsed().as_nanos() as u64).to_le_bytes();
            drop(made.expect("communicator"));
            let all = groups[0].store().gather(&took, SOON).expect("gather");
            let nanos = all
                .iter()
                .map(|took| took[..].try_into().map_or(0, u64::from_le_bytes));
            times[round] = Duration::from_nanos(nanos.max().unwrap_or_default());
        }
    }
    let exchanges = groups.each_ref().map(|g| g.store().launcher_exchanges());
    assert_eq!(exchanges, [0, ROUNDS as u32]);
    if groups[0].rank() == 0 {
        let [own, other] = times.map(|mut times| {
            times.sort_unstable();
            times[ROUNDS / 2]
        });
        println!(
            "a communicator of {} processes: own store {own:.2?}, {launcher} {other:.2?}, ratio {:.2}",
            groups[0].size(),
            other.as_secs_f64() / own.as_secs_f64(),
        );
    }
    for group in groups {
        group.leave().expect("leave");
    }
}

fn processes() -> u32 {
    let text = std::env::var("DOORBELL_BENCH_PROCESSES").unwrap_or("32".into());
    text.parse().expect("DOORBELL_BENCH_PROCESSES")
}

fn job_of_mpirun() {
    let own = std::env::current_exe().expect("path of this program");
    let ended = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n"])
        .arg(processes().to_string())
        .arg(own)
        .env(IN_JOB, "PMIx")
        .status();
    match ended {
        Ok(status) => assert!(status.success(), "mpirun: {status}"),
        Err(error) => println!("no job of mpirun: {error}"),
    }
}

/// As torchrun starts processes.
fn job_of_torch() {
    const AGENT: &str = "import sys, datetime
from torch.distributed import TCPStore
store = TCPStore('127.0.0.1', 0, None, True, datetime.timedelta(seconds=60), False)
print(store.port, flush=True)
sys.stdin.read()";
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", AGENT]).stdin(Stdio::piped());
    python.stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut agent) = python.spawn() else {
        return println!("no job of torch: there is no /usr/bin/python3");
    };
    let mut port = String::new();
    if let Some(said) = agent.stdout.take() {
        BufReader::new(said).read_line(&mut port).expect("port");
    }
    let Ok(port) = port.trim().parse::<u16>() else {
        return println!("no job of torch: it is not installed");
    };
    let free = TcpListener::bind("127.0.0.1:0").expect("bind");
    let own_port = free.local_addr().expect("getsockname").port();
    drop(free);
    let start = |rank: u32| {
        Command::new(std::env::current_exe().expect("path of this program"))
            .env(IN_JOB, "TCPStore")
            .env(OWN_PORT, own_port.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", processes().to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .spawn()
            .expect("start of a process")
    };
    let job: Vec<_> = (0..processes()).map(start).collect();
    for mut rank in job {
        assert!(rank.wait().expect("a rank").success());
    }
    // Its end of the pipe is what it waits for.
    drop(agent.stdin.take());
    agent.wait().expect("the agent");
}

fn main() {
    if let Ok(launcher) = std::env::var(IN_JOB) {
        return rank_of_job(&launcher);
    }
    // `cargo test --benches` only looks whether it runs.
    if std::env::args().any(|argument| argument == "--bench") {
        job_of_mpirun();
        job_of_torch();
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
