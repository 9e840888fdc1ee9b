//! Host streams, from outside: order, limits, events, failures, ends.
#![cfg(not(loom))]

#[path = "rig/words.rs"]
mod words;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use doorbell::__private::{Outcome, Submission};
use doorbell::{Cause, Device, Error, Event, Executor, HostStream, Result, Spin, WorkError};
use words::Words;

/// Far more than any of this takes, even on a busy machine, so that a hang fails the test.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

fn submit_one(stream: &HostStream, submission: Submission) -> Result<()> {
    stream.submit_one(submission).map_err(|(_, error)| error)
}

/// Lets the stream run a kernel until the sender is used or dropped. Returns once it runs.
fn occupy(stream: &HostStream) -> mpsc::Sender<()> {
    let (go, gone) = mpsc::channel();
    let (here, arrived) = mpsc::channel();
    stream
        .launch(move || {
            here.send(()).unwrap();
            let _ = gone.recv();
        })
        .unwrap();
    arrived.recv_timeout(PATIENCE.unwrap()).unwrap();
    go
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(
            begin.elapsed() < PATIENCE.unwrap(),
            "waited in vain until {what}"
        );
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn reason<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Asynchronous { reason, .. }) => reason,
        other => panic!("expected an asynchronous error, not {other:?}"),
    }
}

/// A kernel that must never run. If it runs, it sets the flag.
fn forbidden(stream: &HostStream) -> Arc<AtomicBool> {
    let ran = Arc::new(AtomicBool::new(false));
    let mark = Arc::clone(&ran);
    stream
        .launch(move || mark.store(true, Ordering::Release))
        .unwrap();
    ran
}

