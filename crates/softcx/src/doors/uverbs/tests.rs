//! Calls as a process makes them, byte for byte: what they answer, what they leave behind, and that no bytes do harm.
//!
//! The process is a fork that sleeps; calls are laid out in memory that it shares with the test. So what a call with a wrong pointer
//! overwrites is never the test's own.
#![allow(unsafe_code)] // forks, and shares memory

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;

use proptest::prelude::*;

use super::*;
use crate::device::capability::Capability;
use crate::device::client::mask;
use crate::device::space::Space;
use crate::device::{Device, DeviceOptions, Faults, Function, LinkLayer};
use crate::doors::abi::*;
use crate::doors::event_pipe::inode;

const ARENA_BYTES: usize = 1 << 20;
/// Where in the arena calls, requests and answers lie, and from where on there is room for rings.
const REQUEST: usize = 0x1000;
const DRIVER_REQUEST: usize = 0x2000;
const RESPONSE: usize = 0x3000;
const DRIVER_RESPONSE: usize = 0x4000;
const RINGS: usize = 0x10000;
/// An address that is not mapped.
const NOWHERE: u64 = 0x10;

struct Process {
    pid: libc::pid_t,
    arena: *mut u8,
    given: RefCell<HashMap<i32, OwnedFd>>,
    taken_back: Cell<u32>,
}

impl Process {
    fn new() -> Process {
        Process::with_capabilities(true)
    }

    /// A process that keeps the capabilities of the test, or one without any.
    fn with_capabilities(keeps: bool) -> Process {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let arena =
            unsafe { libc::mmap(std::ptr::null_mut(), ARENA_BYTES, protection, flags, -1, 0) };
        assert_ne!(arena, libc::MAP_FAILED);
        let mut ready = [0; 2];
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::pipe(ready.as_mut_ptr()) }, 0);
        // SAFETY: the child makes a few system calls and nothing else.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            if !keeps {
                // A header with version 3 and this process, and empty sets.
                let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
                // SAFETY: both are as long as version 3 has it.
                unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
            }
            // SAFETY: one byte of a constant.
            unsafe { libc::write(ready[1], c"".as_ptr().cast(), 1) };
            loop {
                // SAFETY: no memory is involved.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::pause();
                }
            }
        }
        assert!(pid > 0);
        // SAFETY: one byte of room; both descriptors are this function's.
        unsafe {
            let mut byte = 0_u8;
            assert_eq!(libc::read(ready[0], (&raw mut byte).cast(), 1), 1);
            libc::close(ready[0]);
            libc::close(ready[1]);
        }
        Process {
            pid,
            arena: arena.cast(),
            given: RefCell::default(),
            taken_back: Cell::new(0),
        }
    }

    fn address(&self, at: usize) -> u64 {
        self.arena as u64 + at as u64
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= ARENA_BYTES);
        // SAFETY: in the arena, which no other code writes while no call is made.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.arena.add(at), bytes.len()) };
    }

    fn read<T: Layout>(&self, at: usize) -> T {
        let mut bytes = vec![0; T::BYTES];
        // SAFETY: as above.
        unsafe {
            std::ptr::copy_nonoverlapping(self.arena.add(at), bytes.as_mut_ptr(), bytes.len());
        }
        T::read(&bytes)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SAFETY: the child of this process, and its mapping.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            libc::munmap(self.arena.cast(), ARENA_BYTES);
        }
    }
}

impl Descriptors for Process {
    fn space(&self) -> Space {
        Space::of(self.pid)
    }

    fn give(&self, descriptor: OwnedFd) -> Result<i32, Errno> {
        let mut given = self.given.borrow_mut();
        let number = (100..).find(|number| !given.contains_key(number)).unwrap();
        given.insert(number, descriptor);
        Ok(number)
    }

    fn inode(&self, number: i32) -> Option<(u64, u64)> {
        inode(self.given.borrow().get(&number)?).ok()
    }

    fn take_back(&self, number: i32) {
        self.taken_back.set(self.taken_back.get() + 1);
        self.given.borrow_mut().remove(&number);
    }
}

struct Client {
    // Before the process: its memory is in use until then.
    context: DeviceContext,
    process: Process,
}

impl Client {
    /// Before GET_CONTEXT.
    fn unopened() -> Client {
        Client::on(&Device::open().unwrap())
    }

    fn on(device: &Device) -> Client {
        let process = Process::new();
        let (context, _) = DeviceContext::open(device).unwrap();
        Client { context, process }
    }

    fn open() -> Client {
        let client = Client::unopened();
        client.get_context().unwrap();
        client
    }

    fn get_context(&self) -> Result<GetContextResp, Errno> {
        let driver = Mlx5AllocContext {
            max_cqe_version: 1,
            lib_caps: 3,
            ..Mlx5AllocContext::default()
        };
        let bytes = driver.to_bytes();
        self.command::<GetContextResp>(0, &GetContext::default().to_bytes(), &bytes)
    }

