//! A client of `torch.distributed`'s `TCPStore`, as far as a rendezvous and the exchange of addresses need one: a value is set, looked for and deleted.
//!
//! A request is a byte for its kind, then its fields: numbers of eight bytes in the byte order of the host, texts with their length before them. The numbers of
//! the kinds begin with `SET` in torch 1, and with `VALIDATE` in torch 2, whose clients say a number (and since 2.2 a `PING`, which is answered) first. Nothing tells which of
//! them listens, so the client tries. A server that does not understand a request closes the connection.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::endpoint::{Deadline, system};
use crate::group::exchange::{ExchangeStore, ExchangeWait};
use crate::{Error, Result};

const EXCHANGE: &str = "exchange with torch's store";
/// How long one exchange may take. The rendezvous repeats it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest value that is read.
const VALUE_BYTES_MAX: u64 = 1 << 20;
/// What a client of torch 2 says after `VALIDATE`.
const VALIDATION: u32 = 0x3C85_F7CE;
/// What it says after `PING`. As part of the length of a key, for which a server of torch 1 would take it, it is longer than any memory: that server closes the
/// connection at once.
const NONCE: u32 = 0xFFFF_D00B;

/// Where the store is, and the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TorchStore {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) key: String,
}

/// The numbers of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    /// Torch 1.
    First,
    /// Torch 2.2 and later.
    Pinged,
    /// Torch 2 before that.
    Validated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TorchRequest {
    Set,
    Get,
    Check,
    Delete,
}

impl Dialect {
    fn number(self, request: TorchRequest) -> u8 {
        // Torch 1 has another request before the one that deletes.
        let (first, later) = match request {
            TorchRequest::Set => (0, 1),
            TorchRequest::Get => (2, 3),
            TorchRequest::Check => (4, 5),
            TorchRequest::Delete => (8, 8),
        };
        if self == Dialect::First { first } else { later }
    }

    /// What is said first.
    fn greeting(self) -> Vec<u8> {
        const VALIDATE: u8 = 0;
        const PING: u8 = 13;
        let mut bytes = Vec::new();
        if self != Dialect::First {
            bytes.push(VALIDATE);
            bytes.extend_from_slice(&VALIDATION.to_ne_bytes());
        }
        if self == Dialect::Pinged {
            bytes.push(PING);
            bytes.extend_from_slice(&NONCE.to_ne_bytes());
        }
        bytes
    }
}

/// A connection that the store understands.
#[derive(Debug)]
struct TorchConnection {
    stream: TcpStream,
    dialect: Dialect,
    deadline: Deadline,
    /// Whether the key is there.
    has_value: bool,
}

impl TorchStore {
    /// # Errors
    /// [`Error::System`] or [`Error::Timeout`] if it cannot be reached, or speaks none of the dialects.
    pub(super) fn set(&self, value: &str) -> Result<()> {
        let connection = self.open()?;
        let mut bytes = self.request(connection.dialect, TorchRequest::Set);
        append(&mut bytes, value.as_bytes());
        connection.write(&bytes)?;
        // `SET` has no answer: the answer to the next request says that it was read.
        connection.check(self).map(drop)
    }

    /// The value, if there is one.
    ///
    /// # Errors
    /// As [`TorchStore::set`]; [`Error::Malformed`] if it is no value of this library.
    pub(super) fn get(&self) -> Result<Option<String>> {
        let connection = self.open()?;
        if !connection.has_value {
            return Ok(None);
        }
        connection.write(&self.request(connection.dialect, TorchRequest::Get))?;
        let text = String::from_utf8(connection.read_value()?);
        text.map(Some)
            .map_err(|_| malformed("it is no text".into()))
    }

    /// # Errors
    /// As [`TorchStore::set`].
    pub(super) fn delete(&self) -> Result<()> {
        let connection = self.open()?;
        connection.write(&self.request(connection.dialect, TorchRequest::Delete))?;
        // How many were deleted.
        connection.read(&mut [0; 8])
    }