#[test]
fn stream_works_and_ends_in_every_spin_mode() {
    let spins = [
        Spin::Auto,
        Spin::Never,
        Spin::Always,
        Spin::For(Duration::from_micros(200)),
        Spin::For(Duration::MAX),
    ];
    for first in spins {
        let stream = HostStream::new("spin").unwrap();
        stream.set_spin(first);
        let ended = Arc::new(());
        for then in spins {
            let done = Arc::new(AtomicU32::new(0));
            for round in 1..=20 {
                let counts = Arc::clone(&done);
                let kernel = move || _ = counts.fetch_add(1, Ordering::Relaxed);
                stream.launch(kernel).unwrap();
                stream.synchronize(PATIENCE).unwrap();
                assert_eq!(done.load(Ordering::Relaxed), round, "{first:?}, {then:?}");
                if round % 7 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            stream.set_spin(then);
        }
        let held = Arc::clone(&ended);
        stream.launch(move || drop(held)).unwrap();
        drop(stream);
        let began = Instant::now();
        while Arc::strong_count(&ended) > 1 {
            assert!(began.elapsed() < PATIENCE.unwrap(), "{first:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn kernels_and_programs_run_in_the_order_of_their_calls() {
    let stream = HostStream::with_capacity("order", 8).unwrap();
    let words = Words::new();
    for step in 0..500u32 {
        let before = Arc::clone(&words);
        submit_one(&stream, words.store(step.into(), 0, step)).unwrap();
        stream
            .launch(move || assert_eq!(before.get(0), step))
            .unwrap();
    }
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(stream.query(), Ok(true));
    let expected: Vec<_> = (0..500).map(|cookie| (cookie, Outcome::Done)).collect();
    assert_eq!(words.outcomes(), expected);
    assert_eq!(
        Arc::strong_count(&words),
        1,
        "nothing that is done keeps its owner"
    );
}

#[test]
fn producers_on_several_threads_keep_order_and_whole_batches() {
    const BATCHES: u64 = 200;
    let stream = HostStream::with_capacity("producers", 16).unwrap();
    let words = Words::new();
    let cookie = |producer: u64, number: u64, index: u64, length: u64| {
        producer << 32 | number << 8 | index << 4 | length
    };
    std::thread::scope(|scope| {
        for producer in 0..3u64 {
            let (stream, words) = (stream.clone(), &words);
            scope.spawn(move || {
                let mut batch = Vec::new();
                for number in 0..BATCHES {
                    let length = 1 + (number + producer) % 4;
                    for index in 0..length {
                        batch.push(words.store(cookie(producer, number, index, length), 0, 0));
                    }
                    if length == 1 {
                        submit_one(&stream, batch.pop().unwrap()).unwrap();
                    } else {
                        stream.submit(&mut batch).unwrap();
                    }
                    assert!(batch.is_empty());
                }
            });
        }
    });
    stream.synchronize(PATIENCE).unwrap();
    let outcomes = words.outcomes();
    let mut next = [0u64; 3];
    let mut rest = &outcomes[..];
    while let Some(&(first, _)) = rest.first() {
        let (producer, length) = (first >> 32, first & 15);
        let number = next[producer as usize];
        let (batch, behind) = rest.split_at(length as usize);
        for (index, &found) in (0..).zip(batch) {
            assert_eq!(
                found,
                (cookie(producer, number, index, length), Outcome::Done),
                "torn"
            );
        }
        next[producer as usize] += 1;
        rest = behind;
    }
    assert_eq!(next, [BATCHES; 3]);
}

#[test]
fn full_queue_blocks_caller_until_there_is_room() {
    let stream = HostStream::with_capacity("full", 4).unwrap();
    let words = Words::new();
    let go = occupy(&stream);
    for cookie in 0..3 {
        submit_one(&stream, words.store(cookie, 0, 0)).unwrap();
    }
    let mut batch = vec![words.store(3, 0, 0), words.store(4, 0, 0)];
    let blocked = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stream.submit(&mut batch).unwrap();
            blocked.store(false, Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(
            blocked.load(Ordering::Acquire),
            "six entries in a queue of four"
        );
        assert!(words.outcomes().is_empty());
        go.send(()).unwrap();
    });
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.outcomes().len(), 5);
}

#[test]
fn failure_ends_the_wait_for_room_and_queues_nothing() {
    let stream = HostStream::with_capacity("full", 2).unwrap();
    let words = Words::new();
    submit_one(&stream, words.wait(1, 5)).unwrap();
    submit_one(&stream, words.wait(2, 6)).unwrap();
    let mut batch = vec![words.store(3, 2, 1), words.store(4, 2, 1)];
    std::thread::scope(|scope| {
        let submitted = scope.spawn(|| stream.submit(&mut batch));
        std::thread::sleep(Duration::from_millis(5));
        words.released.store(1, Ordering::Relaxed);
        assert!(reason(submitted.join().unwrap()).contains("a wait was released"));
    });
    assert_eq!(batch.len(), 2);
    assert!(stream.take_fault().is_some());
    stream.submit(&mut batch).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    let cookies: Vec<_> = words.outcomes().iter().map(|outcome| outcome.0).collect();
    assert_eq!(cookies, [1, 2, 3, 4]);
}

#[test]
fn batch_is_queued_completely_or_not_at_all() {
    let stream = HostStream::with_capacity("batch", 4).unwrap();
    let (words, others) = (Words::new(), Words::new());
    let mut long: Vec<_> = (0..5).map(|cookie| words.store(cookie, 0, 1)).collect();
    let too_long = Error::Range {
        argument: "batch.len()",
        value: 5,
        min: 0,
        max: 4,
    };
    assert_eq!(stream.submit(&mut long), Err(too_long));
    assert_eq!(long.len(), 5);
    let stranger = Submission {
        owner: others.clone(),
        ..words.store(1, 0, 1)
    };
    let mut mixed = vec![words.store(0, 0, 1), stranger.clone()];
    assert!(matches!(
        stream.submit(&mut mixed),
        Err(Error::Foreign {
            argument: "program",
            ..
        })
    ));
    assert_eq!(
        mixed
            .iter()
            .map(|submission| submission.cookie)
            .collect::<Vec<_>>(),
        [0, 1]
    );
    let (returned, error) = stream.submit_one(stranger).unwrap_err();
    assert_eq!(returned.cookie, 1);
    assert!(matches!(error, Error::Foreign { .. }));
    stream.submit(&mut Vec::new()).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(0), 0);
    assert!(words.outcomes().is_empty() && others.outcomes().is_empty());
    long.pop();
    stream.submit(&mut long).unwrap();
    assert!(long.is_empty());
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.outcomes().len(), 4);
}