    /// Lays out a call of a command, as libibverbs does.
    fn lay_out(&self, number: u32, request: &[u8], driver: &[u8], response_bytes: usize) {
        let process = &self.process;
        process.write(REQUEST, request);
        process.write(DRIVER_REQUEST, driver);
        let room = |at: usize| process.address(at);
        let inline = |bytes: &[u8], at: usize| match bytes.len() {
            0..=8 => u64::read_inline(bytes),
            _ => room(at),
        };
        let list = [
            (2, 8, u64::from(number)),
            (0, request.len(), inline(request, REQUEST)),
            (1, response_bytes, room(RESPONSE)),
            (DRIVER, driver.len(), inline(driver, DRIVER_REQUEST)),
            (DRIVER + 1, 256, room(DRIVER_RESPONSE)),
        ];
        self.lay_out_method(0, 0, &list);
    }

    fn lay_out_method(&self, object: u16, method: u16, list: &[(u16, usize, u64)]) {
        let header = IoctlHeader {
            length: (IoctlHeader::BYTES + list.len() * IoctlAttribute::BYTES) as u16,
            object_id: object,
            method_id: method,
            num_attrs: list.len() as u16,
            driver_id: 1,
            ..IoctlHeader::default()
        };
        let mut bytes = header.to_bytes();
        for (attr_id, len, data) in list {
            let attribute = IoctlAttribute {
                attr_id: *attr_id,
                len: *len as u16,
                flags: 1,
                attr_data: 0,
                data: *data,
            };
            bytes.extend(attribute.to_bytes());
        }
        self.process.write(0, &bytes);
    }

    fn call(&self) -> Result<(), Errno> {
        let argument = self.process.address(0);
        self.context.ioctl(argument, &self.process)
    }

    fn command<T: Layout>(&self, number: u32, request: &[u8], driver: &[u8]) -> Result<T, Errno> {
        self.lay_out(number, request, driver, T::BYTES);
        self.call()?;
        Ok(self.process.read(RESPONSE))
    }

    fn alloc_pd(&self) -> Result<u32, Errno> {
        let request = AllocPd::default().to_bytes();
        Ok(self.command::<AllocPdResp>(3, &request, &[])?.pd_handle)
    }

    fn reg_mr(&self, pd_handle: u32, start: u64, length: u64, access: u32) -> Result<u32, Errno> {
        let request = RegMr {
            start,
            length,
            hca_va: start,
            pd_handle,
            access_flags: access,
            ..RegMr::default()
        };
        let made: RegMrResp = self.command(9, &request.to_bytes(), &[])?;
        Ok(made.mr_handle)
    }

    fn destroy(&self, number: u32, handle: u32) -> Result<(), Errno> {
        self.command::<DestroyQpResp>(number, &handle.to_ne_bytes(), &[])
            .map(|_| ())
    }

    fn alloc_uar(&self) -> Result<u32, Errno> {
        let out = |at: usize| self.process.address(RESPONSE + at);
        let list = [
            (DRIVER, 0, 0),
            (DRIVER + 1, 8, 0),
            (DRIVER + 2, 8, out(0)),
            (DRIVER + 3, 4, out(8)),
            (DRIVER + 4, 4, out(12)),
        ];
        self.lay_out_method(object::UAR, DRIVER, &list);
        self.call()?;
        let page = self.process.read::<DeallocPd>(RESPONSE + 12);
        Ok(page.pd_handle)
    }

    fn create_channel(&self) -> Result<i32, Errno> {
        let request = CreateCompChannel::default().to_bytes();
        let made: CreateCompChannelResp = self.command(17, &request, &[])?;
        Ok(made.fd as i32)
    }

    fn create_cq(&self, uar: u32, comp_channel: i32) -> Result<CreateCqResp, Errno> {
        let request = CreateCq {
            user_handle: 0x77,
            cqe: 63,
            comp_channel,
            ..CreateCq::default()
        };
        let driver = Mlx5CreateCq {
            buf_addr: self.process.address(RINGS),
            db_addr: self.process.address(RINGS + 0x8000),
            cqe_size: 64,
            flags: 2,
            uar_page_index: uar as u16,
            ..Mlx5CreateCq::default()
        };
        self.command(18, &request.to_bytes(), &driver.to_bytes())
    }

    fn create_qp(&self, uar: u32, pd: u32, cq: u32) -> Result<CreateQpResp, Errno> {
        const RELIABLE: u8 = 2;
        self.create_qp_of(RELIABLE, uar, pd, cq)
    }

    fn create_qp_of(&self, qp_type: u8, uar: u32, pd: u32, cq: u32) -> Result<CreateQpResp, Errno> {
        let request = CreateQp {
            user_handle: 0x99,
            pd_handle: pd,
            send_cq_handle: cq,
            recv_cq_handle: cq,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            qp_type,
            ..CreateQp::default()
        };
        let driver = Mlx5CreateQp {
            buf_addr: self.process.address(RINGS + 0x10000),
            db_addr: self.process.address(RINGS + 0x8008),
            sq_wqe_count: 16,
            rq_wqe_count: 16,
            rq_wqe_shift: 4,
            flags: 1 << 10 | 2,
            bfreg_index: uar,
            ..Mlx5CreateQp::default()
        };
        self.command(24, &request.to_bytes(), &driver.to_bytes())
    }
}

/// Bytes that lie in the attribute itself.
trait Inline {
    fn read_inline(bytes: &[u8]) -> u64;
}

