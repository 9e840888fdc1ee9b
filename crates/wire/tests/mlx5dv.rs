//! Our bytes against rdma-core's own header: `mlx5dv_oracle.c` builds the same requests out of the structs of
//! `<infiniband/mlx5dv.h>`. Needs the header (Debian: libibverbs-dev) and a C compiler, no card and no library.

mod fixture;
mod requests;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use doorbell_wire::mlx5::{
    CQE_BYTES, Cqe, CqeOpcode, Datagram, Opcode, Syndrome, WQEBB_BYTES, WindowOpening,
    WindowUpdate, Wqe,
};
use doorbell_wire::verbs::WcStatus;
use fixture::{Recv, Send};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use requests::{OPCODES, case, hex, list, runner, segment};
use waived::waived;

const CASES: usize = 6000;

/// The oracle, compiled; or none, if the header is missing.
fn oracle(test: &str) -> Option<PathBuf> {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let probe = directory.join(format!("{test}.probe.c"));
    std::fs::write(&probe, "#include <infiniband/mlx5dv.h>\n").unwrap();
    let probed = Command::new("cc")
        .args(["-fsyntax-only"])
        .arg(&probe)
        .output();
    match probed {
        Ok(output) if output.status.success() => {}
        Ok(_) => {
            waived(
                test,
                "<infiniband/mlx5dv.h> does not compile here (Debian: libibverbs-dev)",
            );
            return None;
        }
        Err(error) => {
            waived(test, &format!("no C compiler: {error}"));
            return None;
        }
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mlx5dv_oracle.c");
    let program = directory.join(format!("{test}.oracle"));
    let output = Command::new("cc")
        .args(["-O1", "-Wall", "-o"])
        .arg(&program)
        .arg(source)
        .output()
        .unwrap();
    // The header is there: from here on, a failure is a failure.
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(program)
}

/// One answer a question.
fn ask(oracle: &Path, questions: &[String]) -> Vec<String> {
    let mut child = Command::new(oracle)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let text = questions.join("\n");
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "the oracle did not understand");
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

const MAX_SEGMENTS: usize = 30;
const MAX_INLINE: usize = 500;

#[test]
fn send_wqes() {
    let Some(oracle) = oracle("send_wqes") else {
        return;
    };
    let mut runner = runner();
    let strategy = case(&OPCODES, MAX_SEGMENTS, MAX_INLINE);
    let mut questions = Vec::new();
    let mut ours = Vec::new();
    // Several queues for several numbers; each goes round its small ring hundreds of times.
    for qpn in [0, 1, 0x12, 0x80_0000, 0xff_ffff] {
        let mut send = Send::with(16, qpn, MAX_SEGMENTS as u32, MAX_INLINE as u32);
        for _ in 0..CASES / 5 {
            let case = strategy.new_tree(&mut runner).unwrap().current();
            let posted = send.queue.post(&case.request()).unwrap();
            send.queue.release(posted.end()).unwrap();
            ours.push(hex(&send.wqe_bytes(posted.index)));
            questions.push(case.question(qpn, posted.index));
        }
    }
    let theirs = ask(&oracle, &questions);
    assert_eq!(theirs.len(), ours.len());
    for ((theirs, ours), question) in theirs.iter().zip(&ours).zip(&questions) {
        assert_eq!(ours, theirs, "{question}");
    }
}

#[test]
fn receive_wqes() {
    let Some(oracle) = oracle("receive_wqes") else {
        return;
    };
    let mut runner = runner();
    let mut questions = Vec::new();
    let mut ours = Vec::new();
    for max_segments in 1..=16 {
        let strategy = prop::collection::vec(segment(), 0..=max_segments);
        let mut recv = Recv::new(4, max_segments as u32);
        for _ in 0..100 {
            let segments = strategy.new_tree(&mut runner).unwrap().current();
            let posted = recv.queue.post(&segments).unwrap();
            recv.queue.release(posted.index + 1).unwrap();
            ours.push(hex(&recv.wqe_bytes(posted.index)));
            questions.push(format!("recv {:x} {}", recv.stride, list(&segments)));
        }
    }
    let theirs = ask(&oracle, &questions);
    assert_eq!(theirs.len(), ours.len());
    for ((theirs, ours), question) in theirs.iter().zip(&ours).zip(&questions) {
        // Behind the end of a list the stride is not written.
        assert_eq!(&ours[..theirs.len()], theirs, "{question}");
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

#[test]
fn datagram_wqes() {
    let Some(oracle) = oracle("datagram_wqes") else {
        return;
    };
    let mut runner = runner();
    let strategy = (
        any::<[u8; 16]>(),
        any::<[u8; 16]>(),
        any::<u32>(),
        any::<bool>(),
    );
    let mut questions = Vec::new();
    let mut wanted = Vec::new();
    for _ in 0..500 {
        let (gid, bytes, qkey, has_grh) = strategy.new_tree(&mut runner).unwrap().current();
        let word = |at: usize| u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]]);
        let want = Datagram {
            qkey,
            qpn: word(0),
            static_rate: bytes[3] & 0xf,
            sl: bytes[3] >> 4,
            path_bits: bytes[4] & 0x7f,
            lid: word(5) as u16,
            mac: std::array::from_fn(|i| bytes[8 + i]),
            traffic_class: bytes[14],
            hop_limit: bytes[15],
            has_grh,
            gid_index: bytes[1],
            flow_label: word(9) & 0xf_ffff,
            gid,
        };
        questions.push(format!(
            "ud {qkey:x} {:x} {:x} {:x} {:x} {:x} {} {:x} {:x} {:x} {:x} {:x} {} {}",
            want.qpn,
            want.static_rate,
            want.sl,
            want.path_bits,
            want.lid,
            hex(&want.mac),
            want.traffic_class,
            want.hop_limit,
            u8::from(has_grh),
            want.gid_index,
            want.flow_label,
            hex(&gid[..8]),
            hex(&gid[8..]),
        ));
        wanted.push(want);
    }
    let theirs = ask(&oracle, &questions);
    assert_eq!(theirs.len(), wanted.len());
    for ((theirs, want), question) in theirs.iter().zip(&wanted).zip(&questions) {
        let bytes = unhex(theirs);
        let wqe = Wqe::parse_datagram(&bytes).unwrap();
        assert_eq!(wqe.datagram(), Some(*want), "{question}");
        assert_eq!(wqe.total_len(), 8);
    }
}