#[test]
fn capacity_has_limits_and_is_a_power_of_two() {
    for capacity in [0, 65537] {
        let value = capacity as u64;
        assert_eq!(
            HostStream::with_capacity("x", capacity).unwrap_err(),
            Error::Range {
                argument: "capacity",
                value,
                min: 1,
                max: 65536
            }
        );
    }
    assert_eq!(HostStream::with_capacity("a\0b", 5).unwrap().capacity(), 8);
    assert_eq!(HostStream::new("x").unwrap().capacity(), 1024);
    let one = HostStream::with_capacity("one", 1).unwrap();
    let count = Arc::new(AtomicU32::new(0));
    for _ in 0..100 {
        let count = Arc::clone(&count);
        one.launch(move || _ = count.fetch_add(1, Ordering::Relaxed))
            .unwrap();
    }
    one.synchronize(PATIENCE).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 100);
}

#[test]
fn events_may_be_unrecorded_or_recorded_again() {
    let stream = HostStream::new("events").unwrap();
    for event in [Event::new(), Event::blocking()] {
        stream.wait_event(&event).unwrap();
        event.synchronize(Some(Duration::ZERO)).unwrap();
        let go = occupy(&stream);
        stream.record(&event).unwrap();
        assert_eq!(event.query(), Ok(false));
        let timeout = Duration::from_millis(5);
        assert!(matches!(
            event.synchronize(Some(timeout)),
            Err(Error::Timeout { .. })
        ));
        drop(go);
        event.synchronize(PATIENCE).unwrap();
        assert_eq!(
            stream.query(),
            Ok(true),
            "an event that passed is done with"
        );
        let go = occupy(&stream);
        assert_eq!(event.query(), Ok(true), "until it is recorded again");
        stream.record(&event).unwrap();
        assert_eq!(event.query(), Ok(false));
        drop(go);
        event.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn wait_event_waits_for_the_latest_record_at_the_call() {
    let [first, second, waiting] = ["1", "2", "3"].map(|name| HostStream::new(name).unwrap());
    let event = Event::new();
    let (go_first, go_second) = (occupy(&first), occupy(&second));
    first.record(&event).unwrap();
    waiting.wait_event(&event).unwrap();
    second.record(&event).unwrap();
    let ran = forbidden(&waiting);
    std::thread::sleep(Duration::from_millis(10));
    assert!(
        !ran.load(Ordering::Acquire),
        "it went on before the record that it waits for"
    );
    drop(go_first);
    waiting.synchronize(PATIENCE).unwrap();
    assert!(ran.load(Ordering::Acquire));
    assert_eq!(
        event.query(),
        Ok(false),
        "the event stands for the second stream's work"
    );
    drop(go_second);
    event.synchronize(PATIENCE).unwrap();
}

#[test]
fn elapsed_is_the_time_between_two_records() {
    let stream = HostStream::new("time").unwrap();
    let (start, end) = (Event::new(), Event::new());
    let begin = Instant::now();
    stream.record(&start).unwrap();
    stream
        .launch(|| std::thread::sleep(Duration::from_millis(5)))
        .unwrap();
    stream.record(&end).unwrap();
    end.synchronize(PATIENCE).unwrap();
    let whole = begin.elapsed();
    let elapsed = start.elapsed(&end).unwrap();
    let least = Duration::from_millis(5);
    assert!((least..=whole).contains(&elapsed), "{elapsed:?}, {whole:?}");
}

#[test]
fn synchronize_timeout_leaves_the_stream_running() {
    let stream = HostStream::new("deadline").unwrap();
    let words = Words::new();
    submit_one(&stream, words.wait(1, 3)).unwrap();
    assert_eq!(stream.query(), Ok(false));
    let timeout = Duration::from_millis(5);
    let begin = Instant::now();
    let late = Error::Timeout {
        operation: "stream synchronize",
        timeout,
    };
    assert_eq!(stream.synchronize(Some(timeout)), Err(late));
    assert!(begin.elapsed() >= timeout);
    words.set(0, 3);
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(1), 3);
    assert_eq!(words.outcomes(), [(1, Outcome::Done)]);
}

#[test]
fn panic_is_sticky_and_discards_later_work() {
    let stream = HostStream::new("panic").unwrap();
    let words = Words::new();
    let (before, after) = (Event::new(), Event::blocking());
    let go = occupy(&stream);
    submit_one(&stream, words.store(1, 0, 1)).unwrap();
    stream.record(&before).unwrap();
    stream.launch(|| panic!("bad kernel {}", 5)).unwrap();
    submit_one(&stream, words.wait(2, 9)).unwrap();
    let ran = forbidden(&stream);
    stream.record(&after).unwrap();
    let other = HostStream::new("other").unwrap();
    other.wait_event(&after).unwrap();
    drop(go);
    assert_eq!(
        reason(stream.synchronize(PATIENCE)),
        "panicked: bad kernel 5"
    );
    assert_eq!(
        words.outcomes(),
        [(1, Outcome::Done), (2, Outcome::Discarded)]
    );
    assert_eq!(words.started.load(Ordering::Relaxed), 1);
    assert!(!ran.load(Ordering::Acquire));
    assert_eq!(Arc::strong_count(&ran), 1, "a discarded kernel is dropped");
    // The event passes, and the stream that waited for it fails too.
    let text = reason(other.synchronize(PATIENCE));
    assert!(
        text.contains("waited for an event") && text.contains("bad kernel 5"),
        "{text}"
    );
    assert_eq!(
        before.synchronize(PATIENCE),
        Ok(()),
        "what was done before stays done"
    );
    for result in [after.synchronize(PATIENCE), after.query().map(drop)] {
        assert!(reason(result).contains("bad kernel 5"));
    }
    let mut batch = vec![words.store(3, 0, 3)];
    for _ in 0..2 {
        reason(stream.query());
        reason(stream.launch(|| ()));
        reason(stream.record(&after));
        reason(stream.wait_event(&before));
        reason(stream.submit(&mut batch));
        reason(submit_one(&stream, batch[0].clone()));
        reason(stream.synchronize(PATIENCE));
    }
    assert_eq!(batch.len(), 1);
    assert_eq!(words.get(0), 1);
    let taken = stream.take_fault().unwrap();
    assert!(reason::<()>(Err(taken)).contains("bad kernel 5"));
    stream.submit(&mut batch).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(0), 3);
}

