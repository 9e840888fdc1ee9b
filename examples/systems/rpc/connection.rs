//! One connection of a client with the server, and a call over it by each method.
//!
//! Both sides have one region: a request behind its header, and an answer behind its header.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use doorbell::{
    Access, Completion, Endpoint, Group, QueueKind, Region, RemoteRegion, Ticket, Work,
};

pub const DEADLINE: Duration = Duration::from_secs(30);
const HEADER_BYTES: u64 = 32;
/// The longest message of the method `adaptive` that goes with its header.
pub const EAGER_BYTES: u64 = 4096;
/// The longest busy wait of the method `adaptive`, and the one while there are more threads than cores.
const SPIN_MAX: Duration = Duration::from_millis(1);
const SPIN_CROWDED: Duration = Duration::from_micros(20);
/// The longest sleep: whether all ranks are there is looked at in between.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// How late the event may be told of what has come. The thread that tells it may have no core for some time.
const NOTICE_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, ValueEnum, PartialEq, Eq, Debug)]
pub enum Method {
    /// SEND and RECV; both sides poll
    TwoSided,
    /// SEND and RECV; both sides sleep in poll(2) until an eventfd of `Ticket::notify` says that a completion is there. A thread of the library looks for completions: it spins for a while
    /// after each, and then looks every 200 us at most. No completion channel of the device is used
    Events,
    /// WRITE into memory that the other side polls
    OneSided,
    /// The request as `one-sided`; the client reads the answer from the server's memory until it is there
    ReadBased,
    /// SEND of short messages, READ and WRITE of long ones; polls or sleeps, as the load says
    Adaptive,
}

impl Method {
    pub fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn has_sends(self) -> bool {
        !matches!(self, Method::OneSided | Method::ReadBased)
    }
}

/// How a side waits.
pub struct Waiting<'a> {
    pub group: &'a Group,
    pub method: Method,
    /// More threads of this host poll than it has cores.
    pub is_crowded: bool,
}

impl Waiting<'_> {
    /// How long to poll before sleeping, if a wait usually takes so long. `None` never sleeps.
    pub fn spin(&self, usual: Duration) -> Option<Duration> {
        match self.method {
            Method::Events => Some(Duration::ZERO),
            Method::Adaptive if self.is_crowded => Some(SPIN_CROWDED),
            Method::Adaptive => Some((2 * usual).clamp(SPIN_CROWDED, SPIN_MAX)),
            _ => None,
        }
    }
}

/// A wait by polling, which ends by its deadline or when a rank has ended.
pub struct Poll {
    turns: u32,
    started: Instant,
}

