//! Programs as the driver's memory operations.
//!
//! According to `cuda.h`, each store of the second version of these functions is preceded by a fence of system scope for the stream's earlier work,
//! and work after a wait sees what was stored before the word. So the fences of a program need no operations. Writes of NICs are the exception: the
//! flag FLUSH of a wait is for them.
//!
//! A wait for a completion is one operation, which waits until the opcode is that of a success: its place has no other one before
//! ([`CqRing::retire`](crate::mlx5::CqRing::retire)), and the opcode of an error has the same top bit as that of no completion. So the stream stops at an error.
//! This process gives up the endpoints behind the wait and then ends the wait by [`CqRing::release_waiter`](crate::mlx5::CqRing::release_waiter).

use cudarc::driver::sys::{
    CUdeviceptr, CUstreamBatchMemOpParams, CUstreamBatchMemOpParams_union,
    CUstreamBatchMemOpParams_union_CUstreamMemOpFlushRemoteWritesParams_st as FlushParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpMemoryBarrierParams_st as BarrierParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as WaitParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 as WaitOperand,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as WriteParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as WriteOperand,
    CUstreamBatchMemOpType, CUstreamWaitValue_flags,
};

use super::capabilities::Capabilities;
use super::decoded::{Decoded, has_barrier};
use crate::bytecode::{At, ProgramOp, Role};
use crate::{Error, Result, StateKind};

/// One operation of the driver.
pub(super) type MemOp = CUstreamBatchMemOpParams;

/// The most operations of one call: `cuda.h` says fewer than 256.
pub(super) const CALL_MAX: usize = 255;

/// Adds the operations of a program to `out`; `locate` gives the device's address of an op.
///
/// # Errors
/// [`Error::State`] if the device lacks what an op needs, and those of `locate`. `out` may have a part of the program at its end then.
pub(super) fn translate(
    program: &Decoded<'_>,
    capabilities: &Capabilities,
    mut locate: impl FnMut(At) -> Result<CUdeviceptr>,
    out: &mut Vec<MemOp>,
) -> Result<()> {
    use CUstreamWaitValue_flags as Flags;
    if let Some(what) = program.missing(capabilities) {
        return Err(lacking(what));
    }
    let flush = if capabilities.flush {
        Flags::CU_STREAM_WAIT_VALUE_FLUSH as u32
    } else {
        0
    };
    for op in program.ops() {
        let (at, value, condition) = match *op {
            ProgramOp::StoreDword { at, value } => {
                out.push(store_dword(locate(at)?, value));
                continue;
            }
            ProgramOp::StoreQword { at, value } => {
                if at.role == Role::Uar && has_barrier() {
                    out.push(barrier());
                }
                out.push(store_qword(locate(at)?, value));
                continue;
            }
            ProgramOp::CopyBlock { at, bytes } => {
                let mut to = locate(at)?;
                let (words, _) = bytes.as_chunks::<8>();
                for word in words {
                    out.push(store_qword(to, u64::from_ne_bytes(*word)));
                    to += 8;
                }
                continue;
            }
            // Needs no operation: see the top of this file.
            ProgramOp::Fence(_) => continue,
            ProgramOp::PollGeq { at, value } => (at, value, Flags::CU_STREAM_WAIT_VALUE_GEQ),
            ProgramOp::PollAnd { at, value } => (at, value, Flags::CU_STREAM_WAIT_VALUE_AND),
            ProgramOp::PollNor { at, value } => (at, value, Flags::CU_STREAM_WAIT_VALUE_NOR),
        };
        let (value, condition) = if at.role == Role::Completions {
            // The opcode is at the top of the word: as a signed number, it is less than 0 without a success.
            (0, Flags::CU_STREAM_WAIT_VALUE_GEQ)
        } else {
            (value, condition)
        };
        out.push(wait(locate(at)?, value, condition as u32 | flush));
    }
    Ok(())
}

/// A 32-bit store.
pub(super) fn store_dword(address: CUdeviceptr, value: u32) -> MemOp {
    CUstreamBatchMemOpParams_union {
        writeValue: WriteParams {
            operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32,
            address,
            __bindgen_anon_1: WriteOperand {
                // All 64 bits, so that no byte of the operand is undefined.
                value64: u64::from(value),
            },
            flags: 0,
            alias: 0,
        },
    }
}

pub(super) fn store_qword(address: CUdeviceptr, value: u64) -> MemOp {
    CUstreamBatchMemOpParams_union {
        writeValue: WriteParams {
            operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64,
            address,
            __bindgen_anon_1: WriteOperand { value64: value },
            flags: 0,
            alias: 0,
        },
    }
}

/// A wait for a 32-bit word; `flags` are those of `CUstreamWaitValue_flags`.
pub(super) fn wait(address: CUdeviceptr, value: u32, flags: u32) -> MemOp {
    CUstreamBatchMemOpParams_union {
        waitValue: WaitParams {
            operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32,
            address,
            __bindgen_anon_1: WaitOperand {
                value64: u64::from(value),
            },
            flags,
            alias: 0,
        },
    }
}

/// A wait until the count at `address` has reached `value`, modulo 2^32.
pub(super) fn wait_count(address: CUdeviceptr, value: u32) -> MemOp {
    wait(
        address,
        value,
        CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32,
    )
}

/// A fence of system scope for the stream's earlier work.
fn barrier() -> MemOp {
    // All bytes, as above. Flags 0: CU_STREAM_MEMORY_BARRIER_TYPE_SYS.
    let mut op = CUstreamBatchMemOpParams_union { pad: [0; 6] };
    op.memoryBarrier = BarrierParams {
        operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_BARRIER,
        flags: 0,
    };
    op
}

