//! Completion channels.

use std::sync::Arc;

use super::{CreatedObject, UverbsCall};
use crate::device::client::Errno;
use crate::doors::abi::{CreateCompChannel, CreateCompChannelResp};
use crate::doors::context::CompletionChannel;
use crate::doors::event_pipe::{ChannelKind, EventPipe};
use crate::doors::limits;
use crate::doors::objects::Object;

pub(super) fn create(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let _: CreateCompChannel = call.request()?;
    forget_closed(call);
    if call.tables.channels.len() >= limits::CHANNELS {
        return Err(libc::EMFILE);
    }
    let (channel, descriptor) = EventPipe::new(ChannelKind::Completions)?;
    let inode = channel.inode();
    let number = call.give(descriptor, |call, number| {
        call.respond(CreateCompChannelResp { fd: number as u32 });
    })?;
    call.made.push(CreatedObject::CompletionChannel(inode));
    call.tables.channels.push(CompletionChannel {
        channel: Arc::new(channel),
        number,
        space: call.descriptors.space(),
    });
    Ok(())
}

/// No command reports that a process has closed a channel, so closed ones are removed before another is created, unless a queue uses them.
fn forget_closed(call: &mut UverbsCall<'_>) {
    let open = |it: &CompletionChannel| {
        it.space != call.descriptors.space()
            || call.descriptors.inode(it.number) == Some(it.channel.inode())
            || call.tables.objects.iter().any(|object| match object {
                Object::Cq(cq) => cq
                    .completions
                    .as_ref()
                    .is_some_and(|completions| Arc::ptr_eq(completions.channel(), &it.channel)),
                _ => false,
            })
    };
    let kept: Vec<bool> = call.tables.channels.iter().map(open).collect();
    let mut kept = kept.into_iter();
    call.tables.channels.retain(|_| kept.next().unwrap_or(true));
}

/// The channel that a process names by its descriptor.
pub(super) fn find(call: &UverbsCall<'_>, number: i32) -> Result<Arc<EventPipe>, Errno> {
    let inode = call.descriptors.inode(number).ok_or(libc::EBADF)?;
    call.tables
        .channels
        .iter()
        .find(|it| it.channel.inode() == inode)
        .map(|it| Arc::clone(&it.channel))
        .ok_or(libc::EBADF)
}