impl Poll {
    pub fn new() -> Poll {
        Poll {
            turns: 0,
            started: Instant::now(),
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Whether it has not paused yet.
    fn is_new(&self) -> bool {
        self.turns == 0
    }

    pub fn pause(&mut self, group: &Group) -> Result<()> {
        self.turns += 1;
        if self.turns.is_multiple_of(16) {
            // What is waited for may need this core.
            std::thread::yield_now();
        }
        if self.turns.is_multiple_of(256) {
            group.check()?;
            ensure!(
                self.started.elapsed() < DEADLINE,
                "nothing has come for {DEADLINE:?}"
            );
        }
        Ok(())
    }
}

/// An eventfd: a descriptor to sleep on.
pub struct Event(OwnedFd);

#[allow(unsafe_code)] // the calls of the system
impl Event {
    pub fn new() -> Result<Event> {
        // SAFETY: creates a descriptor, which nobody else has.
        let event = unsafe {
            let number = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            ensure!(number >= 0, "eventfd: {}", std::io::Error::last_os_error());
            OwnedFd::from_raw_fd(number)
        };
        Ok(Event(event))
    }

    /// Sleeps until the event was told of something, for `limit` at most. Returns whether it was.
    fn sleep(&self, limit: Duration) -> Result<bool> {
        let mut entry = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut count = 0_u64;
        // SAFETY: one entry, and eight bytes; both are here until the calls return.
        let polled = unsafe {
            let polled = libc::poll(&mut entry, 1, limit.as_millis() as i32);
            if polled > 0 {
                libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8);
            }
            polled
        };
        let error = std::io::Error::last_os_error();
        ensure!(
            polled >= 0 || error.kind() == std::io::ErrorKind::Interrupted,
            "poll: {error}"
        );
        Ok(polled > 0)
    }

    /// Checks that the event is told of what has come when a sleep had ended by its limit. Without its events a side would wake up by the limit alone, a tenth of a second late.
    fn check_told(&self) -> Result<()> {
        let is_told = self.sleep(NOTICE_MAX)?;
        ensure!(is_told, "something has come, and no event has told it");
        Ok(())
    }
}

/// A long request that the server reads from the client's memory.
struct Fetching {
    len: u64,
    /// The `wr_id` of the READ.
    read: u64,
    ticket: Ticket,
}

pub struct Connection {
    endpoint: Endpoint,
    region: Region,
    remote: RemoteRegion,
    max_bytes: u64,
    /// The receive that is posted.
    receive: Option<Ticket>,
    /// The event will be told of it.
    is_noted: bool,
    /// At the server.
    fetching: Option<Fetching>,
    /// The last call.
    number: u64,
    /// Work requests so far: the `wr_id` of the last one.
    posts: u64,
    /// What a call has taken lately.
    usual: Duration,
    /// Receives and READs of requests that are done.
    come: u64,
    pub sleeps: u64,
    /// Waits for a receive that have polled, and not slept at once, when nothing had come.
    pub polled: u64,
}

impl Connection {
    pub fn new(group: &Group, endpoint: Endpoint, max_bytes: u64) -> Result<Connection> {
        let region = Region::alloc(group.domain(), 2 * area(max_bytes), Access::ALL)?;
        let remote = region.remote();
        Ok(Connection {
            endpoint,
            region,
            remote,
            max_bytes,
            receive: None,
            is_noted: false,
            fetching: None,
            number: 0,
            posts: 0,
            usual: Duration::ZERO,
            come: 0,
            sleeps: 0,
            polled: 0,
        })
    }

    pub fn region(&self) -> RemoteRegion {
        self.region.remote()
    }

    /// The region of the other side.
    pub fn set_remote(&mut self, remote: RemoteRegion) {
        self.remote = remote;
    }

    fn answer_at(&self) -> u64 {
        area(self.max_bytes)
    }

    fn post_receive(&mut self, at: u64) -> Result<()> {
        if self.receive.is_none() {
            let slices = [self.region.slice(at, HEADER_BYTES + self.max_bytes)?];
            self.receive = Some(self.endpoint.post_recv(0, &slices)?);
            self.is_noted = false;
        }
        Ok(())
    }

    fn poll_receive(&mut self) -> Result<Option<Completion>> {
        let completion = self.endpoint.poll_cq(QueueKind::Recv)?;
        if completion.is_some() {
            self.receive = None;
            self.come += 1;
        }
        Ok(completion)
    }

    /// Has the event told when the receive or the READ is done for which this side waits.
    pub fn note(&mut self, event: &Event) -> Result<()> {
        let read = self.fetching.as_ref().map(|fetching| &fetching.ticket);
        if let Some(ticket) = read.or(self.receive.as_ref()).filter(|_| !self.is_noted) {
            ticket.notify(event.0.as_fd())?;
            self.is_noted = true;
        }
        Ok(())
    }

    /// Gives the places of requests that are done back to the queue.
    fn collect(&mut self) -> Result<()> {
        while self.endpoint.poll_cq(QueueKind::Send)?.is_some() {}
        Ok(())
    }

    /// Posts a work request, and returns its number.
    fn post(&mut self, work: &Work<'_>) -> Result<u64> {
        self.post_with_ticket(work).map(|(number, _)| number)
    }

