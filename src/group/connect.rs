//! How a rank finds the store and is let in.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::endpoint::{Deadline, system};
use crate::group::handshake::{self, CHALLENGE_BYTES, Handshake, HandshakeResult};
use crate::group::socket::enable_keepalive;
use crate::group::token::nonce;
use crate::group::{LaunchEnvironment, Token};
use crate::{Error, Result, StateKind};

/// How long one attempt to reach an address may take: the next address may be the right one.
const ATTEMPT: Duration = Duration::from_secs(5);
const HANDSHAKE: &str = "handshake of the group's store";

/// Tries to reach the store until the deadline. Also returns the token that counts.
pub(super) fn connect(
    environment: &LaunchEnvironment,
    deadline: &Deadline,
) -> Result<(TcpStream, Token)> {
    // The error to return at the deadline: that nobody answered, unless a more specific one
    // is known.
    let mut last = None;
    loop {
        let found = environment.rendezvous.find(&environment.token);
        let (addresses, token) = found.unwrap_or_else(|error| {
            // A name may be known a little later, as those of containers are.
            last = Some(error);
            (Vec::new(), environment.token.clone())
        });
        for address in addresses {
            match attempt(environment, address, &token, deadline) {
                Ok(stream) => return Ok((stream, token)),
                // It does not listen yet, or went before it had answered. Or it is of an earlier group.
                Err(Error::System { .. } | Error::Timeout { .. }) => {}
                Err(
                    error @ Error::State {
                        operation: HANDSHAKE,
                        ..
                    },
                ) => last = Some(error),
                Err(error) if environment.rendezvous.may_be_stale() => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        if let Err(passed) = deadline.nap() {
            return Err(last.unwrap_or(passed));
        }
    }
}

/// Reaches one address and is greeted there.
pub(super) fn attempt(
    environment: &LaunchEnvironment,
    address: SocketAddr,
    token: &Token,
    deadline: &Deadline,
) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, deadline.left()?.min(ATTEMPT))
        .map_err(|error| system("connect to the group's store", &error))?;
    enable_keepalive(&stream)?;
    let handshake = Handshake {
        size: environment.size,
        rank: environment.rank,
        nonce: nonce()?,
    };
    deadline.write_all(&stream, &handshake.to_bytes(), HANDSHAKE)?;
    let mut challenge = [0; CHALLENGE_BYTES];
    let (head, number) = challenge.split_at_mut(8);
    // Another program may never answer.
    let first = match environment.rendezvous.may_be_stale() {
        true => deadline.within(ATTEMPT),
        false => *deadline,
    };
    first.read_exact(&stream, head, HANDSHAKE)?;
    let mut theirs = [0; 8];
    theirs.copy_from_slice(head);
    // Another version says no more than this.
    handshake::check_head(&theirs)?;
    deadline.read_exact(&stream, number, HANDSHAKE)?;
    let mut challenge = [0; 32];
    challenge.copy_from_slice(number);
    deadline.write_all(&stream, &handshake.proof(token, &challenge), HANDSHAKE)?;
    let mut verdict = [0; HandshakeResult::BYTES];
    deadline.read_exact(&stream, &mut verdict, HANDSHAKE)?;
    let reason = match HandshakeResult::from_bytes(&verdict, token, &handshake, &challenge)? {
        HandshakeResult::Welcome => return Ok(stream),
        HandshakeResult::Token => "it has another token; is it of another job?".into(),
        HandshakeResult::Size(size) => format!(
            "its group has {size} ranks, this process's {}",
            environment.size
        ),
        HandshakeResult::Twice => format!("rank {} has come already", environment.rank),
        HandshakeResult::Ended => {
            let reason = format!(
                "rank {} has left that group, whose store is still there",
                environment.rank
            );
            return Err(Error::state(StateKind::NotAdmitted, HANDSHAKE, reason));
        }
        HandshakeResult::NoRank => format!("it knows no rank {}", environment.rank),
    };
    Err(Error::state(
        StateKind::NotAdmitted,
        "join of the group's store",
        reason,
    ))
}
