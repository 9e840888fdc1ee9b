//! Connections by rdma_cm between endpoints of this process. They need a kernel with rdma_cm and a device with an IP address: `DOORBELL_TEST_CM` is
//! that address, `DOORBELL_TEST_DEVICE` the device. tests/rxe-vm has both.
#![cfg(all(feature = "verbs", feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use doorbell::{
    Access, CmConnection, CmListener, Device, Endpoint, EndpointConfig, Error, Executor,
    HostStream, ProtectionDomain, QueueKind, Region, RemoteSlice, Work,
};
use rig::{Limit, device};

const SOON: Duration = Duration::from_secs(60);

/// The address of the device, or none: then the test is waived.
fn address(test: &str) -> Option<String> {
    let address = std::env::var("DOORBELL_TEST_CM").ok();
    if address.is_none() {
        waived::waived(
            test,
            "no DOORBELL_TEST_CM, the IP address of a device that rdma_cm knows",
        );
    }
    address
}

fn listener(address: &str) -> (CmListener, String) {
    let listener = CmListener::bind(&format!("{address}:0")).unwrap();
    let address = listener.address().unwrap().to_string();
    (listener, address)
}

fn endpoint(domain: &ProtectionDomain) -> Endpoint {
    Endpoint::new(domain, &EndpointConfig::default()).unwrap()
}

/// Two connected endpoints; the second one accepted.
fn connected(
    domain: &ProtectionDomain,
    listener: &CmListener,
    address: &str,
) -> [(Endpoint, CmConnection); 2] {
    let mut active = endpoint(domain);
    let mut passive = endpoint(domain);
    let (one, other) = std::thread::scope(|scope| {
        let one = scope.spawn(|| CmConnection::connect(&mut active, address, b"ping", SOON));
        let request = listener.accept(SOON).unwrap();
        assert!(request.private_data().starts_with(b"ping\0"));
        let other = request.accept(&mut passive, b"pong", SOON).unwrap();
        (one.join().unwrap().unwrap(), other)
    });
    assert!(one.private_data().starts_with(b"pong\0"));
    assert!(other.private_data().starts_with(b"ping\0"));
    assert_eq!(one.peer().to_string(), address);
    assert_eq!(other.peer().ip(), one.peer().ip());
    assert!(active.is_connected() && passive.is_connected());
    [(active, one), (passive, other)]
}

/// Every operation of `from` reaches the region at the other end.
fn transfer(from: &mut Endpoint, to: &mut Endpoint) {
    let domain = from.domain().clone();
    let (source, target) = (
        Region::alloc(&domain, 8192, Access::ALL).unwrap(),
        Region::alloc(&domain, 8192, Access::ALL).unwrap(),
    );
    source.fill(0, 4096, 0x5a).unwrap();
    let stream = HostStream::new("cm").unwrap();
    let there = target.remote();
    to.post_recv(1, &[target.slice(4096, 4096).unwrap()])
        .unwrap();
    let local = [source.slice(0, 4096).unwrap()];
    let back = [source.slice(4096, 4096).unwrap()];
    for work in [
        Work::write(&local, RemoteSlice::at(there.addr, there.rkey)),
        Work::send(&local),
        Work::read(&back, RemoteSlice::at(there.addr, there.rkey)),
    ] {
        from.stream_queue_send(&stream, &work).unwrap();
        from.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    }
    to.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
    stream.synchronize(Some(SOON)).unwrap();
    assert_eq!(from.failure(), None);
    assert!(target.is_filled_with(0, 8192, 0x5a).unwrap());
    assert!(source.is_filled_with(0, 8192, 0x5a).unwrap());
}

#[test]
fn bind_on_a_system_without_rdma_cm_fails_at_once() {
    if std::path::Path::new("/dev/infiniband/rdma_cm").exists() {
        return waived::waived(
            "bind_on_a_system_without_rdma_cm_fails_at_once",
            "this system has rdma_cm",
        );
    }
    let refused = CmListener::bind("127.0.0.1:7174").unwrap_err();
    assert!(
        matches!(
            refused,
            Error::System {
                operation: "rdma_create_event_channel",
                ..
            }
        ),
        "{refused}"
    );
}

#[test]
fn wrong_address_and_long_private_data_are_refused() {
    assert!(matches!(
        CmListener::bind("nowhere"),
        Err(Error::Malformed { .. })
    ));
    let domain = Device::open("softcx").unwrap().protection_domain();
    let mut endpoint = endpoint(&domain);
    let long = CmConnection::connect(&mut endpoint, "127.0.0.1:1", &[0; 57], SOON);
    assert!(
        matches!(
            long,
            Err(Error::Range {
                argument: "private_data",
                max: 56,
                ..
            })
        ),
        "{long:?}"
    );
}

