//! Why a work request failed: the code in the CQE, and the status that verbs makes of it.

use std::fmt;

use crate::verbs::WcStatus;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_text() {
        assert_eq!(
            Syndrome::RnrRetryExc.to_string(),
            "receiver-not-ready retry limit exceeded (syndrome 0x16)"
        );
    }

    #[test]
    fn syndromes_have_distinct_statuses() {
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
