//! A region as its peer knows it.

use crate::{Error, Result};

/// What a peer knows of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Address of the first byte, over there.
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

    /// Reads what [`RemoteRegion::to_bytes`] wrote. Any bytes are a region; the device over there judges its keys.
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

    /// The address at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if `len_bytes` from there leave the region.
    pub fn at(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        if offset <= self.len_bytes && len_bytes <= self.len_bytes - offset {
            Ok(self.addr.wrapping_add(offset))
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
