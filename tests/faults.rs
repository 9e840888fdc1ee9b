//! Ten thousand random faults. Each ends in bounded time with the expected error, and after reset and connect the same endpoints work. The seed is
//! printed; `DOORBELL_SEED` repeats a run, `DOORBELL_FAULTS` sets the number of faults. With `DOORBELL_TEST_STREAM=cuda` all is queued on CUDA
//! streams, with faults of the driver in addition.
#![cfg(all(feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

mod rig;
#[cfg(feature = "cuda")]
#[path = "rig/standin.rs"]
mod standin;
#[path = "rig/store_only.rs"]
mod store_only;
mod waived;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use doorbell::softcx::Faults;
use doorbell::{
    Access, Cause, Condition, Control, Device, EndpointConfig, Error, Executor, HostStream,
    QueueKind, Region, RemoteSlice, StateKind, Status, Ticket, WcStatus, Work, WorkError,
    stream_post, stream_wait_value32,
};

use rig::{
    Limit, Pair, Random, SOON, Stream, by_trigger, control, from_env, has_atomics, has_no_queue,
    is_cuda, stream, strict, strict_device as device,
};
use store_only::StoreOnlyStream;

const WORKERS: u64 = 6;
/// No single fault takes this long.
const BOUND: Duration = Duration::from_secs(60);
/// The deadline of a wait that is to time out.
const SHORT: Option<Duration> = Some(Duration::from_millis(2));

/// A configuration with many retries.
fn patient() -> EndpointConfig {
    EndpointConfig::default()
        .send_depth(16)
        .recv_depth(16)
        .ack_timeout(11)
        .retry_count(7)
        .rnr_retry(7)
        .mtu_bytes(1024)
}

/// A configuration with few retries. They take long enough, 168 ms, for a peer on UDP whose thread has to wait for a processor: it must not look like one that is gone.
fn hasty() -> EndpointConfig {
    patient().ack_timeout(13).retry_count(4).rnr_retry(1)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Lossy,
    WrongKey,
    BeyondTheRegion,
    NoRight,
    LongerThanTheReceive,
    ReceiveIntoReadOnly,
    ReadIntoReadOnly,
    MisalignedAtomic,
    DeregisteredHere,
    DeregisteredThere,
    DeregisteredInFlight,
    NoReceive,
    NoReceiveForEver,
    LateReceive,
    NothingToComplete,
    FrozenNic,
    FrozenNicTwoStreams,
    KernelPanics,
    StreamAborted,
    EndpointAborted,
    EndpointDropped,
    PeerDropped,
    PeerReset,
    WordNeverComes,
    DriverRefuses,
    DriverRefusesLater,
    StreamDestroyed,
}

const FAULTS: [Fault; 27] = [
    Fault::Lossy,
    Fault::WrongKey,
    Fault::BeyondTheRegion,
    Fault::NoRight,
    Fault::LongerThanTheReceive,
    Fault::ReceiveIntoReadOnly,
    Fault::ReadIntoReadOnly,
    Fault::MisalignedAtomic,
    Fault::DeregisteredHere,
    Fault::DeregisteredThere,
    Fault::DeregisteredInFlight,
    Fault::NoReceive,
    Fault::NoReceiveForEver,
    Fault::LateReceive,
    Fault::NothingToComplete,
    Fault::FrozenNic,
    Fault::FrozenNicTwoStreams,
    Fault::KernelPanics,
    Fault::StreamAborted,
    Fault::EndpointAborted,
    Fault::EndpointDropped,
    Fault::PeerDropped,
    Fault::PeerReset,
    Fault::WordNeverComes,
    Fault::DriverRefuses,
    Fault::DriverRefusesLater,
    Fault::StreamDestroyed,
];

/// Faults of the driver, which the stand-in injects.
const BY_THE_DRIVER: [Fault; 3] = [
    Fault::DriverRefuses,
    Fault::DriverRefusesLater,
    Fault::StreamDestroyed,
];

/// Faults that the device has to inject: only the software ConnectX of this process can.
const BY_THE_DEVICE: [Fault; 2] = [Fault::FrozenNic, Fault::FrozenNicTwoStreams];

/// Faults of operations that are in a stream's queue while this thread continues. On the sync path there are none.
const IN_A_QUEUE: [Fault; 8] = [
    Fault::LateReceive,
    Fault::FrozenNic,
    Fault::FrozenNicTwoStreams,
    Fault::StreamAborted,
    Fault::EndpointAborted,
    Fault::DriverRefuses,
    Fault::DriverRefusesLater,
    Fault::StreamDestroyed,
];

/// Two pairs of one device, memory, and streams to work with.
struct Bench {
    device: Device,
    patient: Pair,
    hasty: Pair,
    region: Region,
    hasty_region: Region,
    stream: Stream,
    /// Another one, a stream that accesses only memory.
    store_only: Box<dyn Executor>,
    random: Random,
    faults: Vec<Fault>,
    has_atomics: bool,
}

const HALF: u64 = 64 << 10;

