//! Commands of the device that hang or fail, and a flush that takes its time: other endpoints keep their deadlines, waits end in bounded time, and no
//! ticket has a wrong status.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell::softcx::{CommandKind, CommandKinds, Faults};
use doorbell::{
    Condition, Device, Endpoint, EndpointConfig, Error, Event, Executor, HostStream, QueueKind,
    Region, RemoteSlice, Status, Ticket, Work, stream_wait_value32,
};
use rig::{Limit, Pair, SOON, device, has_no_queue};
use waived::waived;

const STEP: Duration = Duration::from_secs(60);
/// How long a command hangs: far longer than any call may block.
const HANG: Duration = Duration::from_secs(40);
/// How much later than its deadline a wait may end; most of it allows for a busy machine.
const LATE: Duration = Duration::from_secs(5);
/// As in docs/outcomes.md: how long the device may take to stop, and how long a thread waits for that.
const STOPPED_IN: Duration = Duration::from_secs(2);

fn hang(kind: CommandKind) -> Faults {
    Faults {
        hang: (CommandKinds::of(&[kind]), HANG.as_nanos() as u64),
        ..Faults::default()
    }
}

fn refuse_to_stop() -> Faults {
    refuse(&[CommandKind::Error, CommandKind::Reset])
}

fn refuse(kinds: &[CommandKind]) -> Faults {
    Faults {
        eio: CommandKinds::of(kinds),
        ..Faults::default()
    }
}

/// A device of this process, whose faults a test can set. Others are WAIVED.
fn faulty(test: &str) -> Option<Device> {
    let device = device();
    if !device.set_faults(Faults::default()) {
        waived(test, "the device takes no faults from this process");
        return None;
    }
    (!has_no_queue(&device, test)).then_some(device)
}

fn patient(timeout: Duration) -> EndpointConfig {
    EndpointConfig::default().wait_timeout(Some(timeout))
}

/// Polls until the ticket has its final status.
fn settled(ticket: &Ticket) -> Status {
    while !ticket.is_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
    ticket.status()
}

fn none_is_complete(tickets: &[Ticket]) {
    for ticket in tickets {
        let status = settled(ticket);
        assert!(!matches!(status, Status::Complete), "{status:?}");
    }
}

/// Whether a peer finds the memory registered at that address.
fn is_registered(pair: &mut Pair, remote: RemoteSlice) -> bool {
    let into = pair.region(8);
    let slices = [into.slice(0, 8).unwrap()];
    let read = pair.a.post_send(&Work::read(&slices, remote)).unwrap();
    matches!(settled(&read), Status::Complete)
}

/// Sets the wait of a stream for a message that never comes. Its ticket, and its deadline from now.
fn wait_for_nothing(endpoint: &mut Endpoint, region: &Region, stream: &rig::Stream) -> Ticket {
    let into = [region.slice(0, 64).unwrap()];
    endpoint.post_recv(1, &into).unwrap();
    endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap()
}

#[test]
fn hanging_command_does_not_delay_deadlines_of_other_endpoints() {
    let test = "hanging_command_does_not_delay_deadlines_of_other_endpoints";
    let Some(device) = faulty(test) else { return };
    let limit = Limit::new(test, STEP);
    for (step, kind) in [(1, CommandKind::Error), (2, CommandKind::Reset)] {
        limit.step(step, STEP);
        let timeout = Duration::from_millis(200);
        let mut hung = Pair::new(&device, &patient(Duration::from_secs(600)));
        let mut other = Pair::new(&device, &patient(timeout));
        let regions = [hung.region(64), other.region(64)];
        let streams = [rig::stream("hung"), rig::stream("other")];
        device.set_faults(hang(kind));
        let began = Instant::now();
        let held = wait_for_nothing(&mut hung.a, &regions[0], &streams[0]);
        hung.a.abort();
        // The watchdog has started the command.
        std::thread::sleep(Duration::from_millis(20));
        let begin = Instant::now();
        let late = wait_for_nothing(&mut other.a, &regions[1], &streams[1]);
        let ended = streams[1].synchronize(SOON);
        let took = begin.elapsed();
        assert!(
            took < timeout + LATE,
            "{kind:?}: a deadline of {timeout:?} after {took:?}"
        );
        assert!(ended.is_err() || rig::is_cuda(), "{kind:?}: {ended:?}");
        assert!(matches!(settled(&late), Status::Failed(_)), "{kind:?}");
        // The wait of this endpoint ends too, within the time that a device may take to stop.
        let _ = streams[0].synchronize(SOON);
        let took = began.elapsed();
        assert!(took < STOPPED_IN + LATE, "{kind:?}: {took:?}");
        assert!(matches!(settled(&held), Status::Failed(_)), "{kind:?}");
        device.set_faults(Faults::default());
    }
}