#[test]
fn owner_panic_fails_the_stream_and_finishes_the_program() {
    let stream = HostStream::new("owner").unwrap();
    let words = Words::new();
    words.panics.store(true, Ordering::Relaxed);
    submit_one(&stream, words.store(6, 0, 1)).unwrap();
    let text = reason(stream.synchronize(PATIENCE));
    assert!(
        text.contains("the owner of a program panicked") && text.contains("owner says no"),
        "{text}"
    );
    assert_eq!(words.outcomes(), [(6, Outcome::Discarded)]);
    assert_eq!(words.get(0), 0);
}

#[test]
fn released_wait_is_reported_once_with_continue_on_error() {
    let stream = HostStream::new("released").unwrap();
    stream.continue_on_error(true);
    let words = Words::new();
    submit_one(&stream, words.wait(5, 8)).unwrap();
    submit_one(&stream, words.store(6, 2, 1)).unwrap();
    words.released.store(5, Ordering::Relaxed);
    assert!(reason(stream.synchronize(PATIENCE)).contains("a wait was released"));
    assert_eq!(
        words.outcomes(),
        [(5, Outcome::Released), (6, Outcome::Done)]
    );
    assert_eq!(words.get(1), 8, "the ops behind the wait are executed");
    assert_eq!(stream.synchronize(PATIENCE), Ok(()), "once");
    // A call that reports an earlier failure does nothing else.
    submit_one(&stream, words.wait(5, 8)).unwrap();
    until("it finished", || words.outcomes().len() == 3);
    let (returned, error) = stream.submit_one(words.store(7, 3, 1)).unwrap_err();
    reason::<()>(Err(error));
    stream.submit_one(returned).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(3), 1);
}

#[test]
fn program_without_memory_is_discarded_and_its_fault_is_sticky() {
    let stream = HostStream::new("unmapped").unwrap();
    let words = Words::new();
    words.mapped.store(false, Ordering::Relaxed);
    submit_one(&stream, words.store(4, 0, 1)).unwrap();
    assert!(reason(stream.synchronize(PATIENCE)).contains("no memory in this process"));
    assert_eq!(words.outcomes(), [(4, Outcome::Discarded)]);
    reason(stream.synchronize(PATIENCE));
    assert!(stream.take_fault().is_some());
    words.mapped.store(true, Ordering::Relaxed);
    submit_one(&stream, words.store(5, 0, 1)).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(0), 1);
}