#[test]
fn connections_carry_every_operation_and_reconnect_after_reset() {
    let Some(address) = address("connections_carry_every_operation_and_reconnect_after_reset")
    else {
        return;
    };
    let _limit = Limit::new("connections", SOON * 3);
    let domain = device().protection_domain();
    let (listener, at) = listener(&address);
    let [(mut a, one), (mut b, mut other)] = connected(&domain, &listener, &at);
    transfer(&mut a, &mut b);
    transfer(&mut b, &mut a);
    // A second connection of the same endpoint.
    let again = CmConnection::connect(&mut a, &at, &[], SOON).unwrap_err();
    assert!(again.to_string().contains("connected already"), "{again}");

    // One side disconnects: the other side gets the event, its endpoint fails, and a wait on a stream ends.
    assert!(other.check().is_ok());
    let stream = HostStream::new("cm").unwrap();
    let sink = Region::alloc(&domain, 64, Access::LOCAL_WRITE).unwrap();
    b.post_recv(1, &[sink.slice(0, 64).unwrap()]).unwrap();
    b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
    let started = Instant::now();
    drop(one);
    other.wait_disconnected(SOON).unwrap();
    let fault = stream.synchronize(Some(SOON)).unwrap_err();
    assert!(
        matches!(fault, Error::Asynchronous { work: Some(_), .. }),
        "{fault}"
    );
    assert!(started.elapsed() < SOON / 2, "{:?}", started.elapsed());
    let over = other.check().unwrap_err();
    assert!(over.to_string().contains("has disconnected"), "{over}");
    assert!(b.failure().is_some() && !b.is_connected());
    assert!(a.failure().is_some() && !a.is_connected());

    // The same queue pairs are connected again. The end of the old connection, which comes later, must not affect them.
    a.reset().unwrap();
    b.reset().unwrap();
    let (last_one, last_other) = std::thread::scope(|scope| {
        let one = scope.spawn(|| CmConnection::connect(&mut a, &at, &[], SOON));
        let request = listener.accept(SOON).unwrap();
        let other = request.accept(&mut b, &[], SOON).unwrap();
        (one.join().unwrap().unwrap(), other)
    });
    assert!(other.check().is_err());
    drop(other);
    transfer(&mut a, &mut b);
    assert!(a.is_connected() && b.is_connected());
    // An orderly disconnect: both ends get the event.
    std::thread::scope(|scope| {
        let mut other = last_other;
        let left = scope.spawn(|| last_one.disconnect(SOON));
        other.wait_disconnected(SOON).unwrap();
        left.join().unwrap().unwrap();
    });
    assert!(!a.is_connected() && !b.is_connected());
}

#[test]
fn refusal_has_its_reason_and_private_data() {
    let Some(address) = address("refusal_has_its_reason_and_private_data") else {
        return;
    };
    let _limit = Limit::new("refusals", SOON * 3);
    let domain = device().protection_domain();
    let (listener, at) = listener(&address);
    let mut endpoint = endpoint(&domain);
    let mut refused = |how: &dyn Fn(doorbell::CmRequest)| {
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| CmConnection::connect(&mut endpoint, &at, &[1, 2], SOON));
            how(listener.accept(SOON).unwrap());
            asked.join().unwrap().unwrap_err()
        })
    };
    let spoken = refused(&|request| request.reject(b"not today").unwrap());
    let Error::Refused {
        peer,
        reason,
        private_data,
    } = &spoken
    else {
        panic!("{spoken}");
    };
    assert_eq!(*peer, at);
    assert!(reason.contains("application"), "{reason}");
    assert!(private_data.starts_with(b"not today\0"));
    let silent = refused(&drop);
    assert!(matches!(silent, Error::Refused { .. }), "{silent}");
    // The request is accepted with an endpoint of another device.
    let foreign = refused(&|request| {
        let soft = Device::open("softcx").unwrap().protection_domain();
        let mut soft = Endpoint::new(&soft, &EndpointConfig::default()).unwrap();
        let foreign = request.accept(&mut soft, &[], SOON).unwrap_err();
        assert!(matches!(foreign, Error::Foreign { .. }), "{foreign}");
    });
    assert!(matches!(foreign, Error::Refused { .. }), "{foreign}");
    // The refusals did not change the endpoint.
    assert_eq!(endpoint.failure(), None);
    let connected = std::thread::scope(|scope| {
        let asked = scope.spawn(|| CmConnection::connect(&mut endpoint, &at, &[], SOON));
        let mut passive = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let taken = listener
            .accept(SOON)
            .unwrap()
            .accept(&mut passive, &[], SOON);
        asked.join().unwrap().and(taken)
    });
    drop(connected.unwrap());
}

