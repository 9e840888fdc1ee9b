//! The commands that processes write to `/dev/infiniband/rdma_cm` (the kernel's `ucma.c`).

use super::address::SocketAddress;
use super::event_file::EventWaiter;
use super::id::{FileKey, IdState, qp_type};
use super::table::{CmTable, EventParam, event};
use crate::device::client::Errno;
use crate::device::space::Space;
use crate::doors::abi::*;

/// `RDMA_USER_CM_CMD_*`.
mod command {
    pub(super) const CREATE_ID: u32 = 0;
    pub(super) const DESTROY_ID: u32 = 1;
    pub(super) const BIND_IP: u32 = 2;
    pub(super) const RESOLVE_IP: u32 = 3;
    pub(super) const RESOLVE_ROUTE: u32 = 4;
    pub(super) const QUERY_ROUTE: u32 = 5;
    pub(super) const CONNECT: u32 = 6;
    pub(super) const LISTEN: u32 = 7;
    pub(super) const ACCEPT: u32 = 8;
    pub(super) const REJECT: u32 = 9;
    pub(super) const DISCONNECT: u32 = 10;
    pub(super) const INIT_QP_ATTR: u32 = 11;
    pub(super) const GET_EVENT: u32 = 12;
    pub(super) const GET_OPTION: u32 = 13;
    pub(super) const SET_OPTION: u32 = 14;
    pub(super) const NOTIFY: u32 = 15;
    pub(super) const JOIN_IP_MCAST: u32 = 16;
    pub(super) const LEAVE_MCAST: u32 = 17;
    pub(super) const MIGRATE_ID: u32 = 18;
    pub(super) const QUERY: u32 = 19;
    pub(super) const BIND: u32 = 20;
    pub(super) const RESOLVE_ADDR: u32 = 21;
    pub(super) const JOIN_MCAST: u32 = 22;
}

/// The lengths in bytes of all commands, with their header: those of the C library's, now and before it had ECE.
pub(in crate::doors) const COMMAND_BYTES: [u32; 14] = [
    12, 16, 24, 32, 48, 56, 72, 144, 160, 272, 280, 288, 296, 304,
];

/// Members of answers that older kernels do not have, in bytes.
const NEWER_IN_EVENTS: usize = 12;
const NEWER_IN_QUERIES: usize = 8;
/// Bytes of the longest value of an option.
const MOST_OPTION_BYTES: u32 = 4096;

/// What a command needs of the process that writes it.
pub(in crate::doors) trait CmCaller {
    /// Its memory.
    fn space(&self) -> Space;

    /// Whether its descriptor has `O_NONBLOCK`.
    fn is_nonblocking(&self) -> bool;

    /// `st_dev` and `st_ino` of one of its descriptors.
    fn inode(&self, descriptor: i32) -> Option<(u64, u64)>;

    /// A call that waits for an event, to be written to `response`, which has `room_bytes`. `None` if the caller waits by itself.
    fn waiter(&self, response: u64, room_bytes: usize) -> Option<Box<dyn EventWaiter>>;
}

/// How a command ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::doors) enum CmAnswer {
    /// It is done.
    Done,
    /// There is no event yet. The call is answered when there is one.
    Later,
    /// There is no event yet. The caller waits, and tries again.
    Wait,
}

/// One command.
pub(super) struct CmCommand<'a> {
    pub(super) table: &'a mut CmTable,
    pub(super) file: FileKey,
    pub(super) caller: &'a dyn CmCaller,
    at: u64,
    request_bytes: usize,
    room_bytes: usize,
}

impl<'a> CmCommand<'a> {
    /// Executes what a process has written.
    pub(super) fn execute(
        table: &'a mut CmTable,
        file: FileKey,
        caller: &'a dyn CmCaller,
        at: u64,
        len_bytes: u64,
    ) -> Result<CmAnswer, Errno> {
        if len_bytes < CmHeader::BYTES as u64 {
            return Err(libc::EINVAL);
        }
        let mut header = [0; CmHeader::BYTES];
        let read = caller.space().read(at, &mut header);
        read.map_err(|_| libc::EFAULT)?;
        let header = CmHeader::read(&header);
        if header.cmd > command::JOIN_MCAST {
            return Err(libc::EINVAL);
        }
        if u64::from(header.r#in) + CmHeader::BYTES as u64 > len_bytes {
            return Err(libc::EINVAL);
        }
        let mut command = CmCommand {
            table,
            file,
            caller,
            at: at + CmHeader::BYTES as u64,
            request_bytes: header.r#in.into(),
            room_bytes: header.out.into(),
        };
        if header.cmd == command::GET_EVENT {
            return command.get_event();
        }
        command.run(header.cmd).map(|()| CmAnswer::Done)
    }

