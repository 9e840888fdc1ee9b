//! The events of librdmacm.

use rdma_sys::rdma_cm_event_type as Kind;

/// An event, taken out of librdmacm's memory.
#[derive(Debug, Clone)]
pub(super) struct CmEvent {
    /// A number: librdmacm may have kinds that these bindings do not know.
    pub(super) kind: Kind::Type,
    /// 0, a negative errno, or for a refusal the reason of the connection manager.
    pub(super) status: i32,
    pub(super) private_data: Vec<u8>,
    /// Reads and atomics that this side is asked to serve at once, and that it may have under way.
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

/// Reasons of a refusal (InfiniBand Architecture Specification 1.3, 12.6.7.2; the kernel's `enum ib_cm_rej_reason`).
const INVALID_SERVICE: i32 = 8;
const STALE_CONNECTION: i32 = 10;

impl CmEvent {
    /// A refusal that a later attempt may not get: no process listens there yet, or the peer has not closed the previous connection of this queue
    /// pair.
    pub(super) fn is_passing(&self) -> bool {
        self.kind == Kind::RDMA_CM_EVENT_REJECTED
            && matches!(self.status, INVALID_SERVICE | STALE_CONNECTION)
    }

    /// Whether a connection is over after it.
    pub(super) fn ends(&self) -> Option<&'static str> {
        match self.kind {
            Kind::RDMA_CM_EVENT_DISCONNECTED => Some("has disconnected"),
            Kind::RDMA_CM_EVENT_TIMEWAIT_EXIT => Some("was disconnected from"),
            Kind::RDMA_CM_EVENT_DEVICE_REMOVAL => Some("is lost: this side's device was removed"),
            _ => None,
        }
    }

    /// The common reasons of a refusal, as text.
    pub(super) fn refusal(&self) -> String {
        let reason = match self.status {
            1..=3 => "it has no resources for it",
            4 => "it did not answer in time",
            INVALID_SERVICE => "no process listens on that port",
            STALE_CONNECTION => "it has not closed the previous connection of this queue pair yet",
            28 => "the peer's application refused",
            _ => "see the specification",
        };
        format!("{reason} (reason {})", self.status)
    }

    /// Its name, for messages.
    pub(super) fn name(&self) -> String {
        let known = match self.kind {
            Kind::RDMA_CM_EVENT_ADDR_ERROR => "ADDR_ERROR",
            Kind::RDMA_CM_EVENT_ROUTE_ERROR => "ROUTE_ERROR",
            Kind::RDMA_CM_EVENT_CONNECT_ERROR => "CONNECT_ERROR",
            Kind::RDMA_CM_EVENT_UNREACHABLE => "UNREACHABLE",
            Kind::RDMA_CM_EVENT_REJECTED => "REJECTED",
            Kind::RDMA_CM_EVENT_DISCONNECTED => "DISCONNECTED",
            Kind::RDMA_CM_EVENT_DEVICE_REMOVAL => "DEVICE_REMOVAL",
            Kind::RDMA_CM_EVENT_TIMEWAIT_EXIT => "TIMEWAIT_EXIT",
            other => return format!("event {other}, status {}", self.status),
        };
        format!("{known}, status {}", self.status)
    }
}
