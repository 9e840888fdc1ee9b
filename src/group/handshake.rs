//! How a rank and the store come to trust each other: each proves the token over numbers that both chose.
//!
//! The rank sends a [`Handshake`] with its nonce. The store answers with its own nonce ([`challenge`]). The rank proves that it has the token, and the store
//! ends with a [`HandshakeResult`] and its own proof. The first eight bytes are the same in every version, so that another version is recognised. The proofs
//! cover all fields of the handshake; a label distinguishes the two sides' proofs.

use crate::group::Token;
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"DBGS";
/// Changes with every change of what the two say to each other, or ranks by message.
pub(super) const VERSION: u16 = 6;

/// What every version begins with: mark, version, and two bytes of zero.
pub(super) fn head() -> [u8; 8] {
    let mut head = [0; 8];
    head[..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&VERSION.to_le_bytes());
    head
}

/// Checks the first bytes of the other side.
///
/// # Errors
/// [`Error::Malformed`].
pub(super) fn check_head(head: &[u8; 8]) -> Result<()> {
    let version = u16::from_le_bytes([head[4], head[5]]);
    if head[..4] != MAGIC {
        Err(bad("it is not a store of this library".into()))
    } else if version != VERSION {
        Err(bad(format!(
            "it has version {version}, this library supports version {VERSION}"
        )))
    } else {
        Ok(())
    }
}

fn bad(reason: String) -> Error {
    Error::Malformed {
        what: "handshake of a group's store",
        reason,
    }
}

/// What a rank says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handshake {
    pub(super) size: u32,
    pub(super) rank: u32,
    pub(super) nonce: [u8; 32],
}

impl Handshake {
    pub(super) const BYTES: usize = 48;

    pub(super) fn to_bytes(self) -> [u8; Handshake::BYTES] {
        let mut bytes = [0; Handshake::BYTES];
        bytes[..8].copy_from_slice(&head());
        bytes[8..12].copy_from_slice(&self.size.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rank.to_le_bytes());
        bytes[16..].copy_from_slice(&self.nonce);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; Handshake::BYTES]) -> Result<Handshake> {
        let field = |at: usize| {
            let mut number = [0; 4];
            number.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(number)
        };
        let (mut head, mut nonce) = ([0; 8], [0; 32]);
        head.copy_from_slice(&bytes[..8]);
        nonce.copy_from_slice(&bytes[16..]);
        check_head(&head)?;
        Ok(Handshake {
            size: field(8),
            rank: field(12),
            nonce,
        })
    }

    /// What the rank proves the token with.
    pub(super) fn proof(&self, token: &Token, challenge: &[u8; 32]) -> [u8; 32] {
        token.proof(&[b"rank ", &self.to_bytes(), challenge])
    }

    pub(super) fn is_proof(&self, token: &Token, challenge: &[u8; 32], proof: &[u8; 32]) -> bool {
        token.is_proof(&[b"rank ", &self.to_bytes(), challenge], proof)
    }
}

/// What the store answers: the head, and its number.
pub(super) const CHALLENGE_BYTES: usize = 40;
/// The proof of a rank.
pub(super) const PROOF_BYTES: usize = 32;

pub(super) fn challenge(nonce: &[u8; 32]) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    bytes[..8].copy_from_slice(&head());
    bytes[8..].copy_from_slice(nonce);
    bytes
}

/// How the store decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandshakeResult {
    /// The rank is in.
    Welcome,
    /// It has another token.
    Token,
    /// It has another idea of the size; this is the store's.
    Size(u32),
    /// That rank has come already.
    Twice,
    /// There is no such rank.
    NoRank,
    /// That rank has come already, and has left or is lost. Its next group may be at the same address, once this one has ended.
    Ended,
}

impl HandshakeResult {
    pub(super) const BYTES: usize = 40;

    fn numbers(self) -> [u8; 8] {
        let (code, number) = match self {
            HandshakeResult::Welcome => (0, 0),
            HandshakeResult::Token => (1, 0),
            HandshakeResult::Size(size) => (2, size),
            HandshakeResult::Twice => (3, 0),
            HandshakeResult::NoRank => (4, 0),
            HandshakeResult::Ended => (5, 0),
        };
        let mut bytes = [code, 0, 0, 0, 0, 0, 0, 0];
        bytes[4..].copy_from_slice(&u32::to_le_bytes(number));
        bytes
    }

