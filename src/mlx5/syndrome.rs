//! Why a work request failed: the code in the CQE, and the status that verbs makes of it.

use std::fmt;

/// The syndrome of an error CQE (mlx5dv.h, `MLX5_CQE_SYNDROME_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Syndrome {
    /// The message does not fit the receive, or the local limits.
    LocalLength = 0x01,
    /// The WQE makes no sense to this queue pair.
    LocalQpOp = 0x02,
    /// Local memory: wrong key, bounds or permission.
    LocalProt = 0x04,
    /// The queue pair went to its error state before this request's turn.
    WrFlush = 0x05,
    /// A memory window could not be bound.
    MwBind = 0x06,
    /// The responder answered nonsense.
    BadResp = 0x10,
    /// A responder's local access failed.
    LocalAccess = 0x11,
    /// The responder rejects the request as invalid.
    RemoteInvalReq = 0x12,
    /// Remote memory: wrong key, bounds or permission.
    RemoteAccess = 0x13,
    /// The responder could not carry the request out.
    RemoteOp = 0x14,
    /// No acknowledgement after all retries.
    TransportRetryExc = 0x15,
    /// No receive posted after all retries.
    RnrRetryExc = 0x16,
    /// The responder aborted.
    RemoteAborted = 0x22,
}

impl Syndrome {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::LocalLength,
        Self::LocalQpOp,
        Self::LocalProt,
        Self::WrFlush,
        Self::MwBind,
        Self::BadResp,
        Self::LocalAccess,
        Self::RemoteInvalReq,
        Self::RemoteAccess,
        Self::RemoteOp,
        Self::TransportRetryExc,
        Self::RnrRetryExc,
        Self::RemoteAborted,
    ];

    /// The syndrome of that number.
    pub fn from_raw(raw: u8) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|syndrome| *syndrome as u8 == raw)
    }

    /// What verbs calls it.
    pub const fn status(self) -> WcStatus {
        match self {
            Self::LocalLength => WcStatus::LocLenErr,
            Self::LocalQpOp => WcStatus::LocQpOpErr,
            Self::LocalProt => WcStatus::LocProtErr,
            Self::WrFlush => WcStatus::WrFlushErr,
            Self::MwBind => WcStatus::MwBindErr,
            Self::BadResp => WcStatus::BadRespErr,
            Self::LocalAccess => WcStatus::LocAccessErr,
            Self::RemoteInvalReq => WcStatus::RemInvReqErr,
            Self::RemoteAccess => WcStatus::RemAccessErr,
            Self::RemoteOp => WcStatus::RemOpErr,
            Self::TransportRetryExc => WcStatus::RetryExcErr,
            Self::RnrRetryExc => WcStatus::RnrRetryExcErr,
            Self::RemoteAborted => WcStatus::RemAbortErr,
        }
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (syndrome {:#04x})", self.status(), *self as u8)
    }
}

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
    /// See [`Syndrome::LocalLength`].
    LocLenErr = 1, "IBV_WC_LOC_LEN_ERR", "local length error";
    /// See [`Syndrome::LocalQpOp`].
    LocQpOpErr = 2, "IBV_WC_LOC_QP_OP_ERR", "local QP operation error";
    /// Not for these transports.
    LocEecOpErr = 3, "IBV_WC_LOC_EEC_OP_ERR", "local EE context operation error";
    /// See [`Syndrome::LocalProt`].
    LocProtErr = 4, "IBV_WC_LOC_PROT_ERR", "local protection error";
    /// See [`Syndrome::WrFlush`].
    WrFlushErr = 5, "IBV_WC_WR_FLUSH_ERR", "work request flushed";
    /// See [`Syndrome::MwBind`].
    MwBindErr = 6, "IBV_WC_MW_BIND_ERR", "memory window bind error";
    /// See [`Syndrome::BadResp`].
    BadRespErr = 7, "IBV_WC_BAD_RESP_ERR", "bad response error";
    /// See [`Syndrome::LocalAccess`].
    LocAccessErr = 8, "IBV_WC_LOC_ACCESS_ERR", "local access error";
    /// See [`Syndrome::RemoteInvalReq`].
    RemInvReqErr = 9, "IBV_WC_REM_INV_REQ_ERR", "remote invalid request error";
    /// See [`Syndrome::RemoteAccess`].
    RemAccessErr = 10, "IBV_WC_REM_ACCESS_ERR", "remote access error";
    /// See [`Syndrome::RemoteOp`].
    RemOpErr = 11, "IBV_WC_REM_OP_ERR", "remote operation error";
    /// See [`Syndrome::TransportRetryExc`].
    RetryExcErr = 12, "IBV_WC_RETRY_EXC_ERR", "transport retry limit exceeded";
    /// See [`Syndrome::RnrRetryExc`].
    RnrRetryExcErr = 13, "IBV_WC_RNR_RETRY_EXC_ERR", "receiver-not-ready retry limit exceeded";
    /// Not for these transports.
    LocRddViolErr = 14, "IBV_WC_LOC_RDD_VIOL_ERR", "local RDD violation error";
    /// Not for these transports.
    RemInvRdReqErr = 15, "IBV_WC_REM_INV_RD_REQ_ERR", "remote invalid RD request error";
    /// See [`Syndrome::RemoteAborted`].
    RemAbortErr = 16, "IBV_WC_REM_ABORT_ERR", "remote aborted error";
    /// Not for these transports.
    InvEecnErr = 17, "IBV_WC_INV_EECN_ERR", "invalid EE context number error";
    /// Not for these transports.
    InvEecStateErr = 18, "IBV_WC_INV_EEC_STATE_ERR", "invalid EE context state error";
    /// The device is broken.
    FatalErr = 19, "IBV_WC_FATAL_ERR", "fatal error";
    /// No response in time.
    RespTimeoutErr = 20, "IBV_WC_RESP_TIMEOUT_ERR", "response timeout error";
    /// A syndrome that nobody knows.
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
        assert_eq!(
            Syndrome::RnrRetryExc.to_string(),
            "receiver-not-ready retry limit exceeded (syndrome 0x16)"
        );
    }

    #[test]
    fn syndromes_are_told_apart() {
        let mut seen = Vec::new();
        for raw in 0..=255 {
            if let Some(syndrome) = Syndrome::from_raw(raw) {
                assert_eq!(syndrome as u8, raw);
                assert!(!seen.contains(&syndrome.status()));
                seen.push(syndrome.status());
            }
        }
        assert_eq!(seen.len(), Syndrome::ALL.len());
        assert_eq!(Syndrome::from_raw(0x13), Some(Syndrome::RemoteAccess));
        assert_eq!(Syndrome::from_raw(0x03), None);
    }
}
