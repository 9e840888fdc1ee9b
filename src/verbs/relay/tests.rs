//! The relay between the library's own queues and a provider without a device.
#![allow(unsafe_code)] // queues over memory

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

mod imitation;

use proptest::prelude::*;
use rdma_sys::{ibv_wc_flags, ibv_wc_opcode, ibv_wr_opcode};

use self::imitation::{Imitation, memory};
use super::completion_ring::CompletionRing;
use super::core::{Core, RelayProgress};
use super::provider::PolledCompletion;
use super::recv_queue::{RecvParts, RelayRecvQueue};
use super::request::{FENCE, INLINE, SIGNALED, SOLICITED};
use super::send_queue::{RelaySendQueue, SendParts};
use super::staging::Staging;
use crate::bytecode::{Role, Targets};
use crate::mlx5::{
    CqRing, CqRingConfig, Cqe, CqeOpcode, DataSegment, Opcode, RecvQueue, RecvQueueConfig,
    SendQueue, SendQueueConfig, SendRequest, Syndrome,
};
use doorbell_wire::memory::{Pages, QueuePairMemory, QueuePairSizes, RecordCell, RingCells};
use doorbell_wire::verbs::State;
use doorbell_wire::verbs::WcStatus;

const QPN: u32 = 0x12_3456;
const SLOT_KEY: u32 = 0x5107;

#[derive(Debug, Clone, Copy)]
struct Sizes {
    send_wqebbs: u32,
    recv_wqes: u32,
    cqes: u32,
    depth: u32,
    segments: u32,
    /// What the provider has.
    places: usize,
    inline_bytes: u32,
    /// Whether slots have a key.
    keyed: bool,
}

const SIZES: Sizes = Sizes {
    send_wqebbs: 64,
    recv_wqes: 16,
    cqes: 64,
    depth: 16,
    segments: 4,
    places: 16,
    inline_bytes: 96,
    keyed: false,
};

const INLINE_BYTES_MAX: u32 = 96;

/// The library's queues on one side, the imitation on the other.
struct Rig {
    core: Core<Imitation>,
    send: SendQueue,
    recv: RecvQueue,
    cqs: [CqRing; 2],
    /// Running indices of the next CQEs.
    next: [u32; 2],
    memory: QueuePairMemory,
    _pages: Pages,
}

impl Rig {
    fn new(sizes: Sizes) -> Rig {
        let stride_bytes = 16 * sizes.segments.next_power_of_two();
        let (pages, memory) = QueuePairMemory::new(&QueuePairSizes {
            send_wqebbs: sizes.send_wqebbs,
            recv_wqes: sizes.recv_wqes,
            recv_stride_bytes: stride_bytes,
            cqes: [sizes.cqes; 2],
        })
        .unwrap();
        let mut targets = Targets::new();
        let record = targets.register("record", Role::DoorbellRecord, 8);
        let uar = targets.register("uar", Role::Uar, 512);
        let ring_target = targets.register("cq", Role::Completions, u64::from(sizes.cqes) * 64);
        let marks = targets.register("marks", Role::Marks, u64::from(sizes.cqes) * 4);
        let mut staging =
            Staging::new(None, sizes.depth, INLINE_BYTES_MAX, sizes.inline_bytes).unwrap();
        if sizes.keyed {
            staging.set_key(SLOT_KEY);
        }
        // SAFETY: all of it lies in the pages, which the rig holds.
        unsafe {
            let completions = |queue: usize| {
                CompletionRing::new(
                    RingCells::new(memory.cqs[queue], sizes.cqes as usize * 64),
                    sizes.cqes,
                    RecordCell::new(memory.cq_records[queue]),
                )
            };
            let cq = |queue: usize| {
                let cq = CqRing::new(CqRingConfig {
                    ring: memory.cqs[queue],
                    cqe_count: sizes.cqes,
                    record: memory.cq_records[queue],
                    marks: memory.cq_marks[queue],
                    completions: ring_target,
                    marks_target: marks,
                })
                .unwrap();
                cq.reset();
                cq
            };
            Rig {
                core: Core::new(
                    Imitation {
                        send_places: sizes.places,
                        recv_places: sizes.places,
                        inline_bytes: sizes.inline_bytes as usize,
                        ..Imitation::default()
                    },
                    RelaySendQueue::new(SendParts {
                        addresses: None,
                        ring: RingCells::new(memory.send_ring, sizes.send_wqebbs as usize * 64),
                        record: RecordCell::new(memory.record.add(1)),
                        wqebbs: sizes.send_wqebbs,
                        completions: completions(0),
                        staging,
                        depth: sizes.depth,
                        segments: sizes.segments,
                        qpn: QPN,
                    }),
                    RelayRecvQueue::new(RecvParts {
                        ring: RingCells::new(
                            memory.recv_ring,
                            (sizes.recv_wqes * stride_bytes) as usize,
                        ),
                        record: RecordCell::new(memory.record),
                        wqes: sizes.recv_wqes,
                        stride_bytes,
                        completions: completions(1),
                        depth: sizes.depth,
                        segments: sizes.segments,
                        qpn: QPN,
                    }),
                ),
                send: SendQueue::new(SendQueueConfig {
                    ring: memory.send_ring,
                    wqebb_count: sizes.send_wqebbs,
                    qpn: QPN,
                    max_segments: 8,
                    max_inline_bytes: INLINE_BYTES_MAX,
                    record: record.dword(4).unwrap(),
                    uar: [uar.block(0, 256).unwrap(), uar.block(256, 256).unwrap()],
                })
                .unwrap(),
                recv: RecvQueue::new(RecvQueueConfig {
                    ring: memory.recv_ring,
                    wqe_count: sizes.recv_wqes,
                    max_segments: sizes.segments,
                    record: record.dword(0).unwrap(),
                })
                .unwrap(),
                cqs: [cq(0), cq(1)],
                next: [0; 2],
                memory,
                _pages: pages,
            }
        }
    }

