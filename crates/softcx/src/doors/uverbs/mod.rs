//! The methods of the interface, as libibverbs and libmlx5 call them.
//!
//! A method that is not here answers EPROTONOSUPPORT; for most, libibverbs has an older command (`command`) that does the same.
//! What the device does not emulate answers EOPNOTSUPP.

mod ah;
mod arguments;
mod async_event;
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

pub(in crate::doors) use self::device::{FIRMWARE, PART};

use std::os::fd::OwnedFd;

use self::arguments::{Arguments, Kind, Spec};
use crate::device::client::{Client, Errno};
use crate::doors::abi::Layout;
use crate::doors::context::{Context, Descriptors, Tables};
use crate::doors::objects::Object;

/// Namespace of the driver, in numbers of objects, methods and attributes.
const DRIVER: u16 = 1 << 12;
/// `UVERBS_ATTR_UHW_IN` and `UVERBS_ATTR_UHW_OUT`.
const DRIVER_IN: Spec = (DRIVER, Kind::In(0, u16::MAX), false);
const DRIVER_OUT: Spec = (DRIVER + 1, Kind::Out(0), false);

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
    &'static [Spec],
    fn(&mut Call<'_>) -> Result<(), Errno>,
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

/// A call in progress.
struct Call<'a> {
    context: &'a Context,
    tables: &'a mut Tables,
    descriptors: &'a dyn Descriptors,
    arguments: Arguments,
    /// What is to be taken back if the call fails after all, in the order of making.
    made: Vec<Made>,
}

/// Something that a call has made.
#[derive(Debug, Clone, Copy)]
enum Made {
    Object(u32),
    Descriptor(i32),
    CompletionChannel((u64, u64)),
    AsyncChannel((u64, u64)),
    /// The context itself was opened.
    Opening,
}

/// Does what one call asks for.
pub(super) fn call(
    context: &Context,
    tables: &mut Tables,
    argument: u64,
    descriptors: &dyn Descriptors,
) -> Result<(), Errno> {
    let header = arguments::header(descriptors.space(), argument)?;
    let method = METHODS
        .iter()
        .find(|method| method.0 == header.object_id && method.1 == header.method_id);
    let Some(Method(_, _, specs, run)) = method else {
        return Err(missing(header.object_id, header.method_id));
    };
    let specs = *specs;
    let arguments = Arguments::read(descriptors.space(), argument, header.num_attrs, specs)?;
    let mut call = Call {
        context,
        tables,
        descriptors,
        arguments,
        made: Vec::new(),
    };
    let done = run(&mut call);
    call.finish(done)
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

impl Call<'_> {
    fn finish(self, done: Result<(), Errno>) -> Result<(), Errno> {
        let done = done.and_then(|()| self.arguments.write_answers());
        if done.is_err() {
            for made in self.made.iter().rev() {
                match *made {
                    Made::Object(handle) => release(self.context, self.tables, handle),
                    Made::Descriptor(number) => self.descriptors.take_back(number),
                    Made::CompletionChannel(inode) => {
                        let channels = &mut self.tables.channels;
                        channels.retain(|it| it.channel.inode() != inode);
                    }
                    Made::AsyncChannel(inode) => self.context.events.remove_channel(inode),
                    Made::Opening => self.tables.opened = false,
                }
            }
        }
        done
    }

    /// The device, for what lies in the memory of the process that calls.
    fn client(&self) -> Client {
        self.context.client.seen_from(self.descriptors.space())
    }

    /// EINVAL before the context was opened, as for all but a few commands.
    fn opened(&self) -> Result<(), Errno> {
        if self.tables.opened {
            Ok(())
        } else {
            Err(libc::EINVAL)
        }
    }

    /// What the driver's part of libibverbs sent along.
    fn driver_request<T: Layout>(&self) -> Result<T, Errno> {
        Ok(T::read(&self.arguments.bytes(DRIVER_IN.0)?))
    }

    fn driver_respond<T: Layout>(&mut self, response: T) {
        self.arguments.answer(DRIVER_OUT.0, &response.to_bytes());
    }

    /// How long an answer to the driver's part may be.
    fn driver_room<T: Layout>(&self) -> u32 {
        self.arguments.length(DRIVER_OUT.0).min(T::BYTES) as u32
    }

    /// Puts an object of the device into the table: its handle. `release` undoes its making if there is no room.
    fn insert(&mut self, object: Object) -> Result<u32, Errno> {
        match self.tables.objects.insert(object.clone()) {
            Ok(handle) => {
                self.made.push(Made::Object(handle));
                Ok(handle)
            }
            Err(errno) => {
                discard(self.context, self.tables, &object);
                Err(errno)
            }
        }
    }

    /// Hands a descriptor to the process; `tell` answers with its number. All answers are written once before, with a number that is
    /// none: from another process nothing can be taken back that was given, so this has to be the last that fails.
    fn give(&mut self, descriptor: OwnedFd, tell: impl Fn(&mut Self, i32)) -> Result<i32, Errno> {
        let told = self.arguments.answers();
        tell(self, -1);
        self.arguments.write_answers()?;
        self.arguments.withdraw_answers(told);
        let number = self.descriptors.give(descriptor)?;
        self.made.push(Made::Descriptor(number));
        tell(self, number);
        Ok(number)
    }
}

fn release(context: &Context, tables: &mut Tables, handle: u32) {
    if let Some(object) = tables.objects.remove(handle) {
        discard(context, tables, &object);
    }
}

/// Takes an object out of the device that nobody has used yet: it cannot be busy.
fn discard(context: &Context, tables: &mut Tables, object: &Object) {
    let client = &context.client;
    let _ = match object {
        Object::Pd(pd) => client.dealloc_pd(*pd),
        Object::Mr(mr) => client.dereg_mr(mr.key),
        Object::Mw(key) => client.dealloc_mw(*key),
        Object::Cq(it) => cq::remove(context, it).map(|_| ()),
        Object::Srq(it) => srq::remove(context, it.srqn).map(|_| ()),
        Object::Qp(it) => qp::remove(context, it.qpn).map(|_| ()),
        Object::Ah(_) => Ok(()),
        Object::Uar(it) => uar::remove(context, tables, *it),
    };
}