/// A change of a queue pair with this path as the primary and the alternate one.
fn modify_with_paths(
    client: &Client,
    qp_handle: u32,
    (attr_mask, qp_state): (u32, u8),
    path: QpDest,
) -> Result<(), Errno> {
    let request = ModifyQp {
        qp_handle,
        attr_mask,
        qp_state,
        port_num: 1,
        path_mtu: 3,
        dest: path,
        alt_dest: path,
        alt_port_num: 1,
        ..ModifyQp::default()
    };
    client
        .command::<DestroyQpResp>(26, &request.to_bytes(), &[])
        .map(drop)
}

impl Inline for u64 {
    fn read_inline(bytes: &[u8]) -> u64 {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        u64::from_ne_bytes(whole)
    }
}

#[test]
fn a_context_is_opened_once_and_first() {
    let client = Client::unopened();
    // What libibverbs asks to learn whether commands may be called this way.
    client.lay_out_method(0, 0, &[(2, 8, 1)]);
    assert_eq!(client.call(), Err(libc::ENOSPC));
    assert_eq!(client.alloc_pd(), Err(libc::EINVAL));
    let made = client.get_context().unwrap();
    assert_eq!(made.num_comp_vectors, 1);
    assert!(client.process.inode(made.async_fd as i32).is_some());
    assert_eq!(client.get_context(), Err(libc::EINVAL));
    let response: Mlx5AllocContextResp = client.process.read(DRIVER_RESPONSE);
    assert_eq!((response.tot_bfregs, response.cqe_version), (0, 1));
    assert_eq!(client.alloc_pd(), Ok(0));
}

/// Both forms of the query, while the link is up, down, and up again.
#[test]
fn port_without_a_link_is_reported_down() {
    for (link, without_link) in [(LinkLayer::InfiniBand, 2), (LinkLayer::Ethernet, 3)] {
        let options = DeviceOptions {
            fabric: format!("link-{}-{link:?}", std::process::id()),
            link,
            ..DeviceOptions::default()
        };
        let device = Device::on_fabric_without_engine(&options).unwrap();
        device.set_faults(Faults {
            down_ns: (1_000_000, 1_000_000),
            ..Faults::default()
        });
        let client = Client::on(&device);
        client.get_context().unwrap();
        for (now_ns, state) in [
            (0, (4, 5)),
            (1_500_000, (1, without_link)),
            (3_000_000, (4, 5)),
        ] {
            device.turn_at(now_ns);
            let request = QueryPort {
                port_num: 1,
                ..QueryPort::default()
            };
            let found: QueryPortResp = client.command(2, &request.to_bytes(), &[]).unwrap();
            assert_eq!((found.state, found.phys_state), state, "{link:?}, {now_ns}");
            client.lay_out_method(
                object::DEVICE,
                2,
                &[
                    (0, 8, 1),
                    (1, QueryPortRespEx::BYTES, client.process.address(RESPONSE)),
                ],
            );
            client.call().unwrap();
            let found: QueryPortRespEx = client.process.read(RESPONSE);
            let found = found.legacy_resp;
            assert_eq!((found.state, found.phys_state), state, "{link:?}, {now_ns}");
        }
    }
}

#[test]
fn the_clock_that_is_mapped_runs() {
    let client = Client::open();
    let word = client.context.lock().pages.clock();
    let read = || {
        // SAFETY: a page of the mapping, which the context holds.
        let clock = unsafe { std::sync::atomic::AtomicU64::from_ptr(word.cast()) };
        u64::from_be(clock.load(std::sync::atomic::Ordering::Acquire))
    };
    let (first, mut last) = (read(), read());
    for _ in 0..12_000 {
        std::thread::sleep(std::time::Duration::from_millis(5));
        let now = read();
        assert!(now >= last);
        last = now;
        if last > first + 20_000_000 {
            return;
        }
    }
    panic!("it stands at {last}");
}

#[test]
fn wrong_frames_are_refused() {
    let client = Client::open();
    let list = [(2, 8, 3)];
    client.lay_out_method(0, 0x77, &list);
    assert_eq!(client.call(), Err(libc::EPROTONOSUPPORT));
    client.lay_out_method(object::DM, 0, &list);
    assert_eq!(client.call(), Err(libc::EOPNOTSUPP));
    client.lay_out_method(0, 0, &[(2, 8, 3), (2, 8, 3)]);
    assert_eq!(client.call(), Err(libc::EINVAL));
    client.lay_out_method(0, 0, &[(2, 8, 3), (0x55, 8, 3)]);
    assert_eq!(client.call(), Err(libc::EPROTONOSUPPORT));
    client.lay_out_method(0, 0, &[]);
    assert_eq!(client.call(), Err(libc::EINVAL));
    // Unknown commands, and such as nothing is emulated of.
    let none = |number| client.command::<AllocPdResp>(number, &[0; 64], &[]).err();
    assert_eq!(none(1 << 20), Some(libc::EINVAL));
    assert_eq!(none(37), Some(libc::EOPNOTSUPP));
    assert_eq!(none(200), Some(libc::EOPNOTSUPP));
    let process = &client.process;
    let nowhere = client.context.ioctl(NOWHERE, process);
    assert_eq!(nowhere, Err(libc::EFAULT));
    client.lay_out(3, &[0; 8], &[], 3);
    assert_eq!(client.call(), Err(libc::ENOSPC));
}

