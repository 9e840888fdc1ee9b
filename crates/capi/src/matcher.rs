//! Messages with tags, received from any peer.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int};

use crate::argument::{
    VersionedStruct, array, choice, descriptor, out_handle, out_optional, read_struct, timeout,
    write_struct,
};
use crate::boundary::{call, guard};
use crate::device::doorbell_domain;
use crate::endpoint::write_failure;
use crate::error::doorbell_failure;
use crate::failure::Failure;
use crate::group::doorbell_group;
use crate::handle::{CObject, create, destroy, get, take};
use crate::message::{
    doorbell_message_config, doorbell_message_queue, doorbell_message_ticket,
    doorbell_pending_send, doorbell_posted_send, message_config, take_queues, with_ticket,
};
use crate::stream::doorbell_stream;
use crate::work::{doorbell_slice, with_slices};
use doorbell_rs::{Envelope, Error, MatchTicket, Matcher, MatcherConfig, Source, TagSelector};

/// In place of the index of a peer.
pub const DOORBELL_ANY_PEER: u32 = 4294967295;
/// All bits of a tag.
#[allow(dead_code)] // means nothing of its own: all bits are ignored
pub const DOORBELL_ANY_TAG: u32 = 4294967295;

/// A matcher. Its calls are those of any thread.
pub struct doorbell_matcher {
    inner: Matcher,
}

impl CObject for doorbell_matcher {
    const NAME: &'static str = "doorbell_matcher";
}

/// A handle of a receive.
pub struct doorbell_match_ticket {
    inner: MatchTicket,
}

impl CObject for doorbell_match_ticket {
    const NAME: &'static str = "doorbell_match_ticket";
}

/// [`MatcherConfig`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_matcher_config {
    pub struct_size: u32,
    pub unexpected: u32,
    pub receives: u32,
    pub reserved: u32,
    pub messages: *const doorbell_message_config,
}

// SAFETY: repr(C), four 4-byte fields and a pointer, without padding, integers and a raw pointer, and the size first.
unsafe impl VersionedStruct for doorbell_matcher_config {
    const BYTES_FIRST: usize = 16 + size_of::<*const doorbell_message_config>();

    fn defaults() -> doorbell_matcher_config {
        let config = MatcherConfig::default();
        doorbell_matcher_config {
            struct_size: size_of::<doorbell_matcher_config>() as u32,
            unexpected: config.unexpected,
            receives: config.receives,
            reserved: 0,
            messages: std::ptr::null(),
        }
    }
}

const _: () = assert!(size_of::<doorbell_matcher_config>() == doorbell_matcher_config::BYTES_FIRST);

/// [`Envelope`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_envelope {
    pub len_bytes: u64,
    pub peer: u32,
    pub tag: u32,
}

impl From<Envelope> for doorbell_envelope {
    fn from(envelope: Envelope) -> doorbell_envelope {
        doorbell_envelope {
            len_bytes: envelope.len_bytes,
            // There are as many peers as a C program has given.
            peer: envelope.peer as u32,
            tag: envelope.tag,
        }
    }
}

/// The configuration behind a pointer: null is the defaults.
///
/// # Safety
/// As [`read_struct`], and of the pointer in it.
unsafe fn matcher_config(config: *const doorbell_matcher_config) -> Result<MatcherConfig, Failure> {
    if config.is_null() {
        return Ok(MatcherConfig::default());
    }
    // SAFETY: the caller's promise.
    let (given, messages) = unsafe {
        let given = read_struct(config, "config")?;
        (given, message_config(given.messages)?)
    };
    if given.reserved != 0 {
        return Err(choice("reserved", given.reserved, 0));
    }
    Ok(MatcherConfig::default()
        .unexpected(given.unexpected)
        .receives(given.receives)
        .messages(messages))
}

fn source(from: u32) -> Source {
    match from {
        DOORBELL_ANY_PEER => Source::Any,
        peer => Source::Peer(peer as usize),
    }
}

/// Writes what is known of a message, if the caller wants it.
///
/// # Safety
/// The pointer is null, or aligned and good for a write.
unsafe fn write_envelope(place: *mut doorbell_envelope, found: Envelope) {
    // SAFETY: the caller's promise.
    if let Some(place) = unsafe { out_optional(place) } {
        place.write(found.into());
    }
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_config_init(
    config: *mut doorbell_matcher_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_matcher_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// Makes a matcher of connected queues.
///
/// # Safety
/// As the header says of pointers; no other thread uses the queues now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_create(
    domain: *const doorbell_domain,
    queues: *const *mut doorbell_message_queue,
    count: u32,
    config: *const doorbell_matcher_config,
    matcher: *mut *mut doorbell_matcher,
) -> c_int {
    call!(place = out_handle(matcher), domain = get(domain), || {
        // SAFETY: the caller's promise about structs.
        let config = match unsafe { matcher_config(config) } {
            Err(failure) if failure.leaves_handles() => return Err(failure),
            config => config,
        };
        // The code alone tells the caller whether the queues are gone, so any other failure destroys them.
        // SAFETY: the caller's promise about arrays and handles.
        let queues = unsafe { take_queues(queues, count) }?;
        let inner = Matcher::new(&domain.inner, queues, &config?)?;
        Ok(place.set(doorbell_matcher { inner }))
    })
}

/// Makes a matcher of ranks of a group.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_matcher(
    group: *const doorbell_group,
    ranks: *const u32,
    rank_count: u32,
    tag: u64,
    config: *const doorbell_matcher_config,
    matcher: *mut *mut doorbell_matcher,
) -> c_int {
    call!(place = out_handle(matcher), group = get(group), || {
        // SAFETY: the caller's promise about arrays and structs.
        let (ranks, config) = unsafe {
            let ranks = array(ranks, rank_count as usize, "ranks")?;
            (ranks, matcher_config(config)?)
        };
        let ranks = (!ranks.is_empty()).then_some(ranks);
        let inner = group.inner.matcher(ranks, tag, &config)?;
        Ok(place.set(doorbell_matcher { inner }))
    })
}

