//! Completion channels, completion queues and shared receive queues.

use super::layout::layouts;

layouts! {
    CreateCompChannel = "struct ib_uverbs_create_comp_channel" { response: u64 }
    CreateCompChannelResp = "struct ib_uverbs_create_comp_channel_resp" { fd: u32 }
    CreateCq = "struct ib_uverbs_create_cq" {
        response: u64, user_handle: u64, cqe: u32, comp_vector: u32, comp_channel: i32, reserved: u32,
    }
    ExCreateCq = "struct ib_uverbs_ex_create_cq" {
        user_handle: u64, cqe: u32, comp_vector: u32, comp_channel: i32, comp_mask: u32, flags: u32, reserved: u32,
    }
    CreateCqResp = "struct ib_uverbs_create_cq_resp" { cq_handle: u32, cqe: u32 }
    ExCreateCqResp = "struct ib_uverbs_ex_create_cq_resp" { base: CreateCqResp, comp_mask: u32, response_length: u32 }
    ResizeCq = "struct ib_uverbs_resize_cq" { response: u64, cq_handle: u32, cqe: u32 }
    ResizeCqResp = "struct ib_uverbs_resize_cq_resp" { cqe: u32, reserved: u32 }
    CqModeration = "struct ib_uverbs_cq_moderation" { cq_count: u16, cq_period: u16 }
    ExModifyCq = "struct ib_uverbs_ex_modify_cq" { cq_handle: u32, attr_mask: u32, attr: CqModeration, reserved: u32 }
    DestroyCq = "struct ib_uverbs_destroy_cq" { response: u64, cq_handle: u32, reserved: u32 }
    DestroyCqResp = "struct ib_uverbs_destroy_cq_resp" { comp_events_reported: u32, async_events_reported: u32 }
    CreateSrq = "struct ib_uverbs_create_srq" {
        response: u64, user_handle: u64, pd_handle: u32, max_wr: u32, max_sge: u32, srq_limit: u32,
    }
    CreateXsrq = "struct ib_uverbs_create_xsrq" {
        response: u64, user_handle: u64, srq_type: u32, pd_handle: u32, max_wr: u32, max_sge: u32, srq_limit: u32,
        max_num_tags: u32, xrcd_handle: u32, cq_handle: u32,
    }
    CreateSrqResp = "struct ib_uverbs_create_srq_resp" { srq_handle: u32, max_wr: u32, max_sge: u32, srqn: u32 }
    ModifySrq = "struct ib_uverbs_modify_srq" { srq_handle: u32, attr_mask: u32, max_wr: u32, srq_limit: u32 }
    QuerySrq = "struct ib_uverbs_query_srq" { response: u64, srq_handle: u32, reserved: u32 }
    QuerySrqResp = "struct ib_uverbs_query_srq_resp" { max_wr: u32, max_sge: u32, srq_limit: u32, reserved: u32 }
    DestroySrq = "struct ib_uverbs_destroy_srq" { response: u64, srq_handle: u32, reserved: u32 }
    DestroySrqResp = "struct ib_uverbs_destroy_srq_resp" { events_reported: u32 }
}