#[test]
fn an_abort_ends_a_connect_that_waits_for_ever() {
    let Some(address) = address("an_abort_ends_a_connect_that_waits_for_ever") else {
        return;
    };
    let domain = device().protection_domain();
    let (listener, silent) = listener(&address);
    // One that takes no request, and a port where nobody listens: no listener is given it.
    for address in [silent, format!("{address}:1")] {
        let mut endpoint = endpoint(&domain);
        let abort = endpoint.abort_handle();
        let started = Instant::now();
        let ended = std::thread::scope(|scope| {
            let connect =
                scope.spawn(|| CmConnection::connect(&mut endpoint, &address, &[], Duration::MAX));
            std::thread::sleep(Duration::from_millis(300));
            assert!(!connect.is_finished());
            abort.abort();
            connect.join().unwrap().unwrap_err()
        });
        assert!(matches!(ended, Error::Work(_)), "{ended}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }
    drop(listener);
}

#[test]
fn absent_peer_is_reported_within_the_deadline() {
    let Some(address) = address("absent_peer_is_reported_within_the_deadline") else {
        return;
    };
    let _limit = Limit::new("nobody", SOON * 3);
    let domain = device().protection_domain();
    let mut a = endpoint(&domain);
    let (listening, at) = listener(&address);
    let soon = Duration::from_millis(500);
    let within = |limit: Duration, run: &mut dyn FnMut() -> Error| {
        let started = Instant::now();
        let error = run();
        assert!(started.elapsed() < limit, "{error}");
        error
    };
    let timed = |run: &mut dyn FnMut() -> Error| within(SOON / 2, run);
    // No side accepts the request, and no request arrives.
    let nobody = timed(&mut || CmConnection::connect(&mut a, &at, &[], soon).unwrap_err());
    assert!(matches!(nobody, Error::Timeout { .. }), "{nobody}");
    let (silent, _) = listener(&address);
    let nobody = timed(&mut || silent.accept(soon).unwrap_err());
    assert!(matches!(nobody, Error::Timeout { .. }), "{nobody}");
    drop(listening);
    // No listener: the rejection has to arrive in time. An emulated kernel is slow, so later attempts wait longer.
    let mut answers = [4, 12, 36]
        .map(Duration::from_secs)
        .into_iter()
        .map(|time| {
            within(time + SOON / 2, &mut || {
                CmConnection::connect(&mut a, &at, &[], time).unwrap_err()
            })
        });
    let closed = answers
        .find(|it| !matches!(it, Error::Timeout { .. }))
        .expect("an error for the missing listener");
    assert!(
        matches!(&closed, Error::Refused { reason, .. } if reason.contains("no process listens")),
        "{closed}"
    );
    // No host, and no RDMA device on the way.
    let host = timed(&mut || CmConnection::connect(&mut a, "10.9.0.77:1", &[], soon).unwrap_err());
    assert!(
        matches!(host, Error::Timeout { .. } | Error::State { .. }),
        "{host}"
    );
    let bound = CmListener::bind("203.0.113.1:1").unwrap_err();
    assert!(matches!(bound, Error::System { .. }), "{bound}");
    // An endpoint of another device.
    let mut soft = endpoint(&Device::open("softcx").unwrap().protection_domain());
    let (_listening, at) = listener(&address);
    let foreign = timed(&mut || CmConnection::connect(&mut soft, &at, &[], SOON).unwrap_err());
    assert!(
        matches!(&foreign, Error::Foreign { expected, .. } if expected.contains(&address)),
        "{foreign}"
    );
    // The listener starts late.
    assert_eq!(a.failure(), None);
    let (late, at) = listener(&address);
    drop(late);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| CmConnection::connect(&mut a, &at, &[], SOON));
        std::thread::sleep(Duration::from_millis(200));
        let late = CmListener::bind(&at).unwrap();
        let mut b = endpoint(&domain);
        let taken = late.accept(SOON).unwrap().accept(&mut b, &[], SOON);
        drop(asked.join().unwrap().and(taken).unwrap());
    });
}

/// The environment of a process that connects to that address, and then waits to be killed.
const VICTIM: &str = "DOORBELL_TEST_CM_VICTIM";

