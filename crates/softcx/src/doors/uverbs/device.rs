//! Opening a context, and what the device and its port can do.

use std::sync::Arc;

use super::arguments::{AttributeKind, AttributeSpec};
use super::{CreatedObject, DRIVER, DRIVER_IN, DRIVER_OUT, UverbsCall};
use crate::device::client::Errno;
use crate::doors::abi::*;
use crate::doors::context::DeviceContext;
use crate::doors::event_pipe::{ChannelKind, EventPipe};
use crate::doors::limits;
use crate::doors::port::{GIDS, PortIdentity};

/// `MLX5_IB_ALLOC_UCTX_DEVX`: raw commands to the firmware. The software ConnectX has no firmware.
const DEVX: u32 = 1;
/// `MLX5_LIB_CAP_DYN_UAR`.
const DYNAMIC_UARS: u64 = 1 << 1;
/// `MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET` and `_SQD2RTS`.
const CORE_CLOCK_OFFSET: u32 = 1;
const SQD2RTS: u32 = 1 << 3;
/// `MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD`.
const PADDED_CQES: u32 = 1 << 1;
/// `MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE` and `_CREATE_AH`.
const DRIVER_ANSWERS: u8 = 3;
/// `MLX5_USER_INLINE_MODE_NONE`.
const NO_INLINE_HEADERS: u8 = 1;
/// `IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS`.
const CORE_SUPPORT: u64 = 1;

/// `ib_uverbs_device_cap_flags`: what is emulated.
const CAPABILITIES: u32 = CURR_QP_STATE_MOD
    | PORT_ACTIVE_EVENT
    | SYS_IMAGE_GUID
    | RC_RNR_NAK_GEN
    | MEM_WINDOW
    | MEM_MGT_EXTENSIONS
    | MEM_WINDOW_TYPE_2B;
const CURR_QP_STATE_MOD: u32 = 1 << 7;
const PORT_ACTIVE_EVENT: u32 = 1 << 10;
const SYS_IMAGE_GUID: u32 = 1 << 11;
const RC_RNR_NAK_GEN: u32 = 1 << 12;
const MEM_WINDOW: u32 = 1 << 17;
const MEM_MGT_EXTENSIONS: u32 = 1 << 21;
const MEM_WINDOW_TYPE_2B: u32 = 1 << 24;

/// `ib_uverbs_query_port_cap_flags`: nothing is here that a subnet manager would talk to.
const SYS_IMAGE_GUID_SUP: u32 = 1 << 11;
const IP_BASED_GIDS: u32 = 1 << 26;

/// Which ConnectX it shows itself as: the part, and its firmware's version.
pub(in crate::doors) const PART: u32 = 4129;
pub(in crate::doors) const FIRMWARE: (u16, u16, u16) = (28, 39, 1002);
const MELLANOX: u32 = 0x2c9;

/// The older form, which makes the channel of asynchronous events, too.
pub(super) fn get_context(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    open_context(call)?;
    let (channel, descriptor) = EventPipe::new(ChannelKind::AsyncEvents)?;
    call.made.push(CreatedObject::AsyncChannel(channel.inode()));
    call.context.events.add_channel(Arc::new(channel));
    call.give(descriptor, |call, number| {
        call.respond(GetContextResp {
            async_fd: number as u32,
            num_comp_vectors: limits::COMPLETION_VECTORS,
        });
    })?;
    Ok(())
}

pub(super) const GET_ATTRIBUTES: &[AttributeSpec] = &[
    (0, AttributeKind::Out(4), false),
    (1, AttributeKind::Out(8), false),
    DRIVER_IN,
    DRIVER_OUT,
];

/// The newer form: the channel of asynchronous events is made by another method.
pub(super) fn get_context_method(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    open_context(call)?;
    answer_numbers(call);
    call.arguments.mark_valid(DRIVER_OUT.0);
    Ok(())
}

pub(super) const QUERY_ATTRIBUTES: &[AttributeSpec] = &[
    (0, AttributeKind::Out(4), false),
    (1, AttributeKind::Out(8), false),
    (DRIVER, AttributeKind::Out(4), false),
];