#[test]
fn handles_are_checked_and_what_is_in_use_stays() {
    let client = Client::open();
    let pd = client.alloc_pd().unwrap();
    let start = client.process.address(RINGS);
    let reg = |start, length, access| client.reg_mr(pd, start, length, access);
    assert_eq!(reg(NOWHERE, 8, 0), Err(libc::EFAULT));
    assert_eq!(reg(start, 0, 0), Err(libc::EINVAL));
    assert_eq!(reg(u64::MAX - 8, 64, 0), Err(libc::EINVAL));
    assert_eq!(reg(start, 8, 2), Err(libc::EINVAL));
    assert_eq!(reg(start, 8, 1 << 6), Err(libc::EOPNOTSUPP));
    assert_eq!(reg(start, 8, 1 << 15), Err(libc::EINVAL));
    assert_eq!(client.reg_mr(9, start, 8, 0), Err(libc::EINVAL));
    let mr = reg(start, 4096, 1 << 20 | 7).unwrap();
    assert_eq!(client.destroy(4, pd), Err(libc::EBUSY));
    assert_eq!(client.destroy(13, pd), Err(libc::EINVAL));
    assert_eq!(client.destroy(13, mr), Ok(()));
    assert_eq!(client.destroy(13, mr), Err(libc::EINVAL));
    assert_eq!(client.destroy(4, pd), Ok(()));
    assert_eq!(client.destroy(4, u32::MAX), Err(libc::EINVAL));
}

#[test]
fn a_failed_call_leaves_nothing_behind() {
    let client = Client::open();
    let given = client.process.given.borrow().len();
    for (number, request) in [(3, vec![0; 8]), (17, vec![0; 8])] {
        client.lay_out(number, &request, &[], 8);
        // Nowhere to write the answer to.
        let data = IoctlHeader::BYTES + 2 * IoctlAttribute::BYTES + 8;
        client.process.write(data, &NOWHERE.to_ne_bytes());
        assert_eq!(client.call(), Err(libc::EFAULT));
    }
    assert_eq!(client.process.given.borrow().len(), given);
    // A descriptor of another process cannot be taken back.
    assert_eq!(client.process.taken_back.get(), 0);
    let tables = client.context.lock();
    assert_eq!(tables.objects.iter().count(), 0);
    assert_eq!(tables.channels.len(), 0);
}

#[test]
fn an_open_that_cannot_be_answered_gives_no_descriptor() {
    for at in [2, 4] {
        let client = Client::unopened();
        let driver = Mlx5AllocContext {
            max_cqe_version: 1,
            lib_caps: 3,
            ..Mlx5AllocContext::default()
        };
        client.lay_out(0, &GetContext::default().to_bytes(), &driver.to_bytes(), 8);
        let data = IoctlHeader::BYTES + at * IoctlAttribute::BYTES + 8;
        client.process.write(data, &NOWHERE.to_ne_bytes());
        assert_eq!(client.call(), Err(libc::EFAULT), "attribute {at}");
        let process = &client.process;
        assert_eq!(
            (process.given.borrow().len(), process.taken_back.get()),
            (0, 0)
        );
        assert_eq!(client.context.events.channels(), 0);
        client.get_context().unwrap();
    }
}

#[test]
fn queues_are_made_changed_and_destroyed() {
    let client = Client::open();
    let pd = client.alloc_pd().unwrap();
    let uar = client.alloc_uar().unwrap();
    assert_eq!(client.create_cq(uar + 1, -1), Err(libc::EINVAL));
    assert_eq!(client.create_cq(uar, 3), Err(libc::EBADF));
    let channel = client.create_channel().unwrap();
    let cq = client.create_cq(uar, channel).unwrap();
    assert_eq!(cq.cqe, 63);
    let qp = client.create_qp(uar, pd, cq.cq_handle).unwrap();
    let query = QueryQp {
        qp_handle: qp.qp_handle,
        ..QueryQp::default()
    };
    let state = || {
        let answer = client.command::<QueryQpResp>(25, &query.to_bytes(), &[]);
        answer.unwrap().qp_state
    };
    assert_eq!(state(), 0);
    let modify = |attr_mask, port_num| {
        let request = ModifyQp {
            qp_handle: qp.qp_handle,
            attr_mask,
            qp_state: 1,
            port_num,
            ..ModifyQp::default()
        };
        let done = client.command::<DestroyQpResp>(26, &request.to_bytes(), &[]);
        done.map(|_| ())
    };
    assert_eq!(modify(1, 1), Err(libc::EINVAL), "not all that is needed");
    assert_eq!(modify(0x39, 2), Err(libc::EINVAL), "no such port");
    assert_eq!(modify(1 << 22, 1), Err(libc::EOPNOTSUPP));
    assert_eq!(state(), 0);
    assert_eq!(modify(0x39, 1), Ok(()));
    assert_eq!(state(), 1);
    let destroy = |number, handle: u32| {
        let mut request = vec![0; 16];
        request[8..12].copy_from_slice(&handle.to_ne_bytes());
        client.command::<DestroyCqResp>(number, &request, &[])
    };
    assert_eq!(destroy(20, cq.cq_handle), Err(libc::EBUSY));
    assert!(destroy(27, qp.qp_handle).is_ok());
    let counts = destroy(20, cq.cq_handle).unwrap();
    assert_eq!(
        (counts.comp_events_reported, counts.async_events_reported),
        (0, 0)
    );
    // The channel was not closed, so it is still there when another is made.
    client.create_channel().unwrap();
    assert_eq!(client.context.lock().channels.len(), 2);
    client.process.take_back(channel);
    client.create_channel().unwrap();
    assert_eq!(client.context.lock().channels.len(), 2);
}

