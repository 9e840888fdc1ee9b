//! Work requests as C states them.
#![allow(unsafe_code)] // reads through the pointers of C
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_void;

use crate::address_handle::doorbell_address_handle;
use crate::argument::{VersionedStruct, array, choice, read_struct};
use crate::failure::Failure;
use crate::handle::get;
use crate::region::doorbell_region;
use doorbell_rs::{Completion, Error, Opcode, Operation, RemoteSlice, Slice, Work};

/// Nothing, in its turn.
pub const DOORBELL_OP_NOP: u32 = 0;
/// A send.
pub const DOORBELL_OP_SEND: u32 = 1;
/// A write to the peer's memory.
pub const DOORBELL_OP_WRITE: u32 = 2;
/// A read from the peer's memory.
pub const DOORBELL_OP_READ: u32 = 3;
/// A compare and swap in the peer's memory.
pub const DOORBELL_OP_COMPARE_SWAP: u32 = 4;
/// A fetch and add in the peer's memory.
pub const DOORBELL_OP_FETCH_ADD: u32 = 5;
/// In completions only: a receive that took a send.
pub const DOORBELL_OP_RECV: u32 = 6;
/// In completions only: a receive that took the immediate data of a write.
pub const DOORBELL_OP_RECV_WRITE: u32 = 7;

/// Success makes no completion.
pub const DOORBELL_WORK_UNSIGNALED: u32 = 1;
/// The peer's completion is a solicited one.
pub const DOORBELL_WORK_SOLICITED: u32 = 2;
/// Waits for earlier reads and atomics.
pub const DOORBELL_WORK_FENCE: u32 = 4;
/// Carries immediate data.
pub const DOORBELL_WORK_IMM: u32 = 8;
/// The bytes are in the work request itself.
pub const DOORBELL_WORK_INLINE: u32 = 16;
/// The peer sees it after all that earlier requests wrote.
pub const DOORBELL_WORK_ORDERED: u32 = 32;

/// Slices that a work request may have in any configuration.
pub const DOORBELL_SLICES_MAX: usize = 16;

const FLAGS: u32 = DOORBELL_WORK_UNSIGNALED
    | DOORBELL_WORK_SOLICITED
    | DOORBELL_WORK_FENCE
    | DOORBELL_WORK_ORDERED
    | DOORBELL_WORK_IMM
    | DOORBELL_WORK_INLINE;

/// [`Slice`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_slice {
    pub region: *const doorbell_region,
    pub offset: u64,
    pub len_bytes: u64,
}

/// [`Work`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_work {
    pub struct_size: u32,
    pub opcode: u32,
    pub flags: u32,
    pub imm: u32,
    pub wr_id: u64,
    pub slices: *const doorbell_slice,
    pub inline_bytes: *const c_void,
    pub slice_count: u32,
    pub inline_len_bytes: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub remote_qpn: u32,
    pub compare: u64,
    pub operand: u64,
    pub address_handle: *const doorbell_address_handle,
    pub remote_qkey: u32,
    pub reserved: u32,
}

// SAFETY: repr(C), 8-byte fields at multiples of 8 and 4-byte ones in pairs, integers and raw pointers, and the size first.
unsafe impl VersionedStruct for doorbell_work {
    const BYTES_FIRST: usize = 64 + 2 * size_of::<*const c_void>();

    fn defaults() -> doorbell_work {
        doorbell_work {
            struct_size: size_of::<doorbell_work>() as u32,
            opcode: DOORBELL_OP_NOP,
            flags: 0,
            imm: 0,
            wr_id: 0,
            slices: std::ptr::null(),
            inline_bytes: std::ptr::null(),
            slice_count: 0,
            inline_len_bytes: 0,
            remote_addr: 0,
            rkey: 0,
            remote_qpn: 0,
            compare: 0,
            operand: 0,
            address_handle: std::ptr::null(),
            remote_qkey: 0,
            reserved: 0,
        }
    }
}

const _: () = assert!(
    size_of::<doorbell_work>()
        == doorbell_work::BYTES_FIRST + 8 + size_of::<*const doorbell_address_handle>()
);

/// [`Completion`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_completion {
    pub wr_id: u64,
    pub operation: u32,
    pub len_bytes: u32,
    pub imm: u32,
    pub has_imm: u32,
    pub source_qpn: u32,
    pub source_lid: u16,
    pub has_grh: u16,
}

impl From<Completion> for doorbell_completion {
    fn from(completion: Completion) -> doorbell_completion {
        doorbell_completion {
            wr_id: completion.wr_id,
            operation: match completion.operation {
                Operation::Receive => DOORBELL_OP_RECV,
                Operation::ReceiveWrite => DOORBELL_OP_RECV_WRITE,
                Operation::Post(Opcode::Send | Opcode::SendImm | Opcode::SendInval) => {
                    DOORBELL_OP_SEND
                }
                Operation::Post(Opcode::RdmaWrite | Opcode::RdmaWriteImm) => DOORBELL_OP_WRITE,
                Operation::Post(Opcode::RdmaRead) => DOORBELL_OP_READ,
                Operation::Post(Opcode::AtomicCs) => DOORBELL_OP_COMPARE_SWAP,
                Operation::Post(Opcode::AtomicFa) => DOORBELL_OP_FETCH_ADD,
                Operation::Post(Opcode::Nop) => DOORBELL_OP_NOP,
                other => unreachable!("{other:?} is no value of this version"),
            },
            len_bytes: completion.len_bytes,
            imm: completion.imm.unwrap_or(0),
            has_imm: completion.imm.is_some().into(),
            source_qpn: completion.source.map_or(0, |source| source.qpn),
            source_lid: completion.source.map_or(0, |source| source.lid),
            has_grh: completion
                .source
                .is_some_and(|source| source.has_grh)
                .into(),
        }
    }
}