    fn post_with_ticket(&mut self, work: &Work<'_>) -> Result<(u64, Ticket)> {
        self.posts += 1;
        let ticket = self.endpoint.post_send(&work.wr_id(self.posts))?;
        Ok((self.posts, ticket))
    }

    /// Waits for a signaled work request. Completions of earlier ones, for which nobody waited, come first.
    fn wait_posted(&mut self, number: u64, waiting: &Waiting<'_>) -> Result<()> {
        let mut poll = Poll::new();
        loop {
            match self.endpoint.poll_cq(QueueKind::Send)? {
                Some(completion) if completion.wr_id == number => return Ok(()),
                Some(_) => {}
                None => poll.pause(waiting.group)?,
            }
        }
    }

    /// Sends header and bytes.
    fn send(&mut self, at: u64, len: u64, is_eager: bool) -> Result<()> {
        let header: Vec<u8> = [self.number, len, is_eager.into()]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        self.region.write(at, &header)?;
        let behind = if is_eager { len } else { 0 };
        let region = self.region.clone();
        let slices = [region.slice(at, HEADER_BYTES + behind)?];
        self.post(&Work::send(&slices)).map(drop)
    }

    /// Writes bytes into the other side's memory, and then the word that it polls.
    fn write(&mut self, at: u64, len: u64) -> Result<()> {
        self.write_bytes(at, len)?;
        let word = word(self.number, len).to_le_bytes();
        let signal = Work::write_inline(&word, self.remote.slice(at, 8)?);
        self.post(&signal.ordered(true)).map(drop)
    }

    fn write_bytes(&mut self, at: u64, len: u64) -> Result<()> {
        let region = self.region.clone();
        let slices = [region.slice(at + HEADER_BYTES, len)?];
        let work = Work::write(&slices, self.remote.slice(at + HEADER_BYTES, len)?);
        self.post(&work.signaled(false)).map(drop)
    }

    fn header(&self, at: u64) -> Result<[u64; 3]> {
        let mut header = [0; 24];
        self.region.read(at, &mut header)?;
        let mut words = [0; 3];
        for (word, bytes) in words.iter_mut().zip(header.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into()?);
        }
        Ok(words)
    }

    // The client.

