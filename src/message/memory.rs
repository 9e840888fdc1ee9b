//! The memory of a message queue that only its own side writes, and what the messages in it may be.

use super::header::{HEADER_BYTES, MessageHeader, MessagePlace};
use super::receive::{MessageSlot, capacity};
use super::{MessageAddress, MessageConfig};
use crate::endpoint::Endpoint;
use crate::region::{Access, ProtectionDomain, Region, Slice};
use crate::{Error, Result, StateKind};

/// Slots begin at multiples of this.
const SLOT_ALIGN: u64 = 64;

/// Bytes of a `struct dbl_taken` of `include/doorbell/detail/take.h`.
const RESULT_BYTES: u64 = 64;

/// The memory of a queue that only this side and its device write: the headers of messages to send, then the slots, then the results of receives by kernels.
pub(super) struct MessageMemory {
    region: Region,
    header_count: u32,
    slots: u32,
    result_count: u32,
    pub(super) eager_bytes: u32,
    max_slices: u32,
}

/// What goes over the wire for a message.
pub(super) struct WireMessage<'a> {
    /// The header, and the slices of an eager message.
    pub(super) slices: Vec<Slice<'a>>,
    /// The memory that the peer is to read.
    pub(super) read: Option<&'a Region>,
    pub(super) len_bytes: u64,
}

impl MessageMemory {
    pub(super) fn new(domain: &ProtectionDomain, config: &MessageConfig) -> Result<MessageMemory> {
        // A header is written before there is a place in the send queue for its message, and stays until the message has left: twice as many as
        // requests in the queue.
        let header_count = 2 * config.endpoint.send_depth.next_power_of_two();
        let result_count = config.result_count();
        let memory = |region| MessageMemory {
            region,
            header_count,
            slots: config.slots,
            result_count,
            eager_bytes: config.eager_bytes,
            max_slices: config.max_slices,
        };
        let bytes = headers_bytes(header_count)
            + u64::from(config.slots) * slot_stride(config.eager_bytes)
            + u64::from(result_count) * RESULT_BYTES;
        Region::alloc(domain, bytes, Access::LOCAL_WRITE).map(memory)
    }

    fn slot_offset(&self, number: u32) -> u64 {
        let slot = u64::from(number & (self.slots - 1));
        headers_bytes(self.header_count) + slot * slot_stride(self.eager_bytes)
    }

    /// The slot of a message to receive.
    pub(super) fn slot(&self, number: u32) -> MessageSlot {
        MessageSlot {
            memory: self.region.clone(),
            offset: self.slot_offset(number),
            number,
            eager_bytes: self.eager_bytes,
            result: self.slot_end() + u64::from(number & (self.result_count - 1)) * RESULT_BYTES,
        }
    }

    fn slot_end(&self) -> u64 {
        headers_bytes(self.header_count) + u64::from(self.slots) * slot_stride(self.eager_bytes)
    }

    pub(super) fn slot_slice(&self, number: u32) -> Result<Slice<'_>> {
        let len_bytes = u64::from(HEADER_BYTES + self.eager_bytes);
        self.region.slice(self.slot_offset(number), len_bytes)
    }

    /// Writes the header of a message of the endpoint's.
    pub(super) fn make_message<'a>(
        &'a self,
        number: u32,
        tag: u32,
        slices: &[Slice<'a>],
        peer: &MessageAddress,
        endpoint: &Endpoint,
    ) -> Result<WireMessage<'a>> {
        let len_bytes = capacity(slices.iter().copied());
        check_slices(slices, self.max_slices)?;
        let read = if len_bytes > u64::from(peer.eager_bytes) {
            check_slices(slices, 1)?;
            slices.first()
        } else {
            None
        };
        let place = match read {
            None => MessagePlace::Slot,
            Some(slice) => {
                check_slice(slice, 0, endpoint.domain(), Access::REMOTE_READ)?;
                let remote = slice.region.remote();
                MessagePlace::Sender {
                    addr: remote.addr + slice.offset,
                    rkey: remote.rkey,
                }
            }
        };
        let header = MessageHeader {
            number,
            tag,
            len_bytes,
            place,
        };
        let offset = headers_bytes(number & (self.header_count - 1));
        self.region.write(offset, &header.to_bytes())?;
        let mut list = Vec::with_capacity(1 + slices.len());
        list.push(self.region.slice(offset, HEADER_BYTES.into())?);
        if read.is_none() {
            list.extend(slices);
        }
        Ok(WireMessage {
            slices: list,
            read: read.map(|slice| slice.region),
            len_bytes,
        })
    }
}

fn headers_bytes(count: u32) -> u64 {
    u64::from(count) * u64::from(HEADER_BYTES)
}

fn slot_stride(eager_bytes: u32) -> u64 {
    u64::from(HEADER_BYTES + eager_bytes).next_multiple_of(SLOT_ALIGN)
}

/// The limits of the memory that messages are received into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TargetLimits {
    pub(crate) max_slices: u32,
    pub(crate) eager_bytes: u32,
}

/// Fails for slices that no message can be received into, whoever stores it. Returns their length together.
pub(crate) fn check_target(
    slices: &[Slice<'_>],
    domain: &ProtectionDomain,
    limits: TargetLimits,
) -> Result<u64> {
    let capacity = capacity(slices.iter().copied());
    check_slices(slices, limits.max_slices)?;
    if capacity > u64::from(limits.eager_bytes) {
        check_slices(slices, 1)?;
    }
    for (at, slice) in slices.iter().enumerate() {
        check_slice(slice, at, domain, Access::LOCAL_WRITE)?;
    }
    Ok(capacity)
}

/// Fails for more than `max` slices.
pub(super) fn check_slices(slices: &[Slice<'_>], max: u32) -> Result<()> {
    if slices.len() <= max as usize {
        return Ok(());
    }
    Err(Error::Range {
        argument: "slices.len() (limits: MessageConfig::max_slices, and 1 for more bytes than MessageConfig::eager_bytes)",
        value: slices.len() as u64,
        min: 0,
        max: max.into(),
    })
}

/// What a post checks of the slices of a work request, for memory that is in none.
pub(super) fn check_slice(
    slice: &Slice<'_>,
    at: usize,
    domain: &ProtectionDomain,
    needed: Access,
) -> Result<()> {
    let region = slice.region;
    domain.check_same(region.domain(), "slices")?;
    let refused = |kind, what: String| {
        let reason = format!("the region of slice {at} {what}");
        Err(Error::state(kind, "message", reason))
    };
    if !region.is_registered() {
        return refused(StateKind::Deregistered, "is deregistered".into());
    }
    if !region.access().contains(needed) {
        return refused(
            StateKind::NoAccess,
            format!("does not have {needed:?}, which the message needs"),
        );
    }
    Ok(())
}
