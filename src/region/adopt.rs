//! Objects of libibverbs that another part of the process has made: open devices, protection domains and registered memory.
//!
//! The addresses of these objects are `NonNull<c_void>`: there are several crates with types for them, and `cast` makes it of any.
#![allow(unsafe_code)] // takes addresses of objects of C

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;

use super::device::DeviceSettings;
use super::memory::{OwnedMemory, REGION_BYTES_MAX};
use crate::nic::{self, Access, KeptAlive, MemoryKeys};
use crate::region::{Device, ProtectionDomain, Region, RegionKind};
use crate::{Error, Result, StateKind};

impl Device {
    /// Uses an `ibv_context` that another part of the process has opened (feature `verbs`). The library does not close it, and changes nothing that its other users
    /// see: neither its allocators nor its event descriptor.
    ///
    /// `settings` is what may stand behind a name in [`Device::open`], as `port=2,gid=3,path=proxy`. The word `verbs` before it (`verbs,port=2`) uses the device by plain verbs,
    /// and the word `mlx5` refuses a device that the mlx5 provider does not drive. Without either word an mlx5 device is used directly, and any other one by
    /// plain verbs. Direct use needs nothing of how the context was opened: no `devx`, no privilege. Each queue pair gets a parent domain of its own, which
    /// holds its UAR register and the memory of its queues.
    ///
    /// *Asynchronous events*: a context has one queue of events, and its reader takes those of all objects. The library does not read it. The program reads it
    /// and passes the events on with [`Device::report_async_event`]. If nobody reads it, the setting `events=library` makes the library its reader, as for a device that it has
    /// opened: the event descriptor does not block until the last object that the library has made with the context is gone. Without either, failures that have no completion are found only by the deadlines of waits, and the library does not learn that a device has been removed.
    ///
    /// Each call makes another [`Device`]; objects of two do not work together. So adopt a context once, and clone the device.
    ///
    /// `owner` is dropped after the last object that the library has made with the context: it may be what closes the context. Use `()` if the context lives
    /// for other reasons.
    ///
    /// # Safety
    /// `context` is the address of an `ibv_context` of the libibverbs that this process has loaded. It stays open until `owner` is dropped. With `events=library`, no other
    /// code reads its asynchronous events.
    ///
    /// # Errors
    /// As [`Device::open`] has them for settings and ports; [`Error::Malformed`] for any other word than `verbs` and `mlx5`; [`Error::State`] for `mlx5` if the mlx5
    /// provider does not drive the device.
    pub unsafe fn from_ibv_context(
        context: NonNull<c_void>,
        settings: &str,
        owner: impl Any + Send + Sync,
    ) -> Result<Device> {
        let (settings, reads_events) = without_events(settings)?;
        let settings = DeviceSettings::parse(&settings)?;
        let owner = KeptAlive::new(owner);
        // SAFETY: the caller's promise.
        let nic = unsafe { nic::adopt(context, &settings.rest, reads_events, owner) }?;
        Device::of(nic, &settings)
    }

    /// Passes on an asynchronous event of an adopted context, before it is acknowledged (feature `verbs`). `event_type` is the number of its `enum ibv_event_type`; `element` is the
    /// pointer of its union `element`. Events of objects that are not the library's are ignored, so all events may be passed on. A device of another kind
    /// ignores all.
    pub fn report_async_event(&self, event_type: u32, element: *const c_void) {
        self.nic().report_event(event_type, element.addr());
    }
}

impl ProtectionDomain {
    /// Uses an `ibv_pd` that another part of the process has allocated (feature `verbs`), be it a plain one or a parent domain. Endpoints that are made in it reach memory that
    /// is registered in it, by whomever. The library does not free it.
    ///
    /// Each call makes another [`ProtectionDomain`]; objects of two do not work together.
    ///
    /// `owner` is dropped after the last object that the library has made in the domain, and before the owner of the device.
    ///
    /// # Safety
    /// `pd` is the address of an `ibv_pd`, which stays allocated until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is of another `ibv_context` than the device; [`Error::State`] if the device is not one of libibverbs.
    pub unsafe fn from_ibv_pd(
        device: &Device,
        pd: NonNull<c_void>,
        owner: impl Any + Send + Sync,
    ) -> Result<ProtectionDomain> {
        // SAFETY: the caller's promise.
        let made = unsafe { device.nic().adopt_domain(pd, KeptAlive::new(owner)) }?;
        Ok(ProtectionDomain::of(device, made))
    }
}

