//! The meeting of the two processes: the plan goes over, each row begins and ends together, and a process that goes is noticed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use doorbell::{Channel, Listener, RemoteRegion};
use serde::{Deserialize, Serialize};

use super::options::Plan;
use super::peer::Peer;

/// Changes with what the two processes say to each other.
const PROTOCOL: u32 = 1;
/// For waits that end when the peer goes.
const EVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long a process that noticed the end of its peer waits for the reason.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What the process that measures says first.
#[derive(Serialize, Deserialize)]
struct Handshake {
    protocol: u32,
    /// Names this meeting: the second connection repeats it.
    token: u64,
    plan: Plan,
}

/// Two connections with the other process. Messages go over one; the other one carries nothing, and a thread that reads it
/// learns at once when the peer is gone, whatever the rest of this process waits for.
pub struct Rendezvous {
    control: Channel,
    disconnected: Arc<AtomicBool>,
    timeout: Duration,
}

impl Rendezvous {
    /// Goes to the process that listens, and tells it the plan.
    ///
    /// # Errors
    /// Nobody is there within the plan's timeout; it refuses the plan.
    pub fn connect(address: &str, plan: &Plan) -> Result<Rendezvous> {
        let timeout = plan.timeout();
        let mut control = Channel::connect(address, timeout)?;
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let token = clock.as_nanos() as u64 ^ u64::from(std::process::id()) << 32;
        let plan = plan.clone();
        let handshake = Handshake {
            protocol: PROTOCOL,
            token,
            plan,
        };
        control.send(&serde_json::to_vec(&handshake)?, timeout)?;
        fine(&control.receive(timeout)?)?;
        let mut line = Channel::connect(address, timeout)?;
        line.send(&token.to_le_bytes(), timeout)?;
        Rendezvous::new(control, line, timeout)
    }

    /// Waits for the process that measures, and takes its plan.
    ///
    /// # Errors
    /// What comes is not such a process, or its plan is beyond the limits.
    pub fn accept(listener: &Listener, timeout: Duration) -> Result<(Rendezvous, Plan)> {
        let mut control = listener.accept(EVER)?;
        let plan = read_handshake(&control.receive(timeout)?);
        let words = plan.as_ref().err().map(|error| format!("{error:#}"));
        control.send(words.unwrap_or_default().as_bytes(), timeout)?;
        let Handshake { token, plan, .. } = plan?;
        let mut line = listener.accept(timeout)?;
        ensure!(
            line.receive(timeout)? == token.to_le_bytes(),
            "two processes came to measure at the same time"
        );
        let timeout = plan.timeout();
        Ok((Rendezvous::new(control, line, timeout)?, plan))
    }

    fn new(control: Channel, mut line: Channel, timeout: Duration) -> Result<Rendezvous> {
        let disconnected = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&disconnected);
        // The thread ends with the peer, or with this process; nobody waits for it.
        std::thread::Builder::new()
            .name("bench-line".into())
            .spawn(move || {
                let _ = line.receive(EVER);
                flag.store(true, Ordering::Release);
            })
            .context("start of a thread")?;
        Ok(Rendezvous {
            control,
            disconnected,
            timeout,
        })
    }

    /// Set when the other process goes.
    pub fn disconnected(&self) -> &Arc<AtomicBool> {
        &self.disconnected
    }

    /// Connects an end with that of the other process.
    ///
    /// # Errors
    /// Those of either side.
    pub fn connect_peer(&mut self, peer: &mut Peer) -> Result<()> {
        let (address, region) = peer.contact();
        let theirs = self.control.exchange_addresses(&address, self.timeout)?;
        let bytes = self.control.exchange(&region.to_bytes(), self.timeout)?;
        let bytes = bytes
            .first_chunk()
            .filter(|_| bytes.len() == RemoteRegion::BYTES);
        let region = RemoteRegion::from_bytes(bytes.context("the peer's region is malformed")?);
        peer.connect((theirs, region))?;
        Ok(())
    }

    /// Waits until the other process has come as far as this one.
    ///
    /// # Errors
    /// The peer does not come within the timeout, has failed, or has gone.
    pub fn meet(&mut self) -> Result<()> {
        fine(&self.control.exchange(&[], self.timeout)?)
    }

    /// [`Rendezvous::meet`], for as long as the other process lives.
    ///
    /// # Errors
    /// As [`Rendezvous::meet`].
    pub fn await_peer(&mut self) -> Result<()> {
        fine(&self.control.exchange(&[], EVER)?)
    }

    /// Tells the peer why this process ends, or learns why the peer has ended; gives the error to report here.
    pub fn part(mut self, error: anyhow::Error) -> anyhow::Error {
        if self
            .control
            .send(format!("{error:#}").as_bytes(), LAST_WORDS)
            .is_err()
            || self.disconnected.load(Ordering::Acquire)
        {
            // What came before the end of the connection can still be read: a word that it is ready, and then the reason.
            while let Ok(words) = self.control.receive(LAST_WORDS) {
                if let Err(reason) = fine(&words) {
                    return reason;
                }
            }
        }
        error
    }
}

fn read_handshake(bytes: &[u8]) -> Result<Handshake> {
    let handshake: Handshake = serde_json::from_slice(bytes)
        .context("the process that came does not speak of this benchmark")?;
    let theirs = handshake.protocol;
    ensure!(
        theirs == PROTOCOL,
        "the process that came speaks version {theirs} of this benchmark, not {PROTOCOL}"
    );
    handshake.plan.check().map_err(anyhow::Error::msg)?;
    Ok(handshake)
}

/// An empty message says that all is well; any other one says what is not.
fn fine(words: &[u8]) -> Result<()> {
    if !words.is_empty() {
        bail!(
            "the other process failed: {}",
            String::from_utf8_lossy(words)
        );
    }
    Ok(())
}