/// The device of what is behind one wait does not answer. A stream of a GPU ends its wait only after that.
#[test]
fn hanging_command_behind_one_wait_does_not_delay_waits_of_other_streams() {
    let test = "hanging_command_behind_one_wait_does_not_delay_waits_of_other_streams";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let timeout = Duration::from_millis(200);
    let mut hung = Pair::new(&device, &patient(Duration::from_secs(600)));
    let word = hung.region(64);
    let streams = [rig::stream("hung"), rig::stream("other")];
    let wait = |stream: &rig::Stream, offset, timeout| {
        let condition = Condition::GreaterOrEqual(1);
        stream_wait_value32(stream, &word, offset, condition, Some(timeout)).unwrap()
    };
    let first = wait(&streams[0], 0, timeout);
    let sent = send_behind(&mut hung, &streams[0]);
    device.set_faults(hang(CommandKind::Error));
    // It ends while the other one is ending.
    let begin = Instant::now();
    let late = wait(&streams[1], 4, 2 * timeout);
    // No thread of the application ends it.
    while !late.is_over() && begin.elapsed() < SOON.unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = begin.elapsed();
    // The first stream's wait does not end before that.
    assert!(
        took < timeout + STOPPED_IN,
        "a deadline of {:?} after {took:?}",
        2 * timeout
    );
    assert!(matches!(settled(&late), Status::Failed(_)));
    device.set_faults(Faults::default());
    assert!(matches!(settled(&first), Status::Failed(_)));
    assert_ne!(settled(&sent), Status::Complete);
}

/// The watchdog thread processes the completion of a request, which drops the last handle of its region.
#[test]
fn hanging_deregistration_does_not_delay_other_deadlines() {
    let test = "hanging_deregistration_does_not_delay_other_deadlines";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let timeout = Duration::from_millis(200);
    let mut used = Pair::new(&device, &EndpointConfig::default());
    let mut other = Pair::new(&device, &patient(timeout));
    let (from, to, received) = (used.region(64), used.region(64), other.region(64));
    let streams = [rig::stream("used"), rig::stream("other")];
    let (go, gate) = rig::gate();
    streams[0].launch(gate).unwrap();
    let sent = {
        let slices = [from.slice(0, 64).unwrap()];
        let work = Work::write(&slices, to.remote().slice(0, 64).unwrap());
        used.a.stream_queue_send(&streams[0], &work).unwrap()
    };
    drop(from);
    device.set_faults(hang(CommandKind::Deregister));
    go.store(true, Ordering::Release);
    // No other thread polls the endpoint.
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    let late = wait_for_nothing(&mut other.a, &received, &streams[1]);
    let _ = streams[1].synchronize(SOON);
    let took = begin.elapsed();
    assert!(
        took < timeout + LATE,
        "a deadline of {timeout:?} after {took:?}"
    );
    assert!(matches!(settled(&late), Status::Failed(_)));
    device.set_faults(Faults::default());
    assert_eq!(settled(&sent), Status::Complete);
}

/// A stream of a GPU cannot skip what is queued behind a wait that fails, so the endpoints of all of it are stopped before. A host stream discards it. Either
/// way all devices are waited for at the same time.
#[test]
fn endpoints_behind_a_failed_wait_are_stopped_together() {
    const BEHIND: usize = 12;
    let test = "endpoints_behind_a_failed_wait_are_stopped_together";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let timeout = Duration::from_millis(200);
    let mut first = Pair::new(&device, &patient(timeout));
    let mut behind: Vec<_> = (0..BEHIND)
        .map(|_| Pair::new(&device, &EndpointConfig::default()))
        .collect();
    let region = first.region(64);
    let regions: Vec<_> = (behind.iter())
        .map(|pair| (pair.region(64), pair.region(64)))
        .collect();
    let stream = rig::stream("many");
    // Less than the device may take to stop.
    let command = STOPPED_IN / 2;
    device.set_faults(Faults {
        commands_ns: command.as_nanos() as u64,
        ..Faults::default()
    });
    let begin = Instant::now();
    let wait = wait_for_nothing(&mut first.a, &region, &stream);
    let sends: Vec<_> = (behind.iter_mut().zip(&regions))
        .map(|(pair, (from, to))| {
            let slices = [from.slice(0, 64).unwrap()];
            let work = Work::write(&slices, to.remote().slice(0, 64).unwrap());
            pair.a.stream_queue_send(&stream, &work).unwrap()
        })
        .collect();
    let _ = stream.synchronize(SOON);
    let took = begin.elapsed();
    // They go to ERR at the same time, then the first endpoint to ERR and to RESET.
    assert!(took < timeout + command * 3 + LATE, "{took:?}");
    assert!(matches!(settled(&wait), Status::Failed(_)), "{wait:?}");
    none_is_complete(&sends);
    device.set_faults(Faults::default());
}