/// What a queue pair needs to become a responder, with its state.
const TO_RTR: u32 = 1
    | mask::AV
    | mask::PATH_MTU
    | mask::DEST_QPN
    | mask::RQ_PSN
    | mask::MAX_DEST_RD_ATOMIC
    | mask::MIN_RNR_TIMER;

#[test]
fn path_without_grh_is_refused_where_the_port_requires_it() {
    let needs_grh = Function {
        needs_grh: true,
        ..Function::default()
    };
    for (link, function, lids) in [
        (LinkLayer::InfiniBand, Function::default(), Ok(())),
        (LinkLayer::InfiniBand, needs_grh, Err(libc::EINVAL)),
        (LinkLayer::Ethernet, Function::default(), Err(libc::EINVAL)),
    ] {
        let options = DeviceOptions {
            fabric: format!("uverbs-{}", std::process::id()),
            link,
            function,
            ..DeviceOptions::default()
        };
        let client = Client::on(&Device::on_fabric(&options).unwrap());
        client.get_context().unwrap();
        let (pd, uar) = (client.alloc_pd().unwrap(), client.alloc_uar().unwrap());
        let cq = client.create_cq(uar, -1).unwrap();
        let qp = client.create_qp(uar, pd, cq.cq_handle).unwrap();
        let modify = |attr_mask, qp_state, is_global| {
            let path = QpDest {
                dlid: 1,
                is_global,
                port_num: 1,
                ..QpDest::default()
            };
            modify_with_paths(&client, qp.qp_handle, (attr_mask, qp_state), path)
        };
        assert_eq!(modify(0x39, 1, 0), Ok(()));
        assert_eq!(modify(TO_RTR | mask::ALT_PATH, 2, 0), lids, "{link:?}");
        if lids.is_err() {
            assert_eq!(modify(TO_RTR, 2, 0), lids);
            assert_eq!(modify(TO_RTR, 2, 1), Ok(()));
        }
    }
}

/// A path begins at an entry of the port's table of GIDs, which may go, move, or be of another network namespace.
#[test]
fn path_from_empty_or_foreign_gid_entry_is_refused() {
    let options = DeviceOptions {
        fabric: format!("uverbs-{}", std::process::id()),
        link: LinkLayer::Ethernet,
        function: Function {
            foreign_gid: true,
            ..Function::default()
        },
        ..DeviceOptions::default()
    };
    let device = Device::on_fabric(&options).unwrap();
    let client = Client::on(&device);
    client.get_context().unwrap();
    let (pd, uar) = (client.alloc_pd().unwrap(), client.alloc_uar().unwrap());
    let cq = client.create_cq(uar, -1).unwrap();
    let qp = client.create_qp(uar, pd, cq.cq_handle).unwrap();
    let modify = |attr_mask, qp_state, sgid_index| {
        let request = ModifyQp {
            qp_handle: qp.qp_handle,
            attr_mask,
            qp_state,
            port_num: 1,
            path_mtu: 3,
            dest: QpDest {
                is_global: 1,
                sgid_index,
                port_num: 1,
                ..QpDest::default()
            },
            ..ModifyQp::default()
        };
        let done = client.command::<DestroyQpResp>(26, &request.to_bytes(), &[]);
        done.map(|_| ())
    };
    const INIT: u32 = 0x39;
    let (wrong, empty) = (Err(libc::EINVAL), Err(libc::ENODATA));
    for (own, expected) in [
        (Some(1), [wrong, Ok(()), empty, empty, wrong]),
        (Some(3), [wrong, empty, empty, Ok(()), wrong]),
        (None, [wrong, empty, empty, empty, wrong]),
    ] {
        device.set_gid_index(own);
        for (index, expected) in (0..).zip(expected) {
            assert_eq!(modify(mask::STATE, 0, 0), Ok(()));
            assert_eq!(modify(INIT, 1, 0), Ok(()));
            assert_eq!(modify(TO_RTR, 2, index), expected, "{index} of {own:?}");
        }
    }
}

