//! Every syndrome, raised and looked at on both sides.

use crate::device::client::{DeviceEvent, Transport};
use crate::device::packet::{AckCode, Header, PacketKind, flag, psn_add};
use crate::device::tests::driver::{Process, Work};
use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::tests::pair::Pair;
use crate::device::{Access, Attributes, Faults, State};
use doorbell_wire::mlx5::{DataSegment, SendRequest, Syndrome};

/// What one bad request does: its syndrome, and the completion of the receive queue on the other side.
struct Case {
    world: World,
    a: End,
    b: End,
}

impl Case {
    fn new(shape: Shape) -> Case {
        let mut world = World::new(1);
        let (a, b) = world.pair(shape);
        Case { world, a, b }
    }

    /// A good request before, the bad one, and two behind it, all in one doorbell. The bad one and those behind it are unsignaled.
    fn post(&mut self, bad: &SendRequest<'_>) {
        let list = [self.a.segment(0, 8)];
        let good = SendRequest::write(self.b.at(0), self.b.key).segments(&list);
        self.a.post(&good.signaled(true));
        self.a.post(&bad.signaled(false));
        self.a.post(&good);
        self.a.post(&SendRequest::nop());
        self.a.ring();
        self.world.settle();
    }

    /// The bad request fails so, what is behind it is flushed, and the queue pair is in error.
    #[track_caller]
    fn fails(&mut self, syndrome: Syndrome) {
        let done = self.a.all_sent();
        let syndromes: Vec<_> = done.iter().map(|(_, syndrome)| *syndrome).collect();
        let flush = Some(Syndrome::WrFlush);
        assert_eq!(syndromes, [None, Some(syndrome), flush, flush]);
        assert_eq!(self.a.state(), State::Error);
    }

    /// The other side has not noticed.
    #[track_caller]
    fn unnoticed(&mut self) {
        assert_eq!(self.b.state(), State::ReadyToSend);
        assert_eq!(self.b.all_received(), []);
    }

    /// The other side is in error, with these completions of receives.
    #[track_caller]
    fn noticed(&mut self, received: &[(u16, Option<Syndrome>)]) {
        assert_eq!(self.b.state(), State::Error);
        assert_eq!(self.b.all_received(), received);
    }
}

fn case() -> Case {
    Case::new(Shape::default())
}

#[test]
fn message_over_max_msg_sz_is_a_local_length_error() {
    // `max_msg_sz` of a port is 2^30 bytes.
    for (first, second) in [(0x7fff_ffff, 0x7fff_ffff), (1 << 29, (1 << 29) + 1)] {
        let mut case = case();
        let huge = [first, second].map(|len_bytes| DataSegment {
            len_bytes,
            ..case.a.segment(0, 0)
        });
        case.post(&SendRequest::send().segments(&huge));
        case.fails(Syndrome::LocalLength);
        case.unnoticed();
    }
}

#[test]
fn local_operation() {
    // An opcode of no meaning, a WQE of another queue pair, one of another place, one of no length.
    for (at, value) in [(3, 0x7f), (4, 0xff), (2, 0x55), (7, 0)] {
        let mut case = case();
        let list = [case.a.segment(0, 8)];
        case.a.post(&SendRequest::nop().signaled(true));
        let bad = case.a.post(&SendRequest::send().segments(&list));
        case.a.post(&SendRequest::nop());
        case.a.spoil(bad, at, value);
        case.a.ring();
        case.world.settle();
        let flush = Some(Syndrome::WrFlush);
        let wrong = Some(Syndrome::LocalQpOp);
        assert_eq!(
            case.a.all_sent(),
            [(0, None), (1, wrong), (2, flush)],
            "byte {at}"
        );
        case.unnoticed();
    }
}

