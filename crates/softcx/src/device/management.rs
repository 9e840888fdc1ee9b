//! Management datagrams (MADs): messages of 256 bytes to queue pair 1 of a port, for the connection manager.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Length of a management datagram (IBTA 13.4.2).
pub(crate) const MAD_BYTES: usize = 256;
/// The queue pair of the general services.
pub(crate) const QP1: u32 = 1;
/// Its queue key (IBTA 10.2.5).
pub(crate) const QP1_QKEY: u32 = 0x8001_0000;
/// Datagrams that wait to be read. What comes on top is lost, as on a card whose receive queue is empty.
const MOST_WAITING: usize = 8192;

/// The port that one goes to, or comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum MadPeer {
    /// That of the device with this number on the fabric.
    Node(u16),
    /// The one with this GID on the UDP wire.
    Host([u8; 16]),
}

/// The bytes of one.
pub(crate) type MadBytes = [u8; MAD_BYTES];

/// The name of the message of the connection manager that a datagram has (IBTA 12.6); `None` if it has none: nothing here takes other classes.
pub(crate) fn cm_message_name(mad: &MadBytes) -> Option<&'static str> {
    /// Base version 1, communication management of version 2, `ComMgtSend`.
    const HEAD: [u8; 4] = [1, 7, 2, 3];
    if !mad.starts_with(&HEAD) {
        return None;
    }
    Some(match u16::from_be_bytes([mad[16], mad[17]]) {
        0x10 => "REQ",
        0x11 => "MRA",
        0x12 => "REJ",
        0x13 => "REP",
        0x14 => "RTU",
        0x15 => "DREQ",
        0x16 => "DREP",
        0x17 => "SIDR_REQ",
        0x18 => "SIDR_REP",
        _ => return None,
    })
}

/// The datagrams that have arrived at queue pair 1 of a device.
#[derive(Debug, Default)]
pub(crate) struct MadQueue {
    waiting: Mutex<WaitingMads>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct WaitingMads {
    /// Somebody reads them.
    is_read: bool,
    /// [`MadQueue::wake`] was called since the last wait.
    woken: bool,
    /// With the port that each comes from.
    mads: VecDeque<(MadPeer, MadBytes)>,
}

impl MadQueue {
    /// Datagrams are kept from now on. Before, they are lost.
    pub(crate) fn open(&self) {
        self.lock().is_read = true;
    }

    /// Adds one that has arrived. Whether it is kept.
    pub(super) fn push(&self, from: MadPeer, mad: MadBytes) -> bool {
        let mut waiting = self.lock();
        if !waiting.is_read || waiting.mads.len() >= MOST_WAITING {
            return false;
        }
        waiting.mads.push_back((from, mad));
        self.arrived.notify_one();
        true
    }

    /// Waits until there is one, [`MadQueue::wake`] is called, or the time is over (`None`: without a limit). Returns all that have arrived, each with
    /// the port that it comes from.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> VecDeque<(MadPeer, MadBytes)> {
        let waiting = self.lock();
        let nothing = |waiting: &mut WaitingMads| waiting.mads.is_empty() && !waiting.woken;
        let mut waiting = match limit {
            Some(limit) => {
                let waited = self.arrived.wait_timeout_while(waiting, limit, nothing);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                let waited = self.arrived.wait_while(waiting, nothing);
                waited.unwrap_or_else(PoisonError::into_inner)
            }
        };
        waiting.woken = false;
        std::mem::take(&mut waiting.mads)
    }

    /// Ends a wait, or the next one at once.
    pub(crate) fn wake(&self) {
        self.lock().woken = true;
        self.arrived.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, WaitingMads> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_connection_manager_have_names() {
        let mut mad = [0; MAD_BYTES];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[17] = 0x13;
        assert_eq!(cm_message_name(&mad), Some("REP"));
        mad[16] = 1;
        assert_eq!(cm_message_name(&mad), None);
        mad[16] = 0;
        mad[1] = 4;
        assert_eq!(cm_message_name(&mad), None);
    }

    #[test]
    fn datagrams_are_lost_before_somebody_reads_and_when_there_are_too_many() {
        let queue = MadQueue::default();
        let from = MadPeer::Node(2);
        assert!(!queue.push(from, [0; MAD_BYTES]));
        queue.open();
        for count in 0..MOST_WAITING {
            assert!(queue.push(from, [count as u8; MAD_BYTES]));
        }
        assert!(!queue.push(from, [0; MAD_BYTES]));
        let mads = queue.wait(None);
        assert_eq!(
            (mads.len(), mads[3]),
            (MOST_WAITING, (from, [3; MAD_BYTES]))
        );
        queue.wake();
        assert!(queue.wait(None).is_empty());
        assert!(queue.wait(Some(Duration::ZERO)).is_empty());
    }
}
