//! What is known about a pointer.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::{CUdeviceptr, CUpointer_attribute_enum as A};

use crate::call::{CUresult, CudaResult, In, cuda, valid};
use crate::memory::{self, BlockKind, MemoryBlock};
use crate::{current, device};

/// CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// A value as its attribute has it: most are of 4 or 8 bytes.
enum Value {
    Word(u32),
    Long(u64),
}

fn block_of(pointer: u64) -> Option<Arc<MemoryBlock>> {
    memory::find(pointer).or_else(|| memory::find_host(pointer))
}

/// None: the attribute does not exist. An error: not for this pointer. Without a block it is what unknown pointers have.
fn value(attribute: u32, pointer: u64, block: Option<&MemoryBlock>) -> Option<CudaResult<Value>> {
    let is = |of: A| attribute == of as u32;
    let on_device = block.is_some_and(|block| block.kind == BlockKind::Device);
    let long = |of: fn(&MemoryBlock) -> u64| Ok(Value::Long(block.map_or(0, of)));
    Some(if is(A::CU_POINTER_ATTRIBUTE_CONTEXT) {
        long(|block| block.context.handle)
    } else if is(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        Ok(Value::Word(match block {
            None => 0,
            Some(_) if on_device => DEVICE,
            Some(_) => HOST,
        }))
    } else if is(A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
        Ok(Value::Long(block.map_or(0, |block| {
            // A pointer is the device's or the program's.
            if pointer >= block.start && pointer - block.start < block.len {
                pointer
            } else {
                block.start + (pointer - block.host)
            }
        })))
    } else if is(A::CU_POINTER_ATTRIBUTE_HOST_POINTER) {
        match block {
            Some(_) if on_device => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            Some(block) if pointer >= block.start && pointer - block.start < block.len => {
                Ok(Value::Long(block.host + (pointer - block.start)))
            }
            Some(_) => Ok(Value::Long(pointer)),
            None => Ok(Value::Long(0)),
        }
    } else if is(A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
        Ok(Value::Word(block.map_or(0, |block| {
            u32::from(block.sync_memops.load(Ordering::Relaxed))
        })))
    } else if is(A::CU_POINTER_ATTRIBUTE_BUFFER_ID) {
        long(|block| block.id)
    } else if is(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
        Ok(Value::Word(
            block.map_or(-2i32 as u32, |block| block.context.device as u32),
        ))
    } else if is(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
        long(|block| block.start)
    } else if is(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
        long(|block| block.len)
    } else if is(A::CU_POINTER_ATTRIBUTE_MAPPED) {
        Ok(Value::Word(u32::from(block.is_some())))
    } else if is(A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE) {
        // GPU_DIRECT_RDMA_SUPPORTED.
        let can =
            |block: &MemoryBlock| on_device && device::attribute(block.context.device, 116) == 1;
        Ok(Value::Word(u32::from(block.is_some_and(can))))
    } else if is(A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS) {
        // READWRITE.
        Ok(Value::Word(if block.is_some() { 3 } else { 0 }))
    } else if is(A::CU_POINTER_ATTRIBUTE_IS_MANAGED) {
        let is_managed = |block: &MemoryBlock| block.kind == BlockKind::Managed;
        Ok(Value::Word(u32::from(block.is_some_and(is_managed))))
    } else if is(A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) {
        Ok(Value::Word(0))
    } else if is(A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)
        || is(A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
    {
        Ok(Value::Long(0))
    } else {
        return None;
    })
}

fn write(to: *mut c_void, value: Value) -> CudaResult {
    valid(!to.is_null())?;
    match value {
        // SAFETY: the caller gave room for a value of this attribute.
        Value::Word(word) => unsafe { to.cast::<u32>().write_unaligned(word) },
        // SAFETY: as above.
        Value::Long(long) => unsafe { to.cast::<u64>().write_unaligned(long) },
    }
    Ok(())
}

cuda! {
    // A pointer that CUDA does not know is CUDA_ERROR_INVALID_VALUE.
    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, pointer: CUdeviceptr) {
        current::context()?;
        let block = block_of(pointer).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let value = value(attribute, pointer, Some(&block)).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        write(data, value?)
    }

    // An unknown pointer is not an error here: its attributes are null.
    fn cuPointerGetAttributes(count: u32, attributes: In<u32>, data: In<*mut c_void>, pointer: CUdeviceptr) {
        current::context()?;
        valid(count > 0)?;
        let block = block_of(pointer);
        let attributes = attributes.get_all(count as usize)?;
        let data = data.get_all(count as usize)?;
        for (attribute, data) in attributes.into_iter().zip(data) {
            let value = value(attribute, pointer, block.as_deref()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
            write(data, value.unwrap_or(Value::Long(0)))?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(from: In<u32>, attribute: u32, pointer: CUdeviceptr) {
        current::context()?;
        valid(attribute == A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as u32)?;
        let block = memory::find(pointer).filter(|block| block.kind == BlockKind::Device);
        let block = block.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        block.sync_memops.store(from.get()? != 0, Ordering::Relaxed);
        Ok(())
    }

}
