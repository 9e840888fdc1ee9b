//! Host streams without a thread, from outside: who executes them, where they stop, and what becomes of work that nobody waits for.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;
#[path = "rig/words.rs"]
mod words;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::ThreadId;
use std::time::Duration;

use doorbell::__private::Outcome;
use doorbell::{
    Cause, EndpointConfig, Error, Event, Executor, HostStream, QueueKind, Result, StateKind,
    Status, Work,
};
use doorbell_wire::bytecode::Program;
use rig::{Limit, Pair, Random, SOON, device, from_env};
use words::Words;

/// Programs of words on a stream.
trait OnStream {
    fn queue(
        &self,
        stream: &HostStream,
        cookie: u64,
        build: impl FnOnce(&mut Program) -> Result<()>,
    ) -> Result<()>;

    /// Stores to a word.
    fn queue_store(&self, stream: &HostStream, cookie: u64, index: u64, value: u32);

    /// Waits for a word to reach 1.
    fn queue_wait(&self, stream: &HostStream, cookie: u64, index: u64);
}

impl OnStream for Arc<Words> {
    fn queue(
        &self,
        stream: &HostStream,
        cookie: u64,
        build: impl FnOnce(&mut Program) -> Result<()>,
    ) -> Result<()> {
        let queued = stream.submit_one(self.submission(cookie, build));
        queued.map_err(|(_, error)| error)
    }

    fn queue_store(&self, stream: &HostStream, cookie: u64, index: u64, value: u32) {
        let submission = self.store(cookie, index, value);
        stream.submit_one(submission).map_err(|it| it.1).unwrap();
    }

    fn queue_wait(&self, stream: &HostStream, cookie: u64, index: u64) {
        let build = |program: &mut Program| program.poll_geq(self.dword(index), 1);
        self.queue(stream, cookie, build).unwrap();
    }
}

fn stream(name: &str) -> HostStream {
    let stream = HostStream::without_thread(name);
    assert!(!stream.has_thread());
    stream
}

fn is_deadlock<T: std::fmt::Debug>(result: &Result<T>) -> bool {
    let kind = StateKind::Deadlock;
    matches!(result, Err(Error::State { kind: found, .. }) if *found == kind)
}

fn reason<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Asynchronous { reason, .. }) => reason,
        other => panic!("expected an asynchronous error, not {other:?}"),
    }
}

/// Kernels that note the threads that run them.
#[derive(Clone, Default)]
struct Ran(Arc<Mutex<Vec<ThreadId>>>);

impl Ran {
    fn kernel(&self) -> impl FnOnce() + Send + 'static {
        let ran = Arc::clone(&self.0);
        move || ran.lock().unwrap().push(std::thread::current().id())
    }

    fn threads(&self) -> Vec<ThreadId> {
        self.0.lock().unwrap().clone()
    }
}

#[test]
fn nothing_is_executed_before_a_thread_waits_and_then_by_that_thread() {
    let _limit = Limit::new("who executes", SOON.unwrap());
    let here = std::thread::current().id();
    let ran = Ran::default();
    type Wait = fn(&HostStream, &Event);
    let waits: [Wait; 4] = [
        |stream, _| assert_eq!(stream.query(), Ok(true)),
        |stream, _| stream.synchronize(SOON).unwrap(),
        |_, event| assert_eq!(event.query(), Ok(true)),
        |_, event| event.synchronize(SOON).unwrap(),
    ];
    for (number, wait) in waits.into_iter().enumerate() {
        for event in [Event::new(), Event::blocking()] {
            let stream = stream("who");
            let before = ran.threads().len();
            stream.launch(ran.kernel()).unwrap();
            stream.record(&event).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(ran.threads().len(), before, "wait {number}");
            wait(&stream, &event);
            assert_eq!(ran.threads()[before..], [here], "wait {number}");
        }
    }
}

/// One thread queues the work. Another thread waits for a ticket of it, and executes it by that.
#[test]
fn a_thread_that_has_queued_nothing_executes_what_it_waits_for() {
    let _limit = Limit::new("other thread", SOON.unwrap());
    let device = device();
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(128);
    let [from, into] = [region.slice(0, 64), region.slice(64, 64)].map(Result::unwrap);
    pair.b.post_recv(0, &[into]).unwrap();
    let (stream, ran) = (stream("found"), Ran::default());
    stream.launch(ran.kernel()).unwrap();
    let ticket = pair
        .a
        .stream_queue_send(&stream, &Work::send(&[from]))
        .unwrap();
    let other = std::thread::scope(|scope| {
        let wait = || {
            ticket.wait(SOON).unwrap();
            std::thread::current().id()
        };
        scope.spawn(wait).join().unwrap()
    });
    // On the sync path the kernel has run in the call that queued the send.
    let expected = match rig::control(&device) {
        doorbell::Control::Sync => std::thread::current().id(),
        _ => other,
    };
    assert_eq!(ran.threads(), [expected]);
}