impl Region {
    /// Uses memory that another part of the process has registered (feature `verbs`), with its range and keys. It is not registered a second time, and the library does not
    /// deregister it.
    ///
    /// `access` are the rights that it was registered with, or fewer: an `ibv_mr` does not tell them. The library checks work requests against them. `kind` is
    /// [`RegionKind::Host`] for memory that this process can load and store, otherwise [`RegionKind::Dmabuf`] or [`RegionKind::Peermem`]. Work requests name the memory by
    /// the address in the `ibv_mr`, so it must not be registered under another one (`ibv_reg_mr_iova`, `IBV_ACCESS_ZERO_BASED`): use [`Region::from_keys`] then.
    ///
    /// `owner` is dropped after the last handle of the region, those of work in flight included, by any thread: it may be what deregisters the memory.
    ///
    /// # Safety
    /// `mr` is the address of an `ibv_mr`, which stays registered until `owner` is dropped. Its memory stays valid as long, as for [`Region::register`], and its rights
    /// include `access`.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is registered in another protection domain; [`Error::Range`] for a length of 0 or over [`REGION_BYTES_MAX`](crate::REGION_BYTES_MAX);
    /// [`Error::State`] if the device is not one of libibverbs, and for [`RegionKind::Copied`].
    pub unsafe fn from_ibv_mr(
        domain: &ProtectionDomain,
        mr: NonNull<c_void>,
        access: Access,
        kind: RegionKind,
        owner: impl Any + Send + Sync,
    ) -> Result<Region> {
        // SAFETY: the caller's promise.
        let keys = unsafe { domain.on_device()?.adopted_keys(mr) }?;
        of_keys(domain, keys, access, kind, KeptAlive::new(owner))
    }

    /// As [`Region::from_ibv_mr`], of memory of which only the range and the keys are known (feature `verbs`): a part of registered memory, or memory that is registered under
    /// another address. If `keys.start` is not where this process has the memory, `kind` is [`RegionKind::Peermem`], and `keys.start` may be 0, as for memory of
    /// `IBV_ACCESS_ZERO_BASED`. The device refuses work requests of this side that name a region with the `lkey` 0, and those of peers by the `rkey` 0.
    ///
    /// # Safety
    /// As for [`Region::from_ibv_mr`]: the keys are valid for the range in the protection domain until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Range`] for the address and the length; [`Error::State`] as for [`Region::from_ibv_mr`].
    pub unsafe fn from_keys(
        domain: &ProtectionDomain,
        keys: MemoryKeys,
        access: Access,
        kind: RegionKind,
        owner: impl Any + Send + Sync,
    ) -> Result<Region> {
        of_keys(domain, keys, access, kind, KeptAlive::new(owner))
    }
}

fn of_keys(
    domain: &ProtectionDomain,
    keys: MemoryKeys,
    access: Access,
    kind: RegionKind,
    owner: KeptAlive,
) -> Result<Region> {
    if kind == RegionKind::Copied {
        return Err(Error::state(
            StateKind::WrongKind,
            "adoption of memory",
            "copies of a GPU's memory have no registration that could be adopted",
        ));
    }
    let start = adopted_start(&keys, kind)?;
    let registration = domain.on_device()?.adopt_memory(keys, owner)?;
    Ok(Region::at(
        domain,
        registration,
        start,
        keys.len_bytes,
        access,
        kind,
        OwnedMemory::Adopted,
    ))
}