/// A GPU cannot skip what is queued behind a wait. So an abort ends the wait after the devices behind it have stopped, also where the wait's own device
/// stops sooner.
#[test]
fn abort_transmits_nothing_queued_behind_a_wait() {
    let test = "abort_transmits_nothing_queued_behind_a_wait";
    let Some(fast) = faulty(test) else { return };
    let slow = device();
    let _limit = Limit::new(test, STEP);
    let mut waiting = Pair::new(&fast, &EndpointConfig::default());
    let mut behind = Pair::new(&slow, &EndpointConfig::default());
    let into = waiting.region(64);
    let (from, to) = (behind.region(64), behind.region(64));
    from.fill(0, 64, 7).unwrap();
    let stream = rig::stream("aborted");
    slow.set_faults(Faults {
        commands_ns: (STOPPED_IN / 2).as_nanos() as u64,
        ..Faults::default()
    });
    let wait = wait_for_nothing(&mut waiting.a, &into, &stream);
    let slices = [from.slice(0, 64).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 64).unwrap());
    let sent = behind.a.stream_queue_send(&stream, &work).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    stream.abort();
    let _ = stream.synchronize(SOON);
    for ticket in [&wait, &sent] {
        let status = settled(ticket);
        assert!(!matches!(status, Status::Complete), "{status:?}");
    }
    assert!(to.is_filled_with(0, 64, 0).unwrap(), "it was transmitted");
    slow.set_faults(Faults::default());
}

/// Two endpoints, each with a send behind the other's wait. Neither wait is released before both devices have stopped.
#[test]
fn abort_transmits_nothing_queued_behind_waits_in_a_circle() {
    let test = "abort_transmits_nothing_queued_behind_waits_in_a_circle";
    let Some(fast) = faulty(test) else { return };
    let slow = device();
    let _limit = Limit::new(test, STEP);
    let config = EndpointConfig::default();
    let mut pairs = [Pair::new(&fast, &config), Pair::new(&slow, &config)];
    let streams = [rig::stream("one"), rig::stream("other")];
    let into = pairs.each_ref().map(|pair| pair.region(64));
    let (from, to) = (
        pairs.each_ref().map(|pair| pair.region(64)),
        pairs.each_ref().map(|pair| pair.region(64)),
    );
    from.iter().for_each(|from| from.fill(0, 64, 7).unwrap());
    slow.set_faults(Faults {
        commands_ns: (STOPPED_IN / 2).as_nanos() as u64,
        ..Faults::default()
    });
    let mut tickets: Vec<_> = (pairs.iter_mut().zip(&into).zip(&streams))
        .map(|((pair, into), stream)| wait_for_nothing(&mut pair.a, into, stream))
        .collect();
    for (at, pair) in pairs.iter_mut().enumerate() {
        let slices = [from[at].slice(0, 64).unwrap()];
        let work = Work::write(&slices, to[at].remote().slice(0, 64).unwrap());
        tickets.push(pair.a.stream_queue_send(&streams[1 - at], &work).unwrap());
    }
    std::thread::sleep(Duration::from_millis(50));
    pairs[0].a.abort();
    if !rig::is_cuda() {
        pairs[1].a.abort();
    }
    for stream in &streams {
        let _ = stream.synchronize(SOON);
    }
    none_is_complete(&tickets);
    for to in &to {
        assert!(to.is_filled_with(0, 64, 0).unwrap(), "it was transmitted");
    }
    slow.set_faults(Faults::default());
}

/// A host stream waits for the devices of what it discards before it executes anything else. What it would execute is discarded if it is aborted
/// meanwhile.
#[test]
fn abort_while_a_stream_waits_for_devices_discards_its_queue() {
    let test = "abort_while_a_stream_waits_for_devices_discards_its_queue";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let stops_in = STOPPED_IN / 2;
    // On a loaded machine the abort may come too late.
    let was_in_time = (0..10).any(|_| {
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let (from, to) = (pair.region(64), pair.region(64));
        let stream = HostStream::new("aborted").unwrap();
        let (go, gate) = rig::gate();
        let is_in_gate = Arc::new(AtomicBool::new(false));
        let enter = Arc::clone(&is_in_gate);
        stream
            .launch(move || {
                enter.store(true, Ordering::Release);
                gate();
            })
            .unwrap();
        let slices = [from.slice(0, 64).unwrap()];
        let work = Work::write(&slices, to.remote().slice(0, 64).unwrap());
        let sent = pair.a.stream_queue_send(&stream, &work).unwrap();
        // A gate that the stream has not come to would be discarded, and the device stopped before it is made slow.
        while !is_in_gate.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        stream.abort();
        let has_run = Arc::new(AtomicBool::new(false));
        let mark = Arc::clone(&has_run);
        stream
            .launch(move || mark.store(true, Ordering::SeqCst))
            .unwrap();
        device.set_faults(Faults {
            commands_ns: stops_in.as_nanos() as u64,
            ..Faults::default()
        });
        let began = Instant::now();
        go.store(true, Ordering::Release);
        while pair.a.failure().is_none() {
            std::thread::yield_now();
        }
        // While the device takes its time to stop.
        std::thread::sleep(Duration::from_millis(100));
        stream.abort();
        let was_in_time = began.elapsed() < stops_in;
        let _ = stream.synchronize(SOON);
        device.set_faults(Faults::default());
        assert!(!was_in_time || !has_run.load(Ordering::SeqCst));
        assert!(!matches!(settled(&sent), Status::Complete));
        was_in_time
    });
    assert!(was_in_time, "this thread never had a second");
}

