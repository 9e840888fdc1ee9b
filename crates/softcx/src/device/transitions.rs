//! What a modify call may change, by transport and transition: the kernel's rules (`ib_modify_qp_is_ok` in its
//! `drivers/infiniband/core/verbs.c`), which are those of IBTA 11.2.5.2.
//! SQD is left out: the mlx5 driver has no command that leads to it (`optab` of `__mlx5_ib_modify_qp`). A card enters it by itself, after an error
//! of a signature, and has no signatures here.

use crate::device::client::{Transport, mask};
use crate::device::qp::State;

/// Attributes that a transition must have, and those that it may have besides the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    required: u32,
    optional: u32,
}

const NOTHING: Rule = Rule {
    required: 0,
    optional: 0,
};

/// What a transition between states of sending may change on the way.
const fn while_sending(transport: Transport) -> u32 {
    match transport {
        Transport::Ud => mask::CUR_STATE | mask::QKEY,
        Transport::Uc => {
            mask::CUR_STATE | mask::ALT_PATH | mask::ACCESS_FLAGS | mask::PATH_MIG_STATE
        }
        Transport::Rc => {
            mask::CUR_STATE
                | mask::ALT_PATH
                | mask::ACCESS_FLAGS
                | mask::MIN_RNR_TIMER
                | mask::PATH_MIG_STATE
        }
    }
}

/// The rule of a transition; `None` if there is no such transition.
fn rule(transport: Transport, from: State, to: State) -> Option<Rule> {
    use State::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueError};
    let identity = match transport {
        Transport::Ud => mask::PKEY_INDEX | mask::PORT | mask::QKEY,
        Transport::Uc | Transport::Rc => mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS,
    };
    let (required, optional) = match (from, to) {
        (_, Reset) => return Some(NOTHING),
        // A queue pair without attributes cannot fail.
        (Reset, Error) => return None,
        (_, Error) => return Some(NOTHING),
        (Reset, Init) => (identity, 0),
        (Init, Init) => (0, identity),
        (Init, ReadyToReceive) => {
            let path = mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
            let late = mask::ALT_PATH | mask::ACCESS_FLAGS | mask::PKEY_INDEX;
            match transport {
                Transport::Ud => (0, mask::PKEY_INDEX | mask::QKEY),
                Transport::Uc => (path, late),
                Transport::Rc => {
                    let answers = mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER;
                    (path | answers, late)
                }
            }
        }
        (ReadyToReceive, ReadyToSend) => {
            let retries =
                mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
            let required = match transport {
                Transport::Ud | Transport::Uc => mask::SQ_PSN,
                Transport::Rc => mask::SQ_PSN | retries,
            };
            (required, while_sending(transport))
        }
        (ReadyToSend, ReadyToSend) => (0, while_sending(transport)),
        (SendQueueError, ReadyToSend) => match transport {
            Transport::Ud => (0, mask::CUR_STATE | mask::QKEY),
            Transport::Uc => (0, mask::CUR_STATE | mask::ACCESS_FLAGS),
            Transport::Rc => (0, 0),
        },
        _ => return None,
    };
    Some(Rule { required, optional })
}

/// Whether a call with these attributes may lead from one state to another, or leave it as it is.
pub(crate) fn is_allowed(transport: Transport, from: State, to: State, named: u32) -> bool {
    let knows_state = matches!(
        from,
        State::ReadyToReceive | State::ReadyToSend | State::SendQueueError
    );
    if named & mask::CUR_STATE != 0 && !knows_state {
        return false;
    }
    rule(transport, from, to).is_some_and(|rule| {
        named & rule.required == rule.required
            && named & !(rule.required | rule.optional | mask::STATE) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use State::{
        Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueDrained, SendQueueError,
    };

    const STATES: [State; 7] = [
        Reset,
        Init,
        ReadyToReceive,
        ReadyToSend,
        SendQueueDrained,
        SendQueueError,
        Error,
    ];
    const TRANSPORTS: [Transport; 3] = [Transport::Rc, Transport::Uc, Transport::Ud];

    /// Attributes as programs name them (`ibv_rc_pingpong`, `ibv_uc_pingpong`, `ibv_ud_pingpong`).
    #[test]
    fn usual_transitions_are_allowed() {
        let identity = mask::STATE | mask::PKEY_INDEX | mask::PORT;
        let path = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
        let rtr = path | mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER;
        let rts = mask::STATE
            | mask::TIMEOUT
            | mask::RETRY_CNT
            | mask::RNR_RETRY
            | mask::SQ_PSN
            | mask::MAX_QP_RD_ATOMIC;
        let init = identity | mask::ACCESS_FLAGS;
        assert!(is_allowed(Transport::Rc, Reset, Init, init));
        assert!(is_allowed(Transport::Rc, Init, ReadyToReceive, rtr));
        assert!(is_allowed(Transport::Rc, ReadyToReceive, ReadyToSend, rts));
        assert!(is_allowed(Transport::Uc, Reset, Init, init));
        assert!(is_allowed(Transport::Uc, Init, ReadyToReceive, path));
        let psn = mask::STATE | mask::SQ_PSN;
        assert!(is_allowed(Transport::Uc, ReadyToReceive, ReadyToSend, psn));
        assert!(is_allowed(
            Transport::Ud,
            Reset,
            Init,
            identity | mask::QKEY
        ));
        assert!(is_allowed(Transport::Ud, Init, ReadyToReceive, mask::STATE));
        assert!(is_allowed(Transport::Ud, ReadyToReceive, ReadyToSend, psn));
        for missing in [mask::PKEY_INDEX, mask::PORT, mask::ACCESS_FLAGS] {
            assert!(!is_allowed(Transport::Rc, Reset, Init, init & !missing));
        }
        for bit in 0..26 {
            let without = rtr & !(1 << bit);
            let open = is_allowed(Transport::Rc, Init, ReadyToReceive, without);
            assert_eq!(open, without == rtr || bit == 0, "{bit}");
        }
    }

    #[test]
    fn every_state_leads_to_reset_and_all_but_reset_to_error() {
        for transport in TRANSPORTS {
            for from in STATES {
                assert!(is_allowed(transport, from, Reset, mask::STATE));
                let fails = is_allowed(transport, from, Error, mask::STATE);
                assert_eq!(fails, from != Reset);
                assert!(!is_allowed(transport, from, Reset, mask::QKEY));
                assert!(!is_allowed(transport, from, SendQueueError, mask::STATE));
            }
            let none = |from, to| rule(transport, from, to).is_none();
            assert!(none(Init, ReadyToSend) && none(Reset, ReadyToReceive));
            assert!(none(Error, Init) && none(ReadyToReceive, SendQueueDrained));
            assert!(none(ReadyToSend, SendQueueDrained));
        }
    }

    #[test]
    fn the_believed_state_can_be_named_only_where_it_may_differ() {
        let named = mask::STATE | mask::CUR_STATE;
        for transport in TRANSPORTS {
            assert!(is_allowed(transport, ReadyToSend, ReadyToSend, named));
            assert!(!is_allowed(transport, Init, Init, named));
        }
        assert!(is_allowed(
            Transport::Ud,
            SendQueueError,
            ReadyToSend,
            named
        ));
        assert!(!is_allowed(
            Transport::Rc,
            SendQueueError,
            ReadyToSend,
            named
        ));
    }
}
