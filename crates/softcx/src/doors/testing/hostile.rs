//! A client driven by a fuzzer's bytes: well-formed and broken calls, writes into its queues, and doorbells.
#![allow(unsafe_code, missing_docs)] // a child process, memory shared with it, and pages of the device file

use std::os::fd::{AsRawFd, OwnedFd};

use crate::device::Device;
use crate::device::client::Errno;
use crate::device::space::Space;
use crate::doors::abi::*;
use crate::doors::context::{Descriptors, DeviceContext};

const ARENA: usize = 1 << 20;
/// Parts of the arena: the call with its requests and answers, doorbell records, queues, and data.
const CALL: usize = 0;
const REQUEST: usize = 4096;
const DRIVER_REQUEST: usize = 8192;
const RESPONSE: usize = 12288;
const DRIVER_RESPONSE: usize = 16384;
const RECORDS: usize = 32 << 10;
const QUEUES: usize = 64 << 10;
const QUEUE_BYTES: usize = 16 << 10;
const DATA: usize = 512 << 10;
const MOST_CALLS: usize = 64;
/// In pages of the file: the UARs that are mapped.
const FIRST_UAR: usize = 0xa00;
const UARS: usize = 4;
const PAGE: usize = 4096;

/// The process whose memory the device reads: a child that sleeps, so that a write to the wrong place harms no other process.
#[derive(Debug)]
pub struct Hostile {
    device: Device,
    child: libc::pid_t,
    arena: *mut u8,
}

/// Descriptors stay in this process; memory is the child's.
struct KeptDescriptors(std::sync::Mutex<Vec<OwnedFd>>, Space);

impl Descriptors for KeptDescriptors {
    fn space(&self) -> Space {
        self.1
    }

    fn give(&self, descriptor: OwnedFd) -> Result<i32, Errno> {
        let number = descriptor.as_raw_fd();
        self.0.lock().map_err(|_| libc::EMFILE)?.push(descriptor);
        Ok(number)
    }

    fn inode(&self, number: i32) -> Option<(u64, u64)> {
        // SAFETY: all zeros is a `stat`, and the call writes one.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let done = unsafe { libc::fstat(number, &raw mut stat) };
        (done == 0).then_some((stat.st_dev, stat.st_ino))
    }

    fn take_back(&self, number: i32) {
        if let Ok(mut kept) = self.0.lock() {
            kept.retain(|it| it.as_raw_fd() != number);
        }
    }
}

impl Hostile {
    /// Forks: before there are other threads.
    pub fn new() -> Option<Hostile> {
        // SAFETY: a new mapping, wherever there is room.
        let arena = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                ARENA,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if arena == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the child calls nothing but what may be called after a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
        }
        Some(Hostile {
            device: Device::open().ok()?,
            child,
            arena: arena.cast(),
        })
    }

    /// Opens a context, does what the bytes say, and closes it.
    pub fn live(&self, bytes: &[u8]) {
        let Ok((context, file)) = DeviceContext::open(&self.device) else {
            return;
        };
        // SAFETY: pages of a file that is as long; the mapping has no other user.
        let uars = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                UARS * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                (FIRST_UAR * PAGE) as libc::off_t,
            )
        };
        if uars == libc::MAP_FAILED {
            return;
        }
        let mut life = HostileClient {
            arena: self.arena,
            uars: uars.cast(),
            context: &context,
            kept: KeptDescriptors(std::sync::Mutex::default(), Space::of(self.child)),
            bytes,
            pds: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            qps: Vec::new(),
            keys: Vec::new(),
        };
        life.run();
        drop(life);
        drop(context);
        // SAFETY: mapped above, and its user is gone. The arena is for the next life to find empty.
        unsafe {
            libc::munmap(uars, UARS * PAGE);
            self.arena.write_bytes(0, ARENA);
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        // SAFETY: our child, and our mapping.
        unsafe {
            libc::kill(self.child, libc::SIGKILL);
            libc::waitpid(self.child, std::ptr::null_mut(), 0);
            libc::munmap(self.arena.cast(), ARENA);
        }
    }
}

