//! Channels of asynchronous events beyond the first.

use std::sync::Arc;

use super::arguments::{Kind, Spec};
use super::{Call, Made};
use crate::device::client::Errno;
use crate::doors::channel::{Carries, Channel};
use crate::doors::limits;

pub(super) const ATTRIBUTES: &[Spec] = &[(0, Kind::New, true)];

pub(super) fn allocate(call: &mut Call<'_>) -> Result<(), Errno> {
    call.opened()?;
    if call.context.events.channels() >= limits::ASYNC_CHANNELS {
        return Err(libc::EMFILE);
    }
    let (channel, descriptor) = Channel::new(Carries::AsyncEvents)?;
    call.made.push(Made::AsyncChannel(channel.inode()));
    call.context.events.add_channel(Arc::new(channel));
    call.give(descriptor, |call, number| {
        call.arguments.answer_handle(0, number as u64);
    })?;
    Ok(())
}

/// The channel that an attribute names by its descriptor, if the attribute is there.
pub(super) fn find(call: &Call<'_>, id: u16) -> Result<Option<Arc<Channel>>, Errno> {
    if !call.arguments.has(id) {
        return Ok(None);
    }
    let number = call.arguments.descriptor(id)?;
    let inode = call.descriptors.inode(number).ok_or(libc::EBADF)?;
    let channel = call.context.events.find(inode);
    channel.map(Some).ok_or(libc::EBADF)
}