/// The first byte of adopted memory. Host memory has an address other than 0. Other memory may begin at 0, as memory of `IBV_ACCESS_ZERO_BASED` does.
fn adopted_start(keys: &MemoryKeys, kind: RegionKind) -> Result<*mut u8> {
    let range = |argument, value, min, max| {
        Err(Error::Range {
            argument,
            value,
            min,
            max,
        })
    };
    let MemoryKeys {
        start, len_bytes, ..
    } = *keys;
    if !(1..=REGION_BYTES_MAX).contains(&len_bytes) {
        return range("len_bytes", len_bytes, 1, REGION_BYTES_MAX);
    }
    let (min, max) = (u64::from(kind == RegionKind::Host), u64::MAX - len_bytes);
    if !(min..=max).contains(&start) {
        return range("addr", start, min, max);
    }
    Ok(match kind {
        RegionKind::Host => std::ptr::with_exposed_provenance_mut(start as usize),
        _ => std::ptr::without_provenance_mut(start as usize),
    })
}

/// The settings without `events=`, and whether the library is to read the events.
fn without_events(settings: &str) -> Result<(String, bool)> {
    let mut reads_events = false;
    let mut rest = Vec::new();
    for part in settings.split(',') {
        match part.split_once('=') {
            Some(("events", "library")) => reads_events = true,
            Some(("events", "application")) => reads_events = false,
            Some(("events", _)) => {
                return Err(Error::Malformed {
                    what: "device name",
                    reason: format!(
                        "`{part}` is neither `events=library` nor `events=application`"
                    ),
                });
            }
            _ => rest.push(part),
        }
    }
    // The first is the place of the name.
    if rest.first().is_none_or(|first| first.contains('=')) {
        rest.insert(0, "");
    }
    Ok((rest.join(","), reads_events))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_say_how_a_context_is_used_and_who_reads_its_events() {
        let read = |text| without_events(text).unwrap();
        assert_eq!(read(""), (String::new(), false));
        assert_eq!(read("port=2"), (",port=2".into(), false));
        assert_eq!(read("events=library"), (String::new(), true));
        assert_eq!(
            read("verbs,events=library,gid=1"),
            ("verbs,gid=1".into(), true)
        );
        assert_eq!(read("mlx5,events=application"), ("mlx5".into(), false));
        assert!(without_events("events=nobody").is_err());
    }

    #[test]
    fn only_memory_that_this_process_does_not_address_begins_at_0() {
        let keys = |start, len_bytes| MemoryKeys {
            start,
            len_bytes,
            lkey: 1,
            rkey: 1,
        };
        for kind in [RegionKind::Peermem, RegionKind::Dmabuf] {
            assert!(
                adopted_start(&keys(0, REGION_BYTES_MAX), kind)
                    .unwrap()
                    .is_null()
            );
        }
        let start = adopted_start(&keys(4096, 64), RegionKind::Host).unwrap();
        assert_eq!(start.addr(), 4096);
        for (keys, kind) in [
            (keys(0, 64), RegionKind::Host),
            (keys(0, 0), RegionKind::Peermem),
            (keys(0, REGION_BYTES_MAX + 1), RegionKind::Peermem),
            (keys(u64::MAX - 63, 64), RegionKind::Peermem),
        ] {
            let refused = adopted_start(&keys, kind);
            assert!(matches!(refused, Err(Error::Range { .. })), "{keys:?}");
        }
    }

    #[cfg(feature = "softcx")]
    #[test]
    fn the_software_connectx_has_nothing_to_adopt_into() {
        let device = Device::open("softcx").unwrap();
        let nothing = NonNull::<c_void>::dangling();
        // SAFETY: a device that looks at no address.
        let domain = unsafe { ProtectionDomain::from_ibv_pd(&device, nothing, ()) };
        let error = domain.unwrap_err().to_string();
        assert!(error.contains("not one of libibverbs"), "{error}");
        let domain = device.protection_domain();
        let keys = MemoryKeys {
            start: 4096,
            len_bytes: 4096,
            lkey: 1,
            rkey: 1,
        };
        for kind in [RegionKind::Host, RegionKind::Copied] {
            // SAFETY: as above.
            let region = unsafe { Region::from_keys(&domain, keys, Access::ALL, kind, ()) };
            assert!(matches!(region, Err(Error::State { .. })), "{region:?}");
        }
        // SAFETY: as above.
        let region =
            unsafe { Region::from_ibv_mr(&domain, nothing, Access::ALL, RegionKind::Host, ()) };
        assert!(matches!(region, Err(Error::State { .. })), "{region:?}");
        device.report_async_event(1, nothing.as_ptr());
    }
}
