//! How long a kernel takes from its trigger to the doorbell that the NIC's thread sees.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use doorbell::__private::{Attachments, Outcome, Owner, Submission};
use doorbell::{CudaStream, Executor, TriggerStream};
use doorbell_wire::bytecode::{Fence, Program, Role, Target, TargetId, Targets};
use serde_json::{Value, json};

use super::figures::figure;
use super::gpu::{Gpu, PORTABLE, Page, SOON, is_few, median};
use super::kernels::{Kernels, WITHOUT};

/// `struct measured_doorbells`.
#[repr(C)]
struct TriggerLatencyArgs {
    go: u64,
    data: u64,
    flag: u64,
    triggers: u64,
    code: u64,
    rounds: u32,
    ordered: u32,
}

/// A doorbell record and a doorbell register that are memory of this process, for a thread of it to watch.
struct WatchedDoorbell {
    targets: Targets,
    record: Target,
    register: Target,
    page: Page,
    attachments: Attachments,
    is_discarded: AtomicBool,
}

// SAFETY: the table never changes; the page is never freed, and is used atomically.
unsafe impl Owner for WatchedDoorbell {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let at = if target == self.record.id() {
            RECORD
        } else {
            REGISTER
        };
        // SAFETY: within the page.
        NonNull::new(unsafe { self.page.host.add(at) })
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn finished(&self, _: u64, outcome: Outcome) {
        if outcome != Outcome::Done {
            self.is_discarded.store(true, Ordering::Release);
        }
    }
}

/// `struct doorbell_trigger`.
const TRIGGER_BYTES: u64 = 512;
const GO: usize = 0;
const CODE: usize = 256;
const TOOK: usize = 512;
const RECORD: usize = 8192;
const REGISTER: usize = 16384;

/// `struct measured_looks`.
#[repr(C)]
struct PollLatencyArgs {
    word: u64,
    took_ns: u64,
    count: u32,
    reserved: u32,
}

/// How long a look of a kernel at a word of the host takes, in us.
fn look(kernels: &Kernels, stream: &CudaStream, page: Page, count: u32) -> Result<f64> {
    page.word(GO).store(0, Ordering::SeqCst);
    let looks = PollLatencyArgs {
        word: page.gpu + GO as u64,
        took_ns: page.gpu + TOOK as u64,
        count,
        reserved: 0,
    };
    kernels.launch(stream, c"gpu_check_look", (1, 1), &looks)?;
    stream.synchronize(Some(SOON))?;
    let ns = page.long(TOOK).load(Ordering::Acquire);
    Ok(ns as f64 / 1e3 / f64::from(count))
}

/// A kernel's trigger, until the thread that stands for the NIC sees the doorbell, against a store and a flag that are bare: in the order
/// that a fence gives, or the flag's release, whichever is quicker.
///
/// All begin with a word of the host, whose way to the kernel is no part of the figure. A kernel looks at it again and again: on the average
/// the look that finds it begins half a look later than the word is there, and ends half a look after it has found it. So the way is a look.
pub fn trigger_to_doorbell(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "doorbells")?;
    // Each way by turns, so that what changes meanwhile does so for all.
    let (rounds, turns) = if is_few(short) { (32, 2) } else { (400, 5) };
    let page = Page::new(PORTABLE, false)?;
    let mut targets = Targets::new();
    let record = targets.register("doorbell record", Role::DoorbellRecord, 64);
    let register = targets.register("register", Role::Uar, 64);
    let watched = Arc::new(WatchedDoorbell {
        targets,
        record,
        register,
        page,
        attachments: Attachments::default(),
        is_discarded: AtomicBool::new(false),
    });
    let kernels = TriggerStream::new(&gpu.context, "doorbells")?;
    let mut triggers = Vec::new();
    for number in 0..turns * u64::from(rounds) {
        let round = number % u64::from(rounds) + 1;
        let mut program = Program::new(&watched.targets);
        program.store_dword(watched.record.dword(0)?, round as u32)?;
        program.fence(Fence::RECORD_BEFORE_UAR)?;
        program.store_qword(watched.register.qword(0)?, round)?;
        let owner: Arc<dyn Owner> = watched.clone();
        let submission = Submission {
            program,
            owner,
            cookie: number,
        };
        kernels.submit_one(submission).map_err(|(_, error)| error)?;
        let trigger = kernels.take()?.context("no trigger")?;
        triggers.extend(trigger.to_bytes());
    }
    let memory = gpu.context.alloc(triggers.len() as u64)?;
    memory.copy_from_host(0, &triggers)?;
    let latency = |ordered: u32, triggers: u64| -> Result<Vec<f64>> {
        page.word(GO).store(0, Ordering::SeqCst);
        page.word(CODE).store(77, Ordering::SeqCst);
        page.long(REGISTER).store(0, Ordering::SeqCst);
        let doorbells = TriggerLatencyArgs {
            go: page.gpu + GO as u64,
            data: page.gpu + RECORD as u64,
            flag: page.gpu + REGISTER as u64,
            triggers,
            code: page.gpu + CODE as u64,
            rounds,
            ordered,
        };
        measured.launch(&stream, c"gpu_check_ring", (1, 1), &doorbells)?;
        let mut times = Vec::new();
        for round in 1..=rounds {
            // The kernel waits again by then: what it has to do behind a doorbell is not in the figure.
            let pause = Instant::now();
            while pause.elapsed() < Duration::from_micros(20) {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            page.word(GO).store(round, Ordering::Release);
            while page.long(REGISTER).load(Ordering::Acquire) != u64::from(round) {
                ensure!(start.elapsed() < SOON, "round {round}: no doorbell came");
                std::hint::spin_loop();
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
            ensure!(
                (ordered == 0 && triggers == 0)
                    || page.word(RECORD).load(Ordering::Acquire) == round,
                "round {round}: the doorbell came before its record"
            );
        }
        stream.synchronize(Some(SOON))?;
        let code = page.word(CODE).load(Ordering::Acquire).cast_signed();
        ensure!(code == 0, "the kernel came to the code {code}");
        Ok(times)
    };
    let (mut alone, mut fenced, mut released, mut triggered, mut looks) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for turn in 0..turns {
        looks.push(look(&measured, &stream, page, rounds)?);
        alone.extend(latency(0, 0)?);
        fenced.extend(latency(1, 0)?);
        released.extend(latency(2, 0)?);
        let first = turn * u64::from(rounds) * TRIGGER_BYTES;
        triggered.extend(latency(0, memory.ptr() + first)?);
    }
    kernels.synchronize(Some(SOON))?;
    ensure!(
        !watched.is_discarded.load(Ordering::Acquire),
        "a trigger was discarded"
    );
    let (alone, look) = (median(alone)?, median(looks)?);
    let (fenced, released, triggered) = (median(fenced)?, median(released)?, median(triggered)?);
    let bare = fenced.min(released);
    let ratio = |way: f64| (triggered - way) / (bare - way);
    // A flag's own way is some of each time at least.
    let way = look.min(alone.min(bare).min(triggered) * 0.9);
    let more = json!({
        "a kernel's look at the host's memory us": look,
        "go to a flag alone us": alone,
        "go to store, fence and flag us": fenced,
        "go to store and flag with release us": released,
        "go to the doorbell of a trigger us": triggered,
        "the way of go us": way,
        "if that way were half of what a flag alone takes": ratio(alone / 2.0),
        "longer than the bare ones us": triggered - bare,
    });
    Ok(figure(
        "kernel trigger to the doorbell that the NIC's thread sees, times a bare store and flag",
        ratio(way),
        true,
        1.2,
        &more,
    ))
}
