//! librdmacm's objects, and the calls on them. None of them waits longer than its deadline.
#![allow(unsafe_code)] // calls librdmacm

use std::ffi::{CStr, c_int};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use rdma_sys::{ibv_qp_attr_mask as Mask, ibv_qp_state, rdma_conn_param, rdma_port_space};

use super::event::CmEvent;
use super::socket::Socket;
use crate::endpoint::{Deadline, Endpoint};
use crate::nic::Step;
use crate::{Error, Result};

/// How often a wait looks whether its endpoint has failed.
const LOOK: Duration = Duration::from_millis(20);

fn last_errno() -> i32 {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// A call that gives 0, or -1 and errno.
fn call(operation: &'static str, of: impl FnOnce() -> c_int) -> Result<()> {
    match of() {
        0 => Ok(()),
        _ => Err(Error::System {
            operation,
            errno: last_errno(),
        }),
    }
}

/// What a side offers when it connects or accepts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer<'a> {
    pub(super) qpn: u32,
    pub(super) private_data: &'a [u8],
    /// Reads and atomics: those that this side serves at once, and those that it has under way.
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
}

impl Offer<'_> {
    /// Valid while the private data is.
    fn param(&self) -> rdma_conn_param {
        rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len() as u8,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry,
            srq: 0,
            qp_num: self.qpn,
        }
    }
}

/// A descriptor through which librdmacm reports events; it never blocks.
#[derive(Debug)]
struct EventChannel(NonNull<rdma_sys::rdma_event_channel>);