#[test]
fn dropped_stream_completes_its_work_and_events_stay_usable() {
    let words = Words::new();
    let event = Event::blocking();
    let stream = HostStream::new("dropped").unwrap();
    let clone = stream.clone();
    let go = occupy(&stream);
    for cookie in 0..100 {
        submit_one(&stream, words.store(cookie, 0, cookie as u32)).unwrap();
    }
    stream.record(&event).unwrap();
    drop(stream);
    let ran = forbidden(&clone);
    drop(clone);
    // The drop returned although the first kernel still runs.
    assert_eq!(event.query(), Ok(false));
    drop(go);
    event.synchronize(PATIENCE).unwrap();
    assert_eq!(words.outcomes().len(), 100);
    until("the kernel behind the event ran", || {
        ran.load(Ordering::Acquire)
    });
    let late = HostStream::new("late").unwrap();
    late.wait_event(&event).unwrap();
    late.synchronize(PATIENCE).unwrap();
    late.record(&event).unwrap();
    event.synchronize(PATIENCE).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn thread_ends_after_its_stream_is_dropped_busy_or_idle() {
    let threads = |name: &str| {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|comm| comm.trim_end() == name)
            .count()
    };
    let words = Words::new();
    let idle = HostStream::new("ends-idle").unwrap();
    let busy = HostStream::new("ends-busy").unwrap();
    submit_one(&busy, words.wait(1, 1)).unwrap();
    until("both run", || {
        threads("ends-idle") + threads("ends-busy") == 2
    });
    // By now the idle one sleeps.
    std::thread::sleep(Duration::from_millis(5));
    drop((idle, busy));
    until("the idle thread has ended", || threads("ends-idle") == 0);
    assert_eq!(threads("ends-busy"), 1, "its wait has not ended");
    words.set(0, 1);
    until("the busy thread has ended", || threads("ends-busy") == 0);
    assert_eq!(words.outcomes(), [(1, Outcome::Done)]);
}

#[test]
fn stream_dropped_during_a_released_wait_ends() {
    let words = Words::new();
    let stream = HostStream::new("blocked").unwrap();
    stream.continue_on_error(true);
    submit_one(&stream, words.wait(1, 5)).unwrap();
    submit_one(&stream, words.store(2, 2, 7)).unwrap();
    until("the wait began", || {
        words.started.load(Ordering::Relaxed) == 1
    });
    drop(stream);
    words.released.store(1, Ordering::Relaxed);
    until("both finished", || words.outcomes().len() == 2);
    assert_eq!(
        words.outcomes(),
        [(1, Outcome::Released), (2, Outcome::Done)]
    );
    until("the owner is free", || Arc::strong_count(&words) == 1);
}

#[test]
fn abort_ends_waits_discards_the_queue_and_keeps_the_stream_usable() {
    let [stream, other] = ["abort", "other"].map(|name| HostStream::new(name).unwrap());
    let words = Words::new();
    let event = Event::blocking();
    submit_one(&stream, words.wait(1, 5)).unwrap();
    submit_one(&stream, words.store(2, 2, 7)).unwrap();
    let ran = forbidden(&stream);
    stream.record(&event).unwrap();
    other.wait_event(&event).unwrap();
    until("the wait began", || {
        words.started.load(Ordering::Relaxed) == 1
    });
    stream.abort();
    stream
        .synchronize(PATIENCE)
        .expect("an abort is not a fault");
    assert!(!ran.load(Ordering::Acquire));
    assert_eq!(
        words.outcomes(),
        [(1, Outcome::Discarded), (2, Outcome::Discarded)]
    );
    assert_eq!((words.get(1), words.get(2)), (0, 0));
    assert_eq!(reason(event.synchronize(PATIENCE)), "discarded by abort");
    assert!(reason(other.synchronize(PATIENCE)).contains("discarded by abort"));
    submit_one(&stream, words.store(3, 2, 9)).unwrap();
    stream.record(&event).unwrap();
    event.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(2), 9);
}