impl Bench {
    fn new(seed: u64, has_atomics: bool) -> Bench {
        let device = device();
        let patient = Pair::new(&device, &patient());
        let hasty = Pair::new(&device, &hasty());
        let can_hang = device.set_frozen(false);
        let has_queues = control(&device) != Control::Sync;
        // The application launches the kernels that execute triggers.
        let has_standin =
            is_cuda() && !by_trigger() && std::env::var_os("DOORBELL_CUDA_STANDIN").is_some();
        let faults = FAULTS.into_iter();
        Bench {
            faults: faults
                .filter(|fault| can_hang || !BY_THE_DEVICE.contains(fault))
                .filter(|fault| has_atomics || *fault != Fault::MisalignedAtomic)
                .filter(|fault| has_queues || !IN_A_QUEUE.contains(fault))
                .filter(|fault| has_standin || !BY_THE_DRIVER.contains(fault))
                // The fault is of a stream of the application, whose kernels are not launched then.
                .filter(|fault| !by_trigger() || *fault != Fault::KernelPanics)
                // Streams of a GPU have no such call.
                .filter(|fault| !is_cuda() || *fault != Fault::StreamAborted)
                .collect(),
            region: patient.region(2 * HALF),
            hasty_region: hasty.region(2 * HALF),
            patient,
            hasty,
            device,
            stream: stream("stream"),
            store_only: store_only("store_only"),
            random: Random(seed),
            has_atomics,
        }
    }

