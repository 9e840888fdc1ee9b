//! Protection domains.

use super::DRIVER;
use super::UverbsCall;
use super::arguments::{AttributeKind, AttributeSpec};
use crate::device::client::Errno;
use crate::doors::abi::{AllocPd, AllocPdResp, DeallocPd, Layout, Mlx5AllocPdResp};
use crate::doors::objects::Object;

pub(super) fn alloc(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let _: AllocPd = call.request()?;
    let pd = call.context.client.alloc_pd()?;
    let pd_handle = call.insert(Object::Pd(pd))?;
    call.respond(AllocPdResp { pd_handle });
    call.driver_respond(Mlx5AllocPdResp { pdn: pd });
    Ok(())
}

pub(super) fn dealloc(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DeallocPd = call.request()?;
    let pd = call.tables.objects.pd(request.pd_handle)?;
    // The device has no objects for address handles.
    let uses = |object: &Object| matches!(object, Object::Ah(of) if *of == pd);
    if call.tables.objects.iter().any(uses) {
        return Err(libc::EBUSY);
    }
    call.context.client.dealloc_pd(pd)?;
    call.tables.objects.remove(request.pd_handle);
    Ok(())
}

pub(super) const QUERY_ATTRIBUTES: &[AttributeSpec] = &[
    (DRIVER, AttributeKind::Handle, true),
    (
        DRIVER + 1,
        AttributeKind::Out(Mlx5AllocPdResp::BYTES as u16),
        true,
    ),
];

/// The query of a process that imports a domain by its handle.
pub(super) fn query(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let handle = call.arguments.handle(DRIVER)?;
    let pdn = call.tables.objects.pd(handle).map_err(|_| libc::ENOENT)?;
    call.arguments.answer(DRIVER + 1, &pdn.to_ne_bytes());
    Ok(())
}
