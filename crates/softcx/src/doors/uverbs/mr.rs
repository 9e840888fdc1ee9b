//! Memory regions.

use super::UverbsCall;
use super::arguments::{AttributeKind, AttributeSpec};
use crate::device::client::{Errno, MrChange, MrRange};
use crate::doors::abi::{DeregMr, RegMr, RegMrResp, ReregMr, ReregMrResp};
use crate::doors::objects::{MrObject, Object};
use crate::doors::pages::PAGE_BYTES;

/// `ib_uverbs_access_flags`.
const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 1 << 1;
const REMOTE_ATOMIC: u32 = 1 << 3;
const ON_DEMAND: u32 = 1 << 6;
/// Flags that a device may ignore.
const OPTIONAL: u32 = 0x3ff0_0000;
/// Everything up to IB_ACCESS_HUGETLB.
const KNOWN: u32 = 0xff | OPTIONAL;
/// `ibv_rereg_mr_flags`.
const CHANGE_TRANSLATION: u32 = 1;
const CHANGE_PD: u32 = 1 << 1;
const CHANGE_ACCESS: u32 = 1 << 2;

pub(super) fn reg(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: RegMr = call.request()?;
    let range = range(request.start, request.length, request.hca_va)?;
    let access = checked(request.access_flags)?;
    let pd = call.tables.objects.pd(request.pd_handle)?;
    let key = call.client().reg_mr(pd, range, access)?;
    let mr = MrObject {
        key,
        pd,
        len_bytes: range.len_bytes,
        iova: range.iova,
    };
    let mr_handle = call.insert(Object::Mr(mr))?;
    call.respond(RegMrResp {
        mr_handle,
        lkey: key,
        rkey: key,
    });
    Ok(())
}

pub(super) fn rereg(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ReregMr = call.request()?;
    if request.flags == 0 {
        return Err(libc::EINVAL);
    }
    if request.flags & !(CHANGE_TRANSLATION | CHANGE_PD | CHANGE_ACCESS) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let wanted = |flag: u32| request.flags & flag != 0;
    let mut mr = call.tables.objects.mr(request.mr_handle)?;
    let mut change = MrChange::default();
    if wanted(CHANGE_TRANSLATION) {
        let range = range(request.start, request.length, request.hca_va)?;
        (mr.len_bytes, mr.iova) = (range.len_bytes, range.iova);
        change.range = Some(range);
    }
    if wanted(CHANGE_ACCESS) {
        change.access = Some(checked(request.access_flags)?);
    }
    if wanted(CHANGE_PD) {
        mr.pd = call.tables.objects.pd(request.pd_handle)?;
        change.pd = Some(mr.pd);
    }
    mr.key = call.client().rereg_mr(mr.key, change)?;
    if let Some(Object::Mr(kept)) = call.tables.objects.get_mut(request.mr_handle) {
        *kept = mr;
    }
    call.respond(ReregMrResp {
        lkey: mr.key,
        rkey: mr.key,
    });
    Ok(())
}

pub(super) fn dereg(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DeregMr = call.request()?;
    let mr = call.tables.objects.mr(request.mr_handle)?;
    call.context.client.dereg_mr(mr.key)?;
    call.tables.objects.remove(request.mr_handle);
    Ok(())
}

pub(super) const QUERY_ATTRIBUTES: &[AttributeSpec] = &[
    (0, AttributeKind::Handle, true),
    (1, AttributeKind::Out(4), true),
    (2, AttributeKind::Out(4), true),
    (3, AttributeKind::Out(8), true),
    (4, AttributeKind::Out(8), false),
];

/// The query of a process that imports a region by its handle.
pub(super) fn query(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let handle = call.arguments.handle(0)?;
    let mr = call.tables.objects.mr(handle).map_err(|_| libc::ENOENT)?;
    call.arguments.answer(1, &mr.key.to_ne_bytes());
    call.arguments.answer(2, &mr.key.to_ne_bytes());
    call.arguments.answer(3, &mr.len_bytes.to_ne_bytes());
    call.arguments.answer(4, &mr.iova.to_ne_bytes());
    Ok(())
}

/// EINVAL for what a page table cannot say.
fn range(start: u64, len_bytes: u64, iova: u64) -> Result<MrRange, Errno> {
    let in_page = |address: u64| address % PAGE_BYTES as u64;
    let ends = start
        .checked_add(len_bytes)
        .and(iova.checked_add(len_bytes));
    if len_bytes == 0 || ends.is_none() || in_page(start) != in_page(iova) {
        return Err(libc::EINVAL);
    }
    Ok(MrRange {
        start,
        len_bytes,
        iova,
    })
}

/// The access that the device has to know of.
fn checked(access: u32) -> Result<u32, Errno> {
    if access & !KNOWN != 0 {
        return Err(libc::EINVAL);
    }
    if access & (REMOTE_WRITE | REMOTE_ATOMIC) != 0 && access & LOCAL_WRITE == 0 {
        return Err(libc::EINVAL);
    }
    if access & ON_DEMAND != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    Ok(access & !OPTIONAL)
}
