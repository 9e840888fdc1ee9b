//! What the programs of this folder share: how ranks are started, the processor time that they take, and plots.
#![allow(dead_code, unused_imports)] // no program uses all of it
#![allow(unsafe_code)] // a signal to this process, and what it has used of the processor

pub mod digits;
mod plot;
pub mod recorder;

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use doorbell::{Group, GroupConfig, LaunchEnvironment};

pub use plot::{Bar, Line, Plot, timeline};
pub use recorder::Recorder;

/// Runs `rank` as one rank of a job. Under a launcher (`mpirun`, `torchrun`, `srun`) this process is the rank that the launcher says. Without one it starts `size` copies of
/// itself, with its own arguments, and waits for them.
///
/// # Errors
/// That of `rank`, or, without a launcher, the first rank that did not end well.
pub fn run(size: u32, rank: impl FnOnce(Group) -> Result<()>) -> Result<()> {
    run_with(size, None, &GroupConfig::default(), rank)
}

/// [`run`], where the rank `victim` is to be killed: that it ends otherwise is an error.
///
/// # Errors
/// As [`run`].
pub fn run_with_victim(
    size: u32,
    victim: Option<u32>,
    rank: impl FnOnce(Group) -> Result<()>,
) -> Result<()> {
    run_with(size, victim, &GroupConfig::default(), rank)
}

/// [`run_with_victim`], with another configuration of the group.
///
/// # Errors
/// As [`run`].
pub fn run_with(
    size: u32,
    victim: Option<u32>,
    config: &GroupConfig,
    rank: impl FnOnce(Group) -> Result<()>,
) -> Result<()> {
    if LaunchEnvironment::from_env().is_ok() {
        return rank(Group::from_env_with(config)?);
    }
    let mut ranks = Ranks::start(size)?;
    for rank in 0..size {
        let status = ranks.wait(rank)?;
        let is_right = match victim {
            Some(victim) if victim == rank => was_killed(status),
            _ => status.success(),
        };
        ensure!(is_right, "rank {rank} of {size}: {status}");
    }
    Ok(())
}

/// The ranks of the job: as many as the launcher has started, or without one `ranks`.
pub fn size(ranks: u32) -> u32 {
    LaunchEnvironment::from_env().map_or(ranks, |launched| launched.size())
}

/// Copies of this program on this host, one for each rank. Those that still run are killed when this is dropped.
pub struct Ranks {
    children: Vec<Child>,
}

impl Ranks {
    /// Starts a job of `size` ranks with the arguments of this process.
    pub fn start(size: u32) -> Result<Ranks> {
        let mut ranks = Ranks {
            children: Vec::new(),
        };
        let job = Job::new()?;
        for rank in 0..size {
            ranks.children.push(job.spawn(rank, size)?);
        }
        Ok(ranks)
    }

    /// Waits until a rank has ended.
    pub fn wait(&mut self, rank: u32) -> Result<ExitStatus> {
        Ok(self.children[rank as usize].wait()?)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Where the ranks of a job that this process starts meet.
struct Job {
    port: u16,
    token: String,
}

impl Job {
    fn new() -> Result<Job> {
        // The port is free again when this returns. Rank 0 fails with an error if another program takes it meanwhile.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let token = format!("{}-{port}", std::process::id());
        Ok(Job { port, token })
    }

    fn spawn(&self, rank: u32, size: u32) -> Result<Child> {
        let program = std::env::current_exe()?;
        Command::new(&program)
            .args(std::env::args_os().skip(1))
            .env("DOORBELL_RANK", rank.to_string())
            .env("DOORBELL_SIZE", size.to_string())
            .env("DOORBELL_MASTER_ADDR", "127.0.0.1")
            .env("DOORBELL_MASTER_PORT", self.port.to_string())
            .env("DOORBELL_TOKEN", &self.token)
            .spawn()
            .with_context(|| program.display().to_string())
    }
}

/// Whether a process was killed, as opposed to having ended by itself.
pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(libc::SIGKILL)
}

/// Ends this process at once, as a power failure would: nothing is flushed, closed or told.
pub fn kill_myself() -> ! {
    // SAFETY: sends a signal, which cannot be caught.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("SIGKILL returns")
}

/// A barrier for ranks that have nothing to do while others work, however long that takes: unlike [`Group::barrier`] it ends only when all ranks are here or one has failed. A rank
/// that works has a limit of its own for each wait, and fails if that is over.
pub fn wait_for_all(group: &Group) -> Result<()> {
    Ok(group.store().barrier(Duration::MAX)?)
}

/// The numbers of all ranks of a group, by rank, on each of them.
pub fn gather(group: &Group, own: &[u64]) -> Result<Vec<Vec<u64>>> {
    let own: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
    let all = group.store().gather(&own, Duration::from_secs(30))?;
    let words = |bytes: Vec<u8>| {
        let words = bytes.as_chunks().0.iter();
        words.map(|word| u64::from_le_bytes(*word)).collect()
    };
    Ok(all.into_iter().map(words).collect())
}

/// The time by the monotonic clock, which the processes of a host share.
pub fn monotonic_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes the structure. It cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The name of this host. Ranks with the same one share its cores and its monotonic clock.
pub fn host_name() -> Result<Vec<u8>> {
    let mut name = vec![0; 256];
    // SAFETY: the call writes at most as many bytes as the vector has.
    if unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) } != 0 {
        bail!("gethostname: {}", std::io::Error::last_os_error());
    }
    name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(256));
    Ok(name)
}

/// Processor time of the calling thread, user and system.
pub fn thread_time() -> Result<Duration> {
    usage(libc::RUSAGE_THREAD)
}

/// Processor time of this process, with the threads of the library.
pub fn process_time() -> Result<Duration> {
    usage(libc::RUSAGE_SELF)
}

fn usage(of: libc::c_int) -> Result<Duration> {
    // SAFETY: all zeros are a valid value; the call writes it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        if libc::getrusage(of, &mut usage) != 0 {
            bail!("getrusage: {}", std::io::Error::last_os_error());
        }
        usage
    };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    Ok(time(usage.ru_utime) + time(usage.ru_stime))
}
