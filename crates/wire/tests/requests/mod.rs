//! Random work requests, and the words in which the oracles are asked for them.
#![allow(dead_code)] // Reason: each test uses a part.

use doorbell_wire::mlx5::{DataSegment, Opcode, SendRequest};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn list(segments: &[DataSegment]) -> String {
    let words = segments
        .iter()
        .map(|s| format!(" {:x} {:x} {:x}", s.len_bytes, s.lkey, s.addr));
    format!("{:x}{}", segments.len(), words.collect::<String>())
}

#[derive(Debug, Clone)]
pub enum Load {
    Segments(Vec<DataSegment>),
    Inline(Vec<u8>),
}

#[derive(Debug, Clone)]
pub struct Case {
    pub opcode: Opcode,
    pub flags: u8,
    pub imm: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub swap: u64,
    pub compare: u64,
    pub load: Load,
}

pub fn segment() -> impl Strategy<Value = DataSegment> {
    let len_bytes = prop_oneof![1 => Just(0), 8 => 0..=0x7fff_ffffu32, 4 => 0..5000u32];
    (len_bytes, any::<u32>(), any::<u64>()).prop_map(|(len_bytes, lkey, addr)| DataSegment {
        len_bytes,
        lkey,
        addr,
    })
}

/// Every opcode that the emitter knows.
pub const OPCODES: [Opcode; 9] = [
    Opcode::Nop,
    Opcode::RdmaWrite,
    Opcode::RdmaWriteImm,
    Opcode::Send,
    Opcode::SendImm,
    Opcode::SendInval,
    Opcode::RdmaRead,
    Opcode::AtomicCs,
    Opcode::AtomicFa,
];

/// A request with one of these opcodes, at most that many pieces, or at most that many inline bytes.
pub fn case(
    opcodes: &[Opcode],
    max_segments: usize,
    max_inline: usize,
) -> impl Strategy<Value = Case> + use<> {
    let opcode = prop::sample::select(opcodes.to_vec());
    let head = (
        opcode,
        0..8u8,
        any::<u32>(),
        any::<u64>(),
        any::<u32>(),
        any::<u64>(),
        any::<u64>(),
    );
    head.prop_flat_map(
        move |(opcode, flags, imm, remote_addr, rkey, swap, compare)| {
            let segments =
                prop::collection::vec(segment(), 0..=max_segments).prop_map(Load::Segments);
            let load = match opcode {
                Opcode::Nop => Just(Load::Segments(Vec::new())).boxed(),
                Opcode::AtomicCs | Opcode::AtomicFa => (any::<u32>(), any::<u64>())
                    .prop_map(|(lkey, addr)| {
                        Load::Segments(vec![DataSegment {
                            len_bytes: 8,
                            lkey,
                            addr,
                        }])
                    })
                    .boxed(),
                Opcode::RdmaRead => segments.boxed(),
                _ => {
                    let inline =
                        prop::collection::vec(any::<u8>(), 0..=max_inline).prop_map(Load::Inline);
                    prop_oneof![segments, inline].boxed()
                }
            };
            load.prop_map(move |load| Case {
                opcode,
                flags,
                imm,
                remote_addr,
                rkey,
                swap,
                compare,
                load,
            })
        },
    )
}

impl Case {
    pub fn request(&self) -> SendRequest<'_> {
        let request = match self.opcode {
            Opcode::RdmaWrite => SendRequest::write(self.remote_addr, self.rkey),
            Opcode::RdmaWriteImm => SendRequest::write_imm(self.remote_addr, self.rkey, self.imm),
            Opcode::Send => SendRequest::send(),
            Opcode::SendImm => SendRequest::send_imm(self.imm),
            Opcode::SendInval => SendRequest::send_inval(self.imm),
            Opcode::RdmaRead => SendRequest::read(self.remote_addr, self.rkey),
            Opcode::AtomicCs => {
                SendRequest::compare_swap(self.remote_addr, self.rkey, self.compare, self.swap)
            }
            Opcode::AtomicFa => SendRequest::fetch_add(self.remote_addr, self.rkey, self.swap),
            _ => SendRequest::nop(),
        };
        let request = request
            .signaled(self.flags & 1 != 0)
            .solicited(self.flags & 2 != 0)
            .fence(self.flags & 4 != 0)
            // Set for all: those without immediate data must not send it.
            .imm(self.imm);
        match &self.load {
            Load::Segments(segments) => request.segments(segments),
            Load::Inline(bytes) => request.inline(bytes),
        }
    }

    pub fn question(&self, qpn: u32, index: u32) -> String {
        let compare = if self.opcode == Opcode::AtomicCs {
            self.compare
        } else {
            0
        };
        let load = match &self.load {
            Load::Segments(segments) => format!("list {}", list(segments)),
            Load::Inline(bytes) => format!("inline {:x} {}", bytes.len(), hex(bytes)),
        };
        format!(
            "wqe {:x} {:x} {:x} {:x} {:x} {:x} {compare:x} {qpn:x} {:x} {load}",
            self.opcode as u8,
            self.flags,
            self.imm,
            self.remote_addr,
            self.rkey,
            self.swap,
            index & 0xffff,
        )
    }
}

/// Random, and the same every time.
pub fn runner() -> TestRunner {
    TestRunner::new_with_rng(
        Config::default(),
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    )
}
