//! Channels of asynchronous events beyond the first.

use std::sync::Arc;

use super::arguments::{AttributeKind, AttributeSpec};
use super::{CreatedObject, UverbsCall};
use crate::device::client::Errno;
use crate::doors::event_pipe::{ChannelKind, EventPipe};
use crate::doors::limits;

pub(super) const ATTRIBUTES: &[AttributeSpec] = &[(0, AttributeKind::New, true)];

pub(super) fn allocate(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    if call.context.events.channels() >= limits::ASYNC_CHANNELS {
        return Err(libc::EMFILE);
    }
    let (channel, descriptor) = EventPipe::new(ChannelKind::AsyncEvents)?;
    call.made.push(CreatedObject::AsyncChannel(channel.inode()));
    call.context.events.add_channel(Arc::new(channel));
    call.give(descriptor, |call, number| {
        call.arguments.answer_handle(0, number as u64);
    })?;
    Ok(())
}

/// The channel that an attribute names by its descriptor, if the attribute is there.
pub(super) fn find(call: &UverbsCall<'_>, id: u16) -> Result<Option<Arc<EventPipe>>, Errno> {
    if !call.arguments.has(id) {
        return Ok(None);
    }
    let number = call.arguments.descriptor(id)?;
    let inode = call.descriptors.inode(number).ok_or(libc::EBADF)?;
    let channel = call.context.events.find(inode);
    channel.map(Some).ok_or(libc::EBADF)
}
