//! The launch environment: rank and size of this process in its job, and where rank 0 is, as the launchers say it.

use std::path::PathBuf;

use crate::group::rendezvous::Rendezvous;
use crate::group::torch_store::TorchStore;
use crate::group::{SIZE_MAX, Token};
use crate::{Error, Result, StateKind};

/// The longest list of hosts that is read. Slurm cuts its own off far below.
const HOST_LIST_BYTES_MAX: usize = 1 << 20;
/// Ports made of a job's name: below those that systems give to outgoing connections.
const PORTS: std::ops::Range<u32> = 20_000..32_000;

/// Which rank of how many this process is, where rank 0 is to be found, and the token of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnvironment {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) rendezvous: Rendezvous,
    pub(super) token: Token,
    /// The launcher's store, through which addresses are exchanged.
    pub(super) launcher: Option<LauncherStore>,
}

impl LaunchEnvironment {
    /// A launch environment from values that the caller knows: rank 0 listens at `address`, such as `10.0.0.1:7471`. If its host is a number, rank 0 listens
    /// at that one address; if it is a name, at all of its own, because a host often knows its own name as a loopback address.
    ///
    /// # Errors
    /// [`Error::Range`] for a size that is not 1 to 65536, or a rank beyond it; [`Error::Malformed`] for an address without a port.
    pub fn new(rank: u32, size: u32, address: &str, token: Token) -> Result<LaunchEnvironment> {
        let address = address.to_owned();
        LaunchEnvironment::at(rank, size, Rendezvous::address(address)?, token)
    }

    /// What the launcher says, in the first of these that is there:
    ///
    /// | launcher | rank and size | address of rank 0 |
    /// |---|---|---|
    /// | by hand | `DOORBELL_RANK`, `DOORBELL_SIZE` | |
    /// | torchrun | `RANK`, `WORLD_SIZE` | the store of torchrun's agent, where rank 0 writes it; without such a store (`TORCHELASTIC_USE_AGENT_STORE` is not `True`) `MASTER_ADDR`, and the first free one of the eight ports *after* `MASTER_PORT`, which itself is that of torch's own store |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | on one host, a file in the job's own folder, where rank 0 writes it with a random token; on several, the job's PMIx server |
    /// | MPICH and others with PMI | `PMI_RANK`, `PMI_SIZE` | |
    /// | Slurm (`srun`) | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | with `--mpi=pmix` and `libpmix.so.2`, as PMIx; otherwise 127.0.0.1 on one node, or the first host of `SLURM_STEP_NODELIST`, and the first free one of eight ports made of the job's number |
    /// | PMIx | `PMIX_RANK`, and `PMIX_SIZE` or `DOORBELL_SIZE` | the job's PMIx server, to which rank 0 gives it with a random token |
    ///
    /// `DOORBELL_MASTER_ADDR` and `DOORBELL_MASTER_PORT` go before all of that, each by itself. Where there is neither they have to be given: no launcher but those
    /// tells its processes where rank 0 is. For PMIx the process loads `libpmix.so.2`. With the store of torchrun or PMIx, rank 0 listens at any port of all its addresses, and all ranks
    /// join their groups in the same order. Slurm's `--distribution=arbitrary` may put rank 0
    /// on another host than the first.
    ///
    /// The token is `DOORBELL_TOKEN`, the same for all ranks. Without it, it is the name of the job: that keeps jobs apart that
    /// meet at one port by mistake, but is no secret to anyone who can find it out or guess it.
    ///
    /// # Errors
    /// [`Error::State`] saying which variable is missing; [`Error::Malformed`] naming one that makes no sense; [`Error::Range`] as [`LaunchEnvironment::new`].
    pub fn from_env() -> Result<LaunchEnvironment> {
        LaunchEnvironment::from_vars(&|name| std::env::var(name).ok())
    }

