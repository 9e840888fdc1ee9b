//! Our bytes against libmlx5 itself: 100,000 random requests, each written once by our send queue and once by `ibv_post_send` into the
//! ring of a queue pair of the software ConnectX (`libmlx5_oracle.c`, which runs unmodified behind a door).
//!
//! What may differ, and nothing else: [`mask`]. A NOP is not among the requests, because `ibv_post_send` has none;
//! `mlx5dv.rs` compares it with the header.

#[path = "../../../tests/door/mod.rs"]
mod door;
mod fixture;
mod requests;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use door::{Door, verbs_program};
use doorbell_wire::mlx5::{Datagram, DatagramSegment, Opcode, Segment, Wqe};
use fixture::Send;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use requests::{OPCODES, case, hex, runner};

/// Fewer where each takes a millisecond and the comparison is not the point: under a sanitizer.
fn case_count() -> usize {
    let sanitized = std::env::var_os("DOORBELL_SANITIZER").is_some();
    if sanitized { 10_000 } else { 100_000 }
}

/// The most requests in one call of `ibv_post_send`.
const LIST_MAX: usize = 16;
const MAX_SEGMENTS: usize = 12;
const MAX_INLINE: usize = 200;

/// Makes zeros of the two fields that mean nothing and that libmlx5 leaves as the ring has them; ours are zeros.
fn mask(ours: &[u8], theirs: &mut [u8], wqe: &Wqe<'_>) {
    // The padding between the end of inline data and the end of its last segment.
    for segment in wqe.segments() {
        if let Segment::Inline(bytes) = segment {
            let end = bytes.as_ptr_range().end.addr() - ours.as_ptr().addr();
            for (theirs, ours) in theirs.iter_mut().zip(ours).skip(end) {
                assert_eq!(*ours, 0, "padding of ours");
                *theirs = 0;
            }
        }
    }
    // `compare` of a fetch-and-add.
    if wqe.ctrl.opcode_raw == Opcode::AtomicFa as u8 {
        assert_eq!(ours[40..48], [0; 8], "compare of ours");
        theirs[40..48].fill(0);
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..][..2], 16).unwrap())
        .collect()
}

#[test]
fn emitted_wqes_match_libmlx5() {
    let test = "emitted_wqes_match_libmlx5";
    let Some(program) = verbs_program(test, "libmlx5_oracle.c") else {
        return;
    };
    let door = Door::all().last().unwrap();
    let mut child = door
        .run(&[], program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();

    let mut runner = runner();
    let opcodes: Vec<Opcode> = OPCODES
        .into_iter()
        .filter(|it| *it != Opcode::Nop)
        .collect();
    let strategy = case(&opcodes, MAX_SEGMENTS, MAX_INLINE);
    let list = 1..=LIST_MAX;
    let cases: Vec<Vec<_>> = {
        let mut left = case_count();
        std::iter::from_fn(|| {
            let count = list.new_tree(&mut runner).unwrap().current().min(left);
            left -= count;
            (count > 0).then(|| {
                (0..count)
                    .map(|_| strategy.new_tree(&mut runner).unwrap().current())
                    .collect()
            })
        })
        .collect()
    };
    let mut text = format!("open {MAX_SEGMENTS:x} {MAX_INLINE:x}\n");
    for list in &cases {
        text += &format!("post {:x}\n", list.len());
        for case in list {
            // Of a queue pair and an index that libmlx5 knows by itself.
            text += &case.question(0, 0);
            text.push('\n');
        }
    }
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));

    let opened = answers.next().expect("the device opens").unwrap();
    let (qpn, wqebbs) = opened.split_once(' ').unwrap();
    let qpn = u32::from_str_radix(qpn, 16).unwrap();
    let wqebbs = u32::from_str_radix(wqebbs, 16).unwrap();
    // Of the same shape as libmlx5's, and it goes round at the same places.
    let mut send = Send::with(wqebbs, qpn, MAX_SEGMENTS as u32, MAX_INLINE as u32);
    let mut end = 0;
    for case in cases.iter().flatten() {
        let posted = send.queue.post(&case.request()).unwrap();
        end = posted.end();
        send.queue.release(end).unwrap();
        let ours = send.wqe_bytes(posted.index);
        let mut theirs = unhex(&answers.next().expect("an answer to each request").unwrap());
        assert_eq!(theirs.len(), ours.len(), "{case:?}");
        mask(&ours, &mut theirs, &Wqe::parse(&ours).unwrap());
        assert_eq!(hex(&ours), hex(&theirs), "{case:?}");
    }
    assert!(answers.next().is_none());
    writer.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success());
    let wrapped = end > 2 * 65_536;
    assert!(
        wrapped || case_count() < 100_000,
        "the 16-bit index went round"
    );
}