/// Destroys a matcher.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_destroy(matcher: *mut doorbell_matcher) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(matcher, "matcher") }.map(|()| 0))
}

/// Queues a message and the wait for it.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_send(
    matcher: *mut doorbell_matcher,
    stream: *mut doorbell_stream,
    peer: u32,
    tag: u32,
    slices: *const doorbell_slice,
    slice_count: u32,
    ticket: *mut *mut doorbell_message_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles, places and slices.
    guard(|| unsafe {
        with_ticket(ticket, || {
            let (matcher, stream) = (get(matcher, "matcher")?, get(stream, "stream")?);
            with_slices(slices, slice_count, |slices| {
                let matcher = &matcher.inner;
                Ok(matcher.send(stream.executor(), peer as usize, tag, slices)?)
            })
        })
    })
}

/// Queues a message.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_start_send(
    matcher: *mut doorbell_matcher,
    stream: *mut doorbell_stream,
    peer: u32,
    tag: u32,
    slices: *const doorbell_slice,
    slice_count: u32,
    pending: *mut *mut doorbell_pending_send,
) -> c_int {
    call!(
        place = out_handle(pending),
        matcher = get(matcher),
        stream = get(stream),
        || {
            // SAFETY: the caller's promise about slices.
            let sent = unsafe {
                with_slices(slices, slice_count, |slices| {
                    let matcher = &matcher.inner;
                    Ok(matcher.start_send(stream.executor(), peer as usize, tag, slices)?)
                })
            }?;
            Ok(place.set(doorbell_pending_send::new(sent)))
        }
    )
}

/// Queues the wait for a message.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_wait_send(
    matcher: *mut doorbell_matcher,
    stream: *mut doorbell_stream,
    pending: *mut doorbell_pending_send,
    ticket: *mut *mut doorbell_message_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles and places.
    guard(|| unsafe {
        with_ticket(ticket, || {
            let (matcher, stream) = (get(matcher, "matcher")?, get(stream, "stream")?);
            // Last, so that nothing else is refused after it.
            let pending = take(pending, "pending")?.into_inner();
            Ok(matcher.inner.wait_send(stream.executor(), pending)?)
        })
    })
}

/// Sends a message from the calling thread.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_send_now(
    matcher: *mut doorbell_matcher,
    peer: u32,
    tag: u32,
    slices: *const doorbell_slice,
    slice_count: u32,
    timeout_ms: i64,
) -> c_int {
    call!(matcher = get(matcher), || {
        let timeout = timeout(timeout_ms)?;
        // SAFETY: the caller's promise about slices.
        unsafe {
            with_slices(slices, slice_count, |slices| {
                let matcher = &matcher.inner;
                matcher.send_now(peer as usize, tag, slices, timeout)?;
                Ok(0)
            })
        }
    })
}

/// Sends a message from the calling thread, and does not wait until its memory may be used again.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_start_send_now(
    matcher: *mut doorbell_matcher,
    peer: u32,
    tag: u32,
    slices: *const doorbell_slice,
    slice_count: u32,
    posted: *mut *mut doorbell_posted_send,
    timeout_ms: i64,
) -> c_int {
    call!(place = out_handle(posted), matcher = get(matcher), || {
        let timeout = timeout(timeout_ms)?;
        // SAFETY: the caller's promise about slices.
        let sent = unsafe {
            with_slices(slices, slice_count, |slices| {
                let matcher = &matcher.inner;
                Ok(matcher.start_send_now(peer as usize, tag, slices, timeout)?)
            })
        }?;
        Ok(place.set(doorbell_posted_send { inner: sent }))
    })
}

/// Waits for a message that a thread has sent.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_wait_send_now(
    matcher: *mut doorbell_matcher,
    posted: *mut doorbell_posted_send,
    timeout_ms: i64,
) -> c_int {
    call!(matcher = get(matcher), posted = get(posted), || {
        let timeout = timeout(timeout_ms)?;
        matcher.inner.wait_send_now(&posted.inner, timeout)?;
        Ok(0)
    })
}

