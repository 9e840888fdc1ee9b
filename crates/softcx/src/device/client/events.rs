//! Asynchronous events of the device for a client.

/// An asynchronous event. Object numbers are those that creation returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceEvent {
    /// A completion queue that was armed has something new.
    Completion,
    /// A completion queue overran (`IBV_EVENT_CQ_ERR`).
    CqError { cqn: u32 },
    /// A queue pair failed by itself (`IBV_EVENT_QP_FATAL`).
    QpFatal { qpn: u32 },
    /// A request made no sense to the responder (`IBV_EVENT_QP_REQ_ERR`).
    QpRequestError { qpn: u32 },
    /// A request was refused by the responder (`IBV_EVENT_QP_ACCESS_ERR`).
    QpAccessError { qpn: u32 },
    /// The first packet came before the transition to RTS (`IBV_EVENT_COMM_EST`).
    CommunicationEstablished { qpn: u32 },
    /// A queue pair in error will take nothing more from its shared receive queue (`IBV_EVENT_QP_LAST_WQE_REACHED`).
    LastWqeReached { qpn: u32 },
    /// A shared receive queue fell below its limit (`IBV_EVENT_SRQ_LIMIT_REACHED`).
    SrqLimitReached { srqn: u32 },
    /// The port went down or up (`IBV_EVENT_PORT_ERR`, `IBV_EVENT_PORT_ACTIVE`).
    Port { active: bool },
    /// The port's table of GIDs has changed (`IBV_EVENT_GID_CHANGE`).
    GidChange,
    /// The device failed for good (`IBV_EVENT_DEVICE_FATAL`).
    #[allow(dead_code)] // the software device does not
    DeviceFatal,
}

/// Takes events. Called under the device's lock: it may neither block nor call the device.
pub(crate) trait EventSink: Send + Sync + std::fmt::Debug {
    /// One event.
    fn event(&self, event: DeviceEvent);
}
