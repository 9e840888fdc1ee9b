//! A target for perftest's unmodified `ib_write_bw -R` (version 6, one queue pair, sizes over 2048): it connects by rdma_cm twice, as perftest does,
//! exposes a region, and checks every byte afterwards.
//!
//! ```sh
//! target/debug/examples/perftest_target 10.9.0.1:18515 verbs:rxe0 65536 &     # on one host
//! ib_write_bw -R -d rxe0 -s 65536 -n 1000 10.9.0.1                            # on another
//! ```
//!
//! perftest writes what the C library's `rand` gives after `srand(time(NULL))`. The second is not known, but the candidates are few.
#![allow(unsafe_code)] // calls the C library's rand

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use doorbell::{
    Access, CmConnection, CmListener, Device, Endpoint, EndpointConfig, QueueKind, Region, Work,
};

const WAIT: Duration = Duration::from_secs(60);
/// What perftest calls `struct pingpong_dest`: integers in network order, the GID at 32.
const DEST: usize = 56;
/// A page on either side of what perftest may write.
const GUARD: u64 = 4096;
const UNTOUCHED: u8 = 0xa5;

/// perftest's channel for its own data: it sends, this side answers.
struct Channel {
    endpoint: Endpoint,
    _connection: CmConnection,
    buffers: Region,
}

impl Channel {
    fn accept(listener: &CmListener, mut endpoint: Endpoint) -> anyhow::Result<Channel> {
        let buffers = Region::alloc(endpoint.domain(), 256, Access::LOCAL_WRITE)?;
        endpoint.post_recv(0, &[buffers.slice(0, 128)?])?;
        let connection = listener.accept(WAIT)?.accept(&mut endpoint, &[], WAIT)?;
        Ok(Channel {
            endpoint,
            _connection: connection,
            buffers,
        })
    }

    /// Takes a message of that many bytes, and answers it.
    fn exchange(&mut self, what: &str, answer: &[u8]) -> anyhow::Result<Vec<u8>> {
        let got = self
            .endpoint
            .wait_cq(QueueKind::Recv, Some(WAIT))
            .with_context(|| format!("waiting for {what}"))?;
        ensure!(
            got.len_bytes as usize == answer.len(),
            "{what}: perftest sent {} bytes, not {}; is it another version?",
            got.len_bytes,
            answer.len()
        );
        let mut message = vec![0; answer.len()];
        self.buffers.read(0, &mut message)?;
        self.endpoint.post_recv(0, &[self.buffers.slice(0, 128)?])?;
        self.buffers.write(128, answer)?;
        let slices = [self.buffers.slice(128, answer.len() as u64)?];
        self.endpoint.post_send(&Work::send(&slices))?;
        self.endpoint
            .wait_cq(QueueKind::Send, Some(WAIT))
            .with_context(|| format!("answering {what}"))?;
        Ok(message)
    }
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what: &str| arguments.next().with_context(|| format!("no {what} given"));
    let (address, device) = (next("ADDRESS:PORT")?, next("device")?);
    let len_bytes: u64 = next("size")?.parse().context("the size")?;
    ensure!(len_bytes > 2048, "shorter ones go to changing places");
    let domain = Device::open(&device)?.protection_domain();
    let config = EndpointConfig::default();
    let endpoint = || Endpoint::new(&domain, &config);
    let target = Region::alloc(
        &domain,
        len_bytes + 2 * GUARD,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    )?;
    target.fill(0, target.len_bytes(), UNTOUCHED)?;
    let listener = CmListener::bind(&address)?;
    let mut writer = endpoint()?;

    let mut channel = Channel::accept(&listener, endpoint()?)?;
    let mut version = [0; 16];
    version[..4].copy_from_slice(b"6.06");
    let theirs = channel.exchange("the version", &version)?;
    let theirs = String::from_utf8_lossy(&theirs)
        .trim_end_matches('\0')
        .to_owned();
    channel.exchange("the page size", &4096u32.to_be_bytes())?;
    channel.exchange("the size of a cache line", &64u32.to_be_bytes())?;
    // `enum ibv_mtu` as text: the larger gives way.
    channel.exchange("the MTU", b"5\0")?;
    channel.exchange("the word to connect", &[0; DEST])?;
    let mut connection = listener.accept(WAIT)?.accept(&mut writer, &[], WAIT)?;
    channel.exchange("the word that it is connected", &[0; DEST])?;
    let remote = target.remote();
    let mut dest = [0; DEST];
    dest[8..12].copy_from_slice(&writer.qpn().to_be_bytes());
    dest[16..20].copy_from_slice(&remote.rkey.to_be_bytes());
    dest[24..32].copy_from_slice(&remote.slice(GUARD, len_bytes)?.addr().to_be_bytes());
    for what in ["its keys", "its keys again", "the word to start"] {
        channel.exchange(what, &dest)?;
    }
    channel.exchange("the end of the writes", &dest)?;
    let reported = channel.exchange("its size", &len_bytes.to_be_bytes())?;
    ensure!(
        reported == len_bytes.to_be_bytes(),
        "it wrote another size than {len_bytes}"
    );
    let iterations = channel.exchange("its iterations", &[0; 8])?;
    for what in ["its peak", "its average", "its rate"] {
        channel.exchange(what, &[0; 8])?;
    }
    channel.exchange("its goodbye", &dest)?;
    connection.wait_disconnected(WAIT)?;

    check(&target, len_bytes)?;
    let iterations = iterations
        .first_chunk()
        .map_or(0, |count| u64::from_be_bytes(*count));
    writeln!(
        std::io::stdout(),
        "perftest {theirs} wrote {iterations} times {len_bytes} bytes; all of them are right, and none beside them changed"
    )?;
    Ok(())
}

/// Checks every byte: the data that perftest wrote, and the untouched guard pages around it.
fn check(target: &Region, len_bytes: u64) -> anyhow::Result<()> {
    ensure!(
        target.is_filled_with(0, GUARD, UNTOUCHED)?
            && target.is_filled_with(GUARD + len_bytes, GUARD, UNTOUCHED)?,
        "bytes beside the target changed"
    );
    let mut written = vec![0; len_bytes as usize];
    target.read(GUARD, &mut written)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() as u32;
    // How many bytes match that second.
    let right = |seed: u32| {
        rand_bytes(seed)
            .zip(&written)
            .take_while(|(expected, got)| expected == *got)
            .count()
    };
    let best = (0..300)
        .map(|ago| right(now.wrapping_sub(ago)))
        .max()
        .unwrap_or(0);
    ensure!(
        best == written.len(),
        "byte {best} is not what perftest wrote"
    );
    Ok(())
}

/// The lowest bytes of the C library's `rand` after `srand(seed)`. One such sequence at a time.
fn rand_bytes(seed: u32) -> impl Iterator<Item = u8> {
    // SAFETY: they take any value; this process has no other thread that asks for random numbers.
    unsafe { libc::srand(seed) };
    std::iter::from_fn(|| {
        // SAFETY: as above.
        Some(unsafe { libc::rand() } as u8)
    })
}
