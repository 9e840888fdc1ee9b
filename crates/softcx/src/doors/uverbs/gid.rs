//! The table of GIDs.

use super::UverbsCall;
use super::arguments::{AttributeKind, Spec};
use crate::device::client::Errno;
use crate::doors::abi::{GidEntry, Layout};
use crate::doors::port::{GIDS, PortIdentity};

/// `IB_UVERBS_GID_TYPE_IB` and `_ROCE_V2`.
const IB: u32 = 0;
const ROCE_V2: u32 = 2;
/// The loopback interface: that of this host that RoCE on the fabric would go over.
const LOOPBACK: u32 = 1;

pub(super) const TABLE_ATTRIBUTES: &[Spec] = &[
    (0, AttributeKind::In(8, 8), true),
    (1, AttributeKind::In(4, 8), false),
    (2, AttributeKind::Out(0), true),
    (3, AttributeKind::Out(8), true),
];

pub(super) fn query_table(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    let entry_bytes = call.arguments.number(0, u64::from(u16::MAX))? as usize;
    call.arguments.no_flags(1)?;
    if entry_bytes == 0 || call.arguments.length(2) < entry_bytes {
        return Err(libc::EINVAL);
    }
    let mut bytes = entry(&call.context.port).to_bytes();
    bytes.resize(entry_bytes, 0);
    call.arguments.answer(2, &bytes);
    call.arguments.answer(3, &1u64.to_ne_bytes());
    Ok(())
}

pub(super) const ENTRY_ATTRIBUTES: &[Spec] = &[
    (0, AttributeKind::In(8, 8), true),
    (1, AttributeKind::In(8, 8), true),
    (2, AttributeKind::In(4, 8), true),
    (3, AttributeKind::Out(GidEntry::BYTES as u16), true),
];

pub(super) fn query_entry(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    call.arguments.no_flags(2)?;
    let port = call.arguments.number(0, u64::from(u32::MAX))?;
    let index = call.arguments.number(1, u64::from(u32::MAX))?;
    if port != 1 || index >= u64::from(GIDS) {
        return Err(libc::EINVAL);
    }
    if index != 0 {
        return Err(libc::ENODATA);
    }
    let bytes = entry(&call.context.port).to_bytes();
    call.arguments.answer_and_clear(3, &bytes);
    Ok(())
}

fn entry(port: &PortIdentity) -> GidEntry {
    GidEntry {
        gid: port.gid,
        gid_index: 0,
        port_num: 1,
        gid_type: if port.is_ethernet() { ROCE_V2 } else { IB },
        netdev_ifindex: if port.is_ethernet() { LOOPBACK } else { 0 },
    }
}
