//! A pass: the measurement behind one row. It knows when to launch, wait and look at the clock, and nothing of what is measured.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::clock::thread_cpu_time;
use super::nvtx;
use super::options::{BenchCase, Plan};
use super::row::{BenchRow, Loop, Setup, Spread, micros};

/// What a pass runs on: a stream, and an endpoint whose other end takes part.
///
/// A step is one kernel and one exchange that follows it. Its kernel is to call [`BenchStep::run_kernel`] on the stream.
pub trait Workload {
    /// One step of the CPU-synchronous loop: launch the kernel, wait for the stream, post, poll until the exchange is complete.
    fn step_sync(&mut self, step: BenchStep) -> Result<()>;

    /// Queues one step on the stream (kernel, exchange, wait for its completion) and returns.
    fn step_async(&mut self, step: BenchStep) -> Result<()>;

    /// Marks on the stream the end of the batch in `slot`; a slot is marked again only after it was waited for.
    fn mark_batch(&mut self, slot: usize) -> Result<()>;

    /// Waits until the stream has passed the latest mark of `slot`, off the CPU.
    fn wait_batch(&mut self, slot: usize) -> Result<()>;

    /// Gets ready to have the device's time noted so often. False: kernels note their end themselves, by [`BenchStep::run_kernel`].
    fn begin_notes(&mut self, _count: usize) -> Result<bool> {
        Ok(false)
    }

    /// Has the device note its time behind what is queued.
    fn note(&mut self) -> Result<()> {
        Ok(())
    }

    /// Nanoseconds between notes, after a drain.
    fn periods_ns(&self) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    /// Waits for everything queued; says what failed of it, bytes that arrived wrong included.
    fn drain(&mut self) -> Result<()>;
}

/// One step. It moves to where its kernel runs.
#[derive(Clone, Debug)]
pub struct BenchStep {
    /// Number of the step since the pass began, warm-up included.
    pub index: u64,
    /// Bytes to exchange.
    pub size_bytes: u64,
    kernel: Duration,
    /// Where its end is noted, if it is timed.
    stamp: Option<usize>,
    /// What the first step of a pass brings along for all that follow it.
    stamps: Option<Arc<Stamps>>,
}

thread_local! {
    /// The stamps of the pass whose kernels this thread runs. Not in every step: a handle that one thread makes and another
    /// one drops costs both of them a cache line's way, and the application's share would be counted as the loop's.
    static STAMPS: RefCell<Option<Arc<Stamps>>> = const { RefCell::new(None) };
}

impl BenchStep {
    /// Length of the kernel.
    #[cfg(feature = "cuda")]
    pub fn kernel(&self) -> Duration {
        self.kernel
    }

    /// The same step as the other end of a pingpong sees it: its kernels are not those that are timed.
    pub fn untimed(&self) -> Self {
        Self {
            stamp: None,
            stamps: None,
            ..*self
        }
    }

    /// The kernel: keeps its thread busy as long as the case says, as a kernel keeps a GPU busy, and notes when it ended.
    pub fn run_kernel(&self) {
        if !self.kernel.is_zero() {
            let start = Instant::now();
            while start.elapsed() < self.kernel {
                std::hint::spin_loop();
            }
        }
        if let Some(stamps) = &self.stamps {
            STAMPS.set(Some(Arc::clone(stamps)));
        }
        if let Some(slot) = self.stamp {
            STAMPS.with_borrow(|stamps| {
                if let Some(stamps) = stamps {
                    stamps.note(slot);
                }
            });
        }
    }
}

/// When each kernel ended, in nanoseconds since the pass began. Written on the stream, read after a drain.
#[derive(Debug)]
struct Stamps {
    start: Instant,
    ends_ns: Box<[AtomicU64]>,
}

impl Stamps {
    const MISSING: u64 = u64::MAX;

    fn new(count: usize) -> Self {
        Self {
            start: Instant::now(),
            ends_ns: (0..count).map(|_| AtomicU64::new(Self::MISSING)).collect(),
        }
    }

    fn note(&self, slot: usize) {
        // Release pairs with the Acquire in `periods`: the drain in between orders the two already, this keeps it true of any workload.
        self.ends_ns[slot].store(self.start.elapsed().as_nanos() as u64, Ordering::Release);
    }

    /// From the end of each kernel to the end of the next: whole iterations, wherever one says that they begin.
    fn periods(&self) -> Result<Vec<u64>> {
        let ends: Vec<u64> = self
            .ends_ns
            .iter()
            .map(|end| end.load(Ordering::Acquire))
            .collect();
        ends.windows(2)
            .map(|pair| {
                anyhow::ensure!(
                    !pair.contains(&Self::MISSING),
                    "a kernel of the pass never ran"
                );
                pair[1]
                    .checked_sub(pair[0])
                    .context("kernels of one stream ran out of order")
            })
            .collect()
    }
}