    /// With the store's proof, which a process without the token does not get.
    pub(super) fn to_bytes(
        self,
        token: &Token,
        handshake: &Handshake,
        challenge: &[u8; 32],
    ) -> [u8; HandshakeResult::BYTES] {
        let mut bytes = [0; HandshakeResult::BYTES];
        let numbers = self.numbers();
        bytes[..8].copy_from_slice(&numbers);
        if self != HandshakeResult::Token {
            let proof = token.proof(&[b"store", &handshake.to_bytes(), challenge, &numbers]);
            bytes[8..].copy_from_slice(&proof);
        }
        bytes
    }

    /// Reads a verdict, and believes it if the store proves the token.
    pub(super) fn from_bytes(
        bytes: &[u8; HandshakeResult::BYTES],
        token: &Token,
        handshake: &Handshake,
        challenge: &[u8; 32],
    ) -> Result<HandshakeResult> {
        let (mut numbers, mut proof) = ([0; 8], [0; 32]);
        numbers.copy_from_slice(&bytes[..8]);
        proof.copy_from_slice(&bytes[8..]);
        let [_, _, _, _, a, b, c, d] = numbers;
        let verdict = match numbers[0] {
            0 => HandshakeResult::Welcome,
            1 => HandshakeResult::Token,
            2 => HandshakeResult::Size(u32::from_le_bytes([a, b, c, d])),
            3 => HandshakeResult::Twice,
            4 => HandshakeResult::NoRank,
            5 => HandshakeResult::Ended,
            code => return Err(bad(format!("verdict {code} is unknown"))),
        };
        let parts: [&[u8]; 4] = [b"store", &handshake.to_bytes(), challenge, &numbers];
        // Only the verdict that the tokens differ needs no proof: a store with another token cannot give one.
        if verdict != HandshakeResult::Token && !token.is_proof(&parts, &proof) {
            return Err(bad("it does not know the token of the group".into()));
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Handshake = Handshake {
        size: 4,
        rank: 2,
        nonce: [7; 32],
    };

    #[test]
    fn a_hello_reads_back_and_another_version_is_named() {
        let bytes = HELLO.to_bytes();
        assert_eq!(&bytes[..16], b"DBGS\x06\0\0\0\x04\0\0\0\x02\0\0\0");
        assert_eq!(Handshake::from_bytes(&bytes), Ok(HELLO));
        let mut other = bytes;
        other[4] = 9;
        let error = Handshake::from_bytes(&other).unwrap_err().to_string();
        assert!(error.contains("version 9"), "{error}");
        other[0] = 0;
        let error = Handshake::from_bytes(&other).unwrap_err().to_string();
        assert!(error.contains("not a store"), "{error}");
    }

    #[test]
    fn proofs_are_of_one_handshake_and_one_side() {
        let (token, challenge) = (Token::new("a"), [9; 32]);
        let proof = HELLO.proof(&token, &challenge);
        assert!(HELLO.is_proof(&token, &challenge, &proof));
        assert!(!HELLO.is_proof(&token, &[8; 32], &proof));
        assert!(!Handshake { rank: 3, ..HELLO }.is_proof(&token, &challenge, &proof));
        assert!(!HELLO.is_proof(&Token::new("b"), &challenge, &proof));
        let mut reflected = HandshakeResult::Welcome.to_bytes(&token, &HELLO, &challenge);
        reflected[8..].copy_from_slice(&proof);
        assert!(HandshakeResult::from_bytes(&reflected, &token, &HELLO, &challenge).is_err());
    }

    #[test]
    fn verdicts_are_believed_with_the_token_only() {
        let (token, challenge) = (Token::new("a"), [9; 32]);
        for verdict in [
            HandshakeResult::Welcome,
            HandshakeResult::Token,
            HandshakeResult::Size(5),
            HandshakeResult::Twice,
            HandshakeResult::NoRank,
            HandshakeResult::Ended,
        ] {
            let bytes = verdict.to_bytes(&token, &HELLO, &challenge);
            let read = |token| HandshakeResult::from_bytes(&bytes, token, &HELLO, &challenge);
            assert_eq!(read(&token), Ok(verdict));
            assert_eq!(
                read(&Token::new("b")).is_ok(),
                verdict == HandshakeResult::Token,
                "{verdict:?}"
            );
        }
        let refused = HandshakeResult::Token.to_bytes(&token, &HELLO, &challenge);
        assert_eq!(
            refused[8..],
            [0; 32],
            "a stranger gets nothing to try tokens on"
        );
    }
}
