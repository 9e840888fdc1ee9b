//! The measurement behind one row: when to launch, wait and read the clock. It does not know what is measured.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::clock::thread_cpu_time;
use super::kinds::Loop;
use super::nvtx;
use super::options::{BenchCase, ITERATIONS_MAX, Plan, RowLength};
use super::row::{BenchRow, LatencyStats, Sample, micros};
use super::step::{BenchStep, Stamps};

/// What is measured: a stream, and an endpoint whose peer takes part.
///
/// A step is one kernel and one exchange behind it. Its kernel calls [`BenchStep::run_kernel`] on the stream.
pub trait Workload {
    /// One step of the CPU-synchronous loop: launch the kernel, wait for the stream, post, poll until the exchange is complete.
    fn step_sync(&mut self, step: BenchStep) -> Result<()>;

    /// Queues one step on the stream (kernel, exchange, wait for its completion) and returns.
    fn step_async(&mut self, step: BenchStep) -> Result<()>;

    /// Marks on the stream the end of the batch in `slot`; a slot is marked again only after it was waited for.
    fn mark_batch(&mut self, slot: usize) -> Result<()>;

    /// Waits until the stream has passed the latest mark of `slot`, off the CPU.
    fn wait_batch(&mut self, slot: usize) -> Result<()>;

    /// Prepares `count` readings of the device's clock. Returns false if the device has no clock; then [`BenchStep::run_kernel`] records each kernel's end.
    fn begin_notes(&mut self, _count: usize) -> Result<bool> {
        Ok(false)
    }

    /// Queues a note of the device's clock behind all queued work.
    fn note(&mut self) -> Result<()> {
        Ok(())
    }

    /// Nanoseconds between notes, after a drain.
    fn periods_ns(&self) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    /// Waits for all queued work. Reports its failures, wrong bytes included.
    fn drain(&mut self) -> Result<()>;
}

/// Measures one case: a warm-up, then as many iterations as the plan says. `announce` is called with the number of steps before each
/// part, so that another process can take part.
///
/// # Errors
/// Those of the workload and of `announce`, and a plan of fewer than two samples.
pub fn measure(
    workload: &mut impl Workload,
    plan: &Plan,
    case: BenchCase,
    mut announce: impl FnMut(u64) -> Result<()>,
) -> Result<BenchRow> {
    let mut next = 0;
    let mut unmeasured = |workload: &mut _, steps: u64| {
        if steps > 0 {
            announce(steps)?;
            unmeasured(workload, plan, case, next..next + steps)?;
            next += steps;
        }
        Ok(())
    };
    unmeasured(workload, plan.warmup).context("warm-up")?;
    let iterations = match plan.extent {
        RowLength::Iterations(count) => count,
        RowLength::DurationMs(ms) => {
            let duration = Duration::from_millis(ms);
            calibrate(plan, duration, |steps| unmeasured(workload, steps))?
        }
    };

    announce(iterations)?;
    let stamps = Arc::new(Stamps::new(usize::try_from(iterations)?));
    let steps = (0..iterations).map(|iteration| BenchStep {
        stamp: Some(iteration as usize),
        stamps: (iteration == 0).then(|| Arc::clone(&stamps)),
        ..step(case, next + iteration)
    });
    let noted = workload.begin_notes((iterations / plan.steps) as usize + 1)?;
    let _range = nvtx::NvtxRange::new("measured");
    let (start, cpu_before) = (Instant::now(), thread_cpu_time()?);
    drive(workload, plan, case, steps, noted)?;
    let (wall, cpu) = (start.elapsed(), thread_cpu_time()? - cpu_before);
    let (sample, mut periods) = if noted {
        // The mean of each batch: to note the time of every step would take as long as the step.
        let batches = workload.periods_ns()?.into_iter();
        let means = batches.map(|ns| ns / plan.steps).collect();
        (Sample::BatchMean, means)
    } else {
        (Sample::Iteration, stamps.periods()?)
    };

    let count = iterations as f64;
    Ok(BenchRow {
        kind: case.kind,
        size_bytes: case.size_bytes,
        kernel_us: case.kernel_us,
        iterations,
        sample,
        time: LatencyStats::of(&mut periods).context("a row needs two samples or more")?,
        messages_per_s: (count / wall.as_secs_f64() * 10.0).round() / 10.0,
        app_cpu_us: micros(cpu.as_nanos() as f64 / count),
    })
}