    fn run(&mut self, fault: Fault) {
        match fault {
            Fault::Lossy => self.lossy(),
            Fault::WrongKey => {
                let rkey = self.region.remote().rkey ^ (1 << self.random.below(24));
                self.refused_there(self.region.remote().addr, rkey, 64);
            }
            Fault::BeyondTheRegion => {
                let remote = self.region.remote();
                let len = 1 + self.random.below(3000);
                let over = 1 + self.random.below(len);
                self.refused_there(remote.addr + 2 * HALF - len + over, remote.rkey, len);
            }
            Fault::NoRight => {
                let closed =
                    Region::alloc(&self.patient.domain, 4096, Access::LOCAL_WRITE).unwrap();
                self.refused_there(closed.remote().addr, closed.remote().rkey, 64);
                assert!(closed.is_filled_with(0, 4096, 0).unwrap());
            }
            Fault::LongerThanTheReceive => self.longer_than_the_receive(),
            Fault::ReceiveIntoReadOnly => {
                let closed = Region::alloc(&self.patient.domain, 64, Access::LOCAL_READ).unwrap();
                let into = [closed.slice(0, 64).unwrap()];
                let stream = executor(&self.stream, &*self.store_only, &mut self.random);
                let error = self.patient.b.stream_queue_recv(stream, 44, &into);
                assert!(
                    matches!(
                        error,
                        Err(Error::State {
                            kind: StateKind::NoAccess,
                            ..
                        })
                    ),
                    "{error:?}"
                );
                assert_eq!(self.patient.b.failure(), None);
            }
            Fault::ReadIntoReadOnly => {
                let closed = Region::alloc(&self.patient.domain, 64, Access::LOCAL_READ).unwrap();
                let remote = self.region.remote();
                let into = [closed.slice(0, 64).unwrap()];
                let error = self.refused_at_the_post(&Work::read(
                    &into,
                    RemoteSlice::at(remote.addr, remote.rkey),
                ));
                assert!(
                    matches!(
                        error,
                        Error::State {
                            kind: StateKind::NoAccess,
                            ..
                        }
                    ),
                    "{error:?}"
                );
            }
            Fault::MisalignedAtomic => {
                let remote = self.region.remote();
                let region = self.region.clone();
                let into = [region.slice(0, 8).unwrap()];
                let addr = remote.addr + 1 + self.random.below(7);
                let error = self.refused_at_the_post(&Work::fetch_add(
                    &into,
                    RemoteSlice::at(addr, remote.rkey),
                    1,
                ));
                assert!(
                    matches!(error, Error::Alignment { align: 8, .. }),
                    "{error:?}"
                );
            }
            Fault::DeregisteredHere => self.deregistered_here(),
            Fault::DeregisteredThere => {
                let gone = self.patient.region(64);
                let remote = gone.remote();
                if self.random.below(2) == 0 {
                    gone.deregister().unwrap();
                }
                drop(gone);
                self.refused_there(remote.addr, remote.rkey, 64);
            }
            Fault::DeregisteredInFlight => self.deregistered_in_flight(),
            Fault::NoReceive => {
                let bytes = [1; 16];
                let work = Work::send_inline(&bytes);
                let failure = fails(
                    &mut self.hasty,
                    executor(&self.stream, &*self.store_only, &mut self.random),
                    &mut self.random,
                    work,
                );
                expect(failure, WcStatus::RnrRetryExcErr);
            }
            Fault::NoReceiveForEver => {
                let stream = executor(&self.stream, &*self.store_only, &mut self.random);
                let bytes = [1; 16];
                let sent = self
                    .patient
                    .a
                    .stream_queue_send(stream, &Work::send_inline(&bytes))
                    .unwrap();
                let wait = self
                    .patient
                    .a
                    .stream_wait_cq_for(stream, QueueKind::Send, SHORT)
                    .unwrap();
                missed(&self.patient.a, stream, &[sent, wait]);
            }
            Fault::LateReceive => {
                let bytes = [7; 16];
                let stream = executor(&self.stream, &*self.store_only, &mut self.random);
                let pair = &mut self.patient;
                pair.a
                    .stream_queue_send(stream, &Work::send_inline(&bytes))
                    .unwrap();
                pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
                std::thread::sleep(Duration::from_micros(self.random.below(500)));
                let into = [self.region.slice(0, 16).unwrap()];
                pair.b.post_recv(5, &into).unwrap();
                assert_eq!(pair.b.wait_cq(QueueKind::Recv, SOON).unwrap().wr_id, 5);
                stream.synchronize(SOON).unwrap();
                assert!(self.region.is_filled_with(0, 16, 7).unwrap());
                return;
            }
            Fault::NothingToComplete => {
                let stream = executor(&self.stream, &*self.store_only, &mut self.random);
                let b = &mut self.patient.b;
                let into = [self.region.slice(0, 16).unwrap()];
                let receive = b.stream_queue_recv(stream, 5, &into).unwrap();
                let wait = b
                    .stream_wait_cq_for(stream, QueueKind::Recv, SHORT)
                    .unwrap();
                missed(b, stream, &[receive, wait]);
            }
            Fault::FrozenNic => {
                self.device.set_frozen(true);
                let stream = executor(&self.stream, &*self.store_only, &mut self.random);
                let a = &mut self.patient.a;
                let sent = a.stream_queue_send(stream, &Work::nop()).unwrap();
                let wait = a
                    .stream_wait_cq_for(stream, QueueKind::Send, SHORT)
                    .unwrap();
                let behind = taken_in_time(a.stream_queue_send(stream, &Work::nop()));
                let tickets: Vec<_> = [sent, wait].into_iter().chain(behind).collect();
                missed(a, stream, &tickets);
                self.device.set_frozen(false);
            }
            Fault::FrozenNicTwoStreams => self.frozen_two_streams(),
            Fault::KernelPanics => {
                self.stream
                    .launch(|| std::panic::resume_unwind(Box::new("a kernel that fails")))
                    .unwrap();
                let queued = self.patient.a.stream_queue_send(&self.stream, &Work::nop());
                let wait = queued
                    .is_ok()
                    .then(|| self.patient.a.stream_wait_cq(&self.stream, QueueKind::Send));
                let error = self.stream.synchronize(SOON).unwrap_err();
                assert!(matches!(error, Error::Asynchronous { .. }), "{error:?}");
                match queued {
                    // A GPU continues, but the endpoint behind the function was aborted.
                    Ok(queued) if is_cuda() => {
                        let started = Instant::now();
                        while !queued.is_over() {
                            assert!(started.elapsed() < BOUND / 2, "{queued:?}");
                            std::thread::sleep(Duration::from_micros(50));
                        }
                        assert_ne!(queued.status(), Status::Complete);
                    }
                    Ok(queued) => {
                        let failure = failure_of(&self.patient.a);
                        assert_eq!(failure.cause, Cause::Discarded);
                        assert_ended(&queued, failure);
                        if let Some(Ok(wait)) = wait {
                            assert_ended(&wait, failure);
                        }
                    }
                    Err(error) => assert!(matches!(error, Error::Asynchronous { .. })),
                }
                self.stream = stream("stream");
            }
            Fault::StreamAborted => {
                let into = [self.region.slice(0, 16).unwrap()];
                let b = &mut self.patient.b;
                let receive = b.stream_queue_recv(&self.stream, 5, &into).unwrap();
                let wait = b.stream_wait_cq(&self.stream, QueueKind::Recv).unwrap();
                let behind = b.stream_queue_recv(&self.stream, 6, &into).unwrap();
                std::thread::sleep(Duration::from_micros(self.random.below(200)));
                self.stream.host().unwrap().abort();
                synchronized(&self.stream);
                let failure = failure_of(b);
                assert_eq!(failure.cause, Cause::Discarded);
                for ticket in [receive, wait, behind] {
                    assert_ended(&ticket, failure);
                }
            }
            Fault::EndpointAborted => {
                let stream = executor(&self.stream, &*self.store_only, &mut self.random);
                let into = [self.region.slice(0, 16).unwrap()];
                let b = &mut self.patient.b;
                b.stream_queue_recv(stream, 5, &into).unwrap();
                let wait = b.stream_wait_cq(stream, QueueKind::Recv).unwrap();
                std::thread::sleep(Duration::from_micros(self.random.below(200)));
                b.abort();
                synchronized(stream);
                let failure = failure_of(b);
                assert_eq!(failure.cause, Cause::Aborted);
                assert_ended(&wait, failure);
            }
            Fault::EndpointDropped => self.endpoint_dropped(),
            Fault::PeerDropped => {
                let config = hasty();
                self.hasty.b = doorbell::Endpoint::new(&self.hasty.domain, &config).unwrap();
                self.peer_gone(true);
            }
            Fault::PeerReset => {
                self.hasty.b.reset().unwrap();
                self.peer_gone(false);
            }
            Fault::WordNeverComes => {
                let word = self.patient.region(4);
                let ticket = stream_wait_value32(
                    &self.stream,
                    &word,
                    0,
                    Condition::GreaterOrEqual(1),
                    SHORT,
                )
                .unwrap();
                let error = self.stream.synchronize(SOON).unwrap_err();
                assert!(matches!(error, Error::Asynchronous { .. }));
                assert!(self.stream.take_fault().is_some());
                let status = ticket.status();
                assert!(
                    matches!(status, Status::Failed(e) if matches!(e.cause, Cause::Deadline(_))),
                    "{status:?}"
                );
                return;
            }
            #[cfg(feature = "cuda")]
            Fault::DriverRefuses => self.driver_refuses(),
            #[cfg(feature = "cuda")]
            Fault::DriverRefusesLater => self.driver_refuses_later(),
            #[cfg(feature = "cuda")]
            Fault::StreamDestroyed => self.stream_destroyed(),
            #[cfg(not(feature = "cuda"))]
            _ => unreachable!("no stream is a GPU's"),
        }
        self.patient.reset();
        self.hasty.reset();
    }