/// Endpoints that wait for each other: on each stream a wait of one endpoint, and behind it a send of the next one.
struct Chain {
    pairs: Vec<Pair>,
    streams: Vec<rig::Stream>,
}

impl Chain {
    fn new(device: &Device, timeout: Duration, streams: usize) -> Chain {
        let forever = patient(Duration::from_secs(600));
        let mut pairs: Vec<_> = (0..=streams)
            .map(|at| {
                let config = if at == 0 { patient(timeout) } else { forever };
                Pair::new(device, &config)
            })
            .collect();
        let streams: Vec<_> = (0..streams).map(|_| rig::stream("chain")).collect();
        for (at, stream) in streams.iter().enumerate().rev() {
            let into = pairs[at].region(64);
            wait_for_nothing(&mut pairs[at].a, &into, stream);
            send_behind(&mut pairs[at + 1], stream);
        }
        Chain { pairs, streams }
    }
}

fn send_behind(pair: &mut Pair, stream: &rig::Stream) -> Ticket {
    let (from, to) = (pair.region(64), pair.region(64));
    let slices = [from.slice(0, 64).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 64).unwrap());
    pair.a.stream_queue_send(stream, &work).unwrap()
}

/// The reset of the first endpoint of a chain must not start a new generation while a stop that would apply to it is pending.
#[test]
fn reset_does_not_overtake_pending_endpoint_stops() {
    let test = "reset_does_not_overtake_pending_endpoint_stops";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let mut chain = Chain::new(&device, Duration::from_millis(200), 7);
    device.set_faults(Faults {
        commands_ns: (STOPPED_IN - Duration::from_millis(200)).as_nanos() as u64,
        ..Faults::default()
    });
    let _ = chain.streams[0].synchronize(SOON);
    let first = &mut chain.pairs[0];
    let again = first.a.reset();
    if again.is_ok() {
        device.set_faults(Faults::default());
        first.b.reset().unwrap();
        first.connect();
        std::thread::sleep(STOPPED_IN);
        assert_eq!(first.a.failure(), None);
    }
    device.set_faults(Faults::default());
    for stream in &chain.streams {
        let _ = stream.synchronize(SOON);
    }
}

/// The endpoints of a chain are stopped one after the other, and each device takes as long as the library waits for it. Endpoints that are not of the chain do
/// not wait for that: they fail at their deadline, and abort at once.
#[test]
fn chain_of_hung_devices_delays_no_other_endpoint() {
    let test = "chain_of_hung_devices_delays_no_other_endpoint";
    let Some(device) = faulty(test) else { return };
    let sound = rig::device();
    let _limit = Limit::new(test, STEP);
    let chain = Chain::new(&device, Duration::from_secs(600), 6);
    let timeout = Duration::from_millis(200);
    let mut late = Pair::new(&sound, &patient(timeout));
    let mut aborted = Pair::new(&sound, &patient(Duration::from_secs(600)));
    let regions = [late.region(64), aborted.region(64)];
    let streams = [rig::stream("late"), rig::stream("aborted")];
    // Every command, not only the first.
    device.set_faults(Faults {
        commands_ns: (STOPPED_IN * 2).as_nanos() as u64,
        ..Faults::default()
    });
    chain.pairs[0].a.abort();
    // Another thread stops the chain meanwhile.
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    let waits = [
        wait_for_nothing(&mut late.a, &regions[0], &streams[0]),
        wait_for_nothing(&mut aborted.a, &regions[1], &streams[1]),
    ];
    streams[1].abort();
    for (wait, stream) in waits.iter().zip(&streams) {
        let _ = stream.synchronize(SOON);
        let took = begin.elapsed();
        assert!(took < timeout + LATE / 2, "{wait:?} after {took:?}");
        assert!(!matches!(settled(wait), Status::Complete), "{wait:?}");
    }
    device.set_faults(Faults::default());
    for stream in &chain.streams {
        let _ = stream.synchronize(SOON);
    }
}