#[test]
fn local_protection() {
    type Bad = fn(&mut Case) -> DataSegment;
    let bad: [Bad; 5] = [
        |case| DataSegment {
            lkey: case.a.key ^ 2,
            ..case.a.segment(0, 8)
        },
        |case| case.a.segment((1 << 16) - 4, 8),
        |case| DataSegment {
            addr: 0x10,
            ..case.a.segment(0, 8)
        },
        // Of another protection domain.
        |case| case.b.segment(0, 8),
        |case| {
            let device = &case.world.devices[0];
            device.deregister(case.a.key);
            let key = case.a.register_again(device, 0, 16, Access::ALL);
            let old = case.a.segment(0, 8);
            case.a.key = key;
            old
        },
    ];
    for bad in bad {
        let mut case = case();
        let list = [bad(&mut case)];
        case.post(&SendRequest::send().segments(&list));
        case.fails(Syndrome::LocalProt);
        case.unnoticed();
    }
    // Results of reads and atomics need the right to write here.
    for opcode in 0..2 {
        let mut case = case();
        let device = &case.world.devices[0];
        let key = case.a.register_again(device, 64, 8, Access::LOCAL_READ);
        let list = [DataSegment {
            lkey: key,
            ..case.a.segment(64, 8)
        }];
        let (at, key) = (case.b.at(0), case.b.key);
        case.post(&match opcode {
            0 => SendRequest::read(at, key).segments(&list),
            _ => SendRequest::fetch_add(at, key, 1).segments(&list),
        });
        case.fails(Syndrome::LocalProt);
        case.unnoticed();
        assert_eq!(case.b.word(0), 0, "an atomic with no place for its result");
    }
}

#[test]
fn remote_invalid_request_when_a_send_is_longer_than_its_receive() {
    for len in [101, 5000, 9000] {
        let mut case = case();
        case.b
            .receive(&[case.b.segment(0, 60), case.b.segment(100, 40)]);
        case.b.receive(&[case.b.segment(0, 60)]);
        let list = [case.a.segment(0, len)];
        case.post(&SendRequest::send().segments(&list));
        case.fails(Syndrome::RemoteInvalReq);
        case.noticed(&[
            (0, Some(Syndrome::LocalLength)),
            (1, Some(Syndrome::WrFlush)),
        ]);
    }
}

#[test]
fn remote_invalid_request_for_an_atomic_beside_its_word() {
    let mut case = case();
    let list = [case.a.segment(64, 8)];
    let request = SendRequest::fetch_add(case.b.at(4), case.b.key, 1).segments(&list);
    case.post(&request);
    case.fails(Syndrome::RemoteInvalReq);
    case.noticed(&[]);
}

#[test]
fn remote_access() {
    let list_of = |case: &Case, len| [case.a.segment(0, len)];
    type Bad = fn(&Case) -> SendRequest<'static>;
    let bad: [Bad; 6] = [
        |case| SendRequest::write(case.b.at(0), case.b.key ^ 2),
        |case| SendRequest::write(case.b.at((1 << 16) - 4), case.b.key),
        |case| SendRequest::write(u64::MAX - 3, case.b.key),
        |case| SendRequest::read(case.b.at((1 << 16) - 4), case.b.key),
        |case| SendRequest::read(case.b.at(0), case.a.key),
        |case| SendRequest::fetch_add(case.b.at(1 << 16), case.b.key, 1),
    ];
    for (number, bad) in bad.into_iter().enumerate() {
        let mut case = case();
        case.b.receive(&[case.b.segment(0, 60)]);
        let request = bad(&case);
        let list = list_of(&case, 8);
        case.post(&request.segments(&list));
        let done = case.a.all_sent();
        assert_eq!(done[1].1, Some(Syndrome::RemoteAccess), "case {number}");
        assert_eq!(done.len(), 4);
        case.noticed(&[(0, Some(Syndrome::WrFlush))]);
    }
}

/// The receive that the immediate would have completed fails by an access to its own side's memory; those behind it are flushed.
#[test]
fn local_access_for_a_write_with_immediate() {
    let mut case = case();
    for _ in 0..2 {
        case.b.receive(&[case.b.segment(0, 60)]);
    }
    let list = [case.a.segment(0, 8)];
    case.post(&SendRequest::write_imm(case.b.at(0), case.b.key ^ 2, 1).segments(&list));
    case.fails(Syndrome::RemoteAccess);
    case.noticed(&[
        (0, Some(Syndrome::LocalAccess)),
        (1, Some(Syndrome::WrFlush)),
    ]);
}

/// The first packet is refused, and it does not show that an immediate would come.
#[test]
fn a_long_write_with_immediate_is_refused_before_its_receive_is_taken() {
    let mut case = case();
    case.b.receive(&[case.b.segment(0, 60)]);
    let list = [case.a.segment(0, 20_000)];
    case.post(&SendRequest::write_imm(case.b.at(0), case.b.key ^ 2, 1).segments(&list));
    case.fails(Syndrome::RemoteAccess);
    case.noticed(&[(0, Some(Syndrome::WrFlush))]);
}