/// As `set_qpc_atomic_flags` of the kernel's driver: not when the right is given, but when the responder is to have a depth.
#[test]
fn function_without_atomics_refuses_queue_pair_with_atomic_access() {
    const ATOMIC: u32 = 1 << 3;
    for (access, depth, expected) in [
        (7 | ATOMIC, 1, Err(libc::EOPNOTSUPP)),
        (7 | ATOMIC, 0, Ok(())),
        (7, 1, Ok(())),
    ] {
        let options = DeviceOptions {
            fabric: format!("uverbs-{}", std::process::id()),
            function: Function {
                no_atomics: true,
                ..Function::default()
            },
            ..DeviceOptions::default()
        };
        let client = Client::on(&Device::on_fabric(&options).unwrap());
        client.get_context().unwrap();
        let (pd, uar) = (client.alloc_pd().unwrap(), client.alloc_uar().unwrap());
        let cq = client.create_cq(uar, -1).unwrap();
        let qp = client.create_qp(uar, pd, cq.cq_handle).unwrap();
        let modify = |attr_mask, qp_state| {
            let request = ModifyQp {
                qp_handle: qp.qp_handle,
                attr_mask,
                qp_state,
                port_num: 1,
                path_mtu: 3,
                qp_access_flags: access,
                max_dest_rd_atomic: depth,
                dest: QpDest {
                    dlid: 1,
                    port_num: 1,
                    ..QpDest::default()
                },
                ..ModifyQp::default()
            };
            let done = client.command::<DestroyQpResp>(26, &request.to_bytes(), &[]);
            done.map(|_| ())
        };
        assert_eq!(modify(0x39, 1), Ok(()));
        assert_eq!(modify(TO_RTR, 2), expected, "{access:#x} {depth}");
    }
}

/// `ibv_create_srq` ignores the limit, and so does the kernel's driver: it arms the event only when it is told to modify the queue.
#[test]
fn limit_named_at_the_creation_of_a_shared_queue_is_not_armed() {
    const LIMIT: u32 = 1 << 1;
    const RECORD: usize = RINGS + 0x8010;
    let client = Client::open();
    let request = CreateSrq {
        pd_handle: client.alloc_pd().unwrap(),
        max_wr: 15,
        max_sge: 1,
        srq_limit: 3,
        ..CreateSrq::default()
    };
    let driver = Mlx5CreateSrq {
        buf_addr: client.process.address(RINGS),
        db_addr: client.process.address(RECORD),
        ..Mlx5CreateSrq::default()
    };
    let made = client.command::<CreateSrqResp>(32, &request.to_bytes(), &driver.to_bytes());
    let srq_handle = made.unwrap().srq_handle;
    let query = QuerySrq {
        srq_handle,
        ..QuerySrq::default()
    };
    let limit = || {
        let answer = client.command::<QuerySrqResp>(34, &query.to_bytes(), &[]);
        answer.unwrap().srq_limit
    };
    assert_eq!(limit(), 0);
    // More receives than the limit are posted, so it stays.
    client.process.write(RECORD, &8_u32.to_be_bytes());
    let modify = ModifySrq {
        srq_handle,
        attr_mask: LIMIT,
        srq_limit: 3,
        ..ModifySrq::default()
    };
    let done = client.command::<DestroyQpResp>(33, &modify.to_bytes(), &[]);
    assert!(done.is_ok());
    assert_eq!(limit(), 3);
}

/// The core refuses alternate paths on RoCE (`_ib_modify_qp`), and the driver a rate that the enumeration does not have (`ib_rate_to_mlx5`).
#[test]
fn alternate_path_on_roce_and_unknown_rates_are_refused() {
    let wrong = Err(libc::EINVAL);
    for (link, alternate) in [
        (LinkLayer::InfiniBand, Ok(())),
        (LinkLayer::Ethernet, wrong),
    ] {
        let options = DeviceOptions {
            fabric: format!("uverbs-{}", std::process::id()),
            link,
            ..DeviceOptions::default()
        };
        let device = Device::on_fabric(&options).unwrap();
        let client = Client::on(&device);
        client.get_context().unwrap();
        let (pd, uar) = (client.alloc_pd().unwrap(), client.alloc_uar().unwrap());
        let cq = client.create_cq(uar, -1).unwrap();
        let qp = client.create_qp(uar, pd, cq.cq_handle).unwrap();
        let modify = |attr_mask, qp_state, static_rate| {
            let path = QpDest {
                dlid: 1,
                is_global: 1,
                sgid_index: device.gid_index().unwrap(),
                port_num: 1,
                static_rate,
                ..QpDest::default()
            };
            modify_with_paths(&client, qp.qp_handle, (attr_mask, qp_state), path)
        };
        for (rate, expected) in [
            (0, Ok(())),
            (1, wrong),
            (2, Ok(())),
            (22, Ok(())),
            (24, wrong),
        ] {
            assert_eq!(modify(mask::STATE, 0, 0), Ok(()));
            assert_eq!(modify(0x39, 1, 0), Ok(()));
            assert_eq!(modify(TO_RTR, 2, rate), expected, "{link:?} {rate}");
        }
        assert_eq!(modify(mask::STATE, 0, 0), Ok(()));
        assert_eq!(modify(0x39, 1, 0), Ok(()));
        assert_eq!(modify(TO_RTR | mask::ALT_PATH, 2, 0), alternate, "{link:?}");
    }
}

/// As `mlx5_ib_modify_cq`: the device has 12 bits for the period.
#[test]
fn period_of_moderation_beyond_12_bits_is_refused() {
    let client = Client::open();
    let uar = client.alloc_uar().unwrap();
    let cq = client.create_cq(uar, -1).unwrap();
    for (cq_period, expected) in [(4095, Ok(())), (4096, Err(libc::EINVAL))] {
        let request = ExModifyCq {
            cq_handle: cq.cq_handle,
            attr_mask: 1,
            attr: CqModeration {
                cq_count: u16::MAX,
                cq_period,
            },
            ..ExModifyCq::default()
        };
        let done = client.command::<DestroyQpResp>(1 << 31 | 57, &request.to_bytes(), &[]);
        assert_eq!(done.map(|_| ()), expected, "{cq_period}");
    }
}

