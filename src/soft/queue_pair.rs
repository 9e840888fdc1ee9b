//! A queue pair with its memory, as a provider library would hold it: rings, doorbell records, completion queues, UAR page.
#![allow(unsafe_code)] // hands raw ring memory to the device

use std::sync::{Arc, Mutex};

use crate::soft::client::Transport;
use crate::soft::cq::Cq;
use crate::soft::device::{Device, PortId};
use crate::soft::dma::{PAGE_BYTES, Pages, RecordWord, Register, Ring};
use crate::soft::inbox::random;
use crate::soft::qp::{Attributes, Parts, Status};
use crate::{Error, Result};

/// Offsets of the two doorbell registers of a UAR page, each the start of a 256-byte BlueFlame buffer (mlx5 PRM; the
/// offsets are `MLX5_BF_OFFSET` and the alternate buffer in rdma-core's provider).
const UAR_REGISTERS: [usize; 2] = [0x800, 0x900];

/// Sizes of a queue pair; all counts are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// Protection domain.
    pub pd: u32,
    /// 64-byte blocks of the send ring, 1 to 32768.
    pub send_wqebbs: u32,
    /// Receives, 1 to 32768.
    pub recv_wqes: u32,
    /// Bytes of a receive WQE, 16 to 1024.
    pub recv_stride_bytes: u32,
    /// Entries of the send completion queue, 1 to 65536.
    pub send_cqes: u32,
    /// Entries of the receive completion queue, 1 to 65536.
    pub recv_cqes: u32,
}

impl QueuePairConfig {
    fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min, max| {
            if u64::from(value) < min || u64::from(value) > max {
                return Err(Error::Range {
                    argument,
                    value: value.into(),
                    min,
                    max,
                });
            }
            if !value.is_power_of_two() {
                return Err(Error::Alignment {
                    argument,
                    value: value.into(),
                    align: u64::from(value.next_power_of_two()),
                });
            }
            Ok(())
        };
        range("send_wqebbs", self.send_wqebbs, 1, 32768)?;
        range("recv_wqes", self.recv_wqes, 1, 32768)?;
        range("recv_stride_bytes", self.recv_stride_bytes, 16, 1024)?;
        range("send_cqes", self.send_cqes, 1, 65536)?;
        range("recv_cqes", self.recv_cqes, 1, 65536)
    }
}

/// Where the parts of a queue pair lie; valid while the [`QueuePair`] lives.
#[derive(Debug, Clone, Copy)]
pub struct QueuePairMemory {
    /// Send ring.
    pub send_ring: *mut u8,
    /// Receive ring.
    pub recv_ring: *mut u8,
    /// Doorbell record: `[0]` receive, `[1]` send.
    pub record: *mut u32,
    /// The UAR's two BlueFlame buffers of 256 bytes; the first 8 bytes of each are the doorbell register.
    pub uar: [*mut u8; 2],
    /// Ring of the send completion queue.
    pub send_cq: *mut u8,
    /// Ring of the receive completion queue.
    pub recv_cq: *mut u8,
    /// Consumer record of the send completion queue.
    pub send_cq_record: *mut u32,
    /// Consumer record of the receive completion queue.
    pub recv_cq_record: *mut u32,
    /// One word an entry, for the driver's own use.
    pub send_marks: *mut u32,
    /// One word an entry, for the driver's own use.
    pub recv_marks: *mut u32,
}

// SAFETY: addresses only; who uses them where is for the unsafe code that does.
unsafe impl Send for QueuePairMemory {}
// SAFETY: as above.
unsafe impl Sync for QueuePairMemory {}

impl QueuePairMemory {
    /// Fresh memory for the parts of a queue pair of these sizes, which is in the pages.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Alignment`] naming the size; [`Error::System`] if there is not so much.
    pub(crate) fn new(config: &QueuePairConfig) -> Result<(Pages, QueuePairMemory)> {
        config.check()?;
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(64);
            start
        };
        // As in mlx5: the receive ring first, the send ring behind it.
        let recv_ring = place((config.recv_wqes * config.recv_stride_bytes) as usize);
        let send_ring = place(config.send_wqebbs as usize * 64);
        let send_cq = place(config.send_cqes as usize * 64);
        let recv_cq = place(config.recv_cqes as usize * 64);
        let send_marks = place(config.send_cqes as usize * 4);
        let recv_marks = place(config.recv_cqes as usize * 4);
        // Each record on a cache line of its own: the device reads them while the driver writes its neighbours.
        let record = place(8);
        let send_cq_record = place(8);
        let recv_cq_record = place(8);
        let uar = end.next_multiple_of(PAGE_BYTES);
        let pages = Pages::new(uar + PAGE_BYTES)?;
        let memory = QueuePairMemory {
            send_ring: pages.at(send_ring),
            recv_ring: pages.at(recv_ring),
            record: pages.at(record).cast(),
            uar: UAR_REGISTERS.map(|register| pages.at(uar + register)),
            send_cq: pages.at(send_cq),
            recv_cq: pages.at(recv_cq),
            send_cq_record: pages.at(send_cq_record).cast(),
            recv_cq_record: pages.at(recv_cq_record).cast(),
            send_marks: pages.at(send_marks).cast(),
            recv_marks: pages.at(recv_marks).cast(),
        };
        Ok((pages, memory))
    }
}