/// It would never be carried out, so there is no waiting for a receive.
#[test]
fn a_write_with_immediate_that_finds_no_receive_is_refused_at_once() {
    let mut case = case();
    let list = [case.a.segment(0, 8)];
    case.post(&SendRequest::write_imm(case.b.at(0), case.b.key ^ 2, 1).segments(&list));
    case.fails(Syndrome::RemoteAccess);
    case.noticed(&[]);
    assert_eq!(case.world.devices[0].counters().rnr_naks, 0);
}

#[test]
fn a_long_write_that_is_refused_writes_nothing() {
    let mut case = case();
    let list = [case.a.segment(0, 20_000)];
    case.a.write(0, &pattern(1, 20_000));
    let at = (1 << 16) - 19_999;
    let request = SendRequest::write(case.b.at(at), case.b.key).segments(&list);
    case.a.post(&request);
    case.a.ring();
    case.world.settle();
    assert_eq!(case.a.all_sent(), [(0, Some(Syndrome::RemoteAccess))]);
    assert!(case.b.read(0, 1 << 16).iter().all(|&byte| byte == 0));
}

/// The refusal is an answer in its turn, so the responses before it leave first.
#[test]
fn a_read_before_a_refused_request_is_answered() {
    let mut world = World::new(2);
    let (mut a, b) = world.pair(Shape {
        memory_bytes: 8 << 20,
        ..Shape::default()
    });
    b.write(0, &pattern(1, 4 << 20));
    let list = [a.segment(0, 4 << 20)];
    let word = [a.segment(4 << 20, 8)];
    let read = SendRequest::read(b.at(0), b.key).segments(&list);
    a.post(&read.signaled(true));
    a.post(&SendRequest::write(b.at(0), b.key ^ 2).segments(&word));
    a.ring();
    world.settle();
    assert_eq!(a.all_sent(), [(0, None), (1, Some(Syndrome::RemoteAccess))]);
    assert!(a.read(0, 4 << 20) == pattern(1, 4 << 20));
    assert_eq!(b.state(), State::Error);
}

#[test]
fn want_of_a_right_is_remote_access_by_the_key_and_an_invalid_request_by_the_queue_pair() {
    let rights = [
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_ATOMIC,
    ];
    for denied in rights {
        for by_key in [true, false] {
            let rest = Access::from_bits(Access::ALL.bits() & !denied.bits()).unwrap();
            let mut shape = Shape::default();
            if by_key {
                shape.access = rest;
            } else {
                shape.attributes.access = rest;
            }
            let mut world = World::new(1);
            for used in rights {
                let (mut a, b) = world.pair(shape);
                let list = [a.segment(0, 8)];
                let (at, key) = (b.at(0), b.key);
                let request = match used {
                    Access::REMOTE_WRITE => SendRequest::write(at, key),
                    Access::REMOTE_READ => SendRequest::read(at, key),
                    _ => SendRequest::compare_swap(at, key, 0, 1),
                };
                a.send(&request.segments(&list).signaled(true));
                world.settle();
                let refused = match by_key {
                    true => Syndrome::RemoteAccess,
                    false => Syndrome::RemoteInvalReq,
                };
                let want = (used == denied).then_some(refused);
                assert_eq!(a.all_sent(), [(0, want)], "{used:?} without {denied:?}");
                // No byte, no key needed. The queue pair must serve the operation all the same.
                let (mut a, b) = world.pair(shape);
                let (right, request) = match used {
                    Access::REMOTE_READ => (used, SendRequest::read(b.at(0), 0xbad)),
                    _ => (Access::REMOTE_WRITE, SendRequest::write(b.at(0), 0xbad)),
                };
                a.send(&request.signaled(true));
                world.settle();
                let want = (right == denied && !by_key).then_some(refused);
                assert_eq!(a.all_sent(), [(0, want)], "no byte without {denied:?}");
            }
        }
    }
}

#[test]
fn remote_operation_when_the_receive_names_bad_memory() {
    let mut case = case();
    case.b.receive(&[DataSegment {
        lkey: case.b.key ^ 2,
        ..case.b.segment(0, 60)
    }]);
    case.b.receive(&[]);
    let list = [case.a.segment(0, 8)];
    case.post(&SendRequest::send().segments(&list));
    case.fails(Syndrome::RemoteOp);
    case.noticed(&[(0, Some(Syndrome::LocalProt)), (1, Some(Syndrome::WrFlush))]);
}

