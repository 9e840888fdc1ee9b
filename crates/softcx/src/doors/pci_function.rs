//! The PCI function of the device as sysfs shows it. Programs that place work near the card, or choose a transport by its type, read it.

use crate::doors::port::PortIdentity;
use crate::doors::uverbs::PART;

/// A domain of its own, as hypervisors number those of the functions that they pass through. No slot of this machine is in it.
pub(super) const ADDRESS: &str = "5c0f:00:00.0";
/// Its host bridge and the function, below `/sys`.
pub(super) const BRIDGE: &str = "devices/pci5c0f:00";
pub(super) const FOLDER: &str = "devices/pci5c0f:00/5c0f:00:00.0";
/// The driver's folder, below `/sys`.
pub(super) const DRIVER: &str = "bus/pci/drivers/mlx5_core";
/// All functions of the machine, below `/sys`.
pub(super) const ALL: &str = "bus/pci/devices";

const VENDOR: u16 = 0x15b3;
const SUBSYSTEM: u16 = 1;
/// The size of the card's registers.
const BAR_BYTES: u64 = 32 << 20;
const BAR: u64 = 0x5c_0f00_0000;
/// Memory, read-only for prefetching, 64 bits wide: `IORESOURCE_MEM | IORESOURCE_PREFETCH | IORESOURCE_MEM_64` and `PCI_BASE_ADDRESS_*`.
const BAR_FLAGS: u64 = 0x14_220c;
/// Lines of `resource`: BARs, the ROM and the windows of a bridge.
const RESOURCES: usize = 13;
/// PCI Express 5.0 with 16 lanes.
const SPEED: &str = "32.0 GT/s PCIe";
const SPEED_CODE: u32 = 5;
const LANES: u32 = 16;

/// The class code: an InfiniBand or an Ethernet controller.
fn class(port: &PortIdentity) -> u32 {
    if port.is_ethernet() {
        0x02_0000
    } else {
        0x02_0700
    }
}

fn modalias(port: &PortIdentity) -> String {
    let class = class(port);
    format!(
        "pci:v{VENDOR:08X}d{PART:08X}sv{VENDOR:08X}sd{SUBSYSTEM:08X}bc{:02X}sc{:02X}i{:02X}",
        class >> 16,
        class >> 8 & 0xff,
        class & 0xff
    )
}

/// The attributes of the function: name and text, without the end of the line.
pub(super) fn attributes(port: &PortIdentity) -> Vec<(&'static str, String)> {
    let class = class(port);
    let none = format!("0x{:016x} 0x{:016x} 0x{:016x}", 0, 0, 0);
    let mut resources = vec![none; RESOURCES];
    if let Some(first) = resources.first_mut() {
        let end = BAR + BAR_BYTES - 1;
        *first = format!("0x{BAR:016x} 0x{end:016x} 0x{BAR_FLAGS:016x}");
    }
    let uevent = [
        "DRIVER=mlx5_core".to_owned(),
        format!("PCI_CLASS={class:X}"),
        format!("PCI_ID={VENDOR:04X}:{PART:04X}"),
        format!("PCI_SUBSYS_ID={VENDOR:04X}:{SUBSYSTEM:04X}"),
        format!("PCI_SLOT_NAME={ADDRESS}"),
        format!("MODALIAS={}", modalias(port)),
    ];
    let cpus = OnlineCpus::read();
    vec![
        ("class", format!("0x{class:06x}")),
        ("current_link_speed", SPEED.into()),
        ("current_link_width", LANES.to_string()),
        ("device", format!("0x{PART:04x}")),
        ("enable", "1".into()),
        ("irq", "0".into()),
        ("local_cpulist", cpus.list()),
        ("local_cpus", cpus.mask()),
        ("max_link_speed", SPEED.into()),
        ("max_link_width", LANES.to_string()),
        ("modalias", modalias(port)),
        // None: what a virtual machine without NUMA nodes shows, too.
        ("numa_node", "-1".into()),
        ("resource", resources.join("\n")),
        ("revision", "0x00".into()),
        ("subsystem_device", format!("0x{SUBSYSTEM:04x}")),
        ("subsystem_vendor", format!("0x{VENDOR:04x}")),
        ("uevent", uevent.join("\n")),
        ("vendor", format!("0x{VENDOR:04x}")),
    ]
}