    /// [`LaunchEnvironment::from_env`] of another environment than the process's.
    ///
    /// # Errors
    /// As [`LaunchEnvironment::from_env`].
    pub fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<LaunchEnvironment> {
        let vars = Vars(lookup);
        let launched = Launched::find(&vars)?;
        let job = launched.job.clone();
        let token = Token::new(vars.text("DOORBELL_TOKEN").unwrap_or(job));
        let rendezvous = launched.rendezvous(&vars)?;
        let environment = LaunchEnvironment::at(launched.rank, launched.size, rendezvous, token)?;
        Ok(LaunchEnvironment {
            launcher: launched.store,
            ..environment
        })
    }

    fn at(rank: u32, size: u32, rendezvous: Rendezvous, token: Token) -> Result<LaunchEnvironment> {
        let range = |argument, value: u32, min: u32, max: u32| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(Error::Range {
                argument,
                value: value.into(),
                min: min.into(),
                max: max.into(),
            })
        };
        range("size", size, 1, SIZE_MAX)?;
        range("rank", rank, 0, size - 1)?;
        Ok(LaunchEnvironment {
            rank,
            size,
            rendezvous,
            token,
            launcher: None,
        })
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many there are.
    pub fn size(&self) -> u32 {
        self.size
    }
}

/// Variables. An empty one counts as not set.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|text| !text.is_empty())
    }

    /// Those of them that there are, as one name.
    fn joined(&self, names: &[&str]) -> String {
        let parts: Vec<_> = names.iter().filter_map(|name| self.text(name)).collect();
        parts.join(".")
    }

    fn number(&self, name: &'static str) -> Result<Option<u32>> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let number = text.trim().parse();
        number.map(Some).map_err(|_| Error::Malformed {
            what: "environment",
            reason: format!("`{name}` is `{text}`, which is not a number"),
        })
    }

    fn need(&self, name: &'static str, launcher: &str) -> Result<u32> {
        self.number(name)?.ok_or_else(|| {
            Error::state(
                StateKind::Environment,
                "reading of the launcher's environment",
                format!("this is a process of {launcher}, and `{name}` is not set"),
            )
        })
    }
}

/// What is known of a job by its launcher.
#[derive(Debug)]
struct Launched {
    rank: u32,
    size: u32,
    /// A name that no other job has, as far as the launcher gives one.
    job: String,
    /// Where rank 0 is, and why not if that is not known.
    host: Result<String, &'static str>,
    port: Option<u32>,
    /// A folder of this job alone, if all ranks are on its host.
    folder: Option<PathBuf>,
    /// The launcher's own store, by which rank 0 tells where it is.
    store: Option<LauncherStore>,
}

/// A store of a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LauncherStore {
    /// Of torchrun, at `MASTER_ADDR` and `MASTER_PORT`.
    Torch(TorchStore),
    Pmix,
}

