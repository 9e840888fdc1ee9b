//! The tree by which libibverbs, librdmacm, and the programs around it, find the device.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::scratch::Scratch;
use crate::device::{Device, Faults, file_error};
use crate::doors::pci_function::{self, ADDRESS, ALL, BRIDGE, DRIVER, FOLDER};
use crate::doors::port::PortIdentity;
use crate::doors::uverbs::{FIRMWARE, PART, port_capabilities};
use crate::{Error, Result};

/// The file that a program opens, without the leading slash: in the tree it is an empty file, so that a program that lists its
/// directory finds it. And its device numbers.
pub(crate) const NODE_IN_TREE: &str = "dev/infiniband/uverbs0";
pub(crate) const RDEV: (u32, u32) = (231, 192);
/// The same of the connection manager, a miscellaneous device.
pub(crate) const CM_NODE_IN_TREE: &str = "dev/infiniband/rdma_cm";
pub(crate) const CM_RDEV: (u32, u32) = (10, 58);

/// The folders that the tree has in place of the kernel's, below `/sys`.
pub(super) const FOLDERS: [&str; 6] = [
    "class/infiniband",
    "class/infiniband_verbs",
    "class/misc/rdma_cm",
    ALL,
    BRIDGE,
    DRIVER,
];

/// Where the device and its node are described.
const DEVICE: &str = "infiniband/mlx5_0";
const VERBS: &str = "infiniband_verbs/uverbs0";
/// The files of the link's state, below the folder of the device. They are written in this order: a program that has read a new state reads the physical state
/// that belongs to it.
const LINK_FILES: [&str; 2] = ["ports/1/phys_state", "ports/1/state"];

/// What each file takes.
const PAGE_BYTES: usize = 4096;

/// Something in the tree.
#[derive(Debug)]
enum SysfsEntry {
    File(Vec<u8>),
    Link(PathBuf),
}

/// Makes a private directory with the tree.
///
/// # Errors
/// Those of [`Scratch::new`], and [`Error::System`] if there can be no thread, which a link that goes down needs.
pub(super) fn show(device: &Device, faults: &Faults) -> Result<Scratch> {
    let scratch = Scratch::new()?;
    let entries = entries(&PortIdentity::of(device), Path::new("/sys"));
    write(scratch.path(), &entries).map_err(|error| {
        let len_bytes = entries.len() * PAGE_BYTES;
        file_error(
            "creation of the sysfs tree",
            scratch.path(),
            len_bytes,
            &error,
        )
    })?;
    if faults.down_ns.1 != 0 {
        let (device, tree) = (device.clone(), scratch.path().to_owned());
        let thread = thread::Builder::new().name("softcx-link".into());
        let started = thread.spawn(move || follow_link(device, tree));
        started.map_err(|error| Error::System {
            operation: "start of a thread",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })?;
    }
    Ok(scratch)
}

