//! How near a NIC is to a GPU, by what sysfs says of the PCI tree. On hosts with several cards a transfer between a GPU and a card at another processor
//! crosses the link between the processors.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

/// More is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Nearness {
    /// Parts of the way from the root that both have: the host bridge, and PCI bridges.
    bridges: usize,
    is_same_node: bool,
}

/// Sorts devices by the folders of their PCI devices, that nearest to the GPU's first. Equally near ones keep their order.
pub(super) fn nearest_first<T>(devices: &mut [T], folder: impl Fn(&T) -> PathBuf, gpu: &Path) {
    devices.sort_by_cached_key(|device| Reverse(Nearness::between(&folder(device), gpu)));
}

impl Nearness {
    /// The nearness of two PCI devices, given by their folders or by links to these. It is the least if either path leads to no PCI device.
    fn between(one: &Path, other: &Path) -> Nearness {
        let (Some(one), Some(other)) = (PciPlace::of(one), PciPlace::of(other)) else {
            return Nearness::default();
        };
        let common = one.way.iter().zip(&other.way).take_while(|(a, b)| a == b);
        Nearness {
            bridges: common.count(),
            is_same_node: one.node.is_some() && one.node == other.node,
        }
    }
}

/// Where a PCI device is.
struct PciPlace {
    /// From the host bridge on: `pci0000:3a`, `0000:3a:00.0`, `0000:3b:00.0`.
    way: Vec<String>,
    node: Option<u32>,
}

impl PciPlace {
    fn of(folder: &Path) -> Option<PciPlace> {
        let folder: PathBuf = fs::canonicalize(folder).ok()?;
        let parts = folder
            .iter()
            .map(|part| part.to_string_lossy().into_owned());
        let way: Vec<String> = parts.skip_while(|part| !part.starts_with("pci")).collect();
        // -1 where the kernel knows none.
        let node = fs::read_to_string(folder.join("numa_node")).ok();
        let node = node.and_then(|text| text.trim().parse().ok());
        (!way.is_empty()).then_some(PciPlace { way, node })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A host with two processors. A switch is at each.
    struct Host(PathBuf);

    impl Host {
        fn new(name: &str) -> Host {
            let root = std::env::temp_dir().join(format!("doorbell-{name}-{}", std::process::id()));
            Host(root)
        }

        /// The link by which the kernel names the device.
        fn device(&self, way: &str, node: i32) -> PathBuf {
            let folder = self.0.join("devices").join(way);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), format!("{node}\n")).unwrap();
            let links = self.0.join("bus");
            fs::create_dir_all(&links).unwrap();
            let link = links.join(folder.file_name().unwrap());
            symlink(&folder, &link).unwrap();
            link
        }
    }

    impl Drop for Host {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn card_at_the_switch_of_the_gpu_is_nearest() {
        let host = Host::new("nearness");
        let gpu = host.device(
            "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3d:00.0",
            0,
        );
        let beside = host.device(
            "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:10.0/0000:3e:00.0",
            0,
        );
        let same_bridge = host.device("pci0000:3a/0000:3a:02.0/0000:40:00.0", 0);
        let same_node = host.device("pci0000:16/0000:16:00.0/0000:17:00.0", 0);
        let far = host.device("pci0000:9a/0000:9a:00.0/0000:9b:00.0", 1);
        let unknown = host.device("pci0000:c0/0000:c0:00.0/0000:c1:00.0", -1);
        let to = |card: &PathBuf| Nearness::between(card, &gpu);
        let order = [&far, &same_node, &same_bridge, &beside].map(to);
        assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
        assert_eq!(to(&unknown), to(&far));
        let none = host.0.join("bus/0000:00:00.0");
        assert_eq!(to(&none), Nearness::default());
        let mut cards = [&none, &far, &unknown, &same_bridge, &beside, &same_node];
        nearest_first(&mut cards, |card| PathBuf::from(card), &gpu);
        let expected = [&beside, &same_bridge, &same_node, &none, &far, &unknown];
        assert_eq!(cards, expected);
    }
}