#[test]
fn abort_breaks_a_deadlock_of_streams() {
    let [a, b] = ["a", "b"].map(|name| HostStream::new(name).unwrap());
    let (of_a, of_b) = (Event::new(), Event::new());
    let words = Words::new();
    // a waits for a word that b stores behind its wait for a.
    submit_one(&a, words.wait(1, 1)).unwrap();
    a.record(&of_a).unwrap();
    b.wait_event(&of_a).unwrap();
    submit_one(&b, words.store(2, 0, 1)).unwrap();
    b.record(&of_b).unwrap();
    let timeout = Some(Duration::from_millis(10));
    assert!(matches!(
        of_b.synchronize(timeout),
        Err(Error::Timeout { .. })
    ));
    b.abort();
    reason(of_b.synchronize(PATIENCE));
    assert_eq!(a.query(), Ok(false));
    a.abort();
    a.synchronize(PATIENCE).unwrap();
    b.synchronize(PATIENCE).unwrap();
    assert_eq!(words.get(0), 0);
}

#[test]
fn work_behind_a_fault_is_discarded_even_after_take_fault() {
    let stream = HostStream::new("taken at once").unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let taken = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Two threads, which also race with each other.
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    if stream.take_fault().is_some() {
                        taken.fetch_add(1, Ordering::AcqRel);
                    }
                    // The stream's thread needs a processor too.
                    std::thread::yield_now();
                }
            });
        }
        let ran = Arc::new(AtomicBool::new(false));
        for round in 0..3000 {
            // Queued while the stream is held, so that the second is behind the first.
            let gate = Arc::new(AtomicBool::new(false));
            let (opened, runs) = (Arc::clone(&gate), Arc::clone(&ran));
            let queued = stream
                .launch(move || {
                    while !opened.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    panic!("round {round}");
                })
                .and_then(|()| stream.launch(move || runs.store(true, Ordering::Release)));
            queued.unwrap();
            gate.store(true, Ordering::Release);
            let start = Instant::now();
            while taken.load(Ordering::Acquire) <= round {
                assert!(Some(start.elapsed()) < PATIENCE);
                std::thread::yield_now();
            }
            stream.synchronize(PATIENCE).unwrap();
            if ran.load(Ordering::Acquire) {
                is_over.store(true, Ordering::Release);
                panic!("round {round}: what was behind a panic has run");
            }
        }
        is_over.store(true, Ordering::Release);
    });
}

#[test]
fn stream_with_continue_on_error_continues_after_a_panic() {
    let stream = HostStream::new("goes on").unwrap();
    stream.continue_on_error(true);
    let ran = Arc::new(AtomicBool::new(false));
    let runs = Arc::clone(&ran);
    let gate = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&gate);
    stream
        .launch(move || {
            while !opened.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            panic!("once");
        })
        .unwrap();
    stream
        .launch(move || runs.store(true, Ordering::Release))
        .unwrap();
    gate.store(true, Ordering::Release);
    let told = stream.synchronize(PATIENCE).unwrap_err().to_string();
    assert!(told.contains("panicked: once"), "{told}");
    assert!(ran.load(Ordering::Acquire));
    stream.synchronize(PATIENCE).unwrap();
}

#[test]
fn the_error_of_a_kernel_is_the_fault_of_its_stream() {
    let stream = HostStream::new("fails").unwrap();
    let unknown = || Device::open("no such device").map(drop);
    let expected = unknown().unwrap_err();
    let go = occupy(&stream);
    stream.try_launch(|| Ok(())).unwrap();
    stream.try_launch(unknown).unwrap();
    let ran = forbidden(&stream);
    drop(go);
    let text = format!("a kernel failed: {expected}");
    assert_eq!(reason(stream.synchronize(PATIENCE)), text);
    assert_eq!(reason(stream.try_launch(|| Ok(()))), text);
    assert!(!ran.load(Ordering::Acquire));
    stream.take_fault().unwrap();
    // The failure of an endpoint stays what it is, also when it comes by way of another stream's report.
    let work = WorkError::new(7, Some(3), Cause::Deadline(Duration::from_secs(1)));
    let by_stream = Error::Asynchronous {
        stream: "other".into(),
        reason: "a wait".into(),
        work: Some(work),
    };
    for error in [Error::Work(work), by_stream] {
        let text = format!("a kernel failed: {error}");
        stream.try_launch(move || Err(error)).unwrap();
        match stream.synchronize(PATIENCE).unwrap_err() {
            Error::Asynchronous {
                reason, work: kept, ..
            } => assert_eq!((reason, kept), (text, Some(work))),
            other => panic!("{other:?}"),
        }
        stream.take_fault().unwrap();
    }
    // It passes where a stream goes on behind failures.
    stream.continue_on_error(true);
    stream.try_launch(unknown).unwrap();
    let ran = forbidden(&stream);
    reason(stream.synchronize(PATIENCE));
    assert!(ran.load(Ordering::Acquire));
    stream.synchronize(PATIENCE).unwrap();
}