    fn store_record(&self, word: usize, count: u32) {
        // SAFETY: the record has two words.
        let record = unsafe { AtomicU32::from_ptr(self.memory.record.add(word)) };
        record.store((count & 0xffff).to_be(), Ordering::Release);
    }

    /// Tells of everything in both rings.
    fn ring(&self) {
        self.store_record(1, self.send.producer_index());
        self.store_record(0, self.recv.producer_index());
    }

    /// Posts a request: the index of its WQE, and its end.
    fn post(&mut self, request: &SendRequest<'_>) -> (u32, u32) {
        let posted = self.send.post(request).unwrap();
        (posted.index, posted.end())
    }

    fn turn(&mut self) -> RelayProgress {
        self.core.turn(State::ReadyToSend)
    }

    /// The next completion of a queue, given back at once.
    fn take(&mut self, queue: usize) -> Option<Cqe> {
        let cqe = self.cqs[queue].cqe(self.next[queue])?;
        self.next[queue] = self.next[queue].wrapping_add(1);
        self.cqs[queue].set_consumer_index(self.next[queue]);
        assert_eq!(cqe.qpn, QPN);
        Some(cqe)
    }

    fn carry_out_all(&mut self) {
        while self.core.provider.carry_out_send(WcStatus::Success) {}
    }
}

fn request<'a>(opcode: Opcode) -> SendRequest<'a> {
    let (addr, rkey, imm) = (0x1122_3344_5566_7788, 0xaabb_ccdd, 0x0102_0304);
    match opcode {
        Opcode::RdmaWrite => SendRequest::write(addr, rkey),
        Opcode::RdmaWriteImm => SendRequest::write_imm(addr, rkey, imm),
        Opcode::Send => SendRequest::send(),
        Opcode::SendImm => SendRequest::send_imm(imm),
        Opcode::RdmaRead => SendRequest::read(addr, rkey),
        Opcode::AtomicCs => SendRequest::compare_swap(addr, rkey, 5, 7),
        Opcode::AtomicFa => SendRequest::fetch_add(addr, rkey, 9),
        _ => SendRequest::nop(),
    }
}

fn segments(count: usize, len_bytes: u32) -> Vec<DataSegment> {
    (0..count as u32)
        .map(|at| DataSegment {
            len_bytes,
            lkey: 0x100_0000 + at,
            addr: 0x7000_0000_0000 + u64::from(at),
        })
        .collect()
}

#[test]
fn every_operation_is_the_request_of_verbs_that_it_is() {
    let mut rig = Rig::new(SIZES);
    for (opcode, verbs, compare_add, swap) in [
        (Opcode::RdmaWrite, ibv_wr_opcode::IBV_WR_RDMA_WRITE, 0, 0),
        (
            Opcode::RdmaWriteImm,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            0,
            0,
        ),
        (Opcode::Send, ibv_wr_opcode::IBV_WR_SEND, 0, 0),
        (Opcode::SendImm, ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, 0, 0),
        (Opcode::RdmaRead, ibv_wr_opcode::IBV_WR_RDMA_READ, 0, 0),
        (
            Opcode::AtomicCs,
            ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP,
            5,
            7,
        ),
        (
            Opcode::AtomicFa,
            ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
            9,
            0,
        ),
    ] {
        for flags in 0..8 {
            let (signaled, solicited, fence) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
            let list = match opcode.is_atomic() {
                true => segments(1, 8),
                false => segments(flags % 5, 100),
            };
            let posted = request(opcode)
                .segments(&list)
                .signaled(signaled)
                .solicited(solicited)
                .fence(fence);
            let (index, end) = rig.post(&posted);
            rig.ring();
            assert!(rig.turn().worked);
            let sent = rig.core.provider.sends.last().unwrap().clone();
            // The only one of its call, so it is signaled in any case.
            let expected =
                SIGNALED | if solicited { SOLICITED } else { 0 } | if fence { FENCE } else { 0 };
            assert_eq!((sent.request.opcode, sent.request.flags), (verbs, expected));
            let has_remote = opcode.has_remote();
            assert_eq!(
                (sent.request.remote_addr, sent.request.rkey),
                if has_remote {
                    (0x1122_3344_5566_7788, 0xaabb_ccdd)
                } else {
                    (0, 0)
                }
            );
            assert_eq!(
                (sent.request.compare_add, sent.request.swap),
                (compare_add, swap)
            );
            // Network order: as it goes over the wire.
            let imm = if opcode.has_imm() {
                [1, 2, 3, 4]
            } else {
                [0; 4]
            };
            assert_eq!(sent.request.imm.to_ne_bytes(), imm);
            let sges: Vec<_> = sent
                .sges
                .iter()
                .map(|s| (s.addr, s.len_bytes, s.lkey))
                .collect();
            let pieces: Vec<_> = list.iter().map(|s| (s.addr, s.len_bytes, s.lkey)).collect();
            assert_eq!(sges, pieces);
            // And completions that were not asked for are not reported.
            rig.carry_out_all();
            rig.turn();
            let cqe = rig.take(0);
            assert_eq!(cqe.is_some(), signaled);
            if let Some(cqe) = cqe {
                assert_eq!(
                    (cqe.opcode, cqe.wqe_counter),
                    (CqeOpcode::Req, index as u16)
                );
                assert_eq!(cqe.send_opcode, opcode as u8);
                assert_eq!(
                    u64::from(cqe.byte_count),
                    list.iter().map(|s| u64::from(s.len_bytes)).sum::<u64>()
                );
            }
            rig.send.release(end).unwrap();
        }
    }
}