/// Flushes earlier writes of NICs, as a wait with the flag FLUSH does.
pub(super) fn flush_remote_writes() -> MemOp {
    // All bytes, as above.
    let mut op = CUstreamBatchMemOpParams_union { pad: [0; 6] };
    op.flushRemoteWrites = FlushParams {
        operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES,
        flags: 0,
    };
    op
}

#[cold]
fn lacking(what: &str) -> Error {
    Error::state(
        StateKind::Unsupported,
        "queue on a CUDA stream",
        format!(
            "the device has no {what} in streams, and no kernel takes their place here; endpoints whose doorbells a proxy rings \
             (`path=proxy`) need no more than memory operations of 32 bits"
        ),
    )
}

#[cfg(test)]
#[allow(unsafe_code)] // reads the driver's unions
mod tests {
    use super::*;
    use crate::bytecode::{Fence, Program, Role, Targets};

    const ALL: Capabilities = Capabilities {
        memops: true,
        kernels: false,
        iomemory: None,
        qwords: true,
        nor: true,
        flush: true,
        gpudirect: true,
        ordering: crate::cuda::WritesOrdering::AllDevices,
        dmabuf: true,
        host_addresses: true,
    };

    /// What of an operation means something: its number in `cuda.h`, address, operand and flags.
    type Fields = (u32, u64, u64, u32);

    fn fields(op: &MemOp) -> Fields {
        // SAFETY: stores and waits have the same fields at the same places, all of them set.
        unsafe {
            let op = op.writeValue;
            let operand = op.__bindgen_anon_1.value64;
            (op.operation as u32, op.address, operand, op.flags)
        }
    }

    /// One op of each kind, on a target at 0x1000.
    fn translated(capabilities: &Capabilities) -> Result<Vec<Fields>> {
        let mut targets = Targets::new();
        let completions = targets.register("completions", Role::Completions, 64);
        let page = targets.register("page", Role::Memory, 64);
        let mut program = Program::new(&targets);
        program.fence(Fence::WORK_BEFORE_FLAG)?;
        program.store_dword(page.dword(4)?, 0xffff_fff1)?;
        program.store_qword(page.qword(8)?, 0x1122_3344_5566_7788)?;
        program.copy_block(
            page.block(16, 16)?,
            &std::array::from_fn::<u8, 16, _>(|at| at as u8),
        )?;
        program.poll_geq(page.dword(32)?, 7)?;
        program.poll_and(page.dword(36)?, 8)?;
        if capabilities.nor {
            program.poll_nor(page.dword(40)?, 9)?;
        }
        program.poll_and(completions.dword(60)?, 1 << 24)?;
        let mut out = Vec::new();
        let decoded = Decoded::new(&program);
        translate(
            &decoded,
            capabilities,
            |at| Ok(0x1000 + at.offset),
            &mut out,
        )?;
        assert_eq!(out.len(), decoded.memop_count);
        assert!(decoded.waits);
        Ok(out.iter().map(fields).collect())
    }

    #[test]
    fn each_op_translates_to_its_cu_stream_mem_op() {
        // CU_STREAM_MEM_OP_WAIT_VALUE_32 1, WRITE_VALUE_32 2, WRITE_VALUE_64 5; CU_STREAM_WAIT_VALUE_GEQ 0, AND 2, NOR 3, FLUSH 1 << 30.
        let flush = 1 << 30;
        let expected = vec![
            (2, 0x1004, 0xffff_fff1, 0),
            (5, 0x1008, 0x1122_3344_5566_7788, 0),
            (5, 0x1010, 0x0706_0504_0302_0100, 0),
            (5, 0x1018, 0x0f0e_0d0c_0b0a_0908, 0),
            (1, 0x1020, 7, flush),
            (1, 0x1024, 8, 2 | flush),
            (1, 0x1028, 9, 3 | flush),
            (1, 0x103c, 0, flush),
        ];
        assert_eq!(translated(&ALL), Ok(expected));
    }

    #[test]
    fn what_the_device_lacks_is_left_out_or_refused() {
        let ops = translated(&Capabilities {
            flush: false,
            ..ALL
        })
        .unwrap();
        assert!(ops.iter().all(|op| op.3 & 1 << 30 == 0));
        let poor = Capabilities {
            qwords: false,
            ..ALL
        };
        assert!(matches!(translated(&poor), Err(Error::State { .. })));
        let mut targets = Targets::new();
        let word = targets.register("word", Role::Memory, 4).dword(0).unwrap();
        let mut program = Program::new(&targets);
        program.poll_nor(word, 1).unwrap();
        let poor = Capabilities { nor: false, ..ALL };
        let decoded = Decoded::new(&program);
        let refused = translate(&decoded, &poor, |_| Ok(0), &mut Vec::new());
        assert!(matches!(refused, Err(Error::State { .. })));
        assert!(decoded.missing(&ALL).is_none() && decoded.missing(&poor).is_some());
        // A store alone is no wait, and needs nothing.
        program.clear();
        program.store_dword(word, 1).unwrap();
        let none = Capabilities {
            memops: true,
            ..Capabilities::default()
        };
        let mut out = Vec::new();
        let decoded = Decoded::new(&program);
        assert_eq!(translate(&decoded, &none, |_| Ok(0), &mut out), Ok(()));
        assert_eq!((out.len(), decoded.waits), (1, false));
        assert!(decoded.missing(&none).is_none());
        assert!(decoded.missing(&Capabilities::default()).is_some());
    }

    #[test]
    fn a_flush_and_a_barrier_are_those_of_cuda_h() {
        // SAFETY: all of it is set.
        assert_eq!(unsafe { barrier().pad }, [6, 0, 0, 0, 0, 0]);
        // SAFETY: all of it is set.
        assert_eq!(unsafe { flush_remote_writes().pad }, [3, 0, 0, 0, 0, 0]);
    }
}
