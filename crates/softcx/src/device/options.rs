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

/// What a port or a function of a card demands or lacks. Each is a way in which real ones are set up; whoever runs on the default only does not meet them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Function {
    /// The port demands a global route on InfiniBand, too (`IBV_QPF_GRH_REQUIRED`), as under a subnet manager that has it so.
    pub needs_grh: bool,
    /// There are no atomics (`IBV_ATOMIC_NONE`), as on a virtual function that was given none.
    pub no_atomics: bool,
    /// Its registers take doorbells only: no BlueFlame buffers (`bf_reg_size` 0), as where the host maps no write-combining memory.
    pub no_blueflame: bool,
    /// The first entry of the table of GIDs of an Ethernet port is that of an interface in another network namespace, as the host's are in a container.
    pub foreign_gid: bool,
}

impl Function {
    /// Sets what that word of the command line says: `grh`, `no-atomics`, `no-blueflame`, `foreign-gid`.
    ///
    /// # Errors
    /// [`Error::Malformed`](crate::Error::Malformed) for another word.
    pub fn set(&mut self, word: &str) -> crate::Result<()> {
        match word {
            "grh" => self.needs_grh = true,
            "no-atomics" => self.no_atomics = true,
            "no-blueflame" => self.no_blueflame = true,
            "foreign-gid" => self.foreign_gid = true,
            _ => {
                return Err(crate::Error::Malformed {
                    what: "function of the device",
                    reason: format!(
                        "`{word}` is none of grh, no-atomics, no-blueflame, foreign-gid"
                    ),
                });
            }
        }
        Ok(())
    }
}

/// A device on a named fabric.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceOptions {
    /// The fabric: devices with the same name, of the same user on the same host, reach each other. At most 64 bytes of
    /// letters, digits, `-`, `_` and `.`.
    pub fabric: String,
    /// The kind of link.
    pub link: LinkLayer,
    /// What the port and the function demand or lack.
    pub function: Function,
    /// What happens to packets that the device sends.
    pub faults: super::Faults,
    /// Where every WQE, packet and CQE goes, decoded, a line each.
    pub trace: Option<std::path::PathBuf>,
}
