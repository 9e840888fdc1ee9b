//! The public handle of a device.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, MutexGuard};

use crate::device::capture::FrameCapture;
use crate::device::commands::{CommandKind, Commands};
use crate::device::core::DeviceCore;
use crate::device::engine::{Engine, EngineCore};
use crate::device::fabric::{Fabric, gid_of};
use crate::device::faults::{FAULT, Faults};
use crate::device::inbox::WireAddress;
use crate::device::keys::Access;
use crate::device::management::{MadBytes, MadPeer, MadQueue};
use crate::device::options::{DeviceOptions, Function, LinkLayer, WireKind};
use crate::device::pace::EnginePace;
use crate::device::port_id::PortId;
use crate::device::qp::{Counters, QpStatus};
use crate::device::udp::UdpInterface;
use crate::device::udp::watcher::UdpWatcher;
use crate::device::{
    foreign::ForeignRegion,
    space::{Space, SpaceAddress},
};
use crate::{Error, Result, StateKind};

#[cold]
fn table_is_full() -> Error {
    Error::state(
        StateKind::Exhausted,
        "reg_mr",
        "the device's key table is full",
    )
}

/// A software ConnectX. Clones are handles of the same device; it ends with the last handle, and everything made from it
/// holds one.
#[derive(Debug, Clone)]
pub struct Device {
    /// Ends before the engine.
    #[expect(dead_code, reason = "kept for its drop")]
    watcher: Option<Arc<UdpWatcher>>,
    engine: Arc<Engine>,
    function: Function,
    commands: Arc<Commands>,
}

impl Device {
    /// Makes a device with an engine thread. Faults in the environment variable [`FAULT`] are set from the start. Its wire is the one that the variable
    /// [`WIRE`](crate::device::WIRE) has.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel gives no shared memory or no thread; [`Error::Malformed`] for an unknown fault or wire; [`Error::State`] as of
    /// [`Device::open_on`].
    pub fn open() -> Result<Device> {
        Device::open_on(WireKind::from_env()?)
    }

    /// As [`Device::open`], with this wire.
    ///
    /// # Errors
    /// As [`Device::open`]; [`Error::State`] if the address of the wire is in use or not one of this host.
    pub fn open_on(wire: WireKind) -> Result<Device> {
        let mut core = DeviceCore::new()?;
        match wire {
            WireKind::SharedMemory => {}
            WireKind::Udp(address) => core.set_udp(address)?,
            WireKind::UdpAndMemory(address) => core.set_udp_beside_memory(address)?,
        }
        if let Ok(list) = std::env::var(FAULT) {
            let mut faults = Faults::default();
            faults.set_all(&list)?;
            core.set_faults(faults);
        }
        Device::with(core, EnginePace::reported(), Function::default())
    }

    /// Makes a device with an engine thread on a named fabric. The device gets a number, by which other devices of the fabric find it.
    ///
    /// # Errors
    /// As [`Device::open`]; [`Error::State`] if the fabric's name is invalid, or the fabric has no free number.
    pub fn on_fabric(options: &DeviceOptions) -> Result<Device> {
        let core = Device::core_of(options)?;
        Device::with(core, EnginePace::polled(), options.function)
    }

    fn core_of(options: &DeviceOptions) -> Result<DeviceCore> {
        let mut core = DeviceCore::on_fabric(&options.fabric, options.link)?;
        match options.wire {
            WireKind::SharedMemory => {}
            _ if options.link != LinkLayer::Ethernet => {
                return Err(Error::state(
                    StateKind::Unsupported,
                    "open of the UDP wire",
                    "RoCE needs an Ethernet link",
                ));
            }
            WireKind::Udp(address) => core.set_udp(address)?,
            WireKind::UdpAndMemory(address) => core.set_udp_beside_memory(address)?,
        }
        core.set_faults(options.faults);
        if let Some(path) = &options.trace {
            core.set_trace(path)?;
        }
        if let Some(path) = &options.pcap {
            core.parts.capture = Some(Box::new(FrameCapture::open(path)?));
        }
        Ok(core)
    }