impl EventChannel {
    fn new() -> Result<EventChannel> {
        // SAFETY: no conditions.
        let raw = unsafe { rdma_sys::rdma_create_event_channel() };
        let channel = EventChannel(NonNull::new(raw).ok_or_else(|| Error::System {
            operation: "rdma_create_event_channel",
            errno: last_errno(),
        })?);
        let fd = channel.fd();
        // SAFETY: a descriptor that is the channel's.
        call("fcntl", || unsafe {
            match libc::fcntl(fd, libc::F_GETFL) {
                -1 => -1,
                flags => libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK),
            }
        })?;
        Ok(channel)
    }

    fn fd(&self) -> RawFd {
        // SAFETY: alive; the descriptor does not change.
        unsafe { self.0.as_ref().fd }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once, after the identifier on it.
        unsafe { rdma_sys::rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// An identifier (`rdma_cm_id`), the counterpart of a socket. The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub(super) struct Id {
    raw: RawId,
    channel: EventChannel,
}

#[derive(Debug)]
struct RawId(NonNull<rdma_sys::rdma_cm_id>);

impl Drop for RawId {
    fn drop(&mut self) {
        // SAFETY: owned by this alone, destroyed once, before its channel. The call waits for events that were read and not
        // acknowledged; outside `Id::next` there are none. If the call fails, the id stays until the process ends: nothing else can
        // be done.
        unsafe { rdma_sys::rdma_destroy_id(self.0.as_ptr()) };
    }
}

// SAFETY: librdmacm's calls may come from any thread; its objects are locked inside (rdma_cm(7)).
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    /// Of a reliable connection.
    pub(super) fn new() -> Result<Id> {
        let channel = EventChannel::new()?;
        let mut raw = null_mut();
        // SAFETY: a live channel, and a place for the result.
        call("rdma_create_id", || unsafe {
            rdma_sys::rdma_create_id(
                channel.0.as_ptr(),
                &raw mut raw,
                null_mut(),
                rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        let raw = NonNull::new(raw).ok_or(Error::System {
            operation: "rdma_create_id",
            errno: libc::EIO,
        })?;
        Ok(Id {
            raw: RawId(raw),
            channel,
        })
    }

    fn raw(&self) -> *mut rdma_sys::rdma_cm_id {
        self.raw.0.as_ptr()
    }

    pub(super) fn listen(&self, address: SocketAddr, backlog: c_int) -> Result<()> {
        let mut socket = Socket::from(address);
        // SAFETY: a live identifier, and an address.
        call("rdma_bind_addr", || unsafe {
            rdma_sys::rdma_bind_addr(self.raw(), socket.as_ptr())
        })?;
        // SAFETY: as above.
        call("rdma_listen", || unsafe {
            rdma_sys::rdma_listen(self.raw(), backlog)
        })
    }

    pub(super) fn resolve_address(&self, peer: SocketAddr, left: Duration) -> Result<()> {
        let mut socket = Socket::from(peer);
        // SAFETY: as in `listen`; no source address means the one that the routes give.
        call("rdma_resolve_addr", || unsafe {
            rdma_sys::rdma_resolve_addr(self.raw(), null_mut(), socket.as_ptr(), millis(left))
        })
    }

    pub(super) fn resolve_route(&self, left: Duration) -> Result<()> {
        // SAFETY: a live identifier.
        call("rdma_resolve_route", || unsafe {
            rdma_sys::rdma_resolve_route(self.raw(), millis(left))
        })
    }

    pub(super) fn connect(&self, offer: &Offer<'_>) -> Result<()> {
        let mut param = offer.param();
        // SAFETY: a live identifier; the private data outlives the call, which copies it.
        call("rdma_connect", || unsafe {
            rdma_sys::rdma_connect(self.raw(), &raw mut param)
        })
    }

    pub(super) fn accept(&self, offer: &Offer<'_>) -> Result<()> {
        let mut param = offer.param();
        // SAFETY: as in `connect`.
        call("rdma_accept", || unsafe {
            rdma_sys::rdma_accept(self.raw(), &raw mut param)
        })
    }

    /// Tells the side that accepted that this one is ready.
    pub(super) fn establish(&self) -> Result<()> {
        // SAFETY: a live identifier.
        call("rdma_establish", || unsafe {
            rdma_sys::rdma_establish(self.raw())
        })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<()> {
        // SAFETY: a live identifier, and that many bytes.
        call("rdma_reject", || unsafe {
            rdma_sys::rdma_reject(
                self.raw(),
                private_data.as_ptr().cast(),
                private_data.len() as u8,
            )
        })
    }

    pub(super) fn disconnect(&self) -> Result<()> {
        // SAFETY: a live identifier.
        call("rdma_disconnect", || unsafe {
            rdma_sys::rdma_disconnect(self.raw())
        })
    }

    /// The attributes of a queue pair's step to `state`.
    pub(super) fn step(&self, state: ibv_qp_state::Type) -> Result<Step> {
        // SAFETY: plain numbers and arrays of them, for which zero is a value.
        let mut attr: rdma_sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = state;
        let mut mask = 0;
        // SAFETY: a live identifier, and places for the result.
        call("rdma_init_qp_attr", || unsafe {
            rdma_sys::rdma_init_qp_attr(self.raw(), &raw mut attr, &raw mut mask)
        })?;
        Ok(Step {
            attr,
            mask: Mask(mask.cast_unsigned()),
        })
    }

    /// The name of the device that it is on, and the port, once that is known.
    pub(super) fn place(&self) -> Option<(String, u8)> {
        // SAFETY: alive; the device is there from the event on that says so, and the context lives as long as the process.
        unsafe {
            let id = self.raw.0.as_ref();
            let device = NonNull::new(id.verbs)?.as_ref().device;
            let name = rdma_sys::ibv_get_device_name(device);
            if name.is_null() {
                return None;
            }
            let name = CStr::from_ptr(name).to_string_lossy().into_owned();
            Some((name, id.port_num))
        }
    }

    /// This side's address.
    pub(super) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: alive; each union is as large as any address.
        unsafe {
            let address = &raw const (*self.raw()).route.addr.src_addr_union;
            Socket::read(address.cast()).address()
        }
    }

    /// The peer's address.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe {
            let address = &raw const (*self.raw()).route.addr.dst_addr_union;
            Socket::read(address.cast()).address()
        }
    }

    /// The next event, before the deadline. A request for a connection comes with its identifier, on a channel of its own.
    pub(super) fn next(&self, deadline: &Deadline) -> Result<(CmEvent, Option<Id>)> {
        self.next_for(deadline, None)
    }

    /// [`Id::next`], for an endpoint: its failure, as by an abort, ends the wait.
    pub(super) fn next_for(
        &self,
        deadline: &Deadline,
        endpoint: Option<&Endpoint>,
    ) -> Result<(CmEvent, Option<Id>)> {
        loop {
            if let Some(next) = self.poll()? {
                return Ok(next);
            }
            endpoint.map_or(Ok(()), Endpoint::check_alive)?;
            let mut ready = libc::pollfd {
                fd: self.channel.fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            let mut left = deadline.left()?;
            if endpoint.is_some() {
                left = left.min(LOOK);
            }
            let left = millis(left);
            // SAFETY: one descriptor.
            if unsafe { libc::poll(&raw mut ready, 1, left) } < 0 && last_errno() != libc::EINTR {
                return Err(Error::System {
                    operation: "poll",
                    errno: last_errno(),
                });
            }
        }
    }

    /// The next event, if there is one.
    pub(super) fn poll(&self) -> Result<Option<(CmEvent, Option<Id>)>> {
        let mut found = null_mut();
        // SAFETY: a live channel, and a place for the result.
        let got = unsafe { rdma_sys::rdma_get_cm_event(self.channel.0.as_ptr(), &raw mut found) };
        let errno = last_errno();
        let Some(found) = NonNull::new(found).filter(|_| got == 0) else {
            return match errno {
                libc::EAGAIN | libc::EINTR => Ok(None),
                errno => Err(Error::System {
                    operation: "rdma_get_cm_event",
                    errno,
                }),
            };
        };
        // SAFETY: an event that is this side's until it is acknowledged. The parameters are those of a connection, as the identifier's
        // kind says; librdmacm keeps the private data with the event.
        let (event, requested) = unsafe {
            let found = found.as_ref();
            let param = found.param.conn;
            let private_data = match NonNull::new(param.private_data.cast_mut().cast::<u8>()) {
                Some(data) => {
                    std::slice::from_raw_parts(data.as_ptr(), param.private_data_len.into())
                        .to_vec()
                }
                None => Vec::new(),
            };
            let event = CmEvent {
                kind: found.event,
                status: found.status,
                private_data,
                responder_resources: param.responder_resources,
                initiator_depth: param.initiator_depth,
            };
            let is_new = found.event == rdma_sys::rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
            (event, NonNull::new(found.id).filter(|_| is_new).map(RawId))
        };
        // SAFETY: read above, acknowledged once; nothing of it is kept.
        call("rdma_ack_cm_event", || unsafe {
            rdma_sys::rdma_ack_cm_event(found.as_ptr())
        })?;
        let requested = requested.map(Id::migrate).transpose()?;
        Ok(Some((event, requested)))
    }

    /// Gives an identifier its own channel, so that it gets no events of others.
    fn migrate(raw: RawId) -> Result<Id> {
        let channel = EventChannel::new()?;
        // SAFETY: a live identifier, whose event is acknowledged, and a live channel.
        call("rdma_migrate_id", || unsafe {
            rdma_sys::rdma_migrate_id(raw.0.as_ptr(), channel.0.as_ptr())
        })?;
        Ok(Id { raw, channel })
    }
}

/// For calls that count milliseconds: never 0, which some take for no wait at all.
fn millis(left: Duration) -> c_int {
    c_int::try_from(left.as_millis())
        .unwrap_or(c_int::MAX)
        .max(1)
}
