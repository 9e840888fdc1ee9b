//! Attributes of queue pairs: modify and query.

use super::UverbsCall;
use crate::device::capability::Capability;
use crate::device::client::{AddressVector, Errno, QpAttributes, mask};
use crate::doors::abi::*;
use crate::doors::limits;
use crate::doors::port::{GIDS, PortIdentity};

/// What the older form may name: everything up to IB_QP_DEST_QPN.
const STANDARD: u32 = (1 << 21) - 1;
/// `IB_QP_SET_QKEY`.
const PRIVILEGED_QKEY: u32 = 1 << 31;
/// IB_QPS_ERR, the last state.
const LAST_STATE: u8 = 6;

pub(super) fn modify(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let base: ModifyQp = call.request()?;
    let request = ExModifyQp {
        base,
        ..ExModifyQp::default()
    };
    change(call, &request, STANDARD)
}

pub(super) fn modify_extended(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ExModifyQp = call.extended_request()?;
    change(call, &request, STANDARD | mask::RATE_LIMIT)?;
    let response = ExModifyQpResp {
        comp_mask: 0,
        response_length: call.response_length::<ExModifyQpResp>(),
    };
    call.respond(response);
    let response = Mlx5ModifyQpResp {
        response_length: call.driver_room::<Mlx5ModifyQpResp>(),
        ..Mlx5ModifyQpResp::default()
    };
    call.driver_respond(response);
    Ok(())
}

fn change(call: &mut UverbsCall<'_>, request: &ExModifyQp, known: u32) -> Result<(), Errno> {
    let base = &request.base;
    if base.attr_mask & !known != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let driver: Mlx5ModifyQp = call.driver_request()?;
    if driver.comp_mask != 0 || driver.burst_info != [0; 8] {
        return Err(libc::EOPNOTSUPP);
    }
    let qp = call.tables.objects.qp(base.qp_handle)?;
    let port = call.context.port;
    check(base, &port)?;
    if base.attr_mask & mask::AV != 0 {
        port.check_route(&base.dest.dgid)?;
    }
    // Keys with this bit are kept to processes that may make raw packets (`modify_qp` in core/uverbs_cmd.c).
    if base.attr_mask & mask::QKEY != 0
        && base.qkey & PRIVILEGED_QKEY != 0
        && !call.descriptors.space().has_capability(Capability::NetRaw)
    {
        return Err(libc::EPERM);
    }
    if port.function.no_atomics {
        let access = match base.attr_mask & mask::ACCESS_FLAGS {
            0 => call.context.client.asked_access(qp.qpn)?,
            _ => base.qp_access_flags,
        };
        check_atomics(base, access)?;
    }
    let attributes = QpAttributes {
        state: base.qp_state,
        current_state: base.cur_qp_state,
        path_mtu: base.path_mtu,
        path_mig_state: base.path_mig_state,
        qkey: base.qkey,
        rq_psn: base.rq_psn,
        sq_psn: base.sq_psn,
        dest_qpn: base.dest_qp_num,
        access: base.qp_access_flags,
        pkey_index: base.pkey_index,
        alt_pkey_index: base.alt_pkey_index,
        port: base.port_num,
        alt_port: base.alt_port_num,
        timeout: base.timeout,
        alt_timeout: base.alt_timeout,
        retry_count: base.retry_cnt,
        rnr_retry: base.rnr_retry,
        min_rnr_timer: base.min_rnr_timer,
        max_rd_atomic: base.max_rd_atomic,
        max_dest_rd_atomic: base.max_dest_rd_atomic,
        rate_limit: request.rate_limit,
        path: vector(&base.dest),
        alt_path: vector(&base.alt_dest),
    };
    let client = &call.context.client;
    client.modify_qp(qp.qpn, &attributes, base.attr_mask)
}

/// What the kernel's driver refuses where the function has no atomics: a responder that is to take requests and whose access has them
/// (`set_qpc_atomic_flags` of mlx5/qp.c: `get_atomic_mode` fails).
fn check_atomics(request: &ModifyQp, access: u32) -> Result<(), Errno> {
    /// `IBV_ACCESS_REMOTE_ATOMIC`.
    const REMOTE_ATOMIC: u32 = 1 << 3;
    let serves =
        request.attr_mask & mask::MAX_DEST_RD_ATOMIC != 0 && request.max_dest_rd_atomic > 0;
    if serves && access & REMOTE_ATOMIC != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    Ok(())
}