#[test]
fn receives_and_what_they_complete_with() {
    let mut rig = Rig::new(SIZES);
    let imm = u32::from_ne_bytes([1, 2, 3, 4]);
    for (count, (opcode, flags, expected)) in [
        (ibv_wc_opcode::IBV_WC_RECV, 0, CqeOpcode::RespSend),
        (
            ibv_wc_opcode::IBV_WC_RECV,
            ibv_wc_flags::IBV_WC_WITH_IMM.0,
            CqeOpcode::RespSendImm,
        ),
        (
            ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
            ibv_wc_flags::IBV_WC_WITH_IMM.0,
            CqeOpcode::RespWriteImm,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let list = segments(count + 1, 64);
        rig.recv.post(&list).unwrap();
        rig.ring();
        assert!(rig.turn().worked);
        let (_, sges) = rig.core.provider.recvs.last().unwrap();
        let keys: Vec<_> = sges.iter().map(|s| (s.addr, s.len_bytes, s.lkey)).collect();
        let pieces: Vec<_> = list.iter().map(|s| (s.addr, s.len_bytes, s.lkey)).collect();
        assert_eq!(keys, pieces);
        rig.core.provider.carry_out_recv(PolledCompletion {
            opcode,
            flags,
            byte_len: 33,
            imm,
            ..PolledCompletion::default()
        });
        assert!(rig.turn().worked);
        let cqe = rig.take(1).unwrap();
        assert_eq!((cqe.opcode, cqe.byte_count), (expected, 33));
        assert_eq!(cqe.wqe_counter, count as u16);
        assert_eq!(cqe.imm, if flags == 0 { 0 } else { 0x0102_0304 });
        rig.recv.release(count as u32 + 1).unwrap();
    }
    assert!(!rig.turn().worked);
}

#[test]
fn inline_bytes_go_with_the_request_or_by_a_slot() {
    for (inline_bytes, keyed) in [(INLINE_BYTES_MAX, false), (0, true), (32, true)] {
        let mut rig = Rig::new(Sizes {
            inline_bytes,
            keyed,
            ..SIZES
        });
        for round in 0..100u8 {
            let bytes: Vec<u8> = (0..=round % 96).map(|at| at ^ round).collect();
            let (_, end) = rig.post(&SendRequest::send().inline(&bytes).signaled(true));
            rig.ring();
            rig.turn();
            let sent = rig.core.provider.sends.last().unwrap();
            let by_slot = bytes.len() > inline_bytes as usize;
            assert_eq!(sent.request.flags & INLINE == 0, by_slot);
            if by_slot {
                let [slot] = &sent.sges[..] else {
                    panic!("{:?}", sent.sges)
                };
                assert_eq!((slot.lkey, memory(slot)), (SLOT_KEY, bytes));
            } else {
                assert_eq!(sent.inline, bytes);
            }
            rig.carry_out_all();
            rig.turn();
            assert_eq!(rig.take(0).unwrap().status(), WcStatus::Success);
            rig.send.release(end).unwrap();
        }
    }
}

#[test]
fn slots_of_requests_in_flight_are_not_written_over() {
    let mut rig = Rig::new(Sizes {
        inline_bytes: 0,
        keyed: true,
        send_wqebbs: 256,
        ..SIZES
    });
    let payload = |at: u8| [at; 60];
    for round in 0..3 {
        for at in 0..16u8 {
            rig.post(&SendRequest::send().inline(&payload(16 * round + at)));
        }
        rig.ring();
        rig.turn();
        let sent = &rig.core.provider.sends[16 * usize::from(round)..];
        assert_eq!(sent.len(), 16);
        for (at, sent) in sent.iter().enumerate() {
            assert_eq!(memory(&sent.sges[0]), payload(16 * round + at as u8));
        }
        rig.carry_out_all();
        rig.turn();
        let end = rig.send.producer_index();
        rig.send.release(end).unwrap();
    }
}

#[test]
fn a_provider_is_asked_for_its_places_back() {
    // Nothing is signaled by the application, and the queue is shorter than what is rung.
    let mut rig = Rig::new(Sizes {
        places: 4,
        depth: 4,
        ..SIZES
    });
    for round in 0..1000 {
        for _ in 0..3 {
            let (_, end) = rig.post(&SendRequest::write(1, 2));
            rig.ring();
            let worked = rig.turn().worked;
            assert!(worked, "round {round}");
            rig.core.provider.carry_out_send(WcStatus::Success);
            rig.send.release(end).unwrap();
        }
    }
    rig.carry_out_all();
    rig.turn();
    assert_eq!(rig.core.provider.sends.len(), 3000);
    assert_eq!(rig.take(0), None);
    assert_eq!(rig.core.provider.waiting(), 0);
}

#[test]
fn a_queue_that_is_shorter_than_it_said_is_waited_for() {
    let mut rig = Rig::new(Sizes { places: 5, ..SIZES });
    let mut indices = VecDeque::new();
    for at in 0..16 {
        let (index, _) = rig.post(&SendRequest::write(1, 2).signaled(at % 5 == 4));
        if at % 5 == 4 {
            indices.push_back(index);
        }
        rig.recv.post(&segments(1, 8)).unwrap();
    }
    rig.ring();
    let mut turns = 0;
    while rig.core.provider.sends.len() < 16 || !rig.core.provider.send_queue.is_empty() {
        assert!(!rig.turn().fails);
        assert!(rig.core.provider.send_queue.len() <= 5);
        rig.core.provider.carry_out_send(WcStatus::Success);
        turns += 1;
        assert!(turns < 100);
    }
    rig.turn();
    while let Some(cqe) = rig.take(0) {
        assert_eq!(
            indices.pop_front().map(|index| index as u16),
            Some(cqe.wqe_counter)
        );
    }
    assert!(indices.is_empty(), "{indices:?}");
    for _ in 0..16 {
        rig.turn();
        assert!(rig.core.provider.carry_out_recv(PolledCompletion {
            opcode: ibv_wc_opcode::IBV_WC_RECV,
            ..PolledCompletion::default()
        }));
    }
    rig.turn();
    assert_eq!((0..).map_while(|_| rig.take(1)).count(), 16);
}

#[test]
fn a_nop_is_completed_in_its_place() {
    let mut rig = Rig::new(SIZES);
    let write = |signaled| SendRequest::write(1, 2).signaled(signaled);
    let (first, _) = rig.post(&SendRequest::nop().signaled(true));
    rig.ring();
    rig.turn();
    assert_eq!(rig.take(0).unwrap().wqe_counter, first as u16);
    // Behind an unsignaled request of the same call, and of an earlier one.
    for together in [true, false] {
        rig.post(&write(false));
        if !together {
            rig.ring();
            rig.turn();
        }
        rig.post(&SendRequest::nop());
        let (nop, _) = rig.post(&SendRequest::nop().signaled(true));
        let (behind, end) = rig.post(&write(true));
        rig.ring();
        rig.turn();
        assert_eq!(rig.take(0), None, "before the write is done");
        rig.core.provider.carry_out_send(WcStatus::Success);
        rig.turn();
        let cqe = rig.take(0).unwrap();
        assert_eq!((cqe.wqe_counter, cqe.send_opcode), (nop as u16, 0));
        assert_eq!(rig.take(0), None);
        rig.core.provider.carry_out_send(WcStatus::Success);
        rig.turn();
        assert_eq!(rig.take(0).unwrap().wqe_counter, behind as u16);
        rig.send.release(end).unwrap();
    }
}

#[test]
fn an_unread_completion_is_never_written_over() {
    let mut rig = Rig::new(Sizes { cqes: 4, ..SIZES });
    let indices: Vec<u32> = (0..12)
        .map(|at| {
            let request = match at % 3 {
                2 => SendRequest::nop(),
                _ => SendRequest::write(1, 2),
            };
            rig.post(&request.signaled(true)).0
        })
        .collect();
    rig.ring();
    rig.turn();
    rig.carry_out_all();
    for _ in 0..3 {
        rig.turn();
    }
    let written = (0..4).filter(|at| rig.cqs[0].cqe(*at).is_some()).count();
    assert_eq!(written, 4);
    let mut found = Vec::new();
    while found.len() < 12 {
        found.push(rig.take(0).expect("the next one").wqe_counter);
        rig.turn();
    }
    let expected: Vec<u16> = indices.iter().map(|index| *index as u16).collect();
    assert_eq!(found, expected);
}

/// (status, vendor syndrome, wqe_counter) of what is completed now.
fn outcomes(rig: &mut Rig, queue: usize) -> Vec<(WcStatus, u8, u16)> {
    std::iter::from_fn(|| {
        let cqe = rig.take(queue)?;
        Some((cqe.status(), cqe.vendor_syndrome, cqe.wqe_counter))
    })
    .collect()
}

#[test]
fn behind_a_failure_everything_is_flushed_in_order() {
    for hides_flushes in [false, true] {
        let mut rig = Rig::new(SIZES);
        rig.core.provider.hides_flushes = hides_flushes;
        rig.recv.post(&segments(1, 8)).unwrap();
        // Unsignaled, signaled, failing, NOP, unsignaled, signaled.
        let write = |signaled| SendRequest::write(1, 2).signaled(signaled);
        let list = [
            write(false),
            write(true),
            write(false),
            SendRequest::nop().signaled(true),
            write(false),
            write(true),
        ];
        let indices = list.map(|request| rig.post(&request).0 as u16);
        rig.ring();
        rig.turn();
        rig.core.provider.carry_out_send(WcStatus::Success);
        rig.core.provider.carry_out_send(WcStatus::Success);
        rig.core.provider.carry_out_send(WcStatus::RemAccessErr);
        rig.carry_out_all();
        rig.core
            .provider
            .carry_out_recv(PolledCompletion::default());
        assert_eq!(
            rig.turn(),
            RelayProgress {
                worked: true,
                fails: false
            }
        );
        // What is rung later never comes to the device.
        let late = rig.post(&write(false)).0 as u16;
        rig.recv.post(&segments(1, 8)).unwrap();
        rig.ring();
        rig.turn();
        let flushed = |index| (WcStatus::WrFlushErr, 0x77, index);
        let quiet = |index| (WcStatus::WrFlushErr, 0, index);
        let expected = vec![
            (WcStatus::Success, 0, indices[1]),
            // Signaled for the NOP behind it, so it is told even where flushes are not.
            (WcStatus::RemAccessErr, 0x77, indices[2]),
            quiet(indices[3]),
            // Not told of, but what is told of behind it has failed.
            if hides_flushes {
                quiet(indices[4])
            } else {
                flushed(indices[4])
            },
            flushed(indices[5]),
            quiet(late),
        ];
        assert_eq!(outcomes(&mut rig, 0), expected, "{hides_flushes}");
        assert_eq!(
            outcomes(&mut rig, 1),
            [(WcStatus::WrFlushErr, 0, 0), (WcStatus::WrFlushErr, 0, 1)]
        );
        assert_eq!(rig.core.provider.sends.len(), 5);
    }
}

/// An address of the peer that the imitation refuses, as SoftRoCE refuses that of a misaligned atomic.
const REFUSED: u64 = 0xbad;

/// Which of the requests are signaled, in order, and the place of the one that is refused. Those in flight of an earlier turn come first.
struct Refusal {
    in_flight: &'static [bool],
    before: &'static [bool],
    signaled: bool,
    behind: &'static [bool],
}

const REFUSALS: [Refusal; 8] = [
    // The only one, the first, one in the middle, the last.
    Refusal {
        in_flight: &[],
        before: &[],
        signaled: true,
        behind: &[],
    },
    Refusal {
        in_flight: &[],
        before: &[],
        signaled: false,
        behind: &[true, false],
    },
    Refusal {
        in_flight: &[],
        before: &[true, false, true],
        signaled: true,
        behind: &[true, false],
    },
    Refusal {
        in_flight: &[],
        before: &[true, true],
        signaled: true,
        behind: &[],
    },
    // Nothing signaled before it, by the application.
    Refusal {
        in_flight: &[],
        before: &[false, false, false],
        signaled: false,
        behind: &[true],
    },
    // Not completed yet when it is refused.
    Refusal {
        in_flight: &[false, true],
        before: &[],
        signaled: true,
        behind: &[false],
    },
    Refusal {
        in_flight: &[true, false, false],
        before: &[false, false],
        signaled: true,
        behind: &[true],
    },
    // More than the shortest of the queues below.
    Refusal {
        in_flight: &[false; 5],
        before: &[false; 7],
        signaled: true,
        behind: &[false, true],
    },
];

/// Which side refuses a request, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Refuser {
    Provider,
    /// It takes requests to be verbs that are none.
    Relay,
}

