//! Protection domains, and the memory registered in them.
#![cfg_attr(feature = "verbs", allow(unsafe_code))] // methods whose callers promise what an address is of

#[cfg(feature = "verbs")]
use std::ffi::c_void;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
#[cfg(all(feature = "cuda", feature = "softcx"))]
use std::sync::Arc;

#[cfg(all(feature = "cuda", feature = "softcx"))]
use super::Foreign;
use super::{Access, Attributes, Capacity, NicQueuePair, PeerQueuePair};
#[cfg(feature = "verbs")]
use super::{KeptAlive, MemoryKeys};
use crate::Result;
use crate::mlx5::DatagramSegment;
#[cfg(feature = "verbs")]
use crate::{Error, StateKind};

/// A protection domain of a NIC, which it holds.
pub(crate) trait NicDomain: fmt::Debug + Send + Sync {
    /// A number for messages.
    fn number(&self) -> u32;

    /// Makes a queue pair in the RESET state. The device may give it a larger capacity.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) naming what the device cannot have so much of; those of the device's calls.
    fn queue_pair(&self, capacity: &Capacity) -> Result<Box<dyn NicQueuePair>>;

    /// The address handle of the port of a peer's queue pair. Of `attributes` it has the traffic class and the service level.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) for a peer on another kind of device; those of the device's calls.
    fn address_of(&self, peer: &PeerQueuePair, attributes: &Attributes) -> Result<NicAddress>;

    /// The address handle of the port of that LID and, with a global route, of that GID.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) of a device whose ports have none; those of the device's calls.
    fn address_of_port(
        &self,
        _lid: u16,
        _gid: Option<[u8; 16]>,
        _attributes: &Attributes,
    ) -> Result<NicAddress> {
        Err(crate::Error::state(
            crate::StateKind::Unsupported,
            "address_handle",
            "the ports of the software NIC of this process have no LIDs and GIDs; take the address of the peer's endpoint",
        ))
    }

    /// Uses an address handle (`ibv_ah`) that was made elsewhere.
    ///
    /// # Safety
    /// It is one, and stays one until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) if it is of another device.
    #[cfg(feature = "verbs")]
    unsafe fn adopt_address(&self, _ah: NonNull<c_void>, _owner: KeptAlive) -> Result<NicAddress> {
        Err(no_verbs("an address handle"))
    }

    /// Registers memory of this process, which the caller keeps valid until the registration ends.
    ///
    /// # Errors
    /// Those of the device's calls.
    fn register(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<RegisteredMemory>;

    /// Registers memory by its address in another device. A card's driver asks the kernel's modules whose it is. The caller keeps it valid as
    /// for [`NicDomain::register`].
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) of a NIC that reaches no such memory; those of the device's calls.
    fn register_peer(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<RegisteredMemory>;

    /// Registers `len_bytes` of a dmabuf from `offset` on, under the address `iova`.
    ///
    /// # Errors
    /// As [`NicDomain::register_peer`].
    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        iova: u64,
        access: Access,
    ) -> Result<RegisteredMemory>;

    /// The range and keys of an `ibv_mr` of this domain.
    ///
    /// # Safety
    /// It is one, and registered.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) if it is of another domain.
    #[cfg(feature = "verbs")]
    unsafe fn adopted_keys(&self, _mr: NonNull<c_void>) -> Result<MemoryKeys> {
        Err(no_verbs("registered memory"))
    }

    /// Uses memory that was registered elsewhere, until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) of a device that libibverbs does not drive.
    #[cfg(feature = "verbs")]
    fn adopt_memory(&self, _keys: MemoryKeys, _owner: KeptAlive) -> Result<RegisteredMemory> {
        Err(no_verbs("registered memory"))
    }

    /// Registers memory of another device, which `memory` copies; `None` for a NIC that reaches such memory by itself or not at all. The
    /// caller keeps the memory until the registration ends.
    #[cfg(all(feature = "cuda", feature = "softcx"))]
    fn register_copied(
        &self,
        _memory: &Arc<dyn Foreign>,
        _addr: u64,
        _len_bytes: u64,
        _access: Access,
    ) -> Option<Result<RegisteredMemory>> {
        None
    }
}

/// Where datagrams go: an address handle of a device, which exists until this is dropped.
#[derive(Debug)]
pub(crate) struct NicAddress {
    segment: DatagramSegment,
    /// What the device has of it.
    _on_device: Box<dyn fmt::Debug + Send + Sync>,
}

impl NicAddress {
    pub(super) fn new(
        segment: DatagramSegment,
        on_device: impl fmt::Debug + Send + Sync + 'static,
    ) -> NicAddress {
        NicAddress {
            segment,
            _on_device: Box::new(on_device),
        }
    }

    /// The datagram segment of WQEs that go there, for that queue pair.
    pub(crate) fn segment(&self, qpn: u32, qkey: u32) -> DatagramSegment {
        self.segment.to(qpn, qkey)
    }
}

/// The error of a device that libibverbs does not drive.
#[cfg(feature = "verbs")]
pub(super) fn no_verbs(what: &str) -> Error {
    Error::state(
        StateKind::WrongKind,
        "adoption",
        format!("the device is not one of libibverbs, whose {what} could be adopted"),
    )
}

/// Registered memory, until [`RegisteredMemory::deregister`].
#[derive(Debug)]
pub(crate) struct RegisteredMemory {
    lkey: u32,
    rkey: u32,
    on_device: Box<dyn Deregister>,
}

/// A registration as its device has it.
pub(super) trait Deregister: fmt::Debug + Send + Sync {
    /// As [`RegisteredMemory::deregister`].
    fn deregister(&self) -> Result<bool>;
}

impl RegisteredMemory {
    pub(super) fn new(
        lkey: u32,
        rkey: u32,
        on_device: impl Deregister + 'static,
    ) -> RegisteredMemory {
        RegisteredMemory {
            lkey,
            rkey,
            on_device: Box::new(on_device),
        }
    }

    /// The keys of memory that another region has registered, and deregisters.
    pub(crate) fn of_other(lkey: u32, rkey: u32) -> RegisteredMemory {
        #[derive(Debug)]
        struct OfOther;

        impl Deregister for OfOther {
            fn deregister(&self) -> Result<bool> {
                Ok(true)
            }
        }

        RegisteredMemory::new(lkey, rkey, OfOther)
    }

    /// For tests of code that waits for the deregistration.
    #[cfg(all(test, feature = "softcx"))]
    pub(crate) fn that_ends_by(end: fn() -> Result<bool>) -> RegisteredMemory {
        #[derive(Debug)]
        struct EndsBy(fn() -> Result<bool>);

        impl Deregister for EndsBy {
            fn deregister(&self) -> Result<bool> {
                (self.0)()
            }
        }

        RegisteredMemory::new(1, 1, EndsBy(end))
    }

    /// The key by which this side's work requests name the memory.
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key by which peers name it.
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Takes the memory from the device: once this has returned, the device does not access it. Returns whether the device still had it. The
    /// caller makes sure that there is one such call that succeeds.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the device refuses, and goes on accessing the memory.
    pub(crate) fn deregister(&self) -> Result<bool> {
        self.on_device.deregister()
    }
}