/// Waits that know of no stream: for a completion, a word, room, a ticket, and another stream with a thread.
#[test]
fn a_thread_that_waits_for_anything_executes_what_it_has_queued() {
    let _limit = Limit::new("own streams", 5 * SOON.unwrap());
    let device = device();
    let mut config = EndpointConfig::default();
    config.send_depth = 2;
    let mut pair = Pair::new(&device, &config);
    let region = pair.region(192);
    let slice = |at| region.slice(at, 64).unwrap();
    let stream = stream("own");
    for id in 0..4 {
        pair.b.post_recv(id, &[slice(64)]).unwrap();
    }
    let send = |pair: &mut Pair| {
        let from = [slice(0)];
        let work = Work::send(&from);
        pair.a.stream_queue_send(&stream, &work).unwrap()
    };
    send(&mut pair);
    pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    let region_word = pair.region(64);
    doorbell::stream_write_value32(&stream, &region_word, 0, 7).unwrap();
    doorbell::wait_value32(
        &region_word,
        0,
        doorbell::Condition::GreaterOrEqual(7),
        SOON,
    )
    .unwrap();
    // The queue has room again when the stream has rung, and waited for, what is in it.
    for _ in 0..2 {
        send(&mut pair);
        pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    }
    pair.a.wait_room(QueueKind::Send, 2, SOON).unwrap();
    // A stream with a thread waits for it.
    let (threaded, event) = (HostStream::new("thread").unwrap(), Event::blocking());
    let ran = Ran::default();
    stream.launch(ran.kernel()).unwrap();
    stream.record(&event).unwrap();
    threaded.wait_event(&event).unwrap();
    let end = Event::blocking();
    threaded.record(&end).unwrap();
    end.synchronize(SOON).unwrap();
    assert_eq!(ran.threads().len(), 1);
}

#[test]
fn streams_that_wait_for_each_other_are_driven_by_one_thread() {
    const ROUNDS: u32 = 100;
    let _limit = Limit::new("two streams", SOON.unwrap());
    let (a, b) = (stream("a"), stream("b"));
    let (words, ran) = (Words::new(), Ran::default());
    for round in 0..ROUNDS {
        let [of_a, of_b] = [Event::new(), Event::blocking()];
        a.launch(ran.kernel()).unwrap();
        a.record(&of_a).unwrap();
        b.wait_event(&of_a).unwrap();
        let value = round + 1;
        // By memory as well, of which the streams do not know.
        words.queue_store(&b, 1, 0, value);
        b.record(&of_b).unwrap();
        let build = |program: &mut Program| program.poll_geq(words.dword(0), value);
        words.queue(&a, 2, build).unwrap();
        a.wait_event(&of_b).unwrap();
    }
    a.synchronize(SOON).unwrap();
    assert_eq!(ran.threads().len(), ROUNDS as usize);
    assert_eq!(b.query(), Ok(true));
    // A circle ends with an abort, as with threads.
    let [of_a, of_b] = [(); 2].map(|()| Event::new());
    words.queue_wait(&a, 3, 5);
    a.record(&of_a).unwrap();
    b.wait_event(&of_a).unwrap();
    words.queue_store(&b, 4, 5, 1);
    b.record(&of_b).unwrap();
    let late = of_b.synchronize(Some(Duration::from_millis(5)));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert_eq!((a.query(), b.query()), (Ok(false), Ok(false)));
    b.abort();
    reason(of_b.synchronize(SOON));
    a.abort();
    assert_eq!((a.query(), b.query()), (Ok(true), Ok(true)));
}

