//! Which device an application means: by name, by PCI address, or the first that works.
#![allow(unsafe_code)] // reads the list that libibverbs gives

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use super::call::{object, release};
use crate::{Error, Result, StateKind};

/// What selects the first mlx5 device with an active port, or the nearest to a GPU.
const FIRST_MLX5: &str = "mlx5";
/// The same of devices of any provider; with a name behind it, that device by plain verbs.
const PLAIN: &str = "verbs";

/// What an application asked for: `NAME[,port=N][,gid=N]`, or `verbs:` before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Selector<'a> {
    /// A device name or a PCI address; `None` is the first that works.
    name: Option<&'a str>,
    /// Whether the device is to be used by plain verbs, whatever it is.
    plain: bool,
    pub(super) port: Option<u8>,
    pub(super) gid_index: Option<u8>,
}

impl<'a> Selector<'a> {
    /// # Errors
    /// [`Error::Malformed`].
    pub(super) fn parse(text: &'a str) -> Result<Selector<'a>> {
        let bad = |part: &str| Error::Malformed {
            what: "device name",
            reason: format!("`{part}` is neither `port=N` nor `gid=N`"),
        };
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let (name, plain) = match name.strip_prefix(PLAIN) {
            Some("") => (None, true),
            Some(rest) if rest.starts_with(':') => (Some(&rest[1..]), true),
            _ if name == FIRST_MLX5 => (None, false),
            _ => (Some(name), false),
        };
        let mut selector = Selector {
            name,
            plain,
            port: None,
            gid_index: None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(|| bad(part))?;
            let value = value.parse().map_err(|_| bad(part))?;
            match key {
                "port" => selector.port = Some(value),
                "gid" => selector.gid_index = Some(value),
                _ => return Err(bad(part)),
            }
        }
        Ok(selector)
    }

    /// Whether that device is meant, as far as its name and place tell.
    pub(super) fn admits(&self, device: &Listed) -> bool {
        match self.name {
            None => self.plain || device.is_mlx5,
            Some(name) => {
                name == device.name
                    || pci_address(Path::new(&device.path)).is_some_and(|address| address == name)
            }
        }
    }

    /// Fails unless a device that is open already can be used like this.
    ///
    /// # Errors
    /// [`Error::Malformed`] if a device is named; [`Error::State`] if it is to be used directly and is no mlx5 device.
    pub(super) fn check_adopted(&self, device: &Listed) -> Result<()> {
        match self.name {
            None if self.plain || device.is_mlx5 => Ok(()),
            Some("") => Ok(()),
            Some(name) => Err(Error::Malformed {
                what: "device name",
                reason: format!(
                    "`{name}` is neither `mlx5` nor `verbs`, and the device is open already"
                ),
            }),
            None => Err(Error::state(
                StateKind::Unsupported,
                "adoption of a context",
                format!(
                    "the mlx5 provider does not drive `{}`; `verbs` uses it by plain verbs",
                    device.name
                ),
            )),
        }
    }

    /// Whether the first that works is meant, and not one by its name.
    pub(super) fn is_automatic(&self) -> bool {
        self.name.is_none()
    }

    /// Whether that device is to be used by plain verbs: it is asked for, or nothing else works.
    pub(super) fn wants_plain(&self, device: &Listed) -> bool {
        self.plain || !device.is_mlx5
    }
}

/// The PCI address of the device behind a folder of `class/infiniband`.
fn pci_address(path: &Path) -> Option<String> {
    // The kernel says it in so many words; where there is no such file, the link tells.
    let uevent = std::fs::read_to_string(path.join("device/uevent")).unwrap_or_default();
    let named = uevent
        .lines()
        .find_map(|line| line.strip_prefix("PCI_SLOT_NAME="));
    if let Some(named) = named {
        return Some(named.to_owned());
    }
    let target = std::fs::read_link(path.join("device")).ok()?;
    target.file_name()?.to_str().map(str::to_owned)
}

/// A device as the list has it; valid while the list is.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) device: NonNull<rdma_sys::ibv_device>,
    pub(super) name: String,
    /// Whether the mlx5 provider drives it, which shows its queues.
    pub(super) is_mlx5: bool,
    path: String,
}

impl Listed {
    /// The device of an open context.
    ///
    /// # Safety
    /// It is an open context.
    ///
    /// # Errors
    /// [`Error::State`] if it has no device.
    pub(super) unsafe fn of_context(context: NonNull<rdma_sys::ibv_context>) -> Result<Listed> {
        // SAFETY: the caller's promise.
        let device = unsafe { context.as_ref() }.device;
        let device = NonNull::new(device).ok_or_else(|| {
            let reason = "the context has no device";
            Error::state(StateKind::NotFound, "adoption of a context", reason)
        })?;
        // SAFETY: the device of an open context.
        Ok(unsafe { Listed::of(device) })
    }

