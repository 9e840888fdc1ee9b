//! The status of one operation, and the state of a wait in one word.

use crate::endpoint::outcome::OpStatus;

/// The states of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::endpoint) enum Wait {
    Prepared,
    Queued,
    Started,
    Done,
    Failed,
    Cancelled,
    Discarded,
}

impl Wait {
    /// Whether a wait in this state may become one in that state. A final state never changes.
    fn leads_to(self, next: Wait) -> bool {
        match self {
            Wait::Prepared | Wait::Queued | Wait::Started => self != next,
            Wait::Done | Wait::Failed | Wait::Cancelled | Wait::Discarded => false,
        }
    }
}

/// A wait in one word: its state, the running index of its completion, and a serial that tells waits apart which had the same
/// index, because the earlier one was taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::endpoint) struct WaitWord(pub(in crate::endpoint) u64);

impl WaitWord {
    pub(super) const NONE: WaitWord = WaitWord(u64::MAX);

    pub(in crate::endpoint) fn new(serial: u32, index: u32, state: Wait) -> WaitWord {
        WaitWord(u64::from(serial) << 40 | u64::from(index) << 8 | state as u64)
    }

    pub(in crate::endpoint) fn with(self, state: Wait) -> WaitWord {
        WaitWord(self.0 & !0xff | state as u64)
    }

    pub(super) fn is_for(self, index: u32) -> bool {
        self != WaitWord::NONE && (self.0 >> 8) as u32 == index
    }

    /// The word with that state, if this one leads to it.
    pub(in crate::endpoint) fn next(self, state: Wait) -> Option<WaitWord> {
        self.state()
            .is_some_and(|now| now.leads_to(state))
            .then(|| self.with(state))
    }

    fn state(self) -> Option<Wait> {
        const STATES: [Wait; 7] = [
            Wait::Prepared,
            Wait::Queued,
            Wait::Started,
            Wait::Done,
            Wait::Failed,
            Wait::Cancelled,
            Wait::Discarded,
        ];
        STATES.get((self.0 & 0xff) as usize).copied()
    }

    /// 24 bits.
    pub(super) fn serial(self) -> u32 {
        (self.0 >> 40) as u32
    }

    pub(in crate::endpoint) fn op_status(self) -> OpStatus {
        match self.state() {
            Some(Wait::Prepared) => OpStatus::Prepared,
            Some(Wait::Queued) => OpStatus::Queued,
            Some(Wait::Started) => OpStatus::Rung,
            Some(Wait::Done) => OpStatus::Done,
            Some(Wait::Failed) | None => OpStatus::Failed,
            Some(Wait::Cancelled) => OpStatus::Cancelled,
            Some(Wait::Discarded) => OpStatus::Discarded,
        }
    }
}