impl Launched {
    fn find(vars: &Vars<'_>) -> Result<Launched> {
        let has = |name| vars.text(name).is_some();
        let job = |parts: &[&str]| vars.joined(parts);
        let bare = Launched::bare;
        if has("DOORBELL_RANK") {
            let rank = vars.need("DOORBELL_RANK", "a group by hand")?;
            let size = vars.need("DOORBELL_SIZE", "a group by hand")?;
            let host = Err(
                "without a launcher, DOORBELL_MASTER_ADDR and DOORBELL_MASTER_PORT are required",
            );
            return Ok(bare(rank, size, String::new(), host));
        }
        if has("RANK") && has("WORLD_SIZE") {
            let rank = vars.need("RANK", "torchrun")?;
            let size = vars.need("WORLD_SIZE", "torchrun")?;
            let host = vars
                .text("MASTER_ADDR")
                .ok_or("`RANK` and `WORLD_SIZE` are set, `MASTER_ADDR` is not");
            return Ok(Launched {
                // One more than any port is caught where it is used.
                port: vars
                    .number("MASTER_PORT")?
                    .map(|port| port.saturating_add(1)),
                store: Launched::torch_store(vars)?,
                ..bare(rank, size, job(&["TORCHELASTIC_RUN_ID"]), host)
            });
        }
        if has("OMPI_COMM_WORLD_RANK") {
            let rank = vars.need("OMPI_COMM_WORLD_RANK", "Open MPI")?;
            let size = vars.need("OMPI_COMM_WORLD_SIZE", "Open MPI")?;
            let here = vars.number("OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(size);
            let host = Err(
                "Open MPI does not tell its processes where rank 0 is, unless all of them are on one host",
            );
            return Ok(Launched {
                folder: vars
                    .text("PMIX_SERVER_TMPDIR")
                    .filter(|_| here)
                    .map(PathBuf::from),
                store: has("PMIX_NAMESPACE").then_some(LauncherStore::Pmix),
                ..bare(rank, size, job(&["PMIX_NAMESPACE"]), host)
            });
        }
        let slurm = Launched::slurm(vars)?;
        if has("PMI_RANK") {
            let rank = vars.need("PMI_RANK", "a launcher with PMI")?;
            let size = vars.need("PMI_SIZE", "a launcher with PMI")?;
            let host = Err("PMI does not tell its processes where rank 0 is");
            // Slurm speaks PMI, too. Another launcher inside a Slurm job leaves the variables of its own daemons behind.
            let slurm = slurm.filter(|slurm| (slurm.rank, slurm.size) == (rank, size));
            return Ok(slurm.unwrap_or(bare(rank, size, job(&["SLURM_JOB_ID"]), host)));
        }
        // Under Slurm with PMIx, what Slurm says is more.
        if let Some(slurm) = slurm {
            return Ok(slurm);
        }
        if has("PMIX_RANK") {
            let rank = vars.need("PMIX_RANK", "a launcher with PMIx")?;
            let size = match vars.number("PMIX_SIZE")? {
                Some(size) => size,
                None => vars.need(
                    "DOORBELL_SIZE",
                    "a launcher with PMIx, which has no variable for the size",
                )?,
            };
            let host = Err("PMIx has no variable that says where rank 0 is");
            return Ok(Launched {
                store: Some(LauncherStore::Pmix),
                ..bare(rank, size, job(&["PMIX_NAMESPACE"]), host)
            });
        }
        Err(Error::state(
            StateKind::Environment,
            "reading of the launcher's environment",
            "there is none that is known: no rank and size of torchrun, Open MPI, PMI, PMIx or Slurm; set `DOORBELL_RANK`, \
                     `DOORBELL_SIZE`, `DOORBELL_MASTER_ADDR` and `DOORBELL_MASTER_PORT`",
        ))
    }

    fn bare(rank: u32, size: u32, job: String, host: Result<String, &'static str>) -> Launched {
        Launched {
            rank,
            size,
            job,
            host,
            port: None,
            folder: None,
            store: None,
        }
    }

    /// The store of torchrun's agent, if its processes are to use it. It is there before they start. Otherwise torch's own code makes one when it is called.
    fn torch_store(vars: &Vars<'_>) -> Result<Option<LauncherStore>> {
        if vars.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() != Some("True") {
            return Ok(None);
        }
        let port = vars.number("MASTER_PORT")?.unwrap_or_default();
        let (Some(host), Ok(port)) = (vars.text("MASTER_ADDR"), u16::try_from(port)) else {
            return Ok(None);
        };
        // The agent's store outlives a restart of its processes.
        let restart = vars.text("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        let job = vars.text("TORCHELASTIC_RUN_ID").unwrap_or_default();
        let key = format!("doorbell/{job}/{restart}");
        Ok(Some(LauncherStore::Torch(TorchStore { host, port, key })))
    }

    /// What Slurm says, if this is a task of one of its steps.
    fn slurm(vars: &Vars<'_>) -> Result<Option<Launched>> {
        let has = |name| vars.text(name).is_some();
        let tasks = vars.number("SLURM_STEP_NUM_TASKS")?;
        // A batch script has a rank and tasks, too, but is no task itself: there, there are no step's tasks.
        let tasks = tasks.or(vars
            .number("SLURM_NTASKS")?
            .filter(|_| has("SLURM_STEP_ID")));
        let Some((rank, size)) = vars.number("SLURM_PROCID")?.zip(tasks) else {
            return Ok(None);
        };
        let host = match vars.text("SLURM_STEP_NODELIST") {
            // A node's name need not be that of a host.
            _ if vars.number("SLURM_STEP_NUM_NODES")? == Some(1) => Ok("127.0.0.1".into()),
            Some(list) => Ok(first_host(&list)?),
            None => Err("`SLURM_PROCID` is set, `SLURM_STEP_NODELIST` is not"),
        };
        let job = vars.joined(&["SLURM_JOB_ID", "SLURM_STEP_ID"]);
        Ok(Some(Launched {
            port: (!job.is_empty()).then(|| port_of(&job)),
            // `srun --mpi=pmix`, and not what another launcher has left. It needs no name of a host, which a node may not have, and no port that others can guess.
            store: (vars.number("PMIX_RANK")? == Some(rank)).then_some(LauncherStore::Pmix),
            ..Launched::bare(rank, size, job, host)
        }))
    }

    fn rendezvous(&self, vars: &Vars<'_>) -> Result<Rendezvous> {
        let missing = |name: &str, why: &str| {
            Error::state(
                StateKind::Environment,
                "search for rank 0",
                format!("{why}; set `{name}`"),
            )
        };
        let given = vars.text("DOORBELL_MASTER_ADDR");
        let port = vars.number("DOORBELL_MASTER_PORT")?;
        let address = |host: &str, port| {
            // A bare IPv6 address needs brackets before a port.
            let brackets = host.contains(':') && !host.starts_with('[');
            if brackets {
                format!("[{host}]:{port}")
            } else {
                format!("{host}:{port}")
            }
        };
        let near = |host: &str, first: u32| {
            let last = first.saturating_add(PORTS_TRIED - 1).min(u16::MAX.into());
            (first..=last)
                .map(|port| address(host, port))
                .collect::<Vec<_>>()
        };
        if let (Some(folder), None, None) = (&self.folder, &given, port) {
            return Ok(Rendezvous::File(
                folder.join(format!("doorbell-{}", self.job)),
            ));
        }
        if let (Some(store), None, None) = (&self.store, &given, port) {
            return Ok(match store {
                LauncherStore::Torch(store) => Rendezvous::Torch(store.clone()),
                LauncherStore::Pmix => Rendezvous::Pmix {
                    key: "doorbell.rendezvous".into(),
                    addresses: match (&self.host, self.port) {
                        (Ok(host), Some(port)) => near(host, port),
                        _ => Vec::new(),
                    },
                },
            });
        }
        let host = match given {
            Some(host) => host,
            None => self
                .host
                .clone()
                .map_err(|why| missing("DOORBELL_MASTER_ADDR", why))?,
        };
        let is_given = port.is_some();
        let port = port.or(self.port).ok_or_else(|| {
            missing(
                "DOORBELL_MASTER_PORT",
                "the launcher gives no port for rank 0",
            )
        })?;
        let port = u16::try_from(port)
            .ok()
            .filter(|port| *port != 0)
            .ok_or(Error::Range {
                argument: "DOORBELL_MASTER_PORT",
                value: port.into(),
                min: 1,
                max: u16::MAX.into(),
            })?;
        match is_given {
            true => Rendezvous::address(address(&host, port.into())),
            false => Ok(Rendezvous::AnyOf(near(&host, port.into()))),
        }
    }
}

/// How many ports rank 0 tries from the one that follows from what the launcher says: nobody keeps that free.
const PORTS_TRIED: u32 = 8;

/// A port for a job: FNV-1a of its name.
fn port_of(job: &str) -> u32 {
    let hash = job.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    PORTS.start + hash % (PORTS.end - PORTS.start)
}

/// The first host of a list as Slurm writes it: `node[003-010,12],gpu5` begins with `node003`.
fn first_host(list: &str) -> Result<String> {
    let bad = |reason: &str| Error::Malformed {
        what: "list of hosts",
        reason: format!("{reason}: `{list:.100}`"),
    };
    if list.len() > HOST_LIST_BYTES_MAX {
        return Err(bad("it is too long"));
    }
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(end) = rest.find(['[', ',']) {
        host.push_str(&rest[..end]);
        if rest[end..].starts_with(',') {
            rest = "";
            break;
        }
        let (inside, behind) = rest[end + 1..]
            .split_once(']')
            .ok_or_else(|| bad("a bracket is not closed"))?;
        host.push_str(inside.split(['-', ',']).next().unwrap_or_default());
        rest = behind;
    }
    host.push_str(rest);
    let is_fine = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    // 253 is the longest name of a host (RFC 1035).
    if host.is_empty() || host.len() > 253 || !host.chars().all(is_fine) {
        return Err(bad("it does not begin with the name of a host"));
    }
    Ok(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(vars: &[(&str, &str)]) -> Result<LaunchEnvironment> {
        LaunchEnvironment::from_vars(&|name| {
            let found = vars.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    /// The first of addresses that differ in their ports.
    fn one_of(addresses: &[String]) -> String {
        let first = addresses.first().cloned().unwrap_or_default();
        let port = |address: &String| {
            let (host, port) = address.rsplit_once(':').unwrap();
            assert!(first.starts_with(host));
            port.parse::<usize>().unwrap()
        };
        let ports = addresses.iter().map(port).collect::<Vec<_>>();
        assert!(
            ports
                .iter()
                .enumerate()
                .all(|(at, port)| *port == ports[0] + at)
        );
        assert!(matches!(ports.len(), 0 | 8));
        first
    }

    fn found(vars: &[(&str, &str)]) -> (u32, u32, String) {
        let environment = environment(vars).unwrap();
        let at = match environment.rendezvous {
            Rendezvous::Address(address) => address,
            Rendezvous::AnyOf(addresses) => one_of(&addresses),
            Rendezvous::File(path) => path.display().to_string(),
            Rendezvous::Torch(store) => format!("{}:{}/{}", store.host, store.port, store.key),
            Rendezvous::Pmix { key, addresses } => key + &one_of(&addresses),
        };
        (environment.rank, environment.size, at)
    }

    const OPEN_MPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_SERVER_TMPDIR", "/tmp/ompi/pid.7"),
        ("PMIX_NAMESPACE", "77"),
    ];
    const SLURM: [(&str, &str); 5] = [
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_JOB_ID", "1234"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "gpu[07-09,12],login"),
    ];

    #[test]
    fn each_launcher_is_read() {
        let torchrun = [
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29500"),
        ];
        assert_eq!(found(&torchrun), (2, 4, "10.0.0.1:29501".into()));
        let agent = [
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "run"),
            ("TORCHELASTIC_RESTART_COUNT", "3"),
        ];
        let at = "10.0.0.1:29500/doorbell/run/3".into();
        assert_eq!(found(&[&torchrun[..], &agent].concat()), (2, 4, at));
        let over_hosts = [&OPEN_MPI[..2], &OPEN_MPI[4..]].concat();
        assert_eq!(found(&over_hosts), (1, 4, "doorbell.rendezvous".into()));
        assert_eq!(
            found(&OPEN_MPI),
            (1, 4, "/tmp/ompi/pid.7/doorbell-77".into())
        );
        let (rank, size, at) = found(&SLURM);
        assert_eq!((rank, size), (3, 8));
        let port: u32 = at.strip_prefix("gpu07:").unwrap().parse().unwrap();
        assert!(PORTS.contains(&port));
        // `--mpi=pmix`; and a step of one node, whatever its name.
        let by_pmix = found(&[&SLURM[..], &[("PMIX_RANK", "3")]].concat()).2;
        assert_eq!(by_pmix, format!("doorbell.rendezvous{at}"));
        let one = found(&[&SLURM[..], &[("SLURM_STEP_NUM_NODES", "1")]].concat()).2;
        assert_eq!(one, format!("127.0.0.1:{port}"));
        // PMIx of another launcher inside.
        assert_eq!(found(&[&SLURM[..], &[("PMIX_RANK", "0")]].concat()).2, at);
        let by_address = |extra: &[(&'static str, &'static str)]| {
            let address = [
                ("DOORBELL_MASTER_ADDR", "fe80::1"),
                ("DOORBELL_MASTER_PORT", "7471"),
            ];
            found(&[extra, &address].concat())
        };
        let at = || "[fe80::1]:7471".to_owned();
        assert_eq!(by_address(&OPEN_MPI), (1, 4, at()));
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
        assert_eq!(by_address(&mpich), (0, 2, at()));
        let pmix = [("PMIX_RANK", "5"), ("DOORBELL_SIZE", "6")];
        assert_eq!(by_address(&pmix), (5, 6, at()));
        let hand = [("DOORBELL_RANK", "1"), ("DOORBELL_SIZE", "2")];
        // By hand goes before every launcher.
        assert_eq!(
            by_address(&[&hand[..], &OPEN_MPI, &SLURM].concat()),
            (1, 2, at())
        );
    }

    #[test]
    fn the_inner_launcher_goes_before_the_outer() {
        let torchrun = [
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "1"),
        ];
        assert_eq!(found(&[&torchrun[..], &SLURM].concat()).0, 9);
        assert_eq!(found(&[&OPEN_MPI[..], &SLURM].concat()).0, 1);
        // Slurm's own PMI, and that of another launcher inside a job of Slurm's.
        let own = [("PMI_RANK", "3"), ("PMI_SIZE", "8")];
        assert_eq!(found(&[&own[..], &SLURM].concat()), found(&SLURM));
        let inner = [("PMI_RANK", "3"), ("PMI_SIZE", "16")];
        assert!(environment(&[&inner[..], &SLURM].concat()).is_err());
    }

    #[test]
    fn what_is_missing_is_named() {
        let reason = |vars: &[(&str, &str)]| environment(vars).unwrap_err().to_string();
        for (vars, expected) in [
            (&[][..], "DOORBELL_RANK"),
            (&[("RANK", "1"), ("WORLD_SIZE", "2")], "MASTER_ADDR"),
            (&[("RANK", "1"), ("WORLD_SIZE", "two")], "`two`"),
            (&OPEN_MPI[..1], "OMPI_COMM_WORLD_SIZE"),
            (&OPEN_MPI[..2], "one host"),
            (
                &[("PMI_RANK", "1"), ("PMI_SIZE", "2")],
                "DOORBELL_MASTER_ADDR",
            ),
            (&[("PMIX_RANK", "1")], "DOORBELL_SIZE"),
            (&SLURM[..4], "SLURM_STEP_NODELIST"),
            // A batch script is no task.
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")],
                "DOORBELL_RANK",
            ),
            (
                &[
                    ("RANK", "1"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "a"),
                    ("MASTER_PORT", "65535"),
                ],
                "65536",
            ),
            (
                &[
                    ("RANK", "2"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "a"),
                    ("MASTER_PORT", "1"),
                ],
                "`rank` is 2; it must be 0 to 1",
            ),
        ] {
            let reason = reason(vars);
            assert!(reason.contains(expected), "{vars:?}: {reason}");
        }
        let token = Token::new("");
        assert!(LaunchEnvironment::new(0, 0, "a:1", token.clone()).is_err());
        assert!(LaunchEnvironment::new(0, SIZE_MAX + 1, "a:1", token.clone()).is_err());
        assert!(LaunchEnvironment::new(0, 1, "no port", token).is_err());
    }

    #[test]
    fn the_token_is_the_secret_or_the_job() {
        let with = |extra: &[(&'static str, &'static str)]| {
            environment(&[&OPEN_MPI[..], extra].concat()).unwrap().token
        };
        assert_eq!(with(&[]), Token::new("77"));
        assert_eq!(with(&[("DOORBELL_TOKEN", "s")]), Token::new("s"));
        assert_eq!(with(&[("DOORBELL_TOKEN", "")]), Token::new("77"));
    }

    #[test]
    fn first_host_of_a_slurm_nodelist() {
        for (list, host) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("node[003-010,12],gpu5", "node003"),
            ("node[12]", "node12"),
            ("rack[1-2]node[3-4].x", "rack1node3.x"),
            (" a.b-c_d ", "a.b-c_d"),
        ] {
            assert_eq!(first_host(list).unwrap(), host);
        }
        let long = "x".repeat(254);
        for list in ["", "[", "n[1", "n]", ",n", "a b", "n[1\n]", &long] {
            assert!(
                matches!(first_host(list), Err(Error::Malformed { .. })),
                "{list}"
            );
        }
    }
}