    /// # Safety
    /// It is a device of a list that is not freed, or of an open context.
    unsafe fn of(device: NonNull<rdma_sys::ibv_device>) -> Listed {
        // SAFETY: the caller's promise; the paths are arrays with an end mark.
        unsafe {
            Listed {
                device,
                name: text(rdma_sys::ibv_get_device_name(device.as_ptr())),
                is_mlx5: doorbell_dv_sys::doorbell_dv_is_mlx5(device.as_ptr()) != 0,
                path: text((&raw const (*device.as_ptr()).ibdev_path).cast()),
            }
        }
    }

    /// The folder of its PCI device, if it is one.
    pub(super) fn folder(&self) -> PathBuf {
        Path::new(&self.path).join("device")
    }

    /// The name to open it by, which says how it is used.
    pub(super) fn full_name(&self, plain: bool) -> String {
        if plain {
            format!("{PLAIN}:{}", self.name)
        } else {
            self.name.clone()
        }
    }
}

/// The devices that libibverbs has providers for.
#[derive(Debug)]
pub(super) struct DeviceList {
    list: NonNull<*mut rdma_sys::ibv_device>,
    pub(super) devices: Vec<Listed>,
}

impl DeviceList {
    /// # Errors
    /// [`Error::System`] of `ibv_get_device_list`.
    pub(super) fn read() -> Result<DeviceList> {
        let mut count = 0;
        // SAFETY: `count` is a place for the number of entries.
        let list = object("ibv_get_device_list", || unsafe {
            rdma_sys::ibv_get_device_list(&raw mut count)
        })?;
        let mut devices = Vec::new();
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries, which live as long as it.
            unsafe {
                let Some(device) = NonNull::new(*list.as_ptr().add(at)) else {
                    break;
                };
                devices.push(Listed::of(device));
            }
        }
        Ok(DeviceList { list, devices })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: made by `read`, freed once; what was opened from it does not need it.
        release("ibv_free_device_list", || unsafe {
            rdma_sys::ibv_free_device_list(self.list.as_ptr());
            0
        });
    }
}

/// # Safety
/// `text` is null or a string with an end mark.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_port_and_a_gid_index_behind_it() {
        let parsed = Selector::parse("mlx5_0,port=2,gid=3").unwrap();
        let expected = Selector {
            name: Some("mlx5_0"),
            plain: false,
            port: Some(2),
            gid_index: Some(3),
        };
        assert_eq!(parsed, expected);
        assert_eq!(
            Selector::parse("0000:3b:00.0").unwrap().name,
            Some("0000:3b:00.0")
        );
        for bad in [
            "mlx5_0,port",
            "mlx5_0,port=x",
            "mlx5_0,lid=3",
            "mlx5_0,gid=256",
        ] {
            assert!(Selector::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn plain_verbs_are_asked_for_by_their_name_and_are_all_that_others_than_mlx5_have() {
        let listed = |name: &str, is_mlx5| Listed {
            device: NonNull::dangling(),
            name: name.to_owned(),
            is_mlx5,
            path: String::new(),
        };
        let (mlx5, rxe) = (listed("mlx5_0", true), listed("rxe0", false));
        // Admitted, and by plain verbs: mlx5_0, rxe0.
        for (text, [card, soft]) in [
            ("mlx5", [Some(false), None]),
            ("verbs", [Some(true), Some(true)]),
            ("verbs,port=1", [Some(true), Some(true)]),
            ("mlx5_0", [Some(false), None]),
            ("verbs:mlx5_0", [Some(true), None]),
            ("rxe0", [None, Some(true)]),
            ("verbs:rxe0,gid=1", [None, Some(true)]),
            ("verbs:", [None, None]),
            ("verbs0", [None, None]),
        ] {
            let selector = Selector::parse(text).unwrap();
            let of = |device| {
                selector
                    .admits(device)
                    .then(|| selector.wants_plain(device))
            };
            assert_eq!([of(&mlx5), of(&rxe)], [card, soft], "{text}");
        }
        assert_eq!(mlx5.full_name(false), "mlx5_0");
        assert_eq!(rxe.full_name(true), "verbs:rxe0");
    }

    #[test]
    fn a_pci_address_is_read_from_the_event_file_or_from_the_link() {
        let root = std::env::temp_dir().join(format!("doorbell-select-{}", std::process::id()));
        let linked = root.join("linked");
        std::fs::create_dir_all(&linked).unwrap();
        std::os::unix::fs::symlink("../../0000:3b:00.0", linked.join("device")).unwrap();
        let named = root.join("named");
        std::fs::create_dir_all(named.join("device")).unwrap();
        std::fs::write(
            named.join("device/uevent"),
            "DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:af:00.1\n",
        )
        .unwrap();
        assert_eq!(pci_address(&linked).as_deref(), Some("0000:3b:00.0"));
        assert_eq!(pci_address(&named).as_deref(), Some("0000:af:00.1"));
        assert_eq!(pci_address(&root), None);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
