//! The connection of a rank with the store: requests and their answers, and messages without a request.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::endpoint::{Deadline, system};
use crate::group::message::Message;
use crate::{Error, Result, StateKind};

/// How long it may take to tell the store that an answer is no longer wanted.
const CANCEL: Duration = Duration::from_secs(1);

/// Gets what the store sends without a request.
pub(super) trait Watcher: Send {
    /// Another rank sent this.
    fn message(&self, client: &StoreClient, from: u32, bytes: &[u8]);
    /// The group fails with that rank. This is called before the failure is published, which happens as soon as this returns.
    fn failing(&self, client: &StoreClient, rank: u32);
    /// The group has failed: [`StoreClient::failure`] says so.
    fn failed(&self, client: &StoreClient);
}

/// The connection, and what goes on over it.
pub(super) struct StoreClient {
    rank: u32,
    size: u32,
    stream: TcpStream,
    /// Held by the thread that writes a message.
    sending: Mutex<()>,
    state: Mutex<ClientState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ClientState {
    next_id: u32,
    /// The requests under way, with their answers once they are there.
    requests: BTreeMap<u32, Option<Result<Vec<u8>>>>,
    failure: Option<(u32, String)>,
    /// The request to leave the group.
    leave: Option<u32>,
    /// This rank has left the group: what comes from then on is no failure.
    has_left: bool,
    /// It has ended the connection.
    has_hung_up: bool,
    /// Why the connection has ended.
    ended: Option<String>,
}

/// Which failures end a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failing {
    /// That of any rank.
    AnyRank,
    /// That of the store, in which others can be survived.
    Store,
}

impl ClientState {
    fn failure(&self) -> Option<Error> {
        let (rank, reason) = self.failure.clone()?;
        Some(Error::Rank { rank, reason })
    }

    fn failure_for(&self, failing: Failing) -> Option<Error> {
        match failing {
            Failing::AnyRank => self.failure(),
            Failing::Store => {
                let reason = self.ended.clone()?;
                Some(Error::Rank { rank: 0, reason })
            }
        }
    }
}

impl fmt::Debug for StoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

impl StoreClient {
    /// Over a connection that has been let in.
    pub(super) fn new(rank: u32, size: u32, stream: TcpStream) -> StoreClient {
        StoreClient {
            rank,
            size,
            stream,
            sending: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.state().failure()
    }

    /// The address at which the store was reached.
    pub(super) fn store_address(&self) -> Result<SocketAddr> {
        let address = self.stream.peer_addr();
        address.map_err(|error| system("getpeername", &error))
    }

    fn state(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the group has failed, or the time is over.
    pub(super) fn wait_for_failure(&self, timeout: Duration) -> Option<Error> {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.state(), timeout, |state| state.failure.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        state.failure()
    }

    /// Sends a message to another rank.
    pub(super) fn send_to_rank(&self, to: u32, bytes: &[u8], deadline: &Deadline) -> Result<()> {
        self.send(&Message::Forward { to, bytes }.to_bytes()?, deadline)
    }

    /// The same from the thread that reads, which is the one that notes the end of the store: it does not wait for the reason.
    pub(super) fn answer_rank(&self, to: u32, bytes: &[u8], deadline: &Deadline) -> Result<()> {
        self.write(&Message::Forward { to, bytes }.to_bytes()?, deadline)
    }

    /// Sends a request and waits for its answer.
    pub(super) fn request<'a>(
        &self,
        deadline: &Deadline,
        message: impl FnOnce(u32) -> Message<'a>,
    ) -> Result<Vec<u8>> {
        self.exchange(deadline, Failing::AnyRank, message)
    }

    /// The same in a group that has failed, as long as the store is there.
    pub(super) fn request_of_survivor<'a>(
        &self,
        deadline: &Deadline,
        message: impl FnOnce(u32) -> Message<'a>,
    ) -> Result<Vec<u8>> {
        self.exchange(deadline, Failing::Store, message)
    }

