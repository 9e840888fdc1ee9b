//! `rping` as this library does it: both of its roles, against rdma-core's own `rping` or against itself. The client advertises a buffer, the server
//! reads it, and writes it back to an address of the client; all of that is queued on a stream.
//!
//! ```sh
//! rping -s -a 10.9.0.1 -C 100 -V &                                       # rdma-core's, on one host
//! target/debug/examples/rping -c -a 10.9.0.1 -C 100 -d verbs:rxe0        # this one, on another
//! ```
//!
//! A message is 16 bytes: address (8), key (4), length (4), in network order. What the server sends has no meaning but to go on.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use doorbell::{
    Access, CmConnection, CmListener, Device, Endpoint, EndpointConfig, Executor, HostStream,
    ProtectionDomain, QueueKind, Region, RemoteRegion, RemoteSlice, Work,
};

/// Time limit of each wait, except that of a server for its client.
const WAIT: Duration = Duration::from_secs(30);
const MESSAGE: u64 = 16;

#[derive(Parser)]
struct Arguments {
    /// Serves one client
    #[arg(short, long, conflicts_with = "client")]
    server: bool,
    /// Connects to a server
    #[arg(short, long, required_unless_present = "server")]
    client: bool,
    /// The server's IP address
    #[arg(short, long, default_value = "0.0.0.0")]
    address: String,
    #[arg(short, long, default_value_t = 7174)]
    port: u16,
    /// Rounds of a client
    #[arg(short = 'C', long, default_value_t = 10)]
    count: u32,
    /// Bytes of a client's buffer, 32 to 65535
    #[arg(short = 'S', long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(32..65536))]
    size: u32,
    /// The device, if not the first verbs device
    #[arg(short, long, default_value = "verbs")]
    device: String,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let domain = Device::open(&arguments.device)?.protection_domain();
    let address = match arguments.address.contains(':') {
        true => format!("[{}]:{}", arguments.address, arguments.port),
        false => format!("{}:{}", arguments.address, arguments.port),
    };
    let rounds = if arguments.server {
        serve(&domain, &address)?
    } else {
        ping(&domain, &address, arguments.count, arguments.size.into())?
    };
    let role = if arguments.server { "server" } else { "client" };
    writeln!(std::io::stdout(), "{role}: {rounds} rounds")?;
    Ok(())
}

/// One side: its queue pair, its messages, its data.
struct Pinger {
    endpoint: Endpoint,
    stream: HostStream,
    sent: Region,
    received: Region,
    data: Region,
}

impl Pinger {
    fn new(domain: &ProtectionDomain, data_bytes: u64) -> doorbell::Result<Pinger> {
        let data = Region::alloc(domain, data_bytes, Access::ALL)?;
        let mut pinger = Pinger {
            endpoint: Endpoint::new(domain, &EndpointConfig::default())?,
            stream: HostStream::new("rping")?,
            sent: Region::alloc(domain, MESSAGE, Access::LOCAL_READ)?,
            received: Region::alloc(domain, MESSAGE, Access::LOCAL_WRITE)?,
            data,
        };
        // Before there is a connection: the peer's first message may come with it.
        pinger.expect()?;
        Ok(pinger)
    }

    fn expect(&mut self) -> doorbell::Result<()> {
        self.endpoint
            .post_recv(0, &[self.received.slice(0, MESSAGE)?])
            .map(drop)
    }

    /// The next message, or none if the peer disconnects instead.
    fn receive(&mut self, connection: &mut CmConnection) -> anyhow::Result<Option<RemoteRegion>> {
        let started = std::time::Instant::now();
        loop {
            let gone = connection.check().is_err();
            match self.endpoint.poll_cq(QueueKind::Recv) {
                Ok(Some(completion)) => {
                    ensure!(
                        u64::from(completion.len_bytes) == MESSAGE,
                        "a message of {} bytes",
                        completion.len_bytes
                    );
                    break;
                }
                _ if gone => return Ok(None),
                Ok(None) => ensure!(started.elapsed() < WAIT, "no message within {WAIT:?}"),
                Err(error) => return Err(error.into()),
            }
        }
        let mut message = [0; MESSAGE as usize];
        self.received.read(0, &mut message)?;
        self.expect()?;
        let [a, b, c, d, e, f, g, h, rkey @ .., i, j, k, l] = message;
        Ok(Some(RemoteRegion {
            addr: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            rkey: u32::from_be_bytes(rkey),
            len_bytes: u32::from_be_bytes([i, j, k, l]).into(),
        }))
    }

