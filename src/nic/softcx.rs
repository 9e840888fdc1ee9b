//! The software ConnectX of this process.
#![allow(unsafe_code)] // it accesses the memory that is registered

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::Foreign;
use super::device::Driver;
use super::domain::Deregister;
use super::peer::{PeerKind, PeerQueuePair};
use super::{
    Abilities, Access, Attributes, Capacity, Counters, Faults, Nic, NicAddress, NicDomain,
    NicQueuePair, Queues, RegisteredMemory, State, Transport,
};
use crate::mlx5::Datagram;
use crate::{Error, Result, StateKind};
#[cfg(feature = "cuda")]
use doorbell_softcx::device::ForeignRegion;
use doorbell_softcx::device::{self as soft, PortId, WireKind};
use doorbell_wire::memory::QueuePairSizes;

const NAME: &str = "softcx";

pub(super) const DRIVER: Driver = Driver {
    list: || vec![NAME.to_owned()],
    open: |name, _| {
        let Some(wire) = wire_of(name).transpose()? else {
            return Ok(None);
        };
        Ok(Some(Arc::new(SoftcxNic(soft::Device::open_on(wire)?))))
    },
};

/// The wire that stands behind the name, as `softcx,wire=udp:10.0.0.1`. `None` for another name.
fn wire_of(name: &str) -> Option<Result<WireKind>> {
    let rest = name.strip_prefix(NAME)?;
    if rest.is_empty() {
        return Some(WireKind::from_env());
    }
    rest.strip_prefix(",wire=").map(WireKind::parse)
}

#[derive(Debug)]
struct SoftcxNic(soft::Device);

impl Nic for SoftcxNic {
    fn name(&self) -> &str {
        NAME
    }

    fn domain(&self) -> Result<Arc<dyn NicDomain>> {
        Ok(Arc::new(SoftcxDomain {
            device: self.0.clone(),
            number: self.0.create_pd(),
        }))
    }

    #[inline]
    fn progress(&self) -> bool {
        self.0.progress()
    }

    fn counters(&self) -> Option<Counters> {
        Some(self.0.counters())
    }

    fn set_faults(&self, faults: Faults) -> bool {
        self.0.set_faults(faults);
        true
    }

    fn set_frozen(&self, frozen: bool) -> bool {
        self.0.set_frozen(frozen);
        true
    }
}

#[derive(Debug)]
struct SoftcxDomain {
    device: soft::Device,
    number: u32,
}

/// The software NIC accesses memory by loads and stores. Memory of another device is accessed by what copies it, see [`Copied`].
fn only_mapped(what: &str) -> Result<RegisteredMemory> {
    Err(Error::state(
        StateKind::Unsupported,
        "registration",
        format!("softcx accesses only memory that its process has mapped, not {what}"),
    ))
}

impl NicDomain for SoftcxDomain {
    fn number(&self) -> u32 {
        self.number
    }

    fn queue_pair(&self, capacity: &Capacity) -> Result<Box<dyn NicQueuePair>> {
        let sizes = QueuePairSizes::of(capacity);
        let pair = match capacity.transport {
            Transport::Ud => soft::QueuePair::datagram(&self.device, self.number, &sizes)?,
            _ => soft::QueuePair::new(&self.device, self.number, &sizes)?,
        };
        Ok(Box::new(SoftcxQueuePair(pair)))
    }

    fn address_of(&self, peer: &PeerQueuePair, _: &Attributes) -> Result<NicAddress> {
        let port = remote_of(peer)?.port;
        let path = DatagramPath {
            number: self.device.open_datagram_path(&port)?,
            device: self.device.clone(),
        };
        let datagram = Datagram {
            lid: path.number,
            ..Datagram::default()
        };
        Ok(NicAddress::new(datagram.segment(), path))
    }

