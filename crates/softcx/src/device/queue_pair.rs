//! A queue pair with its memory, as a provider library would hold it: rings, doorbell records, completion queues, UAR page.
#![allow(unsafe_code)] // hands raw ring memory to the device

use std::sync::{Arc, Mutex};

use crate::device::client::Transport;
use crate::device::commands::{Answer, CommandKind};
use crate::device::cq::Cq;
use crate::device::dma::{DmaRing, RecordWord, UarRegister};
use crate::device::handle::Device;
use crate::device::inbox::random;
use crate::device::port_id::PortId;
use crate::device::qp::{Attributes, QpSetup, QpStatus};
use crate::{Error, Result};
use doorbell_wire::memory::{Pages, QueuePairMemory, QueuePairSizes};

/// What one end of a connection must know of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteQueuePair {
    /// The device.
    pub port: PortId,
    /// Queue pair number.
    pub qpn: u32,
    /// The PSN that it starts with, 24 bits.
    pub psn: u32,
    /// The number of this connection. It changes with every reset, so that packets of an earlier connection are dropped.
    pub connection: u32,
    /// The most reads and atomics that it serves at a time.
    pub reads: u8,
}

/// The most reads and atomics that a queue pair serves at a time.
pub(crate) const MAX_READS: u8 = 16;

/// A queue pair, RC or UD, with two completion queues of its own. Dropping it destroys it in the device first.
#[derive(Debug)]
pub struct QueuePair {
    device: Device,
    memory: QueuePairMemory,
    pages: Pages,
    status: Arc<QpStatus>,
    slot: usize,
    qpn: u32,
    cqs: [usize; 2],
    start: Mutex<(u32, u32)>,
}

fn starting_numbers() -> Result<(u32, u32)> {
    let bits = random()?;
    Ok((bits as u32 & 0xff_ffff, (bits >> 32) as u32))
}

impl QueuePair {
    /// Makes a queue pair in the RESET state, in a protection domain.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) or [`Error::Alignment`](crate::Error::Alignment) naming the size; [`Error::State`](crate::Error::State) if the device is full.
    pub fn new(device: &Device, pd: u32, sizes: &QueuePairSizes) -> Result<QueuePair> {
        QueuePair::of(Transport::Rc, device, pd, sizes)
    }

    /// Makes a UD queue pair, as [`QueuePair::new`]. It has no peer: [`QueuePair::activate`] takes the place of [`QueuePair::connect`].
    ///
    /// # Errors
    /// As [`QueuePair::new`].
    pub fn datagram(device: &Device, pd: u32, sizes: &QueuePairSizes) -> Result<QueuePair> {
        QueuePair::of(Transport::Ud, device, pd, sizes)
    }

    fn of(
        transport: Transport,
        device: &Device,
        pd: u32,
        sizes: &QueuePairSizes,
    ) -> Result<QueuePair> {
        let (pages, memory) = QueuePairMemory::new(sizes)?;
        let start = starting_numbers()?;
        command(device, "create_qp", CommandKind::Create)?;
        let mut core = device.lock();
        let (slot, qpn) = core.reserve_qp()?;
        // SAFETY: all of it lies in `pages`, aligned by `place` and long enough; `drop` destroys the device's objects, under
        // its lock, before `pages` is freed.
        let (parts, send_cq_parts, recv_cq_parts) = unsafe {
            let parts = QpSetup {
                qpn,
                transport,
                pd,
                user_index: 0,
                srq: None,
                events: None,
                send_cq: 0,
                recv_cq: 0,
                send_ring: DmaRing::new(memory.send_ring, sizes.send_wqebbs as usize * 64),
                send_record: RecordWord::new(memory.record.add(1)),
                recv_ring: DmaRing::new(
                    memory.recv_ring,
                    (sizes.recv_wqes * sizes.recv_stride_bytes) as usize,
                ),
                recv_wqes: sizes.recv_wqes,
                recv_stride_bytes: sizes.recv_stride_bytes,
                recv_record: RecordWord::new(memory.record),
                uar: Some(memory.uar.map(|register| UarRegister::new(register.cast()))),
                page: 0,
                blocks_loopback: false,
            };
            let cq = |side: usize| {
                let count = sizes.cqes[side];
                Cq::new(
                    DmaRing::new(memory.cqs[side], count as usize * 64),
                    count,
                    RecordWord::new(memory.cq_records[side]),
                )
            };
            (parts, cq(0), cq(1))
        };
        let cqs = [core.create_cq(send_cq_parts), core.create_cq(recv_cq_parts)];
        let qp = core.create_qp(
            slot,
            QpSetup {
                send_cq: cqs[0],
                recv_cq: cqs[1],
                ..parts
            },
        );
        let status = Arc::clone(&qp.status);
        drop(core);
        Ok(QueuePair {
            device: device.clone(),
            memory,
            pages,
            status,
            slot,
            qpn,
            cqs,
            start: Mutex::new(start),
        })
    }

    /// The addresses of its rings, records and registers.
    pub fn memory(&self) -> &QueuePairMemory {
        &self.memory
    }

