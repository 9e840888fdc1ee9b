//! Which device reaches the other process of a benchmark.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context, Result, bail};
use doorbell::{Channel, Device, Endpoint, EndpointConfig};
use serde::{Deserialize, Serialize};

use super::machine::{self, Machine};

/// The software device, which is in the memory of its host.
pub const SOFTWARE_DEVICE: &str = "softcx";

/// The identity of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Name of its host.
    host: String,
    /// This boot of the host. Names may be the same on several hosts.
    boot_id: Option<String>,
    /// Its device. None if it takes one that reaches the other process.
    device: Option<String>,
}

impl Identity {
    /// This process, which measures on a device of that name.
    pub fn new(device: Option<&str>) -> Identity {
        Identity {
            host: Machine::this().host,
            boot_id: machine::boot_id(),
            device: device.map(str::to_owned),
        }
    }

    fn is_software(&self) -> bool {
        self.device.as_deref() == Some(SOFTWARE_DEVICE)
    }

    fn is_on_another_host(&self, peer: &Identity) -> bool {
        self.boot_id.is_some() && peer.boot_id.is_some() && self.boot_id != peer.boot_id
    }

    /// Refuses a peer that the devices cannot reach, and says what to do.
    fn check_reach(&self, peer: &Identity) -> Result<()> {
        if !(self.is_software() || peer.is_software()) || !self.is_on_another_host(peer) {
            return Ok(());
        }
        let build = if cfg!(feature = "verbs") {
            ""
        } else {
            ", in a build with --features verbs"
        };
        bail!(
            "the device {SOFTWARE_DEVICE} reaches only processes on its own host, but these run on {} and {}; give both processes the \
             name of an RDMA device, such as --device mlx5_0, or no name (`doorbell info` lists them{build})",
            self.host,
            peer.host
        )
    }

    /// The names of the devices that may reach the peer, best first, of those that there are; and why.
    ///
    /// # Errors
    /// No device of the list can reach the peer.
    fn candidates(&self, peer: &Identity, list: &[String]) -> Result<(Vec<String>, String)> {
        let is_near = !self.is_on_another_host(peer);
        if is_near && (peer.device.is_none() || peer.is_software()) {
            let reason = "both processes are on this host".into();
            return Ok((vec![SOFTWARE_DEVICE.into()], reason));
        }
        self.check_reach(peer)?;
        let mut names: Vec<String> = list.to_vec();
        names.retain(|name| name != SOFTWARE_DEVICE);
        // On one host a device reaches itself.
        names.sort_by_key(|name| !(is_near && peer.device.as_ref() == Some(name)));
        let reason = match &peer.device {
            Some(device) if is_near => format!("the other process uses {device}"),
            _ => format!("the other process is on {}", peer.host),
        };
        if names.is_empty() {
            bail!(
                "{reason}, and this host has no RDMA device (`doorbell info` lists them{})",
                if cfg!(feature = "verbs") {
                    ""
                } else {
                    ", in a build with --features verbs"
                }
            );
        }
        Ok((names, reason))
    }
}

/// The device of this process: the one that was named, if it reaches the peer, or one that does, which is then told on stderr.
///
/// # Errors
/// None reaches it.
pub fn device(
    named: Option<Device>,
    own: &Identity,
    peer: &Identity,
    channel: &Channel,
) -> Result<Device> {
    if let Some(device) = named {
        own.check_reach(peer)?;
        return Ok(device);
    }
    let (names, reason) = own.candidates(peer, &Device::list())?;
    let local = channel.local_address()?.ip();
    let (device, has_address) = open_best(&names, local)?;
    let address = match has_address {
        true => format!(", and this device has the address {local}"),
        false => String::new(),
    };
    eprintln!("device {}: {reason}{address}", device.name());
    Ok(device)
}

/// The first device that has this address, or else the first that can be used; and whether it has the address.
fn open_best(names: &[String], local: IpAddr) -> Result<(Device, bool)> {
    let mut usable = None;
    let mut refused = Vec::new();
    for name in names {
        let opened = Device::open(name).and_then(|device| {
            let domain = device.protection_domain();
            let gid = Endpoint::new(&domain, &EndpointConfig::default())?
                .address()
                .gid();
            Ok((device, gid))
        });
        match opened {
            Ok((device, gid)) => {
                if gid.is_some_and(|gid| Ipv6Addr::from(gid).to_canonical() == local.to_canonical())
                {
                    return Ok((device, true));
                }
                usable = usable.or(Some(device));
            }
            Err(error) => refused.push(format!("{name}: {error}")),
        }
    }
    let device =
        usable.with_context(|| format!("no device can be used: {}", refused.join("; ")))?;
    Ok((device, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(host: &str, device: Option<&str>) -> Identity {
        Identity {
            host: host.into(),
            boot_id: Some(host.into()),
            device: device.map(str::to_owned),
        }
    }

    #[test]
    fn the_software_device_reaches_its_own_host_only() {
        let named = |host, device| identity(host, Some(device));
        let here = named("here", "softcx");
        here.check_reach(&named("here", "softcx")).unwrap();
        here.check_reach(&named("here", "mlx5_0")).unwrap();
        let card = named("here", "mlx5_0");
        card.check_reach(&named("there", "mlx5_1")).unwrap();
        let mut nameless = named("there", "softcx");
        nameless.boot_id = None;
        here.check_reach(&nameless).unwrap();
        for (one, other) in [
            (&here, named("there", "softcx")),
            (&here, named("there", "mlx5_0")),
            (&card, named("there", "softcx")),
        ] {
            let error = one.check_reach(&other).unwrap_err().to_string();
            assert!(error.contains("here and there"), "{error}");
            assert!(error.contains("--device mlx5_0"), "{error}");
        }
    }

    #[test]
    fn a_process_without_a_name_takes_what_reaches_the_other() {
        let list = ["mlx5_0", "mlx5_1", "verbs:rxe0", "softcx"].map(String::from);
        let own = identity("here", None);
        let names = |peer: &Identity| own.candidates(peer, &list).map(|(names, _)| names);
        let software = vec!["softcx".to_owned()];
        assert_eq!(names(&identity("here", None)).unwrap(), software);
        assert_eq!(names(&identity("here", Some("softcx"))).unwrap(), software);
        // The same one, on one host.
        let near = names(&identity("here", Some("verbs:rxe0"))).unwrap();
        assert_eq!(near, ["verbs:rxe0", "mlx5_0", "mlx5_1"]);
        let far = ["mlx5_0", "mlx5_1", "verbs:rxe0"];
        assert_eq!(names(&identity("there", None)).unwrap(), far);
        assert_eq!(names(&identity("there", Some("verbs:rxe0"))).unwrap(), far);
        let refused = names(&identity("there", Some("softcx")))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("here and there"), "{refused}");
        let none = own
            .candidates(&identity("there", None), &list[3..])
            .unwrap_err()
            .to_string();
        assert!(
            none.contains("there") && none.contains("no RDMA device"),
            "{none}"
        );
    }
}
