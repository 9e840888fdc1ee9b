//! Channels of asynchronous events beyond the first.

use std::sync::Arc;

use super::arguments::{Kind, Spec};
use super::{Call, Made, limits};
use crate::soft::client::Errno;
use crate::softcx::channel::{Carries, Channel};

pub(super) const ATTRIBUTES: &[Spec] = &[(0, Kind::New, true)];

pub(super) fn allocate(call: &mut Call<'_>) -> Result<(), Errno> {
    call.opened()?;
    if call.context.events.channels() >= limits::ASYNC_CHANNELS {
        return Err(libc::EMFILE);
    }
    let (channel, descriptor) = Channel::new(Carries::AsyncEvents)?;
    call.made.push(Made::AsyncChannel(channel.inode()));
    call.context.events.add_channel(Arc::new(channel));
    let number = call.give(descriptor)?;
    call.arguments.answer_handle(0, number as u64);
    Ok(())
}