    fn register(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<RegisteredMemory> {
        let device = self.device.clone();
        // SAFETY: the caller's promise.
        let key = unsafe { device.register(self.number, start.as_ptr(), len_bytes, access) }?;
        Ok(RegisteredMemory::new(key, key, Mapped { device, key }))
    }

    fn register_peer(&self, _: NonNull<u8>, _: u64, _: Access) -> Result<RegisteredMemory> {
        only_mapped("memory of another device")
    }

    fn register_dmabuf(
        &self,
        _: BorrowedFd<'_>,
        _: u64,
        _: u64,
        _: u64,
        _: Access,
    ) -> Result<RegisteredMemory> {
        only_mapped("a dmabuf")
    }

    #[cfg(feature = "cuda")]
    fn register_copied(
        &self,
        memory: &Arc<dyn Foreign>,
        addr: u64,
        len_bytes: u64,
        access: Access,
    ) -> Option<Result<RegisteredMemory>> {
        let region = ForeignRegion::new(memory);
        let device = self.device.clone();
        // SAFETY: the caller's promise.
        let key = unsafe { device.register_foreign(self.number, &region, addr, len_bytes, access) };
        Some(key.map(|key| {
            let copied = Copied {
                mapped: Mapped { device, key },
                _region: region,
            };
            RegisteredMemory::new(key, key, copied)
        }))
    }
}

/// A peer as the device needs it: another software ConnectX of this host, or a queue pair that RoCE reaches.
///
/// # Errors
/// [`Error::Foreign`] for a queue pair that only InfiniBand reaches.
fn remote_of(peer: &PeerQueuePair) -> Result<soft::RemoteQueuePair> {
    let (port, reads) = match peer.roce() {
        Some(found) => (PortId::of_host(found.gid), found.reads),
        None => {
            let port = &peer.of(PeerKind::Softcx)?.port;
            (PortId::from_bytes(port), u8::MAX)
        }
    };
    Ok(soft::RemoteQueuePair {
        port,
        qpn: peer.qpn,
        psn: peer.psn,
        connection: peer.connection,
        reads,
    })
}

/// A port that the device has numbered.
#[derive(Debug)]
struct DatagramPath {
    device: soft::Device,
    number: u16,
}

impl Drop for DatagramPath {
    fn drop(&mut self) {
        self.device.close_datagram_path(self.number);
    }
}

/// Memory that the device loads and stores.
#[derive(Debug)]
struct Mapped {
    device: soft::Device,
    key: u32,
}

impl Deregister for Mapped {
    fn deregister(&self) -> Result<bool> {
        Ok(self.device.deregister(self.key))
    }
}

/// Memory that the device has copied by its owner.
#[cfg(feature = "cuda")]
#[derive(Debug)]
struct Copied {
    mapped: Mapped,
    _region: ForeignRegion,
}

#[cfg(feature = "cuda")]
impl Deregister for Copied {
    fn deregister(&self) -> Result<bool> {
        self.mapped.deregister()
    }
}

#[derive(Debug)]
struct SoftcxQueuePair(soft::QueuePair);

impl NicQueuePair for SoftcxQueuePair {
    fn queues(&self) -> Queues<'_> {
        Queues::Mlx5(self.0.memory())
    }

    fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    fn qpn(&self) -> u32 {
        self.0.qpn()
    }

    #[inline]
    fn state(&self) -> State {
        self.0.status().reported()
    }

    fn overrun(&self) -> bool {
        self.0.status().overrun()
    }

    #[inline]
    fn progress(&self) -> bool {
        self.0.device().progress()
    }

    #[inline]
    fn rung(&self) {
        self.0.rung();
    }

    fn direct(&self) -> Result<&'static str, String> {
        Ok(
            "a software ConnectX's UAR page is memory of this process, which a host stream stores to",
        )
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            atomics: true,
            reads: true,
            message_bytes: soft::MAX_MESSAGE_BYTES as u32,
        }
    }

    fn mtu_bytes(&self) -> u32 {
        self.0.device().mtu_bytes()
    }

    fn local(&self) -> PeerQueuePair {
        let soft::RemoteQueuePair {
            port,
            qpn,
            psn,
            connection,
            reads,
        } = self.0.local();
        if let Some(gid) = port.host_gid() {
            return PeerQueuePair::by_roce(gid, qpn, psn, reads);
        }
        PeerQueuePair {
            kind: PeerKind::Softcx,
            port: port.to_bytes(),
            qpn,
            psn,
            connection,
        }
    }

    fn init(&self, attributes: Attributes) -> Result<()> {
        self.0.init(attributes)
    }

    fn connect(&self, peer: &PeerQueuePair) -> Result<()> {
        self.0.connect(&remote_of(peer)?)
    }

    fn activate(&self) -> Result<()> {
        self.0.activate()
    }

    fn fail(&self) -> Result<()> {
        self.0.fail()
    }

    fn quiesce(&self) -> Result<bool> {
        self.0.quiesce()?;
        if self.0.status().device_failed() {
            return Err(Error::state(
                StateKind::QueuePair,
                "modify_qp to RESET",
                "the device has reported that it failed; commands are answered in its place, and it may go on",
            ));
        }
        // They are the device's only after a reset.
        Ok(false)
    }

    fn reset(&self) -> Result<()> {
        self.0.reset()
    }

    fn resets_cqs(&self) -> bool {
        true
    }
}
