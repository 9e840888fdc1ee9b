//! UAR pages.

use super::arguments::{AttributeKind, AttributeSpec};
use super::{DRIVER, UverbsCall};
use crate::device::client::Errno;
use crate::doors::objects::{Object, UarObject};
use crate::doors::pages::PAGE_BYTES;

pub(super) const ALLOC_ATTRIBUTES: &[AttributeSpec] = &[
    (DRIVER, AttributeKind::New, true),
    (DRIVER + 1, AttributeKind::In(8, 8), true),
    (DRIVER + 2, AttributeKind::Out(8), true),
    (DRIVER + 3, AttributeKind::Out(4), true),
    (DRIVER + 4, AttributeKind::Out(4), true),
];

#[allow(unsafe_code)] // hands the device a page of the file
pub(super) fn allocate(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    // MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF or _NC. Both kinds of register are alike here, but a host that cannot map registers write-combining has none of the
    // first kind (kernel, `MLX5_IB_METHOD_UAR_OBJ_ALLOC`: `wc_support`).
    let is_blueflame = call.arguments.number(DRIVER + 1, 1)? == 0;
    if is_blueflame && call.context.port.function.no_blueflame {
        return Err(libc::EOPNOTSUPP);
    }
    let page = call.tables.pages.take_uar()?;
    let at = call.tables.pages.uar(page);
    // SAFETY: a page of the mapping, which outlives the client of the context, and is given back after the number is freed.
    let uar = match unsafe { call.context.client.alloc_uar(at) } {
        Ok(uar) => uar,
        Err(errno) => {
            call.tables.pages.release_uar(page);
            return Err(errno);
        }
    };
    let handle = call.insert(Object::Uar(UarObject { uar, page }))?;
    let offset = u64::from(page) * PAGE_BYTES as u64;
    call.arguments.answer_handle(DRIVER, u64::from(handle));
    call.arguments.answer(DRIVER + 2, &offset.to_ne_bytes());
    call.arguments
        .answer(DRIVER + 3, &(PAGE_BYTES as u32).to_ne_bytes());
    call.arguments.answer(DRIVER + 4, &page.to_ne_bytes());
    Ok(())
}

pub(super) const DESTROY_ATTRIBUTES: &[AttributeSpec] = &[(DRIVER, AttributeKind::Handle, true)];

pub(super) fn destroy(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let handle = call.arguments.handle(DRIVER)?;
    let uar = call.tables.objects.uar(handle).map_err(|_| libc::ENOENT)?;
    call.context.free_uar(call.tables, uar)?;
    call.tables.objects.remove(handle);
    Ok(())
}

/// The device's number of the page that a queue names.
pub(super) fn find(call: &UverbsCall<'_>, page: u32) -> Result<u32, Errno> {
    let of_page = |object: &Object| match object {
        Object::Uar(uar) if uar.page == page => Some(uar.uar),
        _ => None,
    };
    let mut uars = call.tables.objects.iter().filter_map(of_page);
    uars.next().ok_or(libc::EINVAL)
}