#[test]
fn bad_response() {
    let mut case = case();
    let local = case.a.qp.local();
    let list = [case.a.segment(0, 64)];
    case.a
        .send(&SendRequest::read(case.b.at(0), case.b.key).segments(&list));
    case.world.set_faults(crate::device::Faults {
        loss: 1.0,
        ..Default::default()
    });
    case.world.turn();
    let header = Header::new(
        PacketKind::AtomicResponse,
        local.qpn,
        local.psn,
        local.connection,
    );
    case.world.devices[0].lock().inject(&header, &[]);
    case.world.settle();
    assert_eq!(case.a.all_sent(), [(0, Some(Syndrome::BadResp))]);
    case.unnoticed();
}

/// A read of three packets whose responses do not follow each other, or are no acknowledgement.
#[test]
fn responses_out_of_form_are_bad() {
    const MTU: u32 = 1024;
    const NONE: u8 = 0;
    const ONLY: u8 = flag::FIRST | flag::LAST;
    let ack = AckCode::Ack;
    let good = [(flag::FIRST, ack), (NONE, ack), (flag::LAST, ack)];
    let mut rows = vec![(good.to_vec(), None)];
    // Each with one response that is wrong, in its place.
    for (place, wrong) in [
        (0, (NONE, ack)),
        (0, (ONLY, ack)),
        (0, (flag::LAST, ack)),
        (0, (flag::FIRST, AckCode::AccessError)),
        (0, (flag::FIRST, AckCode::SequenceError)),
        (1, (flag::FIRST, ack)),
        (1, (flag::LAST, ack)),
        (2, (NONE, ack)),
        (2, (ONLY, ack)),
        (2, (flag::LAST, AckCode::InvalidRequest)),
        (2, (flag::LAST, AckCode::ReceiverNotReady(1))),
    ] {
        let row = [&good[..place], &[wrong]].concat();
        rows.push((row, Some(Syndrome::BadResp)));
    }
    for (responses, end) in rows {
        let mut case = Case::new(Shape {
            attributes: Attributes {
                mtu_bytes: MTU,
                ..Attributes::default()
            },
            ..Shape::default()
        });
        case.world.set_faults(Faults {
            loss: 1.0,
            ..Faults::default()
        });
        let local = case.a.qp.local();
        let list = [case.a.segment(0, 3 * MTU as usize)];
        let read = SendRequest::read(case.b.at(0), case.b.key).segments(&list);
        case.a.send(&read.signaled(true));
        case.world.turn();
        for ((flags, code), packet) in responses.iter().zip(0..) {
            let psn = psn_add(local.psn, packet);
            let header = Header {
                flags: *flags,
                code: *code,
                payload_bytes: MTU as u16,
                ..Header::new(PacketKind::ReadResponse, local.qpn, psn, local.connection)
            };
            let mut core = case.world.devices[0].lock();
            core.inject(&header, &[packet as u8; MTU as usize]);
        }
        case.world.turn();
        assert_eq!(case.a.all_sent(), [(0, end)], "{responses:?}");
    }
}

#[test]
fn a_response_of_the_wrong_length_or_time_changes_nothing_that_was_not_asked_for() {
    let mut case = case();
    let local = case.a.qp.local();
    // Nothing is outstanding: responses and acknowledgements out of the blue.
    for kind in [
        PacketKind::ReadResponse,
        PacketKind::AtomicResponse,
        PacketKind::Ack,
    ] {
        for psn in [
            local.psn,
            psn_add(local.psn, 5),
            psn_add(local.psn, 0xff_ffff),
        ] {
            let header = Header::new(kind, local.qpn, psn, local.connection);
            case.world.devices[0].lock().inject(&header, &[]);
        }
    }
    let list = [case.a.segment(0, 8)];
    case.a.send(
        &SendRequest::write(case.b.at(0), case.b.key)
            .segments(&list)
            .signaled(true),
    );
    case.world.settle();
    assert_eq!(case.a.all_sent(), [(0, None)]);
}

#[test]
fn invalid_packets_are_refused_by_the_responder() {
    // Middle of a message that never began; a last packet of a write that claims more than it has.
    let middle = |kind: PacketKind| (kind, 0, 0, 4096);
    for (kind, flags, total, len) in [
        middle(PacketKind::Send),
        middle(PacketKind::Write),
        (PacketKind::Write, flag::FIRST | flag::LAST, 4, 0),
    ] {
        let mut case = case();
        let (local, remote) = (case.b.qp.local(), case.a.qp.local());
        let header = Header {
            flags,
            total_bytes: total,
            ..Header::new(kind, local.qpn, remote.psn, local.connection)
        };
        case.world.devices[0].lock().inject(&header, &vec![0; len]);
        case.world.settle();
        case.noticed(&[]);
    }
}