    /// The requests before the last field.
    fn request(&self, dialect: Dialect, request: TorchRequest) -> Vec<u8> {
        let mut bytes = vec![dialect.number(request)];
        if matches!(request, TorchRequest::Check) {
            bytes.extend_from_slice(&1_u64.to_ne_bytes());
        }
        append(&mut bytes, self.key.as_bytes());
        bytes
    }

    /// A server of torch 1 is asked with its own numbers before one of early torch 2: it would take a `CHECK` of those for a key of a terabyte.
    fn open(&self) -> Result<TorchConnection> {
        let as_in = |dialect| self.open_as(dialect, Deadline::new(EXCHANGE, PATIENCE));
        as_in(Dialect::Pinged).or_else(|refused| {
            as_in(Dialect::First)
                .or_else(|_| as_in(Dialect::Validated))
                .map_err(|_| refused)
        })
    }

    fn open_as(&self, dialect: Dialect, deadline: Deadline) -> Result<TorchConnection> {
        let addresses = (self.host.as_str(), self.port).to_socket_addrs();
        let addresses = addresses.map_err(|error| system(EXCHANGE, &error))?;
        let mut reached = Err(Error::System {
            operation: EXCHANGE,
            errno: libc::EADDRNOTAVAIL,
        });
        for address in addresses {
            reached = TcpStream::connect_timeout(&address, deadline.left()?)
                .map_err(|error| system(EXCHANGE, &error));
            if reached.is_ok() {
                break;
            }
        }
        let mut connection = TorchConnection {
            stream: reached?,
            dialect,
            deadline,
            has_value: false,
        };
        // Small requests follow each other.
        connection
            .stream
            .set_nodelay(true)
            .map_err(|error| system(EXCHANGE, &error))?;
        connection.write(&dialect.greeting())?;
        if dialect == Dialect::Pinged {
            let mut nonce = [0; 4];
            connection.read(&mut nonce)?;
            if nonce != NONCE.to_ne_bytes() {
                return Err(Error::Malformed {
                    what: "answer of torch's store",
                    reason: "it is not what was said".into(),
                });
            }
        }
        connection.has_value = connection.check(self)?;
        Ok(connection)
    }
}

/// The store as one for exchanges, with a connection that stays.
#[derive(Debug)]
pub(super) struct TorchExchange {
    store: TorchStore,
    state: Mutex<TorchExchangeState>,
}

#[derive(Debug, Default)]
struct TorchExchangeState {
    connection: Option<TorchConnection>,
    /// Keys and values to be set.
    put: Vec<(String, Vec<u8>)>,
}

impl TorchExchange {
    pub(super) fn new(store: &TorchStore) -> TorchExchange {
        TorchExchange {
            store: store.clone(),
            state: Mutex::default(),
        }
    }

    /// With the connection, which ends after an error, and what was put.
    fn exchange<T>(
        &self,
        run: impl FnOnce(&TorchConnection, &mut Vec<(String, Vec<u8>)>) -> Result<T>,
    ) -> Result<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut connection = match state.connection.take() {
            Some(connection) => connection,
            None => self.store.open()?,
        };
        connection.deadline = Deadline::new(EXCHANGE, PATIENCE);
        let done = run(&connection, &mut state.put)?;
        state.connection = Some(connection);
        Ok(done)
    }

    fn at(&self, key: &str) -> TorchStore {
        TorchStore {
            key: format!("{}/{key}", self.store.key),
            ..self.store.clone()
        }
    }
}