/// Streams wait for events of host streams whose work has failed, and the devices of what is behind these waits do not answer. No other wait is delayed.
#[test]
fn hanging_commands_behind_failed_events_do_not_delay_other_deadlines() {
    const STREAMS: usize = 5;
    let test = "hanging_commands_behind_failed_events_do_not_delay_other_deadlines";
    let Some(device) = faulty(test) else { return };
    if rig::has_no_thread() {
        return waived(
            test,
            "the thread of the test executes all streams, and waits for the devices itself",
        );
    }
    let limit = Limit::new(test, STEP);
    let timeout = Duration::from_millis(50);
    let mut hung: Vec<_> = (0..STREAMS)
        .map(|_| Pair::new(&device, &patient(Duration::from_secs(600))))
        .collect();
    let word = hung[0].region(64);
    let host = HostStream::new("fails").unwrap();
    let (go, gate) = rig::gate();
    host.launch(move || {
        gate();
        panic!("on purpose");
    })
    .unwrap();
    let event = Event::new();
    host.record(&event).unwrap();
    let streams: Vec<_> = (0..STREAMS).map(|_| rig::stream("behind")).collect();
    let sends: Vec<_> = (hung.iter_mut().zip(&streams))
        .map(|(pair, stream)| {
            stream.wait_event(&event).unwrap();
            send_behind(pair, stream)
        })
        .collect();
    let other = rig::stream("other");
    device.set_faults(Faults {
        commands_ns: (STOPPED_IN * 2).as_nanos() as u64,
        ..Faults::default()
    });
    go.store(true, Ordering::Release);
    // All of them have the failure.
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    let condition = Condition::GreaterOrEqual(1);
    let late = stream_wait_value32(&other, &word, 0, condition, Some(timeout)).unwrap();
    // No thread of the application ends it.
    while !late.is_over() && begin.elapsed() < SOON.unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = begin.elapsed();
    assert!(
        took < timeout + LATE,
        "a deadline of {timeout:?} after {took:?}"
    );
    assert!(matches!(settled(&late), Status::Failed(_)), "{late:?}");
    limit.step(2, STEP);
    for stream in &streams {
        // The send behind the event is given up, and the stream passes the event all the same.
        assert!(stream.synchronize(SOON).is_err());
    }
    device.set_faults(Faults::default());
    none_is_complete(&sends);
}

/// A task that waits for a ticket is woken by a thread of the library, which waits for no device.
#[test]
fn hanging_commands_do_not_delay_futures_of_other_tickets() {
    const FAILED: usize = 20;
    let test = "hanging_commands_do_not_delay_futures_of_other_tickets";
    let Some(slow) = faulty(test) else { return };
    let sound = device();
    let _limit = Limit::new(test, STEP);
    let mut failing: Vec<_> = (0..FAILED)
        .map(|_| Pair::new(&slow, &EndpointConfig::default()))
        .collect();
    let mut healthy = Pair::new(&sound, &EndpointConfig::default());
    let region = healthy.region(64);
    slow.set_faults(Faults {
        commands_ns: (STOPPED_IN * 2).as_nanos() as u64,
        ..Faults::default()
    });
    let notices: Vec<_> = (failing.iter_mut())
        .map(|pair| {
            let ticket = pair.a.post_recv(1, &[]).unwrap();
            let (notice, fd) = UnixStream::pair().unwrap();
            notice.set_read_timeout(Some(STEP)).unwrap();
            ticket.notify(fd.as_fd()).unwrap();
            (ticket, notice)
        })
        .collect();
    let into = [region.slice(0, 64).unwrap()];
    let received = healthy.b.post_recv(1, &into).unwrap();
    let (mut notice, fd) = UnixStream::pair().unwrap();
    notice.set_read_timeout(Some(STEP)).unwrap();
    received.notify(fd.as_fd()).unwrap();
    failing[0].a.abort();
    // The thread has come to it.
    std::thread::sleep(Duration::from_millis(100));
    healthy.a.post_send(&Work::send(&into)).unwrap();
    let begin = Instant::now();
    let reader = std::thread::spawn(move || {
        notice.read_exact(&mut [0; 8]).unwrap();
        begin.elapsed()
    });
    // In the order in which the thread looks at them: each fails just before the thread comes to it.
    for pair in &failing[1..] {
        std::thread::sleep(Duration::from_millis(350));
        pair.a.abort();
    }
    let took = reader.join().unwrap();
    assert!(took < LATE, "{took:?}");
    slow.set_faults(Faults::default());
    for (ticket, mut notice) in notices {
        // These are woken when their operations are over, and not before.
        notice.read_exact(&mut [0; 8]).unwrap();
        assert!(ticket.is_over());
        assert_ne!(ticket.status(), Status::Complete);
    }
    assert_eq!(received.status(), Status::Complete);
}

