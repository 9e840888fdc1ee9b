//! The tree by which libibverbs, librdmacm, and the programs around it, find the device.

use std::fs;
use std::io;
use std::path::Path;

use super::scratch::Scratch;
use crate::Result;
use crate::device::{Device, file_error};
use crate::doors::port::PortIdentity;
use crate::doors::uverbs::{FIRMWARE, PART};

/// The file that a program opens, without the leading slash: in the tree it is an empty file, so that a program that lists its
/// directory finds it. And its device numbers.
pub(crate) const NODE_IN_TREE: &str = "dev/infiniband/uverbs0";
pub(crate) const RDEV: (u32, u32) = (231, 192);
/// The same of the connection manager, a miscellaneous device.
pub(crate) const CM_NODE_IN_TREE: &str = "dev/infiniband/rdma_cm";
pub(crate) const CM_RDEV: (u32, u32) = (10, 58);

/// What the tree takes: a page for each file.
const BYTES: usize = 39 * 4096;

/// Makes a private directory with the tree.
///
/// # Errors
/// Those of [`Scratch::new`].
pub(super) fn show(device: &Device) -> Result<Scratch> {
    let scratch = Scratch::new()?;
    write(scratch.path(), device)
        .map_err(|error| file_error("creation of the sysfs tree", scratch.path(), BYTES, &error))?;
    Ok(scratch)
}

/// Writes the tree as it would lie under `/sys`, and the node as it would lie in the root. Files that are there are replaced.
fn write(root: &Path, device: &Device) -> io::Result<()> {
    let nodes = [NODE_IN_TREE, CM_NODE_IN_TREE].map(|node| (node, String::new()));
    for (name, value) in files(&PortIdentity::of(device)).into_iter().chain(nodes) {
        let path = root.join(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, value)?;
    }
    Ok(())
}

fn files(port: &PortIdentity) -> Vec<(&'static str, String)> {
    let (major, minor, patch) = FIRMWARE;
    let node = format!("{}:{}", RDEV.0, RDEV.1);
    let guid = groups(&port.guid.to_be_bytes());
    let ethernet = port.is_ethernet();
    let lid = format!("0x{:x}", port.lid);
    // The state at the start; changes are reported by the device file.
    let is_foreign = port.is_foreign_gid(0);
    let (own, none) = (groups(&port.gid), groups(&[0; 16]));
    let (first, second) = if is_foreign {
        (&none, &own)
    } else {
        (&own, &none)
    };
    let cm_node = format!("{}:{}", CM_RDEV.0, CM_RDEV.1);
    // In the order of appearance under /sys.
    let files: &[(&'static str, &str)] = &[
        ("class/infiniband_verbs/abi_version", "6"),
        ("class/infiniband_verbs/uverbs0/abi_version", "1"),
        ("class/infiniband_verbs/uverbs0/dev", &node),
        ("class/infiniband_verbs/uverbs0/ibdev", "mlx5_0"),
        ("class/infiniband/mlx5_0/board_id", "SFT0000000001"),
        (
            "class/infiniband/mlx5_0/fw_ver",
            &format!("{major}.{minor}.{patch}"),
        ),
        ("class/infiniband/mlx5_0/hca_type", &format!("MT{PART}")),
        ("class/infiniband/mlx5_0/hw_rev", "0"),
        ("class/infiniband/mlx5_0/node_desc", "softcx mlx5_0"),
        ("class/infiniband/mlx5_0/node_guid", &guid),
        ("class/infiniband/mlx5_0/node_type", "1: CA"),
        ("class/infiniband/mlx5_0/sys_image_guid", &guid),
        ("class/infiniband/mlx5_0/device/device", "0x1021"),
        ("class/infiniband/mlx5_0/device/local_cpus", "ffffffff"),
        (
            "class/infiniband/mlx5_0/device/modalias",
            "pci:v000015B3d00001021sv000015B3sd00000001bc02sc07i00",
        ),
        ("class/infiniband/mlx5_0/device/numa_node", "-1"),
        ("class/infiniband/mlx5_0/device/vendor", "0x15b3"),
        (
            "class/infiniband/mlx5_0/device/infiniband_verbs/uverbs0/abi_version",
            "1",
        ),
        (
            "class/infiniband/mlx5_0/device/infiniband_verbs/uverbs0/dev",
            &node,
        ),
        (
            "class/infiniband/mlx5_0/device/infiniband_verbs/uverbs0/ibdev",
            "mlx5_0",
        ),
        ("class/infiniband/mlx5_0/ports/1/lid", &lid),
        ("class/infiniband/mlx5_0/ports/1/lid_mask_count", "0"),
        (
            "class/infiniband/mlx5_0/ports/1/link_layer",
            if ethernet { "Ethernet" } else { "InfiniBand" },
        ),
        ("class/infiniband/mlx5_0/ports/1/phys_state", "5: LinkUp"),
        (
            "class/infiniband/mlx5_0/ports/1/rate",
            "200 Gb/sec (4X HDR)",
        ),
        (
            "class/infiniband/mlx5_0/ports/1/sm_lid",
            if ethernet { "0x0" } else { "0x1" },
        ),
        ("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
        ("class/infiniband/mlx5_0/ports/1/pkeys/0", "0xffff"),
        ("class/infiniband/mlx5_0/ports/1/gids/0", first),
        ("class/infiniband/mlx5_0/ports/1/gids/1", second),
        ("class/infiniband/mlx5_0/ports/1/gids/2", &none),
        ("class/infiniband/mlx5_0/ports/1/gids/3", &none),
        (
            "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0",
            if is_foreign { "elsewhere0" } else { "lo" },
        ),
        ("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "lo"),
        (
            "class/infiniband/mlx5_0/ports/1/gid_attrs/types/0",
            if ethernet { "RoCE v2" } else { "IB/RoCE v1" },
        ),
        ("class/misc/rdma_cm/abi_version", "4"),
        ("class/misc/rdma_cm/dev", &cm_node),
    ];
    files
        .iter()
        .map(|(name, value)| (*name, format!("{value}\n")))
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

    #[test]
    fn sysfs_tree_identifies_the_device() {
        let root = std::env::temp_dir().join(format!("doorbell-sysfs-{}", std::process::id()));
        let device = Device::open().unwrap();
        write(&root, &device).unwrap();
        assert_eq!((files(&PortIdentity::of(&device)).len() + 2) * 4096, BYTES);
        write(&root, &device).unwrap();
        let read = |name: &str| fs::read_to_string(root.join("class").join(name)).unwrap();
        assert_eq!(read("infiniband_verbs/uverbs0/ibdev"), "mlx5_0\n");
        assert_eq!(read("infiniband_verbs/uverbs0/dev"), "231:192\n");
        assert_eq!(read("infiniband/mlx5_0/hca_type"), "MT4129\n");
        let guid = read("infiniband/mlx5_0/node_guid");
        assert!(guid.starts_with("5c0f:7c00:0000:"), "{guid}");
        assert_eq!(read("infiniband/mlx5_0/ports/1/gids/0").len(), 40);
        fs::remove_dir_all(&root).unwrap();
    }
}