/// Measures one case: a warm-up as deep as what is in flight, then the plan's iterations.
///
/// # Errors
/// Those of the workload, and a plan of fewer than two iterations.
pub fn measure(
    workload: &mut impl Workload,
    plan: &Plan,
    setup: &Setup,
    case: BenchCase,
) -> Result<BenchRow> {
    let warm_up = plan.in_flight();
    unmeasured(workload, plan, case, 0..warm_up).context("warm-up")?;

    let stamps = Arc::new(Stamps::new(usize::try_from(plan.iterations)?));
    let steps = (0..plan.iterations).map(|iteration| BenchStep {
        stamp: Some(iteration as usize),
        stamps: (iteration == 0).then(|| Arc::clone(&stamps)),
        ..step(case, warm_up + iteration)
    });
    let noted = workload.begin_notes((plan.iterations / plan.steps) as usize + 1)?;
    let _range = nvtx::NvtxRange::new("measured");
    let (start, cpu_before) = (Instant::now(), thread_cpu_time()?);
    drive(workload, plan, case, steps, noted)?;
    let (wall, cpu) = (start.elapsed(), thread_cpu_time()? - cpu_before);
    let mut periods = if noted {
        // The mean of each batch: to note the time of every step would take as long as the step.
        let batches = workload.periods_ns()?.into_iter();
        batches.map(|ns| ns / plan.steps).collect()
    } else {
        stamps.periods()?
    };

    let iterations = plan.iterations as f64;
    Ok(BenchRow {
        nic: setup.nic.clone(),
        stream: setup.stream.clone(),
        path: setup.path.clone(),
        kind: case.kind,
        size_bytes: case.size_bytes,
        kernel_us: case.kernel_us,
        iterations: plan.iterations,
        us_per_iter: Spread::of(&mut periods).context("a row needs two iterations or more")?,
        msgs_per_s: (iterations / wall.as_secs_f64() * 10.0).round() / 10.0,
        app_cpu_us_per_iter: micros(cpu.as_nanos() as f64 / iterations),
    })
}

/// Runs the steps of [`measure`] on the workload of the other process, where nothing is measured.
///
/// # Errors
/// Those of the workload.
pub fn follow(workload: &mut impl Workload, plan: &Plan, case: BenchCase) -> Result<()> {
    let warm_up = plan.in_flight();
    unmeasured(workload, plan, case, 0..warm_up).context("warm-up")?;
    unmeasured(workload, plan, case, warm_up..warm_up + plan.iterations)
}

fn unmeasured(
    workload: &mut impl Workload,
    plan: &Plan,
    case: BenchCase,
    steps: Range<u64>,
) -> Result<()> {
    let _range = nvtx::NvtxRange::new("unmeasured");
    drive(
        workload,
        plan,
        case,
        steps.map(|index| step(case, index)),
        false,
    )
}

fn step(case: BenchCase, index: u64) -> BenchStep {
    BenchStep {
        index,
        size_bytes: case.size_bytes,
        kernel: Duration::from_micros(case.kernel_us),
        stamp: None,
        stamps: None,
    }
}

/// Runs steps to their end. Asynchronously, only when `plan.batches` are in flight is anything waited for, and then until the
/// older half of them is done: to be woken for each single batch would cost the application twice as many sleeps, and to be
/// woken when all are done would leave the stream without work.
fn drive(
    workload: &mut impl Workload,
    plan: &Plan,
    case: BenchCase,
    steps: impl Iterator<Item = BenchStep>,
    noted: bool,
) -> Result<()> {
    if noted {
        workload.note()?;
    }
    match case.kind {
        Loop::Sync => {
            for (count, step) in (1..).zip(steps) {
                workload.step_sync(step)?;
                if noted && count % plan.steps == 0 {
                    workload.note()?;
                }
            }
        }
        Loop::Async => {
            let half = plan.batches.div_ceil(2);
            let mut steps = steps.peekable();
            for batch in 0u64.. {
                if steps.peek().is_none() {
                    break;
                }
                let slot = |batch: u64| (batch % plan.batches) as usize;
                if let Some(oldest) = batch.checked_sub(plan.batches)
                    && oldest % half == 0
                {
                    // The newest first: behind it, the others have passed, and nothing sleeps for them.
                    for passed in (oldest..oldest + half).rev() {
                        workload.wait_batch(slot(passed))?;
                    }
                }
                for step in steps.by_ref().take(plan.steps as usize) {
                    workload.step_async(step)?;
                }
                if noted {
                    workload.note()?;
                }
                workload.mark_batch(slot(batch))?;
            }
        }
    }
    workload.drain()
}

#[cfg(test)]
mod tests {
    use super::super::options::{Exchange, Op};
    use super::super::sizes::MessageSizes;
    use super::*;

    /// Runs each kernel at the spot or at the next wait, and writes down what it was asked for.
    #[derive(Default)]
    struct Recorder {
        queued: Vec<BenchStep>,
        sync_steps: Vec<u64>,
        async_steps: Vec<u64>,
        marked: Vec<bool>,
        batches_in_flight: usize,
        most_batches_in_flight: usize,
        waits: u64,
        drains: u64,
        lose_kernels: bool,
    }