/// Each send is behind the waits of all endpoints whose sends come before. A stream of a GPU cannot skip the sends, so their endpoints fail with the last wait.
#[test]
fn all_sends_behind_the_last_of_many_waits_are_given_up() {
    const LONG: usize = 100;
    let test = "all_sends_behind_the_last_of_many_waits_are_given_up";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let config = patient(Duration::from_secs(600))
        .send_depth(4)
        .recv_depth(4);
    let mut pairs: Vec<_> = (0..LONG).map(|_| Pair::new(&device, &config)).collect();
    let stream = rig::stream("chain");
    for pair in &mut pairs {
        let into = pair.region(64);
        wait_for_nothing(&mut pair.a, &into, &stream);
    }
    let sends: Vec<_> = (pairs.iter_mut().rev())
        .map(|pair| send_behind(pair, &stream))
        .collect();
    pairs[LONG - 1].a.abort();
    if !rig::is_cuda() {
        stream.abort();
    }
    none_is_complete(&sends);
    stream.abort();
    let _ = stream.synchronize(SOON);
}

/// Every endpoint waits on every stream, in another order on each. So there are very many ways from one endpoint to another, and a failure is followed
/// once, not once for each way.
#[test]
fn streams_that_wait_for_each_other_in_circles_end_soon() {
    const SIDE: usize = 9;
    let test = "streams_that_wait_for_each_other_in_circles_end_soon";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let config = patient(Duration::from_secs(600));
    let mut pairs: Vec<_> = (0..SIDE).map(|_| Pair::new(&device, &config)).collect();
    let streams: Vec<_> = (0..SIDE).map(|_| rig::stream("circle")).collect();
    let mut tickets = Vec::new();
    for (at, stream) in streams.iter().enumerate() {
        for next in 0..SIDE {
            let pair = &mut pairs[(at + next) % SIDE];
            let into = pair.region(64);
            tickets.push(wait_for_nothing(&mut pair.a, &into, stream));
        }
    }
    let begin = Instant::now();
    pairs[0].a.abort();
    for stream in &streams {
        let _ = stream.synchronize(SOON);
    }
    let took = begin.elapsed();
    assert!(took < LATE, "{took:?}");
    none_is_complete(&tickets);
}

/// Two streams wait for each other's events, many times. Each event leads to the rest of the other stream.
#[test]
fn streams_that_take_turns_end_soon() {
    const TURNS: usize = 300;
    let test = "streams_that_take_turns_end_soon";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let config = patient(Duration::from_secs(600));
    let mut waiting = Pair::new(&device, &config);
    let mut sending: [Pair; 2] = [(); 2].map(|()| Pair::new(&device, &config));
    let streams = [rig::stream("one"), rig::stream("other")];
    let into = waiting.region(64);
    let wait = wait_for_nothing(&mut waiting.a, &into, &streams[0]);
    let mut sends = Vec::new();
    for turn in 0..TURNS {
        let (this, next) = (&streams[turn % 2], &streams[(turn + 1) % 2]);
        if turn < 50 {
            sends.push(send_behind(&mut sending[turn % 2], this));
        }
        let event = Event::new();
        this.record(&event).unwrap();
        next.wait_event(&event).unwrap();
    }
    let begin = Instant::now();
    waiting.a.abort();
    for stream in &streams {
        let _ = stream.synchronize(SOON);
    }
    let took = begin.elapsed();
    assert!(took < LATE, "{took:?}");
    assert!(matches!(settled(&wait), Status::Failed(_)), "{wait:?}");
    none_is_complete(&sends);
}

/// Each endpoint with a dead peer gets the time to flush, and none waits for the flush of another.
#[test]
fn waits_of_many_endpoints_with_dead_peers_end_at_their_deadline() {
    const ENDPOINTS: usize = 500;
    /// A host stream is a thread, so only some endpoints have one.
    const STREAMS: usize = 10;
    let test = "waits_of_many_endpoints_with_dead_peers_end_at_their_deadline";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let timeout = Duration::from_millis(300);
    let config = patient(timeout).send_depth(4).recv_depth(4);
    let mut pairs: Vec<_> = (0..ENDPOINTS)
        .map(|_| Pair::new(&device, &config))
        .collect();
    device.set_faults(Faults {
        // Almost as long as the library waits for a flush.
        flush_ns: 18_000_000,
        ..Faults::default()
    });
    let (waiting, others) = pairs.split_at_mut(STREAMS);
    let regions: Vec<_> = waiting.iter().map(|pair| pair.region(64)).collect();
    for pair in others {
        let region = pair.region(64);
        let into = [region.slice(0, 64).unwrap()];
        pair.a.post_recv(1, &into).unwrap();
        pair.a.abort();
    }
    let streams: Vec<_> = (0..STREAMS).map(|_| rig::stream("many")).collect();
    let begin = Instant::now();
    let waits: Vec<_> = (waiting.iter_mut().zip(&regions).zip(&streams))
        .map(|((pair, region), stream)| wait_for_nothing(&mut pair.a, region, stream))
        .collect();
    for stream in &streams {
        let _ = stream.synchronize(SOON);
    }
    let took = begin.elapsed();
    assert!(
        took < timeout + LATE / 2,
        "a deadline of {timeout:?} after {took:?}"
    );
    for wait in &waits {
        assert!(matches!(settled(wait), Status::Failed(_)));
    }
    device.set_faults(Faults::default());
}

