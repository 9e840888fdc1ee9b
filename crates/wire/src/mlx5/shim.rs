//! The C functions, declared by hand. `tests/layout.rs` and the test below compare the declarations with `include/doorbell/detail`.
#![allow(unsafe_code)] // Reason: foreign functions.

use std::ffi::{CStr, c_char};

#[cfg(test)]
use super::FenceMode;
use super::{DataSegment, DatagramSegment, Opcode};

/// Words that the emitters may write to `kept` (`DBL_WQE_WORDS_MAX`).
pub(super) const KEPT_WORDS: usize = 128;

/// `struct dbl_wr`.
#[repr(C)]
pub(super) struct WorkRequest {
    pub(super) remote_addr: u64,
    pub(super) swap_or_add: u64,
    pub(super) compare: u64,
    pub(super) payload: *const u8,
    pub(super) count: u32,
    pub(super) rkey: u32,
    pub(super) qpn: u32,
    pub(super) imm: u32,
    pub(super) opcode: Opcode,
    pub(super) flags: u8,
    pub(super) is_inline: u16,
}

/// `enum dbl_wr_flags`.
pub(super) const FLAG_SOLICITED: u8 = 0x02;
pub(super) const FLAG_SIGNALED: u8 = 0x08;

#[repr(C)]
struct LayoutEntry {
    name: *const c_char,
    value: u64,
}

unsafe extern "C" {
    pub(super) fn doorbell_shim_wqe_emit_segments(
        ring: *mut u8,
        wqebb_mask: u32,
        index: u32,
        wr: *const WorkRequest,
        kept: *mut u64,
    ) -> u32;
    pub(super) fn doorbell_shim_wqe_emit_inline(
        ring: *mut u8,
        wqebb_mask: u32,
        index: u32,
        wr: *const WorkRequest,
        kept: *mut u64,
    ) -> u32;
    pub(super) fn doorbell_shim_wqe_emit_datagram(
        ring: *mut u8,
        wqebb_mask: u32,
        index: u32,
        wr: *const WorkRequest,
        datagram: *const DatagramSegment,
        kept: *mut u64,
    ) -> u32;
    pub(super) fn doorbell_shim_wqe_overwrite_with_nop(
        ring: *mut u8,
        wqebb_mask: u32,
        index: u32,
        qpn: u32,
        wqebbs: u32,
        signaled: u32,
    ) -> u64;
    pub(super) fn doorbell_shim_wqe_read_over_nop(
        ring: *mut u8,
        wqebb_mask: u32,
        index: u32,
        qpn: u32,
        remote_addr: u64,
        rkey: u32,
        len_bytes: u32,
    ) -> u64;
    pub(super) fn doorbell_shim_recv_wqe_emit(
        ring: *mut u8,
        wqe_mask: u32,
        stride_shift: u32,
        index: u32,
        sges: *const DataSegment,
        count: u32,
    );
    fn doorbell_shim_layout(count: *mut u32) -> *const LayoutEntry;
}

/// Sizes, offsets and constants as the C compiler sees them: (`dbl_unit.offset`, 8) and the like. For the layout tests.
#[doc(hidden)]
pub fn layout() -> Vec<(&'static str, u64)> {
    let mut count = 0;
    // SAFETY: the shim writes the count and returns a constant table of that many entries.
    let entries = unsafe {
        let table = doorbell_shim_layout(&mut count);
        std::slice::from_raw_parts(table, count as usize)
    };
    let entry = |entry: &LayoutEntry| {
        // SAFETY: every name is a string literal of the shim.
        let name = unsafe { CStr::from_ptr(entry.name) };
        (name.to_str().unwrap_or("not UTF-8"), entry.value)
    };
    entries.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// `tests/layout.rs` compares what is public; this is the rest.
    #[test]
    fn work_request_layout_matches_c() {
        let expected = [
            ("dbl_wr", size_of::<WorkRequest>()),
            ("dbl_wr.remote_addr", offset_of!(WorkRequest, remote_addr)),
            ("dbl_wr.swap_or_add", offset_of!(WorkRequest, swap_or_add)),
            ("dbl_wr.compare", offset_of!(WorkRequest, compare)),
            ("dbl_wr.payload", offset_of!(WorkRequest, payload)),
            ("dbl_wr.count", offset_of!(WorkRequest, count)),
            ("dbl_wr.rkey", offset_of!(WorkRequest, rkey)),
            ("dbl_wr.qpn", offset_of!(WorkRequest, qpn)),
            ("dbl_wr.imm", offset_of!(WorkRequest, imm)),
            ("dbl_wr.opcode", offset_of!(WorkRequest, opcode)),
            ("dbl_wr.flags", offset_of!(WorkRequest, flags)),
            ("dbl_wr.is_inline", offset_of!(WorkRequest, is_inline)),
            ("dbl_wr:SOLICITED", usize::from(FLAG_SOLICITED)),
            ("dbl_wr:SIGNALED", usize::from(FLAG_SIGNALED)),
            ("dbl_wr:FENCE", FenceMode::Reads as usize),
            ("dbl_wr:ORDERED", FenceMode::All as usize),
            ("dbl_wr:WORDS_MAX", KEPT_WORDS),
            ("dbl_wr:DATAGRAM_WORDS", size_of::<DatagramSegment>() / 8),
        ]
        .map(|(name, value)| (name, value as u64));
        let c: Vec<_> = layout()
            .into_iter()
            .filter(|(name, _)| name.starts_with("dbl_wr"))
            .collect();
        assert_eq!(c, expected);
    }
}