/// What one end of a connection must know of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteQueuePair {
    /// The device.
    pub port: PortId,
    /// Queue pair number.
    pub qpn: u32,
    /// The PSN that it starts with, 24 bits.
    pub psn: u32,
    /// The number of this connection: it changes with every reset, so that packets of an earlier one are not taken.
    pub connection: u32,
}

/// A reliable-connected queue pair with two completion queues of its own. Dropping it destroys it in the device first.
#[derive(Debug)]
pub struct QueuePair {
    device: Device,
    memory: QueuePairMemory,
    pages: Pages,
    status: Arc<Status>,
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
    /// Makes a queue pair in the RESET state.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Alignment`] naming the size; [`Error::State`] if the device is full.
    pub fn new(device: &Device, config: &QueuePairConfig) -> Result<QueuePair> {
        let (pages, memory) = QueuePairMemory::new(config)?;
        let start = starting_numbers()?;
        let mut core = device.lock();
        let (slot, qpn) = core.reserve_qp()?;
        // SAFETY: all of it lies in `pages`, aligned by `place` and long enough; `drop` destroys the device's objects, under
        // its lock, before `pages` is freed.
        let (parts, send_cq_parts, recv_cq_parts) = unsafe {
            let parts = Parts {
                qpn,
                transport: Transport::Rc,
                pd: config.pd,
                user_index: 0,
                srq: None,
                events: None,
                send_cq: 0,
                recv_cq: 0,
                send_ring: Ring::new(memory.send_ring, config.send_wqebbs as usize * 64),
                send_record: RecordWord::new(memory.record.add(1)),
                recv_ring: Ring::new(
                    memory.recv_ring,
                    (config.recv_wqes * config.recv_stride_bytes) as usize,
                ),
                recv_wqes: config.recv_wqes,
                recv_stride_bytes: config.recv_stride_bytes,
                recv_record: RecordWord::new(memory.record),
                uar: Some(memory.uar.map(|register| Register::new(register.cast()))),
                page: 0,
                blocks_loopback: false,
            };
            let send_ring = Ring::new(memory.send_cq, config.send_cqes as usize * 64);
            let recv_ring = Ring::new(memory.recv_cq, config.recv_cqes as usize * 64);
            (
                parts,
                Cq::new(
                    send_ring,
                    config.send_cqes,
                    RecordWord::new(memory.send_cq_record),
                ),
                Cq::new(
                    recv_ring,
                    config.recv_cqes,
                    RecordWord::new(memory.recv_cq_record),
                ),
            )
        };
        let cqs = [core.create_cq(send_cq_parts), core.create_cq(recv_cq_parts)];
        let qp = core.create_qp(
            slot,
            Parts {
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

    /// Where its parts lie.
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
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Tells the device that a register of this queue pair was stored to; see [`Device::rung`]. Where many queue pairs share
    /// a device, this finds an idle one's doorbell at once, and the device need not go round to look for it.
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

    /// What the other end needs to connect to this one, until the next reset.
    pub fn local(&self) -> RemoteQueuePair {
        let (psn, connection) = self.start();
        RemoteQueuePair {
            port: self.device.port(),
            qpn: self.qpn,
            psn,
            connection,
        }
    }

    /// RESET to INIT: receives may be posted from now on.
    ///
    /// # Errors
    /// [`Error::Range`] naming an attribute; [`Error::State`] if the state does not lead to INIT.
    pub fn init(&self, attributes: Attributes) -> Result<()> {
        self.device.lock().init_qp(self.slot, attributes)
    }

    /// INIT to RTR and RTS.
    ///
    /// # Errors
    /// [`Error::State`] if the state does not lead there, or if the other device cannot be reached; the queue pair is then
    /// where it was.
    pub fn connect(&self, remote: &RemoteQueuePair) -> Result<()> {
        let mut core = self.device.lock();
        let theirs = (remote.psn & 0xff_ffff, remote.connection);
        core.ready_to_receive(
            self.slot,
            &remote.port.0,
            remote.qpn & 0xff_ffff,
            self.start(),
            theirs,
        )?;
        core.ready_to_send(self.slot)
    }

    /// INIT to RTR and RTS, by the address of a node of the fabric.
    #[cfg(test)]
    pub(crate) fn connect_by_path(
        &self,
        path: &crate::soft::client::AddressVector,
        qpn: u32,
        psns: (u32, u32),
    ) {
        let mut core = self.device.lock();
        core.aim_qp(self.slot, path, qpn);
        core.start_qp(self.slot, psns);
    }

    /// Any state to ERR. When this returns, everything posted is flushed, and the device writes to the completion queues
    /// only to flush what is posted later.
    pub fn fail(&self) {
        let now_ns = self.device.now_ns();
        self.device.lock().fail_qp(self.slot, now_ns);
    }

    /// Any state to RESET. The driver makes rings, records and completion queues fresh before it goes on.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel has no random numbers for the next connection.
    pub fn reset(&self) -> Result<()> {
        let start = starting_numbers()?;
        self.device.lock().reset_qp(self.slot);
        *self
            .start
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = start;
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let mut core = self.device.lock();
        core.destroy_qp(self.slot);
        for cq in self.cqs {
            core.destroy_cq(cq);
        }
    }
}
