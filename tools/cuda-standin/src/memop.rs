//! Memory operations of streams: waits, writes, barriers, flushes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute_enum as A, CUdeviceptr, CUstream,
    CUstreamBatchMemOpType_enum as Op,
};

use crate::call::{CUresult, CudaResult, In, count_memops, cuda, valid};
use crate::graph::{MemopWords, NodeWork};
use crate::life::ContextLife;
use crate::memory::{self, Place};
use crate::settings::settings;
use crate::stream::Stream;
use crate::task::{Task, node_type};
use crate::{capture, device, held, host_memory, streams};

/// A call takes fewer than this.
const LIMIT: u32 = 256;
/// Beside the condition of a wait.
pub const FLUSH: u32 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitCondition {
    /// By the signed difference: counters wrap around.
    Geq,
    Eq,
    And,
    Nor,
}

impl WaitCondition {
    fn holds(self, wide: bool, found: u64, value: u64) -> bool {
        match self {
            WaitCondition::Geq if wide => found.wrapping_sub(value) as i64 >= 0,
            WaitCondition::Geq => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
            WaitCondition::Eq => found == value,
            WaitCondition::And => found & value != 0,
            WaitCondition::Nor if wide => !(found | value) != 0,
            WaitCondition::Nor => !(found as u32 | value as u32) != 0,
        }
    }
}

/// Checked, but for what becomes of the memory until it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memop {
    Wait {
        address: u64,
        wide: bool,
        value: u64,
        condition: WaitCondition,
        /// Writes of NICs before the one that ends the wait are seen behind it.
        flushes: bool,
    },
    Write {
        address: u64,
        wide: bool,
        value: u64,
        /// Not if it is to registers of a card that this device does not reach.
        reaches_cards: bool,
    },
    /// A barrier.
    Fence,
    /// A flush of remote writes, and a barrier.
    Flush,
}

