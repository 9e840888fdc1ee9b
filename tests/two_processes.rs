//! Two real processes: every operation both ways, and peers that are killed.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use doorbell::{
    Access, Cause, Channel, Endpoint, EndpointConfig, Error, Executor, HostStream, Listener,
    Operation, QueueKind, Region, RemoteRegion, RemoteSlice, Status, WcStatus, Work,
};
use rig::{Limit, SOON, device, from_env};

const ADDRESS: &str = "DOORBELL_TEST_PEER";
const WAIT: Duration = Duration::from_secs(60);

// The map of a region, the same on both sides.
const AREA: u64 = 256 << 10;
const OWN: u64 = 0;
const RECEIVED: u64 = AREA;
const WRITTEN: u64 = 2 * AREA;
const FETCHED: u64 = 3 * AREA;
const COUNTER: u64 = 4 * AREA;
const RESULTS: u64 = COUNTER + 64;
const BYTES: u64 = COUNTER + 4096;
const LONG: u64 = 200_003;

fn config() -> EndpointConfig {
    EndpointConfig::default()
        .send_depth(32)
        .recv_depth(32)
        .ack_timeout(15)
        .retry_count(7)
        .wait_timeout(Some(Duration::from_secs(30)))
}

/// One of the two.
struct End {
    channel: Channel,
    endpoint: Endpoint,
    region: Region,
    stream: HostStream,
    remote: RemoteRegion,
    is_child: bool,
}

impl End {
    fn new(channel: Channel, is_child: bool) -> End {
        let domain = device().protection_domain();
        let endpoint = Endpoint::new(&domain, &config()).unwrap();
        let region = Region::alloc(&domain, BYTES, Access::ALL).unwrap();
        let stream = HostStream::new("end").unwrap();
        let mut end = End {
            remote: region.remote(),
            channel,
            endpoint,
            region,
            stream,
            is_child,
        };
        end.meet();
        end
    }

    /// Exchanges addresses over the channel and connects.
    fn meet(&mut self) {
        let mine = self.endpoint.address();
        let theirs = self.channel.exchange_addresses(&mine, WAIT).unwrap();
        self.endpoint.connect(&theirs).unwrap();
        let bytes = self.region.remote().to_bytes();
        let remote = self.channel.exchange(&bytes, WAIT).unwrap();
        self.remote = RemoteRegion::from_bytes(&remote.try_into().unwrap());
        self.channel.barrier(WAIT).unwrap();
    }

    /// Byte `at` of the data of the child or the parent in that round.
    fn pattern(of_child: bool, round: u8, at: u64) -> u8 {
        (at as u8).wrapping_mul(13)
            ^ (at >> 8) as u8
            ^ round.wrapping_mul(29)
            ^ if of_child { 0x5a } else { 0 }
    }

    fn expect(&self, offset: u64, len: u64, round: u8, what: &str) {
        let mut got = vec![0; len as usize];
        self.region.read(offset, &mut got).unwrap();
        let wrong = got
            .iter()
            .enumerate()
            .position(|(at, byte)| *byte != End::pattern(!self.is_child, round, at as u64));
        assert_eq!(wrong, None, "{what}, round {round}");
    }