/// The iterations that take about `duration`, in whole batches. Runs more and more steps until a tenth of it has passed.
fn calibrate(
    plan: &Plan,
    duration: Duration,
    mut run: impl FnMut(u64) -> Result<()>,
) -> Result<u64> {
    let mut steps = plan.in_flight();
    loop {
        let start = Instant::now();
        run(steps).context("calibration")?;
        let took = start.elapsed().max(Duration::from_nanos(1));
        if took * 10 >= duration || steps >= ITERATIONS_MAX {
            let iterations = steps as f64 * duration.div_duration_f64(took);
            let iterations = (iterations as u64).clamp(2, ITERATIONS_MAX);
            return Ok(iterations.next_multiple_of(plan.steps));
        }
        steps *= 2;
    }
}

/// Takes part in [`measure`] of another process: `next` gives the steps of each part, and 0 at the end.
///
/// # Errors
/// Those of the workload and of `next`.
pub fn follow(
    workload: &mut impl Workload,
    plan: &Plan,
    case: BenchCase,
    mut next: impl FnMut() -> Result<u64>,
) -> Result<()> {
    let mut first = 0;
    loop {
        let steps = next()?;
        if steps == 0 {
            return Ok(());
        }
        unmeasured(workload, plan, case, first..first + steps)?;
        first += steps;
    }
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

/// Runs steps to their end. The asynchronous loop waits only when `plan.batches` are in flight, and then for the older half of them: to
/// wait for each batch would cost more sleeps, and to wait for all would leave the stream without work.
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
                    // The newest first: then the others have passed, and need no sleep.
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
    use super::super::options::tests::sample_plan;
    use super::*;

    /// Runs each kernel at once or at the next wait, and records the calls.
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
            extent: RowLength::Iterations(iterations),
            ..sample_plan()
        }
    }

    fn case(kind: Loop, kernel_us: u64) -> BenchCase {
        BenchCase {
            kind,
            size_bytes: 64,
            kernel_us,
        }
    }

    fn measured(
        workload: &mut Recorder,
        kind: Loop,
        kernel_us: u64,
        iterations: u64,
    ) -> Result<BenchRow> {
        measure(workload, &plan(iterations), case(kind, kernel_us), |_| {
            Ok(())
        })
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
            let mut parts = vec![0, 3 * 23, plan.in_flight()];
            // The workload refuses a second mark, and a wait for a slot without one.
            follow(&mut workload, &plan, case(Loop::Async, 0), || {
                Ok(parts.pop().unwrap_or(0))
            })
            .unwrap();
            assert_eq!(workload.most_batches_in_flight as u64, batches);
            assert_eq!(workload.async_steps.len() as u64, 3 * (23 + batches));
        }
    }

    #[test]
    fn kernel_length_is_in_every_period_and_in_the_cpu_of_its_thread() {
        let mut workload = Recorder::default();
        let row = measured(&mut workload, Loop::Sync, 200, 9).unwrap();
        assert!(row.time.min_us >= 200.0, "{row:?}");
        assert!(row.time.p99_us >= row.time.p50_us, "{row:?}");
        assert!(row.messages_per_s <= 5000.0, "{row:?}");
        // This workload runs its kernels on the measuring thread; preempted time is not CPU time, hence above zero only.
        assert!(row.app_cpu_us > 0.0, "{row:?}");
    }

    #[test]
    fn a_duration_is_reached_in_whole_batches_after_the_warm_up() {
        let mut plan = plan(0);
        plan.extent = RowLength::DurationMs(60);
        plan.warmup = 9;
        let mut announced = Vec::new();
        let mut workload = Recorder::default();
        let row = measure(&mut workload, &plan, case(Loop::Sync, 500), |steps| {
            announced.push(steps);
            Ok(())
        })
        .unwrap();
        // The warm-up, then calibration until 6 ms have passed: two batches of three steps take 3 ms, or more on a busy machine.
        assert_eq!(announced[..2], [9, 6]);
        assert!(announced.iter().all(|steps| steps % 3 == 0));
        assert_eq!(announced.last(), Some(&row.iterations));
        assert_eq!(
            workload.sync_steps.len() as u64,
            announced.iter().sum::<u64>()
        );
        // 60 ms are 120 steps of 500 us, and fewer if they took longer.
        assert!((2..=120).contains(&row.iterations), "{row:?}");
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
        assert!(error.to_string().contains("two samples"), "{error}");
    }
}
