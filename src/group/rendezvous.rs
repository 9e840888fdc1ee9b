//! Where the store of a group is, and how its ranks learn it.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::endpoint::system;
use crate::group::interfaces::own_addresses;
use crate::group::torch_store::TorchStore;
use crate::group::{Token, pmix};
use crate::{Error, Result, StateKind};

/// The longest file that is read: an address, and a secret in hexadecimal.
const FILE_BYTES_MAX: u64 = 256;

/// The number of groups that this process has joined by its launcher's store.
static JOINS: AtomicU32 = AtomicU32::new(0);

/// Where rank 0 is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rendezvous {
    /// It listens there.
    Address(String),
    /// It listens at the first of these that is free. They follow from what a launcher says, which need not have kept them free.
    AnyOf(Vec<String>),
    /// It is on this host, and writes there where it listens, and a secret. The folder is the user's own.
    File(PathBuf),
    /// It writes there where it listens.
    Torch(TorchStore),
    /// It gives where it listens, and a secret, to the PMIx server of the job, under that key. Without a PMIx library it listens at one of the addresses, if there are any.
    Pmix { key: String, addresses: Vec<String> },
}

impl Rendezvous {
    /// # Errors
    /// [`Error::Malformed`] for a text that is no host and port.
    pub(super) fn address(address: String) -> Result<Rendezvous> {
        let port = address
            .rsplit_once(':')
            .filter(|(host, _)| !host.is_empty())
            .and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none() {
            return Err(Error::Malformed {
                what: "TCP address",
                reason: format!("`{address}` is not `host:port`"),
            });
        }
        Ok(Rendezvous::Address(address))
    }

    /// Where rank 0 is found by the next group that this process joins, and the number of that group among those of this launcher's store. The store keeps what was
    /// said for an earlier group, so each has a key of its own: all ranks join their groups in the same order. [`Rendezvous::joined`] counts.
    pub(super) fn of_next_join(&self) -> (Rendezvous, u32) {
        let number = JOINS.load(Ordering::Relaxed);
        let rendezvous = match self {
            Rendezvous::Address(_) | Rendezvous::AnyOf(_) | Rendezvous::File(_) => self.clone(),
            Rendezvous::Torch(store) => Rendezvous::Torch(TorchStore {
                key: format!("{}/{number}", store.key),
                ..store.clone()
            }),
            Rendezvous::Pmix { addresses, .. }
                if !addresses.is_empty() && !pmix::is_available() =>
            {
                Rendezvous::AnyOf(addresses.clone())
            }
            Rendezvous::Pmix { key, addresses } => Rendezvous::Pmix {
                key: format!("{key}.{number}"),
                addresses: addresses.clone(),
            },
        };
        (rendezvous, number)
    }

    /// This process has joined the group of that number. An attempt that failed does not count: the rank that tries again looks where the others are.
    pub(super) fn joined(&self, number: u32) {
        if matches!(self, Rendezvous::Torch(_) | Rendezvous::Pmix { .. }) {
            JOINS.fetch_max(number + 1, Ordering::Relaxed);
        }
    }

    /// Rank 0 listens: the socket, the token that counts, and the file if one was written.
    ///
    /// # Errors
    /// [`Error::System`] if the address is taken or not of this host; [`Error::State`] if the folder for the file is open to others.
    pub(super) fn listen(
        &self,
        token: &Token,
    ) -> Result<(TcpListener, Token, Option<Announcement>)> {
        match self {
            Rendezvous::Address(address) => {
                let listener = bind(address)?;
                Ok((listener, token.clone(), None))
            }
            Rendezvous::AnyOf(addresses) => {
                let mut bound = Err(system(BIND, &ErrorKind::InvalidInput.into()));
                for address in addresses {
                    bound = bind(address);
                    if !matches!(&bound, Err(Error::System { errno, .. }) if *errno == libc::EADDRINUSE)
                    {
                        break;
                    }
                }
                Ok((bound?, token_at(addresses, token), None))
            }
            Rendezvous::File(path) => {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
                    .map_err(|error| system(BIND, &error))?;
                let address = listener
                    .local_addr()
                    .map_err(|error| system("getsockname", &error))?;
                let token = Token::random()?;
                let file = RendezvousFile::write(path, address, &token)?;
                Ok((listener, token, Some(Announcement::File(file))))
            }
            Rendezvous::Torch(store) => {
                let (listener, addresses) = listen_everywhere()?;
                store.set(&format!("{addresses}\n"))?;
                Ok((
                    listener,
                    token.clone(),
                    Some(Announcement::Torch(store.clone())),
                ))
            }
            Rendezvous::Pmix { key, .. } => {
                let (listener, addresses) = listen_everywhere()?;
                let token = Token::random()?;
                pmix::put_text(key, &format!("{addresses}\n{}\n", hexadecimal(&token)))?;
                Ok((listener, token, None))
            }
        }
    }