#[test]
fn a_request_that_is_refused_fails_in_its_place_and_none_before_it() {
    for (at, refusal) in REFUSALS.iter().enumerate() {
        for refuser in [Refuser::Provider, Refuser::Relay] {
            // Whatever the provider has of places: the marker waits for one.
            for places in [1, 2, 3, 16] {
                let case = format!("case {at}, {refuser:?}, {places} places");
                let mut rig = Rig::new(Sizes { places, ..SIZES });
                rig.core.provider.refuses_remote = Some(REFUSED);
                rig.recv.post(&segments(1, 8)).unwrap();
                let write = |signaled| {
                    SendRequest::write(1, 2)
                        .segments(&ONE_PIECE)
                        .signaled(signaled)
                };
                let mut expected = Vec::new();
                let mut post = |rig: &mut Rig, list: &[bool], status: WcStatus| {
                    for signaled in list {
                        let (index, _) = rig.post(&write(*signaled));
                        if *signaled || status != WcStatus::Success {
                            expected.push((status, 0, index as u16));
                        }
                    }
                };
                post(&mut rig, refusal.in_flight, WcStatus::Success);
                rig.ring();
                assert!(!rig.turn().fails, "{case}");
                post(&mut rig, refusal.before, WcStatus::Success);
                let refused = match refuser {
                    Refuser::Provider => SendRequest::write(REFUSED, 2),
                    Refuser::Relay => SendRequest::send_inval(5),
                };
                let (refused, _) = rig.post(&refused.signaled(refusal.signaled));
                expected.push((WcStatus::LocQpOpErr, 0, refused as u16));
                for _ in refusal.behind {
                    let (index, _) = rig.post(&write(false));
                    expected.push((WcStatus::WrFlushErr, 0, index as u16));
                }
                rig.ring();
                let good = refusal.in_flight.len() + refusal.before.len();
                // One by one: the queue pair fails when all before it are done, and no sooner.
                let mut found = Vec::new();
                let mut idle = 0;
                loop {
                    let turn = rig.turn();
                    found.extend(outcomes(&mut rig, 0));
                    let done = rig.core.provider.sends.len() - rig.core.provider.send_queue.len();
                    assert_eq!(
                        found
                            .iter()
                            .any(|(status, ..)| *status != WcStatus::Success),
                        turn.fails,
                        "{case}"
                    );
                    if turn.fails {
                        assert!(done >= good, "{case}: failed after {done}");
                        break;
                    }
                    assert_eq!(outcomes(&mut rig, 1), [], "{case}: a receive was flushed");
                    // A place that is given back in one turn is used in the next.
                    let carried_out = rig.core.provider.carry_out_send(WcStatus::Success);
                    idle = if carried_out || turn.worked {
                        0
                    } else {
                        idle + 1
                    };
                    assert!(idle < 3, "{case}: nothing to wait for");
                }
                rig.core.provider.has_failed = true;
                rig.core
                    .provider
                    .carry_out_recv(PolledCompletion::default());
                assert!(!rig.core.turn(State::Error).fails);
                found.extend(outcomes(&mut rig, 0));
                assert_eq!(found, expected, "{case}");
                assert_eq!(
                    outcomes(&mut rig, 1),
                    [(WcStatus::WrFlushErr, 0, 0)],
                    "{case}"
                );
                // All that was good went to the device, once, and of the rest a marker at most, of no bytes.
                let sends = &rig.core.provider.sends;
                assert!(
                    sends[..good].iter().all(|sent| sent.sges.len() == 1),
                    "{case}"
                );
                assert!(
                    sends[good..].iter().all(|sent| sent.sges.is_empty()),
                    "{case}"
                );
                assert!(sends.len() <= good + 1, "{case}");
            }
        }
    }
}