    /// Both pairs transfer, in every direction, all bytes.
    fn works(&mut self) {
        let pairs = [
            (&mut self.patient, &self.region),
            (&mut self.hasty, &self.hasty_region),
        ];
        for (pair, region) in pairs {
            let value = self.random.next() as u8;
            let stream = executor(&self.stream, &*self.store_only, &mut self.random);
            region.fill(0, 512, value).unwrap();
            region.fill(HALF, 1024, !value).unwrap();
            for at in [0, 256] {
                let (from, to) = if at == 0 {
                    (&mut pair.a, &mut pair.b)
                } else {
                    (&mut pair.b, &mut pair.a)
                };
                let into = [region.slice(HALF + at, 256).unwrap()];
                to.post_recv(1, &into).unwrap();
                let data = [region.slice(at, 256).unwrap()];
                from.stream_queue_send(stream, &Work::send(&data)).unwrap();
                from.stream_wait_cq(stream, QueueKind::Send).unwrap();
                to.stream_wait_cq(stream, QueueKind::Recv).unwrap();
            }
            stream.synchronize(SOON).unwrap();
            assert!(region.is_filled_with(HALF, 512, value).unwrap());
            assert!(region.is_filled_with(HALF + 512, 512, !value).unwrap());
            assert_eq!((pair.a.failure(), pair.b.failure()), (None, None));
        }
    }

    fn lossy(&mut self) {
        let random = &mut self.random;
        let share = |random: &mut Random, most: f64| random.below(1000) as f64 / 1000.0 * most;
        self.device.set_faults(Faults {
            loss: share(random, 0.05),
            duplicate: share(random, 0.3),
            reorder: share(random, 0.3),
            delay_ns: random.below(20_000),
            seed: random.next(),
            ..strict()
        });
        let stream = executor(&self.stream, &*self.store_only, random);
        let len = 1 + random.below(8000);
        let value = random.next() as u8;
        self.region.fill(0, len, value).unwrap();
        self.region.fill(HALF, len, !value).unwrap();
        let remote = self.region.remote();
        let pair = &mut self.patient;
        let (near, far) = (
            [self.region.slice(0, len).unwrap()],
            [self.region.slice(HALF, len).unwrap()],
        );
        match random.below(if self.has_atomics { 4 } else { 3 }) {
            0 => {
                pair.b.post_recv(1, &far).unwrap();
                pair.a
                    .stream_queue_send(stream, &Work::send(&near))
                    .unwrap();
                pair.b.stream_wait_cq(stream, QueueKind::Recv).unwrap();
            }
            1 => drop(
                pair.a
                    .stream_queue_write(
                        stream,
                        &near,
                        RemoteSlice::at(remote.addr + HALF, remote.rkey),
                    )
                    .unwrap(),
            ),
            2 => drop(
                pair.a
                    .stream_queue_read(stream, &far, RemoteSlice::at(remote.addr, remote.rkey))
                    .unwrap(),
            ),
            _ => {
                // However often the request arrives, it is executed once.
                let word = 2 * HALF - 8;
                self.region.write(word, &[0; 8]).unwrap();
                let result = [self.region.slice(word - 8, 8).unwrap()];
                for _ in 0..4 {
                    let work = Work::fetch_add(
                        &result,
                        RemoteSlice::at(remote.addr + word, remote.rkey),
                        1,
                    );
                    pair.a.stream_queue_send(stream, &work).unwrap();
                    pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
                }
                stream.synchronize(SOON).unwrap();
                assert_eq!(self.region.load_u32(word), Ok(4));
                self.region.fill(HALF, len, value).unwrap();
                pair.a.stream_queue_send(stream, &Work::nop()).unwrap();
            }
        }
        pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        assert!(self.region.is_filled_with(HALF, len, value).unwrap());
        self.device.set_faults(strict());
    }

    /// A write, a read or an atomic that the peer refuses.
    fn refused_there(&mut self, addr: u64, rkey: u32, len: u64) {
        let near = [self.region.slice(HALF, len).unwrap()];
        let word = [self.region.slice(HALF, 8).unwrap()];
        let work = match self.random.below(4) {
            0 => Work::write(&near, RemoteSlice::at(addr, rkey)),
            1 => Work::write(&near, RemoteSlice::at(addr, rkey)).imm(3),
            2 => Work::read(&near, RemoteSlice::at(addr, rkey)),
            _ if self.has_atomics && addr.is_multiple_of(8) && len == 64 => {
                Work::compare_swap(&word, RemoteSlice::at(addr, rkey), 1, 2)
            }
            _ => Work::write(&near, RemoteSlice::at(addr, rkey)),
        };
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let failure = fails(&mut self.patient, stream, &mut self.random, work);
        expect(failure, WcStatus::RemAccessErr);
        peer_fails(&mut self.patient);
    }