    fn run(&mut self, number: u32) -> Result<(), Errno> {
        match number {
            command::CREATE_ID => self.create(),
            command::DESTROY_ID => self.destroy(),
            command::BIND_IP => {
                let it: CmBindIp = self.request()?;
                let address = SocketAddress::read(&it.addr);
                self.table.bind(self.file, it.id, &address)
            }
            command::BIND => {
                let it: CmBind = self.request()?;
                let address = SocketAddress::read(&it.addr);
                let is_whole = it.addr_size != 0 && it.addr_size == address.len_bytes();
                if it.reserved != 0 || !is_whole {
                    return Err(libc::EINVAL);
                }
                self.table.bind(self.file, it.id, &address)
            }
            command::RESOLVE_IP => {
                let it: CmResolveIp = self.request()?;
                let [source, destination] =
                    [it.src_addr, it.dst_addr].map(|it| SocketAddress::read(&it));
                let table = &mut *self.table;
                table.resolve_address(self.file, it.id, &source, &destination)
            }
            command::RESOLVE_ADDR => self.resolve_address(),
            command::RESOLVE_ROUTE => {
                let it: CmResolveRoute = self.request()?;
                self.table.resolve_route(self.file, it.id)
            }
            command::QUERY_ROUTE => {
                self.need_room(CmQueryRouteResp::BYTES - NEWER_IN_QUERIES)?;
                let it: CmQuery = self.request()?;
                let answer = self.table.query_route(self.file, it.id)?;
                self.respond(it.response, &answer.to_bytes())
            }
            command::QUERY => self.query(),
            command::CONNECT => {
                let it: CmConnect = self.request()?;
                if it.conn_param.valid == 0 {
                    return Err(libc::EINVAL);
                }
                self.table.connect(self.file, it.id, &it.conn_param)
            }
            command::LISTEN => {
                let it: CmListen = self.request()?;
                self.table.listen(self.file, it.id, it.backlog)
            }
            command::ACCEPT => {
                let it: CmAccept = self.request()?;
                let param = (it.conn_param.valid != 0).then_some(&it.conn_param);
                self.table.accept(self.file, it.id, it.uid, param)
            }
            command::REJECT => {
                let it: CmReject = self.request()?;
                let len_bytes = usize::from(it.private_data_len);
                let private_data = it.private_data.get(..len_bytes).unwrap_or_default();
                let table = &mut *self.table;
                table.reject(self.file, it.id, it.reason, private_data)
            }
            command::DISCONNECT => {
                let it: CmDisconnect = self.request()?;
                self.table.disconnect(self.file, it.id)
            }
            command::INIT_QP_ATTR => {
                self.need_room(CmQpAttr::BYTES)?;
                let it: CmInitQpAttr = self.request()?;
                let table = &*self.table;
                let answer = table.queue_pair_attributes(self.file, it.id, it.qp_state)?;
                self.respond(it.response, &answer.to_bytes())
            }
            command::SET_OPTION => self.set_option(),
            command::NOTIFY => {
                let it: CmNotify = self.request()?;
                self.table.notify(self.file, it.id, it.event)
            }
            command::MIGRATE_ID => self.migrate(),
            command::JOIN_IP_MCAST => {
                self.need_room(CmCreateIdResp::BYTES)?;
                let it: CmJoinIpMcast = self.request()?;
                let address = SocketAddress::read(&it.addr);
                self.join((it.id, it.uid), it.response, &address)
            }
            command::JOIN_MCAST => {
                self.need_room(CmCreateIdResp::BYTES)?;
                let it: CmJoinMcast = self.request()?;
                let address = SocketAddress::read(&it.addr);
                if it.addr_size == 0 || it.addr_size != address.len_bytes() || it.join_flags > 1 {
                    return Err(libc::EINVAL);
                }
                self.join((it.id, it.uid), it.response, &address)
            }
            command::LEAVE_MCAST => {
                self.need_room(CmDestroyIdResp::BYTES)?;
                let it: CmDestroyId = self.request()?;
                let events_reported = self.table.leave(self.file, it.id)?;
                self.respond(it.response, &CmDestroyIdResp { events_reported }.to_bytes())
            }
            command::GET_OPTION => Err(libc::ENOSYS),
            _ => Err(libc::EINVAL),
        }
    }