/// Queue keys with the highest bit are for those who may make raw packets.
#[test]
fn privileged_queue_key_needs_the_capability_of_raw_packets() {
    const DATAGRAMS: u8 = 4;
    const INIT: u32 = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::QKEY;
    for keeps in [true, false] {
        let is_privileged = keeps && Space::LOCAL.has_capability(Capability::NetRaw);
        let mut client = Client::unopened();
        client.process = Process::with_capabilities(keeps);
        client.get_context().unwrap();
        let (pd, uar) = (client.alloc_pd().unwrap(), client.alloc_uar().unwrap());
        let cq = client.create_cq(uar, -1).unwrap();
        let qp = client.create_qp_of(DATAGRAMS, uar, pd, cq.cq_handle);
        let modify = |attr_mask, qkey| {
            let request = ModifyQp {
                qp_handle: qp.as_ref().unwrap().qp_handle,
                attr_mask,
                qp_state: 1,
                port_num: 1,
                qkey,
                ..ModifyQp::default()
            };
            let done = client.command::<DestroyQpResp>(26, &request.to_bytes(), &[]);
            done.map(|_| ())
        };
        let expected = if is_privileged {
            Ok(())
        } else {
            Err(libc::EPERM)
        };
        assert_eq!(modify(INIT, 1 << 31 | 0x1111), expected);
        assert_eq!(modify(INIT, 0x1111), Ok(()));
        assert_eq!(modify(mask::QKEY, 1 << 31), expected);
    }
}

/// As `ib_umem_get` of the kernel: EPERM if a process may lock nothing, ENOMEM beyond its limit, and no limit with `CAP_IPC_LOCK`.
#[test]
fn pinned_memory_is_limited_where_the_function_says_so() {
    const PAGE: u64 = 4096;
    let client_of = |limits_pinned, keeps, pages: u64| {
        let options = DeviceOptions {
            fabric: format!("uverbs-{}", std::process::id()),
            function: Function {
                limits_pinned,
                ..Function::default()
            },
            ..DeviceOptions::default()
        };
        let mut client = Client::on(&Device::on_fabric(&options).unwrap());
        client.process = Process::with_capabilities(keeps);
        let limit = libc::rlimit {
            rlim_cur: pages * PAGE,
            rlim_max: pages * PAGE,
        };
        let (pid, resource) = (client.process.pid, libc::RLIMIT_MEMLOCK);
        // SAFETY: a limit for a child of this process.
        let set = unsafe { libc::prlimit(pid, resource, &limit, std::ptr::null_mut()) };
        assert_eq!(set, 0);
        client.get_context().unwrap();
        client
    };
    let start = |client: &Client, page: u64| client.process.address(RINGS) + page * PAGE;
    // 4 pages, and a limit of 3: more than a process without the capability may have.
    let mut exempt = vec![(false, false)];
    if Space::LOCAL.has_capability(Capability::IpcLock) {
        exempt.push((true, true));
    }
    for (limits, keeps) in exempt {
        let client = client_of(limits, keeps, 3);
        let pd = client.alloc_pd().unwrap();
        let done = client.reg_mr(pd, start(&client, 0), 4 * PAGE, 7);
        assert!(done.is_ok(), "{limits} {keeps}");
    }
    let client = client_of(true, false, 0);
    let pd = client.alloc_pd().unwrap();
    let uar = client.alloc_uar().unwrap();
    assert_eq!(client.reg_mr(pd, start(&client, 0), 1, 7), Err(libc::EPERM));
    assert_eq!(client.create_cq(uar, -1).map(|_| ()), Err(libc::EPERM));

    let client = client_of(true, false, 3);
    let pd = client.alloc_pd().unwrap();
    let uar = client.alloc_uar().unwrap();
    // Two pages, because it crosses the boundary.
    let two = client.reg_mr(pd, start(&client, 0) + 100, PAGE, 7).unwrap();
    let refused = client.reg_mr(pd, start(&client, 4), PAGE + 1, 7);
    assert_eq!(refused, Err(libc::ENOMEM));
    // A ring of 64 CQEs takes the third page, and nothing is left for the rings of a queue pair.
    let cq = client.create_cq(uar, -1).unwrap();
    let refused = client.create_qp(uar, pd, cq.cq_handle).map(|_| ());
    assert_eq!(refused, Err(libc::ENOMEM));
    // What was refused pins nothing, and what is deregistered no longer does.
    client.destroy(13, two).unwrap();
    let qp = client.create_qp(uar, pd, cq.cq_handle).unwrap();
    let one = client.reg_mr(pd, start(&client, 4), PAGE, 7);
    assert!(one.is_ok());
    assert_eq!(
        client.reg_mr(pd, start(&client, 4), PAGE, 7),
        Err(libc::ENOMEM)
    );
    let mut request = vec![0; 16];
    request[8..12].copy_from_slice(&qp.qp_handle.to_ne_bytes());
    let destroyed = client.command::<DestroyCqResp>(27, &request, &[]);
    assert!(destroyed.is_ok());
    assert!(client.reg_mr(pd, start(&client, 4), PAGE, 7).is_ok());
}

