//! A call in progress, and how it is undone if it fails.

use std::os::fd::OwnedFd;

use super::arguments::{Arguments, AttributeKind, AttributeSpec};
use crate::device::client::{Client, Errno};
use crate::doors::abi::Layout;
use crate::doors::context::{Descriptors, DeviceContext, Tables};
use crate::doors::objects::Object;

/// Namespace of the driver, in numbers of objects, methods and attributes.
pub(super) const DRIVER: u16 = 1 << 12;
/// `UVERBS_ATTR_UHW_IN` and `UVERBS_ATTR_UHW_OUT`.
pub(super) const DRIVER_IN: AttributeSpec = (DRIVER, AttributeKind::In(0, u16::MAX), false);
pub(super) const DRIVER_OUT: AttributeSpec = (DRIVER + 1, AttributeKind::Out(0), false);

/// A call in progress.
pub(super) struct UverbsCall<'a> {
    pub(super) context: &'a DeviceContext,
    pub(super) tables: &'a mut Tables,
    pub(super) descriptors: &'a dyn Descriptors,
    pub(super) arguments: Arguments,
    /// What is to be taken back if the call fails after all, in the order of making.
    pub(super) made: Vec<CreatedObject>,
}

/// Something that a call has created.
#[derive(Debug, Clone, Copy)]
pub(super) enum CreatedObject {
    Object(u32),
    Descriptor(i32),
    CompletionChannel((u64, u64)),
    AsyncChannel((u64, u64)),
    /// The context itself was opened.
    Opening,
}

impl<'a> UverbsCall<'a> {
    pub(super) fn new(
        context: &'a DeviceContext,
        tables: &'a mut Tables,
        descriptors: &'a dyn Descriptors,
        arguments: Arguments,
    ) -> UverbsCall<'a> {
        UverbsCall {
            context,
            tables,
            descriptors,
            arguments,
            made: Vec::new(),
        }
    }

    /// Writes the answers of a call that succeeded, and takes back what one made that failed.
    pub(super) fn finish(self, done: Result<(), Errno>) -> Result<(), Errno> {
        let done = done.and_then(|()| self.arguments.write_answers());
        if done.is_err() {
            for made in self.made.iter().rev() {
                match *made {
                    CreatedObject::Object(handle) => {
                        if let Some(object) = self.tables.objects.remove(handle) {
                            self.context.discard(self.tables, &object);
                        }
                    }
                    CreatedObject::Descriptor(number) => self.descriptors.take_back(number),
                    CreatedObject::CompletionChannel(inode) => {
                        let channels = &mut self.tables.channels;
                        channels.retain(|it| it.channel.inode() != inode);
                    }
                    CreatedObject::AsyncChannel(inode) => self.context.events.remove_channel(inode),
                    CreatedObject::Opening => self.tables.opened = false,
                }
            }
        }
        done
    }

    /// The device, for what lies in the memory of the process that calls.
    pub(super) fn client(&self) -> Client {
        self.context.client.seen_from(self.descriptors.space())
    }

    /// EINVAL before the context was opened, as for all but a few commands.
    pub(super) fn opened(&self) -> Result<(), Errno> {
        if self.tables.opened {
            Ok(())
        } else {
            Err(libc::EINVAL)
        }
    }

    /// What the driver's part of libibverbs sent along.
    pub(super) fn driver_request<T: Layout>(&self) -> Result<T, Errno> {
        Ok(T::read(&self.arguments.bytes(DRIVER_IN.0)?))
    }

    pub(super) fn driver_respond<T: Layout>(&mut self, response: T) {
        self.arguments.answer(DRIVER_OUT.0, &response.to_bytes());
    }

    /// How long an answer to the driver's part may be.
    pub(super) fn driver_room<T: Layout>(&self) -> u32 {
        self.arguments.length(DRIVER_OUT.0).min(T::BYTES) as u32
    }

    /// Puts an object of the device into the table: its handle. Undoes its making if there is no room.
    pub(super) fn insert(&mut self, object: Object) -> Result<u32, Errno> {
        match self.tables.objects.insert(object.clone()) {
            Ok(handle) => {
                self.made.push(CreatedObject::Object(handle));
                Ok(handle)
            }
            Err(errno) => {
                self.context.discard(self.tables, &object);
                Err(errno)
            }
        }
    }

    /// Hands a descriptor to the process; `answer` writes its number. All answers are written once before, with a number that is
    /// none: from another process nothing can be taken back that was given, so this has to be the last that fails.
    pub(super) fn give(
        &mut self,
        descriptor: OwnedFd,
        answer: impl Fn(&mut Self, i32),
    ) -> Result<i32, Errno> {
        let answered = self.arguments.answers();
        answer(self, -1);
        self.arguments.write_answers()?;
        self.arguments.withdraw_answers(answered);
        let number = self.descriptors.give(descriptor)?;
        self.made.push(CreatedObject::Descriptor(number));
        answer(self, number);
        Ok(number)
    }
}
