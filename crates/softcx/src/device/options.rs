//! How a device on a named fabric is made.

/// The kind of link that the port shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LinkLayer {
    /// InfiniBand: LIDs route, a GRH is optional.
    #[default]
    InfiniBand,
    /// RoCE v2: GIDs route, a GRH is on every packet.
    Ethernet,
}

/// A device on a named fabric.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceOptions {
    /// The fabric: devices with the same name, of the same user on the same host, reach each other. At most 64 bytes of
    /// letters, digits, `-`, `_` and `.`.
    pub fabric: String,
    /// The kind of link.
    pub link: LinkLayer,
    /// What happens to packets that the device sends.
    pub faults: super::Faults,
    /// Where every WQE, packet and CQE goes, decoded, a line each.
    pub trace: Option<std::path::PathBuf>,
}
