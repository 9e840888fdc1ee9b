//! A capture of what a device sends, as a file of libpcap: Ethernet frames with their IP and UDP headers, which any analyser reads.
//!
//! Of a device whose wire is UDP it has what the sockets send and receive. Of others it has the frames that a RoCE v2 card would send. Records are
//! written whole, at the end of a turn, and appended: devices of several processes may share a file.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::device::gather::GatherSource;
use crate::device::packet::{MAX_PAYLOAD_BYTES, Packet};
use crate::device::qp::DeviceParts;
use crate::device::roce::{
    MAX_FRAME_BYTES, MAX_HEADER_BYTES, RoutedFields, UdpFlow, frame_header, seal_frame,
    write_headers,
};
use crate::device::wire::Destination;
use crate::{Error, Result};

/// Times in nanoseconds, little-endian.
const MAGIC: u32 = 0xa1b2_3c4d;
const HEADER_BYTES: usize = 24;
const ETHERNET: u32 = 1;
const LONGEST_BYTES: u32 = 65535;
/// How long a file without a header is another process that writes it.
const HEADER_TIMEOUT: Duration = Duration::from_millis(100);
/// The ports that RoCE v2 sends from begin here.
const FIRST_SOURCE_PORT: u16 = 0xc000;

/// A file that takes frames.
#[derive(Debug)]
pub(crate) struct FrameCapture {
    file: File,
    records: Vec<u8>,
    /// The device's clock at 0, as time since 1970.
    epoch_ns: u64,
}

fn file_header() -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
    // Version 2.4.
    bytes[4..8].copy_from_slice(&[2, 0, 4, 0]);
    bytes[16..20].copy_from_slice(&LONGEST_BYTES.to_le_bytes());
    bytes[20..].copy_from_slice(&ETHERNET.to_le_bytes());
    bytes
}

/// Opens the file for appending, and writes its header if it is new. `Ok(None)` if it is a file of another format.
fn open(path: &Path) -> io::Result<Option<File>> {
    match File::options().append(true).create_new(true).open(path) {
        Ok(mut file) => {
            file.write_all(&file_header())?;
            return Ok(Some(file));
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let file = File::options().append(true).open(path)?;
    let mut waited = Duration::ZERO;
    while file.metadata()?.len() < HEADER_BYTES as u64 && waited < HEADER_TIMEOUT {
        let pause = Duration::from_millis(5);
        std::thread::sleep(pause);
        waited += pause;
    }
    let mut found = [0; HEADER_BYTES];
    let read = File::open(path)?.read_exact(&mut found);
    Ok((read.is_ok() && found == file_header()).then_some(file))
}

impl FrameCapture {
    /// # Errors
    /// [`Error::System`] if the file cannot be opened; [`Error::Malformed`] if it exists and is no capture of this format.
    pub(crate) fn open(path: &Path) -> Result<FrameCapture> {
        let file = open(path).map_err(|error| Error::System {
            operation: "open of the capture",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })?;
        let file = file.ok_or_else(|| Error::Malformed {
            what: "capture",
            reason: format!(
                "{} exists and is no file of libpcap with nanoseconds and Ethernet frames",
                path.display()
            ),
        })?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(FrameCapture {
            file,
            records: Vec::new(),
            epoch_ns: now.map_or(0, |now| now.as_nanos() as u64),
        })
    }

    /// Records a frame, given from the BTH to the CRC.
    pub(crate) fn record(
        &mut self,
        now_ns: u64,
        flow: &UdpFlow,
        routed: RoutedFields,
        transport: &[u8],
    ) {
        let headers = frame_header(flow, routed, transport);
        let len_bytes = (headers.len() + transport.len()) as u32;
        let ns = self.epoch_ns.wrapping_add(now_ns);
        let (seconds, part_ns) = (ns / 1_000_000_000, ns % 1_000_000_000);
        for field in [seconds as u32, part_ns as u32, len_bytes, len_bytes] {
            self.records.extend_from_slice(&field.to_le_bytes());
        }
        self.records.extend_from_slice(&headers);
        self.records.extend_from_slice(transport);
    }

    /// Writes what has come together.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if !self.records.is_empty() {
            // A capture that cannot be written, on a full disk for example, is no reason to stop.
            let _ = self.file.write_all(&self.records);
            self.records.clear();
        }
    }
}

impl Drop for FrameCapture {
    fn drop(&mut self) {
        self.flush();
    }
}

impl DeviceParts {
    /// Records the frame that a card would send for a packet that stays on this host.
    #[cold]
    pub(crate) fn capture_local(&mut self, to: Destination, packet: &Packet) {
        let Some((from, to)) = self.ends_of(to) else {
            return;
        };
        let source = GatherSource::of(&packet.payload, packet.header.payload_bytes);
        let mut frame = [0; MAX_FRAME_BYTES];
        let headers = frame.first_chunk_mut::<MAX_HEADER_BYTES>();
        let at = headers.and_then(|headers| write_headers(&packet.header, headers));
        let Some(at) = at.filter(|_| source.len_bytes() as usize <= MAX_PAYLOAD_BYTES) else {
            return;
        };
        let Ok(payload) = source.take(&self.keys, &mut self.copies) else {
            return;
        };
        let end = at + payload.len();
        frame[at..end].copy_from_slice(&payload);
        let spread = packet.header.source_qpn ^ packet.header.dst_qpn;
        let flow = UdpFlow {
            from,
            to,
            source_port: FIRST_SOURCE_PORT | spread as u16,
            identification: 0,
        };
        let len_bytes = seal_frame(&flow, &mut frame, end);
        let now_ns = self.now_ns;
        if let Some(capture) = &mut self.capture {
            capture.record(now_ns, &flow, RoutedFields::SENT, &frame[..len_bytes]);
        }
    }
}