/// Writes the link's state into the tree whenever it changes, as long as the tree is there. Programs may hold its folders open.
fn follow_link(device: Device, tree: PathBuf) {
    let port = PortIdentity::of(&device);
    let mut shown = link_state(&port, false);
    while tree.exists() {
        let now = link_state(&port, device.is_link_down());
        if now != shown {
            shown = now;
            for (name, value) in LINK_FILES.into_iter().zip(now) {
                let (path, new) = (tree.join(FOLDER).join(DEVICE).join(name), tree.join("new"));
                // Others may be reading. Without room for a few bytes, or without the tree, the file stays as it is.
                let _ =
                    fs::write(&new, format!("{value}\n")).and_then(|()| fs::rename(&new, &path));
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// What the files of the link's state have, as the kernel writes it.
fn link_state(port: &PortIdentity, is_down: bool) -> [&'static str; 2] {
    let (state, phys_state) = port.link_state(is_down);
    let state = if state == 4 { "4: ACTIVE" } else { "1: DOWN" };
    let phys_state = match phys_state {
        5 => "5: LinkUp",
        3 => "3: Disabled",
        _ => "2: Polling",
    };
    [phys_state, state]
}

/// Writes the tree as it would lie under `/sys`, and the node as it would lie in the root. Files that are there are replaced.
fn write(root: &Path, entries: &[(PathBuf, SysfsEntry)]) -> io::Result<()> {
    for (name, entry) in entries {
        let path = root.join(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        match entry {
            SysfsEntry::File(content) => fs::write(path, content)?,
            SysfsEntry::Link(target) => match symlink(target, path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            },
        }
    }
    Ok(())
}

/// The links of the tree, below `/sys`, with what they lead to.
pub(super) fn links() -> Vec<(PathBuf, PathBuf)> {
    let function = Path::new(FOLDER);
    let (device, verbs) = (function.join(DEVICE), function.join(VERBS));
    vec![
        ("class/infiniband/mlx5_0".into(), device.clone()),
        ("class/infiniband_verbs/uverbs0".into(), verbs.clone()),
        (Path::new(ALL).join(ADDRESS), function.into()),
        (Path::new(DRIVER).join(ADDRESS), function.into()),
        (function.join("driver"), DRIVER.into()),
        (function.join("subsystem"), "bus/pci".into()),
        (device.join("device"), function.into()),
        (device.join("subsystem"), "class/infiniband".into()),
        (verbs.join("device"), function.into()),
        (verbs.join("subsystem"), "class/infiniband_verbs".into()),
    ]
}

/// The text of a link in `folder` to `target`, both below `/sys`: as sysfs has it, up to the first folder of both.
fn relative(link: &Path, target: &Path) -> PathBuf {
    let folder: Vec<_> = link.parent().into_iter().flatten().collect();
    let wanted: Vec<_> = target.iter().collect();
    let same = folder
        .iter()
        .zip(&wanted)
        .take_while(|(one, other)| one == other)
        .count();
    // A link to a folder that it lies in names that folder.
    let same = same.min(wanted.len().saturating_sub(1));
    let up = std::iter::repeat_n(std::ffi::OsStr::new(".."), folder.len() - same);
    up.chain(wanted.into_iter().skip(same)).collect()
}

/// All of the tree. `sysfs` is the kernel's: the other PCI functions of the machine are shown beside the device's.
fn entries(port: &PortIdentity, sysfs: &Path) -> Vec<(PathBuf, SysfsEntry)> {
    let function = Path::new(FOLDER);
    let nodes = [NODE_IN_TREE, CM_NODE_IN_TREE].map(PathBuf::from);
    let mut entries = Vec::from(nodes.map(|node| (node, SysfsEntry::File(Vec::new()))));
    let mut add = |path: PathBuf, value: &str| {
        entries.push((path, SysfsEntry::File(format!("{value}\n").into_bytes())));
    };
    add("class/infiniband_verbs/abi_version".into(), "6");
    add("class/misc/rdma_cm/abi_version".into(), "4");
    add(
        "class/misc/rdma_cm/dev".into(),
        &format!("{}:{}", CM_RDEV.0, CM_RDEV.1),
    );
    for (name, value) in pci_function::attributes(port) {
        add(function.join(name), &value);
    }
    let node = format!("{}:{}", RDEV.0, RDEV.1);
    for (name, value) in [
        ("abi_version", "1"),
        ("dev", &node),
        ("ibdev", "mlx5_0"),
        ("uevent", "MAJOR=231\nMINOR=192\nDEVNAME=infiniband/uverbs0"),
    ] {
        add(function.join(VERBS).join(name), value);
    }
    for (name, value) in device_files(port) {
        add(function.join(DEVICE).join(name), &value);
    }
    if port.is_ethernet() {
        // The function's own interface, as rdma-core's tests look for it.
        let name = port.interface.name();
        let interface = Path::new("/sys/class/net").join(&name);
        let link = function.join("net").join(&name);
        entries.push((link, SysfsEntry::Link(interface)));
    }
    let space = SysfsEntry::File(pci_function::configuration(port));
    entries.push((function.join("config"), space));
    for (link, target) in links() {
        let text = relative(&link, &target);
        entries.push((link, SysfsEntry::Link(text)));
    }
    // By their names under /sys, which are the kernel's: a program that goes there leaves the tree.
    let others = fs::read_dir(sysfs.join(ALL)).into_iter().flatten();
    for other in others.flatten().filter(|it| it.file_name() != ADDRESS) {
        let link = Path::new(ALL).join(other.file_name());
        entries.push((link, SysfsEntry::Link(other.path())));
    }
    entries
}

/// The attributes of the device and of its port.
fn device_files(port: &PortIdentity) -> Vec<(&'static str, String)> {
    let (major, minor, patch) = FIRMWARE;
    let guid = groups(&port.guid.to_be_bytes());
    let ethernet = port.is_ethernet();
    let lid = format!("0x{:x}", port.lid);
    let interface = port.interface.name();
    let capabilities = format!("0x{:08x}", port_capabilities(port));
    let gid_type = if ethernet { "RoCE v2" } else { "IB/RoCE v1" };
    // The files keep the state of the start. That the link is down, or that a GID has moved, is seen through the device file alone.
    let is_foreign = port.is_foreign_gid(0);
    let (own, none) = (groups(&port.gid), groups(&[0; 16]));
    let (first, second) = if is_foreign {
        (&none, &own)
    } else {
        (&own, &none)
    };
    // In the order of appearance under /sys.
    let files: &[(&'static str, &str)] = &[
        ("board_id", "SFT0000000001"),
        ("fw_ver", &format!("{major}.{minor}.{patch}")),
        ("hca_type", &format!("MT{PART}")),
        ("hw_rev", "0"),
        ("node_desc", "softcx mlx5_0"),
        ("node_guid", &guid),
        ("node_type", "1: CA"),
        ("sys_image_guid", &guid),
        ("uevent", "NAME=mlx5_0"),
        ("ports/1/cap_mask", &capabilities),
        ("ports/1/lid", &lid),
        ("ports/1/lid_mask_count", "0"),
        (
            "ports/1/link_layer",
            if ethernet { "Ethernet" } else { "InfiniBand" },
        ),
        ("ports/1/rate", "200 Gb/sec (4X HDR)"),
        ("ports/1/sm_lid", if ethernet { "0x0" } else { "0x1" }),
        ("ports/1/sm_sl", "0"),
        ("ports/1/pkeys/0", "0xffff"),
        ("ports/1/gids/0", first),
        ("ports/1/gids/1", second),
        ("ports/1/gids/2", &none),
        ("ports/1/gids/3", &none),
        (
            "ports/1/gid_attrs/ndevs/0",
            if is_foreign { "elsewhere0" } else { &interface },
        ),
        ("ports/1/gid_attrs/ndevs/1", &interface),
        ("ports/1/gid_attrs/types/0", gid_type),
        ("ports/1/gid_attrs/types/1", gid_type),
    ];
    files
        .iter()
        .copied()
        .chain(LINK_FILES.into_iter().zip(link_state(port, false)))
        .map(|(name, value)| (name, value.to_owned()))
        .collect()
}

/// Two bytes a group, as GIDs and GUIDs are written.
fn groups(bytes: &[u8]) -> String {
    let groups: Vec<String> = bytes
        .chunks(2)
        .map(|pair| pair.iter().map(|byte| format!("{byte:02x}")).collect())
        .collect();
    groups.join(":")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::{Function, LinkLayer};

    fn root(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("doorbell-sysfs-{name}-{}", std::process::id()))
    }

    #[test]
    fn sysfs_tree_identifies_the_device() {
        let root = root("tree");
        let device = Device::open().unwrap();
        let entries = entries(&PortIdentity::of(&device), Path::new("/sys"));
        write(&root, &entries).unwrap();
        write(&root, &entries).unwrap();
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        assert_eq!(read("class/infiniband_verbs/uverbs0/ibdev"), "mlx5_0\n");
        assert_eq!(read("class/infiniband_verbs/uverbs0/dev"), "231:192\n");
        assert_eq!(read("class/infiniband/mlx5_0/hca_type"), "MT4129\n");
        assert_eq!(read("bus/pci/devices/5c0f:00:00.0/device"), "0x1021\n");
        let guid = read("class/infiniband/mlx5_0/node_guid");
        assert!(guid.starts_with("5c0f:7c00:0000:"), "{guid}");
        assert_eq!(read("class/infiniband/mlx5_0/ports/1/gids/0").len(), 40);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn port_has_the_attributes_of_a_card() {
        let root = root("port");
        let device = Device::open().unwrap();
        let port = PortIdentity {
            link: LinkLayer::Ethernet,
            function: Function {
                foreign_gid: true,
                ..Function::default()
            },
            ..PortIdentity::of(&device)
        };
        write(&root, &entries(&port, Path::new("/sys"))).unwrap();
        let folder = root.join("class/infiniband/mlx5_0/ports/1");
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        let interface = root.join("class/infiniband/mlx5_0/device/net/lo");
        assert_eq!(
            fs::read_link(interface).unwrap(),
            Path::new("/sys/class/net/lo")
        );
        // libibumad reads these, and refuses a port without them. IBV_PORT_IP_BASED_GIDS is the only capability.
        assert_eq!(read("cap_mask"), "0x04000000\n");
        assert_eq!(read("sm_sl"), "0\n");
        // The port's own GID is the second one.
        assert_eq!(read("gids/1"), format!("{}\n", groups(&port.gid)));
        assert_eq!(read("gid_attrs/types/1"), "RoCE v2\n");
        let interface = format!("{}\n", port.interface.name());
        assert_eq!(read("gid_attrs/ndevs/1"), interface);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn links_lead_to_the_function_and_read_as_in_sysfs() {
        let root = root("links");
        let sysfs = root.join("sys");
        for name in ["0000:00:01.0", ADDRESS] {
            fs::create_dir_all(sysfs.join(ALL).join(name)).unwrap();
        }
        let device = Device::open().unwrap();
        write(&root, &entries(&PortIdentity::of(&device), &sysfs)).unwrap();
        let text = |link: &str| {
            let text = fs::read_link(root.join(link)).unwrap();
            text.into_os_string().into_string().unwrap()
        };
        let device = "devices/pci5c0f:00/5c0f:00:00.0/infiniband/mlx5_0";
        assert_eq!(text("class/infiniband/mlx5_0"), format!("../../{device}"));
        assert_eq!(text(&format!("{device}/device")), "../../../5c0f:00:00.0");
        let subsystem = text(&format!("{device}/subsystem"));
        assert_eq!(subsystem, "../../../../../class/infiniband");
        let bus = text("bus/pci/devices/5c0f:00:00.0");
        assert_eq!(bus, "../../../devices/pci5c0f:00/5c0f:00:00.0");
        for (link, target) in links() {
            let found = fs::canonicalize(root.join(&link)).unwrap();
            assert_eq!(found, fs::canonicalize(root.join(target)).unwrap());
        }
        let other = fs::read_link(root.join(ALL).join("0000:00:01.0")).unwrap();
        assert_eq!(other, sysfs.join(ALL).join("0000:00:01.0"));
        fs::remove_dir_all(&root).unwrap();
    }
}
