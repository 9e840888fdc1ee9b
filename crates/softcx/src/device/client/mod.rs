//! The commands that a kernel driver issues on behalf of processes: contexts, and the objects that are created in them.
//!
//! Every number that a client gives is looked up among its own objects; one of another client's is as unknown as one that
//! never was. Errors are errno values, because that is what goes back to the process.

mod events;
mod parts;

use std::sync::{Arc, MutexGuard};

pub(crate) use self::events::{DeviceEvent, EventSink};
pub(crate) use self::parts::{
    AddressVector, CqParts, Errno, GID_IS_EMPTY, MrChange, MrRange, QpAttributes, QpParts,
    SrqParts, Transport, mask,
};

use crate::device::core::regions::Rights;
use crate::device::core::uar_page::{ARM, DOORBELLS};
use crate::device::core::{DeviceCore, Need};
use crate::device::dma::{ClockWord, UarRegister};
use crate::device::handle::Device;
use crate::device::pinned::{PinnedObject, PinnedPages};
use crate::device::space::Space;

/// A context on the device, as one process sees it. Dropping the last of them releases everything that was made in it, while
/// others go on.
#[derive(Debug)]
pub(crate) struct Client {
    owned: Arc<ClientRegistration>,
    space: Space,
}

#[derive(Debug)]
struct ClientRegistration {
    device: Device,
    id: u32,
}

impl Client {
    /// Opens a context for the process whose memory `space` is. `events` gets the asynchronous events of the device.
    pub(crate) fn open(device: &Device, space: Space, events: Arc<dyn EventSink>) -> Client {
        let owned = ClientRegistration {
            device: device.clone(),
            id: device.lock().add_client(events),
        };
        Client {
            owned: Arc::new(owned),
            space,
        }
    }

    /// The same context for another process, which has it by a fork: what it makes is in its own memory.
    pub(crate) fn seen_from(&self, space: Space) -> Client {
        Client {
            owned: Arc::clone(&self.owned),
            space,
        }
    }