    /// The request; what it lacks is zero.
    fn request<T: Layout>(&self) -> Result<T, Errno> {
        let mut bytes = vec![0; self.request_bytes.min(T::BYTES)];
        let read = self.caller.space().read(self.at, &mut bytes);
        read.map_err(|_| libc::EFAULT)?;
        Ok(T::read(&bytes))
    }

    fn need_room(&self, bytes: usize) -> Result<(), Errno> {
        if self.room_bytes < bytes {
            return Err(libc::ENOSPC);
        }
        Ok(())
    }

    /// Writes an answer, as much of it as the process has room for.
    fn respond(&self, to: u64, answer: &[u8]) -> Result<(), Errno> {
        let answer = answer.get(..self.room_bytes).unwrap_or(answer);
        let written = self.caller.space().write(to, answer);
        written.map_err(|_| libc::EFAULT)
    }

    fn create(&mut self) -> Result<(), Errno> {
        self.need_room(CmCreateIdResp::BYTES)?;
        let it: CmCreateId = self.request()?;
        let id = self.table.create(self.file, it.uid, it.ps, it.qp_type)?;
        let written = self.respond(it.response, &CmCreateIdResp { id }.to_bytes());
        if written.is_err() {
            self.table.destroy(id);
        }
        written
    }

    fn destroy(&mut self) -> Result<(), Errno> {
        self.need_room(CmDestroyIdResp::BYTES)?;
        let it: CmDestroyId = self.request()?;
        self.table.id_of(self.file, it.id)?;
        let events_reported = self.table.destroy(it.id);
        self.respond(it.response, &CmDestroyIdResp { events_reported }.to_bytes())
    }

    fn resolve_address(&mut self) -> Result<(), Errno> {
        let it: CmResolveAddr = self.request()?;
        let [source, destination] = [it.src_addr, it.dst_addr].map(|it| SocketAddress::read(&it));
        let is_whole = |bytes: u16, address: &SocketAddress| bytes == address.len_bytes();
        if it.reserved != 0
            || (it.src_size != 0 && !is_whole(it.src_size, &source))
            || it.dst_size == 0
            || !is_whole(it.dst_size, &destination)
        {
            return Err(libc::EINVAL);
        }
        let source = if it.src_size == 0 {
            SocketAddress::NONE
        } else {
            source
        };
        let table = &mut *self.table;
        table.resolve_address(self.file, it.id, &source, &destination)
    }

    fn query(&mut self) -> Result<(), Errno> {
        const ADDRESSES: u32 = 0;
        const PATH: u32 = 1;
        const GIDS: u32 = 2;
        let it: CmQuery = self.request()?;
        self.table.id_of(self.file, it.id)?;
        let answer = match it.option {
            ADDRESSES | GIDS => {
                self.need_room(CmQueryAddrResp::BYTES - NEWER_IN_QUERIES)?;
                let table = &*self.table;
                let found = match it.option {
                    ADDRESSES => table.query_addresses(self.file, it.id)?,
                    _ => table.query_gids(self.file, it.id)?,
                };
                found.to_bytes()
            }
            PATH => self.table.query_path(self.file, it.id, self.room_bytes)?,
            _ => return Err(libc::ENOSYS),
        };
        self.respond(it.response, &answer)
    }

    fn get_event(&mut self) -> Result<CmAnswer, Errno> {
        self.need_room(CmEventResp::BYTES - NEWER_IN_EVENTS)?;
        let it: CmGetEvent = self.request()?;
        let file = self.table.files.get_mut(&self.file).ok_or(libc::EIO)?;
        let Some(first) = file.events.front() else {
            if self.caller.is_nonblocking() {
                return Err(libc::EAGAIN);
            }
            let Some(waiter) = self.caller.waiter(it.response, self.room_bytes) else {
                return Ok(CmAnswer::Wait);
            };
            file.waiters.retain(|waiter| waiter.is_waiting());
            file.waiters.push_back(waiter);
            return Ok(CmAnswer::Later);
        };
        let event = first.response.to_bytes();
        self.respond(it.response, &event)?;
        self.table.take_event(self.file);
        Ok(CmAnswer::Done)
    }

