//! The states of a queue pair.

/// The states of a queue pair, with verbs' numbers (`ibv_qp_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Fresh; nothing can be posted to the device.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    ReadyToReceive = 2,
    /// Ready to send.
    ReadyToSend = 3,
    /// Nothing more is begun from the send queue; receiving goes on.
    SendQueueDrained = 4,
    /// The send queue failed, receiving goes on. For unreliable queue pairs; a reliable one goes to [`State::Error`].
    SendQueueError = 5,
    /// Everything posted is flushed.
    Error = 6,
}

impl State {
    /// The state of that number.
    pub fn parse(byte: u8) -> Option<State> {
        Some(match byte {
            0 => State::Reset,
            1 => State::Init,
            2 => State::ReadyToReceive,
            3 => State::ReadyToSend,
            4 => State::SendQueueDrained,
            5 => State::SendQueueError,
            6 => State::Error,
            _ => return None,
        })
    }

    /// Whether a modify call may go from `self` to `to` for a reliable connection (IBTA 10.3.1; the kernel's
    /// `qp_state_table` says the same). The send-queue-error state is left by a return to ready-to-send, but no reliable
    /// queue pair ever enters it.
    pub fn allows(self, to: State) -> bool {
        use State::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueError};
        matches!(
            (self, to),
            (_, Reset | Error)
                | (Reset | Init, Init)
                | (Init, ReadyToReceive)
                | (ReadyToReceive | ReadyToSend | SendQueueError, ReadyToSend)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_transitions_of_the_specification_are_allowed() {
        use State::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueError};
        let all = [
            Reset,
            Init,
            ReadyToReceive,
            ReadyToSend,
            SendQueueError,
            Error,
        ];
        let allowed: Vec<_> = all
            .iter()
            .flat_map(|&a| all.iter().map(move |&b| (a, b)))
            .filter(|(a, b)| a.allows(*b))
            .collect();
        for state in all {
            assert!(allowed.contains(&(state, Reset)) && allowed.contains(&(state, Error)));
        }
        let forward: Vec<_> = allowed
            .into_iter()
            .filter(|(_, b)| !matches!(b, Reset | Error))
            .collect();
        assert_eq!(
            forward,
            [
                (Reset, Init),
                (Init, Init),
                (Init, ReadyToReceive),
                (ReadyToReceive, ReadyToSend),
                (ReadyToSend, ReadyToSend),
                (SendQueueError, ReadyToSend)
            ]
        );
    }
}
