//! What an operation costs when many pairs are in use, and what memory an idle pair takes: `cargo bench --bench pairs`.
//!
//! Pairs of one process, on one software ConnectX. An operation is a signaled 64-byte write and the wait for its completion, on the pairs in
//! turn. The cost is CPU time of the whole process: the application, its stream, the engine and the threads of the library. Each row is
//! the median of some rounds. Memory is resident bytes, before and after the pairs are made and connected. Every figure is taken in a process of
//! its own. The figures to reach: twice the cost of one pair with 1,000 pairs, and 64 KiB for a pair of depth 16.
#![allow(unsafe_code)] // the CPU clock of the process

use std::process::Command;
use std::time::{Duration, Instant};

use doorbell::{
    Access, Device, Endpoint, EndpointConfig, Executor, HostStream, ProtectionDomain, QueueKind,
    Region, Work,
};

const ROUNDS: usize = 15;
const OPERATIONS: usize = 4000;
/// Operations queued on a stream before the application waits for them.
const BATCH: usize = 200;
const SOON: Option<Duration> = Some(Duration::from_secs(60));

struct Pair {
    a: Endpoint,
    _b: Endpoint,
}

impl Pair {
    fn new(domain: &ProtectionDomain, depth: u32) -> Pair {
        let config = EndpointConfig::default()
            .send_depth(depth)
            .recv_depth(depth);
        let mut a = Endpoint::new(domain, &config).expect("endpoint");
        let mut b = Endpoint::new(domain, &config).expect("endpoint");
        a.connect(&b.address()).expect("connect");
        b.connect(&a.address()).expect("connect");
        Pair { a, _b: b }
    }
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a timespec of ours, which the call fills.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0, "this system has no CPU clock for processes");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0usize) * 4096
}

/// Nanoseconds of CPU and of wall time an operation.
fn cost(path: &str, on_stream: bool, count: usize) -> (u64, u64) {
    let device = Device::open(&format!("softcx,path={path}")).expect("device");
    let domain = device.protection_domain();
    let region = Region::alloc(&domain, 4096, Access::ALL).expect("region");
    let remote = region.remote();
    let mut pairs: Vec<Pair> = (0..count).map(|_| Pair::new(&domain, 16)).collect();
    let stream = HostStream::new("pairs").expect("stream");
    let mut next = 0;
    let mut batch = |operations: usize| {
        for _ in 0..operations {
            let endpoint = &mut pairs[next % count].a;
            next += 1;
            let local = [region.slice(0, 64).expect("slice")];
            let to = remote.slice(64, 64).expect("slice");
            let work = Work::write(&local, to);
            if on_stream {
                endpoint.stream_queue_send(&stream, &work).expect("send");
                endpoint
                    .stream_wait_cq(&stream, QueueKind::Send)
                    .expect("wait");
                // The depth of one pair bounds what is queued.
                if next % BATCH.min(count * 8) == 0 {
                    stream.synchronize(SOON).expect("synchronize");
                }
            } else {
                endpoint.post_send(&work).expect("send");
                endpoint.wait_cq(QueueKind::Send, SOON).expect("completion");
            }
        }
        stream.synchronize(SOON).expect("synchronize");
    };
    batch(2 * count.max(OPERATIONS));
    let mut rounds: Vec<(u64, u64)> = (0..ROUNDS)
        .map(|_| {
            let (began, before) = (Instant::now(), cpu_time());
            batch(OPERATIONS);
            let each = |time: Duration| time.as_nanos() as u64 / OPERATIONS as u64;
            (each(cpu_time() - before), each(began.elapsed()))
        })
        .collect();
    rounds.sort_unstable();
    rounds[ROUNDS / 2]
}

/// Resident bytes of an idle pair.
fn memory(depth: u32) -> usize {
    const PAIRS: usize = 1000;
    let device = Device::open("softcx,path=direct").expect("device");
    let domain = device.protection_domain();
    let first = Pair::new(&domain, depth);
    let before = resident_bytes();
    let pairs: Vec<Pair> = (0..PAIRS).map(|_| Pair::new(&domain, depth)).collect();
    let each = (resident_bytes() - before) / PAIRS;
    drop((first, pairs));
    each
}

/// The figures of one row, taken by a process of its own.
fn row(arguments: &[&str]) -> Vec<u64> {
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program).args(arguments).output().expect("run");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace()
        .map(|word| word.parse().expect("a figure"))
        .collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["memory", depth] => return println!("{}", memory(depth.parse().expect("a depth"))),
        ["cost", path, caller, count] => {
            let (cpu, wall) = cost(path, caller == "stream", count.parse().expect("a count"));
            return println!("{cpu} {wall}");
        }
        _ => {}
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load: {}", load.trim());
    println!(
        "ns of CPU an operation (of wall time)       1 pair         100 pairs        1000 pairs    ratio"
    );
    for (path, caller) in [
        ("direct", "caller"),
        ("direct", "stream"),
        ("proxy", "stream"),
    ] {
        let [one, some, many] =
            ["1", "100", "1000"].map(|count| row(&["cost", path, caller, count]));
        let text = |row: &[u64]| format!("{} ({})", row[0], row[1]);
        println!(
            "  {:32} {:>15} {:>17} {:>17} {:>8.2}",
            format!("{path}, {caller} rings and waits"),
            text(&one),
            text(&some),
            text(&many),
            many[0] as f64 / one[0] as f64
        );
    }
    println!("KiB resident of an idle pair");
    for depth in ["128", "16"] {
        println!(
            "  depth {depth:>3} {:>32.1}",
            row(&["memory", depth])[0] as f64 / 1024.0
        );
    }
}
