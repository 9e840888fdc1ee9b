//! Address handles. They exist in the process only; on Ethernet the driver asks for the station address.

use super::UverbsCall;
use crate::device::client::{Errno, GID_IS_EMPTY};
use crate::doors::abi::{CreateAh, CreateAhResp, DestroyAh, Mlx5CreateAhResp};
use crate::doors::objects::Object;
use crate::doors::port::{GIDS, PortIdentity};

pub(super) fn create(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: CreateAh = call.request()?;
    let (attributes, route) = (request.attr, request.attr.grh);
    let global = attributes.is_global != 0;
    let port = call.context.port;
    if attributes.port_num != 1
        || (port.needs_grh() && !global)
        || (global && u32::from(route.sgid_index) >= GIDS)
        || (global && port.is_foreign_gid(route.sgid_index.into()))
    {
        return Err(libc::EINVAL);
    }
    if global && call.context.client.gid_index() != Some(route.sgid_index) {
        return Err(GID_IS_EMPTY);
    }
    port.check_route(&route.dgid)?;
    let pd = call.tables.objects.pd(request.pd_handle)?;
    let ah_handle = call.insert(Object::Ah(pd))?;
    call.respond(CreateAhResp { ah_handle });
    if port.is_ethernet() {
        let response = Mlx5CreateAhResp {
            response_length: call.driver_room::<Mlx5CreateAhResp>(),
            dmac: PortIdentity::mac_of(&route.dgid),
            reserved: [0; 6],
        };
        call.driver_respond(response);
    }
    Ok(())
}

pub(super) fn destroy(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DestroyAh = call.request()?;
    call.tables.objects.ah(request.ah_handle)?;
    call.tables.objects.remove(request.ah_handle);
    Ok(())
}
