//! The trace: every WQE, packet and CQE of a device, one line each, for readers who know verbs.
//!
//! A line begins with the time of day (UTC) and the node. Lines are written whole, at the end of a turn, and appended: devices of
//! several processes may share a file.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::device::gather::{Gather, WqeRequest};
use crate::device::packet::{AckCode, Header, PacketKind, Service, flag};
use crate::device::qp::{QpSetup, State};
use crate::device::wire::Destination;
use crate::{Error, Result};
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Datagram, Opcode, Syndrome, WindowUpdate};

/// A file that takes lines.
#[derive(Debug)]
pub(crate) struct Trace {
    file: File,
    lines: String,
    node: u16,
    /// The device's clock at 0, as time since 1970.
    epoch_ns: u64,
}

impl Trace {
    /// # Errors
    /// [`Error::System`] if the file cannot be opened.
    pub(crate) fn open(path: &Path, node: u16) -> Result<Trace> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|error| Error::System {
            operation: "open of the trace",
            errno: error.raw_os_error().unwrap_or(0),
        })?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Trace {
            file,
            lines: String::new(),
            node,
            epoch_ns: now.map_or(0, |now| now.as_nanos() as u64),
        })
    }

    /// Writes what has come together.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if !self.lines.is_empty() {
            // A trace that cannot be written, on a full disk for example, is no reason to stop.
            let _ = self.file.write_all(self.lines.as_bytes());
            self.lines.clear();
        }
    }

    fn line(&mut self, now_ns: u64, text: fmt::Arguments<'_>) {
        let ns = self.epoch_ns.wrapping_add(now_ns);
        let (us, s) = (ns / 1000 % 1_000_000, ns / 1_000_000_000);
        let (hour, minute, second) = (s / 3600 % 24, s / 60 % 60, s % 60);
        // A string takes anything.
        let _ = writeln!(
            self.lines,
            "{hour:02}:{minute:02}:{second:02}.{us:06} n{} {text}",
            self.node
        );
    }

    /// A WQE of a send queue, as it is begun. `failed` is what its check found.
    pub(crate) fn send_wqe(
        &mut self,
        now_ns: u64,
        parts: &QpSetup,
        index: u32,
        request: &WqeRequest,
        gather: &Gather,
        failed: Option<Syndrome>,
    ) {
        let what = SendWqe(request, gather, failed);
        let (qpn, index) = (parts.qpn, index as u16);
        self.line(now_ns, format_args!("WQE qp {qpn:#08x} sq {index} {what}"));
    }

    /// A receive, as it is taken.
    pub(crate) fn recv_wqe(&mut self, now_ns: u64, parts: &QpSetup, index: u32, gather: &Gather) {
        let (qpn, index) = (parts.qpn, index as u16);
        let queue = if parts.srq.is_some() { "srq" } else { "rq" };
        let pieces = gather.describe();
        self.line(
            now_ns,
            format_args!("WQE qp {qpn:#08x} {queue} {index} RECV{pieces}"),
        );
    }

    /// A packet that leaves. `message` is the name of the management message in it.
    pub(crate) fn sent(
        &mut self,
        now_ns: u64,
        to: Destination,
        header: &Header,
        message: Option<&str>,
    ) {
        let packet = PacketText(header, message);
        match to {
            Destination::Local => self.line(now_ns, format_args!("TX  -> self {packet}")),
            Destination::Lane(node) => self.line(now_ns, format_args!("TX  -> n{node} {packet}")),
            Destination::Host(gid) => {
                let to = address(&gid);
                self.line(now_ns, format_args!("TX  -> {to} {packet}"));
            }
            Destination::Nowhere => self.line(now_ns, format_args!("TX  -> nowhere {packet}")),
        }
    }

    /// A packet that has come, and the name of the management message in it; `taken` if a queue pair is there for it.
    pub(crate) fn received(
        &mut self,
        now_ns: u64,
        sender: Option<[u8; 16]>,
        header: &Header,
        message: Option<&str>,
        taken: bool,
    ) {
        let packet = PacketText(header, message);
        let fate = if taken { "" } else { " (for nobody)" };
        if let Some(gid) = sender {
            let from = address(&gid);
            return self.line(now_ns, format_args!("RX  <- {from} {packet}{fate}"));
        }
        let from = header.source_lid;
        self.line(now_ns, format_args!("RX  <- n{from} {packet}{fate}"));
    }

    /// A queue pair's way from one state to another.
    pub(crate) fn state(&mut self, now_ns: u64, qpn: u32, from: State, to: State) {
        self.line(now_ns, format_args!("QP  qp {qpn:#08x} {from:?} -> {to:?}"));
    }

    /// A completion; `kept` if the queue had room.
    pub(crate) fn cqe(&mut self, now_ns: u64, cq: usize, cqe: &Cqe, kept: bool) {
        let fate = if kept {
            ""
        } else {
            " (LOST: the queue is full)"
        };
        let text = CqeText(cqe);
        self.line(now_ns, format_args!("CQE cq {cq} {text}{fate}"));
    }
}

