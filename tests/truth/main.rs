//! Checks reported results against a model. Executes random sequences of calls over several endpoints, devices, streams and threads, with faults. A
//! model knows which statuses, completions, bytes and errors are possible, and each contradiction is a finding. In some plans one endpoint is in another
//! process, which is stopped, continued and killed.
//!
//! Each run draws a new seed and prints it. `DOORBELL_SEED` begins with that plan, `DOORBELL_TRUTH_OPERATIONS` sets the number of calls. The same seed
//! makes the same plan; the interleaving of threads, streams and the device is different each time, so `DOORBELL_TRUTH_REPEATS` carries out each plan
//! several times. A plan with a contradiction is shortened and printed.
#![cfg(all(feature = "softcx", feature = "group", not(loom)))]

mod memory;
mod model;
mod peer;
mod plan;
#[path = "../rig/mod.rs"]
mod rig;
mod shrink;
#[path = "../waived/mod.rs"]
mod waived;
mod world;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::model::{Ends, Lie, Model, lock};
use crate::plan::{Means, Plan};
use crate::rig::{Random, Streams, by_trigger, control, device, from_env, is_cuda};
use doorbell::Control;

/// Far longer than a plan takes.
const BOUND: Duration = Duration::from_secs(90);
/// Time for everything to end after all endpoints are aborted and all streams are released.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same for a plan with a known contradiction.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
/// Plans that run at the same time, each on a device of its own.
const WORKERS: u64 = 3;
/// The search ends after this many kinds of contradictions.
const KINDS_MAX: usize = 12;
/// Whether work behind a failed wait on a stream is expected to be discarded, with all consequences; see `DOORBELL_TRUTH_FAULTS`.
const CHECKS_FAULTS: bool = true;

/// The findings of one kind.
struct Finding {
    plan: Plan,
    lie: Lie,
    /// Number of calls before the first finding.
    after: u64,
    plans: u64,
}

/// Executes plans, and ends the process when one of them hangs.
struct Runner {
    streams: Streams,
    checks_faults: bool,
    /// The running plans: start time, seed, and model.
    running: Mutex<Option<(Instant, u64)>>,
    model: Mutex<Option<Arc<Model>>>,
}