    /// Where the store may be and the token that counts, as far as can be known now; no address if rank 0 has not said so yet.
    ///
    /// # Errors
    /// [`Error::State`] if the name cannot be resolved, at least not yet; [`Error::Malformed`]; [`Error::System`].
    pub(super) fn find(&self, token: &Token) -> Result<(Vec<SocketAddr>, Token)> {
        match self {
            Rendezvous::Address(address) => Ok((resolve(address)?, token.clone())),
            Rendezvous::AnyOf(addresses) => {
                let mut found = Vec::new();
                for address in addresses {
                    found.append(&mut resolve(address)?);
                }
                Ok((found, token_at(addresses, token)))
            }
            Rendezvous::File(path) => Ok(match RendezvousFile::read(path)? {
                Some((address, token)) => (vec![address], token),
                None => (Vec::new(), token.clone()),
            }),
            Rendezvous::Torch(store) => announced(store.get()?, token),
            Rendezvous::Pmix { key, .. } => announced(pmix::text_of_rank_0(key)?, token),
        }
    }

    /// Whether what is found may be of an earlier group, whose rank 0 was killed, or of another program.
    pub(super) fn may_be_stale(&self) -> bool {
        !matches!(self, Rendezvous::Address(_))
    }
}

const BIND: &str = "bind for the group's store";

/// A socket there: at that address if the host is a number, at all of this host if it is a name.
fn bind(address: &str) -> Result<TcpListener> {
    let bound = match address.parse::<SocketAddr>() {
        Ok(address) => TcpListener::bind(address),
        Err(_) => bind_all(address),
    };
    bound.map_err(|error| system(BIND, &error))
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().map_err(|error| {
        Error::state(
            StateKind::Environment,
            "search for rank 0",
            format!("`{address}`: {error}; `DOORBELL_MASTER_ADDR` may name it otherwise"),
        )
    })?;
    Ok(found.collect())
}

/// The token of a group at one of these addresses: with the first port, because jobs next to each other may have the same secret, or none, and some of the ports in
/// common. Without the host, which ranks may know by different names.
fn token_at(addresses: &[String], token: &Token) -> Token {
    let first = addresses.first().and_then(|first| first.rsplit_once(':'));
    let mut secret = token.secret().to_vec();
    secret.push(b':');
    secret.extend_from_slice(first.map_or("", |(_, port)| port).as_bytes());
    Token::new(secret)
}

/// A socket at every address of this host, and these addresses, with commas between them.
fn listen_everywhere() -> Result<(TcpListener, String)> {
    let listener = bind_all(":0").map_err(|error| system(BIND, &error))?;
    let bound = listener.local_addr();
    let bound = bound.map_err(|error| system("getsockname", &error))?;
    let addresses: Vec<String> = own_addresses()
        .into_iter()
        // Without IPv6 there is no socket for it.
        .filter(|address| bound.is_ipv6() || address.is_ipv4())
        .map(|address| SocketAddr::new(address, bound.port()).to_string())
        .collect();
    Ok((listener, addresses.join(",")))
}

/// The addresses in what rank 0 has announced, and the token: its own, if the announcement has one.
fn announced(text: Option<String>, token: &Token) -> Result<(Vec<SocketAddr>, Token)> {
    let Some(text) = text else {
        return Ok((Vec::new(), token.clone()));
    };
    let malformed = || Error::Malformed {
        what: "address of the group's store",
        reason: format!("`{text:.100}`"),
    };
    let (addresses, secret) = text.split_once('\n').ok_or_else(malformed)?;
    let found: Option<Vec<SocketAddr>> = addresses
        .split(',')
        .map(|address| address.parse().ok())
        .collect();
    let token = match secret.strip_suffix('\n') {
        Some(digits) => parse_secret(digits).ok_or_else(malformed)?,
        None => token.clone(),
    };
    Ok((found.ok_or_else(malformed)?, token))
}

/// What says where the store is, and is removed with it.
#[derive(Debug)]
pub(super) enum Announcement {
    #[expect(dead_code)] // only dropped
    File(RendezvousFile),
    Torch(TorchStore),
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if let Announcement::Torch(store) = self {
            // The store may have ended before.
            let _ = store.delete();
        }
    }
}

/// Every address of this host, of both families where it has both.
fn bind_all(address: &str) -> std::io::Result<TcpListener> {
    let port = address
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok());
    let port = port.unwrap_or_default();
    TcpListener::bind(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)).or_else(|error| {
        if error.kind() == ErrorKind::AddrInUse {
            return Err(error);
        }
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
    })
}

/// The file that says where the store is; removed with it.
#[derive(Debug)]
pub(super) struct RendezvousFile(PathBuf);

impl RendezvousFile {
    fn write(path: &Path, address: SocketAddr, token: &Token) -> Result<RendezvousFile> {
        check_folder(path)?;
        let mut text = format!("{address}\n");
        text.push_str(&hexadecimal(token));
        text.push('\n');
        // Whole or not at all; and a file of an earlier group of the same job is replaced.
        let new = path.with_extension("new");
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&new, path));
        written.map_err(|error| system("write of the rendezvous file", &error))?;
        Ok(RendezvousFile(path.to_owned()))
    }

    fn read(path: &Path) -> Result<Option<(SocketAddr, Token)>> {
        check_folder(path)?;
        let mut text = String::new();
        match File::open(path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text))
        {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(system("read of the rendezvous file", &error));
            }
        }
        let parsed = parse(&text).ok_or_else(|| Error::Malformed {
            what: "rendezvous file of a group",
            reason: path.display().to_string(),
        });
        parsed.map(Some)
    }
}

