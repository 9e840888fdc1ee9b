//! A process with a time limit: it, and whatever it has started, ends by then, and so does waiting for what they say.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::report::{CheckedStep, NO_TIME, StepLimit};

/// How a process came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    ByItself,
    AtItsLimit,
    AtTheEndOfTheWhole,
}

/// How a process ended.
pub struct Ended {
    pub success: bool,
    pub end: End,
    pub status: String,
    pub said: String,
}

impl Ended {
    /// What to report of one that failed: the end of what it said.
    pub fn complaint(&self) -> String {
        let how = match self.end {
            End::ByItself => self.status.clone(),
            _ => "HANG: it was ended at its time limit".into(),
        };
        let lines: Vec<&str> = self.said.lines().collect();
        let tail = lines[lines.len().saturating_sub(30)..].join("\n");
        format!("{how}\n{tail}")
    }
}

/// Runs it, and has what came of it judged; unless the time of the whole was up before the process had its own, which says nothing of it.
pub fn judged(
    command: &mut Command,
    limit: StepLimit,
    judge: impl FnOnce(&Ended) -> CheckedStep,
) -> CheckedStep {
    match run(command, limit) {
        Ok(ended) if ended.end == End::AtTheEndOfTheWhole => {
            let after = limit.time.as_secs_f64();
            CheckedStep::waived(format!("{NO_TIME}: it was ended after {after:.0} s"))
        }
        Ok(ended) => judge(&ended),
        Err(error) => CheckedStep::failed(format!("{error:#}")),
    }
}

/// After its end, for what it said to come out of the pipes; and after a kill, for the end. A process that a driver holds may never end.
const AFTERWARDS: Duration = Duration::from_secs(5);

/// Runs it, for no longer than that.
pub fn run(command: &mut Command, limit: StepLimit) -> Result<Ended> {
    use std::os::unix::process::CommandExt;
    // A group of its own, so that all that it has started ends with it.
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("{}", command.get_program().display()))?;
    let out = Said::of(child.stdout.take().context("no pipe")?);
    let err = Said::of(child.stderr.take().context("no pipe")?);
    let start = Instant::now();
    while !has_ended(&child) && start.elapsed() < limit.time {
        std::thread::sleep(Duration::from_millis(10));
    }
    let end = match (has_ended(&child), limit.is_of_the_whole) {
        (true, _) => End::ByItself,
        (false, true) => End::AtTheEndOfTheWhole,
        (false, false) => End::AtItsLimit,
    };
    // SAFETY: the group of a child that was not waited for yet, so the number is nobody else's.
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
    let said = format!("{}\n{}", err.until(until), out.until(until));
    Ok(Ended {
        success: end == End::ByItself && status.is_some_and(|status| status.success()),
        end,
        status: status.map_or("it does not end, killed or not".into(), |it| it.to_string()),
        said,
    })
}

/// Whether it has; it is not waited for, so that its number stays its own.
fn has_ended(child: &Child) -> bool {
    // SAFETY: plain numbers, all of which may be zero.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: writes the structure that it is given; a child that was not waited for.
    let result = unsafe { libc::waitid(libc::P_PID, child.id(), &mut info, options) };
    // SAFETY: of a SIGCHLD, as waitid fills it; zero if there was none.
    result != 0 || unsafe { info.si_pid() } != 0
}

/// What comes out of a pipe.
struct Said {
    bytes: Arc<Mutex<Vec<u8>>>,
    is_closed: Receiver<()>,
}

impl Said {
    fn of(mut pipe: impl Read + Send + 'static) -> Said {
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
        Said { bytes, is_closed }
    }

    /// All of it, or what has come by then: the pipe may be open in a process that left the group.
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

    fn shell(script: &str, time_ms: u64, is_of_the_whole: bool) -> (Ended, Duration) {
        let start = Instant::now();
        let time = Duration::from_millis(time_ms);
        let limit = StepLimit {
            time,
            is_of_the_whole,
        };
        let ended = run(Command::new("sh").args(["-c", script]), limit).unwrap();
        (ended, start.elapsed())
    }

    #[test]
    fn output_and_exit_status_are_returned() {
        let (ended, _) = shell("echo well; echo ill >&2", 20_000, false);
        assert_eq!(
            (ended.success, ended.end, ended.said.as_str()),
            (true, End::ByItself, "ill\n\nwell\n")
        );
        let (ended, _) = shell("exit 3", 20_000, false);
        assert!(!ended.success && ended.complaint().starts_with("exit status: 3"));
    }

    #[test]
    fn exceeded_limit_is_identified() {
        // A shell that gets no processor for as long has said nothing; not all of these times.
        let told = [100, 1_000, 10_000].into_iter().any(|time_ms| {
            let (ended, took) = shell("echo before; sleep 60", time_ms, false);
            assert_eq!(ended.end, End::AtItsLimit);
            assert!(ended.complaint().starts_with("HANG"));
            assert!(took < Duration::from_millis(time_ms) + Duration::from_secs(20));
            ended.said.contains("before")
        });
        assert!(told, "what it said before is lost");
        let mut slow = Command::new("sleep");
        let limit = StepLimit {
            time: Duration::from_millis(100),
            is_of_the_whole: true,
        };
        let step = judged(slow.arg("60"), limit, |_| {
            CheckedStep::failed("judged".into())
        });
        assert_eq!(step.outcome, StepOutcome::Waived);
        assert!(step.reason.contains(NO_TIME));
    }

    /// A process that is left behind holds the pipe. One that is still in the group is ended with the group, and one that is not is not
    /// waited for.
    #[test]
    fn orphaned_processes_are_not_waited_for() {
        let (ended, took) = shell("sleep 60 & echo gone", 20_000, false);
        assert!(ended.success && ended.said.contains("gone"));
        assert!(took < AFTERWARDS, "{took:?}");
        let (ended, took) = shell("setsid sleep 12 & echo gone", 20_000, false);
        assert!(ended.success && ended.said.contains("gone"));
        assert!(took < Duration::from_secs(11), "{took:?}");
    }
}