#[test]
fn the_receiver_is_not_ready_and_retries_are_counted() {
    for rnr_retry in [0, 2, 6] {
        let mut case = Case::new(Shape {
            attributes: Attributes {
                rnr_retry,
                min_rnr_timer: 14,
                ..Attributes::default()
            },
            ..Shape::default()
        });
        let list = [case.a.segment(0, 8)];
        let start = case.world.now_ns;
        case.post(&SendRequest::send().segments(&list));
        let took = case.world.now_ns - start;
        case.fails(Syndrome::RnrRetryExc);
        case.unnoticed();
        let naks = case.world.devices[0].counters().rnr_naks;
        assert_eq!(naks, u64::from(rnr_retry) + 1);
        // Code 14 is 1.28 ms; looked at every 20 us.
        let want = u64::from(rnr_retry) * 1_280_000;
        assert!(
            (want..want + 100_000 + u64::from(rnr_retry) * 30_000).contains(&took),
            "{took} ns for {rnr_retry} retries"
        );
    }
}

#[test]
fn refusal_does_not_fail_message_with_lost_response() {
    for not_ready in [true, false] {
        let mut world = World::new(2);
        let (mut a, b) = world.pair(Shape {
            attributes: Attributes {
                rnr_retry: 0,
                ..Attributes::default()
            },
            ..Shape::default()
        });
        b.write(0, &pattern(1, 5000));
        let list = [a.segment(0, 5000)];
        let answers_get_lost = |lost: bool| {
            b.qp.device().set_faults(crate::device::Faults {
                loss: f64::from(u8::from(lost)),
                ..Default::default()
            });
        };
        answers_get_lost(true);
        let read = SendRequest::read(b.at(0), b.key).segments(&list);
        a.send(&read.signaled(true));
        for _ in 0..10 {
            world.turn();
        }
        answers_get_lost(false);
        if not_ready {
            a.send(&SendRequest::send().segments(&list));
        } else {
            a.send(&SendRequest::write(b.at(0), 0xbad).segments(&list));
        }
        world.settle();
        if not_ready {
            // The read is asked for again, and then the send is what the receiver was not ready for.
            assert_eq!(a.all_sent(), [(0, None), (1, Some(Syndrome::RnrRetryExc))]);
            assert_eq!(a.read(0, 5000), pattern(1, 5000));
        } else {
            // The other side is in error and answers nothing any more, the read included.
            let done = [
                (0, Some(Syndrome::TransportRetryExc)),
                (1, Some(Syndrome::WrFlush)),
            ];
            assert_eq!(a.all_sent(), done);
        }
    }
}

#[test]
fn rnr_retry_count_7_is_unlimited() {
    for imm in [false, true] {
        let mut case = case();
        let list = [case.a.segment(0, 5000)];
        case.a.write(0, &pattern(1, 5000));
        let request = if imm {
            SendRequest::write_imm(case.b.at(64), case.b.key, 1)
        } else {
            SendRequest::send()
        };
        case.a.send(&request.segments(&list).signaled(true));
        let end = case.world.now_ns + 100_000_000;
        while case.world.now_ns < end {
            case.world.turn();
        }
        assert!(case.world.devices[0].counters().rnr_naks > 50);
        assert_eq!(case.a.all_sent(), []);
        case.b.receive(&[case.b.segment(64, 5000)]);
        case.world.settle();
        assert_eq!(case.a.all_sent(), [(0, None)]);
        assert_eq!(case.b.all_received(), [(0, None)]);
        assert_eq!(case.b.read(64, 5000), pattern(1, 5000));
    }
}