impl Drop for RendezvousFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn parse(text: &str) -> Option<(SocketAddr, Token)> {
    let (address, secret) = text.strip_suffix('\n')?.split_once('\n')?;
    Some((address.parse().ok()?, parse_secret(secret)?))
}

fn hexadecimal(token: &Token) -> String {
    let digits = token.secret().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

fn parse_secret(secret: &str) -> Option<Token> {
    let digits = secret.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let digit = |digit: u8| (digit as char).to_digit(16);
    let mut bytes = Vec::with_capacity(32);
    for pair in digits.chunks_exact(2) {
        bytes.push((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
    }
    Some(Token::new(bytes))
}

/// A user who may write into the folder could pose as rank 0.
fn check_folder(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    let look = |path: &Path| {
        fs::metadata(path).map_err(|error| system("stat of the job's folder", &error))
    };
    let (folder_is, own) = (look(folder)?, look(Path::new("/proc/self"))?);
    if folder_is.uid() != own.uid() || folder_is.mode() & 0o022 != 0 {
        return Err(Error::state(
            StateKind::Environment,
            "search for rank 0",
            format!(
                "others may write to {}; set `DOORBELL_MASTER_ADDR` and `DOORBELL_MASTER_PORT`",
                folder.display()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use std::time::Duration;

    use super::*;
    use crate::group::{LaunchEnvironment, Store};

    #[test]
    fn a_note_tells_where_the_store_is_and_goes_with_it() {
        let folder = std::env::temp_dir().join(format!("doorbell-note-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        let rendezvous = Rendezvous::File(folder.join("file"));
        let unused = Token::new("unused");
        let none_found = Ok((Vec::new(), unused.clone()));
        assert_eq!(rendezvous.find(&unused), none_found);
        let (listener, token, file) = rendezvous.listen(&unused).unwrap();
        let address = listener.local_addr().unwrap();
        assert_ne!(token, unused);
        assert_eq!(rendezvous.find(&unused), Ok((vec![address], token)));
        let mode = fs::metadata(folder.join("file")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(file);
        assert_eq!(rendezvous.find(&unused), none_found);
        fs::write(folder.join("file"), "127.0.0.1:1\nshort\n").unwrap();
        assert!(matches!(
            rendezvous.find(&unused),
            Err(Error::Malformed { .. })
        ));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(rendezvous.find(&unused), Err(Error::State { .. })));
        assert!(matches!(
            rendezvous.listen(&unused),
            Err(Error::State { .. })
        ));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn rank_0_takes_the_first_free_port_and_the_others_look_at_all() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [&taken, &free].map(|listener| listener.local_addr().unwrap());
        drop(free);
        let rendezvous = Rendezvous::AnyOf(addresses.map(|address| address.to_string()).to_vec());
        let token = Token::new("job");
        let (listener, of_rank_0, _) = rendezvous.listen(&token).unwrap();
        assert_eq!(listener.local_addr().unwrap(), addresses[1]);
        let (found, of_others) = rendezvous.find(&token).unwrap();
        assert_eq!(found, addresses);
        assert_eq!(of_rank_0, of_others);
        // Another job with the same secret, which begins at the next port.
        let next = Rendezvous::AnyOf(vec![addresses[1].to_string()]);
        assert_ne!(next.find(&token).unwrap().1, of_others);
        let refused = next.listen(&token).unwrap_err();
        let in_use = libc::EADDRINUSE;
        assert!(matches!(refused, Error::System { errno, .. } if errno == in_use));
    }

    #[test]
    fn ranks_meet_beside_a_program_that_never_answers() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let master = silent.local_addr().unwrap().port() - 1;
        let join = move |rank: &'static str| {
            let environment = LaunchEnvironment::from_vars(&|name| match name {
                "RANK" => Some(rank.into()),
                "WORLD_SIZE" => Some("2".into()),
                "MASTER_ADDR" => Some("127.0.0.1".into()),
                "MASTER_PORT" => Some(master.to_string()),
                _ => None,
            });
            Store::join(&environment.unwrap(), Duration::from_secs(60)).unwrap()
        };
        // Rank 0 has the store, which must not end before the other rank has come.
        let first = std::thread::spawn(move || join("0"));
        assert_eq!(join("1").rank(), 1);
        assert_eq!(first.join().unwrap().rank(), 0);
    }

    #[test]
    fn a_name_listens_everywhere_and_a_number_there() {
        let listen = |address: &str| {
            let rendezvous = Rendezvous::address(address.into()).unwrap();
            let (listener, ..) = rendezvous.listen(&Token::new("")).unwrap();
            listener.local_addr().unwrap().ip()
        };
        assert!(listen("localhost:0").is_unspecified());
        assert_eq!(listen("127.0.0.1:0"), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
}
