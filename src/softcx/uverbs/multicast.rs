//! Multicast groups of queue pairs.

use super::Call;
use crate::soft::client::Errno;
use crate::softcx::abi::Multicast;

pub(super) fn attach(call: &mut Call<'_>) -> Result<(), Errno> {
    let request: Multicast = call.request()?;
    let qp = call.tables.objects.qp(request.qp_handle)?;
    let client = &call.context.client;
    client.attach_multicast(qp.qpn, request.gid, request.mlid)
}

pub(super) fn detach(call: &mut Call<'_>) -> Result<(), Errno> {
    let request: Multicast = call.request()?;
    let qp = call.tables.objects.qp(request.qp_handle)?;
    let client = &call.context.client;
    client.detach_multicast(qp.qpn, request.gid, request.mlid)
}