struct HostileClient<'a> {
    arena: *mut u8,
    uars: *mut u8,
    context: &'a DeviceContext,
    kept: KeptDescriptors,
    bytes: &'a [u8],
    // Handles that calls gave back; queue pairs with their numbers.
    pds: Vec<u32>,
    cqs: Vec<u32>,
    srqs: Vec<u32>,
    qps: Vec<(u32, u32)>,
    keys: Vec<u32>,
}

impl HostileClient<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.bytes.split_first().unwrap_or((&0, &[]));
        self.bytes = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        (0..most).map(|_| self.byte()).collect()
    }

    fn address(&self, offset: usize) -> u64 {
        self.arena.expose_provenance() as u64 + offset as u64
    }

    /// Bytes into the arena, as far as it reaches.
    fn put(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in (offset..ARENA).zip(bytes) {
            // SAFETY: within the arena.
            unsafe { self.arena.add(at).write_volatile(*byte) };
        }
    }

    fn get(&self, offset: usize, len_bytes: usize) -> Vec<u8> {
        // SAFETY: within the arena.
        (offset..(offset + len_bytes).min(ARENA))
            .map(|at| unsafe { self.arena.add(at).read_volatile() })
            .collect()
    }

    fn run(&mut self) {
        // A context that is open, with a UAR page and a domain, unless the bytes want it otherwise.
        if self.byte() != 0xff {
            self.command(0, &[0; 8], 8, &context_request(), 64, false);
            self.new_uar(false);
            self.new_pd(false);
        }
        for _ in 0..MOST_CALLS {
            if self.bytes.is_empty() {
                return;
            }
            let what = self.byte();
            let broken = what & 0x80 != 0;
            match what & 0x0f {
                0 => self.raw(),
                1 => self.new_pd(broken),
                2 => self.new_uar(broken),
                3 => self.new_cq(broken),
                4 => self.new_qp(broken),
                5 | 6 => self.connect(broken),
                7 => self.new_mr(broken),
                8 => self.new_srq(broken),
                9 => self.any_command(),
                10 => self.scribble(),
                11 => self.ring_uar(),
                12 => self.receive(broken),
                _ => self.post(broken),
            }
        }
    }

    /// A call all of whose bytes are the fuzzer's.
    fn raw(&mut self) {
        let count = usize::from(self.byte() % 5);
        let mut bytes = self.take(24 + 16 * count);
        // Without that, all are the same to it.
        let length = bytes.len() as u16;
        for (to, from) in bytes.iter_mut().zip(length.to_le_bytes()) {
            *to = from;
        }
        self.put(CALL, &bytes);
        let _ = self.context.ioctl(self.address(CALL), &self.kept);
    }

    /// Some bytes changed.
    fn damaged(&mut self, bytes: &mut [u8]) {
        for _ in 0..=self.byte() % 4 {
            let at = usize::from(self.u16());
            let value = self.byte();
            if let Some(byte) = at.checked_rem(bytes.len()).and_then(|at| bytes.get_mut(at)) {
                *byte ^= value;
            }
        }
    }

    /// A call by attributes, each a number, a length and its data.
    fn call(&mut self, object: u16, method: u16, list: &[(u16, u16, u64)], broken: bool) -> bool {
        let mut bytes = IoctlHeader {
            length: (IoctlHeader::BYTES + list.len() * IoctlAttribute::BYTES) as u16,
            object_id: object,
            method_id: method,
            num_attrs: list.len() as u16,
            driver_id: 3,
            ..IoctlHeader::default()
        }
        .to_bytes();
        for (attr_id, len, data) in list {
            bytes.extend(
                IoctlAttribute {
                    attr_id: *attr_id,
                    len: *len,
                    flags: 1,
                    attr_data: 0,
                    data: *data,
                }
                .to_bytes(),
            );
        }
        if broken && self.byte() % 4 == 0 {
            self.damaged(&mut bytes);
        }
        self.put(CALL, &bytes);
        self.context.ioctl(self.address(CALL), &self.kept).is_ok()
    }

    /// A command with its request and what the driver adds. Returns the response.
    fn command(
        &mut self,
        number: u32,
        request: &[u8],
        response: u16,
        driver: &[u8],
        driver_response: u16,
        broken: bool,
    ) -> Option<Vec<u8>> {
        let (mut request, mut driver) = (request.to_vec(), driver.to_vec());
        if broken {
            self.damaged(&mut request);
            self.damaged(&mut driver);
        }
        // Eight bytes or fewer lie in the attribute.
        let inline = |bytes: &[u8], at: u64| match bytes.len() {
            0..=8 => {
                let mut word = [0; 8];
                for (to, from) in word.iter_mut().zip(bytes) {
                    *to = *from;
                }
                u64::from_ne_bytes(word)
            }
            _ => at,
        };
        self.put(REQUEST, &request);
        self.put(DRIVER_REQUEST, &driver);
        let mut list = vec![
            (
                0,
                request.len() as u16,
                inline(&request, self.address(REQUEST)),
            ),
            (2, 8, u64::from(number)),
        ];
        if response > 0 {
            list.push((1, response, self.address(RESPONSE)));
        }
        if !driver.is_empty() {
            list.push((
                1 << 12,
                driver.len() as u16,
                inline(&driver, self.address(DRIVER_REQUEST)),
            ));
        }
        if driver_response > 0 {
            list.push((
                (1 << 12) + 1,
                driver_response,
                self.address(DRIVER_RESPONSE),
            ));
        }
        self.call(0, 0, &list, broken)
            .then(|| self.get(RESPONSE, usize::from(response)))
    }

    fn any_command(&mut self) {
        let number = u32::from(self.byte()) | u32::from(self.byte() & 1) << 31;
        let request = {
            let length = usize::from(self.byte());
            self.take(length)
        };
        let driver = {
            let length = usize::from(self.byte() % 80);
            self.take(length)
        };
        self.command(number, &request, 256, &driver, 64, false);
    }

    fn new_uar(&mut self, broken: bool) {
        let list = [
            (0x1000, 0, 0),
            (0x1001, 8, 0),
            (0x1002, 8, self.address(RESPONSE)),
            (0x1003, 4, self.address(RESPONSE + 8)),
            (0x1004, 4, self.address(RESPONSE + 16)),
        ];
        self.call(0x1008, 0x1000, &list, broken);
    }

    fn new_pd(&mut self, broken: bool) {
        if let Some(response) = self.command(3, &[0; 8], 4, &[], 4, broken) {
            self.pds.push(AllocPdResp::read(&response).pd_handle);
        }
    }

    fn pd(&self) -> u32 {
        self.pds.last().copied().unwrap_or(1)
    }

    /// Where the next queue of a kind lies, and its record.
    fn queue(&self, made: usize, kind: usize) -> (u64, u64) {
        let at = made % 4 + 4 * kind;
        (
            self.address(QUEUES + at * QUEUE_BYTES),
            self.address(RECORDS + at * 64),
        )
    }

    fn new_cq(&mut self, broken: bool) {
        let request = CreateCq {
            cqe: 63,
            comp_channel: -1,
            ..CreateCq::default()
        };
        let (buf_addr, db_addr) = self.queue(self.cqs.len(), 0);
        let driver = Mlx5CreateCq {
            buf_addr,
            db_addr,
            cqe_size: 64,
            flags: 2,
            uar_page_index: FIRST_UAR as u16,
            ..Mlx5CreateCq::default()
        };
        self.put((buf_addr - self.address(0)) as usize, &[0xf1; 64 * 64]);
        if let Some(response) =
            self.command(18, &request.to_bytes(), 8, &driver.to_bytes(), 8, broken)
        {
            self.cqs.push(CreateCqResp::read(&response).cq_handle);
        }
    }

    fn new_srq(&mut self, broken: bool) {
        let request = CreateSrq {
            pd_handle: self.pd(),
            max_wr: 15,
            max_sge: 1,
            ..CreateSrq::default()
        };
        let (buf_addr, db_addr) = self.queue(self.srqs.len(), 1);
        let driver = Mlx5CreateSrq {
            buf_addr,
            db_addr,
            uidx: 0x00ff_ffff,
            ..Mlx5CreateSrq::default()
        };
        if let Some(response) =
            self.command(32, &request.to_bytes(), 16, &driver.to_bytes(), 8, broken)
        {
            self.srqs.push(CreateSrqResp::read(&response).srq_handle);
        }
    }

    fn new_qp(&mut self, broken: bool) {
        let kind = self.byte();
        let cq = self.cqs.last().copied().unwrap_or(1);
        let request = CreateQp {
            pd_handle: self.pd(),
            send_cq_handle: cq,
            recv_cq_handle: cq,
            srq_handle: self.srqs.last().copied().unwrap_or(0),
            is_srq: u8::from(kind & 0x80 != 0),
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 1,
            qp_type: 2 + kind % 3,
            ..CreateQp::default()
        };
        let (buf_addr, db_addr) = self.queue(self.qps.len(), 2);
        let driver = Mlx5CreateQp {
            buf_addr,
            db_addr,
            sq_wqe_count: 64,
            rq_wqe_count: if request.is_srq == 0 { 16 } else { 0 },
            rq_wqe_shift: 4,
            flags: 1 << 10,
            bfreg_index: FIRST_UAR as u32,
            uidx: 0x00ff_ffff,
            ..Mlx5CreateQp::default()
        };
        if let Some(response) =
            self.command(24, &request.to_bytes(), 32, &driver.to_bytes(), 40, broken)
        {
            let response = CreateQpResp::read(&response);
            self.qps.push((response.qp_handle, response.qpn));
        }
    }

    fn new_mr(&mut self, broken: bool) {
        let request = RegMr {
            start: self.address(DATA),
            length: (ARENA - DATA) as u64,
            hca_va: self.address(DATA),
            pd_handle: self.pd(),
            access_flags: 0xf,
            ..RegMr::default()
        };
        if let Some(response) = self.command(9, &request.to_bytes(), 12, &[], 0, broken) {
            self.keys.push(RegMrResp::read(&response).lkey);
        }
    }

    /// All the way to ready to send, or as far as it goes, to the queue pair before it or itself.
    fn connect(&mut self, broken: bool) {
        let Some((handle, qpn)) = self.qps.last().copied() else {
            return;
        };
        let other = self.byte();
        let peer = self.qps.get(usize::from(other) % self.qps.len().max(1));
        let peer = peer.map_or(qpn, |peer| peer.1);
        // INIT, RTR and RTS with the attributes of a reliable connection.
        for (state, mask) in [(1, 0x39), (2, 0x0012_9181), (3, 0x0001_2e01)] {
            let request = ModifyQp {
                dest: QpDest {
                    dlid: 1,
                    port_num: 1,
                    ..QpDest::default()
                },
                qp_handle: handle,
                attr_mask: mask,
                dest_qp_num: peer,
                qp_access_flags: 0xf,
                qp_state: state,
                path_mtu: 3,
                max_rd_atomic: 4,
                max_dest_rd_atomic: 4,
                min_rnr_timer: 1,
                port_num: 1,
                timeout: 8,
                retry_cnt: 1,
                rnr_retry: 1,
                ..ModifyQp::default()
            };
            let damage = broken && self.byte() % 2 == 0;
            self.command(26, &request.to_bytes(), 0, &[], 0, damage);
        }
    }

    /// Where the queues of a queue pair and its record are in the arena.
    fn place(&mut self) -> (usize, usize, u32) {
        let number = usize::from(self.byte()) % self.qps.len().max(1);
        let qpn = self.qps.get(number).map_or(0, |it| it.1);
        let at = number % 4 + 8;
        (QUEUES + at * QUEUE_BYTES, RECORDS + at * 64, qpn)
    }

    fn receive(&mut self, broken: bool) {
        let (queue, record, _) = self.place();
        let mut segment = Vec::new();
        segment.extend(4096u32.to_be_bytes());
        segment.extend(self.keys.last().copied().unwrap_or(0).to_be_bytes());
        segment.extend(self.address(DATA + 8192).to_be_bytes());
        if broken {
            self.damaged(&mut segment);
        }
        for slot in 0..16 {
            self.put(queue + 16 * slot, &segment);
        }
        let count = u32::from(self.u16());
        self.put(record, &count.to_be_bytes());
    }

    /// A request, whole or broken, into the ring at any place, the record, and the doorbell.
    fn post(&mut self, broken: bool) {
        let (queue, record, qpn) = self.place();
        let opcode = self.byte();
        let index = u32::from(self.byte());
        let opcode = match opcode % 12 {
            it @ 8..=11 => it,
            0 => 0x10,
            1 => 0x11,
            2 => 0x12,
            3 => 0x25,
            4 => 0x1b,
            _ => opcode,
        };
        let key = self.keys.last().copied().unwrap_or(0);
        let mut wqe = Vec::new();
        wqe.extend((index << 8 | u32::from(opcode)).to_be_bytes());
        let segments = if matches!(opcode, 0x0a | 0x0b) { 2 } else { 4 };
        wqe.extend((qpn << 8 | segments).to_be_bytes());
        wqe.extend([0, 0, 0, 8, 0, 0, 0, 7]);
        if segments == 4 {
            wqe.extend(self.address(DATA).to_be_bytes());
            wqe.extend(key.to_be_bytes());
            wqe.extend([0; 4]);
        }
        if matches!(opcode, 0x11 | 0x12) {
            wqe.extend(self.take(16));
        }
        wqe.extend(u32::from(self.u16() % 8192).to_be_bytes());
        wqe.extend(key.to_be_bytes());
        wqe.extend(self.address(DATA + 4096).to_be_bytes());
        wqe.resize(64, 0);
        if broken {
            self.damaged(&mut wqe);
        }
        let ring = queue + 16 * 16;
        self.put(ring + (index as usize % 64) * 64, &wqe);
        self.put(record + 4, &((index + 1) & 0xffff).to_be_bytes());
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(&wqe) {
            *to = *from;
        }
        self.ring(0x800, word);
    }

    fn ring_uar(&mut self) {
        let at = usize::from(self.u16()) % (UARS * PAGE / 8) * 8;
        let word = self.take(8);
        self.ring(at, word.try_into().unwrap_or([0; 8]));
    }

    fn ring(&self, at: usize, word: [u8; 8]) {
        // SAFETY: within the mapped pages, aligned to eight.
        unsafe {
            self.uars
                .add(at)
                .cast::<u64>()
                .write_volatile(u64::from_ne_bytes(word));
        }
        // The engine's turn.
        std::thread::sleep(std::time::Duration::from_micros(50));
    }

    fn scribble(&mut self) {
        let at = RECORDS + usize::from(self.u16()) * 4;
        let length = usize::from(self.byte());
        let bytes = self.take(length);
        self.put(at, &bytes);
    }
}

fn context_request() -> Vec<u8> {
    Mlx5AllocContext {
        total_num_bfregs: 16,
        num_low_latency_bfregs: 4,
        max_cqe_version: 1,
        lib_caps: 2,
        ..Mlx5AllocContext::default()
    }
    .to_bytes()
}
