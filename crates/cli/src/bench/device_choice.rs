//! Which device reaches the other process of a benchmark.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context, Result, bail};
use doorbell::{Channel, Device, Endpoint, EndpointConfig};
use doorbell_softcx::device::WireKind;
use serde::{Deserialize, Serialize};

use super::machine::{self, Machine};

/// The software device. Its name may say its wire, and without one it has that of the environment.
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
    /// The address of its device, if that is the software device with UDP as its wire.
    udp_address: Option<IpAddr>,
}

impl Identity {
    /// This process, which measures on that device.
    ///
    /// # Errors
    /// The software device has no room for an endpoint, which says its address.
    pub fn new(device: Option<&Device>) -> Result<Identity> {
        let name = device.map(Device::name);
        let software = device.filter(|_| name == Some(SOFTWARE_DEVICE));
        Ok(Identity {
            host: Machine::this().host,
            boot_id: machine::boot_id(),
            device: name.map(str::to_owned),
            udp_address: software.map(gid_of).transpose()?.flatten().map(address_of),
        })
    }

    /// Whether its device reaches only processes of its host: by shared memory, or by addresses that each host has.
    fn is_bound_to_host(&self) -> bool {
        let is_software = self.device.as_deref() == Some(SOFTWARE_DEVICE);
        is_software && self.udp_address.is_none_or(|ip| ip.is_loopback())
    }

    fn is_on_another_host(&self, peer: &Identity) -> bool {
        self.boot_id.is_some() && peer.boot_id.is_some() && self.boot_id != peer.boot_id
    }

    /// Refuses a peer that the devices cannot reach, and says what to do.
    fn check_reach(&self, peer: &Identity) -> Result<()> {
        if !(self.is_bound_to_host() || peer.is_bound_to_host()) || !self.is_on_another_host(peer) {
            return Ok(());
        }
        bail!(
            "the device {SOFTWARE_DEVICE} reaches only processes on its own host, unless its wire is UDP at an address of the network, but these run on {} and {}; \
             give each process --device {SOFTWARE_DEVICE},wire=udp:ADDRESS with an address of its host, the name of an RDMA device, such as --device mlx5_0, or \
             no name ({LISTED})",
            self.host,
            peer.host
        )
    }

    /// The names of the devices that may reach the peer, best first; and why. `list` has the devices that there are, `wire` is that of a software device
    /// whose name has none, and `local` is the address of this host that the peer has connected to, or from which it was connected.
    ///
    /// # Errors
    /// No device can reach the peer.
    fn candidates(
        &self,
        peer: &Identity,
        list: &[String],
        wire: WireKind,
        local: IpAddr,
    ) -> Result<(Vec<String>, String)> {
        let is_near = !self.is_on_another_host(peer);
        let on = |wire: &str| format!("{SOFTWARE_DEVICE},wire={wire}");
        let is_udp = matches!(wire, WireKind::Udp(_) | WireKind::UdpAndMemory(_));
        let device = peer.device.as_deref();
        if is_near && matches!(device, None | Some(SOFTWARE_DEVICE)) {
            // Shared memory and UDP do not reach each other.
            let name = match (device, peer.udp_address) {
                (None, _) => SOFTWARE_DEVICE.into(),
                (_, None) => on("shm"),
                (_, Some(_)) if is_udp => SOFTWARE_DEVICE.into(),
                (_, Some(_)) => on("udp"),
            };
            return Ok((vec![name], "both processes are on this host".into()));
        }
        self.check_reach(peer)?;
        let mut names: Vec<String> = list.to_vec();
        names.retain(|name| name != SOFTWARE_DEVICE);
        // On one host a device reaches itself.
        names.sort_by_key(|name| !(is_near && device == Some(name)));
        let software = match (peer.udp_address, wire) {
            (_, WireKind::Udp(Some(own)) | WireKind::UdpAndMemory(Some(own)))
                if !own.is_loopback() =>
            {
                Some(SOFTWARE_DEVICE.into())
            }
            (Some(_), _) => Some(on(&format!("udp:{local}"))),
            _ => None,
        };
        names.extend(software);
        let reason = match device {
            Some(device) if is_near => format!("the other process uses {device}"),
            _ => format!("the other process is on {}", peer.host),
        };
        if names.is_empty() {
            bail!(
                "{reason}, and this host has no RDMA device ({LISTED}); --device {} has the software device send RoCE v2 on UDP",
                on(&format!("udp:{local}"))
            );
        }
        Ok((names, reason))
    }
}

/// Where the names of devices are found.
const LISTED: &str = if cfg!(feature = "verbs") {
    "`doorbell info` lists them"
} else {
    "`doorbell info` lists them, in a build with --features verbs"
};