#[test]
fn event_wait_reports_the_failure_of_its_first_record() {
    let (failing, other) = (
        HostStream::new("failing").unwrap(),
        HostStream::new("other").unwrap(),
    );
    // Records the event behind a failure, and again while a thread waits for it. Returns the result of the thread's wait.
    let wait_across_records = |event: &Event, head_start: Duration| {
        let gate = Arc::new(AtomicBool::new(false));
        let opened = Arc::clone(&gate);
        failing
            .launch(move || {
                while !opened.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                panic!("the record's reason");
            })
            .unwrap();
        failing.record(event).unwrap();
        let waited = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| event.synchronize(PATIENCE));
            std::thread::sleep(head_start);
            other.record(event).unwrap();
            other.synchronize(PATIENCE).unwrap();
            gate.store(true, Ordering::Release);
            waiter.join().unwrap()
        });
        event.synchronize(PATIENCE).unwrap();
        let fault = failing.take_fault().unwrap().to_string();
        assert!(fault.contains("the record's reason"), "{fault}");
        waited
    };
    for event in [Event::new(), Event::blocking()] {
        // A wait that begins behind the second record rightly succeeds. Nothing shows from outside that a wait has begun, so a thread that was not
        // scheduled in time gets longer.
        let reported = (1..=10)
            .find_map(|attempt| {
                wait_across_records(&event, Duration::from_millis(50 << attempt)).err()
            })
            .expect("a wait that begins before the second record reports the first one's failure");
        assert!(
            reported.to_string().contains("the record's reason"),
            "{reported}"
        );
    }
}

#[test]
fn events_behind_a_fault_report_its_cause_after_take_fault() {
    let stream = HostStream::new("causes").unwrap();
    for _ in 0..20 {
        let gate = Arc::new(AtomicBool::new(false));
        let opened = Arc::clone(&gate);
        stream
            .launch(move || {
                while !opened.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                panic!("the first cause");
            })
            .unwrap();
        let events: Vec<Event> = (0..500).map(|_| Event::new()).collect();
        events
            .iter()
            .for_each(|event| stream.record(event).unwrap());
        gate.store(true, Ordering::Release);
        // While the stream discards them.
        let start = Instant::now();
        while stream.take_fault().is_none() {
            assert!(Some(start.elapsed()) < PATIENCE);
        }
        for event in &events {
            let told = event.synchronize(PATIENCE).unwrap_err().to_string();
            assert!(told.contains("the first cause"), "{told}");
        }
    }
}

/// The stream has reported a failure and has not reached the record, which it will discard. Its own wait for that record fails like a wait of another
/// stream.
#[test]
fn a_stream_that_waits_for_its_own_discarded_record_fails() {
    struct Held(mpsc::Receiver<()>);
    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }
    let stream = HostStream::new("own").unwrap();
    let (let_go, held) = mpsc::channel();
    let held = Held(held);
    let event = Event::new();
    // Queued together, before a call can report the panic.
    let (begin, begun) = mpsc::channel();
    stream
        .launch(move || {
            let _ = begun.recv();
            panic!("on purpose");
        })
        .unwrap();
    // It is discarded, and keeps the thread of the stream.
    stream.launch(move || drop(held)).unwrap();
    stream.record(&event).unwrap();
    begin.send(()).unwrap();
    while stream.take_fault().is_none() {
        std::thread::yield_now();
    }
    stream.wait_event(&event).unwrap();
    let ran = Arc::new(AtomicBool::new(false));
    let runs = Arc::clone(&ran);
    stream
        .launch(move || runs.store(true, Ordering::Relaxed))
        .unwrap();
    let_go.send(()).unwrap();
    let error = stream.synchronize(PATIENCE).unwrap_err();
    assert!(error.to_string().contains("waited for an event"), "{error}");
    assert!(!ran.load(Ordering::Relaxed));
}

