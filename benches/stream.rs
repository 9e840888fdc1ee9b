//! What a host stream costs: its caller in CPU time, and its work in latency. `cargo bench --bench stream` prints it.
#![allow(unsafe_code)] // an `Owner` over a word of its own, and the CPU clock of the calling thread

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use doorbell::__private::{Owner, Submission};
use doorbell::{Event, Executor, HostStream};
use doorbell_wire::bytecode::{Program, Qword, Role, TargetId, Targets};

/// Calls between two synchronizes: they fit into the queue, so no call waits for room.
const BATCH: u64 = 500;
const BATCHES: usize = 200;

struct Word {
    targets: Targets,
    word: AtomicU64,
}

// SAFETY: one target of 8 bytes, which are the word; the owner is in an Arc, so it does not move.
unsafe impl Owner for Word {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, _: TargetId) -> Option<NonNull<u8>> {
        NonNull::new(self.word.as_ptr().cast())
    }
}

/// CPU time of the calling thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a timespec of ours, which the call fills.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0, "this system has no CPU clock for threads");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Median and least CPU time of one `call`. `held`: the stream does nothing meanwhile.
fn cpu_ns_per_call(stream: &HostStream, held: bool, mut call: impl FnMut(u64)) -> (u64, u64) {
    let mut times: Vec<u64> = (0..BATCHES)
        .map(|_| {
            let go = Arc::new(AtomicBool::new(!held));
            let gone = Arc::clone(&go);
            let hold = move || {
                while !gone.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_micros(50));
                }
            };
            stream.launch(hold).unwrap();
            let begin = cpu_time();
            for number in 0..BATCH {
                call(number);
            }
            let spent = cpu_time() - begin;
            go.store(true, Ordering::Release);
            stream.synchronize(None).unwrap();
            spent.as_nanos() as u64 / BATCH
        })
        .collect();
    times.sort_unstable();
    (times[BATCHES / 2], times[0])
}

/// Median wall time of one `round`; `before` it is not counted.
fn ns_per_round(rounds: usize, before: impl Fn(), mut round: impl FnMut(u64)) -> u64 {
    let mut times: Vec<u64> = (0..rounds)
        .map(|number| {
            before();
            let begin = Instant::now();
            round(number as u64 + 1);
            begin.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    times[rounds / 2]
}

fn main() {
    let mut targets = Targets::new();
    let target = targets.register("word", Role::Memory, 8);
    let at = target.qword(0).unwrap();
    let owner = Arc::new(Word {
        targets,
        word: AtomicU64::new(0),
    });
    let submission = |at: Qword, value: u64| {
        let mut program = Program::new(&owner.targets);
        program.store_qword(at, value).unwrap();
        Submission {
            program,
            owner: owner.clone(),
            cookie: value,
        }
    };
    let stream = HostStream::new("bench").unwrap();
    let event = Event::new();

    println!("CPU of the calling thread, ns a call          median  least");
    for (held, state) in [(true, "stream held"), (false, "stream runs")] {
        let row = |name: &str, (median, least): (u64, u64)| {
            println!("  {:40} {median:>9} {least:>6}", format!("{name}, {state}"));
        };
        row(
            "build + submit_one",
            cpu_ns_per_call(&stream, held, |number| {
                stream
                    .submit_one(submission(at, number))
                    .map_err(|(_, error)| error)
                    .unwrap();
            }),
        );
        row(
            "launch, 8 bytes captured",
            cpu_ns_per_call(&stream, held, |number| {
                stream
                    .launch(move || _ = std::hint::black_box(number))
                    .unwrap();
            }),
        );
        row(
            "record",
            cpu_ns_per_call(&stream, held, |_| stream.record(&event).unwrap()),
        );
    }

    println!("wall time, ns, median");
    let batch = ns_per_round(
        200,
        || (),
        |_| {
            for number in 0..BATCH {
                stream
                    .submit_one(submission(at, number))
                    .map_err(|(_, error)| error)
                    .unwrap();
            }
            stream.synchronize(None).unwrap();
        },
    );
    println!(
        "  {:40} {:>9}",
        "a program, in a batch of 500",
        batch / BATCH
    );
    let hot = ns_per_round(
        5000,
        || (),
        |number| {
            stream
                .submit_one(submission(at, number))
                .map_err(|(_, error)| error)
                .unwrap();
            stream.synchronize(None).unwrap();
        },
    );
    println!("  {:40} {hot:>9}", "submit_one + synchronize, thread spins");
    let cold = ns_per_round(
        200,
        || std::thread::sleep(Duration::from_millis(1)),
        |number| {
            stream
                .submit_one(submission(at, number))
                .map_err(|(_, error)| error)
                .unwrap();
            stream.synchronize(None).unwrap();
        },
    );
    println!("  {:40} {cold:>9}", "the same, thread sleeps");
    let sleeper = Event::blocking();
    let blocking = ns_per_round(
        2000,
        || (),
        |number| {
            stream
                .submit_one(submission(at, number))
                .map_err(|(_, error)| error)
                .unwrap();
            stream.record(&sleeper).unwrap();
            sleeper.synchronize(None).unwrap();
        },
    );
    println!(
        "  {:40} {blocking:>9}",
        "submit_one + record + blocking wait"
    );
}