/// Queues a receive.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_recv(
    matcher: *mut doorbell_matcher,
    stream: *mut doorbell_stream,
    from: u32,
    tag: u32,
    ignored: u32,
    slices: *const doorbell_slice,
    slice_count: u32,
    ticket: *mut *mut doorbell_match_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and slices.
        unsafe {
            let mut place = out_optional(ticket);
            if let Some(place) = &mut place {
                place.write(std::ptr::null_mut());
            }
            let (matcher, stream) = (get(matcher, "matcher")?, get(stream, "stream")?);
            let tags = TagSelector::masked(tag, ignored);
            let inner = with_slices(slices, slice_count, |slices| {
                let matcher = &matcher.inner;
                Ok(matcher.recv(stream.executor(), source(from), tags, slices)?)
            })?;
            place.map(|place| place.write(create(doorbell_match_ticket { inner })));
        }
        Ok(0)
    })
}

/// Receives a message in the calling thread.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_recv_now(
    matcher: *mut doorbell_matcher,
    from: u32,
    tag: u32,
    ignored: u32,
    slices: *const doorbell_slice,
    slice_count: u32,
    envelope: *mut doorbell_envelope,
    timeout_ms: i64,
) -> c_int {
    call!(matcher = get(matcher), || {
        let timeout = timeout(timeout_ms)?;
        let tags = TagSelector::masked(tag, ignored);
        // SAFETY: the caller's promise about slices and places.
        unsafe {
            let received = with_slices(slices, slice_count, |slices| {
                let matcher = &matcher.inner;
                Ok(matcher.recv_now(source(from), tags, slices, timeout)?)
            })?;
            write_envelope(envelope, received);
        }
        Ok(0)
    })
}

/// Whether a message waits that a receive would take.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_probe_now(
    matcher: *mut doorbell_matcher,
    from: u32,
    tag: u32,
    ignored: u32,
    envelope: *mut doorbell_envelope,
) -> c_int {
    call!(matcher = get(matcher), || {
        let tags = TagSelector::masked(tag, ignored);
        let found = matcher.inner.probe_now(source(from), tags)?;
        if let Some(found) = found {
            // SAFETY: the caller's promise about places.
            unsafe { write_envelope(envelope, found) };
        }
        Ok(found.is_some().into())
    })
}

/// Cancels a receive.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_cancel(
    matcher: *mut doorbell_matcher,
    ticket: *const doorbell_match_ticket,
) -> c_int {
    call!(matcher = get(matcher), ticket = get(ticket), || {
        Ok(matcher.inner.cancel(&ticket.inner)?.into())
    })
}

/// Waits until the peers have everything.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_finish(
    matcher: *mut doorbell_matcher,
    timeout_ms: i64,
) -> c_int {
    call!(matcher = get(matcher), || {
        matcher.inner.finish(timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Has receives from any peer go on without one.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_exclude(
    matcher: *mut doorbell_matcher,
    peer: u32,
) -> c_int {
    call!(matcher = get(matcher), || {
        matcher.inner.exclude(peer as usize)?;
        Ok(0)
    })
}

/// How the connection with a peer failed, if it did.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_matcher_failure(
    matcher: *const doorbell_matcher,
    peer: u32,
    failure: *mut doorbell_failure,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, matcher) = unsafe { (out_optional(failure), get(matcher, "matcher")?) };
        let matcher = &matcher.inner;
        let count = matcher.peer_count() as u64;
        if u64::from(peer) >= count {
            return Err(Failure::Library(Error::Range {
                argument: "peer",
                value: peer.into(),
                min: 0,
                max: count - 1,
            }));
        }
        let found = matcher.failure(peer as usize);
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_failure(found, place, text, capacity) }
    })
}

/// Whether a message was received.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_match_ticket_check(
    ticket: *const doorbell_match_ticket,
    envelope: *mut doorbell_envelope,
) -> c_int {
    call!(ticket = get(ticket), || {
        let found = ticket.inner.check()?;
        if let Some(found) = found {
            // SAFETY: the caller's promise about places.
            unsafe { write_envelope(envelope, found) };
        }
        Ok(found.is_some().into())
    })
}

/// Waits until a message was received.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_match_ticket_wait(
    ticket: *const doorbell_match_ticket,
    envelope: *mut doorbell_envelope,
    timeout_ms: i64,
) -> c_int {
    call!(ticket = get(ticket), || {
        let found = ticket.inner.wait(timeout(timeout_ms)?)?;
        // SAFETY: the caller's promise about places.
        unsafe { write_envelope(envelope, found) };
        Ok(0)
    })
}

/// Notifies a descriptor when a message was received.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_match_ticket_notify(
    ticket: *const doorbell_match_ticket,
    eventfd: c_int,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller does not close it within this call.
        let eventfd = unsafe { descriptor(eventfd, "eventfd") }?;
        ticket.inner.notify(eventfd)?;
        Ok(0)
    })
}

/// Destroys a ticket.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_match_ticket_destroy(
    ticket: *mut doorbell_match_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(ticket, "ticket") }.map(|()| 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let config = doorbell_matcher_config::defaults();
        // SAFETY: a struct of this version.
        let config = unsafe { matcher_config(&config) }.unwrap();
        assert_eq!(config, MatcherConfig::default());
    }
}