    /// Bytes of memory that it takes, without the device's own bookkeeping.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len_bytes()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Its state, without the device's lock.
    pub fn status(&self) -> &QpStatus {
        &self.status
    }

    /// Reports to the device that a register of this queue pair was stored to; see [`Device::rung`]. The device then reads the registers of this queue
    /// pair at once, and need not search the idle queue pairs.
    #[inline]
    pub fn rung(&self) {
        self.device.rung_at(self.slot, &self.status);
    }

    fn start(&self) -> (u32, u32) {
        *self
            .start
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Sets the starting PSN of the next connection.
    #[cfg(test)]
    pub(crate) fn start_at(&self, psn: u32) {
        self.start.lock().unwrap().0 = psn;
    }

    /// The values that the peer needs to connect to this queue pair. They are valid until the next reset.
    pub fn local(&self) -> RemoteQueuePair {
        let (psn, connection) = self.start();
        RemoteQueuePair {
            port: self.device.port(),
            qpn: self.qpn,
            psn,
            connection,
            reads: MAX_READS,
        }
    }

    /// RESET to INIT: receives may be posted from now on. An MTU that the network interface does not take is lowered.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) naming an attribute; [`Error::State`](crate::Error::State) if the state does not lead to INIT.
    pub fn init(&self, attributes: Attributes) -> Result<()> {
        self.command("modify_qp", CommandKind::Modify)?;
        let mut core = self.device.lock();
        let mtu_bytes = attributes.mtu_bytes.min(core.mtu_bytes());
        core.init_qp(
            self.slot,
            Attributes {
                mtu_bytes,
                ..attributes
            },
        )
    }

    /// INIT to RTR and RTS.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if the state does not lead there, or if the other device cannot be reached; the queue pair then
    /// keeps its state.
    pub fn connect(&self, remote: &RemoteQueuePair) -> Result<()> {
        // One for each step.
        self.command("modify_qp", CommandKind::Modify)?;
        self.command("modify_qp", CommandKind::Modify)?;
        let mut core = self.device.lock();
        core.ready_to_receive(self.slot, remote, self.start())?;
        core.ready_to_send(self.slot)
    }

    /// INIT to RTR and RTS of a UD queue pair.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if the state does not lead there.
    pub fn activate(&self) -> Result<()> {
        self.command("modify_qp", CommandKind::Modify)?;
        self.command("modify_qp", CommandKind::Modify)?;
        let mut core = self.device.lock();
        core.activate_datagrams(self.slot, self.start().0)?;
        core.ready_to_send(self.slot)
    }

    /// INIT to RTR and RTS, by the address of a node of the fabric.
    #[cfg(test)]
    pub(crate) fn connect_by_path(
        &self,
        path: &crate::device::client::AddressVector,
        qpn: u32,
        psns: (u32, u32),
    ) {
        let mut core = self.device.lock();
        core.set_destination(self.slot, path, qpn);
        core.start_qp(self.slot, psns);
    }

    fn command(&self, operation: &'static str, kind: CommandKind) -> Result<Answer> {
        command(&self.device, operation, kind)
    }

    /// Any state to ERR. When this returns, all posted requests are flushed, unless a fault delays the flush. The device then writes to the
    /// completion queues only to flush requests that are posted later.
    ///
    /// # Errors
    /// [`Error::System`] if a fault makes the command fail. The queue pair keeps its state.
    pub fn fail(&self) -> Result<()> {
        if self.command("modify_qp to ERR", CommandKind::Error)? == Answer::Executed {
            let now_ns = self.device.now_ns();
            self.device.lock().fail_qp(self.slot, now_ns);
        }
        Ok(())
    }

    /// Any state to RESET, where the device executes nothing and writes to no completion queue. Rings and records stay as they are, until
    /// [`QueuePair::reset`]. If the device has reported that it failed ([`QpStatus::device_failed`]), the command does not reach it.
    ///
    /// # Errors
    /// As [`QueuePair::fail`].
    pub fn quiesce(&self) -> Result<()> {
        if self.command("modify_qp to RESET", CommandKind::Reset)? == Answer::Executed {
            self.device.lock().reset_qp(self.slot);
        }
        Ok(())
    }

    /// Any state to RESET. The caller must reinitialize rings, records and completion queues before it continues.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the kernel has no random numbers for the next connection, or as [`QueuePair::fail`].
    pub fn reset(&self) -> Result<()> {
        let start = starting_numbers()?;
        self.quiesce()?;
        *self
            .start
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = start;
        Ok(())
    }
}

/// Issues a command: takes its time, outside of the device's lock.
fn command(device: &Device, operation: &'static str, kind: CommandKind) -> Result<Answer> {
    let answer = device.commands().pass(kind);
    answer.map_err(|errno| Error::System { operation, errno })
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // It is destroyed whatever the answer is: its memory goes with it.
        let _ = self.command("destroy_qp", CommandKind::Destroy);
        let mut core = self.device.lock();
        core.destroy_qp(self.slot);
        for cq in self.cqs {
            core.destroy_cq(cq);
        }
    }
}