const ONE_PIECE: [DataSegment; 1] = [DataSegment {
    len_bytes: 8,
    lkey: 0x100_0000,
    addr: 0x7000_0000_0000,
}];

#[test]
fn a_provider_that_refuses_the_marker_flushes_what_it_has() {
    let mut rig = Rig::new(SIZES);
    rig.core.provider.refuses_remote = Some(REFUSED);
    rig.core.provider.refuses_empty = true;
    let write = SendRequest::write(1, 2).segments(&ONE_PIECE);
    let (first, second) = (rig.post(&write).0, rig.post(&write).0);
    let (refused, _) = rig.post(&SendRequest::write(REFUSED, 2));
    rig.ring();
    assert!(
        rig.turn().fails,
        "nothing would tell when the second is done"
    );
    rig.core.provider.has_failed = true;
    rig.carry_out_all();
    assert!(!rig.core.turn(State::Error).fails);
    let flushed = |index| (WcStatus::WrFlushErr, 0x77, index as u16);
    assert_eq!(
        outcomes(&mut rig, 0),
        [
            flushed(first),
            flushed(second),
            (WcStatus::WrFlushErr, 0, refused as u16)
        ]
    );
    // And in its next generation all is as at first.
    rig.core.provider.reset();
    rig.core.reset();
    rig.cqs.iter().for_each(CqRing::reset);
    rig.next = [0; 2];
    rig.send.reset();
    rig.ring();
    rig.post(&write);
    rig.ring();
    assert!(!rig.turn().fails);
}