    /// Queues a message; the stream waits until it has gone.
    fn send(&mut self, shown: RemoteRegion) -> doorbell::Result<()> {
        let mut message = [0; MESSAGE as usize];
        message[..8].copy_from_slice(&shown.addr.to_be_bytes());
        message[8..12].copy_from_slice(&shown.rkey.to_be_bytes());
        message[12..].copy_from_slice(&(shown.len_bytes as u32).to_be_bytes());
        self.sent.write(0, &message)?;
        let slices = [self.sent.slice(0, MESSAGE)?];
        self.endpoint
            .stream_queue_send(&self.stream, &Work::send(&slices))?;
        self.endpoint
            .stream_wait_cq(&self.stream, QueueKind::Send)?;
        Ok(())
    }

    fn settle(&self) -> anyhow::Result<()> {
        self.stream.synchronize(Some(WAIT))?;
        match self.endpoint.failure() {
            Some(failure) => bail!("{failure}"),
            None => Ok(()),
        }
    }
}

fn serve(domain: &ProtectionDomain, address: &str) -> anyhow::Result<u32> {
    let listener = CmListener::bind(address).with_context(|| format!("listening at {address}"))?;
    let mut server = Pinger::new(domain, 1 << 16)?;
    let request = listener.accept(WAIT)?;
    let mut connection = request.accept(&mut server.endpoint, &[], WAIT)?;
    // rping's client connects for one side of its tests, and leaves.
    for round in 0.. {
        let Some(source) = server.receive(&mut connection)? else {
            return Ok(round);
        };
        let len_bytes = source.len_bytes;
        let slices = [server.data.slice(0, len_bytes)?];
        let read = Work::read(&slices, RemoteSlice::at(source.addr, source.rkey));
        server.endpoint.stream_queue_send(&server.stream, &read)?;
        server
            .endpoint
            .stream_wait_cq(&server.stream, QueueKind::Send)?;
        // "Go on", behind the read.
        server.send(source)?;
        server.settle()?;
        let Some(sink) = server.receive(&mut connection)? else {
            bail!("the client left in the middle of round {round}");
        };
        let slices = [server.data.slice(0, len_bytes.min(sink.len_bytes))?];
        let write = Work::write(&slices, RemoteSlice::at(sink.addr, sink.rkey));
        server.endpoint.stream_queue_send(&server.stream, &write)?;
        server
            .endpoint
            .stream_wait_cq(&server.stream, QueueKind::Send)?;
        server.send(sink)?;
        server.settle()?;
    }
    Ok(0)
}

fn ping(
    domain: &ProtectionDomain,
    address: &str,
    rounds: u32,
    len_bytes: u64,
) -> anyhow::Result<u32> {
    // What is shown first, and where it is to come back.
    let mut client = Pinger::new(domain, 2 * len_bytes)?;
    let mut connection = CmConnection::connect(&mut client.endpoint, address, &[], WAIT)?;
    let shown = client.data.remote();
    let start = RemoteRegion { len_bytes, ..shown };
    let back = RemoteRegion {
        addr: shown.slice(len_bytes, len_bytes)?.addr(),
        ..start
    };
    for round in 0..rounds {
        let text = text(round, len_bytes as usize);
        client.data.write(0, &text)?;
        client.data.fill(len_bytes, len_bytes, 0xee)?;
        for advertised in [start, back] {
            client.send(advertised)?;
            client.settle()?;
            ensure!(
                client.receive(&mut connection)?.is_some(),
                "the server left in round {round}"
            );
        }
        let mut echo = vec![0; len_bytes as usize];
        client.data.read(len_bytes, &mut echo)?;
        let wrong = (0..echo.len()).find(|&at| echo[at] != text[at]);
        ensure!(
            wrong.is_none(),
            "round {round}: byte {wrong:?} came back wrong"
        );
    }
    // Only this tells rping's server that the test has ended.
    connection.disconnect(WAIT)?;
    Ok(rounds)
}

/// A string, as rping's server prints it and counts its length, that is another one in each round.
fn text(round: u32, len_bytes: usize) -> Vec<u8> {
    let mut text = format!("doorbell-ping-{round}: ").into_bytes();
    let letters = (0..).map(|at| b'A' + ((at + round as usize) % 58) as u8);
    text.extend(letters.take(len_bytes));
    text.truncate(len_bytes - 1);
    text.push(0);
    text
}
