//! Multicast groups of queue pairs.

use super::UverbsCall;
use crate::device::client::Errno;
use crate::doors::abi::Multicast;
use crate::doors::limits;

pub(super) fn attach(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: Multicast = call.request()?;
    let qp = call.tables.objects.qp(request.qp_handle)?;
    let member = (qp.qpn, request.gid, request.mlid);
    let groups = &mut call.tables.groups;
    if groups.len() >= limits::MULTICAST as usize && !groups.contains(&member) {
        return Err(libc::ENOMEM);
    }
    let client = &call.context.client;
    client.attach_multicast(qp.qpn, request.gid, request.mlid)?;
    groups.insert(member);
    Ok(())
}

pub(super) fn detach(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: Multicast = call.request()?;
    let qp = call.tables.objects.qp(request.qp_handle)?;
    let client = &call.context.client;
    client.detach_multicast(qp.qpn, request.gid, request.mlid)?;
    let member = (qp.qpn, request.gid, request.mlid);
    call.tables.groups.remove(&member);
    Ok(())
}