#[test]
fn a_failure_before_the_refused_request_is_the_one_reported() {
    let mut rig = Rig::new(SIZES);
    rig.core.provider.refuses_remote = Some(REFUSED);
    let write = |signaled| {
        SendRequest::write(1, 2)
            .segments(&ONE_PIECE)
            .signaled(signaled)
    };
    let (first, _) = rig.post(&write(true));
    let (second, _) = rig.post(&write(false));
    let (third, _) = rig.post(&write(false));
    let (refused, _) = rig.post(&SendRequest::write(REFUSED, 2));
    rig.ring();
    assert!(!rig.turn().fails);
    rig.core.provider.carry_out_send(WcStatus::Success);
    rig.core.provider.carry_out_send(WcStatus::RemAccessErr);
    rig.carry_out_all();
    rig.turn();
    rig.core.turn(State::Error);
    assert_eq!(
        outcomes(&mut rig, 0),
        [
            (WcStatus::Success, 0, first as u16),
            (WcStatus::RemAccessErr, 0x77, second as u16),
            (WcStatus::WrFlushErr, 0x77, third as u16),
            (WcStatus::WrFlushErr, 0, refused as u16),
        ]
    );
}

#[test]
fn a_receive_that_is_refused_fails_the_queue_pair() {
    let mut rig = Rig::new(SIZES);
    rig.core.provider.refuses_recv = Some(1);
    rig.recv.post(&segments(1, 8)).unwrap();
    rig.recv.post(&segments(1, 8)).unwrap();
    rig.ring();
    assert!(rig.turn().fails);
    rig.core.provider.has_failed = true;
    assert_eq!(rig.take(1), None, "the first is still posted");
    rig.core
        .provider
        .carry_out_recv(PolledCompletion::default());
    rig.core.turn(State::Error);
    assert_eq!(
        outcomes(&mut rig, 1),
        [(WcStatus::WrFlushErr, 0, 0), (WcStatus::WrFlushErr, 0, 1)]
    );
}

#[test]
fn nonsense_in_the_ring_or_the_record_ends_the_queue_pair_and_nothing_else() {
    let mut rig = Rig::new(SIZES);
    // More than the ring has: a record that is not one.
    rig.store_record(1, 65);
    rig.store_record(0, 17);
    let idle = RelayProgress {
        worked: false,
        fails: false,
    };
    assert_eq!(rig.turn(), idle);
    // WQEs of zeros: no length, no queue pair.
    rig.store_record(1, 3);
    rig.store_record(0, 0);
    assert!(rig.turn().fails);
    rig.core.turn(State::Error);
    assert_eq!(
        outcomes(&mut rig, 0),
        [
            (WcStatus::LocQpOpErr, 0, 0),
            (WcStatus::WrFlushErr, 0, 1),
            (WcStatus::WrFlushErr, 0, 2)
        ]
    );
    // A completion queue that is broken.
    let mut rig = Rig::new(SIZES);
    rig.post(&SendRequest::write(1, 2));
    rig.ring();
    rig.core.provider.is_broken = true;
    assert!(rig.turn().fails);
    assert!(!rig.core.turn(State::Error).fails);
}

#[test]
fn completions_of_an_earlier_generation_are_dropped() {
    let mut rig = Rig::new(SIZES);
    for generation in 0..3u32 {
        for _ in 0..5 {
            rig.post(&SendRequest::write(1, 2).signaled(true));
            rig.recv.post(&segments(1, 8)).unwrap();
        }
        rig.ring();
        rig.turn();
        for _ in 0..3 {
            rig.core.provider.carry_out_send(WcStatus::Success);
            rig.core
                .provider
                .carry_out_recv(PolledCompletion::default());
        }
        if generation == 1 {
            // Polled, and with no room to pass them on; and one that comes after the drain.
            rig.cqs[0].set_consumer_index(0u32.wrapping_sub(64));
            rig.turn();
        }
        rig.core.is_silent = true;
        assert!(!rig.turn().worked);
        rig.core.provider.reset();
        rig.core.reset();
        rig.cqs.iter().for_each(CqRing::reset);
        rig.next = [0; 2];
        rig.send.reset();
        rig.recv.reset();
        rig.ring();
        assert_eq!(rig.core.provider.waiting(), 0);
        assert!(!rig.turn().worked);
        assert_eq!(
            (rig.take(0), rig.take(1)),
            (None, None),
            "generation {generation}"
        );
    }
    // The new generation works as the first did, from the first place on; and a late word about an old one is about none of it.
    let (index, _) = rig.post(&SendRequest::write(1, 2).signaled(true));
    rig.recv.post(&segments(1, 8)).unwrap();
    rig.ring();
    rig.turn();
    let generation = 1u64 << 32;
    for late in &mut rig.core.provider.completions {
        let completion = PolledCompletion {
            wr_id: generation,
            status: WcStatus::WrFlushErr as u32,
            ..PolledCompletion::default()
        };
        late.push_back((completion, 0));
    }
    assert!(!rig.turn().worked);
    assert_eq!((rig.take(0), rig.take(1)), (None, None));
    rig.carry_out_all();
    rig.turn();
    assert_eq!(index, 0);
    assert_eq!(outcomes(&mut rig, 0), [(WcStatus::Success, 0, 0)]);
}