    /// Every operation, both ways at once.
    fn exercise(&mut self, round: u8) {
        let remote = self.remote;
        let at = |offset, len_bytes| remote.slice(offset, len_bytes).unwrap();
        let own: Vec<u8> = (0..LONG)
            .map(|at| End::pattern(self.is_child, round, at))
            .collect();
        self.region.write(OWN, &own).unwrap();
        self.region
            .fill(RECEIVED, COUNTER + 128 - RECEIVED, 0)
            .unwrap();
        self.channel.barrier(WAIT).unwrap();
        let region = self.region.clone();
        let part = |offset, len| region.slice(offset, len).unwrap();
        let parts = [part(RECEIVED, 1000), part(RECEIVED + 1000, LONG - 1000)];
        let first = self.endpoint.post_recv(1, &parts).unwrap();
        let second = self
            .endpoint
            .post_recv(2, &[part(RECEIVED + LONG, 100)])
            .unwrap();
        let third = self.endpoint.post_recv(3, &[]).unwrap();
        self.channel.barrier(WAIT).unwrap();

        let data = [part(OWN, 3), part(OWN + 3, LONG - 3)];
        let inline = &own[..60];
        let fetched = [part(FETCHED, LONG)];
        let (swapped, added) = ([part(RESULTS, 8)], [part(RESULTS + 8, 8)]);
        let works = [
            Work::send(&data),
            Work::send_inline(inline).imm(0x1234_5678),
            Work::write(&data, at(WRITTEN, LONG)).imm(round.into()),
            Work::read(&fetched, at(OWN, LONG)),
            Work::compare_swap(&swapped, at(COUNTER, 8), 0, 40),
            Work::fetch_add(&added, at(COUNTER, 8), 2).fence(true),
            Work::nop(),
        ];
        let mut tickets = Vec::new();
        for (number, work) in works.iter().enumerate() {
            let work = work.wr_id(number as u64);
            tickets.push(
                self.endpoint
                    .stream_queue_send(&self.stream, &work)
                    .unwrap(),
            );
        }
        // Half of the completions by the stream, half by the CPU.
        for _ in 0..4 {
            self.endpoint
                .stream_wait_cq(&self.stream, QueueKind::Send)
                .unwrap();
        }
        for number in 4..7 {
            match self.endpoint.wait_cq(QueueKind::Send, SOON) {
                Ok(completion) => assert_eq!(completion.wr_id, number),
                // The endpoint keeps the first of several errors.
                Err(error) => panic!("{error}, first {:?}", self.endpoint.failure()),
            }
        }
        for wr_id in [1, 2] {
            let completion = self.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
            assert_eq!(completion.wr_id, wr_id);
        }
        let completion = self.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert_eq!(
            (completion.wr_id, completion.operation),
            (3, Operation::ReceiveWrite)
        );
        assert_eq!(
            (completion.len_bytes, completion.imm),
            (LONG as u32, Some(round.into()))
        );
        self.stream.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(|t| t.status() == Status::Complete));
        assert_eq!(first.details(), Some((LONG as u32, None)));
        assert_eq!(second.details(), Some((60, Some(0x1234_5678))));
        assert_eq!(third.details(), Some((LONG as u32, Some(round.into()))));
        // The peer reads and counts here until it is done, too.
        self.channel.barrier(WAIT).unwrap();
        self.expect(RECEIVED, LONG, round, "send");
        self.expect(RECEIVED + LONG, 60, round, "inline send");
        self.expect(WRITTEN, LONG, round, "write");
        self.expect(FETCHED, LONG, round, "read");
        let word = |offset| region.load_u32(offset).unwrap();
        assert_eq!(
            (word(RESULTS), word(RESULTS + 8), word(COUNTER)),
            (0, 40, 42)
        );
        self.channel.barrier(WAIT).unwrap();
    }
}

/// What a killed peer was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Busy {
    Nothing,
    Sending,
}

/// The other process: does nothing without the address in its environment, as when the test harness runs it.
#[test]
fn peer() {
    let Ok(address) = std::env::var(ADDRESS) else {
        return;
    };
    let channel = Channel::connect(&address, WAIT).unwrap();
    let mut end = End::new(channel, true);
    loop {
        let command = end.channel.receive(WAIT).unwrap();
        match command[..] {
            [b'x', round] => end.exercise(round),
            // About to be killed: idle, or in the middle of endless writes to the parent.
            [b'i'] => std::thread::sleep(WAIT),
            [b's'] => loop {
                let data = [end.region.slice(OWN, LONG).unwrap()];
                let work = Work::write(
                    &data,
                    RemoteSlice::at(end.remote.addr + WRITTEN, end.remote.rkey),
                );
                for _ in 0..8 {
                    end.endpoint.stream_queue_send(&end.stream, &work).unwrap();
                    end.endpoint
                        .stream_wait_cq(&end.stream, QueueKind::Send)
                        .unwrap();
                }
                end.stream.synchronize(SOON).unwrap();
            },
            _ => return,
        }
    }
}

/// A child process that is killed when the test ends.
struct Peer(Child);