    fn with(mut core: DeviceCore, pace: EnginePace, function: Function) -> Result<Device> {
        if function.foreign_gid && core.parts.link() == LinkLayer::Ethernet {
            core.gid_index = Some(1);
        }
        let socket = core
            .parts
            .udp
            .as_ref()
            .map(|udp| udp.watched())
            .transpose()?;
        let commands = Arc::clone(core.commands());
        let engine = Engine::start(core, pace)?;
        let watcher = socket.map(|socket| UdpWatcher::start(Arc::clone(&engine.nic), socket));
        Ok(Device {
            commands,
            watcher: watcher.transpose()?.map(Arc::new),
            engine: Arc::new(engine),
            function,
        })
    }

    /// How commands are answered.
    pub(crate) fn commands(&self) -> &Commands {
        &self.commands
    }

    /// As [`Device::on_fabric`], without an engine.
    #[cfg(test)]
    pub(crate) fn on_fabric_without_engine(options: &DeviceOptions) -> Result<Device> {
        Ok(Device::resting(Device::core_of(options)?, options.function))
    }

    /// A device that nothing moves but the caller's turns of its core.
    #[cfg(test)]
    pub(crate) fn without_engine() -> Result<Device> {
        Device::without_engine_on(WireKind::from_env()?)
    }

    /// The same, with this wire.
    #[cfg(test)]
    pub(crate) fn without_engine_on(wire: WireKind) -> Result<Device> {
        let mut core = DeviceCore::new()?;
        if let WireKind::Udp(address) | WireKind::UdpAndMemory(address) = wire {
            core.set_udp(address)?;
        }
        Ok(Device::resting(core, Function::default()))
    }

    #[cfg(test)]
    fn resting(core: DeviceCore, function: Function) -> Device {
        Device {
            commands: Arc::clone(core.commands()),
            watcher: None,
            engine: Arc::new(Engine::resting(core)),
            function,
        }
    }

    /// One turn at a time of the caller's choice.
    #[cfg(test)]
    pub(crate) fn turn_at(&self, now_ns: u64) -> bool {
        self.nic().turn(&mut self.lock(), now_ns)
    }

    #[cfg(test)]
    pub(super) fn engine_core(&self) -> &std::sync::Arc<EngineCore> {
        &self.engine.nic
    }