    fn exchange<'a>(
        &self,
        deadline: &Deadline,
        failing: Failing,
        message: impl FnOnce(u32) -> Message<'a>,
    ) -> Result<Vec<u8>> {
        let id = {
            let mut state = self.state();
            if let Some(failure) = state.failure_for(failing) {
                return Err(failure);
            }
            let id = state.next_id;
            state.next_id = id.wrapping_add(1);
            id
        };
        let bytes = message(id).to_bytes()?;
        self.state().requests.insert(id, None);
        let sent = self.send(&bytes, deadline);
        let answer = sent.and_then(|()| self.wait(id, failing, deadline));
        self.state().requests.remove(&id);
        if matches!(answer, Err(Error::Timeout { .. })) {
            let bytes = Message::Cancel { id }.to_bytes()?;
            let _ = self.send(&bytes, &Deadline::new("cancel", CANCEL));
        }
        answer
    }

    /// Leaves the group. If it succeeds, no later event is a failure of the group for this rank.
    pub(super) fn leave(&self, deadline: &Deadline) -> Result<()> {
        let message = |id| {
            self.state().leave = Some(id);
            Message::Leave { id }
        };
        self.request(deadline, message).map(drop)
    }

    fn wait(&self, id: u32, failing: Failing, deadline: &Deadline) -> Result<Vec<u8>> {
        let mut state = self.state();
        loop {
            if let Some(answer) = state.requests.get_mut(&id).and_then(Option::take) {
                return answer;
            }
            if let Some(failure) = state.failure_for(failing) {
                return Err(failure);
            }
            (state, _) = self
                .changed
                .wait_timeout(state, deadline.left()?)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the right to write to the store. Its holder may wait for a store that does not read, until the holder's own deadline.
    fn turn(&self, deadline: &Deadline) -> Result<MutexGuard<'_, ()>> {
        loop {
            match self.sending.try_lock() {
                Ok(turn) => return Ok(turn),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => deadline.nap()?,
            }
        }
    }

    fn send(&self, bytes: &[u8], deadline: &Deadline) -> Result<()> {
        self.write(bytes, deadline).map_err(|error| match error {
            Error::Timeout { .. } => error,
            // The end of the store is reported as the end of a rank, once the reader has read up to that point.
            _ => self.wait_for_failure(CANCEL).unwrap_or(error),
        })
    }

    fn write(&self, bytes: &[u8], deadline: &Deadline) -> Result<()> {
        let _turn = self.turn(deadline)?;
        deadline
            .write_all(&self.stream, bytes, "send to the group's store")
            .inspect_err(|_| {
                // Half of a message may be written: nothing can follow it. The reader notes the end, and its reason.
                let _ = self.stream.shutdown(Shutdown::Both);
            })
    }

    /// Ends the connection.
    pub(super) fn hang_up(&self) {
        self.state().has_hung_up = true;
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Takes what comes, until the connection ends.
    pub(super) fn read(&self, mut stream: TcpStream, watcher: &dyn Watcher) {
        let (mut input, mut scratch) = (Vec::new(), vec![0; 64 << 10]);
        let reason = 'ended: loop {
            match stream.read(&mut scratch) {
                Ok(0) => break "the connection with its store has ended".to_owned(),
                Ok(count) => input.extend_from_slice(&scratch[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => break format!("the connection with its store has ended: {error}"),
            }
            let mut at = 0;
            loop {
                match Message::parse(&input[at..]) {
                    Ok(Some((message, len))) => {
                        at += len;
                        if let Err(reason) = self.take(&message, watcher) {
                            break 'ended reason.to_owned();
                        }
                    }
                    Ok(None) => break,
                    Err(error) => break 'ended error.to_string(),
                }
            }
            input.drain(..at);
        };
        let (has_hung_up, leaves) = {
            let mut state = self.state();
            state.ended = Some(reason.clone());
            self.changed.notify_all();
            (state.has_hung_up, state.leave.is_some())
        };
        if has_hung_up && leaves {
            // The others may see a failure, if the request to leave was not answered in time. This rank wanted to go.
            return;
        }
        if has_hung_up {
            let reason = "it has ended the connection without leaving the group".to_owned();
            return self.fail(self.rank, reason, watcher);
        }
        self.fail(0, reason, watcher);
    }

    fn take(&self, message: &Message<'_>, watcher: &dyn Watcher) -> Result<(), &'static str> {
        let (id, answer) = match *message {
            Message::Done { id } => (id, Ok(Vec::new())),
            Message::Value { id, value } => (id, Ok(value.to_vec())),
            Message::List { id, values } => (id, Ok(values.to_vec())),
            Message::Left { id, rank } => {
                let reason = "it has left".into();
                (id, Err(Error::Rank { rank, reason }))
            }
            Message::Full { id } => {
                let operation = "request to the group's store";
                (
                    id,
                    Err(Error::state(
                        StateKind::Exhausted,
                        operation,
                        "it has no room for this",
                    )),
                )
            }
            Message::Delivery { from, bytes } => {
                if from >= self.size {
                    return Err("its store named a rank that does not exist");
                }
                watcher.message(self, from, bytes);
                return Ok(());
            }
            Message::Lost { rank } => {
                let reason = "its process ended and had not left".to_owned();
                self.fail(rank, reason, watcher);
                return Ok(());
            }
            _ => return Err("its store sent a message that only ranks send"),
        };
        let mut state = self.state();
        // Noted here, since the store may end the connection before the caller has seen the answer.
        state.has_left |= state.leave == Some(id) && answer.is_ok();
        // If the answer is too late, no caller waits for it any more.
        if let Some(request) = state.requests.get_mut(&id) {
            *request = Some(answer);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Only the first failure counts. Called by the reader thread.
    fn fail(&self, rank: u32, reason: String, watcher: &dyn Watcher) {
        let is_over = |state: &ClientState| state.has_left || state.failure.is_some();
        if is_over(&self.state()) {
            return;
        }
        // Endpoints are aborted before the failure is published, so that nothing that begins after that is aborted.
        watcher.failing(self, rank);
        self.state().failure = Some((rank, reason));
        self.changed.notify_all();
        watcher.failed(self);
    }
}
