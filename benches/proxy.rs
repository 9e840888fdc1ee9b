//! What a proxy costs: `cargo bench --bench proxy`. The figures to reach: a hand-off under 1 us at the median, and over 2 million operations
//! a second through one proxy thread.
//!
//! The calling thread is the stream: it stores the trigger and polls the word that counts completions, so that nothing but the proxy is
//! between the two. The hand-off, there and back, is what a round trip through the proxy takes more than one by the direct path, where the
//! same thread drives the device. How long a cache line takes from one of the two CPUs to the other and back, without any of this library,
//! is the first row: a virtual machine's CPUs may be near each other in one run and far apart in the next. Round trips are medians of single ones, not means. Each of the two threads has a CPU to itself, as in
//! earnest: on one, each waits for the other's slice to end.
#![allow(unsafe_code)] // Reason: an executor

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use doorbell::__private::{StreamFailure, Submission, execute};
use doorbell::{
    Access, Device, Endpoint, EndpointConfig, Error, Event, Executor, QueueKind, Region,
    RemoteSlice, Result, Work,
};
use doorbell_wire::bytecode::ProgramOp;

/// A stream that is the calling thread, with the time at which it began its last send.
#[derive(Default)]
struct Calling {
    is_timed: bool,
    began: Mutex<Option<Instant>>,
    took: Mutex<Vec<Duration>>,
}

impl Calling {
    fn carry_out(&self, submission: &Submission) {
        let Submission {
            program,
            owner,
            cookie,
        } = submission;
        owner.started(*cookie);
        if !self.is_timed {
            return owner.finished(*cookie, execute(program, &**owner, *cookie));
        }
        let is_wait = program.ops().any(|op| {
            matches!(
                op,
                ProgramOp::PollGeq { .. } | ProgramOp::PollAnd { .. } | ProgramOp::PollNor { .. }
            )
        });
        if !is_wait {
            *self.began.lock().unwrap() = Some(Instant::now());
        }
        let outcome = execute(program, &**owner, *cookie);
        if is_wait && let Some(began) = self.began.lock().unwrap().take() {
            self.took.lock().unwrap().push(began.elapsed());
        }
        owner.finished(*cookie, outcome);
    }
}

impl doorbell::__private::SealedExecutor for Calling {}

// SAFETY: each program is executed once, in order, before the call returns.
unsafe impl Executor for Calling {
    fn id(&self) -> u64 {
        u64::MAX
    }

    fn name(&self) -> &str {
        "calling"
    }

    fn executes_on_host(&self) -> bool {
        true
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        batch.drain(..).for_each(|one| self.carry_out(&one));
        Ok(())
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.carry_out(&submission);
        Ok(())
    }

    fn record(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn wait_event(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn take_fault(&self) -> Option<Error> {
        None
    }

    fn fail(&self, _failure: StreamFailure) -> bool {
        true
    }

    fn query(&self) -> Result<bool> {
        Ok(true)
    }

    fn synchronize(&self, _timeout: Option<Duration>) -> Result<()> {
        Ok(())
    }
}

/// The first and the last CPU that this process may use.
fn cpus() -> (usize, usize) {
    // SAFETY: a plain array of words, for which zero is the empty set; a place for a set of that size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        set
    };
    // SAFETY: numbers below the size of the set.
    let may = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &set) };
    let mut all = (0..libc::CPU_SETSIZE as usize).filter(may);
    let first = all.next().unwrap_or(0);
    (first, all.next_back().unwrap_or(first))
}

fn pin_to(cpu: usize) {
    // SAFETY: a plain array of words, for which zero is the empty set; a number below its size; the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

struct Ends {
    a: Endpoint,
    _b: Endpoint,
    region: Region,
}

impl Ends {
    fn new(path: &str) -> Ends {
        let (_, last) = cpus();
        let device = Device::open(&format!("softcx,path={path},cpu={last}")).expect("device");
        let domain = device.protection_domain();
        let config = EndpointConfig::default().send_depth(256);
        let mut a = Endpoint::new(&domain, &config).expect("endpoint");
        let mut b = Endpoint::new(&domain, &config).expect("endpoint");
        a.connect(&b.address()).expect("connect");
        b.connect(&a.address()).expect("connect");
        let region = Region::alloc(&domain, 4096, Access::ALL).expect("region");
        Ends { a, _b: b, region }
    }

    fn write(&mut self, stream: &dyn Executor, signaled: bool) {
        let remote = self.region.remote();
        let bytes = [7; 8];
        let work = Work::write_inline(&bytes, RemoteSlice::at(remote.addr, remote.rkey))
            .signaled(signaled);
        self.a.stream_queue_send(stream, &work).expect("send");
        if signaled {
            self.a
                .stream_wait_cq(stream, QueueKind::Send)
                .expect("wait");
        }
    }
}

/// Two threads on the two CPUs hand a word back and forth, each on a line of its own: so many there-and-back, the time of the median one of
/// 16.
fn cache_line(rounds: u64, last: usize) -> Duration {
    const OVER: u64 = u64::MAX;
    let words = [const { Word(AtomicU64::new(0)) }; 2];
    let [ask, answer] = &words;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin_to(last);
            let mut seen = 0;
            while seen != OVER {
                let now = ask.0.load(Ordering::Acquire);
                if now != seen {
                    answer.0.store(now, Ordering::Release);
                }
                seen = now;
            }
        });
        let mut number = 0;
        let mut took: Vec<Duration> = (0..rounds.div_ceil(16).max(8))
            .map(|_| {
                let began = Instant::now();
                for _ in 0..16 {
                    number += 1;
                    ask.0.store(number, Ordering::Release);
                    while answer.0.load(Ordering::Acquire) != number {
                        std::hint::spin_loop();
                    }
                }
                began.elapsed() / 16
            })
            .collect();
        ask.0.store(OVER, Ordering::Release);
        took.sort_unstable();
        took[took.len() / 2]
    })
}

#[repr(align(128))]
struct Word(AtomicU64);

fn hand_off(c: &mut Criterion) {
    let mut group = c.benchmark_group("proxy");
    let ends = ["direct", "proxy"].map(|path| (path, Ends::new(path)));
    let (first, last) = cpus();
    pin_to(first);
    group.bench_function("a cache line there and back, median", |bench| {
        bench.iter_custom(|rounds| cache_line(rounds, last) * rounds as u32);
    });
    let [mut direct, mut proxied] = ends;
    for (path, ends) in [&mut direct, &mut proxied] {
        group.bench_function(
            format!("8-byte write and its wait, {path}, median"),
            |bench| {
                bench.iter_custom(|rounds| {
                    let stream = Calling {
                        is_timed: true,
                        ..Calling::default()
                    };
                    (0..rounds).for_each(|_| ends.write(&stream, true));
                    let mut took = stream.took.into_inner().expect("no panic");
                    took.sort_unstable();
                    took[took.len() / 2] * rounds as u32
                });
            },
        );
    }
    // Every 32nd is waited for.
    group.throughput(Throughput::Elements(32));
    for (path, ends) in [&mut direct, &mut proxied] {
        let stream = Calling::default();
        group.bench_function(format!("32 writes of 8 bytes, one wait, {path}"), |bench| {
            bench.iter(|| {
                (1..=32).for_each(|number| ends.write(&stream, number == 32));
            });
        });
    }
    group.finish();
}

criterion_group!(benches, hand_off);
criterion_main!(benches);
