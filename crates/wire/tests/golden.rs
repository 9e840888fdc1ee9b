//! The bytes of every format, written out by hand from the layouts of rdma-core's `mlx5dv.h`.

mod fixture;

use doorbell_wire::bytecode::{Fence, Program, ProgramOp, Role, Targets};
use doorbell_wire::mlx5::{
    Cqe, CqeOpcode, DataSegment, Datagram, Doorbell, Opcode, Posted, RemoteAtomic, RemoteSegment,
    Segment, SendRequest, WindowOpening, WindowUpdate, Wqe, parse_recv,
};
use doorbell_wire::verbs::WcStatus;
use fixture::{Completions, Recv, Send};

const LOCAL: [DataSegment; 2] = [
    DataSegment {
        len_bytes: 0x40,
        lkey: 0x0102_0304,
        addr: 0x1122_3344_5566_7788,
    },
    DataSegment {
        len_bytes: 0x1000,
        lkey: 0x0506_0708,
        addr: 0x99aa_bbcc_ddee_ff00,
    },
];
const REMOTE: u64 = 0x0123_4567_89ab_cdef;
const RKEY: u32 = 0xcafe_f00d;
const WORD: [DataSegment; 1] = [DataSegment {
    len_bytes: 8,
    lkey: 0x0102_0304,
    addr: 0x1122_3344_5566_7788,
}];

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// Posts at WQEBB count 3, checks the bytes, and gives them.
#[track_caller]
fn emits(request: SendRequest<'_>, expected: &str) -> Vec<u8> {
    let mut send = Send::new(16);
    for _ in 0..3 {
        send.queue.post(&SendRequest::nop()).unwrap();
    }
    let posted = send.queue.post(&request).unwrap();
    let bytes = send.wqe_bytes(3);
    assert_eq!(bytes, hex(expected));
    assert_eq!(
        posted,
        Posted {
            index: 3,
            wqebbs: bytes.len().div_ceil(64) as u32
        }
    );
    bytes
}

const DATA_0: &str = "00000040 01020304 1122334455667788";
const DATA_1: &str = "00001000 05060708 99aabbccddeeff00";
const RADDR: &str = "0123456789abcdef cafef00d 00000000";

#[test]
fn nop() {
    emits(
        SendRequest::nop().signaled(true),
        "00000300 12345601 00000008 00000000",
    );
}

#[test]
fn send() {
    let bytes = emits(
        SendRequest::send().segments(&LOCAL).solicited(true),
        &format!("0000030a 12345603 00000002 00000000 {DATA_0} {DATA_1}"),
    );
    let wqe = Wqe::parse(&bytes).unwrap();
    assert_eq!(
        (wqe.ctrl.opcode, wqe.ctrl.index, wqe.ctrl.qpn, wqe.ctrl.ds),
        (Some(Opcode::Send), 3, 0x12_3456, 3)
    );
    assert_eq!(
        (wqe.ctrl.signaled, wqe.ctrl.solicited, wqe.ctrl.fence),
        (false, true, false)
    );
    assert_eq!(
        wqe.segments().collect::<Vec<_>>(),
        LOCAL.map(Segment::Memory)
    );
    assert_eq!(
        (wqe.total_len(), wqe.remote, wqe.atomic),
        (0x1040, None, None)
    );
}

/// The mode is that of UCX (`UCT_IB_MLX5_WQE_CTRL_FLAG_STRONG_ORDER`, src/uct/ib/mlx5/ib_mlx5.h); mlx5dv.h has no name for it.
#[test]
fn an_ordered_request_has_the_mode_of_strong_ordering() {
    for fence in [false, true] {
        let bytes = emits(
            SendRequest::write(0x1000, 7)
                .segments(&LOCAL[..1])
                .fence(fence)
                .ordered(true),
            &format!(
                "00000308 12345603 00000060 00000000 00000000 00001000 00000007 00000000 {DATA_0}"
            ),
        );
        let wqe = Wqe::parse(&bytes).unwrap();
        assert_eq!((wqe.ctrl.ordered, wqe.ctrl.fence), (true, false));
    }
}