#[test]
fn receives_that_a_queue_pair_forgot_are_posted_again() {
    let mut rig = Rig::new(SIZES);
    for _ in 0..3 {
        rig.recv.post(&segments(1, 8)).unwrap();
    }
    rig.ring();
    rig.core.turn(State::Init);
    rig.core.provider.reset();
    rig.core.post_again();
    rig.core.turn(State::Init);
    assert_eq!(rig.core.provider.recv_queue.len(), 3);
    for _ in 0..3 {
        rig.core.provider.carry_out_recv(PolledCompletion {
            opcode: ibv_wc_opcode::IBV_WC_RECV,
            ..PolledCompletion::default()
        });
    }
    rig.turn();
    let counters: Vec<_> = outcomes(&mut rig, 1)
        .into_iter()
        .map(|found| found.2)
        .collect();
    assert_eq!(counters, [0, 1, 2]);
}

#[test]
fn states_say_what_is_looked_at() {
    let mut rig = Rig::new(SIZES);
    rig.post(&SendRequest::write(1, 2));
    rig.recv.post(&segments(1, 8)).unwrap();
    rig.ring();
    assert!(!rig.core.turn(State::Reset).worked);
    assert!(rig.core.turn(State::Init).worked);
    assert_eq!(rig.core.provider.recvs.len(), 1);
    assert_eq!(rig.core.provider.sends.len(), 0);
    assert!(!rig.core.turn(State::ReadyToReceive).worked);
    assert!(rig.turn().worked);
    assert_eq!(rig.core.provider.sends.len(), 1);
}

#[test]
fn the_counts_of_the_records_go_round() {
    let mut rig = Rig::new(Sizes {
        send_wqebbs: 32,
        ..SIZES
    });
    let three = segments(3, 8);
    let mut posted = 0u32;
    // Of two WQEBBs now and then, so that some lie across the ring's end.
    while rig.send.producer_index() < 3 * 65_536 {
        let request = match posted % 3 {
            0 => SendRequest::write(posted.into(), 2).segments(&three),
            _ => SendRequest::write(posted.into(), 2).segments(&three[..1]),
        };
        let (index, end) = rig.post(&request.signaled(true));
        rig.recv.post(&three[..1]).unwrap();
        rig.ring();
        rig.turn();
        let sent = rig.core.provider.sends.pop().unwrap();
        assert_eq!(sent.request.remote_addr, u64::from(posted));
        assert_eq!(
            sent.sges.len(),
            if posted.is_multiple_of(3) { 3 } else { 1 }
        );
        rig.core.provider.carry_out_send(WcStatus::Success);
        rig.core.provider.carry_out_recv(PolledCompletion {
            opcode: ibv_wc_opcode::IBV_WC_RECV,
            ..PolledCompletion::default()
        });
        rig.turn();
        assert_eq!(rig.take(0).unwrap().wqe_counter, index as u16);
        assert_eq!(rig.take(1).unwrap().wqe_counter, posted as u16);
        rig.core.provider.recvs.clear();
        posted += 1;
        rig.send.release(end).unwrap();
        rig.recv.release(posted).unwrap();
    }
    assert!(posted > 2 * 65_536);
}

#[test]
fn each_status_maps_to_a_syndrome_and_back() {
    for status in WcStatus::ALL.iter().copied().skip(1) {
        let cqe = Cqe {
            opcode: CqeOpcode::ReqErr,
            syndrome: super::request::syndrome(status as u32),
            ..Cqe::default()
        };
        let known = Syndrome::ALL.iter().any(|known| known.status() == status);
        let expected = if known { status } else { WcStatus::GeneralErr };
        assert_eq!(cqe.status(), expected);
    }
    // Only the library writes this one, and acts on it.
    let found = PolledCompletion {
        status: 5,
        vendor_err: 0x1db,
        ..PolledCompletion::default()
    };
    assert_eq!(super::request::vendor_syndrome(&found), 0);
}

