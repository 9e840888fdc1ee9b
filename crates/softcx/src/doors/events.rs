//! Turns the device's events into what a process reads: events of completion queues, and asynchronous ones.
//!
//! The device calls from under its lock. So nothing in here calls the device, and the locks are of this file alone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::client::{DeviceEvent, EventSink};
use crate::doors::event_pipe::{ChannelEvent, EventPipe};

/// `ib_event_type`.
mod kind {
    pub(super) const CQ_ERR: u32 = 0;
    pub(super) const QP_FATAL: u32 = 1;
    pub(super) const QP_REQ_ERR: u32 = 2;
    pub(super) const QP_ACCESS_ERR: u32 = 3;
    pub(super) const COMM_EST: u32 = 4;
    pub(super) const DEVICE_FATAL: u32 = 8;
    pub(super) const PORT_ACTIVE: u32 = 9;
    pub(super) const PORT_ERR: u32 = 10;
    pub(super) const SRQ_LIMIT_REACHED: u32 = 15;
    pub(super) const QP_LAST_WQE_REACHED: u32 = 16;
    pub(super) const GID_CHANGE: u32 = 18;
}

/// The one port of the device.
const PORT: u64 = 1;

/// What kind of object an asynchronous event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum EventSubject {
    Cq(u32),
    Qp(u32),
    Srq(u32),
}

impl EventSubject {
    fn of(event: DeviceEvent) -> Option<(EventSubject, u32)> {
        match event {
            DeviceEvent::CqError { cqn } => Some((EventSubject::Cq(cqn), kind::CQ_ERR)),
            DeviceEvent::QpFatal { qpn } => Some((EventSubject::Qp(qpn), kind::QP_FATAL)),
            DeviceEvent::QpRequestError { qpn } => Some((EventSubject::Qp(qpn), kind::QP_REQ_ERR)),
            DeviceEvent::QpAccessError { qpn } => {
                Some((EventSubject::Qp(qpn), kind::QP_ACCESS_ERR))
            }
            DeviceEvent::CommunicationEstablished { qpn } => {
                Some((EventSubject::Qp(qpn), kind::COMM_EST))
            }
            DeviceEvent::LastWqeReached { qpn } => {
                Some((EventSubject::Qp(qpn), kind::QP_LAST_WQE_REACHED))
            }
            DeviceEvent::SrqLimitReached { srqn } => {
                Some((EventSubject::Srq(srqn), kind::SRQ_LIMIT_REACHED))
            }
            DeviceEvent::Completion
            | DeviceEvent::Port { .. }
            | DeviceEvent::GidChange
            | DeviceEvent::DeviceFatal => None,
        }
    }

    fn kinds(self) -> &'static [u32] {
        match self {
            EventSubject::Cq(_) => &[kind::CQ_ERR],
            EventSubject::Srq(_) => &[kind::SRQ_LIMIT_REACHED],
            EventSubject::Qp(_) => &[
                kind::QP_FATAL,
                kind::QP_REQ_ERR,
                kind::QP_ACCESS_ERR,
                kind::COMM_EST,
                kind::QP_LAST_WQE_REACHED,
            ],
        }
    }
}

/// The asynchronous events of a context.
#[derive(Debug, Default)]
pub(super) struct AsyncEvents {
    state: Mutex<EventTable>,
}

#[derive(Debug, Default)]
struct EventTable {
    /// All channels get events of the port. The first one also gets events of objects that were created without a channel.
    channels: Vec<Arc<EventPipe>>,
    subjects: HashMap<EventSubject, SubjectChannel>,
}

#[derive(Debug)]
struct SubjectChannel {
    /// The handle by which the process knows the object.
    user_handle: u64,
    /// The channel of its events: the one it was created with, or the first.
    channel: Option<Arc<EventPipe>>,
    sent: u32,
}

impl AsyncEvents {
    pub(super) fn add_channel(&self, channel: Arc<EventPipe>) {
        self.lock().channels.push(channel);
    }

    pub(super) fn remove_channel(&self, inode: (u64, u64)) {
        self.lock().channels.retain(|it| it.inode() != inode);
    }

    pub(super) fn channels(&self) -> usize {
        self.lock().channels.len()
    }

    /// The channel that a process's descriptor is of.
    pub(super) fn find(&self, inode: (u64, u64)) -> Option<Arc<EventPipe>> {
        let state = self.lock();
        let mut channels = state.channels.iter();
        channels.find(|it| it.inode() == inode).cloned()
    }

    /// Events of the object are delivered from now on: to that channel, or to the first one.
    pub(super) fn name(
        &self,
        subject: EventSubject,
        user_handle: u64,
        channel: Option<Arc<EventPipe>>,
    ) {
        let mut state = self.lock();
        let channel = channel.or_else(|| state.channels.first().cloned());
        let subject_channel = SubjectChannel {
            user_handle,
            channel,
            sent: 0,
        };
        state.subjects.insert(subject, subject_channel);
    }

