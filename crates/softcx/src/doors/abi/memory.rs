//! Protection domains, memory regions and memory windows.

use super::layout::layouts;

layouts! {
    AllocPd = "struct ib_uverbs_alloc_pd" { response: u64 }
    AllocPdResp = "struct ib_uverbs_alloc_pd_resp" { pd_handle: u32 }
    DeallocPd = "struct ib_uverbs_dealloc_pd" { pd_handle: u32 }
    RegMr = "struct ib_uverbs_reg_mr" {
        response: u64, start: u64, length: u64, hca_va: u64, pd_handle: u32, access_flags: u32,
    }
    RegMrResp = "struct ib_uverbs_reg_mr_resp" { mr_handle: u32, lkey: u32, rkey: u32 }
    ReregMr = "struct ib_uverbs_rereg_mr" {
        response: u64, mr_handle: u32, flags: u32, start: u64, length: u64, hca_va: u64, pd_handle: u32, access_flags: u32,
    }
    ReregMrResp = "struct ib_uverbs_rereg_mr_resp" { lkey: u32, rkey: u32 }
    DeregMr = "struct ib_uverbs_dereg_mr" { mr_handle: u32 }
    AllocMw = "struct ib_uverbs_alloc_mw" { response: u64, pd_handle: u32, mw_type: u8 }
    AllocMwResp = "struct ib_uverbs_alloc_mw_resp" { mw_handle: u32, rkey: u32 }
    DeallocMw = "struct ib_uverbs_dealloc_mw" { mw_handle: u32 }
}
