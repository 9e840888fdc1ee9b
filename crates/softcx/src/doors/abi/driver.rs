//! What libmlx5 adds to the calls: mlx5-abi.h.

use super::layout::layouts;

layouts! {
    Mlx5AllocContext = "struct mlx5_ib_alloc_ucontext_req_v2" {
        total_num_bfregs: u32, num_low_latency_bfregs: u32, flags: u32, comp_mask: u32, max_cqe_version: u8, reserved0: u8,
        reserved1: u16, reserved2: u32, lib_caps: u64,
    }
    Mlx5AllocContextResp = "struct mlx5_ib_alloc_ucontext_resp" {
        qp_tab_size: u32, bf_reg_size: u32, tot_bfregs: u32, cache_line_size: u32, max_sq_desc_sz: u16, max_rq_desc_sz: u16,
        max_send_wqebb: u32, max_recv_wr: u32, max_srq_recv_wr: u32, num_ports: u16, flow_action_flags: u16, comp_mask: u32,
        response_length: u32, cqe_version: u8, cmds_supp_uhw: u8, eth_min_inline: u8, clock_info_versions: u8,
        hca_core_clock_offset: u64, log_uar_size: u32, num_uars_per_page: u32, num_dyn_bfregs: u32, dump_fill_mkey: u32,
    }
    Mlx5QueryDeviceResp = "struct mlx5_ib_query_device_resp" { comp_mask: u32, response_length: u32, tso_caps: [u8; 8],
        rss_caps: [u8; 16], cqe_comp_caps: [u8; 8], packet_pacing_caps: [u8; 16],
        mlx5_ib_support_multi_pkt_send_wqes: u32, flags: u32, sw_parsing_caps: [u8; 8], striding_rq_caps: [u8; 24],
        tunnel_offloads_caps: u32, dci_streams_caps: [u8; 2], reserved: u16,
    }
    Mlx5AllocPdResp = "struct mlx5_ib_alloc_pd_resp" { pdn: u32 }
    Mlx5CreateCq = "struct mlx5_ib_create_cq" {
        buf_addr: u64, db_addr: u64, cqe_size: u32, cqe_comp_en: u8, cqe_comp_res_format: u8, flags: u16, uar_page_index: u16,
        reserved0: u16, reserved1: u32,
    }
    Mlx5CreateCqResp = "struct mlx5_ib_create_cq_resp" { cqn: u32, reserved: u32 }
    Mlx5ResizeCq = "struct mlx5_ib_resize_cq" { buf_addr: u64, cqe_size: u16, reserved0: u16, reserved1: u32 }
    Mlx5CreateSrq = "struct mlx5_ib_create_srq" {
        buf_addr: u64, db_addr: u64, flags: u32, reserved0: u32, uidx: u32, reserved1: u32,
    }
    Mlx5CreateSrqResp = "struct mlx5_ib_create_srq_resp" { srqn: u32, reserved: u32 }
    Mlx5CreateQp = "struct mlx5_ib_create_qp" {
        buf_addr: u64, db_addr: u64, sq_wqe_count: u32, rq_wqe_count: u32, rq_wqe_shift: u32, flags: u32, uidx: u32,
        bfreg_index: u32, sq_buf_addr: u64, ece_options: u32,
    }
    Mlx5CreateQpResp = "struct mlx5_ib_create_qp_resp" {
        bfreg_index: u32, ece_options: u32, comp_mask: u32, tirn: u32, tisn: u32, rqn: u32, sqn: u32, reserved1: u32,
        tir_icm_addr: u64,
    }
    Mlx5ModifyQp = "struct mlx5_ib_modify_qp" { comp_mask: u32, burst_info: [u8; 8], ece_options: u32 }
    Mlx5ModifyQpResp = "struct mlx5_ib_modify_qp_resp" { response_length: u32, dctn: u32, ece_options: u32, reserved: u32 }
    Mlx5CreateAhResp = "struct mlx5_ib_create_ah_resp" { response_length: u32, dmac: [u8; 6], reserved: [u8; 6] }
    Mlx5ClockInfo = "struct mlx5_ib_clock_info" {
        sign: u32, resv: u32, nsec: u64, cycles: u64, frac: u64, mult: u32, shift: u32, mask: u64, overflow_period: u64,
    }
}