#[test]
fn send_imm() {
    let bytes = emits(
        SendRequest::send_imm(0xaabb_ccdd)
            .segments(&LOCAL[..1])
            .signaled(true)
            .fence(true),
        &format!("0000030b 12345602 00000088 aabbccdd {DATA_0}"),
    );
    let wqe = Wqe::parse(&bytes).unwrap();
    assert_eq!(
        (wqe.ctrl.imm, wqe.ctrl.fence, wqe.ctrl.signaled),
        (0xaabb_ccdd, true, true)
    );
}

#[test]
fn send_inline() {
    // 12 bytes fill a segment; 13 take a second one, padded.
    emits(
        SendRequest::send().inline(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        "0000030a 12345602 00000000 00000000 8000000c 01020304 05060708 090a0b0c",
    );
    let bytes = emits(
        SendRequest::send()
            .inline(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
            .signaled(true),
        "0000030a 12345603 00000008 00000000 8000000d 01020304 05060708 090a0b0c 0d000000 00000000 00000000 00000000",
    );
    let wqe = Wqe::parse(&bytes).unwrap();
    assert_eq!(
        wqe.segments().collect::<Vec<_>>(),
        [Segment::Inline(&[
            1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13
        ])]
    );
    // Nothing inline is nothing at all.
    emits(
        SendRequest::send().inline(&[]),
        "0000030a 12345601 00000000 00000000",
    );
}

#[test]
fn rdma_write() {
    let bytes = emits(
        SendRequest::write(REMOTE, RKEY)
            .segments(&LOCAL[..1])
            .signaled(true)
            .imm(7),
        &format!("00000308 12345603 00000008 00000000 {RADDR} {DATA_0}"),
    );
    assert_eq!(
        Wqe::parse(&bytes).unwrap().remote,
        Some(RemoteSegment {
            addr: REMOTE,
            rkey: RKEY
        })
    );
    // The first 8 bytes are the doorbell.
    let doorbell = Doorbell::parse(u64::from_ne_bytes(bytes[..8].try_into().unwrap()));
    assert_eq!(
        doorbell,
        Doorbell {
            index: 3,
            opcode: 8,
            qpn: 0x12_3456,
            ds: 3
        }
    );
}

#[test]
fn rdma_write_inline() {
    emits(
        SendRequest::write(REMOTE, RKEY).inline(b"doorbell"),
        &format!("00000308 12345603 00000000 00000000 {RADDR} 80000008 646f6f72 62656c6c 00000000"),
    );
}

#[test]
fn rdma_write_imm() {
    emits(
        SendRequest::write_imm(REMOTE, RKEY, 0x1234_5678).segments(&LOCAL),
        &format!("00000309 12345604 00000000 12345678 {RADDR} {DATA_0} {DATA_1}"),
    );
}

#[test]
fn rdma_read() {
    emits(
        SendRequest::read(REMOTE, RKEY).segments(&LOCAL),
        &format!("00000310 12345604 00000000 00000000 {RADDR} {DATA_0} {DATA_1}"),
    );
}

#[test]
fn atomics() {
    let data = "00000008 01020304 1122334455667788";
    let bytes = emits(
        SendRequest::compare_swap(REMOTE, RKEY, 0xa0a1_a2a3_a4a5_a6a7, 0xb0b1_b2b3_b4b5_b6b7)
            .segments(&WORD),
        &format!(
            "00000311 12345604 00000000 00000000 {RADDR} b0b1b2b3b4b5b6b7 a0a1a2a3a4a5a6a7 {data}"
        ),
    );
    let operands = RemoteAtomic {
        swap_or_add: 0xb0b1_b2b3_b4b5_b6b7,
        compare: 0xa0a1_a2a3_a4a5_a6a7,
    };
    assert_eq!(Wqe::parse(&bytes).unwrap().atomic, Some(operands));
    emits(
        SendRequest::fetch_add(REMOTE, RKEY, 5).segments(&WORD),
        &format!(
            "00000312 12345604 00000000 00000000 {RADDR} 0000000000000005 0000000000000000 {data}"
        ),
    );
}

#[test]
fn pieces_of_length_0_are_left_out() {
    let nothing = DataSegment {
        len_bytes: 0,
        lkey: 9,
        addr: 9,
    };
    emits(
        SendRequest::send().segments(&[nothing, LOCAL[0], nothing, LOCAL[1], nothing]),
        &format!("0000030a 12345603 00000000 00000000 {DATA_0} {DATA_1}"),
    );
}

#[test]
fn nop_over_a_request() {
    let mut send = Send::new(16);
    let posted = send
        .queue
        .post(&SendRequest::write(REMOTE, RKEY).inline(&[7; 100]))
        .unwrap();
    assert_eq!(posted.wqebbs, 3);
    let tail = send.memory.read(16, 176);
    send.queue.overwrite_with_nop(posted, true).unwrap();
    assert_eq!(
        send.memory.read(0, 16),
        hex("00000000 1234560c 00000008 00000000")
    );
    assert_eq!(send.memory.read(16, 176), tail);
    let bytes = send.wqe_bytes(0);
    let wqe = Wqe::parse(&bytes).unwrap();
    assert_eq!(
        (wqe.ctrl.opcode, wqe.ctrl.wqebbs(), wqe.ctrl.signaled),
        (Some(Opcode::Nop), 3, true)
    );
    assert_eq!(wqe.segments().count(), 0);
}

#[test]
fn receive() {
    let mut recv = Recv::new(4, 3);
    assert_eq!(recv.stride, 64);
    recv.queue.post(&LOCAL).unwrap();
    recv.queue.post(&[]).unwrap();
    let end = "00000000 00000100 0000000000000000";
    assert_eq!(
        recv.wqe_bytes(0)[..48],
        hex(&format!("{DATA_0} {DATA_1} {end}"))
    );
    assert_eq!(recv.wqe_bytes(1)[..16], hex(end));
    assert_eq!(parse_recv(&recv.wqe_bytes(0)).collect::<Vec<_>>(), LOCAL);
    assert_eq!(parse_recv(&recv.wqe_bytes(1)).count(), 0);
    // A full stride needs no end.
    let mut recv = Recv::new(4, 2);
    recv.queue.post(&LOCAL).unwrap();
    assert_eq!(recv.wqe_bytes(0), hex(&format!("{DATA_0} {DATA_1}")));
    assert_eq!(parse_recv(&recv.wqe_bytes(0)).collect::<Vec<_>>(), LOCAL);
}

#[test]
fn doorbell_of_a_commit() {
    let mut send = Send::new(16);
    send.queue
        .post(&SendRequest::write(REMOTE, RKEY).segments(&LOCAL[..1]))
        .unwrap();
    send.queue
        .post(&SendRequest::send().segments(&LOCAL))
        .unwrap();
    let mut program = send.program();
    send.queue.commit(&mut program).unwrap();
    let ops: Vec<_> = program.ops().collect();
    let [
        ProgramOp::StoreDword {
            at: record,
            value: count,
        },
        ProgramOp::Fence(fence),
        ProgramOp::StoreQword {
            at: uar,
            value: doorbell,
        },
    ] = ops[..]
    else {
        panic!("{ops:?}");
    };
    assert_eq!((record.target, record.offset), (send.record.id(), 4));
    assert_eq!(count.to_ne_bytes(), [0, 0, 0, 2]);
    assert_eq!(fence, Fence::WRITE | Fence::FROM_CPU | Fence::SYSTEM);
    assert_eq!((uar.target, uar.offset), (send.uar.id(), 0x800));
    assert_eq!(doorbell.to_ne_bytes().to_vec(), hex("0000010a 12345603"));
}

#[test]
fn bytecode() {
    let mut targets = Targets::new();
    targets.register("first", Role::Memory, 8);
    let page = targets.register("page", Role::Uar, 4096);
    let mut program = Program::new(&targets);
    program
        .store_dword(page.dword(0x104).unwrap(), 0x0a0b_0c0d)
        .unwrap();
    program
        .store_qword(page.qword(0x108).unwrap(), 0x0102_0304_0506_0708)
        .unwrap();
    program
        .copy_block(
            page.block(0x800, 32).unwrap(),
            &std::array::from_fn::<u8, 32, _>(|i| i as u8),
        )
        .unwrap();
    program.poll_geq(page.dword(0).unwrap(), 1).unwrap();
    program.poll_and(page.dword(4).unwrap(), 2).unwrap();
    program.poll_nor(page.dword(8).unwrap(), 3).unwrap();
    program
        .fence(Fence::READ | Fence::FROM_HCA | Fence::PEER)
        .unwrap();
    let expected = hex("
        01 02 0400 01000000 0401000000000000 0d0c0b0a00000000
        02 02 0800 01000000 0801000000000000 0807060504030201
        03 02 2000 01000000 0008000000000000 0000000000000000
        000102030405060708090a0b0c0d0e0f1011121314151617
        18191a1b1c1d1e1f 0000000000000000 0000000000000000
        04 02 0400 01000000 0000000000000000 0100000000000000
        05 02 0400 01000000 0400000000000000 0200000000000000
        06 02 0400 01000000 0800000000000000 0300000000000000
        07 00 0000 00000000 0000000000000000 2102000000000000");
    assert_eq!(program.as_bytes(), expected);
    assert_eq!(program.as_bytes().as_ptr().align_offset(8), 0);
}

#[test]
fn datagram() {
    let wqe = hex("
        0000070a 00123405 00000008 00000000
        11111111 00000000 80abcdef 13020007
        00000000 01005e000001 a5 40 40212345
        fe800000000000005c0f7c0000000007
        00000040 00001234 0000000010000000");
    let wqe = Wqe::parse_datagram(&wqe).unwrap();
    let expected = Datagram {
        qkey: 0x1111_1111,
        qpn: 0xab_cdef,
        static_rate: 1,
        sl: 3,
        path_bits: 2,
        lid: 7,
        mac: [1, 0, 0x5e, 0, 0, 1],
        traffic_class: 0xa5,
        hop_limit: 0x40,
        has_grh: true,
        gid_index: 2,
        flow_label: 0x1_2345,
        gid: hex("fe800000000000005c0f7c0000000007").try_into().unwrap(),
    };
    assert_eq!(wqe.datagram(), Some(expected));
    assert_eq!(wqe.total_len(), 64);
}

#[test]
fn window() {
    let head = "00000025 0012340c 00000028 00050601";
    let control = "90000000 00020000 0000000020386041".to_owned() + &"00".repeat(32);
    let context = "00003000 12345602 0000000000000000 0000000000000000 0000000000001000".to_owned()
        + &"00".repeat(32);
    let klm = "00001000 00000a01 0000000000007000".to_owned() + &"00".repeat(48);
    let wqe = hex(&format!("{head} {control} {context} {klm}"));
    let expected = WindowUpdate {
        key: 0x0005_0601,
        variant: 2,
        qpn: Some(0x12_3456),
        opens: Some(WindowOpening {
            region: 0xa01,
            addr: 0x7000,
            len_bytes: 0x1000,
            iova: 0,
            access: 6,
        }),
    };
    assert_eq!(Wqe::parse(&wqe).unwrap().window(), Some(expected));
    assert_eq!(expected.new_key(), 0x0005_0602);
}

#[test]
fn cqe() {
    let mut bytes = [0; 64];
    bytes[22..24].copy_from_slice(&hex("0005"));
    bytes[24..28].copy_from_slice(&hex("16abcdef"));
    bytes[32..36].copy_from_slice(&hex("01020304"));
    bytes[36..40].copy_from_slice(&hex("aabbccdd"));
    bytes[44..48].copy_from_slice(&hex("00001000"));
    bytes[48..56].copy_from_slice(&hex("1122334455667788"));
    bytes[56..60].copy_from_slice(&hex("0b123456"));
    bytes[60..64].copy_from_slice(&hex("beef5a33"));
    let cqe = Cqe::parse(&bytes);
    let expected = Cqe {
        opcode: CqeOpcode::RespSendImm,
        qpn: 0x12_3456,
        wqe_counter: 0xbeef,
        byte_count: 0x1000,
        imm: 0xaabb_ccdd,
        source_qpn: 0xab_cdef,
        source_lid: 5,
        sl: 6,
        grh: 1,
        srqn_uidx: 0x0102_0304,
        syndrome: 0,
        vendor_syndrome: 0,
        timestamp: 0x1122_3344_5566_7788,
        send_opcode: 0x0b,
        signature: 0x5a,
        solicited: true,
        owner: true,
    };
    assert_eq!(cqe, expected);
    assert_eq!(cqe.status(), WcStatus::Success);
    assert_eq!(expected.encode(true), bytes);
    bytes[63] = 0x32;
    assert_eq!(expected.encode(false), bytes);
}

#[test]
fn error_cqe() {
    let mut bytes = [0; 64];
    bytes[32..36].copy_from_slice(&hex("01020304"));
    bytes[54..56].copy_from_slice(&hex("8813"));
    bytes[56..60].copy_from_slice(&hex("08123456"));
    bytes[60..64].copy_from_slice(&hex("000700d1"));
    let cqe = Cqe::parse(&bytes);
    let expected = Cqe {
        opcode: CqeOpcode::ReqErr,
        qpn: 0x12_3456,
        wqe_counter: 7,
        srqn_uidx: 0x0102_0304,
        syndrome: 0x13,
        vendor_syndrome: 0x88,
        send_opcode: 8,
        owner: true,
        ..Cqe::default()
    };
    assert_eq!(cqe, expected);
    assert_eq!(cqe.status(), WcStatus::RemAccessErr);
    assert_eq!(expected.encode(true), bytes);
    assert_eq!(
        Cqe {
            syndrome: 0xff,
            ..cqe
        }
        .status(),
        WcStatus::GeneralErr
    );
}

#[test]
fn wait_for_a_cqe() {
    let completions = Completions::new(8);
    let mut program = completions.program();
    completions.queue.peek(5, &mut program).unwrap();
    completions.queue.abort_peek(5);
    completions.queue.peek(13, &mut program).unwrap();
    let expected = hex("
        06 03 0400 00000000 7c01000000000000 fffffffe00000000
        01 04 0400 01000000 1400000000000000 0000000000000000
        05 03 0400 00000000 7c01000000000000 0000000100000000
        01 04 0400 01000000 1400000000000000 0000000000000000");
    assert_eq!(program.as_bytes(), expected);
}

#[test]
fn disassembly() {
    let mut send = Send::new(16);
    send.queue
        .post(&SendRequest::write(REMOTE, RKEY).segments(&LOCAL[..1]))
        .unwrap();
    let mut program = send.program();
    send.queue.commit(&mut program).unwrap();
    assert_eq!(
        program.disassemble(&send.targets).to_string(),
        "STORE_DWORD  record+0x4                   0x01000000  ; doorbell record: send counter = 1\n\
         FENCE        writes from CPU, seen by system\n\
         STORE_QWORD  uar+0x800                    0x0356341208000000  ; UAR: ring WQE 0 (RDMA_WRITE) of qp 0x123456"
    );
    send.queue.post(&SendRequest::send().inline(b"x")).unwrap();
    program.clear();
    send.queue.commit_blueflame(&mut program).unwrap();
    assert_eq!(
        program.to_string(),
        "STORE_DWORD  doorbell record#0+0x4        0x02000000  ; doorbell record: send counter = 2\n\
         FENCE        writes from CPU, seen by system\n\
         COPY_BLOCK   UAR#1+0x900                  64 bytes  ; UAR: ring WQE 1 (SEND) of qp 0x123456, by BlueFlame\n\
         FENCE        writes from CPU, seen by system"
    );
    let completions = Completions::new(8);
    let mut program = completions.program();
    completions.queue.peek(5, &mut program).unwrap();
    completions.queue.peek(14, &mut program).unwrap();
    assert_eq!(
        program.disassemble(&completions.targets).to_string(),
        "POLL_NOR     cq+0x17c                     0xfeffffff  ; CQE 5, owner 0 (even lap)\n\
         STORE_DWORD  marks+0x14                   0x00000000  ; mark 5 = 0\n\
         POLL_AND     cq+0x1bc                     0x01000000  ; CQE 6, owner 1 (odd lap)\n\
         STORE_DWORD  marks+0x18                   0x00000000  ; mark 6 = 0"
    );
}

#[test]
fn wqe_as_text() {
    let bytes = emits(
        SendRequest::write_imm(REMOTE, RKEY, 5)
            .inline(b"hello")
            .signaled(true),
        &format!("00000309 12345603 00000008 00000005 {RADDR} 80000005 68656c6c 6f000000 00000000"),
    );
    assert_eq!(
        Wqe::parse(&bytes).unwrap().to_string(),
        "control\n   \
         0  opmod     0x00\n   \
         1  index     3\n   \
         3  opcode    0x09 (RDMA_WRITE_IMM)\n   \
         4  qpn       0x123456\n   \
         7  ds        3 (48 bytes)\n  \
         11  fm_ce_se  0x08 signaled\n  \
         12  imm       0x00000005\n\
         remote\n  \
         16  addr      0x0123456789abcdef\n  \
         24  rkey      0xcafef00d\n\
         inline\n  \
         32  length    5\n  \
         36  bytes     68 65 6c 6c 6f"
    );
}
