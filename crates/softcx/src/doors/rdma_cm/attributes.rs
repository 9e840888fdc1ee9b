//! What processes ask about identifiers: addresses, paths, and the attributes for their queue pairs.

use super::address::{IB, SocketAddress};
use super::connect::UDP_QKEY;
use super::id::{ConnectionId, ExchangeState, FileKey, PACKET_LIFE_TIME, qp_type};
use super::mad::RATE;
use super::messages::lids;
use super::table::CmTable;
use crate::device::client::{Errno, mask};
use crate::device::management::MadPeer;
use crate::doors::abi::{
    AhAttr, CmPathData, CmQpAttr, CmQueryAddrResp, CmQueryPathResp, CmQueryRouteResp, CmUserPath,
    GlobalRoute, Layout,
};

pub(super) const PORT: u8 = 1;
const PKEY: u16 = 0xffff;
const HOPS: u8 = 64;
/// "Exactly", of a path's MTU, rate and life time.
const EXACTLY: u8 = 2;
/// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
const PATH_FLAGS: u32 = 1 | 1 << 1 | (1 << 3 | 1 << 5);

/// `IBV_QPS_*`.
const INIT: u32 = 1;
const READY_TO_RECEIVE: u32 = 2;
const READY_TO_SEND: u32 = 3;

impl CmTable {
    fn guid(&self) -> u64 {
        self.port.guid.to_be()
    }

    /// The address vector of the path to a peer.
    pub(super) fn path_attributes(&self, peer: MadPeer) -> AhAttr {
        let [_, dlid] = lids(self.port.link, [self.own, peer]);
        let is_global = self.port.needs_grh();
        AhAttr {
            grh: if is_global {
                GlobalRoute {
                    dgid: self.gid(peer),
                    sgid_index: self.device.gid_index().unwrap_or(0),
                    hop_limit: HOPS,
                    ..GlobalRoute::default()
                }
            } else {
                GlobalRoute::default()
            },
            dlid,
            is_global: is_global.into(),
            port_num: PORT,
            ..AhAttr::default()
        }
    }

    /// `QUERY_ROUTE`.
    pub(super) fn query_route(
        &self,
        file: FileKey,
        handle: u32,
    ) -> Result<CmQueryRouteResp, Errno> {
        let id = self.id_of(file, handle)?;
        let mut response = CmQueryRouteResp {
            src_addr: id.source.bytes(),
            dst_addr: id.destination.bytes(),
            ..CmQueryRouteResp::default()
        };
        if !id.has_device {
            return Ok(response);
        }
        response.node_guid = self.guid();
        response.port_num = PORT;
        response.num_paths = id.has_route().into();
        let path = self.user_path(id).to_bytes();
        for (to, from) in response.ib_route.iter_mut().zip(path) {
            *to = from;
        }
        Ok(response)
    }

    fn user_path(&self, id: &ConnectionId) -> CmUserPath {
        let peer = id.exchange.peer.unwrap_or(self.own);
        let [slid, dlid] = lids(self.port.link, [self.own, peer]);
        let [sgid, dgid] = self.gids(id);
        let path = CmUserPath {
            dgid,
            sgid,
            pkey: PKEY.to_be(),
            ..CmUserPath::default()
        };
        if !id.has_route() {
            return path;
        }
        CmUserPath {
            dlid: dlid.to_be(),
            slid: slid.to_be(),
            reversible: 1,
            mtu: self.path_mtu.into(),
            hop_limit: if self.port.needs_grh() { HOPS } else { 0 },
            traffic_class: id.type_of_service,
            numb_path: 1,
            mtu_selector: EXACTLY,
            rate_selector: EXACTLY,
            rate: RATE,
            packet_life_time_selector: EXACTLY,
            packet_life_time: PACKET_LIFE_TIME,
            ..path
        }
    }

    /// The GIDs of both ends of a path; zero for an end that is not known.
    fn gids(&self, id: &ConnectionId) -> [[u8; 16]; 2] {
        let gid = |peer| self.gid(peer);
        [Some(self.own), id.exchange.peer].map(|end| end.map_or([0; 16], gid))
    }

    fn query_device(&self, id: &ConnectionId) -> CmQueryAddrResp {
        if !id.has_device {
            return CmQueryAddrResp::default();
        }
        CmQueryAddrResp {
            node_guid: self.guid(),
            port_num: PORT,
            pkey: PKEY.to_be(),
            ..CmQueryAddrResp::default()
        }
    }

    /// `RDMA_USER_CM_QUERY_ADDR`.
    pub(super) fn query_addresses(
        &self,
        file: FileKey,
        handle: u32,
    ) -> Result<CmQueryAddrResp, Errno> {
        let id = self.id_of(file, handle)?;
        Ok(CmQueryAddrResp {
            src_size: id.source.len_bytes(),
            dst_size: id.destination.len_bytes(),
            src_addr: id.source.bytes(),
            dst_addr: id.destination.bytes(),
            ..self.query_device(id)
        })
    }

    /// `RDMA_USER_CM_QUERY_GID`.
    pub(super) fn query_gids(&self, file: FileKey, handle: u32) -> Result<CmQueryAddrResp, Errno> {
        let id = self.id_of(file, handle)?;
        let gids = if id.has_device {
            self.gids(id)
        } else {
            [[0; 16]; 2]
        };
        let [source, destination] =
            [(&id.source, gids[0]), (&id.destination, gids[1])].map(|(address, gid)| match address
                .family()
            {
                IB => *address,
                _ => {
                    let mut as_gid = SocketAddress::of_gid(&gid, 0);
                    as_gid.set_service(id.service_of(address), 0);
                    as_gid
                }
            });
        Ok(CmQueryAddrResp {
            src_size: source.len_bytes(),
            dst_size: destination.len_bytes(),
            src_addr: source.bytes(),
            dst_addr: destination.bytes(),
            ..self.query_device(id)
        })
    }