/// The RNR NAK. The second send is out of sequence until the first one has come again, and is dropped without an answer of its own.
#[test]
fn one_nak_is_out_until_the_expected_packet_comes() {
    let mut world = World::new(2);
    let (mut a, mut b) = world.pair(Shape {
        attributes: Attributes {
            // 10.24 ms.
            min_rnr_timer: 20,
            ..Attributes::default()
        },
        ..Shape::default()
    });
    let list = [a.segment(0, 8)];
    for _ in 0..2 {
        a.post(&SendRequest::send().segments(&list).signaled(true));
    }
    a.ring();
    let device = world.devices[1].clone();
    for naks in 1..=3 {
        assert!(world.run(|| device.counters().rnr_naks == naks));
        for _ in 0..20 {
            world.turn();
        }
        let counters = device.counters();
        let asked = 2 * naks;
        let arrived = (counters.packets_received, counters.packets_sent);
        assert_eq!(arrived, (asked, naks), "requests and NAKs");
    }
    for _ in 0..2 {
        b.receive(&[b.segment(0, 8)]);
    }
    world.settle();
    assert_eq!(a.all_sent(), [(0, None), (1, None)]);
    assert_eq!(b.all_received(), [(0, None), (1, None)]);
    assert_eq!(world.devices[0].counters().retransmissions, 3);
}

/// SoftRoCE sends one: what is behind a send without a receive is out of sequence there. It is no reason to send before the wait is over, and no retry.
#[test]
fn a_requester_that_waits_for_a_receive_ignores_sequence_naks() {
    let mut world = World::new(2);
    let (mut a, mut b) = world.pair(Shape {
        attributes: Attributes {
            retry_count: 0,
            ..Attributes::default()
        },
        ..Shape::default()
    });
    let list = [a.segment(0, 8)];
    a.send(&SendRequest::send().segments(&list).signaled(true));
    let local = a.qp.local();
    let nak = Header {
        code: AckCode::SequenceError,
        ..Header::new(PacketKind::Ack, local.qpn, local.psn, local.connection)
    };
    let responder = world.devices[1].clone();
    for naks in 1..=20 {
        assert!(world.run(|| responder.counters().rnr_naks == naks));
        // The RNR NAK arrives in this turn at the latest.
        world.turn();
        world.devices[0].lock().inject(&nak, &[]);
        world.turn();
        let counters = world.devices[0].counters();
        assert_eq!(
            (counters.packets_sent, counters.retransmissions),
            (naks, naks)
        );
        assert_eq!(a.state(), State::ReadyToSend);
    }
    b.receive(&[b.segment(0, 8)]);
    world.settle();
    assert_eq!(a.all_sent(), [(0, None)]);
}

/// The send came twice: the receiver was not ready for the first copy, and has taken the second one.
#[test]
fn an_acknowledgement_ends_the_wait_for_the_receiver() {
    let mut case = case();
    case.world.set_faults(Faults {
        loss: 1.0,
        ..Faults::default()
    });
    let list = [case.a.segment(0, 8)];
    for _ in 0..2 {
        case.a
            .post(&SendRequest::send().segments(&list).signaled(true));
    }
    case.a.ring();
    case.world.turn();
    let (local, device) = (case.a.qp.local(), case.world.devices[0].clone());
    assert_eq!(device.counters().packets_sent, 2);
    let answer = |code| Header {
        code,
        ..Header::new(PacketKind::Ack, local.qpn, local.psn, local.connection)
    };
    // Code 0 is the longest wait, 655 ms: longer than all retries.
    device
        .lock()
        .inject(&answer(AckCode::ReceiverNotReady(0)), &[]);
    for _ in 0..10 {
        case.world.turn();
    }
    assert_eq!(device.counters().packets_sent, 2, "it waits");
    device.lock().inject(&answer(AckCode::Ack), &[]);
    case.world.turn();
    assert_eq!(case.a.all_sent(), [(0, None)]);
    assert_eq!(device.counters().packets_sent, 3, "the second send again");
}

#[test]
fn missing_acknowledgements_exhaust_retries() {
    for (timeout, retry_count) in [(8, 0), (8, 7), (12, 3)] {
        let mut case = Case::new(Shape {
            attributes: Attributes {
                ack_timeout: timeout,
                retry_count,
                ..Attributes::default()
            },
            ..Shape::default()
        });
        case.b.qp.fail().unwrap();
        let list = [case.a.segment(0, 8)];
        case.a
            .post(&SendRequest::write(case.b.at(0), case.b.key).segments(&list));
        case.a.post(&SendRequest::nop().signaled(true));
        case.a.ring();
        let start = case.world.now_ns;
        let status = case.a.qp.status();
        assert!(case.world.run(|| status.state() == State::Error));
        let took = case.world.now_ns - start;
        let want = (4096 << timeout) * (u64::from(retry_count) + 1);
        assert!(
            (want..want + 30_000 * (u64::from(retry_count) + 2)).contains(&took),
            "{took} ns instead of {want}"
        );
        let flush = Some(Syndrome::WrFlush);
        assert_eq!(
            case.a.all_sent(),
            [(0, Some(Syndrome::TransportRetryExc)), (1, flush)]
        );
    }
}