/// The query of a process that was given an open descriptor.
pub(super) fn query_context(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    answer_numbers(call);
    call.arguments
        .answer(DRIVER, &context_response(&call.context.port).to_bytes());
    Ok(())
}

fn answer_numbers(call: &mut UverbsCall<'_>) {
    call.arguments
        .answer(0, &limits::COMPLETION_VECTORS.to_ne_bytes());
    call.arguments.answer(1, &CORE_SUPPORT.to_ne_bytes());
}

fn open_context(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    if call.tables.opened {
        return Err(libc::EINVAL);
    }
    let request: Mlx5AllocContext = call.driver_request()?;
    if request.flags & DEVX != 0 {
        return Err(libc::EINVAL);
    }
    let unknown = request.flags | request.comp_mask | request.reserved2;
    if unknown != 0 || request.reserved0 != 0 || request.reserved1 != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    // Without them a driver would want registers of fixed numbers; libmlx5 has known them since version 26.
    if request.lib_caps & DYNAMIC_UARS == 0 || request.max_cqe_version < 1 {
        return Err(libc::EOPNOTSUPP);
    }
    call.tables.opened = true;
    call.made.push(CreatedObject::Opening);
    call.tables.pages.set_clock_info(call.context.now_ns());
    call.driver_respond(context_response(&call.context.port));
    Ok(())
}

fn context_response(port: &PortIdentity) -> Mlx5AllocContextResp {
    Mlx5AllocContextResp {
        qp_tab_size: limits::QPS,
        // Both buffers.
        bf_reg_size: if port.function.no_blueflame { 0 } else { 512 },
        // No fixed ones: UAR pages are allocated as needed.
        tot_bfregs: 0,
        cache_line_size: 64,
        max_sq_desc_sz: limits::SEND_WQE_BYTES,
        max_rq_desc_sz: limits::RECV_WQE_BYTES,
        max_send_wqebb: limits::QP_WQES,
        max_recv_wr: limits::QP_WQES,
        max_srq_recv_wr: limits::SRQ_WQES - 1,
        num_ports: 1,
        comp_mask: CORE_CLOCK_OFFSET | SQD2RTS,
        response_length: Mlx5AllocContextResp::BYTES as u32,
        cqe_version: 1,
        cmds_supp_uhw: DRIVER_ANSWERS,
        eth_min_inline: NO_INLINE_HEADERS,
        clock_info_versions: 1,
        hca_core_clock_offset: 0,
        log_uar_size: 12,
        num_uars_per_page: 1,
        ..Mlx5AllocContextResp::default()
    }
}

pub(super) fn query(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let response = device(&call.context.port);
    call.respond(response);
    Ok(())
}

pub(super) fn query_extended(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ExQueryDevice = call.extended_request()?;
    if request.comp_mask != 0 || request.reserved != 0 {
        return Err(libc::EINVAL);
    }
    let base = device(&call.context.port);
    let response = ExQueryDeviceResp {
        base,
        response_length: call.response_length::<ExQueryDeviceResp>(),
        timestamp_mask: u64::MAX,
        // In kHz: a nanosecond a tick.
        hca_core_clock: 1_000_000,
        device_cap_flags_ex: u64::from(base.device_cap_flags),
        cq_moderation_caps: CqModerationCaps {
            max_cq_moderation_count: u16::MAX,
            max_cq_moderation_period: 4095,
            reserved: 0,
        },
        ..ExQueryDeviceResp::default()
    };
    call.respond(response);
    let response = Mlx5QueryDeviceResp {
        response_length: call.driver_room::<Mlx5QueryDeviceResp>(),
        flags: PADDED_CQES,
        ..Mlx5QueryDeviceResp::default()
    };
    call.driver_respond(response);
    Ok(())
}