/// The device continues although the endpoint has failed. Work that it may have executed is reported as Unknown, whichever thread determines the
/// status.
#[test]
fn tickets_are_correct_if_the_device_does_not_stop() {
    let test = "tickets_are_correct_if_the_device_does_not_stop";
    let Some(device) = faulty(test) else { return };
    let limit = Limit::new(test, STEP);
    for round in 0..12 {
        limit.step(round, STEP);
        // Both commands fail, or one of them.
        let kinds = [CommandKind::Error, CommandKind::Reset];
        let kinds = [&kinds[..], &kinds[..1], &kinds[1..]][round as usize / 2 % 3];
        let mut pair = Pair::new(&device, &patient(Duration::from_millis(50)));
        let (from, to) = (pair.region(4096), pair.region(4096));
        from.fill(0, 4096, 7).unwrap();
        let remote = to.remote();
        let streams = [rig::stream("first"), rig::stream("second")];
        let (go, gate) = rig::gate();
        streams[1].launch(gate).unwrap();
        let mut tickets = Vec::new();
        for at in 0..4u64 {
            let slices = [from.slice(at * 64, 64).unwrap()];
            let work = Work::write(&slices, remote.slice(at * 64, 64).unwrap()).wr_id(at);
            // The last two are behind a wait that fails: one on its stream, one on another stream, whose doorbell covers both.
            let stream = &streams[usize::from(at == 3)];
            tickets.push(pair.a.stream_queue_send(stream, &work).unwrap());
            if at == 1 {
                device.set_faults(refuse(kinds));
                wait_for_nothing(&mut pair.a, &from, stream);
            }
        }
        let begin = Instant::now();
        let _ = streams[0].synchronize(SOON);
        let took = begin.elapsed();
        assert!(took < STOPPED_IN + LATE, "round {round}: {took:?}");
        // In even rounds the tickets are read before the device reaches them, in odd rounds after.
        let early: Vec<_> = (tickets.iter())
            .map(|ticket| (round % 2 == 0).then(|| settled(ticket)))
            .collect();
        go.store(true, Ordering::Release);
        let _ = streams[1].synchronize(SOON);
        std::thread::sleep(Duration::from_millis(20));
        for (at, ticket) in tickets.iter().enumerate() {
            let status = settled(ticket);
            if let Some(early) = early[at] {
                assert_eq!(early, status, "round {round}, write {at}: it was final");
            }
            let arrived = to.is_filled_with(at as u64 * 64, 64, 7).unwrap();
            let fits = match status {
                Status::Complete => arrived,
                Status::Unknown(_) => true,
                _ => !arrived,
            };
            assert!(
                fits,
                "round {round}, write {at}: {status:?}, and it has arrived: {arrived}"
            );
        }
        device.set_faults(Faults::default());
    }
}

/// A ticket of an endpoint that has failed is final once the device has stopped. A call that asks for it earlier does not wait until then.
#[test]
fn status_does_not_wait_for_a_device_that_hangs() {
    let test = "status_does_not_wait_for_a_device_that_hangs";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(64);
    let into = [region.slice(0, 64).unwrap()];
    let ticket = pair.a.post_recv(1, &into).unwrap();
    device.set_faults(hang(CommandKind::Error));
    pair.a.abort();
    let begin = Instant::now();
    for _ in 0..10 {
        assert_eq!(ticket.status_now(), Status::Rung);
    }
    let took = begin.elapsed();
    assert!(took < STOPPED_IN / 8, "the status took {took:?}");
    let waited = ticket.wait(Some(Duration::from_millis(50)));
    let took = begin.elapsed();
    assert!(took < STOPPED_IN / 4, "the wait took {took:?}");
    assert!(matches!(waited, Err(Error::Timeout { .. })), "{waited:?}");
    let status = ticket.status();
    let took = begin.elapsed();
    assert!(took < STOPPED_IN * 3 / 4, "the status took {took:?}");
    assert_eq!(status, Status::Rung);
    while !ticket.is_over() {
        assert!(begin.elapsed() < STOPPED_IN + LATE);
    }
    let status = ticket.status();
    assert!(matches!(status, Status::Unknown(_)), "{status:?}");
    device.set_faults(Faults::default());
}