/// Hands the slices of a list to `body`.
///
/// # Safety
/// The pointer is null or of `count` slices, whose handles are as the header says.
#[inline]
pub(super) unsafe fn with_slices<R>(
    slices: *const doorbell_slice,
    count: u32,
    body: impl FnOnce(&[Slice<'_>]) -> Result<R, Failure>,
) -> Result<R, Failure> {
    if count as usize > DOORBELL_SLICES_MAX {
        return Err(choice("slice_count", count, DOORBELL_SLICES_MAX as u32));
    }
    // SAFETY: the caller's promise.
    let given = unsafe { array(slices, count as usize, "slices") }?;
    let slice = |given: &doorbell_slice| {
        // SAFETY: the caller's promise.
        let region = unsafe { get(given.region, "slices[].region") }?;
        Ok::<_, Failure>(region.inner.slice(given.offset, given.len_bytes)?)
    };
    let Some(first) = given.first() else {
        return body(&[]);
    };
    // On the stack: this is on the way of every operation.
    let mut list = [slice(first)?; DOORBELL_SLICES_MAX];
    for (place, given) in list.iter_mut().zip(given).skip(1) {
        *place = slice(given)?;
    }
    body(&list[..given.len()])
}

/// Hands the work request to `body`.
///
/// # Safety
/// The pointer is null or of a work request, whose pointers and handles are as the header says.
#[inline]
pub(super) unsafe fn with_work<R>(
    work: *const doorbell_work,
    body: impl FnOnce(&Work<'_>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    // SAFETY: the caller's promise.
    let given = unsafe { read_struct(work, "work") }?;
    if given.flags & !FLAGS != 0 {
        let reason = format!("{:#x} has flags that do not exist", given.flags);
        return Err(Failure::argument("work.flags", reason));
    }
    if given.reserved != 0 {
        return Err(choice("work.reserved", given.reserved, 0));
    }
    let receiver = if given.address_handle.is_null() {
        if given.remote_qpn | given.remote_qkey != 0 {
            let reason = "there is a receiver's number or key, and no `address_handle`";
            return Err(Failure::argument("work.remote_qpn", reason));
        }
        None
    } else {
        // SAFETY: the caller's promise.
        Some(unsafe { get(given.address_handle, "work.address_handle") }?)
    };
    let body = |work: Work<'_>| {
        let flag = |flag| given.flags & flag != 0;
        let mut work = work
            .wr_id(given.wr_id)
            .signaled(!flag(DOORBELL_WORK_UNSIGNALED))
            .solicited(flag(DOORBELL_WORK_SOLICITED))
            .fence(flag(DOORBELL_WORK_FENCE))
            .ordered(flag(DOORBELL_WORK_ORDERED));
        if flag(DOORBELL_WORK_IMM) {
            if !matches!(given.opcode, DOORBELL_OP_SEND | DOORBELL_OP_WRITE) {
                let reason = "only sends and writes carry immediate data";
                return Err(Failure::argument("work.flags", reason));
            }
            work = work.imm(given.imm);
        }
        if let Some(receiver) = receiver {
            work = work.to(&receiver.inner, given.remote_qpn, given.remote_qkey);
        }
        body(&work)
    };
    if given.flags & DOORBELL_WORK_INLINE != 0 {
        if given.slice_count != 0 {
            let reason = "the work request has both slices and inline bytes";
            return Err(Failure::argument("work.slice_count", reason));
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe {
            let first = given.inline_bytes.cast::<u8>();
            array(first, given.inline_len_bytes as usize, "work.inline_bytes")
        }?;
        return match given.opcode {
            DOORBELL_OP_SEND => body(Work::send_inline(bytes)),
            DOORBELL_OP_WRITE => body(Work::write_inline(
                bytes,
                RemoteSlice::at(given.remote_addr, given.rkey),
            )),
            _ => {
                let reason = "only sends and writes carry inline bytes";
                Err(Failure::argument("work.flags", reason))
            }
        };
    }
    if given.inline_len_bytes != 0 {
        let reason = "there are inline bytes, and no DOORBELL_WORK_INLINE";
        return Err(Failure::argument("work.inline_len_bytes", reason));
    }
    let (addr, rkey) = (given.remote_addr, given.rkey);
    let body = |slices: &[Slice<'_>]| match given.opcode {
        DOORBELL_OP_NOP if slices.is_empty() => body(Work::nop()),
        DOORBELL_OP_NOP => Err(choice("work.slice_count", given.slice_count, 0)),
        DOORBELL_OP_SEND => body(Work::send(slices)),
        DOORBELL_OP_WRITE => body(Work::write(slices, RemoteSlice::at(addr, rkey))),
        DOORBELL_OP_READ => body(Work::read(slices, RemoteSlice::at(addr, rkey))),
        DOORBELL_OP_COMPARE_SWAP => body(Work::compare_swap(
            slices,
            RemoteSlice::at(addr, rkey),
            given.compare,
            given.operand,
        )),
        DOORBELL_OP_FETCH_ADD => body(Work::fetch_add(
            slices,
            RemoteSlice::at(addr, rkey),
            given.operand,
        )),
        _ => Err(Failure::Library(Error::Range {
            argument: "work.opcode",
            value: given.opcode.into(),
            min: DOORBELL_OP_NOP.into(),
            max: DOORBELL_OP_FETCH_ADD.into(),
        })),
    };
    // SAFETY: the caller's promise.
    unsafe { with_slices(given.slices, given.slice_count, body) }
}