#[test]
fn calls_inside_a_kernel_that_would_deadlock_are_refused() {
    let stream = HostStream::with_capacity("self", 2).unwrap();
    let (report, results) = mpsc::channel();
    let inside = stream.clone();
    let kernel = move || {
        let event = Event::new();
        report.send(inside.synchronize(None)).unwrap();
        report.send(inside.record(&event)).unwrap();
        report.send(event.synchronize(None)).unwrap();
        report.send(inside.launch(|| ())).unwrap();
    };
    stream.launch(kernel).unwrap();
    let results: Vec<_> = results.iter().collect();
    let refused = |result: &Result<()>| {
        matches!(
            result,
            Err(Error::State {
                kind: doorbell::StateKind::Deadlock,
                ..
            })
        )
    };
    assert!(refused(&results[0]), "{:?}", results[0]);
    assert_eq!(results[1], Ok(()), "there is room for one more");
    assert!(refused(&results[2]), "{:?}", results[2]);
    assert!(refused(&results[3]), "{:?}", results[3]);
    stream.synchronize(PATIENCE).unwrap();
}

/// The shortest time between two marks: for the others the machine may have been busy.
fn shortest(marks: &Mutex<Vec<Instant>>) -> Duration {
    let marks = marks.lock().unwrap();
    let rounds = marks.windows(2).map(|pair| pair[1] - pair[0]);
    rounds.min().expect("several rounds")
}

fn mark(stream: &HostStream, marks: &Arc<Mutex<Vec<Instant>>>) {
    let marks = Arc::clone(marks);
    stream
        .launch(move || marks.lock().unwrap().push(Instant::now()))
        .unwrap();
}

/// The shortest time from one stream to the next.
fn hop_by_polls(streams: &[HostStream], rounds: u32) -> Duration {
    let marks = Arc::default();
    let words = Words::new();
    // A token goes round: each stream waits for its word and stores to the next one's.
    for round in 1..=rounds {
        for (index, stream) in streams.iter().enumerate() {
            let next = (index + 1) % streams.len();
            let value = if next == 0 { round + 1 } else { round };
            let hop = words.submission(0, |program| {
                program.poll_geq(words.dword(index as u64), round)?;
                program.store_dword(words.dword(next as u64), value)
            });
            submit_one(stream, hop).unwrap();
        }
        mark(&streams[0], &marks);
    }
    words.set(0, 1);
    for stream in streams {
        stream.synchronize(PATIENCE).unwrap();
    }
    assert_eq!(words.get(0), rounds + 1);
    shortest(&marks) / streams.len() as u32
}

/// As [`hop_by_polls`], by events that the streams record and wait for.
fn hop_by_events(streams: &[HostStream], rounds: u32) -> Duration {
    let marks = Arc::default();
    let mut last = Event::new();
    for _ in 0..rounds {
        for stream in streams {
            let event = Event::new();
            stream.wait_event(&last).unwrap();
            stream.record(&event).unwrap();
            last = event;
        }
        mark(&streams[0], &marks);
    }
    last.synchronize(PATIENCE).unwrap();
    streams[0].synchronize(PATIENCE).unwrap();
    shortest(&marks) / streams.len() as u32
}

#[test]
fn more_waiting_streams_than_cores_have_low_latency() {
    const ROUNDS: u32 = 50;
    let streams: Vec<_> = (0..6)
        .map(|index| HostStream::new(format!("ring{index}")).unwrap())
        .collect();
    // A busy machine may make every round of one measurement slow.
    let quick = |way: &str, hop: &dyn Fn() -> Duration| {
        let is_quick = (0..5).any(|_| {
            let per_hop = hop();
            println!("{per_hop:?} per hop over {way}");
            per_hop < Duration::from_millis(4)
        });
        assert!(is_quick, "over {way}");
    };
    quick("polls", &|| hop_by_polls(&streams, ROUNDS));
    quick("events", &|| hop_by_events(&streams, ROUNDS));
}