impl ExchangeStore for TorchExchange {
    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.put.push((key.to_owned(), value.to_owned()));
        Ok(())
    }

    fn commit(&self) -> Result<()> {
        self.exchange(|connection, put| {
            let mut bytes = Vec::new();
            for (key, value) in put.iter() {
                let at = self.at(key);
                bytes.extend(at.request(connection.dialect, TorchRequest::Set));
                append(&mut bytes, value);
            }
            connection.write(&bytes)?;
            // As in `TorchStore::set`.
            connection.check(&self.store)?;
            // Only now: the exchange of another thread may have put some of it, and commits later.
            put.clear();
            Ok(())
        })
    }

    /// There is one server: what was committed before the ranks met is there.
    fn fence(&self, _: &ExchangeWait<'_>) -> Result<()> {
        Ok(())
    }

    fn get(&self, _: u32, key: &str) -> Result<Option<Vec<u8>>> {
        self.exchange(|connection, _| {
            let at = self.at(key);
            connection.write(&at.request(connection.dialect, TorchRequest::Get))?;
            connection.read_value().map(Some)
        })
    }

    fn remove(&self, keys: &[String]) -> Result<()> {
        {
            // What could not be committed is not to be set later.
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.put.retain(|(key, _)| !keys.contains(key));
        }
        self.exchange(|connection, _| {
            let mut bytes = Vec::new();
            for key in keys {
                let at = self.at(key);
                bytes.extend(at.request(connection.dialect, TorchRequest::Delete));
            }
            connection.write(&bytes)?;
            // How many were deleted, for each.
            keys.iter().try_for_each(|_| connection.read(&mut [0; 8]))
        })
    }
}

impl TorchConnection {
    fn check(&self, store: &TorchStore) -> Result<bool> {
        self.write(&store.request(self.dialect, TorchRequest::Check))?;
        let mut answer = [0];
        self.read(&mut answer)?;
        match answer[0] {
            0 => Ok(true),
            1 => Ok(false),
            other => Err(Error::Malformed {
                what: "answer of torch's store",
                reason: format!("{other} says neither that the key is there nor that it is not"),
            }),
        }
    }

    /// The answer to `GET`.
    fn read_value(&self) -> Result<Vec<u8>> {
        let mut len = [0; 8];
        self.read(&mut len)?;
        let len = u64::from_ne_bytes(len);
        if len > VALUE_BYTES_MAX {
            return Err(malformed(format!("it has {len} bytes")));
        }
        let mut value = vec![0; len as usize];
        self.read(&mut value)?;
        Ok(value)
    }

    fn write(&self, bytes: &[u8]) -> Result<()> {
        self.deadline.write_all(&self.stream, bytes, EXCHANGE)
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        self.deadline.read_exact(&self.stream, bytes, EXCHANGE)
    }
}

fn malformed(reason: String) -> Error {
    Error::Malformed {
        what: "value in torch's store",
        reason,
    }
}