    /// A work request that a post refuses, which leaves the endpoint as it was.
    fn refused_at_the_post(&mut self, work: &Work<'_>) -> Error {
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let error = self.patient.a.stream_queue_send(stream, work).unwrap_err();
        assert_eq!(self.patient.a.failure(), None);
        error
    }

    /// A send whose receive cannot take it.
    fn longer_than_the_receive(&mut self) {
        let into = [self.region.slice(HALF, 63).unwrap()];
        self.patient.b.post_recv(44, &into).unwrap();
        let data = [self.region.slice(0, 64).unwrap()];
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let failure = fails(
            &mut self.patient,
            stream,
            &mut self.random,
            Work::send(&data),
        );
        expect(failure, WcStatus::RemInvReqErr);
        let failure = failure_of(&self.patient.b);
        assert_eq!(failure.wr_id, Some(44));
        expect(failure, WcStatus::LocLenErr);
    }

    fn deregistered_here(&mut self) {
        let gone = self.patient.region(64);
        let remote = self.region.remote();
        let data = [gone.slice(0, 64).unwrap()];
        let work = Work::write(&data, RemoteSlice::at(remote.addr, remote.rkey)).wr_id(9);
        let prepared = self.patient.a.prepare_send(&work).unwrap();
        gone.deregister().unwrap();
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let ticket = stream_post(stream, prepared).unwrap();
        let failure = failure_of(&self.patient.a);
        assert_eq!(failure.wr_id, Some(9));
        expect(failure, WcStatus::LocProtErr);
        assert_ended(&ticket, failure);
    }

    /// Either it was in time, or it is refused, on whichever end the region was.
    fn deregistered_in_flight(&mut self) {
        let gone = self.patient.region(256 << 10);
        let kept = self.patient.region(256 << 10);
        let here = self.random.below(2) == 0;
        let (near, far) = if here { (&gone, &kept) } else { (&kept, &gone) };
        let data = [near.slice(0, 256 << 10).unwrap()];
        let remote = far.remote();
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let a = &mut self.patient.a;
        let ticket = a
            .stream_queue_write(stream, &data, RemoteSlice::at(remote.addr, remote.rkey))
            .unwrap();
        let waited = a.stream_wait_cq(stream, QueueKind::Send);
        std::thread::sleep(Duration::from_micros(self.random.below(150)));
        gone.deregister().unwrap();
        synchronized(stream);
        match ticket.status() {
            Status::Complete => assert_eq!(waited.unwrap().status(), Status::Complete),
            Status::Failed(failure) => expect(
                failure,
                if here {
                    WcStatus::LocProtErr
                } else {
                    WcStatus::RemAccessErr
                },
            ),
            other => panic!("{other:?}"),
        }
    }

    /// Two streams in turn on one queue of a frozen NIC: both are released, including the one that waits for its turn.
    fn frozen_two_streams(&mut self) {
        self.device.set_frozen(true);
        let word = self.patient.region(4);
        let (first, second) = (&*self.store_only, store_only("second"));
        let a = &mut self.patient.a;
        let one = a.stream_queue_send(first, &Work::nop()).unwrap();
        let wait = a.stream_wait_cq_for(first, QueueKind::Send, SHORT).unwrap();
        // Never executed: its stream is blocked by the wait until that times out.
        let two = taken_in_time(a.stream_queue_send(first, &Work::nop()));
        let three = taken_in_time(a.stream_queue_send(&*second, &Work::nop()));
        let tickets: Vec<_> = [one, wait].into_iter().chain(two).chain(three).collect();
        missed(a, first, &tickets);
        synchronized(&*second);
        self.device.set_frozen(false);
        drop(word);
    }

