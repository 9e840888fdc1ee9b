//! Programs as text: which store is the doorbell record, which the UAR, which poll waits for which CQE.

use std::fmt;

use super::{At, Program, ProgramOp, Role, Targets};

/// The bit of a CQE's last word, as loaded, that is the owner bit: `op_own`, its top byte, has it lowest.
const OWNER: u32 = 1 << 24;

/// A program with the names of its targets, to be displayed. See [`Program::disassemble`].
pub struct Disassembly<'a> {
    program: &'a Program,
    targets: Option<&'a Targets>,
}

impl Program {
    /// The program as text with the targets' names: one op a line. With a foreign table, roles stand for names.
    pub fn disassemble<'a>(&'a self, targets: &'a Targets) -> Disassembly<'a> {
        let targets = (targets.id() == self.targets_id()).then_some(targets);
        Disassembly {
            program: self,
            targets,
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Disassembly {
            program: self,
            targets: None,
        }
        .fmt(f)
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program")
            .field("targets", &self.targets_id())
            .field("ops", &self.ops().collect::<Vec<_>>())
            .finish()
    }
}

impl fmt::Display for Disassembly<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (line, op) in self.program.ops().enumerate() {
            if line > 0 {
                f.write_str("\n")?;
            }
            match op {
                ProgramOp::StoreDword { at, value } => {
                    self.line(f, "STORE_DWORD", at, &format!("{value:#010x}"))?;
                    stored_dword(f, at, value)?;
                }
                ProgramOp::StoreQword { at, value } => {
                    self.line(f, "STORE_QWORD", at, &format!("{value:#018x}"))?;
                    if at.role == Role::Uar {
                        doorbell(f, &value.to_ne_bytes())?;
                    }
                }
                ProgramOp::CopyBlock { at, bytes } => {
                    self.line(f, "COPY_BLOCK", at, &format!("{} bytes", bytes.len()))?;
                    if let (Role::Uar, Some(control)) = (at.role, bytes.first_chunk::<8>()) {
                        doorbell(f, control)?;
                        f.write_str(", by BlueFlame")?;
                    }
                }
                ProgramOp::PollGeq { at, value } => {
                    self.line(f, "POLL_GEQ", at, &format!("{value:#010x}"))?;
                    write!(f, "  ; until >= {value}")?;
                }
                ProgramOp::PollAnd { at, value } => {
                    self.line(f, "POLL_AND", at, &format!("{value:#010x}"))?;
                    polled(f, at, value == OWNER, "1 (odd lap)")?;
                }
                ProgramOp::PollNor { at, value } => {
                    self.line(f, "POLL_NOR", at, &format!("{value:#010x}"))?;
                    polled(f, at, value == !OWNER, "0 (even lap)")?;
                }
                ProgramOp::Fence(fence) => write!(f, "FENCE        {fence}")?,
            }
        }
        Ok(())
    }
}

impl Disassembly<'_> {
    fn line(&self, f: &mut fmt::Formatter<'_>, mnemonic: &str, at: At, value: &str) -> fmt::Result {
        let name = self.targets.and_then(|targets| targets.name(at.target));
        let place = match name {
            Some(name) => format!("{name}+{:#x}", at.offset),
            None => format!("{}#{}+{:#x}", at.role.name(), at.target.index(), at.offset),
        };
        write!(f, "{mnemonic:<12} {place:<28} {value}")
    }
}

fn stored_dword(f: &mut fmt::Formatter<'_>, at: At, value: u32) -> fmt::Result {
    match at.role {
        // A record is a pair of big-endian words, receive before send (facts: mlx5dv.h, MLX5_RCV_DBR and MLX5_SND_DBR).
        Role::DoorbellRecord => {
            let side = if at.offset & 4 == 0 {
                "receive"
            } else {
                "send"
            };
            write!(
                f,
                "  ; doorbell record: {side} counter = {}",
                u32::from_be(value)
            )
        }
        Role::Marks => write!(f, "  ; mark {} = {value}", at.offset / 4),
        _ => Ok(()),
    }
}

fn polled(f: &mut fmt::Formatter<'_>, at: At, is_owner: bool, owner: &str) -> fmt::Result {
    if at.role == Role::Completions && is_owner && at.offset % 64 == 60 {
        write!(f, "  ; CQE {}, owner {owner}", at.offset / 64)?;
    }
    Ok(())
}

/// The first 8 bytes of a control segment. The reader of whole WQEs is `mlx5::Wqe`; this module lies below and knows just the doorbell.
fn doorbell(f: &mut fmt::Formatter<'_>, control: &[u8; 8]) -> fmt::Result {
    let [_, index_high, index_low, opcode, qpn @ .., _] = *control;
    let index = u16::from_be_bytes([index_high, index_low]);
    let qpn = u32::from_be_bytes([0, qpn[0], qpn[1], qpn[2]]);
    let opcode = match opcode {
        0x00 => "NOP",
        0x08 => "RDMA_WRITE",
        0x09 => "RDMA_WRITE_IMM",
        0x0a => "SEND",
        0x0b => "SEND_IMM",
        0x10 => "RDMA_READ",
        0x11 => "ATOMIC_CS",
        0x12 => "ATOMIC_FA",
        _ => "another opcode",
    };
    write!(f, "  ; UAR: ring WQE {index} ({opcode}) of qp {qpn:#x}")
}