/// The configuration space: the header, and the capability of PCI Express, whose link `lspci` and hwloc decode.
pub(super) fn configuration(port: &PortIdentity) -> Vec<u8> {
    const EXPRESS: usize = 0x40;
    let mut space = vec![0; 256];
    let mut put = |at: usize, value: u32, bytes: usize| {
        if let Some(place) = space.get_mut(at..at + bytes) {
            place.copy_from_slice(value.to_le_bytes().get(..bytes).unwrap_or_default());
        }
    };
    let class = class(port);
    put(0x00, u32::from(VENDOR), 2);
    put(0x02, PART, 2);
    // Memory accesses, bus mastering; the status says that there is a list of capabilities.
    put(0x04, 0x0006, 2);
    put(0x06, 0x0010, 2);
    put(0x08, class << 8, 4);
    put(0x10, BAR as u32 | 0xc, 4);
    put(0x14, (BAR >> 32) as u32, 4);
    put(0x2c, u32::from(VENDOR), 2);
    put(0x2e, u32::from(SUBSYSTEM), 2);
    put(0x34, EXPRESS as u32, 1);
    // An endpoint, version 2.
    put(EXPRESS, 0x0010, 2);
    put(EXPRESS + 0x02, 0x0002, 2);
    put(EXPRESS + 0x0c, SPEED_CODE | LANES << 4, 4);
    put(EXPRESS + 0x12, SPEED_CODE | LANES << 4, 2);
    space
}

/// The processors that are online: all are near a device without a NUMA node.
#[derive(Debug)]
struct OnlineCpus(Vec<u32>);

impl OnlineCpus {
    fn read() -> OnlineCpus {
        let list = std::fs::read_to_string("/sys/devices/system/cpu/online");
        OnlineCpus(list.map_or_else(|_| vec![0], |list| numbers(list.trim())))
    }

    /// As `0-3,8`.
    fn list(&self) -> String {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for &cpu in &self.0 {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let texts = ranges.iter().map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        });
        texts.collect::<Vec<_>>().join(",")
    }

    /// Words of 32 processors, the highest first.
    fn mask(&self) -> String {
        let words = self.0.last().map_or(1, |last| *last as usize / 32 + 1);
        let mut mask = vec![0u32; words];
        for &cpu in &self.0 {
            if let Some(word) = mask.get_mut(cpu as usize / 32) {
                *word |= 1 << (cpu % 32);
            }
        }
        let texts = mask.iter().rev().map(|word| format!("{word:08x}"));
        texts.collect::<Vec<_>>().join(",")
    }
}

/// The numbers of a list of ranges, in order.
fn numbers(list: &str) -> Vec<u32> {
    /// More than Linux supports; a wrong file does not take all memory.
    const MOST: u32 = 8192;
    let mut numbers: Vec<u32> = list
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.trim().parse().ok()?..=last.trim().parse::<u32>().ok()?.min(MOST))
        })
        .flatten()
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn processors_are_written_as_the_kernel_writes_them() {
        for (list, mask) in [
            ("0", "00000001"),
            ("0-1", "00000003"),
            ("0-3,8,10-11", "00000d0f"),
            ("0,32-33", "00000003,00000001"),
        ] {
            let cpus = OnlineCpus(numbers(list));
            assert_eq!((cpus.list().as_str(), cpus.mask().as_str()), (list, mask));
        }
        assert_eq!(numbers(""), Vec::<u32>::new());
        assert_eq!(numbers("2,0-1,x,1"), [0, 1, 2]);
    }
}