    /// The endpoint is dropped; its work stays on the streams and ends.
    fn endpoint_dropped(&mut self) {
        let mut doomed = Pair::new(&self.device, &hasty());
        let region = doomed.region(4096);
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let into = [region.slice(0, 64).unwrap()];
        let data = [region.slice(64, 64).unwrap()];
        let mut tickets = Vec::new();
        let mut kept = Vec::new();
        let rounds = 1 + self.random.below(4);
        for _ in 0..rounds {
            tickets.push(doomed.b.post_recv(1, &into).unwrap());
            tickets.push(
                doomed
                    .a
                    .stream_queue_send(stream, &Work::send(&data))
                    .unwrap(),
            );
            tickets.push(doomed.a.stream_wait_cq(stream, QueueKind::Send).unwrap());
            tickets.push(doomed.b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        }
        kept.push(doomed.a.prepare_send(&Work::send(&data)).unwrap());
        let Pair { domain, a, b } = doomed;
        match self.random.below(4) {
            0 => drop((a, b, domain)),
            1 => drop((b, region, a)),
            2 => {
                drop(kept.pop());
                drop((region, a, domain, b));
            }
            _ => {
                drop(tickets.split_off(2));
                drop((domain, b, a));
            }
        }
        synchronized(stream);
        assert!(tickets.iter().all(Ticket::is_over));
    }

    /// One of the driver calls of an operation is refused. Each operation completes or returns an error.
    #[cfg(feature = "cuda")]
    fn driver_refuses(&mut self) {
        const OUT_OF_MEMORY: u32 = 2;
        let name = *self.random.pick(&[
            rig::queueing().1,
            "cuMemHostRegister_v2",
            "cuMemHostGetDevicePointer_v2",
            "cuCtxGetCurrent",
            "cuCtxPushCurrent_v2",
            "cuLaunchHostFunc",
        ]);
        let nth = 1 + self.random.below(4);
        // New objects: memory that is mapped already is not mapped again.
        let mut pair = Pair::new(&self.device, &patient());
        let region = pair.region(4096);
        let remote = region.remote();
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let bytes = [9; 16];
        let data = [region.slice(0, 16).unwrap()];
        let refusal = standin::Fault::here(&format!("{name}:{OUT_OF_MEMORY},nth={nth}"));
        let results = [
            pair.a.stream_queue_send(stream, &Work::nop()),
            pair.a.stream_queue_write(
                stream,
                &data,
                RemoteSlice::at(remote.addr + 64, remote.rkey),
            ),
            pair.a.stream_queue_send(
                stream,
                &Work::write_inline(&bytes, RemoteSlice::at(remote.addr + 128, remote.rkey)),
            ),
            pair.a.stream_wait_cq(stream, QueueKind::Send),
            doorbell::stream_write_value32(stream, &region, 256, 5),
        ];
        drop(refusal);
        let refused = results.iter().filter_map(|result| result.as_ref().err());
        for error in refused {
            let expected = match error {
                Error::Cuda { code, .. } => *code == OUT_OF_MEMORY,
                // A wait for a refused send, or work behind a partly queued batch.
                Error::State { .. } | Error::Work(_) | Error::Asynchronous { .. } => true,
                _ => false,
            };
            assert!(expected, "{name}, {nth}: {error:?}");
        }
        synchronized(stream);
        for ticket in results.into_iter().flatten() {
            assert_ne!(ticket.status(), Status::Queued, "{ticket:?}");
        }
    }

    /// A batch of several driver calls, of which a later one is refused.
    #[cfg(feature = "cuda")]
    fn driver_refuses_later(&mut self) {
        let config = patient().send_depth(512);
        let mut pair = Pair::new(&self.device, &config);
        let mut batch: Vec<_> = (0..300)
            .map(|_| pair.a.prepare_send(&Work::nop()).unwrap())
            .collect();
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let refusal = standin::Fault::here(&format!("{}:2,nth=2", rig::queueing().1));
        let tickets = doorbell::stream_post_all(stream, &mut batch).unwrap();
        drop(refusal);
        synchronized(stream);
        let failure = failure_of(&pair.a);
        assert_eq!(failure.cause, Cause::Discarded);
        assert_ended(tickets.last().unwrap(), failure);
        assert!(tickets.iter().all(Ticket::is_over));
    }

    /// The stream is destroyed with a wait and work behind it queued. That work ends as usual, and a later call that queues work returns an error.
    #[cfg(feature = "cuda")]
    fn stream_destroyed(&mut self) {
        use cudarc::driver::sys;
        let context = doorbell::CudaContext::primary(0).unwrap();
        let (mut raw, mut popped) = (std::ptr::null_mut(), std::ptr::null_mut());
        let ok = |result: sys::CUresult| result.result().unwrap();
        // SAFETY: each writes one handle; what is made current is taken off again.
        unsafe {
            ok(sys::cuCtxPushCurrent_v2(context.raw()));
            ok(sys::cuStreamCreate(&mut raw, 1));
        }
        // SAFETY: it goes early on purpose, and the stand-in looks at handles.
        let stream = unsafe { doorbell::CudaStream::from_raw(&context, raw, "doomed") }.unwrap();
        self.region.store_u32(8, 0).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        let wait = stream_wait_value32(&stream, &self.region, 8, condition, SHORT).unwrap();
        let sent = match self.patient.a.stream_queue_send(&stream, &Work::nop()) {
            Ok(ticket) => Some(ticket),
            // The deadline had passed before this thread was scheduled.
            Err(Error::Asynchronous { .. }) => None,
            Err(other) => panic!("{other:?}"),
        };
        // SAFETY: made above.
        unsafe {
            ok(sys::cuStreamDestroy_v2(raw));
            ok(sys::cuCtxPopCurrent_v2(&mut popped));
        }
        let error = stream.synchronize(SOON).unwrap_err();
        assert!(
            matches!(error, Error::Asynchronous { .. } | Error::Cuda { .. }),
            "{error:?}"
        );
        let started = Instant::now();
        while !(wait.is_over() && sent.iter().all(Ticket::is_over)) {
            assert!(started.elapsed() < BOUND / 2, "{wait:?} {sent:?}");
            std::thread::sleep(Duration::from_micros(50));
        }
        assert!(matches!(wait.status(), Status::Failed(_)), "{wait:?}");
        // Behind a wait that has failed, so its endpoint was aborted.
        let mut given_up = sent.iter();
        assert!(
            given_up.all(|sent| {
                let status = sent.status();
                matches!(
                    status,
                    Status::Failed(_) | Status::Unknown(_) | Status::Discarded
                )
            }),
            "{sent:?}"
        );
        self.patient.reset();
    }

    /// A dropped peer still exists for a while if a GPU's stream has a handle of it.
    fn peer_gone(&mut self, dropped: bool) {
        let bytes = [1; 16];
        let stream = executor(&self.stream, &*self.store_only, &mut self.random);
        let work = Work::send_inline(&bytes);
        let failure = fails(&mut self.hasty, stream, &mut self.random, work);
        if dropped && is_cuda() && has_status(failure, WcStatus::RnrRetryExcErr) {
            return;
        }
        expect(failure, WcStatus::RetryExcErr);
    }
}

/// A stream that only stores and polls, as a GPU does.
fn store_only(name: &str) -> Box<dyn Executor> {
    if is_cuda() {
        Box::new(stream(name))
    } else {
        Box::new(StoreOnlyStream(HostStream::new(name).unwrap()))
    }
}

fn executor<'a>(
    stream: &'a Stream,
    store_only: &'a dyn Executor,
    random: &mut Random,
) -> &'a dyn Executor {
    if random.below(2) == 0 {
        stream
    } else {
        store_only
    }
}