#[test]
fn window_wqes() {
    let Some(oracle) = oracle("window_wqes") else {
        return;
    };
    let mut runner = runner();
    let strategy = (
        any::<[u32; 4]>(),
        any::<u64>(),
        any::<u32>(),
        0..16u32,
        any::<u8>(),
    );
    let mut questions = Vec::new();
    let mut wanted = Vec::new();
    for _ in 0..500 {
        let ([key, variant, qpn, region], addr, len, access, form) =
            strategy.new_tree(&mut runner).unwrap().current();
        let (kind, opens, zero) = (1 + (form & 1), form & 2 != 0, form & 4 != 0);
        let (qpn, len) = (qpn & 0xff_ffff, if opens { len.max(1) } else { 0 });
        questions.push(format!(
            "umr {kind} {key:x} {variant:x} {qpn:x} {region:x} {addr:x} {len:x} {access:x} {}",
            u8::from(zero)
        ));
        wanted.push(WindowUpdate {
            key,
            variant: variant as u8,
            qpn: (kind == 2).then_some(if opens { qpn } else { 0xff_ffff }),
            opens: opens.then_some(WindowOpening {
                region,
                addr,
                len_bytes: len.into(),
                iova: if zero { 0 } else { addr },
                access,
            }),
        });
    }
    let theirs = ask(&oracle, &questions);
    assert_eq!(theirs.len(), wanted.len());
    for ((theirs, want), question) in theirs.iter().zip(&wanted).zip(&questions) {
        let bytes = unhex(theirs);
        assert_eq!(
            Wqe::parse(&bytes).unwrap().window(),
            Some(*want),
            "{question}"
        );
        // Cut short, it is not a valid WQE.
        assert!(Wqe::parse(&bytes[..bytes.len() - 16]).is_err());
    }
}

#[test]
fn cqes() {
    let Some(oracle) = oracle("cqes") else { return };
    let mut runner = runner();
    let strategy = prop::array::uniform32(any::<u16>());
    let mut questions = Vec::new();
    let mut ours = Vec::new();
    let mut errors = 0;
    for _ in 0..CASES {
        let words = strategy.new_tree(&mut runner).unwrap().current();
        let bytes: [u8; CQE_BYTES] = std::array::from_fn(|i| words[i / 2].to_ne_bytes()[i % 2]);
        let cqe = Cqe::parse(&bytes);
        if cqe.opcode == CqeOpcode::ReleasedErr {
            // No device writes it, so mlx5dv.h does not know it.
            continue;
        }
        errors += u32::from(cqe.opcode.is_error());
        ours.push(format!(
            "{:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x}",
            cqe.opcode.raw(),
            cqe.qpn,
            cqe.wqe_counter,
            cqe.byte_count,
            cqe.imm,
            cqe.srqn_uidx,
            cqe.syndrome,
            cqe.vendor_syndrome,
            cqe.timestamp,
            cqe.send_opcode,
            cqe.signature,
            u8::from(cqe.solicited),
            u8::from(cqe.owner),
            cqe.source_lid,
            cqe.source_qpn,
            cqe.sl,
            cqe.grh,
        ));
        questions.push(format!("cqe {}", hex(&bytes)));
    }
    assert!(errors > 100, "both forms have their turn");
    let theirs = ask(&oracle, &questions);
    assert_eq!(theirs.len(), ours.len());
    for ((theirs, ours), question) in theirs.iter().zip(&ours).zip(&questions) {
        assert_eq!(ours, theirs, "{question}");
    }
}