/// The IP address that a GID stands for.
fn address(gid: &[u8; 16]) -> IpAddr {
    Ipv6Addr::from(*gid).to_canonical()
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.flush();
    }
}

struct SendWqe<'a>(&'a WqeRequest, &'a Gather, Option<Syndrome>);

impl fmt::Display for SendWqe<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SendWqe(request, gather, failed) = self;
        match Opcode::from_raw(request.opcode) {
            Some(opcode) => f.write_str(opcode.name())?,
            None if request.opcode == WindowUpdate::OPCODE => f.write_str("UMR")?,
            None => write!(f, "opcode {:#04x}", request.opcode)?,
        }
        let opcode = Opcode::from_raw(request.opcode);
        if opcode.is_some_and(Opcode::has_imm) {
            let name = if opcode == Some(Opcode::SendInval) {
                "key"
            } else {
                "imm"
            };
            write!(f, " {name} {:#x}", request.imm)?;
        }
        if opcode.is_some_and(Opcode::has_remote) {
            let (addr, rkey) = (request.remote_addr, request.rkey);
            write!(f, " remote {addr:#x} rkey {rkey:#x}")?;
        }
        match opcode {
            Some(Opcode::AtomicCs) => {
                let (compare, swap) = (request.compare, request.operand);
                write!(f, " compare {compare:#x} swap {swap:#x}")?;
            }
            Some(Opcode::AtomicFa) => write!(f, " add {:#x}", request.operand)?,
            _ => {}
        }
        if let Some(to) = &gather.datagram {
            write!(f, " to {}", DatagramAddress(to))?;
        }
        if let Some(window) = &gather.window {
            write!(f, " window {:#x}", window.key)?;
            match window.opens {
                Some(opens) => write!(
                    f,
                    " bind to key {:#x} {:#x}+{} access {:#x}, now {:#x}",
                    opens.region,
                    opens.addr,
                    opens.len_bytes,
                    opens.access,
                    window.new_key()
                )?,
                None => f.write_str(" close")?,
            }
        }
        f.write_str(&gather.describe())?;
        for (set, name) in [
            (request.signaled, " signaled"),
            (request.solicited, " solicited"),
            (request.fence, " fence"),
            (request.ordered, " ordered"),
        ] {
            if set {
                f.write_str(name)?;
            }
        }
        match failed {
            Some(syndrome) => write!(f, ": {syndrome}"),
            None => Ok(()),
        }
    }
}

struct DatagramAddress<'a>(&'a Datagram);

impl fmt::Display for DatagramAddress<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = self.0;
        write!(f, "qp {:#08x} qkey {:#x}", to.qpn, to.qkey)?;
        // On Ethernet the port of the UDP header stands there, and no flag says that there is a GRH.
        if to.has_grh || to.gid == [0; 16] {
            write!(f, " lid {}", to.lid)?;
        }
        if to.gid != [0; 16] {
            write!(f, " gid {}", std::net::Ipv6Addr::from(to.gid))?;
        }
        Ok(())
    }
}

struct PacketText<'a>(&'a Header, Option<&'a str>);

