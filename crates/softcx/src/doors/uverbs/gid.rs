//! The table of GIDs.

use super::UverbsCall;
use super::arguments::{AttributeKind, AttributeSpec};
use crate::device::client::{Errno, GID_IS_EMPTY};
use crate::doors::abi::{GidEntry, Layout};
use crate::doors::port::GIDS;

/// `IB_UVERBS_GID_TYPE_IB` and `_ROCE_V2`.
const IB: u32 = 0;
const ROCE_V2: u32 = 2;
/// ::ffff:10.9.8.7, and an interface whose number nothing has here.
const FOREIGN: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 8, 7];
const FOREIGN_INTERFACE: u32 = i32::MAX as u32;

pub(super) const TABLE_ATTRIBUTES: &[AttributeSpec] = &[
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
    let room = call.arguments.length(2) / entry_bytes;
    let entries: Vec<GidEntry> = (0..GIDS).filter_map(|index| entry(call, index)).collect();
    if entries.len() > room {
        return Err(libc::EINVAL);
    }
    let mut bytes = Vec::new();
    for (end, entry) in (1..).zip(&entries) {
        bytes.extend_from_slice(&entry.to_bytes());
        bytes.resize(end * entry_bytes, 0);
    }
    call.arguments.answer(2, &bytes);
    call.arguments
        .answer(3, &(entries.len() as u64).to_ne_bytes());
    Ok(())
}

pub(super) const ENTRY_ATTRIBUTES: &[AttributeSpec] = &[
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
    let entry = entry(call, index as u32).ok_or(GID_IS_EMPTY)?;
    call.arguments.answer_and_clear(3, &entry.to_bytes());
    Ok(())
}

/// The entry at an index of the table, if it is one.
fn entry(call: &UverbsCall<'_>, index: u32) -> Option<GidEntry> {
    let port = &call.context.port;
    let own = call.context.client.gid_index().map(u32::from);
    let (gid, interface) = match index {
        _ if own == Some(index) => (port.gid, port.interface.index),
        _ if port.is_foreign_gid(index) => (FOREIGN, FOREIGN_INTERFACE),
        _ => return None,
    };
    Some(GidEntry {
        gid,
        gid_index: index,
        port_num: 1,
        gid_type: if port.is_ethernet() { ROCE_V2 } else { IB },
        netdev_ifindex: if port.is_ethernet() { interface } else { 0 },
    })
}
