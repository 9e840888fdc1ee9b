//! What fits a queue: the limits of requests, and the checks of a queue's numbers.

use super::request::SEGMENT_BYTES_MAX;
use super::{DataSegment, Opcode, SendRequest};
use crate::{Error, Result, StateKind};

/// Segments in a WQE, at most: their count has six bits (mlx5dv.h, `qpn_ds`).
pub(super) const DS_MAX: u32 = 63;
/// Segments before the payload, at most: control and remote address. An atomic has one more, but one piece of payload only.
const HEAD_MAX: u32 = 2;

/// How much a send request may carry.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestLimits {
    max_segments: u32,
    max_inline_bytes: u32,
}

impl RequestLimits {
    pub(super) fn new(max_segments: u32, max_inline_bytes: u32) -> Result<Self> {
        check_range("max_segments", max_segments, 0, DS_MAX - HEAD_MAX)?;
        check_range(
            "max_inline_bytes",
            max_inline_bytes,
            0,
            (DS_MAX - HEAD_MAX) * 16 - 4,
        )?;
        Ok(Self {
            max_segments,
            max_inline_bytes,
        })
    }

    /// WQEBBs of the largest request.
    pub(super) fn wqebbs_max(&self) -> u32 {
        // Not less than 4 segments, an atomic: one WQEBB anyway.
        (HEAD_MAX
            + self
                .max_segments
                .max(inline_segments(self.max_inline_bytes)))
        .div_ceil(4)
    }

    /// Counts the segments that `list` takes in a WQE.
    #[inline]
    pub(super) fn list_segments(
        &self,
        request: &SendRequest<'_>,
        list: &[DataSegment],
    ) -> Result<u32> {
        if list.len() > self.max_segments as usize {
            return Err(out_of_range(
                "slices (limit: max_segments)",
                list.len() as u64,
                0,
                self.max_segments,
            ));
        }
        let mut segments = 0;
        for segment in list {
            if segment.len_bytes > SEGMENT_BYTES_MAX {
                return Err(out_of_range(
                    "len_bytes",
                    u64::from(segment.len_bytes),
                    0,
                    SEGMENT_BYTES_MAX,
                ));
            }
            segments += u32::from(segment.len_bytes != 0);
        }
        if request.opcode.is_atomic() && !matches!(list, [DataSegment { len_bytes: 8, .. }]) {
            let total = list
                .iter()
                .map(|segment| u64::from(segment.len_bytes))
                .sum();
            return Err(out_of_range("bytes of an atomic's one slice", total, 8, 8));
        }
        if request.opcode == Opcode::Nop && !list.is_empty() {
            return Err(out_of_range("slices of a NOP", list.len() as u64, 0, 0));
        }
        Ok(segments)
    }

    /// Counts the segments that `bytes` take in a WQE.
    #[inline]
    pub(super) fn inline_segments(&self, request: &SendRequest<'_>, bytes: &[u8]) -> Result<u32> {
        if bytes.len() > self.max_inline_bytes as usize {
            return Err(out_of_range(
                "inline bytes (limit: max_inline_bytes)",
                bytes.len() as u64,
                0,
                self.max_inline_bytes,
            ));
        }
        if request.opcode.is_fetch() || request.opcode == Opcode::Nop {
            return Err(Error::state(
                StateKind::Unsupported,
                "post",
                format!("{} takes no inline data", request.opcode.name()),
            ));
        }
        Ok(inline_segments(bytes.len() as u32))
    }
}

/// Segments that inline data takes: 4 bytes of header and the bytes; nothing for nothing.
#[inline]
const fn inline_segments(len_bytes: u32) -> u32 {
    if len_bytes == 0 {
        0
    } else {
        (len_bytes + 4).div_ceil(16)
    }
}

#[cold]
pub(super) fn out_of_range(argument: &'static str, value: u64, min: u32, max: u32) -> Error {
    Error::Range {
        argument,
        value,
        min: u64::from(min),
        max: u64::from(max),
    }
}

pub(super) fn check_range(argument: &'static str, value: u32, min: u32, max: u32) -> Result<()> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(out_of_range(argument, u64::from(value), min, max))
    }
}

pub(super) fn check_power_of_two(argument: &'static str, value: u32, max: u32) -> Result<()> {
    check_range(argument, value, 1, max)?;
    if value.is_power_of_two() {
        Ok(())
    } else {
        let align = u64::from(value.next_power_of_two());
        Err(Error::Alignment {
            argument,
            value: u64::from(value),
            align,
        })
    }
}

pub(super) fn check_ring(ring: *mut u8, align: usize) -> Result<()> {
    if ring.is_null() || !ring.addr().is_multiple_of(align) {
        return Err(Error::Alignment {
            argument: "ring",
            value: ring.addr() as u64,
            align: align as u64,
        });
    }
    Ok(())
}