impl Runner {
    fn new(streams: Streams) -> Arc<Runner> {
        let runner = Arc::new(Runner {
            streams,
            checks_faults: from_env("DOORBELL_TRUTH_FAULTS", CHECKS_FAULTS.into()) != 0,
            running: Mutex::default(),
            model: Mutex::default(),
        });
        let watched = Arc::downgrade(&runner);
        std::thread::spawn(move || {
            while let Some(runner) = watched.upgrade() {
                let running = *lock(&runner.running);
                if let Some((since, seed)) = running
                    && since.elapsed() > BOUND
                {
                    let states = lock(&runner.model).as_ref().map(|model| model.states());
                    let plan = Plan::new(seed, means());
                    say(&format!(
                        "HANG: DOORBELL_SEED={seed}\n{plan}{}",
                        states.unwrap_or_default()
                    ));
                    std::process::abort();
                }
                drop(runner);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        runner
    }

    fn run(&self, plan: &Plan, patience: Duration, ends: &Ends) -> Vec<Lie> {
        *lock(&self.running) = Some((Instant::now(), plan.seed));
        let devices: Vec<_> = (0..plan.devices).map(|_| device()).collect();
        let lies = world::run(
            plan,
            &devices,
            &self.streams,
            patience,
            self.checks_faults,
            &self.model,
        );
        lock(&self.model).iter().for_each(|model| model.count(ends));
        *lock(&self.running) = None;
        lies
    }
}

/// Bypasses the test harness, which holds output back until the test ends.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn means() -> Means {
    static MEANS: OnceLock<Means> = OnceLock::new();
    *MEANS.get_or_init(|| Means {
        // If kernels of an application execute programs, the panic is the application's.
        panics: !by_trigger(),
        cuda: is_cuda() && !by_trigger(),
        direct: control(&device()) == Control::Direct,
    })
}

/// Whether kernels may own send queues: not on the path `sync`, not where the NIC's messages are too short for them, and not on a GPU that sees the writes
/// of NICs out of order.
fn can_put() -> bool {
    #[cfg(feature = "cuda")]
    if means().cuda {
        let context = doorbell::CudaContext::primary(0).unwrap();
        if context.capabilities().ordering == doorbell::WritesOrdering::None {
            return false;
        }
    }
    control(&device()) != Control::Sync && !device().name().starts_with("verbs:")
}

/// A new seed for each run. The data that a plan writes names the lowest 48 bits of its seed.
fn drawn() -> u64 {
    RandomState::new().build_hasher().finish() >> 16
}

fn plan(seed: u64, round: u64) -> Plan {
    // The first plan uses the seed itself, so `DOORBELL_SEED` repeats any plan.
    let seed = if round == 0 {
        seed
    } else {
        Random(seed ^ round << 40).next() >> 16
    };
    Plan::new(seed, means())
}

#[test]
fn random_calls_report_only_possible_outcomes() {
    if let Some(role) = std::env::var_os(peer::ROLE) {
        return peer::serve(role.to_str().unwrap());
    }
    let seed = from_env("DOORBELL_SEED", drawn());
    let operations = from_env("DOORBELL_TRUTH_OPERATIONS", 20_000);
    let repeats = from_env("DOORBELL_TRUTH_REPEATS", 1);
    println!(
        "DOORBELL_SEED={seed} DOORBELL_TRUTH_OPERATIONS={operations} DOORBELL_TRUTH_REPEATS={repeats}"
    );
    let [rounds, done, faults] = [const { AtomicU64::new(0) }; 3];
    let ends = Ends::default();
    let findings = Mutex::new(BTreeMap::<&'static str, Finding>::new());
    let work = |streams: Streams| {
        let runner = Runner::new(streams);
        while done.load(Ordering::Relaxed) < operations {
            let plan = plan(seed, rounds.fetch_add(1, Ordering::Relaxed));
            for _ in 0..repeats {
                let (kinds, never_over) = {
                    let findings = lock(&findings);
                    (findings.len(), findings.contains_key("never over"))
                };
                if kinds >= KINDS_MAX {
                    return;
                }
                let patience = if never_over { SHORT_PATIENCE } else { PATIENCE };
                let lies = runner.run(&plan, patience, &ends);
                let after = done.fetch_add(plan.steps.len() as u64, Ordering::Relaxed);
                let caused = plan.steps.iter().filter(|step| step.call.is_fault());
                faults.fetch_add(caused.count() as u64, Ordering::Relaxed);
                note(&findings, &plan, lies, after);
            }
        }
    };
    std::thread::scope(|scope| {
        let work = &work;
        for worker in 0..WORKERS {
            // A plan waits for the streams of its context before it records a graph.
            let streams = if worker == 0 {
                Streams::default()
            } else {
                Streams::apart()
            };
            scope.spawn(move || work(streams));
        }
    });
    println!(
        "{} plans, {} calls, {} of them faults: {ends:?}",
        rounds.into_inner(),
        done.into_inner(),
        faults.into_inner()
    );
    let findings = findings.into_inner().unwrap();
    for (kind, finding) in &findings {
        say(&format!(
            "{kind}: first after {} calls, in {} plans; DOORBELL_SEED={}: {}",
            finding.after, finding.plans, finding.plan.seed, finding.lie.text
        ));
    }
    let runner = Runner::new(Streams::default());
    for (kind, finding) in &findings {
        let run = |plan: &Plan| runner.run(plan, SHORT_PATIENCE, &ends);
        say(&shrink::shrunk(&finding.plan, kind, &run));
    }
    // In the message, too: of a long run's output only its end may be kept.
    let told = findings.iter().map(|(kind, finding)| {
        let (seed, text) = (finding.plan.seed, &finding.lie.text);
        format!("\n{kind}: DOORBELL_SEED={seed}: {text}")
    });
    let told = told.collect::<String>();
    assert!(findings.is_empty(), "contradictions:{told}");
    drop(runner);
    await_threads();
    // Otherwise nothing was checked.
    let Ends {
        complete,
        failed,
        cancelled,
        launched,
        bounced,
        put,
    } = ends;
    let [complete, failed, cancelled, launched, bounced, put] =
        [complete, failed, cancelled, launched, bounced, put].map(AtomicU64::into_inner);
    assert!(operations < 2000 || complete > operations / 20 && failed > 0 && cancelled > 0);
    assert!(operations < 10_000 || bounced > 0);
    assert!(operations < 10_000 || launched > 0 && (put > 0 || !can_put()) || !means().cuda);
}

/// Threads end after the last plan: those of devices when the last handle is dropped, and those of the library that had no work for a second. A sanitizer that
/// looks for leaks takes what a thread has while it ends for lost. Waits until none has ended for a while, which is longer than threads may be kept from
/// their processor beside other tests. Some stay: a device that does not stop may still
/// write its memory, which is kept.
fn await_threads() {
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let has_sanitizer = std::env::var_os("DOORBELL_SANITIZER").is_some();
    let quiet = Duration::from_secs(if has_sanitizer { 10 } else { 2 });
    let (mut last, mut since) = (threads(), Instant::now());
    while since.elapsed() < quiet {
        std::thread::sleep(Duration::from_millis(10));
        let now = threads();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

fn note(
    findings: &Mutex<BTreeMap<&'static str, Finding>>,
    plan: &Plan,
    lies: Vec<Lie>,
    after: u64,
) {
    let mut findings = lock(findings);
    let mut seen = Vec::new();
    for lie in lies {
        if seen.contains(&lie.kind) {
            continue;
        }
        seen.push(lie.kind);
        let found = findings.entry(lie.kind).or_insert_with(|| Finding {
            plan: plan.clone(),
            lie,
            after,
            plans: 0,
        });
        found.plans += 1;
    }
}
