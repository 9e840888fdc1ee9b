//! The connection between the two processes: it carries the plan, starts each part of a row on both sides, and notices a process that
//! ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use doorbell::{Channel, Device, Listener};
use serde::{Deserialize, Serialize};

use super::device_choice::{self, Identity};
use super::options::{ITERATIONS_MAX, Plan};
use super::peer::Peer;

/// Changes with the messages between the two processes.
const PROTOCOL: u32 = 5;
/// For waits that end when the other process ends.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long a process that notices the end of the other one waits for the reason.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// The first message of the process that measures.
#[derive(Serialize, Deserialize)]
struct BenchHandshake {
    protocol: u32,
    /// Identifies this run: the second connection repeats it.
    token: u64,
    identity: Identity,
    plan: Plan,
}

/// The part of a [`BenchHandshake`] that never changes.
#[derive(Deserialize)]
struct Protocol {
    protocol: u32,
}

/// Every other message.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BenchMessage {
    /// The plan is taken. The identity of the process that listens, with its device.
    Accepted(Identity),
    /// All is well.
    Ready,
    /// The next part has so many steps; 0 ends the row.
    Run(u64),
    /// The sender has failed, for this reason.
    Failed(String),
}

/// Two connections with the other process. One carries messages. The other is idle: a thread that reads from it learns at once when
/// the other process ends, whatever this process waits for.
pub struct PeerConnection {
    control: Channel,
    disconnected: Arc<AtomicBool>,
    timeout: Duration,
}

impl PeerConnection {
    /// Connects to the process that listens, and sends it the plan. Also returns the device: the one that was named, or one that reaches the other process.
    ///
    /// # Errors
    /// Nobody listens within the plan's timeout; the other process refuses the plan or the device; no device reaches it.
    pub fn connect(
        address: &str,
        plan: &Plan,
        identity: &Identity,
        named: Option<Device>,
    ) -> Result<(PeerConnection, Device)> {
        let timeout = plan.timeout();
        let mut control = Channel::connect(address, timeout)?;
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let token = clock.as_nanos() as u64 ^ u64::from(std::process::id()) << 32;
        let handshake = BenchHandshake {
            protocol: PROTOCOL,
            token,
            identity: identity.clone(),
            plan: plan.clone(),
        };
        control.send(&serde_json::to_vec(&handshake)?, timeout)?;
        let BenchMessage::Accepted(other) = read(&control.receive(timeout)?)? else {
            bail!("the other process did not say which device it has");
        };
        let device = device_choice::device(named, identity, &other, &control)?;
        let mut idle = Channel::connect(address, timeout)?;
        idle.send(&token.to_le_bytes(), timeout)?;
        Ok((PeerConnection::new(control, idle, timeout)?, device))
    }

    /// Waits for the process that measures, and receives its plan. Also returns the device, as [`PeerConnection::connect`].
    ///
    /// # Errors
    /// The process that connects is no such process, its plan is beyond the limits, or the devices cannot reach each other.
    pub fn accept(
        listener: &Listener,
        timeout: Duration,
        identity: &Identity,
        named: Option<Device>,
    ) -> Result<(PeerConnection, Plan, Device)> {
        let mut control = listener.accept(FOREVER)?;
        let taken = read_handshake(&control.receive(timeout)?).and_then(|handshake| {
            let other = &handshake.identity;
            let device = device_choice::device(named, identity, other, &control)?;
            let identity = Identity::new(Some(&device))?;
            Ok((handshake, device, identity))
        });
        let answer = match &taken {
            Ok((_, _, identity)) => BenchMessage::Accepted(identity.clone()),
            Err(error) => BenchMessage::Failed(format!("{error:#}")),
        };
        control.send(&serde_json::to_vec(&answer)?, timeout)?;
        let (BenchHandshake { token, plan, .. }, device, _) = taken?;
        let mut idle = listener.accept(timeout)?;
        ensure!(
            idle.receive(timeout)? == token.to_le_bytes(),
            "two processes connected at the same time"
        );
        let timeout = plan.timeout();
        Ok((PeerConnection::new(control, idle, timeout)?, plan, device))
    }