/// The same of sends on a UD queue pair, to address handles of many kinds.
#[test]
fn emitted_datagrams_match_libmlx5() {
    let test = "emitted_datagrams_match_libmlx5";
    let Some(program) = verbs_program(test, "libmlx5_oracle.c") else {
        return;
    };
    let door = Door::all().last().unwrap();
    let mut child = door
        .run(&[], program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();

    let mut runner = runner();
    let ah = (
        any::<u16>(),
        0..16u8,
        any::<u8>(),
        0..(1u32 << 20),
        any::<u8>(),
        any::<bool>(),
        any::<[u8; 16]>(),
    );
    let mut text = format!("ud {MAX_SEGMENTS:x} {MAX_INLINE:x}\n");
    let handles: Vec<_> = (0..20)
        .map(|_| ah.new_tree(&mut runner).unwrap().current())
        .collect();
    for (lid, sl, class, flow, hops, is_global, gid) in &handles {
        let gid = hex(gid);
        text += &format!(
            "ah {lid:x} {sl:x} {class:x} {flow:x} {hops:x} {:x} {gid}\n",
            u8::from(*is_global)
        );
    }
    let strategy = case(&[Opcode::Send, Opcode::SendImm], MAX_SEGMENTS, MAX_INLINE);
    let cases: Vec<_> = (0..case_count() / 10)
        .map(|_| {
            let mut case = strategy.new_tree(&mut runner).unwrap().current();
            case.remote_addr %= handles.len() as u64;
            case.swap &= 0xff_ffff;
            case
        })
        .collect();
    for case in &cases {
        text += &format!("post 1\n{}\n", case.question(0, 0));
    }
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));

    let opened = answers.next().expect("the device opens").unwrap();
    let (qpn, wqebbs) = opened.split_once(' ').unwrap();
    let qpn = u32::from_str_radix(qpn, 16).unwrap();
    let wqebbs = u32::from_str_radix(wqebbs, 16).unwrap();
    let vectors: Vec<DatagramSegment> = handles
        .iter()
        .map(|_| {
            let bytes = unhex(&answers.next().expect("a vector").unwrap());
            DatagramSegment::from_bytes(&bytes.try_into().unwrap())
        })
        .collect();
    let mut send = Send::with(wqebbs, qpn, MAX_SEGMENTS as u32, MAX_INLINE as u32);
    for case in &cases {
        let to = vectors[case.remote_addr as usize].to(case.swap as u32, case.rkey);
        let posted = send.queue.post_datagram(&case.request(), &to).unwrap();
        send.queue.release(posted.end()).unwrap();
        let ours = send.wqe_bytes(posted.index);
        let mut theirs = unhex(&answers.next().expect("an answer to each request").unwrap());
        assert_eq!(theirs.len(), ours.len(), "{case:?}");
        let wqe = Wqe::parse_datagram(&ours).unwrap();
        mask(&ours, &mut theirs, &wqe);
        assert_eq!(hex(&ours), hex(&theirs), "{case:?}");
        // What the reader finds in it is what libmlx5 was asked for, and makes the same segment again.
        let datagram = wqe.datagram().unwrap();
        let (lid, sl, class, flow, hops, is_global, gid) = handles[case.remote_addr as usize];
        let global = |word: u32| if is_global { word } else { 0 };
        let wanted = Datagram {
            qkey: case.rkey,
            qpn: case.swap as u32,
            sl,
            lid,
            traffic_class: global(class.into()) as u8,
            hop_limit: global(hops.into()) as u8,
            has_grh: is_global,
            flow_label: global(flow),
            gid: if is_global { gid } else { [0; 16] },
            ..Datagram::default()
        };
        assert_eq!(datagram, wanted, "{case:?}");
        assert_eq!(datagram.segment(), to, "{case:?}");
    }
    assert!(answers.next().is_none());
    writer.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success());
}