    impl Recorder {
        fn run_queued(&mut self) {
            for step in self.queued.drain(..) {
                if !self.lose_kernels {
                    step.run_kernel();
                }
            }
        }
    }

    impl Workload for Recorder {
        fn step_sync(&mut self, step: BenchStep) -> Result<()> {
            step.run_kernel();
            self.sync_steps.push(step.index);
            Ok(())
        }

        fn step_async(&mut self, step: BenchStep) -> Result<()> {
            self.async_steps.push(step.index);
            self.queued.push(step);
            Ok(())
        }

        fn mark_batch(&mut self, slot: usize) -> Result<()> {
            self.marked.resize(self.marked.len().max(slot + 1), false);
            anyhow::ensure!(!self.marked[slot], "slot {slot} marked twice");
            self.marked[slot] = true;
            self.batches_in_flight += 1;
            self.most_batches_in_flight = self.most_batches_in_flight.max(self.batches_in_flight);
            Ok(())
        }

        fn wait_batch(&mut self, slot: usize) -> Result<()> {
            anyhow::ensure!(
                std::mem::take(&mut self.marked[slot]),
                "slot {slot} has no mark"
            );
            self.batches_in_flight -= 1;
            self.waits += 1;
            self.run_queued();
            Ok(())
        }

        fn drain(&mut self) -> Result<()> {
            self.run_queued();
            self.marked.clear();
            self.batches_in_flight = 0;
            self.drains += 1;
            Ok(())
        }
    }

    fn plan(iterations: u64) -> Plan {
        Plan {
            exchange: Exchange::Loop,
            op: Op::Write,
            timeout_s: 30,
            sizes: "64".parse::<MessageSizes>().unwrap(),
            kernel_us: vec![0],
            loops: vec![Loop::Sync, Loop::Async],
            steps: 3,
            batches: 2,
            iterations,
            validate: false,
            no_kernel: false,
            seed: 1,
        }
    }

    fn measured(
        workload: &mut Recorder,
        kind: Loop,
        kernel_us: u64,
        iterations: u64,
    ) -> Result<BenchRow> {
        let setup = Setup {
            nic: "nic0".into(),
            stream: "host".into(),
            path: "direct".into(),
            why: String::new(),
            gpu: None,
        };
        let case = BenchCase {
            kind,
            size_bytes: 64,
            kernel_us,
        };
        measure(workload, &plan(iterations), &setup, case)
    }

    #[test]
    fn sync_runs_every_step_in_order() {
        let mut workload = Recorder::default();
        let row = measured(&mut workload, Loop::Sync, 0, 12).unwrap();
        assert_eq!(workload.sync_steps, (0..6 + 12).collect::<Vec<_>>());
        assert!(workload.async_steps.is_empty());
        assert_eq!((workload.waits, workload.drains), (0, 2));
        assert_eq!((row.iterations, row.size_bytes), (12, 64));
    }

    #[test]
    fn async_keeps_the_batches_in_flight_and_no_more() {
        let mut workload = Recorder::default();
        measured(&mut workload, Loop::Async, 0, 12).unwrap();
        assert_eq!(workload.async_steps, (0..6 + 12).collect::<Vec<_>>());
        assert_eq!(workload.most_batches_in_flight, 2);
        assert_eq!((workload.waits, workload.drains), (2, 2));
    }

    #[test]
    fn no_slot_is_marked_before_it_was_waited_for_whatever_the_counts() {
        for batches in 1..=7 {
            let mut plan = plan(3 * 23);
            plan.batches = batches;
            let mut workload = Recorder::default();
            let case = BenchCase {
                kind: Loop::Async,
                size_bytes: 64,
                kernel_us: 0,
            };
            // The workload refuses a second mark, and a wait for none.
            follow(&mut workload, &plan, case).unwrap();
            assert_eq!(workload.most_batches_in_flight as u64, batches);
            assert_eq!(workload.async_steps.len() as u64, 3 * (23 + batches));
        }
    }

    #[test]
    fn kernel_length_is_in_every_period_and_in_the_cpu_of_its_thread() {
        let mut workload = Recorder::default();
        let row = measured(&mut workload, Loop::Sync, 200, 9).unwrap();
        assert!(row.us_per_iter.min >= 200.0, "{row:?}");
        assert!(row.us_per_iter.p99 >= row.us_per_iter.p50, "{row:?}");
        assert!(row.msgs_per_s <= 5000.0, "{row:?}");
        // This workload runs its kernels on the measuring thread; preempted time is not CPU time, hence above zero only.
        assert!(row.app_cpu_us_per_iter > 0.0, "{row:?}");
    }

    #[test]
    fn lost_kernels_and_short_plans_are_errors() {
        let mut workload = Recorder {
            lose_kernels: true,
            ..Recorder::default()
        };
        let error = measured(&mut workload, Loop::Async, 0, 6).unwrap_err();
        assert!(error.to_string().contains("never ran"), "{error}");
        let error = measured(&mut Recorder::default(), Loop::Sync, 0, 1).unwrap_err();
        assert!(error.to_string().contains("two iterations"), "{error}");
    }
}
