//! A region as its peer knows it.

use crate::{Error, Result};

/// What a peer knows of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Address of the first byte, in the process that has registered the region.
    pub addr: u64,
    /// The key.
    pub rkey: u32,
    /// Length in bytes.
    pub len_bytes: u64,
}

impl RemoteRegion {
    /// Length of [`RemoteRegion::to_bytes`].
    pub const BYTES: usize = 20;

    /// The bytes to give to a peer, little-endian: address, length, key.
    pub fn to_bytes(&self) -> [u8; RemoteRegion::BYTES] {
        let mut bytes = [0; RemoteRegion::BYTES];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[16..].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }

    /// Reads what [`RemoteRegion::to_bytes`] wrote. Any 20 bytes are accepted: the remote device checks the key.
    pub fn from_bytes(bytes: &[u8; RemoteRegion::BYTES]) -> RemoteRegion {
        let long = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u64::from_le_bytes(*b))
        };
        let rkey = bytes[16..]
            .first_chunk()
            .map_or(0, |b| u32::from_le_bytes(*b));
        RemoteRegion {
            addr: long(0),
            len_bytes: long(8),
            rkey,
        }
    }

    /// `len_bytes` from `offset` on, for a work request.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if they leave the region.
    pub fn slice(&self, offset: u64, len_bytes: u64) -> Result<RemoteSlice> {
        if offset <= self.len_bytes && len_bytes <= self.len_bytes - offset {
            let addr = self.addr.wrapping_add(offset);
            Ok(RemoteSlice::new(addr, self.rkey, len_bytes))
        } else {
            let limit_bytes = self.len_bytes;
            Err(Error::OutOfBounds {
                argument: "remote_offset",
                offset,
                len_bytes,
                limit_bytes,
                what: "the remote region",
            })
        }
    }
}

/// Memory of a peer, with the key that a work request needs to reach it. [`RemoteRegion::slice`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    addr: u64,
    rkey: u32,
    len_bytes: u64,
}

impl RemoteSlice {
    /// `len_bytes` from the peer's address `addr` on, in a region that it knows by `rkey`. The peer's device judges both when the work
    /// request is executed; a post refuses a work request of more bytes.
    pub const fn new(addr: u64, rkey: u32, len_bytes: u64) -> RemoteSlice {
        RemoteSlice {
            addr,
            rkey,
            len_bytes,
        }
    }

    /// As [`RemoteSlice::new`], of unknown length: the post checks none.
    pub const fn at(addr: u64, rkey: u32) -> RemoteSlice {
        RemoteSlice::new(addr, rkey, u64::MAX)
    }

    /// The peer's address of the first byte.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// The key.
    pub const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Length in bytes; `u64::MAX` if it is unknown.
    pub const fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}