/// What a look has executed is not executed again by the next.
#[test]
fn a_program_goes_on_at_the_wait_where_it_stopped() {
    let stream = stream("resumed");
    let words = Words::new();
    let build = |program: &mut Program| {
        for (store, wait) in [(8, 0), (9, 1), (10, 2)] {
            program.store_dword(words.dword(store), 1)?;
            program.poll_geq(words.dword(wait), 1)?;
        }
        program.store_dword(words.dword(11), 1)
    };
    words.queue(&stream, 7, build).unwrap();
    for step in 0..3 {
        assert_eq!(stream.query(), Ok(false));
        let stored: Vec<u32> = (8..12).map(|index| words.get(index)).collect();
        let expected: Vec<u32> = (0..4).map(|index| u32::from(index == step)).collect();
        assert_eq!(stored, expected, "step {step}");
        words.set(8 + step, 0);
        words.set(step, 1);
    }
    assert_eq!(words.started.load(Ordering::Relaxed), 1);
    assert!(words.outcomes().is_empty());
    assert_eq!(stream.query(), Ok(true));
    assert_eq!(words.get(11), 1);
    assert_eq!(words.outcomes(), [(7, Outcome::Done)]);
}

#[test]
fn a_caller_that_finds_the_queue_full_executes_and_a_kernel_may_not() {
    let _limit = Limit::new("full", SOON.unwrap());
    let stream = HostStream::without_thread_with_capacity("full", 3).unwrap();
    assert_eq!(stream.capacity(), 4);
    let ran = Ran::default();
    for _ in 0..10 {
        stream.launch(ran.kernel()).unwrap();
    }
    assert_eq!(ran.threads().len(), 8, "two fit behind two times four");
    stream.synchronize(SOON).unwrap();
    assert_eq!(ran.threads().len(), 10);
    let inside = stream.clone();
    let (report, results) = mpsc::channel();
    let kernel = move || {
        let event = Event::new();
        report.send(inside.synchronize(None)).unwrap();
        for _ in 0..3 {
            report.send(inside.record(&event)).unwrap();
        }
        report.send(inside.launch(|| ())).unwrap();
        report.send(event.synchronize(None)).unwrap();
    };
    stream.launch(kernel).unwrap();
    stream.synchronize(SOON).unwrap();
    let results: Vec<Result<()>> = results.iter().collect();
    let refused: Vec<bool> = results.iter().map(is_deadlock).collect();
    assert_eq!(refused, [true, false, false, false, true, true]);
    for capacity in [0, 65537] {
        let made = HostStream::without_thread_with_capacity("x", capacity);
        assert!(matches!(made, Err(Error::Range { .. })));
    }
}

#[test]
fn a_kernel_that_waits_for_a_stream_further_out_in_the_same_thread_is_refused() {
    let _limit = Limit::new("nested", SOON.unwrap());
    let (a, b) = (stream("a"), stream("b"));
    let (report, results) = mpsc::channel();
    let (of_a, of_b) = (a.clone(), b.clone());
    a.launch(move || {
        let inner = of_a.clone();
        let told = report.clone();
        of_b.launch(move || told.send(inner.synchronize(None)).unwrap())
            .unwrap();
        report.send(of_b.synchronize(SOON)).unwrap();
    })
    .unwrap();
    a.synchronize(SOON).unwrap();
    let results: Vec<Result<()>> = results.iter().collect();
    assert!(is_deadlock(&results[0]), "{results:?}");
    assert_eq!(results[1..], [Ok(())]);
    // The thread is in no stream any more.
    b.synchronize(SOON).unwrap();
    a.synchronize(SOON).unwrap();
}

#[test]
fn abort_discards_at_once_and_what_comes_later_is_executed() {
    let stream = stream("aborted");
    let (words, ran, event) = (Words::new(), Ran::default(), Event::new());
    words.queue_wait(&stream, 1, 0);
    words.queue_store(&stream, 2, 1, 1);
    stream.launch(ran.kernel()).unwrap();
    stream.record(&event).unwrap();
    assert_eq!(stream.query(), Ok(false));
    stream.abort();
    let discarded = [1, 2].map(|cookie| (cookie, Outcome::Discarded));
    assert_eq!(words.outcomes(), discarded);
    assert_eq!(reason(event.query()), "discarded by abort");
    assert!(ran.threads().is_empty() && words.get(1) == 0);
    // Also by a kernel of the stream.
    let inside = stream.clone();
    stream.launch(move || inside.abort()).unwrap();
    words.queue_store(&stream, 3, 1, 1);
    assert_eq!(stream.query(), Ok(true));
    assert_eq!(words.outcomes()[2..], [(3, Outcome::Discarded)]);
    words.queue_store(&stream, 4, 1, 1);
    assert_eq!(stream.query(), Ok(true));
    assert_eq!(words.get(1), 1);
}

