//! What the environment says, read once.
//!
//! - `DOORBELL_CUDA_STANDIN=1`: there are devices at all.
//! - `DOORBELL_CUDA_STANDIN_DEVICES`: how many, 1 unless given.
//! - `DOORBELL_CUDA_STANDIN_MEMORY_MIB`: memory of each, 4096 unless given.
//! - `DOORBELL_CUDA_STANDIN_PAGE_BYTES`: of a page of the host, 4096 unless given; see `pages`.
//! - `DOORBELL_CUDA_STANDIN_DRIVER`: what `cuDriverGetVersion` says, 13000 (CUDA 13.0) unless given; see `image`.
//! - `DOORBELL_CUDA_STANDIN_QUEUE`: calls that a stream takes before the next one waits for room, 1024 unless given.
//! - `DOORBELL_CUDA_STANDIN_LACKS`: words separated by commas, what the devices cannot do: `memops`, `memops64`, `nor`, `flush`,
//!   `ordering` (of RDMA writes), `gdr` (GPUDirect RDMA), `hostregister`,
//!   `samepointer` (registered memory has another device address), `iomemops` (memory operations on it),
//!   `peerstores` (stores of memory operations to registers of a card arrive: they are dropped without an error, as by PCIe access control or an IOMMU;
//!   `peerstores1`: those of device 1),
//!   `kernels` (an image with code for them: CUDA_ERROR_NO_BINARY_FOR_GPU).
//! - `DOORBELL_CUDA_STANDIN_HAS`: words in the same way, of what they have. `dmabuf`: a handle for an address range can be had; it is a memfd,
//!   which can be mapped. `dmabuf-pcie`: only with the flag for a mapping through PCIe. `reuse`: an address that was freed is given out again. `iomemory`: registers of a card can be registered, as by an
//!   administrator; otherwise that is CUDA_ERROR_NOT_PERMITTED. `confidential`: confidential computing. The devices lack `hostregister` and `gdr`,
//!   and host memory of the driver is managed memory.
//! - `CUDA_DEVICE_MAX_CONNECTIONS`, the driver's own variable: work queues of a context, 1 to 32; 8 unless given. If given, streams are placed on them in turn;
//!   see `stream` and `context`.
//! - `DOORBELL_CUDA_STANDIN_FAULTS`, `DOORBELL_CUDA_STANDIN_SEED`: see `fault`.

use std::sync::OnceLock;

pub struct Settings {
    pub enabled: bool,
    pub devices: i32,
    pub memory_bytes: u64,
    pub page_bytes: u64,
    pub driver: i32,
    pub queue: u64,
    pub connections: Option<u64>,
    /// Of a context, where streams have no place on one.
    pub work_queues: u64,
    lacks: Vec<String>,
    has: Vec<String>,
    pub faults: String,
    pub seed: u64,
}

impl Settings {
    pub fn lacks(&self, what: &str) -> bool {
        // The GPU cannot access memory of a confidential virtual machine, and no other device can access memory of the GPU.
        (self.has("confidential") && matches!(what, "hostregister" | "gdr"))
            || self.lacks.iter().any(|word| word == what)
    }

    pub fn has(&self, what: &str) -> bool {
        self.has.iter().any(|word| word == what)
    }
}

pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        enabled: text("").as_deref() == Some("1"),
        devices: number("_DEVICES", 1) as i32,
        memory_bytes: number("_MEMORY_MIB", 4096) << 20,
        page_bytes: number("_PAGE_BYTES", 4096),
        driver: number("_DRIVER", 13_000) as i32,
        queue: number("_QUEUE", 1024),
        connections: connections(),
        work_queues: connections().map_or(8, |_| u64::MAX),
        lacks: words("_LACKS"),
        has: words("_HAS"),
        faults: text("_FAULTS").unwrap_or_default(),
        seed: number("_SEED", 1),
    })
}

fn text(name: &str) -> Option<String> {
    std::env::var(format!("DOORBELL_CUDA_STANDIN{name}")).ok()
}

/// A number that cannot be read ends the program: a test that runs with settings other than its own shows nothing.
fn number(name: &str, otherwise: u64) -> u64 {
    text(name).map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("DOORBELL_CUDA_STANDIN{name}: {text:?} is no number"))
    })
}

/// A driver ignores what is no number of its range.
fn connections() -> Option<u64> {
    let text = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()?;
    text.parse().ok().filter(|count| (1..=32).contains(count))
}

fn words(name: &str) -> Vec<String> {
    let text = text(name).unwrap_or_default();
    text.split(',')
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}