#[test]
fn child_process_of_the_killed_peer_test() {
    let Ok(address) = std::env::var(VICTIM) else {
        return;
    };
    let domain = device().protection_domain();
    let mut endpoint = endpoint(&domain);
    let _connection = CmConnection::connect(&mut endpoint, &address, &[], SOON).unwrap();
    std::thread::sleep(SOON);
}

#[test]
fn killed_peer_is_reported_as_disconnected() {
    let Some(address) = address("killed_peer_is_reported_as_disconnected") else {
        return;
    };
    let _limit = Limit::new("killed", SOON * 2);
    let domain = device().protection_domain();
    let (listener, at) = listener(&address);
    let mut survivor = endpoint(&domain);
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process_of_the_killed_peer_test"])
        .env(VICTIM, &at)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let request = listener.accept(SOON).unwrap();
    let mut connection = request.accept(&mut survivor, &[], SOON).unwrap();
    // A stream waits for a message that never comes, while no thread polls the connection.
    let stream = HostStream::new("cm").unwrap();
    let sink = Region::alloc(&domain, 64, Access::LOCAL_WRITE).unwrap();
    survivor
        .post_recv(1, &[sink.slice(0, 64).unwrap()])
        .unwrap();
    let ticket = survivor.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
    connection.check().unwrap();
    victim.kill().unwrap();
    victim.wait().unwrap();
    let started = Instant::now();
    connection.wait_disconnected(SOON).unwrap();
    let fault = stream.synchronize(Some(SOON)).unwrap_err();
    assert!(
        matches!(fault, Error::Asynchronous { work: Some(_), .. }),
        "{fault}"
    );
    assert!(started.elapsed() < SOON / 2, "{:?}", started.elapsed());
    assert!(connection.check().is_err() && ticket.check().is_err());
    assert!(survivor.failure().is_some());
}

/// The request is accepted after the peer has disconnected.
#[test]
fn accept_fails_if_the_requester_has_gone() {
    let Some(address) = address("accept_fails_if_the_requester_has_gone") else {
        return;
    };
    let _limit = Limit::new("between", SOON * 2);
    let domain = device().protection_domain();
    let (listener, at) = listener(&address);
    let (mut a, mut b) = (endpoint(&domain), endpoint(&domain));
    let soon = Duration::from_millis(300);
    CmConnection::connect(&mut a, &at, &[], soon).unwrap_err();
    let started = Instant::now();
    // The request is either withdrawn already, or it cannot be accepted.
    if let Ok(request) = listener.accept(soon) {
        let error = request
            .accept(&mut b, &[], Duration::from_secs(5))
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Timeout { .. }
                    | Error::Refused { .. }
                    | Error::State { .. }
                    | Error::System { .. }
            ),
            "{error}"
        );
        assert!(!b.is_connected());
        if b.failure().is_some() {
            b.reset().unwrap();
        }
    }
    assert!(started.elapsed() < SOON / 2);
    let mut c = endpoint(&domain);
    let _connections = std::thread::scope(|scope| {
        let asked = scope.spawn(|| CmConnection::connect(&mut c, &at, &[], SOON));
        let other = listener.accept(SOON).unwrap().accept(&mut b, &[], SOON);
        (asked.join().unwrap().unwrap(), other.unwrap())
    });
    transfer(&mut c, &mut b);
}

/// Removes the device, so it runs in a run of its own.
#[test]
fn a_device_that_is_removed_ends_its_connections() {
    let test = "a_device_that_is_removed_ends_its_connections";
    let Ok(link) = std::env::var("DOORBELL_TEST_REMOVE") else {
        return waived::waived(
            test,
            "no DOORBELL_TEST_REMOVE, a device that `rdma link delete` may remove",
        );
    };
    let Some(address) = address(test) else {
        return;
    };
    let _limit = Limit::new("removed", SOON);
    let domain = device().protection_domain();
    let (listener, at) = listener(&address);
    let ends = connected(&domain, &listener, &at);
    let mut removed = Command::new("rdma")
        .args(["link", "delete", &link])
        .spawn()
        .unwrap();
    for (endpoint, mut connection) in ends {
        connection.wait_disconnected(SOON).unwrap();
        let over = connection.check().unwrap_err();
        assert!(
            over.to_string().contains("removed") || over.to_string().contains("disconnected"),
            "{over}"
        );
        assert!(!endpoint.is_connected() && endpoint.failure().is_some());
    }
    // A listener gets the event too.
    let gone = listener.accept(SOON).unwrap_err();
    assert!(gone.to_string().contains("removed"), "{gone}");
    // SoftRoCE waits until no process has the device open, and librdmacm has it open as long as the process lives.
    if let Some(status) = removed.try_wait().unwrap() {
        assert!(status.success());
    }
}