#[test]
fn a_fault_discards_what_is_behind_it_until_it_is_taken() {
    let stream = stream("faulty");
    let (words, event) = (Words::new(), Event::new());
    stream.launch(|| panic!("on purpose")).unwrap();
    words.queue_store(&stream, 1, 0, 1);
    stream.record(&event).unwrap();
    assert!(reason(stream.query()).contains("on purpose"));
    assert_eq!(words.outcomes(), [(1, Outcome::Discarded)]);
    assert!(reason(event.query()).contains("on purpose"));
    assert!(reason(stream.launch(|| ())).contains("on purpose"));
    assert!(stream.take_fault().is_some() && stream.take_fault().is_none());
    words.queue_store(&stream, 2, 0, 1);
    assert!(
        stream.take_fault().is_none() && words.get(0) == 0,
        "there is none, and it executes nothing"
    );
    stream.synchronize(SOON).unwrap();
    // What is queued behind a failure that no look has found yet is discarded when the fault is taken.
    stream.launch(|| panic!("again")).unwrap();
    words.queue_wait(&stream, 3, 1);
    reason(stream.query());
    assert!(stream.take_fault().is_some());
    let outcomes = words.outcomes();
    assert_eq!(outcomes[1..], [(2, Outcome::Done), (3, Outcome::Discarded)]);
    stream.synchronize(SOON).unwrap();
}

#[test]
fn what_is_queued_is_discarded_with_the_last_handle() {
    let _limit = Limit::new("dropped", SOON.unwrap());
    let (words, ran) = (Words::new(), Ran::default());
    for looks in 0..2 {
        let (stream, event) = (stream("dropped"), Event::new());
        let held = Arc::new(());
        words.queue_wait(&stream, 1, 0);
        words.queue_store(&stream, 2, 1, 1);
        let captured = Arc::clone(&held);
        stream.launch(move || drop(captured)).unwrap();
        stream.launch(ran.kernel()).unwrap();
        stream.record(&event).unwrap();
        let clone = stream.clone();
        for _ in 0..looks {
            assert_eq!(clone.query(), Ok(false));
        }
        drop(stream);
        assert!(words.outcomes().is_empty());
        drop(clone);
        let outcomes = std::mem::take(&mut *words.outcomes.lock().unwrap());
        assert_eq!(outcomes, [1, 2].map(|cookie| (cookie, Outcome::Discarded)));
        assert_eq!(Arc::strong_count(&held), 1);
        assert_eq!(Arc::strong_count(&words), 1);
        assert_eq!(reason(event.synchronize(SOON)), "discarded by abort");
        assert!(ran.threads().is_empty());
    }
    // The last handle in a kernel, which a wait for its event executes.
    let (last, event) = (stream("in itself"), Event::new());
    let inside = last.clone();
    last.launch(move || drop(inside)).unwrap();
    words.queue_store(&last, 3, 1, 1);
    last.record(&event).unwrap();
    drop(last);
    assert_eq!(reason(event.synchronize(SOON)), "discarded by abort");
    assert_eq!(words.outcomes(), [(3, Outcome::Discarded)]);
}

/// A reset waits until streams are done with the endpoint's programs: in the thread that has queued them, and in another one.
#[test]
fn a_reset_executes_what_is_queued() {
    let _limit = Limit::new("reset", 5 * SOON.unwrap());
    let device = device();
    if rig::has_no_queue(&device, "a_reset_executes_what_is_queued") {
        return;
    }
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(128);
    let stream = stream("reset");
    for in_other_thread in [false, true] {
        let slice = [region.slice(0, 64).unwrap()];
        let work = Work::send(&slice);
        pair.b
            .post_recv(0, &[region.slice(64, 64).unwrap()])
            .unwrap();
        let ticket = pair.a.stream_queue_send(&stream, &work).unwrap();
        assert_eq!(ticket.status(), Status::Queued);
        match in_other_thread {
            false => pair.a.reset().unwrap(),
            true => std::thread::scope(|scope| {
                let reset = scope.spawn(|| pair.a.reset());
                reset.join().unwrap().unwrap();
            }),
        }
        let status = ticket.status();
        assert!(
            !matches!(status, Status::Queued | Status::Prepared),
            "{status:?}"
        );
        assert_eq!(stream.query(), Ok(true));
        pair.b.reset().unwrap();
        pair.connect();
    }
}