/// A step of a random run.
#[derive(Debug, Clone, Copy)]
enum Step {
    Send { kind: u8, signaled: bool },
    Recv,
    Ring,
    Turn,
    CarryOut(u8),
    Arrive(u8),
    Take(u8),
    Fail,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..5u8, any::<bool>()).prop_map(|(kind, signaled)| Step::Send { kind, signaled }),
        4 => Just(Step::Recv),
        5 => Just(Step::Ring),
        6 => Just(Step::Turn),
        4 => (1..5u8).prop_map(Step::CarryOut),
        3 => (1..4u8).prop_map(Step::Arrive),
        4 => (0..6u8).prop_map(Step::Take),
        1 => Just(Step::Fail),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    /// Whatever the order of posts, rings, turns and completions, and however short the queues: every signaled request completes once and
    /// in order, everything behind a failure is flushed, and nothing is written over. A request that the provider refuses is such a failure.
    #[test]
    fn any_run_ends_with_every_completion_in_its_place(
        steps in steps(),
        places in 1..6usize,
        depth in 1..9u32,
        cqes in prop_oneof![Just(1u32), Just(2), Just(8), Just(64)],
        fails in any::<bool>(),
        refuses in any::<bool>(),
    ) {
        let mut rig = Rig::new(Sizes {
            places,
            depth,
            cqes,
            inline_bytes: 96,
            ..SIZES
        });
        rig.core.provider.refuses_remote = Some(REFUSED);
        let list = segments(2, 16);
        // What is expected of each send, in order: its index, whether it was signaled, its end, and whether it goes to the device.
        let mut sent: VecDeque<(u16, bool, u32, bool)> = VecDeque::new();
        let mut received: u32 = 0;
        let mut refused = Vec::new();
        let mut has_failed = false;
        let mut state = State::ReadyToSend;
        let mut saw_error = false;
        let mut first_error = None;
        let arrival = PolledCompletion { opcode: ibv_wc_opcode::IBV_WC_RECV, ..PolledCompletion::default() };
        // As a relay does it, whose queue pair fails when a turn says so.
        let turn = |rig: &mut Rig, state: &mut State, has_failed: &mut bool| {
            let turn = rig.core.turn(*state);
            if turn.fails {
                // All before the refused one is done, unless the device has failed by itself; and nothing behind it was posted.
                assert!(*has_failed || rig.core.provider.send_queue.is_empty());
                (*state, *has_failed) = (State::Error, true);
                rig.core.provider.has_failed = true;
            }
            turn.worked
        };
        let mut take = |rig: &mut Rig, sent: &mut VecDeque<(u16, bool, u32, bool)>, has_failed: bool| -> Result<bool, TestCaseError> {
            let mut any = false;
            if let Some(cqe) = rig.take(0) {
                any = true;
                let error = cqe.opcode.is_error();
                prop_assert!(!error || has_failed);
                // Those before it were not signaled, and did not fail.
                let end = loop {
                    let Some((index, signaled, end, to_device)) = sent.pop_front() else {
                        return Err(TestCaseError::fail("a completion of nothing"));
                    };
                    if index == cqe.wqe_counter {
                        prop_assert!(signaled || error);
                        break end;
                    }
                    prop_assert!(!(signaled || saw_error && to_device), "{index} was passed over");
                };
                prop_assert!(error || !saw_error, "success behind an error");
                saw_error |= error;
                if error && first_error.is_none() {
                    first_error = Some((cqe.status(), cqe.wqe_counter));
                }
                rig.send.release(end).unwrap();
            }
            if let Some(cqe) = rig.take(1) {
                any = true;
                prop_assert_eq!(cqe.wqe_counter, received as u16);
                received += 1;
                rig.recv.release(received).unwrap();
            }
            Ok(any)
        };
        for step in steps {
            match step {
                Step::Send { kind, signaled } => {
                    let request = match kind {
                        0 => SendRequest::nop(),
                        1 => SendRequest::send().inline(&[7; 90]),
                        2 => SendRequest::write(1, 2).segments(&list),
                        3 if refuses => SendRequest::write(REFUSED, 2).segments(&list),
                        _ => SendRequest::read(1, 2).segments(&list[..1]),
                    };
                    if let Ok(posted) = rig.send.post(&request.signaled(signaled)) {
                        sent.push_back((posted.index as u16, signaled, posted.end(), kind != 0));
                        if kind == 3 && refuses {
                            refused.push(posted.index as u16);
                        }
                    }
                }
                Step::Recv => {
                    let _ = rig.recv.post(&list[..1]);
                }
                Step::Ring => {
                    rig.ring();
                    if rig.core.post(state) {
                        prop_assert!(!rig.core.send.has_announced() && !rig.core.recv.has_announced());
                    } else {
                        turn(&mut rig, &mut state, &mut has_failed);
                    }
                }
                Step::Turn => {
                    turn(&mut rig, &mut state, &mut has_failed);
                }
                Step::CarryOut(count) => {
                    for _ in 0..count {
                        rig.core.provider.carry_out_send(WcStatus::Success);
                    }
                }
                Step::Arrive(count) => {
                    for _ in 0..count {
                        rig.core.provider.carry_out_recv(arrival);
                    }
                }
                Step::Take(count) => {
                    for _ in 0..count {
                        take(&mut rig, &mut sent, has_failed)?;
                    }
                }
                Step::Fail if fails => {
                    has_failed |= rig.core.provider.carry_out_send(WcStatus::RetryExcErr);
                }
                Step::Fail => {}
            }
        }
        // To the end: everything is rung, carried out, and taken.
        rig.ring();
        let mut idle = 0;
        while idle < 3 {
            let mut worked = turn(&mut rig, &mut state, &mut has_failed);
            worked |= rig.core.provider.carry_out_send(WcStatus::Success);
            worked |= rig.core.provider.carry_out_recv(arrival);
            worked |= take(&mut rig, &mut sent, has_failed)?;
            idle = if worked { 0 } else { idle + 1 };
        }
        prop_assert_eq!(received, rig.recv.producer_index());
        // What is left was not signaled, and everything of it was done. An unsignaled NOP completes in no case.
        let left = sent.iter().filter(|(_, signaled, _, to_device)| *signaled || saw_error && *to_device).count();
        prop_assert_eq!(left, 0, "{:?}", sent);
        prop_assert!(rig.core.provider.send_queue.is_empty());
        match first_error {
            Some((WcStatus::LocQpOpErr, index)) => prop_assert_eq!(Some(&index), refused.first()),
            Some((status, _)) => prop_assert!(fails && status == WcStatus::RetryExcErr, "{status:?}"),
            None => prop_assert!(refused.is_empty() || has_failed),
        }
    }
}
