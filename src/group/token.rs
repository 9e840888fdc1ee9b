//! The secret of a group, and the proof of having it.

use std::fmt;
use std::fs::File;
use std::io::Read;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::Result;
use crate::endpoint::system;

/// What the processes of a group know and strangers do not: any bytes. It is not printed, and never sent.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: Vec<u8>,
}

impl Token {
    /// Made of a secret that all processes of the group are given by other means.
    pub fn new(secret: impl Into<Vec<u8>>) -> Token {
        Token {
            secret: secret.into(),
        }
    }

    /// A new random secret.
    pub(super) fn random() -> Result<Token> {
        Ok(Token::new(nonce()?))
    }

    pub(super) fn secret(&self) -> &[u8] {
        &self.secret
    }

    /// HMAC-SHA-256 of the parts, each of a fixed length, so that no two lists of them are the same bytes.
    pub(super) fn proof(&self, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether a proof is that of these parts; takes the same time wherever it is wrong.
    pub(super) fn is_proof(&self, parts: &[&[u8]], proof: &[u8; 32]) -> bool {
        self.mac(parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // A key of any length is one: longer ones are hashed first (RFC 2104), and `new_from_slice` has no error to give.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret)
            .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        for part in parts {
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Bytes that were never used before.
pub(super) fn nonce() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| system("read of /dev/urandom", &error))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_this_token_and_these_parts() {
        let token = Token::new("secret");
        let proof = token.proof(&[b"one", b"two"]);
        assert!(token.is_proof(&[b"one", b"two"], &proof));
        assert!(!token.is_proof(&[b"one", b"twp"], &proof));
        assert!(!Token::new("Secret").is_proof(&[b"one", b"two"], &proof));
        assert_ne!(nonce().unwrap(), nonce().unwrap());
        assert_eq!(format!("{token:?}"), "Token(..)");
    }

    #[test]
    fn the_proof_is_that_of_rfc_4231() {
        // Test case 2 of RFC 4231.
        let proof = Token::new("Jefe").proof(&[b"what do ya want ", b"for nothing?"]);
        let text: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            text,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }
}