    fn nic(&self) -> &EngineCore {
        &self.engine.nic
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, DeviceCore> {
        self.nic().lock()
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.nic().now_ns()
    }

    /// Does one turn of the device's work in the calling thread, for poll loops. Returns whether there was work; `false` also if another thread
    /// does it at the moment.
    #[inline]
    pub fn progress(&self) -> bool {
        let nic = self.nic();
        let Some(mut core) = nic.try_lock() else {
            // If the engine holds the lock, it steps aside after this turn: the data is in this thread's cache, and a busy engine
            // would otherwise never release the lock to a polling thread.
            nic.driven.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        let now_ns = nic.now_ns();
        nic.driven.store(now_ns, Ordering::Relaxed);
        let worked = nic.turn(&mut core, now_ns);
        // The caller may not poll again, so the engine must do the rest.
        nic.end_turn(core, worked);
        worked
    }

    /// As [`Device::progress`], for a caller that calls repeatedly. Packets do not wake the engine until the caller calls
    /// [`Device::progress_off`].
    #[inline]
    pub(crate) fn progress_on(&self) -> bool {
        self.nic().wake_word.suppress_wake();
        self.progress()
    }

    /// Ends what [`Device::progress_on`] began: packets wake the engine again.
    #[inline]
    pub(crate) fn progress_off(&self) {
        if self.nic().wake_word.resume_wake() {
            self.progress();
        }
    }

    /// Reports to the device that a register was stored to: wakes the engine if it sleeps. A card needs no such call, because
    /// the store itself reaches it.
    ///
    /// Prefer [`super::QueuePair::rung`], which names the queue pair. Without it the device finds the doorbell of an idle queue pair only when it has
    /// nothing else to do.
    #[inline]
    pub fn rung(&self) {
        let nic = self.nic();
        // Orders the doorbell before the load of the hint: a hint that is set already may be taken before the doorbell is seen.
        fence(Ordering::SeqCst);
        if !nic.any_rung.load(Ordering::Relaxed) {
            nic.any_rung.store(true, Ordering::Release);
        }
        nic.wake_word.wake();
    }

    #[inline]
    pub(crate) fn rung_at(&self, slot: usize, status: &QpStatus) {
        let nic = self.nic();
        // Orders the doorbell before the load of the flag; pairs with the fence in `DeviceCore::stop_watching`. Either the device
        // sees the doorbell in its last read, or this thread sees that the flag is clear.
        fence(Ordering::SeqCst);
        if !status.watched() {
            nic.rung.add(slot);
        }
        nic.wake_word.wake();
    }

    /// How often the engine has slept for 1 ms or longer, and nothing ended that early.
    #[cfg(test)]
    pub(crate) fn long_sleeps(&self) -> u64 {
        self.nic().long_sleeps.load(Ordering::Relaxed)
    }

    /// Its number on its fabric, 1 to 63; 0 for a device without a fabric.
    pub fn node(&self) -> u16 {
        self.lock().fabric().map_or(0, Fabric::node)
    }

    /// Whether the port has no link now.
    pub(crate) fn is_link_down(&self) -> bool {
        self.lock().parts.wire.is_down()
    }

    /// The kind of its link.
    pub fn link(&self) -> LinkLayer {
        self.lock().parts.link()
    }

    /// The interface of its wire, if that is UDP.
    pub(crate) fn interface(&self) -> Option<UdpInterface> {
        let core = self.lock();
        core.parts.udp.as_ref().map(|udp| udp.interface)
    }

    /// Requirements and missing capabilities of its port and its function.
    pub fn function(&self) -> Function {
        self.function
    }

    /// Its LID on an InfiniBand link: the number of its node. 0 on Ethernet, which has none.
    pub fn lid(&self) -> u16 {
        match self.link() {
            LinkLayer::InfiniBand => self.node(),
            LinkLayer::Ethernet => 0,
        }
    }

    /// Its GID: link-local with an EUI-64 of its node on InfiniBand, the address 127.0.0.NODE on Ethernet, or that of its wire.
    pub fn gid(&self) -> [u8; 16] {
        let host = self.lock().parts.host_gid;
        host.unwrap_or_else(|| gid_of(self.link(), self.node()))
    }

    /// The index of its GID in the port's table of GIDs; `None` if the GID was removed.
    pub fn gid_index(&self) -> Option<u8> {
        self.lock().gid_index
    }

    /// The management datagrams that arrive at this device.
    pub(crate) fn mads(&self) -> Arc<MadQueue> {
        Arc::clone(self.lock().mads())
    }

    /// The port of this device, as others send management datagrams to it.
    pub(crate) fn mad_port(&self) -> MadPeer {
        let host = self.lock().parts.host_gid;
        host.map_or_else(|| MadPeer::Node(self.node()), MadPeer::Host)
    }

    /// Sends a management datagram to queue pair 1 of a port. It may be lost.
    pub(crate) fn send_mad(&self, peer: MadPeer, mad: &MadBytes) {
        self.lock().send_mad(self.now_ns(), peer, mad);
        self.rung();
    }

    /// Moves the port's GID to another index of its table, or takes it out, as the kernel does when addresses of the network interface change.
    /// Programs get `IBV_EVENT_GID_CHANGE`. Connections stay, because the queue pair holds the address, as on a card.
    pub fn set_gid_index(&self, index: Option<u8>) {
        self.lock().set_gid_index(index);
    }

    /// The port by which other devices reach this one.
    pub fn port(&self) -> PortId {
        let core = self.lock();
        PortId(match core.parts.host_gid {
            Some(gid) => WireAddress::Host(gid),
            None => WireAddress::Inbox(core.inbox().address()),
        })
    }

    /// The largest MTU of its port: 4096 bytes, or what the network interface of its wire takes.
    pub fn mtu_bytes(&self) -> u32 {
        self.lock().mtu_bytes()
    }

    /// The counters of the device.
    pub fn counters(&self) -> Counters {
        self.lock().parts.counters
    }

    /// Sets the faults that this device injects from now on, for tests.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().set_faults(faults);
        self.rung();
    }

    /// Sets how the device treats a doorbell that arrives before its record, or after a later doorbell. A card executes requests up to the record,
    /// so a request may wait for the next doorbell: a bug that shows only sometimes. By default this device counts such a doorbell and fails the
    /// queue pair. With `true` it behaves as a card.
    pub fn take_doorbells_out_of_order(&self, takes: bool) {
        self.lock().parts.takes_doorbells_out_of_order = takes;
    }

    /// Stops all work of the device, or lets it continue. For tests of a card that hangs.
    pub fn set_frozen(&self, frozen: bool) {
        self.lock().set_frozen(frozen);
        self.rung();
    }

    /// A new protection domain.
    pub fn create_pd(&self) -> u32 {
        self.lock().create_pd()
    }

    /// Registers memory of this process. Returns its key, which is both the local and the remote key.
    ///
    /// # Safety
    /// The memory is valid for reads and writes until [`Device::deregister`] returns, or the last handle of the device and all that was made
    /// from it are gone.
    ///
    /// # Errors
    /// [`Error::State`] when the device's table is full.
    #[allow(unsafe_code)] // the promise about the memory can only be the caller's
    pub unsafe fn register(
        &self,
        pd: u32,
        base: *mut u8,
        len_bytes: u64,
        access: Access,
    ) -> Result<u32> {
        self.command_register()?;
        let base = base.expose_provenance();
        let key = self.lock().parts.keys.register(pd, base, len_bytes, access);
        key.ok_or_else(table_is_full)
    }

    /// Registers memory of another device, which is copied by `region`'s [`Foreign`](crate::device::Foreign). The caller keeps `region`
    /// as long as the registration.
    ///
    /// # Safety
    /// As for [`Device::register`]: `addr` is the address of such memory in the other device.
    ///
    /// # Errors
    /// As of [`Device::register`].
    #[allow(unsafe_code)] // as above
    pub unsafe fn register_foreign(
        &self,
        pd: u32,
        region: &ForeignRegion,
        addr: u64,
        len_bytes: u64,
        access: Access,
    ) -> Result<u32> {
        self.command_register()?;
        let space = Space::of_foreign(region);
        let key = self.lock().parts.keys.register_foreign(
            pd,
            SpaceAddress { space, addr },
            len_bytes,
            access,
        );
        key.ok_or_else(table_is_full)
    }

    /// A number for the datagram segments of this device's UD queue pairs, in the place of the LID: datagrams with it go to that port. Each call
    /// takes one call of [`Device::close_datagram_path`]. For a device without a fabric; nodes of a fabric have LIDs.
    ///
    /// # Errors
    /// [`Error::State`] if the other device cannot be reached, or if there is no number left.
    pub fn open_datagram_path(&self, port: &PortId) -> Result<u16> {
        self.lock().open_datagram_path(&port.0)
    }

    /// Gives the number back. Datagrams that still have it are lost.
    pub fn close_datagram_path(&self, number: u16) {
        self.lock().close_datagram_path(number);
    }

    fn command_register(&self) -> Result<()> {
        let answer = self.commands.pass(CommandKind::Register);
        answer.map(drop).map_err(|errno| Error::System {
            operation: "reg_mr",
            errno,
        })
    }

    /// Deregisters memory. The device no longer accesses it when this returns. Returns `false` if there is no such key.
    pub fn deregister(&self, key: u32) -> bool {
        // It goes whatever the answer is: so does the memory.
        let _ = self.commands.pass(CommandKind::Deregister);
        self.lock().parts.keys.deregister(key)
    }
}
