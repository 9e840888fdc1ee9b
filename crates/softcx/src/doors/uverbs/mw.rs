//! Memory windows.

use super::UverbsCall;
use crate::device::client::Errno;
use crate::doors::abi::{AllocMw, AllocMwResp, DeallocMw};
use crate::doors::objects::Object;

pub(super) fn alloc(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: AllocMw = call.request()?;
    if !(1..=2).contains(&request.mw_type) {
        return Err(libc::EINVAL);
    }
    let pd = call.tables.objects.pd(request.pd_handle)?;
    let rkey = call.context.client.alloc_mw(pd, request.mw_type)?;
    let mw_handle = call.insert(Object::Mw(rkey))?;
    call.respond(AllocMwResp { mw_handle, rkey });
    Ok(())
}

pub(super) fn dealloc(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DeallocMw = call.request()?;
    let key = call.tables.objects.mw(request.mw_handle)?;
    call.context.client.dealloc_mw(key)?;
    call.tables.objects.remove(request.mw_handle);
    Ok(())
}