#[test]
fn deregistration_during_a_transfer_fails_it() {
    #[derive(Debug, PartialEq)]
    enum RegionOwner {
        Sender,
        Receiver,
    }
    for owner in [RegionOwner::Sender, RegionOwner::Receiver] {
        for (read, devices) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
            let shape = Shape {
                memory_bytes: 8 << 20,
                ..Shape::default()
            };
            let mut world = World::new(devices);
            let (a, b) = world.pair(shape);
            let mut case = Case { world, a, b };
            let list = [case.a.segment(0, 8 << 20)];
            let (at, key) = (case.b.at(0), case.b.key);
            let request = if read {
                SendRequest::read(at, key)
            } else {
                SendRequest::write(at, key)
            };
            case.a.send(&request.segments(&list).signaled(true));
            case.world.turn();
            case.world.turn();
            let (end, key) = match owner {
                RegionOwner::Sender => (&case.a, case.a.key),
                RegionOwner::Receiver => (&case.b, case.b.key),
            };
            assert!(end.qp.device().deregister(key));
            case.world.settle();
            let want = match owner {
                RegionOwner::Sender => Syndrome::LocalProt,
                RegionOwner::Receiver => Syndrome::RemoteAccess,
            };
            assert_eq!(
                case.a.all_sent(),
                [(0, Some(want))],
                "{owner:?}, read: {read}, {devices} devices"
            );
        }
    }
}

/// The response has been made and waits to leave: for a place on a lane or in a socket, or here because of a fault. Its bytes are read when it leaves.
#[test]
fn deregistration_before_a_response_leaves_fails_both_ends() {
    for mut world in [World::new(1), World::new(2), World::by_udp(2)] {
        for fails_first in [false, true] {
            let (mut a, b) = world.pair(Shape::default());
            let responder = b.qp.device().clone();
            responder.set_faults(Faults {
                delay_ns: 100_000,
                ..Faults::default()
            });
            // Of several packets, each of which cannot be read.
            let list = [a.segment(0, 10_000)];
            let read = SendRequest::read(b.at(0), b.key).segments(&list);
            let begin = responder.counters().packets_sent;
            // A device that talks to itself sends the request, too, which the fault holds back as well.
            let before = 3 + u64::from(world.devices.len() == 1);
            a.send(&read.signaled(true));
            let responses = || responder.counters().packets_sent - begin;
            assert!(world.run(|| responses() >= before));
            if fails_first {
                b.qp.fail().unwrap();
            }
            assert!(responder.deregister(b.key));
            responder.set_faults(Faults::default());
            world.settle();
            let want = match fails_first {
                false => Syndrome::RemoteAccess,
                // A queue pair in error refuses nothing.
                true => Syndrome::TransportRetryExc,
            };
            let devices = world.devices.len();
            assert_eq!(a.all_sent(), [(0, Some(want))], "{devices} devices");
            assert_eq!(b.state(), State::Error, "{devices} devices");
        }
    }
}

/// The owner of the region gets one event, however many responses were lost.
#[test]
fn deregistration_before_a_response_leaves_is_an_access_error_of_the_responder() {
    const READ: u8 = 0x10;
    for devices in [1, 2] {
        let mut pair = Pair::new(Transport::Rc, devices, Process::local);
        let last = pair.world.devices[devices - 1].clone();
        last.set_faults(Faults {
            delay_ns: 100_000,
            ..Faults::default()
        });
        let begin = last.counters().packets_sent;
        pair.send(&Work::new(READ, &[pair.there(0), pair.here(0, 4000)]));
        let before = 4 + u64::from(devices == 1);
        let is_answered = || last.counters().packets_sent - begin >= before;
        assert!(pair.world.run(is_answered));
        pair.b.events.take();
        pair.b.client.dereg_mr(pair.into.1).unwrap();
        last.set_faults(Faults::default());
        let sent = pair.sent();
        assert_eq!(
            sent,
            [(0, Syndrome::RemoteAccess as u8)],
            "{devices} devices"
        );
        let qpn = pair.qps[1].qpn;
        let events = pair.b.events.take();
        assert_eq!(
            events,
            [DeviceEvent::QpAccessError { qpn }],
            "{devices} devices"
        );
    }
}