    /// Puts the bytes of the next request into place.
    pub fn prepare(&mut self, request: &[u8]) -> Result<()> {
        self.number += 1;
        Ok(self.region.write(HEADER_BYTES, request)?)
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    /// The bytes of the last answer.
    pub fn answer(&self, answer: &mut [u8]) -> Result<()> {
        Ok(self.region.read(self.answer_at() + HEADER_BYTES, answer)?)
    }

    /// Calls the server with the request that was prepared, and waits for the answer. Returns how long that took.
    pub fn call(&mut self, waiting: &Waiting<'_>, event: &Event, len: u64) -> Result<Duration> {
        let started = Instant::now();
        if waiting.method.has_sends() {
            self.post_receive(self.answer_at())?;
            let is_eager = waiting.method != Method::Adaptive || len <= EAGER_BYTES;
            self.send(0, len, is_eager)?;
            self.wait_receive(waiting, event)?;
            let [number, len_of_answer, _] = self.header(self.answer_at())?;
            ensure!(
                (number, len_of_answer) == (self.number, len),
                "call {}: the answer of call {number}",
                self.number
            );
        } else {
            self.write(0, len)?;
            match waiting.method {
                Method::OneSided => self.wait_word(waiting, len)?,
                _ => self.fetch(waiting, len)?,
            }
        }
        let elapsed = started.elapsed();
        self.usual = (7 * self.usual + elapsed) / 8;
        self.collect()?;
        Ok(elapsed)
    }

    fn wait_receive(&mut self, waiting: &Waiting<'_>, event: &Event) -> Result<()> {
        let spin = waiting.spin(self.usual);
        let mut poll = Poll::new();
        let mut was_told = true;
        while self.poll_receive()?.is_none() {
            if spin.is_none_or(|spin| poll.elapsed() < spin) {
                self.polled += u64::from(poll.is_new());
                poll.pause(waiting.group)?;
                continue;
            }
            self.sleeps += 1;
            self.note(event)?;
            was_told = event.sleep(SLEEP_MAX)?;
            waiting.group.check()?;
            ensure!(
                poll.elapsed() < DEADLINE,
                "no answer to call {} for {DEADLINE:?}",
                self.number
            );
        }
        if !was_told {
            event.check_told()?;
        }
        Ok(())
    }

    fn wait_word(&mut self, waiting: &Waiting<'_>, len: u64) -> Result<()> {
        let mut poll = Poll::new();
        let device = self.region.domain().device().clone();
        while self.region.load_u64(self.answer_at())? != word(self.number, len) {
            device.progress();
            poll.pause(waiting.group)?;
        }
        Ok(())
    }

    /// Reads the word in the server's memory until it is that of this call, and then the answer. A short answer is read together with the word, behind it.
    fn fetch(&mut self, waiting: &Waiting<'_>, len: u64) -> Result<()> {
        let at = self.answer_at();
        let region = self.region.clone();
        let words = [region.slice(at, 8)?];
        let bytes = [region.slice(at + HEADER_BYTES, len)?];
        // The fence has it begin when the word is here. Without one, the reads of the peer's card may pass each other on the bus, and old bytes would come with a new word.
        let read_bytes = Work::read(&bytes, self.remote.slice(at + HEADER_BYTES, len)?);
        let read_bytes = read_bytes.fence(true);
        let read_word = Work::read(&words, self.remote.slice(at, 8)?);
        let together = len <= EAGER_BYTES;
        let mut poll = Poll::new();
        loop {
            let mut last = self.post(&read_word.signaled(!together))?;
            if together {
                last = self.post(&read_bytes)?;
            }
            self.wait_posted(last, waiting)?;
            if region.load_u64(at)? == word(self.number, len) {
                break;
            }
            poll.pause(waiting.group)?;
        }
        if !together {
            let last = self.post(&read_bytes)?;
            self.wait_posted(last, waiting)?;
        }
        Ok(())
    }

    // The server.

    /// Before the first request of a method.
    pub fn expect(&mut self, method: Method) -> Result<()> {
        // By no event of an earlier method.
        self.is_noted = false;
        if method.has_sends() {
            self.post_receive(0)
        } else {
            Ok(())
        }
    }

    /// Whether the server reads a request of this connection.
    pub fn is_fetching(&self) -> bool {
        self.fetching.is_some()
    }

    /// Answers a request, if one has come. A long one is read first: this returns, and a later call answers it, so that the requests of several clients are read at the same time.
    pub fn answer_next(
        &mut self,
        waiting: &Waiting<'_>,
        compute: impl Fn(&mut [u8]),
    ) -> Result<bool> {
        if self.fetching.is_some() {
            let Some(len) = self.fetched()? else {
                return Ok(false);
            };
            self.answer_with(waiting, len, false, compute)?;
            return Ok(true);
        }
        let (number, len, is_eager) = if waiting.method.has_sends() {
            if self.poll_receive()?.is_none() {
                return Ok(false);
            }
            let [number, len, is_eager] = self.header(0)?;
            (number, len, is_eager != 0)
        } else {
            let found = self.region.load_u64(0)?;
            // The word of another method's calls is older.
            if found >> 32 <= self.number {
                return Ok(false);
            }
            (found >> 32, found & 0xffff_ffff, true)
        };
        ensure!(
            number > self.number && len <= self.max_bytes,
            "a request {number} of {len} bytes behind {}",
            self.number
        );
        self.number = number;
        if is_eager {
            self.answer_with(waiting, len, true, compute)?;
            return Ok(true);
        }
        let region = self.region.clone();
        let slices = [region.slice(HEADER_BYTES, len)?];
        let work = Work::read(&slices, self.remote.slice(HEADER_BYTES, len)?);
        let (read, ticket) = self.post_with_ticket(&work)?;
        self.fetching = Some(Fetching { len, read, ticket });
        self.is_noted = false;
        Ok(false)
    }

    /// The length of the request that is being read, once it is here. Completions of earlier work requests come before.
    fn fetched(&mut self) -> Result<Option<u64>> {
        while let Some(completion) = self.endpoint.poll_cq(QueueKind::Send)? {
            let is_it = |fetching: &mut Fetching| fetching.read == completion.wr_id;
            if let Some(Fetching { len, .. }) = self.fetching.take_if(is_it) {
                self.come += 1;
                return Ok(Some(len));
            }
        }
        Ok(None)
    }

    /// Answers the request that is here.
    fn answer_with(
        &mut self,
        waiting: &Waiting<'_>,
        len: u64,
        is_eager: bool,
        compute: impl Fn(&mut [u8]),
    ) -> Result<()> {
        let mut bytes = vec![0; len as usize];
        self.region.read(HEADER_BYTES, &mut bytes)?;
        compute(&mut bytes);
        let at = self.answer_at();
        self.region.write(at + HEADER_BYTES, &bytes)?;
        self.collect()?;
        match waiting.method {
            Method::OneSided => self.write(at, len),
            Method::ReadBased => Ok(self.region.store_u64(at, word(self.number, len))?),
            _ => {
                // Before the answer: the next request may come as soon as that is there.
                self.post_receive(0)?;
                if !is_eager {
                    self.write_bytes(at, len)?;
                }
                self.send(at, len, is_eager)
            }
        }
    }
}

/// The place of a message of so many bytes with its header.
fn area(max_bytes: u64) -> u64 {
    (HEADER_BYTES + max_bytes).next_multiple_of(64)
}

/// What is written behind a message, or into it.
fn word(number: u64, len: u64) -> u64 {
    number << 32 | len
}

/// What the server has done.
#[derive(Default)]
pub struct AnsweredCalls {
    pub sleeps: u64,
    /// Waits for a request that have polled, and not slept at once, when nothing had come.
    pub polled: u64,
    /// The most requests that it was reading at the same time.
    pub most_reads: u64,
}

/// Answers that many requests of all these connections.
pub fn serve(
    connections: &mut [Connection],
    waiting: &Waiting<'_>,
    calls: u64,
    compute: impl Fn(&mut [u8]),
) -> Result<AnsweredCalls> {
    let event = Event::new()?;
    let device = waiting.group.domain().device().clone();
    let (mut left, mut served) = (calls, AnsweredCalls::default());
    // How long nothing has come lately.
    let mut usual = Duration::ZERO;
    let mut poll = Poll::new();
    let all_come = |all: &[Connection]| all.iter().map(|one| one.come).sum::<u64>();
    let mut was_told = true;
    while left > 0 {
        let (mut found, before) = (0, all_come(connections));
        for connection in connections.iter_mut() {
            found += u64::from(connection.answer_next(waiting, &compute)?);
        }
        if !was_told && all_come(connections) > before {
            event.check_told()?;
        }
        was_told = true;
        let reads = connections
            .iter()
            .filter(|connection| connection.is_fetching());
        served.most_reads = served.most_reads.max(reads.count() as u64);
        if found > 0 {
            left = left
                .checked_sub(found)
                .map_or_else(|| bail!("more requests than calls"), Ok)?;
            usual = (7 * usual + poll.elapsed()) / 8;
            poll = Poll::new();
            continue;
        }
        if waiting.spin(usual).is_none_or(|spin| poll.elapsed() < spin) {
            served.polled += u64::from(poll.is_new());
            device.progress();
            poll.pause(waiting.group)?;
            continue;
        }
        served.sleeps += 1;
        for connection in connections.iter_mut() {
            connection.note(&event)?;
        }
        was_told = event.sleep(SLEEP_MAX)?;
        waiting.group.check()?;
        ensure!(
            poll.elapsed() < DEADLINE,
            "{left} requests have not come for {DEADLINE:?}"
        );
    }
    Ok(served)
}
