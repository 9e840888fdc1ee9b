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

/// Requirements and missing capabilities of a port or a PCI function. Real cards are set up in each of these ways; the default has none of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Function {
    /// The port requires a global route on InfiniBand, too (`IBV_QPF_GRH_REQUIRED`), as some subnet managers configure it.
    pub needs_grh: bool,
    /// There are no atomics (`IBV_ATOMIC_NONE`), as on a virtual function without them.
    pub no_atomics: bool,
    /// The registers take doorbells only. There are no BlueFlame buffers (`bf_reg_size` 0), as on hosts that map no write-combining memory.
    pub no_blueflame: bool,
    /// The first entry of the table of GIDs of an Ethernet port is that of an interface in another network namespace, as the host's are in a container.
    pub foreign_gid: bool,
    /// A process pins no more memory than its `RLIMIT_MEMLOCK` allows, unless it has `CAP_IPC_LOCK`: as with the kernel, and unlike the default.
    pub limits_pinned: bool,
}

impl Function {
    /// Sets the property with that name: `grh`, `no-atomics`, `no-blueflame`, `foreign-gid`, `memlock`.
    ///
    /// # Errors
    /// [`Error::Malformed`](crate::Error::Malformed) for another word.
    pub fn set(&mut self, word: &str) -> crate::Result<()> {
        match word {
            "grh" => self.needs_grh = true,
            "no-atomics" => self.no_atomics = true,
            "no-blueflame" => self.no_blueflame = true,
            "foreign-gid" => self.foreign_gid = true,
            "memlock" => self.limits_pinned = true,
            _ => {
                return Err(crate::Error::Malformed {
                    what: "function of the device",
                    reason: format!(
                        "`{word}` is none of grh, no-atomics, no-blueflame, foreign-gid, memlock"
                    ),
                });
            }
        }
        Ok(())
    }
}

/// The environment variable with the wire of devices that a process opens without a door.
pub const WIRE: &str = "DOORBELL_SOFTCX_WIRE";

/// The wire between devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WireKind {
    /// Memory that the processes of one host share.
    #[default]
    SharedMemory,
    /// RoCE v2 on UDP, also between hosts and with other implementations. The address is the port's GID; without one, the device takes a free address of
    /// 127.0.0.0/16. Only for [`LinkLayer::Ethernet`].
    Udp(Option<std::net::IpAddr>),
    /// Shared memory to devices that have this wire, too, on the same fabric in the same network namespace; RoCE v2 on UDP to all others. The address as for
    /// [`WireKind::Udp`]. Only for [`LinkLayer::Ethernet`].
    UdpAndMemory(Option<std::net::IpAddr>),
}

impl WireKind {
    /// What the environment variable [`WIRE`] says; shared memory without it.
    ///
    /// # Errors
    /// As [`WireKind::parse`].
    pub fn from_env() -> crate::Result<WireKind> {
        std::env::var(WIRE).map_or(Ok(WireKind::SharedMemory), |text| WireKind::parse(&text))
    }

    /// Reads `shm`, `udp`, `udp:ADDRESS`, `udp+shm` or `udp+shm:ADDRESS`.
    ///
    /// # Errors
    /// [`Error::Malformed`](crate::Error::Malformed) for another word, or if ADDRESS is no IP address.
    pub fn parse(text: &str) -> crate::Result<WireKind> {
        let malformed = || crate::Error::Malformed {
            what: "wire of the device",
            reason: format!("`{text}` is none of shm, udp, udp:ADDRESS, udp+shm, udp+shm:ADDRESS"),
        };
        let (kind, address) = match text.split_once(':') {
            None => (text, None),
            Some((kind, address)) => (kind, Some(address.parse().map_err(|_| malformed())?)),
        };
        match kind {
            "shm" if address.is_none() => Ok(WireKind::SharedMemory),
            "udp" => Ok(WireKind::Udp(address)),
            "udp+shm" => Ok(WireKind::UdpAndMemory(address)),
            _ => Err(malformed()),
        }
    }
}

/// A device on a named fabric. Other packages start with the default and set fields.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// The fabric: devices with the same name, of the same user on the same host, reach each other. At most 64 bytes of
    /// letters, digits, `-`, `_` and `.`.
    pub fabric: String,
    /// The kind of link.
    pub link: LinkLayer,
    /// The wire between devices.
    pub wire: WireKind,
    /// Requirements and missing capabilities of the port and the function.
    pub function: Function,
    /// The faults that the device injects.
    pub faults: super::Faults,
    /// The file to which every WQE, packet and CQE is written, decoded, one line each.
    pub trace: Option<std::path::PathBuf>,
    /// The capture file to which the frames that leave are appended, and those that arrive by UDP.
    pub pcap: Option<std::path::PathBuf>,
}
