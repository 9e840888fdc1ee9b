//! A program decoded once, for all that is to be known about it before it is queued.

use std::sync::OnceLock;

use super::capabilities::Capabilities;
use crate::bytecode::{At, Fence, Program, ProgramOp, Role, UNIT_LIMIT};

/// The ops of a program, and what they need.
pub(super) struct Decoded<'a> {
    pub(super) program: &'a Program,
    ops: [ProgramOp<'a>; UNIT_LIMIT],
    len: usize,
    /// How many memory operations of the driver it takes.
    pub(super) memop_count: usize,
    pub(super) waits: bool,
    stores_qwords: bool,
    polls_nor: bool,
}

impl<'a> Decoded<'a> {
    pub(super) fn new(program: &'a Program) -> Decoded<'a> {
        let mut decoded = Decoded {
            program,
            ops: [ProgramOp::Fence(Fence::WORK_BEFORE_FLAG); UNIT_LIMIT],
            len: 0,
            memop_count: 0,
            waits: false,
            stores_qwords: false,
            polls_nor: false,
        };
        for (op, place) in program.ops().zip(&mut decoded.ops) {
            let op = rung_plainly(op);
            *place = op;
            decoded.len += 1;
            decoded.memop_count += match op {
                ProgramOp::Fence(_) => 0,
                ProgramOp::CopyBlock { bytes, .. } => bytes.len() / 8,
                _ => 1,
            };
            match op {
                ProgramOp::StoreQword { at, .. } | ProgramOp::CopyBlock { at, .. } => {
                    decoded.stores_qwords = true;
                    decoded.memop_count += usize::from(at.role == Role::Uar && has_barrier());
                }
                ProgramOp::PollGeq { at, .. }
                | ProgramOp::PollAnd { at, .. }
                | ProgramOp::PollNor { at, .. } => {
                    decoded.waits = true;
                    // A wait for a completion is one for a sign.
                    decoded.polls_nor |=
                        matches!(op, ProgramOp::PollNor { .. }) && at.role != Role::Completions;
                }
                ProgramOp::StoreDword { .. } | ProgramOp::Fence(_) => {}
            }
        }
        decoded
    }

    pub(super) fn ops(&self) -> &[ProgramOp<'a>] {
        self.ops.get(..self.len).unwrap_or_default()
    }

    /// What memory operations of a device with these capabilities lack to execute it.
    pub(super) fn missing(&self, capabilities: &Capabilities) -> Option<&'static str> {
        if !capabilities.memops && self.len > 0 {
            Some("memory operations")
        } else if !capabilities.qwords && self.stores_qwords {
            Some("64-bit stores")
        } else if !capabilities.nor && self.polls_nor {
            Some("waits for a bit to become 0 (NOR)")
        } else {
            None
        }
    }
}

/// Whether memory operations have a barrier of their own before each store to a card's register. `cuda.h` says that every store has one, so this is for a driver
/// or a GPU on which that turns out to be wrong.
pub(super) fn has_barrier() -> bool {
    static HAS_IT: OnceLock<bool> = OnceLock::new();
    *HAS_IT.get_or_init(|| std::env::var_os("DOORBELL_CUDA_BARRIER").is_some_and(|set| set == "1"))
}

/// A GPU rings without BlueFlame. The first 8 bytes of what is copied to a BlueFlame buffer are the doorbell, and a store of those alone has
/// the device fetch the work request. The whole copy is for one burst of a processor: of a GPU it would be eight stores or more, each of
/// its own, and the device may have begun with the first.
fn rung_plainly(op: ProgramOp<'_>) -> ProgramOp<'_> {
    match op {
        ProgramOp::CopyBlock { at, bytes } if at.role == Role::Uar => {
            bytes
                .first_chunk()
                .map_or(op, |doorbell| ProgramOp::StoreQword {
                    at,
                    value: u64::from_ne_bytes(*doorbell),
                })
        }
        _ => op,
    }
}

/// Where an op acts; a fence acts nowhere.
pub(super) fn place(op: &ProgramOp<'_>) -> Option<At> {
    match *op {
        ProgramOp::StoreDword { at, .. }
        | ProgramOp::StoreQword { at, .. }
        | ProgramOp::CopyBlock { at, .. }
        | ProgramOp::PollGeq { at, .. }
        | ProgramOp::PollAnd { at, .. }
        | ProgramOp::PollNor { at, .. } => Some(at),
        ProgramOp::Fence(_) => None,
    }
}