    fn core(&self) -> MutexGuard<'_, DeviceCore> {
        self.owned.device.lock()
    }

    /// Where in the port's table of GIDs its own stands.
    pub(crate) fn gid_index(&self) -> Option<u8> {
        self.core().gid_index
    }

    /// Whether the port has no link now.
    pub(crate) fn is_link_down(&self) -> bool {
        self.owned.device.is_link_down()
    }

    fn check_all(&self, needs: &[Need]) -> Result<(), Errno> {
        needs.iter().try_for_each(|need| need.check(self.space))
    }

    /// Pins what `pin` does, if the function limits that.
    fn pin(
        &self,
        pin: impl FnOnce(Space) -> Result<PinnedPages, Errno>,
    ) -> Result<Option<PinnedPages>, Errno> {
        let limits = self.owned.device.function().limits_pinned;
        limits.then(|| pin(self.space)).transpose()
    }

    /// Pins the rings of a queue.
    fn pin_rings(&self, rings: &[Need]) -> Result<Option<PinnedPages>, Errno> {
        self.pin(|space| PinnedPages::of_rings(space, rings))
    }

    /// Adds a UAR page: registers at 0x800, 0x900, 0xa00, 0xb00 ring queue pairs, the one at 0x20 arms completion queues.
    ///
    /// # Safety
    /// `page` is 4096 bytes of memory shared with the client, aligned to 8 bytes and valid until the number is freed or the
    /// client is dropped.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn alloc_uar(&self, page: *mut u8) -> Result<u32, Errno> {
        // SAFETY: within the page, whose life the caller promises.
        let register = |at: usize| unsafe { UarRegister::new(page.add(at).cast()) };
        self.core()
            .add_uar(self.owned.id, DOORBELLS.map(register), register(ARM))
    }

    /// Shows the device's clock to the client: nanoseconds, big-endian, as of the last turn of the device's work. CQEs are
    /// stamped with the same clock, never ahead of what is shown.
    ///
    /// # Safety
    /// `word` is 8 bytes of memory shared with the client, aligned, and valid until the client is dropped.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn show_clock(&self, word: *mut u8) {
        // SAFETY: the caller's promise.
        let clock = unsafe { ClockWord::new(word.cast()) };
        clock.set(self.owned.device.now_ns());
        self.core().show_clock(self.owned.id, clock);
    }

    /// EBUSY while a queue uses it.
    pub(crate) fn free_uar(&self, uar: u32) -> Result<(), Errno> {
        self.core().free_uar(self.owned.id, uar)
    }

    pub(crate) fn alloc_pd(&self) -> Result<u32, Errno> {
        self.core().alloc_pd(self.owned.id)
    }

    /// EBUSY while something is in it.
    pub(crate) fn dealloc_pd(&self, pd: u32) -> Result<(), Errno> {
        self.core().dealloc_pd(self.owned.id, pd)
    }

    /// EINVAL for an empty range, one past the end of the address space, or an I/O address at another place of its page (as the
    /// kernel has it); EPERM or ENOMEM for one that may not be pinned; EFAULT for one that is not mapped. Gives what is pinned, if that is counted.
    fn check_range(&self, range: MrRange, writable: bool) -> Result<Option<PinnedPages>, Errno> {
        let MrRange {
            start,
            len_bytes,
            iova,
        } = range;
        let wraps = start.checked_add(len_bytes).is_none() || iova.checked_add(len_bytes).is_none();
        if len_bytes == 0 || wraps || (start ^ iova) & 0xfff != 0 {
            return Err(libc::EINVAL);
        }
        let pinned = self.pin(|space| PinnedPages::of(space, start, len_bytes))?;
        self.space
            .check(start, len_bytes, writable)
            .map_err(|_| libc::EFAULT)?;
        Ok(pinned)
    }

    /// The key, local and remote. EFAULT unless the whole range is mapped (and writable, if the access says so); EINVAL for
    /// remote write or atomics without local write.
    pub(crate) fn reg_mr(&self, pd: u32, range: MrRange, access: u32) -> Result<u32, Errno> {
        let rights = Rights::parse(access)?;
        let pinned = self.check_range(range, rights.writes())?;
        let mut core = self.core();
        let key = core.reg_mr(self.owned.id, self.space, pd, range, rights)?;
        core.keep_pinned(self.owned.id, PinnedObject::Region(key >> 8), pinned);
        Ok(key)
    }

    /// The key from now on. On failure the region is as it was. EBUSY while a memory window is bound to it.
    pub(crate) fn rereg_mr(&self, key: u32, change: MrChange) -> Result<u32, Errno> {
        let rights = change.access.map(Rights::parse).transpose()?;
        let (old, written) = self.core().mr_range(self.owned.id, key)?;
        let writable = rights.map_or(written, Rights::writes);
        // What stays as it is was looked at when it was registered.
        let pinned = if change.range.is_some() || writable != written {
            self.check_range(change.range.unwrap_or(old), writable)?
        } else {
            None
        };
        let mut core = self.core();
        let key = core.rereg_mr(self.owned.id, self.space, key, &change, rights)?;
        core.keep_pinned(self.owned.id, PinnedObject::Region(key >> 8), pinned);
        Ok(key)
    }

    /// EBUSY while a memory window is bound to it. When this returns, the device does not touch the memory any more.
    pub(crate) fn dereg_mr(&self, key: u32) -> Result<(), Errno> {
        let mut core = self.core();
        core.dereg_mr(self.owned.id, key)?;
        core.unpin(self.owned.id, PinnedObject::Region(key >> 8));
        Ok(())
    }

    /// A memory window of type 1 or 2 (`ibv_mw_type`): its key.
    pub(crate) fn alloc_mw(&self, pd: u32, kind: u8) -> Result<u32, Errno> {
        self.core().alloc_mw(self.owned.id, pd, kind)
    }

    pub(crate) fn dealloc_mw(&self, key: u32) -> Result<(), Errno> {
        self.core().dealloc_mw(self.owned.id, key)
    }

    /// EINVAL for invalid sizes or memory that is not aligned, EFAULT for memory that is not mapped.
    pub(crate) fn create_cq(&self, parts: CqParts) -> Result<u32, Errno> {
        let ring = CqParts::ring_need(parts.ring, parts.cqes, parts.cqe_bytes)?;
        self.check_all(&[ring, parts.record_need()])?;
        let pinned = self.pin_rings(&[ring])?;
        let mut core = self.core();
        let cqn = core.create_client_cq(self.owned.id, self.space, parts)?;
        core.keep_pinned(self.owned.id, PinnedObject::Cq(cqn), pinned);
        Ok(cqn)
    }

    /// Moves a completion queue to another ring. Writes a RESIZE CQE (opcode 5, `MLX5_CQE_RESIZE_CQ`) as the last one into the old ring, and writes
    /// later CQEs into the new one. `mlx5_resize_cq` in libmlx5 copies the CQEs before it. EINVAL if one of the rings has no room for all.
    pub(crate) fn resize_cq(
        &self,
        cqn: u32,
        ring: u64,
        cqes: u32,
        cqe_bytes: u32,
    ) -> Result<(), Errno> {
        let need = CqParts::ring_need(ring, cqes, cqe_bytes)?;
        self.check_all(&[need])?;
        let pinned = self.pin_rings(&[need])?;
        let mut core = self.core();
        core.resize_cq(self.owned.id, self.space, cqn, ring, cqes, cqe_bytes)?;
        core.keep_pinned(self.owned.id, PinnedObject::Cq(cqn), pinned);
        Ok(())
    }

    /// Sets moderation; accepted and without effect on a device without interrupts.
    pub(crate) fn modify_cq(&self, cqn: u32, _count: u16, _period_us: u16) -> Result<(), Errno> {
        self.core().check_cq(self.owned.id, cqn)
    }

    /// EBUSY while a queue pair completes to it.
    pub(crate) fn destroy_cq(&self, cqn: u32) -> Result<(), Errno> {
        let mut core = self.core();
        core.destroy_client_cq(self.owned.id, cqn)?;
        core.unpin(self.owned.id, PinnedObject::Cq(cqn));
        Ok(())
    }

    /// Errors as of [`Client::create_cq`].
    pub(crate) fn create_srq(&self, parts: SrqParts) -> Result<u32, Errno> {
        let needs = parts.needs()?;
        self.check_all(&needs)?;
        let pinned = self.pin_rings(&needs[..1])?;
        let mut core = self.core();
        let srqn = core.create_srq(self.owned.id, self.space, &parts)?;
        core.keep_pinned(self.owned.id, PinnedObject::Srq(srqn), pinned);
        Ok(srqn)
    }

    /// Arms the limit event. EINVAL for a limit that is not below the number of entries.
    pub(crate) fn set_srq_limit(&self, srqn: u32, limit: u32) -> Result<(), Errno> {
        self.core().set_srq_limit(self.owned.id, srqn, limit)
    }

    /// The limit: 0 after its event.
    pub(crate) fn srq_limit(&self, srqn: u32) -> Result<u32, Errno> {
        self.core().srq_limit(self.owned.id, srqn)
    }

    /// EBUSY while a queue pair takes from it.
    pub(crate) fn destroy_srq(&self, srqn: u32) -> Result<(), Errno> {
        let mut core = self.core();
        core.destroy_srq(self.owned.id, srqn)?;
        core.unpin(self.owned.id, PinnedObject::Srq(srqn));
        Ok(())
    }

    /// A queue pair in the RESET state: its number. Errors as of [`Client::create_cq`]; ENOMEM if the device has all it can.
    pub(crate) fn create_qp(&self, parts: &QpParts) -> Result<u32, Errno> {
        let needs = parts.needs()?;
        self.check_all(&needs)?;
        let pinned = self.pin_rings(&needs[..2])?;
        let mut core = self.core();
        let qpn = core.create_client_qp(self.owned.id, self.space, parts)?;
        core.keep_pinned(self.owned.id, PinnedObject::Qp(qpn), pinned);
        Ok(qpn)
    }

    /// Changes what `mask` names; checks transition, required and optional attributes as the kernel's `ib_modify_qp_is_ok`
    /// does. Nothing has changed on failure.
    pub(crate) fn modify_qp(
        &self,
        qpn: u32,
        attributes: &QpAttributes,
        mask: u32,
    ) -> Result<(), Errno> {
        let device = &self.owned.device;
        let now_ns = device.now_ns();
        let changed = self
            .core()
            .modify_qp(self.owned.id, qpn, attributes, mask, now_ns);
        // A device without a queue pair that can be rung sleeps for long; from here on doorbells may come unreported.
        device.rung();
        changed
    }

    /// The attributes as the device has them: the state and the sequence numbers as they are now, depths as powers of two, and of the rights those
    /// that the peer has.
    pub(crate) fn query_qp(&self, qpn: u32) -> Result<QpAttributes, Errno> {
        self.core().query_qp(self.owned.id, qpn)
    }

    /// The access flags that were set last.
    pub(crate) fn asked_access(&self, qpn: u32) -> Result<u32, Errno> {
        self.core().asked_access(self.owned.id, qpn)
    }

    /// When this returns, the device writes nothing more for it.
    pub(crate) fn destroy_qp(&self, qpn: u32) -> Result<(), Errno> {
        let mut core = self.core();
        core.destroy_client_qp(self.owned.id, qpn)?;
        core.unpin(self.owned.id, PinnedObject::Qp(qpn));
        Ok(())
    }

    /// Joins a multicast group (UD only). Packets find the group by its GID. EINVAL for a GID that is not of a group, and on InfiniBand for a LID
    /// that is not of one.
    pub(crate) fn attach_multicast(&self, qpn: u32, gid: [u8; 16], mlid: u16) -> Result<(), Errno> {
        self.core().attach_multicast(self.owned.id, qpn, gid, mlid)
    }

    /// Leaves a group. EINVAL unless the queue pair has joined it with this GID and this LID.
    pub(crate) fn detach_multicast(&self, qpn: u32, gid: [u8; 16], mlid: u16) -> Result<(), Errno> {
        self.core().detach_multicast(self.owned.id, qpn, gid, mlid)
    }
}

impl Drop for ClientRegistration {
    fn drop(&mut self) {
        self.device.lock().remove_client(self.id);
    }
}