/// The GID of a device, if its address has one.
fn gid_of(device: &Device) -> Result<Option<[u8; 16]>> {
    let endpoint = Endpoint::new(&device.protection_domain(), &EndpointConfig::default())?;
    Ok(endpoint.address().gid())
}

fn address_of(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
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
    let local = channel.local_address()?.ip().to_canonical();
    let (names, reason) = own.candidates(peer, &Device::list(), WireKind::from_env()?, local)?;
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
        let opened = Device::open(name)
            .map_err(anyhow::Error::from)
            .and_then(|device| {
                let gid = gid_of(&device)?;
                Ok((device, gid))
            });
        match opened {
            Ok((device, gid)) => {
                if gid.map(address_of) == Some(local) {
                    return Ok((device, true));
                }
                usable = usable.or(Some(device));
            }
            Err(error) => refused.push(format!("{name}: {error:#}")),
        }
    }
    let device =
        usable.with_context(|| format!("no device can be used: {}", refused.join("; ")))?;
    Ok((device, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    fn identity(host: &str, device: Option<&str>) -> Identity {
        Identity {
            host: host.into(),
            boot_id: Some(host.into()),
            device: device.map(str::to_owned),
            udp_address: None,
        }
    }

    fn on_udp(host: &str, address: &str) -> Identity {
        Identity {
            udp_address: Some(address.parse().unwrap()),
            ..identity(host, Some("softcx"))
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
            (&here, on_udp("there", "10.0.0.2")),
            (&card, named("there", "softcx")),
            (&card, on_udp("there", "127.0.0.2")),
        ] {
            let error = one.check_reach(&other).unwrap_err().to_string();
            assert!(error.contains("here and there"), "{error}");
            for remedy in ["--device mlx5_0", "--device softcx,wire=udp:ADDRESS"] {
                assert!(error.contains(remedy), "{error}");
            }
        }
    }

    #[test]
    fn on_udp_the_software_device_reaches_other_hosts() {
        let here = on_udp("here", "10.0.0.1");
        for other in [
            on_udp("there", "10.0.0.2"),
            identity("there", Some("mlx5_0")),
        ] {
            here.check_reach(&other).unwrap();
            other.check_reach(&here).unwrap();
        }
    }

    #[test]
    fn the_address_of_a_device_with_udp_is_part_of_the_identity() {
        let identity = |name: &str| Identity::new(Some(&Device::open(name).unwrap())).unwrap();
        let udp = identity("softcx,wire=udp");
        assert_eq!(udp.device.as_deref(), Some("softcx"));
        assert!(udp.udp_address.unwrap().is_loopback());
        assert_eq!(identity("softcx,wire=shm").udp_address, None);
    }

    #[test]
    fn a_process_without_a_name_takes_what_reaches_the_other() {
        let list = ["mlx5_0", "mlx5_1", "verbs:rxe0", "softcx"].map(String::from);
        let own = identity("here", None);
        let on = |wire, peer: &Identity| own.candidates(peer, &list, wire, LOCAL);
        let names = |peer: &Identity| on(WireKind::SharedMemory, peer).map(|(names, _)| names);
        assert_eq!(names(&identity("here", None)).unwrap(), ["softcx"]);
        // The same one, on one host, and with the same wire.
        let near = names(&identity("here", Some("softcx"))).unwrap();
        assert_eq!(near, ["softcx,wire=shm"]);
        let near = on_udp("here", "127.0.0.1");
        assert_eq!(names(&near).unwrap(), ["softcx,wire=udp"]);
        let chosen = WireKind::Udp("10.0.0.1".parse().ok());
        assert_eq!(on(chosen, &near).unwrap().0, ["softcx"]);
        let near = names(&identity("here", Some("verbs:rxe0"))).unwrap();
        assert_eq!(near, ["verbs:rxe0", "mlx5_0", "mlx5_1"]);
        let far = ["mlx5_0", "mlx5_1", "verbs:rxe0"];
        assert_eq!(names(&identity("there", None)).unwrap(), far);
        assert_eq!(names(&identity("there", Some("verbs:rxe0"))).unwrap(), far);
        let with = |name: &'static str| [far.as_slice(), &[name]].concat();
        let far = on(chosen, &identity("there", None)).unwrap().0;
        assert_eq!(far, with("softcx"));
        let far = names(&on_udp("there", "10.0.0.2")).unwrap();
        assert_eq!(far, with("softcx,wire=udp:10.0.0.1"));
        let refused = names(&identity("there", Some("softcx")))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("here and there"), "{refused}");
        let none = own
            .candidates(
                &identity("there", None),
                &list[3..],
                WireKind::SharedMemory,
                LOCAL,
            )
            .unwrap_err()
            .to_string();
        for said in [
            "there",
            "no RDMA device",
            "--device softcx,wire=udp:10.0.0.1",
        ] {
            assert!(none.contains(said), "{none}");
        }
    }
}