    fn new(control: Channel, mut idle: Channel, timeout: Duration) -> Result<PeerConnection> {
        let disconnected = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&disconnected);
        // The thread ends with the other process or with this one; nobody joins it.
        std::thread::Builder::new()
            .name("bench-idle".into())
            .spawn(move || {
                let _ = idle.receive(FOREVER);
                flag.store(true, Ordering::Release);
            })
            .context("start of a thread")?;
        Ok(PeerConnection {
            control,
            disconnected,
            timeout,
        })
    }

    /// Set when the other process ends.
    pub fn disconnected(&self) -> &Arc<AtomicBool> {
        &self.disconnected
    }

    /// Connects a peer of this process with that of the other one.
    ///
    /// # Errors
    /// Those of either side.
    pub fn connect_peer(&mut self, peer: &mut Peer) -> Result<()> {
        let theirs = self.control.exchange(&peer.contact(), self.timeout)?;
        Ok(peer.connect(&theirs)?)
    }

    /// Waits until the other process is ready, and has it run so many steps; 0 ends the row.
    ///
    /// # Errors
    /// The other process is not ready within the timeout, has failed, or has ended.
    pub fn start(&mut self, steps: u64) -> Result<()> {
        self.exchange(&BenchMessage::Run(steps), self.timeout)
            .map(drop)
    }

    /// Tells the process that measures that this one is ready. Returns the steps that it starts, however long that takes.
    ///
    /// # Errors
    /// The other process has failed or has ended.
    pub fn await_start(&mut self) -> Result<u64> {
        match self.exchange(&BenchMessage::Ready, FOREVER)? {
            // Calibration may double the steps once more.
            BenchMessage::Run(steps) if steps <= 3 * ITERATIONS_MAX => Ok(steps),
            _ => bail!("the other process did not send a valid number of steps"),
        }
    }

    fn exchange(&mut self, message: &BenchMessage, timeout: Duration) -> Result<BenchMessage> {
        let bytes = serde_json::to_vec(message)?;
        read(&self.control.exchange(&bytes, timeout)?)
    }

    /// Tells the other process why this one ends, or learns why the other one has ended. Returns the error to report here.
    pub fn abort(mut self, error: anyhow::Error) -> anyhow::Error {
        let told = serde_json::to_vec(&BenchMessage::Failed(format!("{error:#}")))
            .is_ok_and(|reason| self.control.send(&reason, REASON_TIMEOUT).is_ok());
        if !told || self.disconnected.load(Ordering::Acquire) {
            // Messages sent before the end of the connection can still be read: `Ready`, perhaps, and then the reason.
            while let Ok(bytes) = self.control.receive(REASON_TIMEOUT) {
                if let Err(reason) = read(&bytes) {
                    return reason;
                }
            }
        }
        error
    }
}

fn read_handshake(bytes: &[u8]) -> Result<BenchHandshake> {
    let unknown = "the process that connected is not `doorbell bench`";
    let Protocol { protocol } = serde_json::from_slice(bytes).context(unknown)?;
    ensure!(
        protocol == PROTOCOL,
        "the two processes are of different versions: their protocols are {protocol} and {PROTOCOL}"
    );
    let handshake: BenchHandshake = serde_json::from_slice(bytes).context(unknown)?;
    handshake.plan.check().map_err(anyhow::Error::msg)?;
    Ok(handshake)
}

fn read(bytes: &[u8]) -> Result<BenchMessage> {
    match serde_json::from_slice(bytes).context("a message of the other process is malformed")? {
        BenchMessage::Failed(reason) => bail!("the other process failed: {reason}"),
        message => Ok(message),
    }
}