/// Asserts that everything on the stream ends; a failed wait is reported.
fn synchronized(stream: &dyn Executor) {
    match stream.synchronize(SOON) {
        Ok(()) | Err(Error::Asynchronous { .. }) => {}
        Err(other) => panic!("{other:?}"),
    }
    // Also a failure that came after the report.
    stream.take_fault();
}

/// The operation ends with its endpoint, which failed for that reason. A device that takes its time for commands may not have stopped yet.
fn assert_ended(ticket: &Ticket, failure: WorkError) {
    let started = Instant::now();
    while !ticket.is_over() {
        assert!(started.elapsed() < BOUND / 2, "{:?}", ticket.status());
        std::thread::sleep(Duration::from_micros(20));
    }
    let status = ticket.status();
    let ended = status == Status::Failed(failure)
        || status == Status::Unknown(failure)
        || status == Status::Discarded;
    assert!(ended, "{status:?}, and not {failure:?}");
}

/// Posts work that must fail, in one of the ways to post and to wait.
fn fails(pair: &mut Pair, stream: &dyn Executor, random: &mut Random, work: Work<'_>) -> WorkError {
    let wr_id = random.next();
    let work = work.wr_id(wr_id).signaled(random.below(2) == 0);
    let way = random.below(3);
    let ticket = match way {
        0 => pair.a.stream_queue_send(stream, &work).unwrap(),
        1 => pair.a.post_send(&work).unwrap(),
        _ => {
            let prepared = pair.a.prepare_send(&work).unwrap();
            stream_post(stream, prepared).unwrap()
        }
    };
    // It may have failed before the next of these calls, which then return the failure.
    let _ = pair.a.post_send(&Work::nop());
    if way == 1 && random.below(2) == 0 {
        match pair.a.wait_cq(QueueKind::Send, SOON) {
            Err(Error::Work(found)) => assert_eq!(found.qpn, pair.a.qpn()),
            other => panic!("{other:?}"),
        }
    } else {
        let wait = pair.a.stream_wait_cq(stream, QueueKind::Send);
        synchronized(stream);
        match wait {
            Ok(wait) => assert!(matches!(wait.status(), Status::Failed(_)), "{wait:?}"),
            // The second, if the stream has found the failure already.
            Err(Error::Work(_) | Error::Asynchronous { .. }) => {}
            // Unsignaled, and nothing behind it.
            Err(Error::State { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    let failure = failure_of(&pair.a);
    assert_eq!(failure.wr_id, Some(wr_id));
    assert_eq!(failure.qpn, pair.a.qpn());
    assert_ended(&ticket, failure);
    let refused = pair.a.post_send(&Work::nop()).unwrap_err();
    assert_eq!(refused, Error::Work(failure));
    failure
}

fn has_status(failure: WorkError, expected: WcStatus) -> bool {
    matches!(failure.cause, Cause::Completion { status, .. } if status == expected)
}

fn expect(failure: WorkError, expected: WcStatus) {
    match failure.cause {
        Cause::Completion { status, .. } => assert_eq!(status, expected),
        other => panic!("{other:?} instead of {expected:?}"),
    }
}

/// Waits for the endpoint's failure, in bounded time.
fn failure_of(endpoint: &doorbell::Endpoint) -> WorkError {
    let started = Instant::now();
    loop {
        if let Some(failure) = endpoint.failure() {
            return failure;
        }
        assert!(started.elapsed() < BOUND / 2, "no failure");
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// The peer of a refused request is in the error state, without a completion of its own.
fn peer_fails(pair: &mut Pair) {
    let failure = failure_of(&pair.b);
    assert_eq!((failure.wr_id, failure.cause), (None, Cause::QueuePair));
}

/// The ticket of an operation that was queued behind a wait with a deadline; `None` if this thread was not scheduled before the deadline.
fn taken_in_time(queued: doorbell::Result<Ticket>) -> Option<Ticket> {
    match queued {
        Ok(ticket) => Some(ticket),
        Err(Error::Work(failure)) => {
            assert_eq!(failure.cause, Cause::Deadline(SHORT.unwrap()));
            None
        }
        // A stream of a GPU has found the failure first, or finds it now.
        Err(Error::Asynchronous { .. }) => None,
        Err(Error::State {
            kind: StateKind::QueuePair,
            ..
        }) => None,
        Err(other) => panic!("{other:?}"),
    }
}

/// A wait misses its deadline: the stream continues, and all operations of the endpoint fail with that cause.
fn missed(endpoint: &doorbell::Endpoint, stream: &dyn Executor, tickets: &[Ticket]) {
    synchronized(stream);
    let failure = failure_of(endpoint);
    assert_eq!(failure.cause, Cause::Deadline(SHORT.unwrap()));
    for ticket in tickets {
        assert_ended(ticket, failure);
    }
}

#[test]
fn ten_thousand_faults_end_in_time_with_the_right_error() {
    let seed = from_env("DOORBELL_SEED", 0x00d0_0bbe_1100);
    let faults = from_env("DOORBELL_FAULTS", 10_000);
    println!("DOORBELL_SEED={seed} DOORBELL_FAULTS={faults}");
    // Bypasses the test harness, which would hold the output back until the end of a test that is going to abort.
    std::panic::set_hook(Box::new(|panic| {
        let _ = writeln!(std::io::stderr(), "{panic}");
    }));
    has_no_queue(
        &device(),
        "faults of work in a queue while the NIC hangs, the receive comes, or the stream or endpoint is aborted",
    );
    let has_atomics = has_atomics(&device(), "faults of atomics");
    let counts = Mutex::new(BTreeMap::<Fault, (u64, Duration)>::new());
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let counts = &counts;
            scope.spawn(move || {
                let limit = Limit::new("faults", BOUND);
                let mut bench = Bench::new(seed ^ worker << 56, has_atomics);
                for number in (worker..faults).step_by(WORKERS as usize) {
                    limit.step(number, BOUND);
                    let fault = *bench.random.pick(&bench.faults);
                    let started = Instant::now();
                    let run = std::panic::AssertUnwindSafe(|| {
                        bench.run(fault);
                        bench.works();
                    });
                    if std::panic::catch_unwind(run).is_err() {
                        // At once, because output of the other workers would hide it.
                        let _ = writeln!(
                            std::io::stderr(),
                            "DOORBELL_SEED={seed}: fault {number}, {fault:?}, worker {worker}"
                        );
                        std::process::abort();
                    }
                    let mut counts = counts.lock().unwrap();
                    let (count, time) = counts.entry(fault).or_default();
                    *count += 1;
                    *time += started.elapsed();
                }
            });
        }
    });
    let counts = counts.into_inner().unwrap();
    assert_eq!(counts.values().map(|(count, _)| count).sum::<u64>(), faults);
    for (fault, (count, time)) in counts {
        println!("{fault:?}: {count}, {:?} each", time / count as u32);
    }
}

/// A send behind a wait is not transmitted if the wait times out: the doorbell behind it is too late for this generation of the endpoint.
#[test]
fn doorbell_behind_a_timed_out_wait_sends_nothing() {
    let limit = Limit::new("behind a wait", BOUND);
    let mut pair = Pair::new(&device(), &patient());
    let region = pair.region(4096);
    let remote = region.remote();
    let stream = stream("plain");
    let store_only = store_only("store_only");
    let data = [region.slice(0, 8).unwrap()];
    region.fill(0, 8, 7).unwrap();
    for round in 0..300 {
        limit.step(round, BOUND);
        let stream: &dyn Executor = if round % 2 == 0 {
            &stream
        } else {
            &*store_only
        };
        let short = Some(Duration::from_millis(1));
        pair.a.stream_queue_recv(stream, 1, &[]).unwrap();
        pair.a
            .stream_wait_cq_for(stream, QueueKind::Recv, short)
            .unwrap();
        let sent = pair.a.stream_queue_write(
            stream,
            &data,
            RemoteSlice::at(remote.addr + 2048, remote.rkey),
        );
        synchronized(stream);
        let failure = failure_of(&pair.a);
        assert!(matches!(failure.cause, Cause::Deadline(_)));
        if let Ok(sent) = sent {
            assert_ended(&sent, failure);
        }
        pair.reset();
        assert!(region.is_filled_with(2048, 8, 0).unwrap(), "round {round}");
    }
}

/// One endpoint of a batch has failed: nothing of the batch is posted, and the operations of the others can be posted without it.
#[test]
fn batch_with_a_failed_endpoint_posts_nothing() {
    let device = device();
    let stream = stream("batch");
    let mut pairs = [0; 3].map(|_| Pair::new(&device, &patient()));
    let mut list: Vec<_> = pairs
        .iter_mut()
        .map(|pair| pair.a.prepare_send(&Work::nop()).unwrap())
        .collect();
    let tickets: Vec<_> = list.iter().map(doorbell::Prepared::ticket).collect();
    pairs[1].a.abort();
    let error = doorbell::stream_post_all(&stream, &mut list).unwrap_err();
    assert!(matches!(error, Error::Work(e) if e.cause == Cause::Aborted));
    assert_eq!(list.len(), 3);
    let before = tickets.iter().map(Ticket::status).collect::<Vec<_>>();
    assert_eq!((before[0], before[2]), (Status::Prepared, Status::Prepared));
    assert!(matches!(before[1], Status::Failed(_)));
    drop(list.remove(1));
    doorbell::stream_post_all(&stream, &mut list).unwrap();
    for at in [0, 2] {
        pairs[at].a.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!(tickets[at].status(), Status::Complete);
    }
    pairs[1].reset();
    pairs[1].a.post_send(&Work::nop()).unwrap();
    pairs[1].a.wait_cq(QueueKind::Send, SOON).unwrap();
}
