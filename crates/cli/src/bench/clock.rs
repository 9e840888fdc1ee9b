//! CPU time of the calling thread: what a loop costs the application, whatever else runs.
#![allow(
    unsafe_code,
    reason = "clock_gettime is a C call; std has no thread CPU clock"
)]

use std::time::Duration;

/// CPU time that this thread has used so far (CLOCK_THREAD_CPUTIME_ID).
///
/// # Errors
/// The system has no such clock.
pub fn thread_cpu_time() -> std::io::Result<Duration> {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live timespec, and the call writes nothing else.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn work_counts_and_sleep_does_not() {
        let before = thread_cpu_time().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let slept = thread_cpu_time().unwrap() - before;
        assert!(
            slept < Duration::from_millis(25),
            "asleep, yet {slept:?} of CPU"
        );

        // Other threads of a loaded machine may take the processor away: bound the work by the clock under test.
        let (before, start) = (thread_cpu_time().unwrap(), Instant::now());
        while thread_cpu_time().unwrap() - before < Duration::from_millis(5) {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "spinning, yet the clock stands"
            );
        }
    }
}