/// CUDA_ERROR_NOT_SUPPORTED unless the device can.
fn supported(device: CUdevice, attribute: A) -> CudaResult {
    if device::attribute(device, attribute as u32) != 0 {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}

fn check_address(address: u64, wide: bool) -> CudaResult {
    let len = if wide { 8 } else { 4 };
    valid(address.is_multiple_of(len))?;
    let place = memory::device_place(address, len).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // CUDA driver API, stream memory operations: "None of the operations accepts pointers to managed memory buffers".
    let managed = memory::BlockKind::Managed;
    valid(
        !place
            .block
            .as_ref()
            .is_some_and(|block| block.kind == managed),
    )?;
    valid(!(is_io(&place) && settings().lacks("iomemops")))
}

/// Whether it is in the registers of a card.
fn is_io(place: &Place) -> bool {
    place.block.as_ref().is_some_and(|block| {
        block.flags & host_memory::IOMEMORY != 0 && block.kind == memory::BlockKind::Registered
    })
}

/// One operation, checked as the call checks it.
pub fn parse(device: CUdevice, words: &MemopWords) -> CudaResult<Memop> {
    if settings().lacks("memops") {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let operation = words[0] as u32;
    let is = |of: Op| operation == of as u32;
    let wide = is(Op::CU_STREAM_MEM_OP_WAIT_VALUE_64) || is(Op::CU_STREAM_MEM_OP_WRITE_VALUE_64);
    let address = words[1];
    let value = if wide {
        words[2]
    } else {
        words[2] & 0xffff_ffff
    };
    if is(Op::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES) {
        // Its flags stand next to the operation, and so do the barrier's.
        valid(words[0] >> 32 == 0)?;
        supported(device, A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)?;
        return Ok(Memop::Flush);
    }
    if is(Op::CU_STREAM_MEM_OP_BARRIER) {
        // SYS or GPU.
        valid(words[0] >> 32 <= 1)?;
        return Ok(Memop::Fence);
    }
    let flags = words[3] as u32;
    let is_wait = is(Op::CU_STREAM_MEM_OP_WAIT_VALUE_32) || is(Op::CU_STREAM_MEM_OP_WAIT_VALUE_64);
    let is_write =
        is(Op::CU_STREAM_MEM_OP_WRITE_VALUE_32) || is(Op::CU_STREAM_MEM_OP_WRITE_VALUE_64);
    valid(is_wait || is_write)?;
    if wide {
        supported(device, A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)?;
    }
    if is_write {
        // NO_MEMORY_BARRIER is not for this version of the calls.
        valid(flags == 0)?;
        check_address(address, wide)?;
        let settings = settings();
        return Ok(Memop::Write {
            address,
            wide,
            value,
            reaches_cards: !settings.lacks("peerstores")
                && !settings.lacks(&format!("peerstores{device}")),
        });
    }
    let condition = match flags & !FLUSH {
        0 => WaitCondition::Geq,
        1 => WaitCondition::Eq,
        2 => WaitCondition::And,
        3 => WaitCondition::Nor,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    if condition == WaitCondition::Nor {
        supported(device, A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR)?;
    }
    if flags & FLUSH != 0 {
        supported(device, A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)?;
    }
    check_address(address, wide)?;
    Ok(Memop::Wait {
        address,
        wide,
        value,
        condition,
        flushes: flags & FLUSH != 0,
    })
}

/// All operations of a call.
pub fn parse_all(
    device: CUdevice,
    count: u32,
    params: &In<MemopWords>,
) -> CudaResult<(Vec<MemopWords>, Vec<Memop>)> {
    valid(count > 0 && count < LIMIT)?;
    let all = params.get_all(count as usize)?;
    let memops = all
        .iter()
        .map(|words| parse(device, words))
        .collect::<CudaResult<_>>()?;
    Ok((all, memops))
}

fn load(place: &Place, wide: bool) -> u64 {
    // SAFETY: aligned, and within the place, which keeps device memory alive; host memory stays mapped while it is registered, as the
    // program has it from cuMemHostRegister.
    unsafe {
        if wide {
            (*(place.address as *const AtomicU64)).load(Ordering::Acquire)
        } else {
            (*(place.address as *const AtomicU32))
                .load(Ordering::Acquire)
                .into()
        }
    }
}

/// In a turn of a wait: the later, the longer. Spins, then yields, then naps. Waits outnumber the cores.
pub fn pause(turn: u32) {
    match turn {
        0..64 => std::hint::spin_loop(),
        64..512 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(if turn < 2000 { 20 } else { 200 })),
    }
}

impl Memop {
    /// A wait ends with its context as well.
    fn run(&self, life: &ContextLife) -> CudaResult {
        let reach = |address, wide: bool| {
            let len = if wide { 8 } else { 4 };
            memory::device_place(address, len)
                .ok_or_else(|| memory::illegal("a memory operation of a stream", address, len))
        };
        match *self {
            Memop::Wait {
                address,
                wide,
                value,
                condition,
                flushes,
            } => {
                let place = reach(address, wide)?;
                let mut turn = 0_u32;
                while !condition.holds(wide, load(&place, wide), value) {
                    if life.is_over() {
                        return Ok(());
                    }
                    pause(turn);
                    turn = turn.saturating_add(1);
                }
                if flushes {
                    held::release();
                }
            }
            Memop::Write {
                address,
                wide,
                value,
                reaches_cards,
            } => {
                let place = reach(address, wide)?;
                if is_io(&place) && !reaches_cards {
                    return Ok(());
                }
                // What the stream did before is seen before the value is, by the CPU and by other devices.
                fence(Ordering::SeqCst);
                // SAFETY: as in `load`.
                unsafe {
                    if wide {
                        (*(place.address as *const AtomicU64)).store(value, Ordering::Release);
                    } else {
                        (*(place.address as *const AtomicU32))
                            .store(value as u32, Ordering::Release);
                    }
                }
            }
            Memop::Fence => fence(Ordering::SeqCst),
            Memop::Flush => {
                fence(Ordering::SeqCst);
                held::release();
            }
        }
        Ok(())
    }
}

/// Those of one call.
pub struct Memops(pub Vec<Memop>);

impl Task for Memops {
    fn run(&self, life: &ContextLife) -> CudaResult {
        self.0.iter().try_for_each(|memop| memop.run(life))
    }

    fn holds_work_queue(&self) -> bool {
        let is_wait = |memop: &Memop| matches!(memop, Memop::Wait { .. });
        self.0.iter().any(is_wait)
    }

    fn node_type(&self) -> u32 {
        node_type::MEMOPS
    }
}

fn place(stream: &Arc<Stream>, words: Vec<MemopWords>, memops: Vec<Memop>) -> CudaResult {
    let work = NodeWork::Memops {
        context: stream.context.handle,
        words,
        task: Arc::new(Memops(memops)),
    };
    capture::queue(stream, work)
}

/// One operation in a stream.
fn queue(stream: CUstream, operation: Op, address: u64, value: u64, flags: u32) -> CudaResult {
    let stream = streams::find_here(stream)?;
    let words = [operation as u64, address, value, flags.into(), 0, 0];
    let memop = parse(stream.context.device, &words)?;
    place(&stream, vec![words], vec![memop])
}

cuda! {
    fn cuStreamBatchMemOp_v2(stream: CUstream, count: u32, params: In<MemopWords>, flags: u32) {
        let stream = streams::find_here(stream)?;
        valid(flags == 0)?;
        let (words, memops) = parse_all(stream.context.device, count, &params)?;
        count_memops(memops.len());
        place(&stream, words, memops)
    }

    fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) {
        queue(stream, Op::CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value.into(), flags)
    }

    fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) {
        queue(stream, Op::CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags)
    }

    fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) {
        queue(stream, Op::CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value.into(), flags)
    }

    fn cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) {
        queue(stream, Op::CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags)
    }
}
