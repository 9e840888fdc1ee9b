//! One transfer with three copies, with two and with none: how often a processor touches each byte on its way, and what that costs.
//!
//!     cargo run --release --example copies
//!     cargo run --release --example copies -- --bytes 1048576,67108864 --svg copies.svg
//!     cargo run --release --features cuda --example copies -- --memory gpu
//!
//! Rank 0 sends memory of its application to rank 1. The paths with copies send in chunks: while one chunk is on the wire, the next one is copied.

mod support;

use std::path::PathBuf;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Parser, ValueEnum};
use doorbell::{Access, Endpoint, Group, ProtectionDomain, QueueKind, Region, RemoteRegion, Work};
#[cfg(feature = "cuda")]
use doorbell::{CudaContext, DeviceBuffer};
use serde_json::json;

use support::{Line, Plot};

const DEADLINE: Duration = Duration::from_secs(30);
/// Receives of each side.
const RECEIVES: u64 = 16;
/// Bytes of a message: the region of the receiver and the address of its application's memory, or five numbers.
const MESSAGE_BYTES: u64 = 40;

#[derive(Parser)]
struct Options {
    /// Ranks, if no launcher starts them; two of them work
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Lengths of the transfer
    #[arg(long, value_delimiter = ',', default_values_t = [65_536, 1 << 20, 16 << 20])]
    bytes: Vec<u64>,
    /// Transfers of each length and path
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    transfers: u64,
    #[arg(long, default_value_t = 256 << 10, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    chunk_bytes: u64,
    /// Chunks under way at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=RECEIVES / 2))]
    slots: u64,
    /// Where the memory of the applications is
    #[arg(long, value_enum, default_value = "host")]
    memory: MemoryPlace,
    /// Sends the bytes of this file, in place of random ones of each length
    #[arg(long)]
    input: Option<PathBuf>,
    /// Writes the copies as JSON, and next to it what the last transfer of each path has brought, with the path as extension
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draws the time of a transfer over its length
    #[arg(long)]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MemoryPlace {
    Host,
    /// The first GPU
    #[cfg(feature = "cuda")]
    Gpu,
}

/// The memory of an application.
enum ApplicationMemory {
    Host(Vec<u8>),
    #[cfg(feature = "cuda")]
    Gpu(DeviceBuffer),
}

impl ApplicationMemory {
    fn new(place: MemoryPlace, bytes: u64) -> Result<ApplicationMemory> {
        Ok(match place {
            MemoryPlace::Host => ApplicationMemory::Host(vec![0; bytes as usize]),
            #[cfg(feature = "cuda")]
            MemoryPlace::Gpu => ApplicationMemory::Gpu(CudaContext::primary(0)?.alloc(bytes)?),
        })
    }

    fn len_bytes(&self) -> u64 {
        match self {
            ApplicationMemory::Host(memory) => memory.len() as u64,
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => memory.len_bytes(),
        }
    }