#[test]
fn failed_reset_names_the_reason_and_the_remedy() {
    let test = "failed_reset_names_the_reason_and_the_remedy";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let mut pair = Pair::new(&device, &patient(Duration::from_millis(50)));
    device.set_faults(refuse_to_stop());
    pair.a.abort();
    let text = pair.a.reset().unwrap_err().to_string();
    for said in ["ERR", "stays registered", "new endpoint"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    // The device may work again later.
    device.set_faults(Faults::default());
    pair.reset();
    let region = pair.region(64);
    let remote = region.remote();
    assert!(is_registered(&mut pair, remote.slice(0, 8).unwrap()));
}

/// Memory of a request that a queue pair may still execute stays registered for as long as that, even if all handles of both are dropped.
#[test]
fn memory_that_a_device_may_still_write_stays_registered() {
    let test = "memory_that_a_device_may_still_write_stays_registered";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let mut witness = Pair::new(&device, &EndpointConfig::default());
    for kind in [Some(CommandKind::Error), None] {
        // In the same protection domain, so that the peer can access the memory.
        let [mut a, mut b] =
            [(); 2].map(|()| Endpoint::new(&witness.domain, &EndpointConfig::default()).unwrap());
        a.connect(&b.address()).unwrap();
        b.connect(&a.address()).unwrap();
        let region = witness.region(4096);
        let remote = region.remote().slice(0, 8).unwrap();
        // A posted receive, into which a message may still be written.
        a.post_recv(1, &[region.slice(0, 64).unwrap()]).unwrap();
        assert!(is_registered(&mut witness, remote), "{kind:?}");
        device.set_faults(kind.map_or_else(refuse_to_stop, hang));
        a.abort();
        let begin = Instant::now();
        drop((a, region));
        let took = begin.elapsed();
        assert!(took < STOPPED_IN + LATE, "the drop took {took:?}");
        std::thread::sleep(STOPPED_IN);
        assert!(is_registered(&mut witness, remote), "{kind:?}");
        device.set_faults(Faults::default());
        drop(b);
        if kind.is_some() {
            // The command succeeds, so the device no longer accesses the memory.
            let begin = Instant::now();
            while is_registered(&mut witness, remote) {
                assert!(begin.elapsed() < STEP / 2, "the memory stays registered");
                std::thread::sleep(Duration::from_millis(10));
            }
            witness.reset();
        }
    }
}

#[test]
fn endpoint_drop_with_a_hanging_command_is_bounded() {
    let test = "endpoint_drop_with_a_hanging_command_is_bounded";
    let Some(device) = faulty(test) else { return };
    let limit = Limit::new(test, STEP);
    for (step, kind) in [(1, CommandKind::Error), (2, CommandKind::Reset)] {
        limit.step(step, STEP);
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let region = pair.region(64);
        let ticket = pair
            .a
            .post_recv(1, &[region.slice(0, 64).unwrap()])
            .unwrap();
        device.set_faults(hang(kind));
        let begin = Instant::now();
        drop(pair);
        let took = begin.elapsed();
        assert!(took < STOPPED_IN + LATE, "{kind:?}: {took:?}");
        // Reading the status is bounded, too.
        assert!(ticket.is_over(), "{kind:?}: {:?}", ticket.status());
        let took = begin.elapsed();
        assert!(took < STOPPED_IN * 2 + LATE, "{kind:?}: {took:?}");
        device.set_faults(Faults::default());
    }
}

/// The kernel's driver answers these commands without the device, and with success.
#[test]
fn command_success_after_a_device_failure_is_not_trusted() {
    let test = "command_success_after_a_device_failure_is_not_trusted";
    let Some(device) = faulty(test) else { return };
    let _limit = Limit::new(test, STEP);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(64);
    let ticket = pair
        .a
        .post_recv(1, &[region.slice(0, 64).unwrap()])
        .unwrap();
    device.set_faults(Faults {
        fatal_ns: (1_000_000, 60_000_000_000),
        ..Faults::default()
    });
    let begin = Instant::now();
    while pair.a.failure().is_none() {
        assert!(begin.elapsed() < STEP / 2);
        std::thread::sleep(Duration::from_millis(1));
        let _ = ticket.status();
    }
    assert!(matches!(settled(&ticket), Status::Unknown(_)), "{ticket:?}");
    match pair.a.reset() {
        Err(Error::State { .. }) => {}
        other => panic!("{other:?}"),
    }
}