/// Calls that succeed on a context with a domain, a UAR page, a queue of each kind and a region; the fuzzer changes them.
fn sound_call(client: &Client, which: usize, uar: u32) {
    let start = client.process.address(RINGS);
    let handle = |handle: u32| {
        let mut request = vec![0; 32];
        request[8..12].copy_from_slice(&handle.to_ne_bytes());
        request
    };
    // The calls lay themselves out, and have been made once; what follows is made again, changed.
    let _ = match which {
        0 => client.alloc_pd().map(|_| ()),
        1 => client.reg_mr(0, start, 4096, 7).map(|_| ()),
        2 => client.alloc_uar().map(|_| ()),
        3 => client.create_channel().map(|_| ()),
        4 => client.create_cq(uar, -1).map(|_| ()),
        5 => client.create_qp(uar, 0, 2).map(|_| ()),
        6 => client.destroy(13, 4),
        7 => client.destroy(4, 0),
        8 => client
            .command::<QueryQpResp>(25, &handle(3), &[])
            .map(|_| ()),
        9 => client
            .command::<DestroyCqResp>(20, &handle(2), &[])
            .map(|_| ()),
        10 => client
            .command::<DestroyQpResp>(27, &handle(3), &[])
            .map(|_| ()),
        11 => {
            let request = ModifyQp {
                qp_handle: 3,
                attr_mask: 0x39,
                qp_state: 1,
                port_num: 1,
                ..ModifyQp::default()
            };
            let done = client.command::<DestroyQpResp>(26, &request.to_bytes(), &[]);
            done.map(|_| ())
        }
        12 => {
            let request = CreateSrq {
                max_wr: 15,
                max_sge: 1,
                ..CreateSrq::default()
            };
            let driver = Mlx5CreateSrq {
                buf_addr: start + 0x20000,
                db_addr: start + 0x8010,
                ..Mlx5CreateSrq::default()
            };
            let done = client.command::<CreateSrqResp>(32, &request.to_bytes(), &driver.to_bytes());
            done.map(|_| ())
        }
        13 => {
            let request = AllocMw {
                mw_type: 2,
                ..AllocMw::default()
            };
            let done = client.command::<AllocMwResp>(14, &request.to_bytes(), &[]);
            done.map(|_| ())
        }
        14 => {
            let request = ResizeCq {
                cq_handle: 2,
                cqe: 127,
                ..ResizeCq::default()
            };
            let driver = Mlx5ResizeCq {
                buf_addr: start + 0x30000,
                cqe_size: 64,
                ..Mlx5ResizeCq::default()
            };
            let done = client.command::<ResizeCqResp>(19, &request.to_bytes(), &driver.to_bytes());
            done.map(|_| ())
        }
        15 => {
            client.lay_out_method(0, 6, &[(0, 8, 1), (1, 8, 0), (2, 4, 0), (3, 32, start)]);
            client.call()
        }
        _ => client
            .command::<ExQueryDeviceResp>(1 << 31 | 1, &[0; 8], &[])
            .map(|_| ()),
    };
}

/// A change to a call: where, and to what.
fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
    let frame = 0..(IoctlHeader::BYTES + 5 * IoctlAttribute::BYTES);
    let request = REQUEST..REQUEST + 128;
    let driver = DRIVER_REQUEST..DRIVER_REQUEST + 64;
    let at = prop_oneof![frame, request, driver];
    prop::collection::vec((at, any::<u8>()), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn changed_calls_do_no_harm(
        calls in prop::collection::vec((0usize..17, changes()), 40..80),
    ) {
        let client = Client::open();
        let pd = client.alloc_pd().unwrap();
        let uar = client.alloc_uar().unwrap();
        let cq = client.create_cq(uar, -1).unwrap();
        client.create_qp(uar, pd, cq.cq_handle).unwrap();
        for (which, changes) in calls {
            sound_call(&client, which, uar);
            for (at, byte) in changes {
                client.process.write(at, &[byte]);
            }
            let _ = client.call();
        }
        // The context still does what it should.
        prop_assert!(client.alloc_pd().is_ok());
    }

    #[test]
    fn random_bytes_do_no_harm(
        bytes in prop::collection::vec(any::<u8>(), 24..1024),
        object in prop::sample::select(vec![0u16, 1, 3, 4, 5, 7, 16, 0x1000, 0x1008]),
        method in prop::sample::select(vec![0u16, 1, 2, 3, 4, 5, 6, 0x1000, 0x1001]),
        attributes in 0u16..20,
    ) {
        let client = Client::open();
        client.process.write(0, &bytes);
        let _ = client.call();
        let header = IoctlHeader {
            length: 24 + attributes * 16,
            object_id: object,
            method_id: method,
            num_attrs: attributes,
            driver_id: 1,
            ..IoctlHeader::default()
        };
        client.process.write(0, &header.to_bytes());
        let _ = client.call();
        prop_assert!(client.alloc_pd().is_ok());
    }
}