/// What the kernel and its driver check before the table of transitions: EINVAL for values that nothing has, and for a path without a global
/// route where the port needs one (`rdma_is_grh_required`): on Ethernet, which has no LIDs, and where the subnet manager says so. A path from an
/// address of another namespace finds no route (`rdma_addr_find_l2_eth_by_grh` in core/addr.c).
fn check(request: &ModifyQp, own: &PortIdentity) -> Result<(), Errno> {
    let names = |bit: u32| request.attr_mask & bit != 0;
    let path_is_wrong = |path: &QpDest, port: u8| {
        path.port_num != 1
            || port != 1
            || !is_rate(path.static_rate)
            || (own.needs_grh() && path.is_global == 0)
            || (path.is_global != 0 && u32::from(path.sgid_index) >= GIDS)
            || (path.is_global != 0 && own.is_foreign_gid(path.sgid_index.into()))
    };
    let wrong = [
        (mask::PORT, request.port_num != 1),
        (mask::AV, path_is_wrong(&request.dest, 1)),
        (
            mask::ALT_PATH,
            // `_ib_modify_qp`: the core has alternate paths on InfiniBand only.
            own.is_ethernet() || path_is_wrong(&request.alt_dest, request.alt_port_num),
        ),
        (mask::CUR_STATE, request.cur_qp_state > LAST_STATE),
        (mask::STATE, request.qp_state > LAST_STATE),
        (mask::PKEY_INDEX, request.pkey_index >= limits::PKEYS),
        (mask::PATH_MTU, !(1..=5).contains(&request.path_mtu)),
        (
            mask::MAX_QP_RD_ATOMIC,
            request.max_rd_atomic > limits::RD_ATOMIC,
        ),
        (
            mask::MAX_DEST_RD_ATOMIC,
            request.max_dest_rd_atomic > limits::RD_ATOMIC,
        ),
    ];
    if wrong.iter().any(|(bit, is_wrong)| names(*bit) && *is_wrong) {
        return Err(libc::EINVAL);
    }
    Ok(())
}

/// Whether `ib_rate_to_mlx5` of the kernel's driver takes a number of `enum ibv_rate`: that of the port, or one from 2.5 Gbit/s to 800 Gbit/s.
fn is_rate(rate: u8) -> bool {
    matches!(rate, 0 | 2..=23)
}

pub(super) fn query(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: QueryQp = call.request()?;
    let qp = call.tables.objects.qp(request.qp_handle)?;
    let it = call.context.client.query_qp(qp.qpn)?;
    call.respond(QueryQpResp {
        dest: destination(&it.path),
        alt_dest: destination(&it.alt_path),
        // The driver tracks its send queue better than the kernel.
        max_send_wr: 0,
        max_recv_wr: qp.recv_wqes,
        max_send_sge: 0,
        max_recv_sge: qp.recv_sge,
        max_inline_data: 0,
        qkey: it.qkey,
        rq_psn: it.rq_psn,
        sq_psn: it.sq_psn,
        dest_qp_num: it.dest_qpn,
        qp_access_flags: it.access,
        pkey_index: it.pkey_index,
        alt_pkey_index: it.alt_pkey_index,
        qp_state: it.state,
        cur_qp_state: it.state,
        path_mtu: it.path_mtu,
        path_mig_state: it.path_mig_state,
        sq_draining: 0,
        max_rd_atomic: it.max_rd_atomic,
        max_dest_rd_atomic: it.max_dest_rd_atomic,
        min_rnr_timer: it.min_rnr_timer,
        port_num: it.port,
        timeout: it.timeout,
        retry_cnt: it.retry_count,
        rnr_retry: it.rnr_retry,
        alt_port_num: it.alt_port,
        alt_timeout: it.alt_timeout,
        sq_sig_all: u8::from(qp.signal_all),
        reserved: [0; 5],
    });
    Ok(())
}

fn vector(path: &QpDest) -> AddressVector {
    AddressVector {
        dgid: path.dgid,
        flow_label: path.flow_label,
        dlid: path.dlid,
        sgid_index: path.sgid_index,
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        sl: path.sl,
        src_path_bits: path.src_path_bits,
        static_rate: path.static_rate,
        is_global: path.is_global != 0,
        port: path.port_num,
    }
}

fn destination(path: &AddressVector) -> QpDest {
    QpDest {
        dgid: path.dgid,
        flow_label: path.flow_label,
        dlid: path.dlid,
        reserved: 0,
        sgid_index: path.sgid_index,
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        sl: path.sl,
        src_path_bits: path.src_path_bits,
        static_rate: path.static_rate,
        is_global: u8::from(path.is_global),
        port_num: path.port,
    }
}