    /// `RDMA_USER_CM_QUERY_PATH`: as much of the answer as fits.
    pub(super) fn query_path(
        &self,
        file: FileKey,
        handle: u32,
        room: usize,
    ) -> Result<Vec<u8>, Errno> {
        let id = self.id_of(file, handle)?;
        if room < CmQueryPathResp::BYTES {
            return Err(libc::ENOSPC);
        }
        let mut answer = CmQueryPathResp {
            num_paths: id.has_route().into(),
            reserved: 0,
        }
        .to_bytes();
        if id.has_route() && room - answer.len() > CmPathData::BYTES {
            let data = CmPathData {
                flags: PATH_FLAGS,
                reserved: 0,
                path_rec: self.path_record(id),
            };
            answer.extend(data.to_bytes());
        }
        Ok(answer)
    }

    /// A path record of the subnet administration (IBTA 15.2.5.16).
    fn path_record(&self, id: &ConnectionId) -> [u8; 64] {
        let route = self.user_path(id);
        let mut record = [0; 64];
        let mut put = |at: usize, bytes: &[u8]| {
            for (to, from) in record.iter_mut().skip(at).zip(bytes) {
                *to = *from;
            }
        };
        put(0, &id.service_of(&id.destination).to_be_bytes());
        put(8, &route.dgid);
        put(24, &route.sgid);
        // In the order of the wire already.
        put(40, &route.dlid.to_ne_bytes());
        put(42, &route.slid.to_ne_bytes());
        put(47, &[route.hop_limit, route.traffic_class, 1 << 7 | 1]);
        put(50, &route.pkey.to_ne_bytes());
        put(54, &[EXACTLY << 6 | self.path_mtu, EXACTLY << 6 | RATE]);
        put(56, &[EXACTLY << 6 | PACKET_LIFE_TIME]);
        record
    }

    /// `INIT_QP_ATTR`: the attributes for the next step of a queue pair.
    pub(super) fn queue_pair_attributes(
        &self,
        file: FileKey,
        handle: u32,
        state: u32,
    ) -> Result<CmQpAttr, Errno> {
        use ExchangeState::*;
        let id = self.id_of(file, handle)?;
        if state > 6 || !id.has_device {
            return Err(libc::EINVAL);
        }
        let exchange = &id.exchange;
        let own = CmQpAttr {
            qp_state: state,
            ..CmQpAttr::default()
        };
        if !exchange.exists || id.is_datagram() {
            let base = mask::STATE | mask::PKEY_INDEX | mask::PORT;
            let kind = if id.is_datagram() {
                mask::QKEY
            } else {
                mask::ACCESS_FLAGS
            };
            return Ok(CmQpAttr {
                qp_attr_mask: base | kind,
                qkey: if id.is_datagram() { UDP_QKEY } else { 0 },
                port_num: PORT,
                ..own
            });
        }
        let knows_peer = matches!(
            exchange.state,
            RequestReceived | ReplySent | ReplyReceivedThere | ReplyReceived | Established
        );
        let is_asking = matches!(exchange.state, RequestSent | RequestReceivedThere);
        let is_reliable = id.qp_type == qp_type::RC;
        let if_reliable = |bits: u32| if is_reliable { bits } else { 0 };
        match state {
            INIT if knows_peer || is_asking => Ok(CmQpAttr {
                qp_attr_mask: mask::STATE | mask::ACCESS_FLAGS | mask::PKEY_INDEX | mask::PORT,
                qp_access_flags: access(exchange.responder_resources),
                port_num: PORT,
                ..own
            }),
            READY_TO_RECEIVE if knows_peer => Ok(CmQpAttr {
                qp_attr_mask: mask::STATE
                    | mask::AV
                    | mask::PATH_MTU
                    | mask::DEST_QPN
                    | mask::RQ_PSN
                    | if_reliable(mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER),
                ah_attr: self.path_attributes(exchange.peer.ok_or(libc::EINVAL)?),
                path_mtu: exchange.mtu.into(),
                dest_qp_num: exchange.remote_qpn,
                rq_psn: exchange.receive_psn,
                max_dest_rd_atomic: exchange.responder_resources,
                ..own
            }),
            READY_TO_SEND if knows_peer => Ok(CmQpAttr {
                qp_attr_mask: mask::STATE
                    | mask::SQ_PSN
                    | if_reliable(
                        mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC,
                    ),
                sq_psn: exchange.send_psn,
                timeout: id.ack_timeout.unwrap_or(exchange.ack_timeout),
                retry_cnt: exchange.retry_count,
                rnr_retry: exchange.rnr_retry_count,
                max_rd_atomic: exchange.initiator_depth,
                ..own
            }),
            _ => Err(libc::EINVAL),
        }
    }
}

/// `IB_ACCESS_REMOTE_WRITE`, and reads and atomics if there are resources for them.
fn access(responder_resources: u8) -> u32 {
    const REMOTE_WRITE: u32 = 1 << 1;
    const REMOTE_READ: u32 = 1 << 2;
    const REMOTE_ATOMIC: u32 = 1 << 3;
    match responder_resources {
        0 => REMOTE_WRITE,
        _ => REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC,
    }
}