    /// Takes back what is unread: how many events of the object have been read, for that many the process acknowledges.
    pub(super) fn forget(&self, subject: EventSubject) -> u32 {
        let removed = self.lock().subjects.remove(&subject);
        let Some(named) = removed else {
            return 0;
        };
        if named.sent == 0 {
            return 0;
        }
        let kinds = subject.kinds();
        let unread = named.channel.as_ref().map_or(0, |channel| {
            channel.purge(|it| it.element == named.user_handle && kinds.contains(&it.kind))
        });
        named.sent.saturating_sub(unread)
    }

    fn lock(&self) -> MutexGuard<'_, EventTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventSink for AsyncEvents {
    fn event(&self, event: DeviceEvent) {
        let mut state = self.lock();
        let EventTable { channels, subjects } = &mut *state;
        if let Some((subject, kind)) = EventSubject::of(event) {
            let Some(named) = subjects.get_mut(&subject) else {
                return;
            };
            let Some(channel) = &named.channel else {
                return;
            };
            let record = ChannelEvent {
                element: named.user_handle,
                kind,
            };
            named.sent = named.sent.saturating_add(u32::from(channel.push(record)));
            return;
        }
        let kind = match event {
            DeviceEvent::Port { active: true } => kind::PORT_ACTIVE,
            DeviceEvent::Port { active: false } => kind::PORT_ERR,
            DeviceEvent::GidChange => kind::GID_CHANGE,
            DeviceEvent::DeviceFatal => kind::DEVICE_FATAL,
            _ => return,
        };
        for channel in channels {
            channel.push(ChannelEvent {
                element: PORT,
                kind,
            });
        }
    }
}

/// The completion events of one queue.
#[derive(Debug)]
pub(super) struct Completions {
    channel: Arc<EventPipe>,
    user_handle: u64,
    sent: AtomicU32,
}

impl Completions {
    pub(super) fn new(channel: Arc<EventPipe>, user_handle: u64) -> Completions {
        Completions {
            channel,
            user_handle,
            sent: AtomicU32::new(0),
        }
    }

    /// Where they go.
    pub(super) fn channel(&self) -> &Arc<EventPipe> {
        &self.channel
    }

    /// Takes back what is unread. Returns how many were read. Called when the device sends no more events.
    pub(super) fn finish(&self) -> u32 {
        let sent = self.sent.load(Ordering::Relaxed);
        if sent == 0 {
            return 0;
        }
        let unread = self.channel.purge(|it| it.element == self.user_handle);
        sent.saturating_sub(unread)
    }
}

impl EventSink for Completions {
    fn event(&self, event: DeviceEvent) {
        if event == DeviceEvent::Completion {
            let record = ChannelEvent {
                element: self.user_handle,
                kind: 0,
            };
            if self.channel.push(record) {
                self.sent.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;
    use crate::doors::event_pipe::ChannelKind;

    #[test]
    fn only_what_was_read_is_to_be_acknowledged() {
        let (channel, theirs) = EventPipe::new(ChannelKind::AsyncEvents).unwrap();
        let events = AsyncEvents::default();
        events.add_channel(Arc::new(channel));
        events.name(EventSubject::Qp(5), 0xabc, None);
        events.name(EventSubject::Cq(5), 0xdef, None);
        events.event(DeviceEvent::QpFatal { qpn: 5 });
        events.event(DeviceEvent::CqError { cqn: 5 });
        events.event(DeviceEvent::QpAccessError { qpn: 5 });
        events.event(DeviceEvent::QpFatal { qpn: 6 });
        let mut file = File::from(theirs);
        let mut bytes = [0; 16];
        file.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes[..12], b"\xbc\x0a\0\0\0\0\0\0\x01\0\0\0");
        assert_eq!(events.forget(EventSubject::Qp(5)), 1);
        file.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes[..12], b"\xef\x0d\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(events.forget(EventSubject::Cq(5)), 1);
        assert_eq!(events.forget(EventSubject::Cq(5)), 0);
        events.event(DeviceEvent::Port { active: false });
        file.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes[..12], b"\x01\0\0\0\0\0\0\0\x0a\0\0\0");
    }

    #[test]
    fn completions_are_counted_likewise() {
        let (channel, theirs) = EventPipe::new(ChannelKind::Completions).unwrap();
        let channel = Arc::new(channel);
        let one = Completions::new(Arc::clone(&channel), 1);
        let other = Completions::new(Arc::clone(&channel), 2);
        for _ in 0..3 {
            one.event(DeviceEvent::Completion);
            other.event(DeviceEvent::Completion);
        }
        let mut bytes = [0; 8];
        File::from(theirs).read_exact(&mut bytes).unwrap();
        assert_eq!((one.finish(), other.finish()), (1, 0));
    }
}
