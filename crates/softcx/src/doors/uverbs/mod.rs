//! The methods of the interface, as libibverbs and libmlx5 call them.
//!
//! A method that is not here answers EPROTONOSUPPORT; for most, libibverbs has an older command (`command`) that does the same.
//! What the device does not emulate answers EOPNOTSUPP.

mod ah;
mod arguments;
mod async_event;
mod call;
mod command;
mod completion_channel;
mod cq;
mod device;
mod gid;
mod mr;
mod multicast;
mod mw;
mod pd;
mod qp;
mod qp_attributes;
mod srq;
#[cfg(all(test, not(loom)))]
mod tests;
mod uar;

pub(in crate::doors) use self::device::{FIRMWARE, PART, port_capabilities};

use self::arguments::{Arguments, AttributeSpec};
use self::call::{CreatedObject, DRIVER, DRIVER_IN, DRIVER_OUT, UverbsCall};
use crate::device::client::Errno;
use crate::device::commands::{Answer, CommandKind};
use crate::doors::context::{Descriptors, DeviceContext};

/// Methods of regions that there is nothing for: memory of the device, pages brought in on demand, buffers of other devices.
const REG_DM_MR: u16 = 0;
const ADVISE_MR: u16 = 2;
const REG_DMABUF_MR: u16 = 4;

/// `uverbs_default_objects` and `mlx5_ib_objects`.
mod object {
    use super::DRIVER;

    pub(super) const DEVICE: u16 = 0;
    pub(super) const PD: u16 = 1;
    pub(super) const CQ: u16 = 3;
    pub(super) const QP: u16 = 4;
    pub(super) const SRQ: u16 = 5;
    pub(super) const MR: u16 = 7;
    pub(super) const FLOW_ACTION: u16 = 13;
    pub(super) const DM: u16 = 14;
    pub(super) const COUNTERS: u16 = 15;
    pub(super) const ASYNC_EVENT: u16 = 16;
    pub(super) const UAR: u16 = DRIVER + 8;
    /// The last object of the driver's that its headers know.
    pub(super) const LAST_OF_DRIVER: u16 = DRIVER + 9;
}

/// A method: object, number, attributes, and what it does.
struct Method(
    u16,
    u16,
    &'static [AttributeSpec],
    fn(&mut UverbsCall<'_>) -> Result<(), Errno>,
);

const METHODS: &[Method] = &[
    Method(object::DEVICE, 0, command::ATTRIBUTES, command::invoke),
    Method(
        object::DEVICE,
        2,
        device::PORT_ATTRIBUTES,
        device::query_port_method,
    ),
    Method(
        object::DEVICE,
        3,
        device::GET_ATTRIBUTES,
        device::get_context_method,
    ),
    Method(
        object::DEVICE,
        4,
        device::QUERY_ATTRIBUTES,
        device::query_context,
    ),
    Method(
        object::DEVICE,
        DRIVER,
        device::DRIVER_PORT_ATTRIBUTES,
        device::query_driver_port,
    ),
    Method(object::DEVICE, 5, gid::TABLE_ATTRIBUTES, gid::query_table),
    Method(object::DEVICE, 6, gid::ENTRY_ATTRIBUTES, gid::query_entry),
    Method(object::PD, DRIVER, pd::QUERY_ATTRIBUTES, pd::query),
    Method(object::CQ, 0, cq::CREATE_ATTRIBUTES, cq::create_method),
    Method(object::QP, 0, qp::CREATE_ATTRIBUTES, qp::create_method),
    Method(object::SRQ, 0, srq::CREATE_ATTRIBUTES, srq::create_method),
    Method(object::MR, 3, mr::QUERY_ATTRIBUTES, mr::query),
    Method(
        object::ASYNC_EVENT,
        0,
        async_event::ATTRIBUTES,
        async_event::allocate,
    ),
    Method(object::UAR, DRIVER, uar::ALLOC_ATTRIBUTES, uar::allocate),
    Method(
        object::UAR,
        DRIVER + 1,
        uar::DESTROY_ATTRIBUTES,
        uar::destroy,
    ),
];

impl DeviceContext {
    /// `RDMA_VERBS_IOCTL`, with its argument: an address in the process that calls.
    pub(crate) fn ioctl(&self, argument: u64, descriptors: &dyn Descriptors) -> Result<(), Errno> {
        let header = arguments::header(descriptors.space(), argument)?;
        let method = METHODS
            .iter()
            .find(|method| method.0 == header.object_id && method.1 == header.method_id);
        let Some(Method(_, _, specs, run)) = method else {
            return Err(missing(header.object_id, header.method_id));
        };
        let specs = *specs;
        let arguments = Arguments::read(descriptors.space(), argument, header.num_attrs, specs)?;
        if let Some(kind) = command_of(header.object_id, header.method_id, &arguments)
            && self.issue(kind)? == Answer::Pretended
        {
            return Ok(());
        }
        let tables = &mut self.lock();
        let mut call = UverbsCall::new(self, tables, descriptors, arguments);
        let done = run(&mut call);
        call.finish(done)
    }
}

/// The command of the device that a call leads to.
fn command_of(object: u16, method: u16, arguments: &Arguments) -> Option<CommandKind> {
    match (object, method) {
        (object::DEVICE, 0) => command::kind(arguments),
        (object::CQ | object::QP | object::SRQ, 0) => Some(CommandKind::Create),
        _ => None,
    }
}

/// What is not emulated, and has no older command, answers so that a caller sees it; for the others there is one.
fn missing(object: u16, method: u16) -> Errno {
    match (object, method) {
        (object::MR, REG_DM_MR | ADVISE_MR | REG_DMABUF_MR) => libc::EOPNOTSUPP,
        (object::FLOW_ACTION | object::DM | object::COUNTERS, _) => libc::EOPNOTSUPP,
        (DRIVER..=object::LAST_OF_DRIVER, _) => libc::EOPNOTSUPP,
        _ => libc::EPROTONOSUPPORT,
    }
}
