//! The connection manager's commands, as they are written to `/dev/infiniband/rdma_cm`. Addresses are the bytes of a `struct sockaddr_in6` or of
//! a `struct __kernel_sockaddr_storage`.

use super::endpoints::AhAttr;
use super::layout::layouts;

layouts! {
    CmHeader = "struct rdma_ucm_cmd_hdr" { cmd: u32, r#in: u16, out: u16 }
    CmCreateId = "struct rdma_ucm_create_id" { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5] }
    CmCreateIdResp = "struct rdma_ucm_create_id_resp" { id: u32 }
    CmDestroyId = "struct rdma_ucm_destroy_id" { response: u64, id: u32, reserved: u32 }
    CmDestroyIdResp = "struct rdma_ucm_destroy_id_resp" { events_reported: u32 }
    CmBindIp = "struct rdma_ucm_bind_ip" { response: u64, addr: [u8; 28], id: u32 }
    CmBind = "struct rdma_ucm_bind" { id: u32, addr_size: u16, reserved: u16, addr: [u8; 128] }
    CmResolveIp = "struct rdma_ucm_resolve_ip" { src_addr: [u8; 28], dst_addr: [u8; 28], id: u32, timeout_ms: u32 }
    CmResolveAddr = "struct rdma_ucm_resolve_addr" {
        id: u32, timeout_ms: u32, src_size: u16, dst_size: u16, reserved: u32, src_addr: [u8; 128], dst_addr: [u8; 128],
    }
    CmResolveRoute = "struct rdma_ucm_resolve_route" { id: u32, timeout_ms: u32 }
    CmQuery = "struct rdma_ucm_query" { response: u64, id: u32, option: u32 }
    CmUserPath = "struct ib_user_path_rec" {
        dgid: [u8; 16], sgid: [u8; 16], dlid: u16, slid: u16, raw_traffic: u32, flow_label: u32, reversible: u32, mtu: u32,
        pkey: u16, hop_limit: u8, traffic_class: u8, numb_path: u8, sl: u8, mtu_selector: u8, rate_selector: u8, rate: u8,
        packet_life_time_selector: u8, packet_life_time: u8, preference: u8,
    }
    CmQueryRouteResp = "struct rdma_ucm_query_route_resp" {
        node_guid: u64, ib_route: [u8; 128], src_addr: [u8; 28], dst_addr: [u8; 28], num_paths: u32, port_num: u8,
        reserved: [u8; 3], ibdev_index: u32, reserved1: u32,
    }
    CmQueryAddrResp = "struct rdma_ucm_query_addr_resp" {
        node_guid: u64, port_num: u8, reserved: u8, pkey: u16, src_size: u16, dst_size: u16, src_addr: [u8; 128],
        dst_addr: [u8; 128], ibdev_index: u32, reserved1: u32,
    }
    CmQueryPathResp = "struct rdma_ucm_query_path_resp" { num_paths: u32, reserved: u32 }
    CmPathData = "struct ib_path_rec_data" { flags: u32, reserved: u32, path_rec: [u8; 64] }
    CmConnParam = "struct rdma_ucm_conn_param" {
        qp_num: u32, qkey: u32, private_data: [u8; 256], private_data_len: u8, srq: u8, responder_resources: u8,
        initiator_depth: u8, flow_control: u8, retry_count: u8, rnr_retry_count: u8, valid: u8,
    }
    CmUdParam = "struct rdma_ucm_ud_param" {
        qp_num: u32, qkey: u32, ah_attr: AhAttr, private_data: [u8; 256], private_data_len: u8, reserved: [u8; 7],
    }
    CmEce = "struct rdma_ucm_ece" { vendor_id: u32, attr_mod: u32 }
    CmConnect = "struct rdma_ucm_connect" { conn_param: CmConnParam, id: u32, reserved: u32, ece: CmEce }
    CmListen = "struct rdma_ucm_listen" { id: u32, backlog: u32 }
    CmAccept = "struct rdma_ucm_accept" { uid: u64, conn_param: CmConnParam, id: u32, reserved: u32, ece: CmEce }
    CmReject = "struct rdma_ucm_reject" { id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; 256] }
    CmDisconnect = "struct rdma_ucm_disconnect" { id: u32 }
    CmInitQpAttr = "struct rdma_ucm_init_qp_attr" { response: u64, id: u32, qp_state: u32 }
    CmNotify = "struct rdma_ucm_notify" { id: u32, event: u32 }
    CmJoinIpMcast = "struct rdma_ucm_join_ip_mcast" { response: u64, uid: u64, addr: [u8; 28], id: u32 }
    CmJoinMcast = "struct rdma_ucm_join_mcast" {
        response: u64, uid: u64, id: u32, addr_size: u16, join_flags: u16, addr: [u8; 128],
    }
    CmGetEvent = "struct rdma_ucm_get_event" { response: u64 }
    CmEventResp = "struct rdma_ucm_event_resp" {
        uid: u64, id: u32, event: u32, status: u32, param: [u8; 304], reserved: u32, ece: CmEce,
    }
    CmSetOption = "struct rdma_ucm_set_option" { optval: u64, id: u32, level: u32, optname: u32, optlen: u32 }
    CmMigrateId = "struct rdma_ucm_migrate_id" { response: u64, id: u32, fd: u32 }
    CmMigrateResp = "struct rdma_ucm_migrate_resp" { events_reported: u32 }
    CmQpAttr = "struct ib_uverbs_qp_attr" {
        qp_attr_mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32, rq_psn: u32,
        sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, ah_attr: AhAttr, alt_ah_attr: AhAttr, max_send_wr: u32,
        max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, pkey_index: u16, alt_pkey_index: u16,
        en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8,
        timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: [u8; 5],
    }
}