    fn set_option(&mut self) -> Result<(), Errno> {
        /// Levels.
        const ID: u32 = 0;
        const IB: u32 = 1;
        let it: CmSetOption = self.request()?;
        self.table.id_of(self.file, it.id)?;
        if it.optlen > MOST_OPTION_BYTES {
            return Err(libc::EINVAL);
        }
        let mut value = vec![0; it.optlen as usize];
        let read = self.caller.space().read(it.optval, &mut value);
        read.map_err(|_| libc::EFAULT)?;
        match it.level {
            ID => self.set_id_option(it.id, it.optname, &value),
            IB => self.set_path(it.id, it.optname, &value),
            _ => Err(libc::ENOSYS),
        }
    }

    fn set_id_option(&mut self, handle: u32, name: u32, value: &[u8]) -> Result<(), Errno> {
        const TYPE_OF_SERVICE: u32 = 0;
        const REUSE_ADDRESS: u32 = 1;
        const ONLY_FAMILY: u32 = 2;
        const ACK_TIMEOUT: u32 = 3;
        let id = self.table.id_mut(self.file, handle)?;
        let byte = <[u8; 1]>::try_from(value).map_err(|_| libc::EINVAL);
        let flag = <[u8; 4]>::try_from(value).map_err(|_| libc::EINVAL);
        let flag = flag.map(|bytes| bytes != [0; 4]);
        match name {
            TYPE_OF_SERVICE => id.type_of_service = byte?[0],
            REUSE_ADDRESS => {
                let reuses = flag?;
                if !reuses && id.state != IdState::Idle {
                    return Err(libc::EINVAL);
                }
                id.reuses_address = reuses;
            }
            ONLY_FAMILY => {
                let only = flag?;
                if !matches!(id.state, IdState::Idle | IdState::AddressBound) {
                    return Err(libc::EINVAL);
                }
                id.only_family = Some(only);
            }
            ACK_TIMEOUT => {
                let timeout = byte?[0];
                if id.qp_type != qp_type::RC || timeout > 31 {
                    return Err(libc::EINVAL);
                }
                id.ack_timeout = Some(timeout);
            }
            _ => return Err(libc::ENOSYS),
        }
        Ok(())
    }

    /// A path that the process found itself takes the place of the resolution.
    fn set_path(&mut self, handle: u32, name: u32, value: &[u8]) -> Result<(), Errno> {
        const PATH: u32 = 1;
        /// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
        const USABLE: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;
        if name != PATH {
            return Err(libc::ENOSYS);
        }
        let (paths, rest) = value.as_chunks::<{ CmPathData::BYTES }>();
        let is_usable = |path: &[u8; CmPathData::BYTES]| CmPathData::read(path).flags == USABLE;
        if !rest.is_empty() || !paths.iter().any(is_usable) {
            return Err(libc::EINVAL);
        }
        let id = self.table.id_mut(self.file, handle)?;
        if id.state != IdState::AddressResolved {
            return Err(libc::EINVAL);
        }
        id.state = IdState::RouteResolved;
        self.table
            .post(handle, event::ROUTE_RESOLVED, 0, EventParam::None);
        Ok(())
    }

    fn migrate(&mut self) -> Result<(), Errno> {
        let it: CmMigrateId = self.request()?;
        let from = self.caller.inode(it.fd as i32).ok_or(libc::ENOENT)?;
        if !self.table.files.contains_key(&from) {
            return Err(libc::EINVAL);
        }
        let events_reported = self.table.migrate(from, self.file, it.id)?;
        self.respond(it.response, &CmMigrateResp { events_reported }.to_bytes())
    }

    fn join(
        &mut self,
        (id, uid): (u32, u64),
        response: u64,
        address: &SocketAddress,
    ) -> Result<(), Errno> {
        let (space, file) = (self.caller.space(), self.file);
        let answer = |id| {
            let written = space.write(response, &CmCreateIdResp { id }.to_bytes());
            written.map_err(|_| libc::EFAULT)
        };
        self.table.join((file, id), uid, address, answer)
    }
}