/// A deadline begins when a look comes to the wait, and holds if there is no further look.
#[test]
fn the_deadline_of_a_wait_holds_while_nobody_looks() {
    let _limit = Limit::new("deadline", SOON.unwrap());
    let device = device();
    if rig::has_no_queue(&device, "the_deadline_of_a_wait_holds_while_nobody_looks") {
        return;
    }
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(64);
    let slice = [region.slice(0, 64).unwrap()];
    pair.a.post_recv(0, &slice).unwrap();
    let (stream, ran) = (stream("late"), Ran::default());
    let timeout = Some(Duration::from_millis(5));
    let ticket = pair
        .a
        .stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
        .unwrap();
    stream.launch(ran.kernel()).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(ticket.status(), Status::Queued, "it has not begun");
    assert_eq!(stream.query(), Ok(false));
    let status = loop {
        match ticket.status() {
            Status::Queued | Status::Rung => std::thread::sleep(Duration::from_millis(1)),
            status => break status,
        }
    };
    let Status::Failed(failure) = status else {
        panic!("{status:?}");
    };
    assert!(matches!(failure.cause, Cause::Deadline(_)), "{failure}");
    let failed = stream.synchronize(SOON);
    assert!(
        matches!(failed, Err(Error::Asynchronous { .. })),
        "{failed:?}"
    );
    assert!(ran.threads().is_empty(), "it was behind the wait");
}

#[test]
fn a_future_is_ready_without_another_thread() {
    let _limit = Limit::new("future", SOON.unwrap());
    let (a, b) = (stream("a"), stream("b"));
    let ran = Ran::default();
    let [of_a, of_b] = [(); 2].map(|()| Event::blocking());
    a.launch(ran.kernel()).unwrap();
    a.record(&of_a).unwrap();
    b.wait_event(&of_a).unwrap();
    b.record(&of_b).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(of_b.reached().unwrap()).unwrap();
    assert_eq!(ran.threads().len(), 1);
}

/// Threads that queue, wait, look, abort and drop: each program is finished once, in order, and none is lost.
#[test]
fn random_threads_finish_each_program_once_and_in_order() {
    let seed = from_env("DOORBELL_SEED", 1);
    let limit = Limit::new("random threads", SOON.unwrap());
    for round in 0..from_env("DOORBELL_OPERATIONS", 200_000) / 2000 {
        limit.step(seed + round, SOON.unwrap());
        let streams: Vec<HostStream> = ["a", "b", "c"]
            .map(|name| HostStream::without_thread_with_capacity(name, 8).unwrap())
            .into();
        let owners: Vec<Arc<Words>> = streams.iter().map(|_| Words::new()).collect();
        let count = AtomicU64::new(0);
        let busy: Vec<AtomicBool> = streams.iter().map(|_| AtomicBool::new(false)).collect();
        let busy = Arc::new(busy);
        let submitted: Vec<Mutex<Vec<u64>>> = streams.iter().map(|_| Mutex::default()).collect();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let mut random = Random((seed + round) << 8 | thread);
                let (owners, count, submitted, busy) = (&owners, &count, &submitted, &busy);
                let streams = streams.clone();
                scope.spawn(move || {
                    let mut tell = Event::new();
                    for _ in 0..60 {
                        let at = random.below(3) as usize;
                        let stream = &streams[at];
                        match random.below(10) {
                            0..=3 => {
                                let mut order = submitted[at].lock().unwrap();
                                let cookie = count.fetch_add(1, Ordering::Relaxed);
                                let word = owners[at].dword(1);
                                let build = |program: &mut Program| program.store_dword(word, 1);
                                // Refused while the stream has a fault.
                                if owners[at].queue(stream, cookie, build).is_ok() {
                                    order.push(cookie);
                                }
                            }
                            4 => {
                                let busy = Arc::clone(busy);
                                let kernel = move || {
                                    let was = busy[at].swap(true, Ordering::AcqRel);
                                    assert!(!was, "two threads execute at a time");
                                    busy[at].store(false, Ordering::Release);
                                };
                                stream.launch(kernel).ok();
                            }
                            5 => {
                                tell = Event::new();
                                stream.record(&tell).ok();
                            }
                            6 => _ = stream.wait_event(&tell),
                            7 => {
                                stream.query().ok();
                            }
                            8 => {
                                stream.synchronize(SOON).ok();
                            }
                            _ => {
                                stream.abort();
                                stream.take_fault();
                            }
                        }
                        // An event of work that was aborted is a fault of the stream that waits for it.
                        streams.iter().for_each(|stream| drop(stream.take_fault()));
                    }
                });
            }
        });
        drop(streams);
        for (owner, submitted) in owners.iter().zip(&submitted) {
            let outcomes = owner.outcomes();
            let finished: Vec<u64> = outcomes.iter().map(|outcome| outcome.0).collect();
            assert_eq!(
                finished,
                *submitted.lock().unwrap(),
                "seed {}",
                seed + round
            );
            assert_eq!(Arc::strong_count(owner), 1);
        }
    }
}
