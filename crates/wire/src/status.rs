//! The status of a work completion, in the words of verbs.

use std::fmt;

macro_rules! wc_statuses {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $verbs:literal, $text:literal;)+) => {
        /// The status of a work completion, with the numbers of verbs (verbs.h, `enum ibv_wc_status`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum WcStatus {
            $($(#[$doc])* $name = $number,)+
        }

        impl WcStatus {
            /// All of them, in order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The name as in verbs.h.
            pub const fn verbs_name(self) -> &'static str {
                match self { $(Self::$name => $verbs,)+ }
            }

            const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

wc_statuses! {
    /// Done.
    Success = 0, "IBV_WC_SUCCESS", "success";
    /// The message does not fit the receive, or the local limits.
    LocLenErr = 1, "IBV_WC_LOC_LEN_ERR", "local length error";
    /// The work request makes no sense to this queue pair.
    LocQpOpErr = 2, "IBV_WC_LOC_QP_OP_ERR", "local QP operation error";
    /// Not for these transports.
    LocEecOpErr = 3, "IBV_WC_LOC_EEC_OP_ERR", "local EE context operation error";
    /// Local memory: wrong key, bounds or permission.
    LocProtErr = 4, "IBV_WC_LOC_PROT_ERR", "local protection error";
    /// The queue pair went to its error state before this request's turn.
    WrFlushErr = 5, "IBV_WC_WR_FLUSH_ERR", "work request flushed";
    /// A memory window could not be bound.
    MwBindErr = 6, "IBV_WC_MW_BIND_ERR", "memory window bind error";
    /// The responder answered nonsense.
    BadRespErr = 7, "IBV_WC_BAD_RESP_ERR", "bad response error";
    /// A responder's local access failed.
    LocAccessErr = 8, "IBV_WC_LOC_ACCESS_ERR", "local access error";
    /// The responder rejects the request as invalid.
    RemInvReqErr = 9, "IBV_WC_REM_INV_REQ_ERR", "remote invalid request error";
    /// Remote memory: wrong key, bounds or permission.
    RemAccessErr = 10, "IBV_WC_REM_ACCESS_ERR", "remote access error";
    /// The responder could not carry the request out.
    RemOpErr = 11, "IBV_WC_REM_OP_ERR", "remote operation error";
    /// No acknowledgement after all retries.
    RetryExcErr = 12, "IBV_WC_RETRY_EXC_ERR", "transport retry limit exceeded";
    /// No receive posted after all retries.
    RnrRetryExcErr = 13, "IBV_WC_RNR_RETRY_EXC_ERR", "receiver-not-ready retry limit exceeded";
    /// Not for these transports.
    LocRddViolErr = 14, "IBV_WC_LOC_RDD_VIOL_ERR", "local RDD violation error";
    /// Not for these transports.
    RemInvRdReqErr = 15, "IBV_WC_REM_INV_RD_REQ_ERR", "remote invalid RD request error";
    /// The responder aborted.
    RemAbortErr = 16, "IBV_WC_REM_ABORT_ERR", "remote aborted error";
    /// Not for these transports.
    InvEecnErr = 17, "IBV_WC_INV_EECN_ERR", "invalid EE context number error";
    /// Not for these transports.
    InvEecStateErr = 18, "IBV_WC_INV_EEC_STATE_ERR", "invalid EE context state error";
    /// The device is broken.
    FatalErr = 19, "IBV_WC_FATAL_ERR", "fatal error";
    /// No response in time.
    RespTimeoutErr = 20, "IBV_WC_RESP_TIMEOUT_ERR", "response timeout error";
    /// An unknown syndrome.
    GeneralErr = 21, "IBV_WC_GENERAL_ERR", "general error";
    /// Tag matching failed.
    TmErr = 22, "IBV_WC_TM_ERR", "tag matching error";
    /// Tag matching left a rendezvous to software.
    TmRndvIncomplete = 23, "IBV_WC_TM_RNDV_INCOMPLETE", "tag matching rendezvous incomplete";
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_text() {
        for (number, status) in WcStatus::ALL.iter().enumerate() {
            assert_eq!(*status as usize, number);
        }
        assert_eq!(WcStatus::ALL.len(), 24);
        assert_eq!(WcStatus::RemAccessErr.to_string(), "remote access error");
        assert_eq!(WcStatus::RemAccessErr.verbs_name(), "IBV_WC_REM_ACCESS_ERR");
    }
}