    fn address(&self) -> u64 {
        match self {
            ApplicationMemory::Host(memory) => memory.as_ptr().addr() as u64,
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => memory.ptr(),
        }
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> doorbell::Result<()> {
        match self {
            ApplicationMemory::Host(memory) => {
                memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => memory.copy_from_host(at, bytes),
        }
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> doorbell::Result<()> {
        match self {
            ApplicationMemory::Host(memory) => {
                bytes.copy_from_slice(&memory[at as usize..][..bytes.len()]);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => memory.copy_to_host(at, bytes),
        }
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len_bytes() as usize];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies a piece into the buffer that the device has registered, at once.
    #[allow(unsafe_code)] // the GPU copies to where the buffer lies
    fn copy_into(&self, at: u64, buffer: &Region, to: u64, len: usize) -> doorbell::Result<()> {
        match self {
            ApplicationMemory::Host(memory) => buffer.write(to, &memory[at as usize..][..len]),
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => {
                // SAFETY: this slot of the buffer is free: no transfer reads it, and nothing else has a reference to it.
                memory.copy_to_host(at, unsafe { buffer.values_mut(to, len)? })
            }
        }
    }

    /// Copies a piece out of the buffer that the device has registered, at once.
    #[allow(unsafe_code)] // the GPU copies from where the buffer lies
    fn copy_out_of(
        &mut self,
        at: u64,
        buffer: &Region,
        from: u64,
        len: usize,
    ) -> doorbell::Result<()> {
        match self {
            ApplicationMemory::Host(memory) => buffer.read(from, &mut memory[at as usize..][..len]),
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => {
                // SAFETY: the chunk has come, and the sender writes this slot again when it hears that it is free.
                memory.copy_from_host(at, unsafe { buffer.values(from, len)? })
            }
        }
    }

    /// Registers the memory, for as long as the result is there.
    #[allow(unsafe_code)] // memory that this library does not own
    fn register(&mut self, domain: &ProtectionDomain) -> Result<Registration> {
        let region = match self {
            ApplicationMemory::Host(memory) => {
                let start = NonNull::from(&mut memory[..]).cast();
                // SAFETY: the caller drops the registration before the memory, and its drop deregisters: no request accesses the memory any more, not even one that has no completion.
                // It does not use the memory while a transfer does.
                unsafe { Region::register(domain, start, memory.len() as u64, Access::ALL)? }
            }
            #[cfg(feature = "cuda")]
            ApplicationMemory::Gpu(memory) => Region::register_device(domain, memory, Access::ALL)?,
        };
        Ok(Registration(region))
    }
}

/// A registration of the memory of an application. Requests that have no completion keep a region after its last handle, so the drop of this deregisters it: also where a transfer has
/// failed and the peer may still write.
struct Registration(Region);

impl Drop for Registration {
    fn drop(&mut self) {
        // Else the peer may still write the memory, which goes next.
        self.0.deregister().expect("the memory is deregistered");
    }
}

/// How the memory of the applications meets the devices.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// The runtime of the sender has a staging buffer of its own, and the device another one, which it has registered.
    Staged,
    /// Runtime and device share one registered buffer, at each side.
    Shared,
    /// The memory of the applications is registered for each transfer.
    Registered,
    /// The memory of the applications was registered before.
    Direct,
}

impl Path {
    const ALL: [Path; 4] = [Path::Staged, Path::Shared, Path::Registered, Path::Direct];

    fn name(self) -> &'static str {
        match self {
            Path::Staged => "staged",
            Path::Shared => "shared",
            Path::Registered => "registered",
            Path::Direct => "direct",
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    support::run(options.ranks, |group| rank(&options, group))
}

fn rank(options: &Options, mut group: Group) -> Result<()> {
    ensure!(group.size() >= 2, "a transfer has two ranks");
    if group.rank() < 2 {
        let measured = transfers(options, &mut group);
        measured.map_err(|error| match error.downcast::<doorbell::Error>() {
            // An endpoint only reports that it failed; the group has the cause.
            Ok(error) => anyhow!(group.cause_of(error)),
            Err(error) => error,
        })?;
    }
    // Further ranks have nothing to do.
    support::wait_for_all(&group)?;
    group.leave()?;
    Ok(())
}

/// Copies that the program has made, and the time that they took.
#[derive(Default, Clone, Copy)]
struct Copies {
    count: u64,
    bytes: u64,
    time: Duration,
}

impl Copies {
    fn add(&mut self, bytes: usize, copy: impl FnOnce() -> doorbell::Result<()>) -> Result<()> {
        let started = Instant::now();
        copy()?;
        self.count += 1;
        self.bytes += bytes as u64;
        self.time += started.elapsed();
        Ok(())
    }
}

/// What a side has besides the memory of its application.
struct Side<'a> {
    endpoint: &'a mut Endpoint,
    /// The registered buffer, of so many chunks.
    buffer: Region,
    /// The buffer of the runtime, not registered.
    staging: Vec<u8>,
    control: Region,
    chunk_bytes: u64,
    slots: u64,
    copies: Copies,
    /// Chunks that were copied into the buffer while another one was on the wire.
    overlapped: u64,
    /// Of the memory of the application, and the last one.
    registrations: u64,
    last_registration: Option<Region>,
    /// The most requests without a completion when a slot of the buffer was written again, and when memory of the application was deregistered.
    unfinished_at_reuse: u64,
    unfinished_at_deregistration: u64,
    /// Bytes that WRITEs had from the memory of this application, and brought to the memory of the peer's.
    direct_bytes: u64,
    receives: u64,
    /// Work requests that were posted and have no completion yet.
    unfinished: u64,
}

impl<'a> Side<'a> {
    fn new(options: &Options, group: &'a mut Group) -> Result<Side<'a>> {
        let domain = group.domain().clone();
        let peer = 1 - group.rank();
        let mut side = Side {
            endpoint: group.endpoint(peer)?,
            buffer: Region::alloc(&domain, options.slots * options.chunk_bytes, Access::ALL)?,
            staging: vec![0; options.chunk_bytes as usize],
            control: Region::alloc(&domain, RECEIVES * MESSAGE_BYTES, Access::LOCAL_WRITE)?,
            chunk_bytes: options.chunk_bytes,
            slots: options.slots,
            copies: Copies::default(),
            overlapped: 0,
            registrations: 0,
            last_registration: None,
            unfinished_at_reuse: 0,
            unfinished_at_deregistration: 0,
            direct_bytes: 0,
            receives: 0,
            unfinished: 0,
        };
        for _ in 0..RECEIVES {
            side.post_receive()?;
        }
        Ok(side)
    }

    fn register(
        &mut self,
        memory: &mut ApplicationMemory,
        domain: &ProtectionDomain,
    ) -> Result<Registration> {
        let registration = memory.register(domain)?;
        self.registrations += 1;
        self.last_registration = Some(registration.0.clone());
        Ok(registration)
    }

    fn deregister(&mut self, registration: Registration) {
        let unfinished = self.unfinished_at_deregistration.max(self.unfinished);
        self.unfinished_at_deregistration = unfinished;
        drop(registration);
    }

    fn post_receive(&mut self) -> Result<()> {
        let at = self.receives % RECEIVES * MESSAGE_BYTES;
        self.endpoint
            .post_recv(at, &[self.control.slice(at, MESSAGE_BYTES)?])?;
        self.receives += 1;
        Ok(())
    }

    /// Waits for the next message, and returns its bytes.
    fn receive(&mut self) -> Result<[u8; MESSAGE_BYTES as usize]> {
        let completion = self.endpoint.wait_cq(QueueKind::Recv, Some(DEADLINE))?;
        let mut bytes = [0; MESSAGE_BYTES as usize];
        self.control.read(completion.wr_id, &mut bytes)?;
        self.post_receive()?;
        Ok(bytes)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.endpoint.post_send(&Work::send_inline(bytes))?;
        self.unfinished += 1;
        self.collect()
    }

    fn collect(&mut self) -> Result<()> {
        while self.endpoint.poll_cq(QueueKind::Send)?.is_some() {
            self.unfinished -= 1;
        }
        Ok(())
    }

    /// Waits until no more than so many work requests have no completion: before that the device may read their memory again, even if the peer has what it needs.
    fn wait_finished(&mut self, most: u64) -> Result<()> {
        while self.unfinished > most {
            self.endpoint.wait_cq(QueueKind::Send, Some(DEADLINE))?;
            self.unfinished -= 1;
        }
        Ok(())
    }

    fn slot(&self, chunk: u64) -> u64 {
        chunk % self.slots * self.chunk_bytes
    }

    /// Posts a WRITE, of bytes of a registration or else of the buffer, and compares its addresses with those of the applications' memory: that of this rank, and that of the peer at
    /// `theirs`.
    fn write(
        &mut self,
        (registered, at): (Option<&Region>, u64),
        (remote, len): (RemoteRegion, u64),
        imm: u32,
        (own, theirs): (&ApplicationMemory, u64),
    ) -> Result<()> {
        let region = registered.unwrap_or(&self.buffer);
        let slices = [region.slice(at, len)?];
        let to = remote.slice(at, len)?;
        let from = region.remote().addr + at;
        self.endpoint
            .post_send(&Work::write(&slices, to).imm(imm))?;
        self.unfinished += 1;
        let is_within = |address: u64, memory: u64| {
            (memory..=memory + own.len_bytes() - len).contains(&address)
        };
        if is_within(from, own.address()) && is_within(to.addr(), theirs) {
            self.direct_bytes += len;
        }
        Ok(())
    }

    /// Sends the memory. `registered` is its registration, if the path needs one.
    fn send_all(
        &mut self,
        path: Path,
        from: &ApplicationMemory,
        registered: Option<&Region>,
    ) -> Result<()> {
        let message = self.receive()?;
        let remote = RemoteRegion::from_bytes(message[..RemoteRegion::BYTES].try_into()?);
        let (_, theirs) = message.split_at(RemoteRegion::BYTES);
        let theirs = theirs.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let applications = (from, theirs.context("a message that is too short")?);
        let bytes = from.len_bytes();
        if registered.is_some() {
            self.write((registered, 0), (remote, bytes), 0, applications)?;
            self.receive()?;
            // The caller may deregister the memory.
            return self.wait_finished(0);
        }
        let count = bytes.div_ceil(self.chunk_bytes);
        for number in 0..count {
            if number >= self.slots {
                // The slot is free when the receiver has taken what it had, and this side's device has finished its WRITE.
                self.receive()?;
                self.wait_finished(self.slots - 1)?;
            }
            let len = self.chunk_bytes.min(bytes - number * self.chunk_bytes);
            self.copy_in(path, number, from, len as usize)?;
            let at = self.slot(number);
            self.write((None, at), (remote, len), number as u32, applications)?;
            self.collect()?;
        }
        for _ in 0..count.min(self.slots) {
            self.receive()?;
        }
        self.wait_finished(0)
    }

    fn copy_in(
        &mut self,
        path: Path,
        number: u64,
        from: &ApplicationMemory,
        len: usize,
    ) -> Result<()> {
        self.overlapped += u64::from(self.unfinished > 0);
        self.unfinished_at_reuse = self.unfinished_at_reuse.max(self.unfinished);
        let (slot, at) = (self.slot(number), number * self.chunk_bytes);
        let buffer = &self.buffer;
        if path == Path::Shared {
            return self
                .copies
                .add(len, || from.copy_into(at, buffer, slot, len));
        }
        let staging = &mut self.staging[..len];
        self.copies.add(len, || from.read(at, staging))?;
        self.copies.add(len, || buffer.write(slot, staging))
    }

    /// Receives into the memory. `registered` is its registration, if the path needs one.
    fn receive_all(
        &mut self,
        to: &mut ApplicationMemory,
        registered: Option<&Region>,
    ) -> Result<()> {
        let region = registered.unwrap_or(&self.buffer).remote();
        let application = to.address().to_le_bytes();
        self.send(&[&region.to_bytes()[..], &application].concat())?;
        if registered.is_some() {
            self.receive()?;
            return self.send(&region.to_bytes());
        }
        let bytes = to.len_bytes();
        for number in 0..bytes.div_ceil(self.chunk_bytes) {
            self.receive()?;
            let (slot, at) = (self.slot(number), number * self.chunk_bytes);
            let len = self.chunk_bytes.min(bytes - at) as usize;
            let buffer = &self.buffer;
            self.copies
                .add(len, || to.copy_out_of(at, buffer, slot, len))?;
            self.send(&region.to_bytes())?;
        }
        Ok(())
    }
}

/// What a path took for one length.
struct Measured {
    path: Path,
    bytes: u64,
    median: Duration,
    cpu: Duration,
    copies: u64,
    copied_bytes: u64,
    copy_time: Duration,
    registrations: u64,
    overlapped: u64,
    direct_bytes: u64,
    unfinished_at_reuse: u64,
    unfinished_at_deregistration: u64,
}

fn transfers(options: &Options, group: &mut Group) -> Result<()> {
    let rank = group.rank();
    let domain = group.domain().clone();
    let input = options.input.as_ref().map(std::fs::read).transpose()?;
    let lengths = match &input {
        Some(input) => vec![input.len() as u64],
        None => options.bytes.clone(),
    };
    ensure!(
        lengths.iter().all(|bytes| (1..1 << 31).contains(bytes)),
        "a transfer has 1 byte to 2 GiB"
    );
    let mut side = Side::new(options, group)?;
    let mut all = Vec::new();
    if rank == 0 {
        println!(
            "    bytes  path        copies of each byte  calls  median us      MB/s  copying us  CPU us  overlapped"
        );
    }
    for bytes in lengths {
        // Of the application: the system may move it, no device knows it.
        let mut memory = ApplicationMemory::new(options.memory, bytes)?;
        let expected = input.clone().unwrap_or_else(|| random(bytes));
        for path in Path::ALL {
            match rank {
                0 => memory.write(0, &expected)?,
                _ => memory.write(0, &vec![0; bytes as usize])?,
            }
            let measured = measure(options, &mut side, &domain, rank, path, &mut memory);
            // An error gives the memory back.
            let last = side.last_registration.as_ref();
            ensure!(
                last.is_none_or(|region| !region.is_registered()),
                "the memory of the application is still registered behind its last transfer"
            );
            let measured = measured?;
            let found = memory.bytes()?;
            ensure!(
                found == expected,
                "{} by {}: the bytes that came are others",
                path.name(),
                bytes
            );
            if let Some(out) = options.out.as_ref().filter(|_| rank == 1) {
                std::fs::write(out.with_extension(path.name()), &found)?;
            }
            if rank == 0 {
                measured.print(options);
                all.push(measured);
            }
        }
    }
    if rank == 0 {
        finish(options, &all)?;
    }
    Ok(())
}

/// Makes the transfers of one path, and returns what both sides took.
fn measure(
    options: &Options,
    side: &mut Side<'_>,
    domain: &ProtectionDomain,
    rank: u32,
    path: Path,
    memory: &mut ApplicationMemory,
) -> Result<Measured> {
    side.copies = Copies::default();
    (side.overlapped, side.registrations, side.direct_bytes) = (0, 0, 0);
    (side.unfinished_at_reuse, side.unfinished_at_deregistration) = (0, 0);
    let before = match path {
        Path::Direct => Some(side.register(memory, domain)?),
        _ => None,
    };
    let bytes = memory.len_bytes();
    let cpu = support::process_time()?;
    let mut times = Vec::new();
    for _ in 0..options.transfers {
        let started = Instant::now();
        let own = match path {
            Path::Registered => Some(side.register(memory, domain)?),
            _ => None,
        };
        let registered = before.as_ref().or(own.as_ref()).map(|own| &own.0);
        if rank == 0 {
            side.send_all(path, memory, registered)?;
        } else {
            side.receive_all(memory, registered)?;
        }
        if let Some(own) = own {
            side.deregister(own);
        }
        times.push(started.elapsed());
    }
    if let Some(before) = before {
        side.deregister(before);
    }
    let cpu = support::process_time()? - cpu;
    times.sort_unstable();
    let Copies {
        count,
        bytes: copied,
        time,
    } = side.copies;
    let [time, cpu] = [time, cpu].map(|time| time.as_nanos() as u64);
    let mut own = [count, copied, time, cpu, side.registrations];
    if rank == 0 {
        // What the receiver has counted comes with its last message.
        let theirs = side.receive()?;
        for (own, theirs) in own.iter_mut().zip(theirs.chunks_exact(8)) {
            *own += u64::from_le_bytes(theirs.try_into()?);
        }
    } else {
        let message: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        side.send(&message)?;
    }
    let each = |nanoseconds: u64| Duration::from_nanos(nanoseconds / options.transfers);
    let median = times[times.len() / 2];
    let [copies, copied_bytes, copy_time, cpu, registrations] = own;
    Ok(Measured {
        path,
        bytes,
        median,
        cpu: each(cpu),
        copies,
        copied_bytes,
        copy_time: each(copy_time),
        registrations,
        overlapped: side.overlapped,
        direct_bytes: side.direct_bytes,
        unfinished_at_reuse: side.unfinished_at_reuse,
        unfinished_at_deregistration: side.unfinished_at_deregistration,
    })
}

impl Measured {
    /// How often each byte was copied.
    fn copies_of_each_byte(&self, options: &Options) -> f64 {
        self.copied_bytes as f64 / (self.bytes * options.transfers) as f64
    }

    fn print(&self, options: &Options) {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "{:9}  {:10} {:20.2} {:6} {:10.1} {:9.0} {:11.1} {:7.1} {:11}",
            self.bytes,
            self.path.name(),
            self.copies_of_each_byte(options),
            self.copies / options.transfers,
            us(self.median),
            self.bytes as f64 / us(self.median),
            us(self.copy_time),
            us(self.cpu),
            self.overlapped
        );
    }
}

/// Words that repeat nowhere in a transfer.
fn random(bytes: u64) -> Vec<u8> {
    let words = (1..=bytes.div_ceil(8)).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut all: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    all.truncate(bytes as usize);
    all
}

fn finish(options: &Options, all: &[Measured]) -> Result<()> {
    if let Some(file) = &options.out {
        let row = |measured: &Measured| {
            json!({
                "path": measured.path.name(), "bytes": measured.bytes, "transfers": options.transfers,
                "copies": measured.copies, "copied_bytes": measured.copied_bytes,
                "registrations": measured.registrations, "direct_bytes": measured.direct_bytes,
                "unfinished_at_reuse": measured.unfinished_at_reuse, "unfinished_at_deregistration": measured.unfinished_at_deregistration,
            })
        };
        let rows: Vec<_> = all.iter().map(row).collect();
        std::fs::write(file, json!(rows).to_string())?;
    }
    if let Some(file) = &options.svg {
        let line = |path: Path| {
            let own = all.iter().filter(|measured| measured.path == path);
            let points =
                own.map(|measured| (measured.bytes as f64, measured.median.as_secs_f64() * 1e6));
            Line {
                name: path.name().into(),
                points: points.collect(),
            }
        };
        let lines = Path::ALL.map(line).into();
        Plot {
            title: "One transfer",
            x: "bytes",
            y: "median us",
            lines,
        }
        .write(file)?;
    }
    Ok(())
}
