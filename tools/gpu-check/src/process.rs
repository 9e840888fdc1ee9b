//! Runs a process with a time limit. It and its descendants are killed at the limit, and their output is returned.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::report::{CheckedStep, NO_TIME, StepLimit};

/// Why a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    Exited,
    /// Killed at the step's time limit.
    StepTimeout,
    /// Killed because the time of the whole run was up.
    RunTimeout,
}

/// How a process ended.
pub struct ProcessResult {
    pub success: bool,
    pub end: ExitReason,
    pub status: String,
    /// stderr, then stdout.
    pub output: String,
}

impl ProcessResult {
    /// The text to report of a process that failed: how it ended, and the last lines of its output.
    pub fn failure_text(&self) -> String {
        let how = match self.end {
            ExitReason::Exited => self.status.clone(),
            _ => "HANG: it was ended at its time limit".into(),
        };
        let lines: Vec<&str> = self.output.lines().collect();
        let tail = lines[lines.len().saturating_sub(30)..].join("\n");
        format!("{how}\n{tail}")
    }
}

/// Runs the command and judges its result. If the time of the whole run was up first, the step is waived.
pub fn run_judged(
    command: &mut Command,
    limit: StepLimit,
    judge: impl FnOnce(&ProcessResult) -> CheckedStep,
) -> CheckedStep {
    match run(command, limit) {
        Ok(ended) if ended.end == ExitReason::RunTimeout => {
            let after = limit.time.as_secs_f64();
            CheckedStep::waived(format!("{NO_TIME}: it was ended after {after:.0} s"))
        }
        Ok(ended) => judge(&ended),
        Err(error) => CheckedStep::failed(format!("{error:#}")),
    }
}

/// How long to wait for the output after the end, and for the end after a kill. A process blocked in a driver may never end.
const AFTERWARDS: Duration = Duration::from_secs(5);

/// Runs the command until it ends, or kills it at the limit.
pub fn run(command: &mut Command, limit: StepLimit) -> Result<ProcessResult> {
    use std::os::unix::process::CommandExt;
    // A group of its own, so that all that it has started ends with it.
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("{}", command.get_program().display()))?;
    let out = PipeOutput::of(child.stdout.take().context("no pipe")?);
    let err = PipeOutput::of(child.stderr.take().context("no pipe")?);
    let start = Instant::now();
    while !has_ended(&child) && start.elapsed() < limit.time {
        std::thread::sleep(Duration::from_millis(10));
    }
    let end = match (has_ended(&child), limit.is_rest_of_run) {
        (true, _) => ExitReason::Exited,
        (false, true) => ExitReason::RunTimeout,
        (false, false) => ExitReason::StepTimeout,
    };
    // SAFETY: the group of a child that was not waited for yet, so no other process has the number.
    unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
    let killed = Instant::now();
    while !has_ended(&child) && killed.elapsed() < AFTERWARDS {
        std::thread::sleep(Duration::from_millis(10));
    }
    let status = if has_ended(&child) {
        Some(child.wait()?)
    } else {
        None
    };
    let until = Instant::now() + AFTERWARDS;
    let output = format!("{}\n{}", err.until(until), out.until(until));
    Ok(ProcessResult {
        success: end == ExitReason::Exited && status.is_some_and(|status| status.success()),
        end,
        status: status.map_or("it does not end, killed or not".into(), |it| it.to_string()),
        output,
    })
}

/// Whether the child has ended. It is not reaped, so that its number stays its own.
fn has_ended(child: &Child) -> bool {
    // SAFETY: plain numbers, all of which may be zero.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: writes the structure that it is given; a child that was not waited for.
    let result = unsafe { libc::waitid(libc::P_PID, child.id(), &mut info, options) };
    // SAFETY: of a SIGCHLD, as waitid fills it; zero if there was none.
    result != 0 || unsafe { info.si_pid() } != 0
}

/// Collects the output of a pipe.
struct PipeOutput {
    bytes: Arc<Mutex<Vec<u8>>>,
    is_closed: Receiver<()>,
}

impl PipeOutput {
    fn of(mut pipe: impl Read + Send + 'static) -> PipeOutput {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (closed, is_closed) = channel();
        let all = Arc::clone(&bytes);
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut some) {
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                all.extend(&some[..count]);
            }
            let _ = closed.send(());
        });
        PipeOutput { bytes, is_closed }
    }

    /// The output up to its end or to that time: a process that left the group may keep the pipe open.
    fn until(&self, time: Instant) -> String {
        let left = time.saturating_duration_since(Instant::now());
        let _ = self.is_closed.recv_timeout(left);
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::StepOutcome;
    use super::*;

    fn shell(script: &str, time_ms: u64, is_rest_of_run: bool) -> (ProcessResult, Duration) {
        let start = Instant::now();
        let time = Duration::from_millis(time_ms);
        let limit = StepLimit {
            time,
            is_rest_of_run,
        };
        let ended = run(Command::new("sh").args(["-c", script]), limit).unwrap();
        (ended, start.elapsed())
    }

    #[test]
    fn output_and_exit_status_are_returned() {
        let (ended, _) = shell("echo well; echo ill >&2", 20_000, false);
        assert_eq!(
            (ended.success, ended.end, ended.output.as_str()),
            (true, ExitReason::Exited, "ill\n\nwell\n")
        );
        let (ended, _) = shell("exit 3", 20_000, false);
        assert!(!ended.success && ended.failure_text().starts_with("exit status: 3"));
    }

    #[test]
    fn exceeded_limit_is_identified() {
        // A starved shell may print nothing within the shorter limits.
        let printed = [100, 1_000, 10_000].into_iter().any(|time_ms| {
            let (ended, took) = shell("echo before; sleep 60", time_ms, false);
            assert_eq!(ended.end, ExitReason::StepTimeout);
            assert!(ended.failure_text().starts_with("HANG"));
            assert!(took < Duration::from_millis(time_ms) + Duration::from_secs(20));
            ended.output.contains("before")
        });
        assert!(printed, "output before the kill is lost");
        let mut slow = Command::new("sleep");
        let limit = StepLimit {
            time: Duration::from_millis(100),
            is_rest_of_run: true,
        };
        let step = run_judged(slow.arg("60"), limit, |_| {
            CheckedStep::failed("judged".into())
        });
        assert_eq!(step.outcome, StepOutcome::Waived);
        assert!(step.reason.contains(NO_TIME));
    }

    /// An orphaned process holds the pipe open. One in the group is killed with it; one outside the group is not waited for.
    #[test]
    fn orphaned_processes_are_not_waited_for() {
        let (ended, took) = shell("sleep 60 & echo gone", 20_000, false);
        assert!(ended.success && ended.output.contains("gone"));
        assert!(took < AFTERWARDS, "{took:?}");
        let (ended, took) = shell("setsid sleep 12 & echo gone", 20_000, false);
        assert!(ended.success && ended.output.contains("gone"));
        assert!(took < Duration::from_secs(11), "{took:?}");
    }
}