fn device(port: &PortIdentity) -> QueryDeviceResp {
    let (major, minor, patch) = FIRMWARE;
    QueryDeviceResp {
        fw_ver: u64::from(major) << 32 | u64::from(minor) << 16 | u64::from(patch),
        node_guid: port.guid.to_be(),
        sys_image_guid: port.guid.to_be(),
        max_mr_size: u64::MAX,
        page_size_cap: !0xfff,
        vendor_id: MELLANOX,
        vendor_part_id: PART,
        max_qp: limits::QPS,
        max_qp_wr: limits::QP_WQES,
        device_cap_flags: CAPABILITIES,
        max_sge: limits::SEND_SGE,
        max_sge_rd: limits::SEND_SGE,
        max_cq: limits::CQS,
        max_cqe: limits::CQES - 1,
        max_mr: limits::MRS,
        max_pd: limits::PDS,
        max_qp_rd_atom: u32::from(limits::RD_ATOMIC),
        max_res_rd_atom: u32::from(limits::RD_ATOMIC) * limits::QPS,
        max_qp_init_rd_atom: u32::from(limits::RD_ATOMIC),
        // IBV_ATOMIC_HCA, or IBV_ATOMIC_NONE.
        atomic_cap: u32::from(!port.function.no_atomics),
        max_mw: limits::MWS,
        max_mcast_grp: limits::MULTICAST,
        max_mcast_qp_attach: limits::MULTICAST,
        max_total_mcast_qp_attach: limits::MULTICAST,
        max_ah: limits::AHS,
        max_srq: limits::SRQS,
        max_srq_wr: limits::SRQ_WQES - 1,
        max_srq_sge: limits::SRQ_SGE,
        max_pkeys: limits::PKEYS,
        local_ca_ack_delay: 16,
        phys_port_cnt: 1,
        ..QueryDeviceResp::default()
    }
}

pub(super) fn query_port(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: QueryPort = call.request()?;
    if request.port_num != 1 {
        return Err(libc::EINVAL);
    }
    let response = port(call.context);
    call.respond(response);
    Ok(())
}

pub(super) const PORT_ATTRIBUTES: &[AttributeSpec] = &[
    (0, AttributeKind::In(8, 8), true),
    // As far as `port_cap_flags2`.
    (1, AttributeKind::Out(QueryPortResp::BYTES as u16 + 2), true),
];

pub(super) fn query_port_method(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    if call.arguments.number(0, u64::from(u8::MAX))? != 1 {
        return Err(libc::EINVAL);
    }
    let response = QueryPortRespEx {
        legacy_resp: port(call.context),
        ..QueryPortRespEx::default()
    };
    call.arguments.answer_and_clear(1, &response.to_bytes());
    Ok(())
}

pub(super) const DRIVER_PORT_ATTRIBUTES: &[AttributeSpec] = &[
    (DRIVER, AttributeKind::In(4, 4), true),
    (DRIVER + 1, AttributeKind::Out(8), true),
];

/// The driver's query about a port inside a switch. The device is in none, so no field of the answer is valid.
pub(super) fn query_driver_port(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    if call.arguments.word(DRIVER)? != 1 {
        return Err(libc::EINVAL);
    }
    call.arguments.answer_and_clear(DRIVER + 1, &[]);
    Ok(())
}

/// The capability mask of the port.
pub(in crate::doors) fn port_capabilities(port: &PortIdentity) -> u32 {
    if port.is_ethernet() {
        IP_BASED_GIDS
    } else {
        SYS_IMAGE_GUID_SUP
    }
}

fn port(context: &DeviceContext) -> QueryPortResp {
    let port = &context.port;
    let ethernet = port.is_ethernet();
    let (state, phys_state) = port.link_state(context.client.is_link_down());
    QueryPortResp {
        port_cap_flags: port_capabilities(port),
        max_msg_sz: limits::MESSAGE_BYTES,
        gid_tbl_len: GIDS,
        pkey_tbl_len: limits::PKEYS,
        lid: port.lid,
        sm_lid: u16::from(!ethernet),
        state,
        max_mtu: 5,
        active_mtu: port.interface.mtu,
        max_vl_num: 1,
        subnet_timeout: 18,
        // 4 lanes of HDR.
        active_width: 2,
        active_speed: 64,
        phys_state,
        link_layer: if ethernet { 2 } else { 1 },
        // IBV_QPF_GRH_REQUIRED
        flags: u8::from(port.needs_grh()),
        ..QueryPortResp::default()
    }
}