impl Peer {
    fn spawn(listener: &Listener) -> Peer {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program)
            .args(["--exact", "peer", "--nocapture", "--test-threads=1"])
            .env(ADDRESS, listener.address().unwrap().to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Peer(child)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // SIGKILL. It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn every_operation_works_both_ways_between_two_processes() {
    let _limit = Limit::new("two processes", Duration::from_secs(170));
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let mut peer = Peer::spawn(&listener);
    let mut end = End::new(listener.accept(WAIT).unwrap(), false);
    for round in 0..6 {
        end.channel.send(&[b'x', round], WAIT).unwrap();
        end.exercise(round);
    }
    end.channel.send(b"end", WAIT).unwrap();
    assert!(peer.0.wait().unwrap().success());
}

/// One endpoint connects to one peer after the other, each killed at a different moment of a transfer.
#[test]
fn killed_peers_are_reported_in_time_and_the_next_peer_works() {
    let limit = Limit::new("killed peers", Duration::from_secs(60));
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let mut mine: Option<End> = None;
    for round in 0..from_env("DOORBELL_KILLS", 12) as u8 {
        limit.step(round.into(), Duration::from_secs(60));
        let peer = Peer::spawn(&listener);
        let channel = listener.accept(WAIT).unwrap();
        let end = match &mut mine {
            Some(end) => {
                end.endpoint.reset().unwrap();
                end.channel = channel;
                end.meet();
                end
            }
            none => none.insert(End::new(channel, false)),
        };
        end.channel.send(&[b'x', round], WAIT).unwrap();
        end.exercise(round);
        let busy = if round % 2 == 0 {
            Busy::Nothing
        } else {
            Busy::Sending
        };
        let command: &[u8] = if busy == Busy::Sending { b"s" } else { b"i" };
        end.channel.send(command, WAIT).unwrap();

        // Long writes to the peer, queued endlessly on the stream while the peer is killed.
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(500 + u64::from(round) * 1700));
            drop(peer);
            Instant::now()
        });
        let data = [end.region.slice(OWN, LONG).unwrap()];
        let work = Work::write(
            &data,
            RemoteSlice::at(end.remote.addr + WRITTEN, end.remote.rkey),
        );
        let (tickets, error) = {
            let mut tickets = Vec::new();
            loop {
                let queued =
                    end.endpoint
                        .stream_queue_send(&end.stream, &work)
                        .and_then(|ticket| {
                            tickets.push(ticket);
                            end.endpoint.stream_wait_cq(&end.stream, QueueKind::Send)
                        });
                match queued {
                    Ok(ticket) => tickets.push(ticket),
                    Err(Error::QueueFull { .. }) => std::thread::yield_now(),
                    Err(error) => break (tickets, error),
                }
            }
        };
        let late = killer.join().unwrap().elapsed();
        let Error::Work(failure) = error else {
            panic!("{error:?}")
        };
        assert!(
            matches!(
                failure.cause,
                Cause::Completion {
                    status: WcStatus::RetryExcErr,
                    ..
                }
            ),
            "{failure}"
        );
        assert!(failure.wr_id.is_some());
        // The retries take 1.07 s; the rest allows for a busy machine.
        assert!(late < Duration::from_secs(30), "known after {late:?}");
        match end.stream.synchronize(SOON) {
            Ok(()) | Err(Error::Asynchronous { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
        end.stream.take_fault();
        // A status is final once the device has stopped, for which it waits half a second; a busy machine may take longer.
        let since = Instant::now();
        while !tickets.iter().all(doorbell::Ticket::is_over) {
            assert!(since.elapsed() < Duration::from_secs(30));
        }
        let last = tickets.last().unwrap().status();
        assert!(
            matches!(last, Status::Failed(_) | Status::Discarded),
            "{last:?}"
        );
        // The channel reports it, too.
        assert!(matches!(
            end.channel.receive(Duration::from_secs(20)),
            Err(Error::State { .. } | Error::System { .. })
        ));
    }
}

/// Sends the signal, and waits until the process has stopped.
fn stop(peer: &Peer) {
    let id = peer.0.id();
    let status = Command::new("kill")
        .args(["-s", "STOP", &id.to_string()])
        .status();
    assert!(status.unwrap().success());
    let started = Instant::now();
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
        stat.rsplit_once(") ")
            .map(|(_, rest)| rest.starts_with('T'))
    };
    while state() != Some(true) {
        assert!(started.elapsed() < WAIT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// No call blocks beyond its own deadline for a stopped process, at whatever moment of a transfer it was stopped.
#[test]
fn stopped_peer_blocks_no_call_beyond_its_deadline() {
    /// A second is enough. Without a limit, a call that waits for the peer would block until the peer continues.
    const HELD_UP: Duration = Duration::from_secs(25);
    let limit = Limit::new("stopped peers", WAIT);
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    for round in 0..from_env("DOORBELL_STOPS", 4) {
        limit.step(round, WAIT);
        let peer = Peer::spawn(&listener);
        let mut end = End::new(listener.accept(WAIT).unwrap(), false);
        end.channel.send(b"s", WAIT).unwrap();
        let data = [end.region.slice(OWN, LONG).unwrap()];
        let into = RemoteSlice::at(end.remote.addr + WRITTEN, end.remote.rkey);
        let work = Work::write(&data, into);
        for _ in 0..4 {
            end.endpoint.stream_queue_send(&end.stream, &work).unwrap();
        }
        std::thread::sleep(Duration::from_micros(300 + round * 1700));
        stop(&peer);
        let step = |what: &str, call: &mut dyn FnMut()| {
            limit.step(round, HELD_UP);
            let started = Instant::now();
            call();
            println!("round {round}: {what} took {:?}", started.elapsed());
        };
        let timeout = Some(Duration::from_millis(100));
        let mut endpoint = Some(end.endpoint);
        let both = |endpoint: &mut Option<Endpoint>, what: &dyn Fn(&mut Endpoint)| {
            endpoint.iter_mut().for_each(what);
        };
        step("a wait with a deadline", &mut || {
            both(&mut endpoint, &|endpoint| {
                let _ = endpoint.wait_cq(QueueKind::Recv, timeout);
            });
        });
        step("a message with a deadline", &mut || {
            let late = end.channel.receive(Duration::from_millis(100));
            assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        });
        step("deregister", &mut || {
            assert_eq!(end.region.deregister(), Ok(true))
        });
        // One after the other: a reset, and a drop without one.
        if round % 2 == 0 {
            step("reset", &mut || {
                both(&mut endpoint, &|endpoint| endpoint.reset().unwrap());
            });
        }
        step("drop of the endpoint", &mut || drop(endpoint.take()));
        step("synchronize", &mut || {
            let _ = end.stream.synchronize(SOON);
        });
        limit.step(round, HELD_UP);
        let started = Instant::now();
        drop((end.stream, end.region, end.channel));
        println!("round {round}: the rest took {:?}", started.elapsed());
        limit.step(round, WAIT);
        drop(peer);
    }
}

/// A process that waits to receive from a killed peer gets no error from the device: the deadline ends the wait.
#[test]
fn a_receive_from_a_killed_peer_ends_by_its_deadline() {
    let _limit = Limit::new("receive from a killed peer", Duration::from_secs(60));
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let peer = Peer::spawn(&listener);
    let mut end = End::new(listener.accept(WAIT).unwrap(), false);
    end.channel.send(b"i", WAIT).unwrap();
    let into = [end.region.slice(0, 64).unwrap()];
    let timeout = Duration::from_millis(100);
    let receive = end
        .endpoint
        .stream_queue_recv(&end.stream, 1, &into)
        .unwrap();
    let wait = end
        .endpoint
        .stream_wait_cq_for(&end.stream, QueueKind::Recv, Some(timeout))
        .unwrap();
    drop(peer);
    let started = Instant::now();
    // The receive is flushed, so the stream may have found a completion to go on with; the error is the endpoint's.
    match end.stream.synchronize(SOON) {
        Ok(()) | Err(Error::Asynchronous { .. }) => {}
        Err(other) => panic!("{other:?}"),
    }
    end.stream.take_fault();
    assert!(started.elapsed() < Duration::from_secs(30));
    let failure = end.endpoint.failure().unwrap();
    assert_eq!(failure.cause, Cause::Deadline(timeout));
    assert_eq!(receive.status(), Status::Failed(failure));
    assert_eq!(wait.status(), Status::Failed(failure));
    // The killed peer's address is invalid. The next peer works.
    let peer = Peer::spawn(&listener);
    end.channel = listener.accept(WAIT).unwrap();
    end.endpoint.reset().unwrap();
    end.meet();
    end.channel.send(&[b'x', 9], WAIT).unwrap();
    end.exercise(9);
    drop(peer);
}