fn append(bytes: &mut Vec<u8>, text: &[u8]) {
    bytes.extend_from_slice(&(text.len() as u64).to_ne_bytes());
    bytes.extend_from_slice(text);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::group::{LaunchEnvironment, Store};

    /// A server that understands one dialect, and closes the connection of anybody else.
    fn serve(
        mut stream: TcpStream,
        dialect: Dialect,
        values: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> Option<()> {
        let mut answer = stream.try_clone().ok()?;
        let mut take = |len: usize| {
            let mut bytes = vec![0; len];
            stream.read_exact(&mut bytes).ok()?;
            Some(bytes)
        };
        let mut out = Vec::new();
        let greeting = dialect.greeting();
        if take(greeting.len())? != greeting {
            return None;
        }
        if dialect == Dialect::Pinged {
            answer.write_all(&NONCE.to_ne_bytes()).ok()?;
        }
        loop {
            let kind = take(1)?[0];
            let number = |take: &mut dyn FnMut(usize) -> Option<Vec<u8>>| {
                let number = u64::from_ne_bytes(take(8)?.try_into().ok()?);
                (number < 1 << 20).then_some(number as usize)
            };
            let is = |request| kind == dialect.number(request);
            let known = [
                TorchRequest::Set,
                TorchRequest::Get,
                TorchRequest::Check,
                TorchRequest::Delete,
            ];
            if !known.into_iter().any(is) {
                return None;
            }
            if is(TorchRequest::Check) {
                assert_eq!(number(&mut take)?, 1);
            }
            let len = number(&mut take)?;
            let key = take(len)?;
            out.clear();
            if is(TorchRequest::Set) {
                let len = number(&mut take)?;
                let value = take(len)?;
                values.insert(key, value);
            } else if is(TorchRequest::Get) {
                append(&mut out, &values[&key]);
            } else if is(TorchRequest::Check) {
                out.push(u8::from(!values.contains_key(&key)));
            } else if is(TorchRequest::Delete) {
                let gone = u64::from(values.remove(&key).is_some());
                out.extend_from_slice(&gone.to_ne_bytes());
            }
            answer.write_all(&out).ok()?;
        }
    }

    #[test]
    fn a_value_is_set_found_and_deleted_in_every_dialect() {
        for dialect in [Dialect::First, Dialect::Validated, Dialect::Pinged] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let store = TorchStore {
                host: "127.0.0.1".into(),
                port: listener.local_addr().unwrap().port(),
                key: "doorbell/a key".into(),
            };
            std::thread::spawn(move || {
                let mut values = BTreeMap::new();
                for stream in listener.incoming() {
                    let _ = serve(stream.unwrap(), dialect, &mut values);
                }
            });
            assert_eq!(store.get(), Ok(None), "{dialect:?}");
            store.set("here\n").unwrap();
            assert_eq!(store.get(), Ok(Some("here\n".into())), "{dialect:?}");
            store.delete().unwrap();
            assert_eq!(store.get(), Ok(None), "{dialect:?}");
            let exchange = TorchExchange::new(&store);
            for round in 0..2 {
                for number in 0..3 {
                    let value = [b'a' + number; 200];
                    exchange.put(&format!("{round}.{number}"), &value).unwrap();
                }
                // A look of another thread's exchange takes nothing from this one.
                if round > 0 {
                    assert!(exchange.get(7, "0.0").unwrap().is_some());
                }
                exchange.commit().unwrap();
                for number in 0..3 {
                    let value = exchange.get(7, &format!("{round}.{number}"));
                    assert_eq!(value, Ok(Some(vec![b'a' + number; 200])), "{dialect:?}");
                }
            }
            let keys: Vec<String> = (0..3).map(|number| format!("0.{number}")).collect();
            exchange.remove(&keys).unwrap();
            // The connection goes on behind the answers, and other values are as they were.
            assert!(exchange.get(7, "1.0").unwrap().is_some(), "{dialect:?}");
            let places: Vec<TorchStore> = keys.iter().map(|key| exchange.at(key)).collect();
            // The server has one connection at a time.
            drop(exchange);
            for place in places {
                assert_eq!(place.get(), Ok(None), "{dialect:?}");
            }
        }
    }

    #[test]
    fn a_rank_that_has_waited_in_vain_meets_the_others_when_it_tries_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let mut values = BTreeMap::new();
            for stream in listener.incoming() {
                let _ = serve(stream.unwrap(), Dialect::Pinged, &mut values);
            }
        });
        let join = move |rank: &'static str, timeout_ms| {
            let environment = LaunchEnvironment::from_vars(&|name| match name {
                "RANK" => Some(rank.into()),
                "WORLD_SIZE" => Some("2".into()),
                "TORCHELASTIC_USE_AGENT_STORE" => Some("True".into()),
                "MASTER_ADDR" => Some("127.0.0.1".into()),
                "MASTER_PORT" => Some(port.to_string()),
                _ => None,
            });
            Store::join(&environment.unwrap(), Duration::from_millis(timeout_ms))
        };
        // Rank 0 has not come: twice.
        for _ in 0..2 {
            assert!(matches!(join("1", 100), Err(Error::Timeout { .. })));
        }
        let first = std::thread::spawn(move || join("0", 60_000).unwrap());
        let second = join("1", 30_000).unwrap();
        assert_eq!((first.join().unwrap().rank(), second.rank()), (0, 1));
    }

    #[test]
    fn nobody_there_is_an_error() {
        let port = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let store = TorchStore {
            host: "127.0.0.1".into(),
            port,
            key: "key".into(),
        };
        assert!(matches!(store.get(), Err(Error::System { .. })));
    }
}
