//! Tensors in one registered region.
#![allow(unsafe_code)] // tensors are used where they lie

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use anyhow::{Context, Result};
use doorbell::{Access, Group, Region};

/// Memory for tensors, out of one region: registered once, so that no transfer registers anything.
pub struct Allocator {
    pub region: Region,
    /// Free spans, by their offsets: first fit.
    pub free: RefCell<BTreeMap<u64, u64>>,
}

impl Allocator {
    pub fn new(group: &Group, len_bytes: u64) -> Result<Rc<Allocator>> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let region = Region::alloc(group.domain(), len_bytes, access)?;
        let free = RefCell::new(BTreeMap::from([(0, len_bytes)]));
        Ok(Rc::new(Allocator { region, free }))
    }

    pub fn alloc(self: &Rc<Allocator>, len_bytes: u64) -> Result<Buffer> {
        // Whole cache lines: no two tensors share one.
        let size = len_bytes.max(1).next_multiple_of(64);
        let mut free = self.free.borrow_mut();
        let found = free.iter().find(|(_, len)| **len >= size);
        let (at, len) = found
            .map(|(at, len)| (*at, *len))
            .with_context(|| format!("no {size} bytes are free in the region for tensors"))?;
        free.remove(&at);
        if len > size {
            free.insert(at + size, len - size);
        }
        Ok(Buffer {
            memory: Rc::clone(self),
            at,
            len_bytes,
            size,
        })
    }

    pub fn tensor(self: &Rc<Allocator>, len: usize) -> Result<Tensor> {
        let buffer = self.alloc(4 * len as u64)?;
        Ok(Tensor { buffer, len })
    }
}

/// A piece of the allocator's region, which is free again when this is dropped.
pub struct Buffer {
    pub memory: Rc<Allocator>,
    pub at: u64,
    pub len_bytes: u64,
    pub size: u64,
}

impl Buffer {
    pub fn slice(&self) -> doorbell::Result<doorbell::Slice<'_>> {
        self.memory.region.slice(self.at, self.len_bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.memory.free.borrow_mut();
        let (mut at, mut size) = (self.at, self.size);
        if let Some((before, len)) = free.range(..at).next_back()
            && before + len == at
        {
            (at, size) = (*before, len + size);
        }
        if let Some(len) = free.remove(&(self.at + self.size)) {
            size += len;
        }
        free.insert(at, size);
    }
}

/// A vector of numbers in registered memory.
pub struct Tensor {
    pub buffer: Buffer,
    pub len: usize,
}

impl Tensor {
    pub fn values(&self) -> Result<&[f32]> {
        let Buffer { memory, at, .. } = &self.buffer;
        // SAFETY: a tensor that can be read through a shared reference is complete: what receives into it or changes it has it alone. Peers only read it.
        Ok(unsafe { memory.region.values(*at, self.len)? })
    }

    pub fn values_mut(&mut self) -> Result<&mut [f32]> {
        let Buffer { memory, at, .. } = &self.buffer;
        // SAFETY: a tensor that a peer may read, or that a receive fills, is behind an `Rc` of the rendezvous or in its list, so there is no `&mut` to it.
        Ok(unsafe { memory.region.values_mut(*at, self.len)? })
    }
}