/// A peer may send its requests again and again before the first refusal has left.
#[test]
fn refusals_of_repeated_requests_do_not_pile_up() {
    /// As many answers as a responder queues.
    const MOST: u64 = 64;
    // A send without a receive; the same, with a packet behind it that is out of sequence; a read of before, whose key is gone.
    for which in 0..3 {
        let mut case = case();
        let (local, remote) = (case.b.qp.local(), case.a.qp.local());
        let list = [case.a.segment(0, 8)];
        let write = SendRequest::write(case.b.at(0), case.b.key).segments(&list);
        case.a.send(&write.signaled(true));
        case.world.settle();
        assert_eq!(case.a.all_sent(), [(0, None)]);
        let header = |kind, psn| Header {
            flags: flag::FIRST | flag::LAST,
            rkey: case.b.key ^ 0x5500,
            total_bytes: 8,
            ..Header::new(kind, local.qpn, psn_add(remote.psn, psn), local.connection)
        };
        let device = &case.world.devices[0];
        let before = device.counters().packets_sent;
        for _ in 0..1000 {
            let mut core = device.lock();
            match which {
                0 => core.inject(&header(PacketKind::Send, 1), &[0; 8]),
                1 => {
                    core.inject(&header(PacketKind::Send, 1), &[0; 8]);
                    core.inject(&header(PacketKind::Send, 2), &[0; 8]);
                }
                _ => core.inject(&header(PacketKind::ReadRequest, 0), &[]),
            }
        }
        case.world.settle();
        let sent = case.world.devices[0].counters().packets_sent - before;
        assert!((1..=MOST).contains(&sent), "{which}: {sent} answers");
        let naks = case.world.devices[0].counters().rnr_naks;
        assert!(naks <= sent, "{which}: {naks} of {sent} answers");
        // The connection goes on.
        case.b.receive(&[]);
        case.a.send(&SendRequest::send().signaled(true));
        case.world.settle();
        assert_eq!(case.a.all_sent(), [(1, None)], "{which}");
    }
}

/// SoftRoCE takes an acknowledgement of the packet of an atomic for its response, and reports success without a value. A read and an atomic are acknowledged by
/// their responses; what acknowledges a write, also one that is repeated, names a write.
#[test]
fn acknowledgements_name_no_read_and_no_atomic() {
    let by_udp = std::env::var_os(crate::device::options::WIRE).is_some();
    for atomic in [false, true] {
        let mut case = case();
        let (local, remote) = (case.b.qp.local(), case.a.qp.local());
        let path =
            std::env::temp_dir().join(format!("doorbell-acks-{}-{atomic}", std::process::id()));
        case.world.devices[0].lock().set_trace(&path).unwrap();
        let (at, key) = (case.b.at(0), case.b.key);
        let list = [case.a.segment(0, 8)];
        let write = SendRequest::write(at, key).segments(&list);
        case.a.post(&write.signaled(true));
        let answered = match atomic {
            false => SendRequest::read(at, key),
            true => SendRequest::fetch_add(at, key, 1),
        };
        case.a.post(&answered.segments(&list).signaled(true));
        case.a.ring();
        case.world.settle();
        assert_eq!(case.a.all_sent(), [(0, None), (1, None)]);
        // Datagrams of two requests may be read one by one.
        if !by_udp {
            let sent = case.world.devices[0].counters().packets_sent;
            assert_eq!(sent, 3, "the answer acknowledges the write, too");
        }
        let repeated = Header {
            flags: flag::FIRST | flag::LAST | flag::WANTS_ACK,
            rkey: key,
            addr: at,
            total_bytes: 8,
            ..Header::new(PacketKind::Write, local.qpn, remote.psn, local.connection)
        };
        case.world.devices[0].lock().inject(&repeated, &[0; 8]);
        case.world.settle();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let acks: Vec<_> = text
            .lines()
            .filter(|line| line.contains(" TX ") && line.ends_with(" ACK"))
            .collect();
        let psn = format!(" psn {:#08x} ACK", remote.psn);
        let is_of_write = |ack: &&str| ack.ends_with(&psn);
        assert!(
            !acks.is_empty() && acks.iter().all(is_of_write),
            "atomic: {atomic}\n{text}"
        );
    }
}