#[test]
fn constants() {
    let Some(oracle) = oracle("constants") else {
        return;
    };
    let mut theirs: BTreeMap<String, u64> = ask(&oracle, &["constants".to_owned()])
        .iter()
        .map(|line| {
            let (name, value) = line.split_once('=').unwrap();
            (name.to_owned(), u64::from_str_radix(value, 16).unwrap())
        })
        .collect();
    let opcodes = [
        ("NOP", Opcode::Nop),
        ("SEND_INVAL", Opcode::SendInval),
        ("RDMA_WRITE", Opcode::RdmaWrite),
        ("RDMA_WRITE_IMM", Opcode::RdmaWriteImm),
        ("SEND", Opcode::Send),
        ("SEND_IMM", Opcode::SendImm),
        ("RDMA_READ", Opcode::RdmaRead),
        ("ATOMIC_CS", Opcode::AtomicCs),
        ("ATOMIC_FA", Opcode::AtomicFa),
    ]
    .map(|(name, opcode)| (format!("MLX5_OPCODE_{name}"), opcode as u64));
    let cqe_opcodes = [
        ("REQ", CqeOpcode::Req),
        ("RESP_WR_IMM", CqeOpcode::RespWriteImm),
        ("RESP_SEND", CqeOpcode::RespSend),
        ("RESP_SEND_IMM", CqeOpcode::RespSendImm),
        ("RESP_SEND_INV", CqeOpcode::RespSendInv),
        ("REQ_ERR", CqeOpcode::ReqErr),
        ("RESP_ERR", CqeOpcode::RespErr),
        ("INVALID", CqeOpcode::Invalid),
    ]
    .map(|(name, opcode)| (format!("MLX5_CQE_{name}"), u64::from(opcode.raw())));
    let syndromes = [
        ("LOCAL_LENGTH", Syndrome::LocalLength),
        ("LOCAL_QP_OP", Syndrome::LocalQpOp),
        ("LOCAL_PROT", Syndrome::LocalProt),
        ("WR_FLUSH", Syndrome::WrFlush),
        ("MW_BIND", Syndrome::MwBind),
        ("BAD_RESP", Syndrome::BadResp),
        ("LOCAL_ACCESS", Syndrome::LocalAccess),
        ("REMOTE_INVAL_REQ", Syndrome::RemoteInvalReq),
        ("REMOTE_ACCESS", Syndrome::RemoteAccess),
        ("REMOTE_OP", Syndrome::RemoteOp),
        ("TRANSPORT_RETRY_EXC", Syndrome::TransportRetryExc),
        ("RNR_RETRY_EXC", Syndrome::RnrRetryExc),
        ("REMOTE_ABORTED", Syndrome::RemoteAborted),
    ]
    .map(|(name, syndrome)| (format!("MLX5_CQE_SYNDROME_{name}_ERR"), syndrome as u64));
    let statuses = WcStatus::ALL
        .iter()
        .map(|status| (status.verbs_name().to_owned(), *status as u64));
    let others = [
        ("MLX5_OPCODE_UMR", u64::from(WindowUpdate::OPCODE)),
        ("MLX5_SEND_WQE_BB", WQEBB_BYTES as u64),
        ("MLX5_INLINE_SEG", 0x8000_0000),
        ("MLX5_INVALID_LKEY", 0x100),
        ("MLX5_RCV_DBR", 0),
        ("MLX5_SND_DBR", 1),
        ("sizeof(struct mlx5_cqe64)", CQE_BYTES as u64),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    for (name, value) in opcodes
        .into_iter()
        .chain(cqe_opcodes)
        .chain(syndromes)
        .chain(statuses)
        .chain(others)
    {
        assert_eq!(theirs.remove(&name), Some(value), "{name}");
    }
    assert_eq!(theirs, BTreeMap::new(), "not compared");
}