impl fmt::Display for PacketText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PacketText(header, message) = *self;
        let service = match header.service {
            Service::Reliable => "RC",
            Service::Unreliable => "UC",
            Service::Datagram => "UD",
        };
        let (from, to, psn) = (header.source_qpn, header.dst_qpn, header.psn);
        write!(f, "{service} qp {from:#08x} -> {to:#08x} psn {psn:#08x} ")?;
        match header.kind {
            PacketKind::Send => f.write_str("SEND")?,
            PacketKind::Write => f.write_str("RDMA_WRITE")?,
            PacketKind::ReadRequest => f.write_str("RDMA_READ request")?,
            PacketKind::CompareSwap => f.write_str("ATOMIC_CS")?,
            PacketKind::FetchAdd => f.write_str("ATOMIC_FA")?,
            PacketKind::ReadResponse => f.write_str("RDMA_READ response")?,
            PacketKind::AtomicResponse => write!(f, "ATOMIC response {:#x}", header.operand)?,
            PacketKind::Ack => match header.code {
                AckCode::Ack => f.write_str("ACK")?,
                AckCode::ReceiverNotReady(timer) => write!(f, "RNR NAK timer {timer}")?,
                AckCode::SequenceError => f.write_str("NAK sequence error")?,
                AckCode::InvalidRequest => f.write_str("NAK invalid request")?,
                AckCode::AccessError => f.write_str("NAK remote access error")?,
                AckCode::OperationalError => f.write_str("NAK remote operational error")?,
            },
        }
        if matches!(
            header.kind,
            PacketKind::Send | PacketKind::Write | PacketKind::ReadResponse
        ) {
            f.write_str(match (header.has(flag::FIRST), header.has(flag::LAST)) {
                (true, true) => " only",
                (true, false) => " first",
                (false, true) => " last",
                (false, false) => " middle",
            })?;
        }
        let addressed = matches!(
            header.kind,
            PacketKind::ReadRequest | PacketKind::CompareSwap | PacketKind::FetchAdd
        ) || (header.kind == PacketKind::Write && header.has(flag::FIRST));
        if addressed {
            let (addr, rkey) = (header.addr, header.rkey);
            write!(f, " {addr:#x} rkey {rkey:#x} of {} B", header.total_bytes)?;
        }
        if header.payload_bytes > 0 {
            write!(f, " {} B", header.payload_bytes)?;
        }
        if let Some(message) = message {
            write!(f, " {message}")?;
        }
        if header.has(flag::IMMEDIATE) {
            write!(f, " imm {:#x}", header.imm)?;
        }
        if header.has(flag::INVALIDATE) {
            write!(f, " closes key {:#x}", header.imm)?;
        }
        if header.service == Service::Datagram {
            write!(f, " qkey {:#x}", header.qkey)?;
        }
        if header.has(flag::GRH) {
            write!(f, " to gid {}", std::net::Ipv6Addr::from(header.grh_gid()))?;
        }
        if header.has(flag::SOLICITED) {
            f.write_str(" solicited")?;
        }
        Ok(())
    }
}

struct CqeText<'a>(&'a Cqe);

impl fmt::Display for CqeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cqe = self.0;
        let (qpn, index) = (cqe.qpn, cqe.wqe_counter);
        let queue = if matches!(cqe.opcode, CqeOpcode::Req | CqeOpcode::ReqErr) {
            "sq"
        } else {
            "rq"
        };
        write!(f, "qp {qpn:#08x} {queue} {index} ")?;
        match cqe.opcode {
            CqeOpcode::Req | CqeOpcode::ReqErr => match Opcode::from_raw(cqe.send_opcode) {
                Some(opcode) => f.write_str(opcode.name())?,
                None if cqe.send_opcode == WindowUpdate::OPCODE => f.write_str("UMR")?,
                None => write!(f, "opcode {:#04x}", cqe.send_opcode)?,
            },
            CqeOpcode::RespWriteImm => write!(f, "RECV_RDMA_WITH_IMM imm {:#x}", cqe.imm)?,
            CqeOpcode::RespSendImm => write!(f, "RECV imm {:#x}", cqe.imm)?,
            CqeOpcode::RespSendInv => write!(f, "RECV closed key {:#x}", cqe.imm)?,
            _ => f.write_str("RECV")?,
        }
        if cqe.opcode.is_error() {
            return match Syndrome::from_raw(cqe.syndrome) {
                Some(syndrome) => {
                    write!(f, " ERROR {}: {syndrome}", syndrome.status().verbs_name())
                }
                None => write!(f, " ERROR syndrome {:#04x}", cqe.syndrome),
            };
        }
        f.write_str(" SUCCESS")?;
        if let Some(len_bytes) = cqe.transferred() {
            write!(f, " {len_bytes} B")?;
        }
        if cqe.opcode.is_receive() {
            write!(f, " from qp {:#08x} lid {}", cqe.source_qpn, cqe.source_lid)?;
            if cqe.grh != 0 {
                f.write_str(" with GRH")?;
            }
            if cqe.solicited {
                f.write_str(" solicited")?;
            }
        }
        Ok(())
    }
}
