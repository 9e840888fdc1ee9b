//! Messages: a random exchange against a sequential model, and each sentence of docs/messages.md that it does not show.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell::softcx::Faults;
use doorbell::{
    Access, Cause, Control, Device, Error, Executor, HostStream, MessageAddress, MessageConfig,
    MessageQueue, MessageTicket, PendingSend, PostedSend, ProtectionDomain, Region, Slice,
    StateKind,
};
use rig::{Limit, Random, SOON, from_env, has_no_queue, strict, strict_device};

const STEP: Duration = Duration::from_secs(120);
const SHORT: Option<Duration> = Some(Duration::from_millis(50));
const EAGER: u32 = 256;

fn config() -> MessageConfig {
    MessageConfig::default().eager_bytes(EAGER).slots(4)
}

/// Two queues that are connected. Where the stream itself posts receives, no message comes before there is one for it, so none is sent twice for want of one. A
/// proxy may see the doorbell of a credit first.
fn pair(device: &Device, config: &MessageConfig) -> [MessageQueue; 2] {
    pair_in(&device.protection_domain(), config)
}

fn pair_in(domain: &ProtectionDomain, config: &MessageConfig) -> [MessageQueue; 2] {
    let mut config = *config;
    if rig::control(domain.device()) != Control::Proxy {
        config.endpoint = config.endpoint.rnr_retry(0);
    }
    let config = &config;
    let mut queues = [(); 2].map(|()| MessageQueue::new(domain, config).unwrap());
    let addresses = queues.each_ref().map(MessageQueue::address);
    queues[0].connect(&addresses[1]).unwrap();
    queues[1].connect(&addresses[0]).unwrap();
    queues
}

/// Memory for the messages of that queue.
fn region(queue: &MessageQueue, len_bytes: u64) -> Region {
    Region::alloc(queue.domain(), len_bytes, Access::ALL).unwrap()
}

/// The byte of a message: of the side that sends it, its number, and the place in it.
fn byte(side: usize, number: usize, at: usize) -> u8 {
    (side * 131 + number * 29 + at * 7 + at / 256) as u8
}

const GUARD: u8 = 0xee;

/// One side of a random exchange: what it sends, the memory of it and of what it receives.
struct Side {
    side: usize,
    queue: MessageQueue,
    /// Of the messages that this side sends, and that it receives.
    lens: [Vec<usize>; 2],
    /// Of the memory of each receive.
    capacities: Vec<usize>,
    memory: [Region; 2],
    random: Random,
    /// The stream that sends, if it is not the one that receives.
    sends: Option<rig::Stream>,
    receives: rig::Stream,
    pending: VecDeque<(usize, Started)>,
    tickets: Vec<(usize, MessageTicket)>,
}

/// A send that is not waited for yet.
enum Started {
    Queued(Box<PendingSend>),
    ByThread(PostedSend),
}

/// A stream of the tests' own kind, or one of the host.
fn any_stream(name: &str, random: &mut Random) -> rig::Stream {
    match random.below(3) {
        0 => rig::Stream::Host(HostStream::new(name).unwrap()),
        _ => rig::stream(name),
    }
}

impl Side {
    fn place(capacities: &[usize], number: usize) -> usize {
        capacities[..number].iter().map(|len| len + 8).sum()
    }

    fn stream(&self) -> &dyn Executor {
        self.sends.as_ref().unwrap_or(&self.receives)
    }

    /// Carries the exchange out. What each side does next is at random, within what keeps two sides from waiting for each other where every call
    /// blocks: a side has no more messages on their way than there are slots, receives no more than it has sent, and waits for a send when it has
    /// received as many. It waits for a send before it begins as many as its queue holds, behind that one.
    fn run(mut self, slots: usize, ahead: usize) -> MessageQueue {
        let count = self.lens[0].len();
        let (mut sent, mut received) = (0, 0);
        while sent < count || received < count || !self.pending.is_empty() {
            let choice = self.random.below(8);
            let has_room = (self.pending.front()).is_none_or(|(oldest, _)| sent - oldest < ahead);
            if choice < 4 && sent < count && sent < received + slots && has_room {
                self.send(sent, choice == 0);
                sent += 1;
            } else if choice < 7 && received < count && (received < sent || sent == count) {
                self.receive(received, choice == 4);
                received += 1;
            } else if let Some((number, _)) = self.pending.front()
                && received > *number
            {
                let (number, pending) = self.pending.pop_front().unwrap();
                match pending {
                    Started::Queued(pending) => {
                        let stream = self.sends.as_ref().unwrap_or(&self.receives);
                        let ticket = self.queue.wait_send(stream, *pending);
                        self.tickets.push((self.lens[0][number], ticket.unwrap()));
                    }
                    Started::ByThread(sent) => {
                        self.queue.wait_send_now(&sent, SOON).unwrap();
                    }
                }
            }
        }
        for (len, ticket) in &self.tickets {
            assert_eq!(ticket.wait(SOON), Ok(*len as u64), "side {}", self.side);
        }
        self.stream().synchronize(SOON).unwrap();
        self.receives.synchronize(SOON).unwrap();
        self.queue.finish(SOON).unwrap();
        let mut bytes = Vec::new();
        for number in 0..count {
            let (len, capacity) = (self.lens[1][number], self.capacities[number]);
            bytes.resize(capacity + 8, 0);
            let at = Side::place(&self.capacities, number);
            self.memory[1].read(at as u64, &mut bytes).unwrap();
            let expected = |at| match at < len {
                true => byte(1 - self.side, number, at),
                false => GUARD,
            };
            let wrong = (0..bytes.len()).find(|at| bytes[*at] != expected(*at));
            assert_eq!(
                wrong, None,
                "side {}, message {number} of {len} in {capacity}",
                self.side
            );
        }
        self.queue
    }

    fn synchronize(&self) {
        self.stream().synchronize(SOON).unwrap();
        self.receives.synchronize(SOON).unwrap();
    }

    fn send(&mut self, number: usize, now: bool) {
        let len = self.lens[0][number];
        let at = Side::place(&self.lens[0], number) as u64;
        let memory = self.memory[0].clone();
        let slices = split(&memory, at, len, &mut self.random);
        if now && len <= EAGER as usize && self.random.below(2) == 0 {
            self.synchronize();
            return self.queue.send_now(&slices, SOON).unwrap();
        }
        if now {
            self.synchronize();
            let sent = self.queue.start_send_now(&slices, SOON).unwrap();
            self.pending.push_back((number, Started::ByThread(sent)));
            return;
        }
        let stream = self.sends.as_ref().unwrap_or(&self.receives);
        let sent = self.queue.start_send(stream, &slices);
        let pending = Started::Queued(Box::new(sent.unwrap()));
        self.pending.push_back((number, pending));
    }

    fn receive(&mut self, number: usize, now: bool) {
        let (len, capacity) = (self.lens[1][number], self.capacities[number]);
        let at = Side::place(&self.capacities, number) as u64;
        let memory = self.memory[1].clone();
        let slices = split(&memory, at, capacity, &mut self.random);
        if now {
            self.synchronize();
            assert_eq!(self.queue.recv_now(&slices, SOON), Ok(len as u64));
            return;
        }
        let ticket = self.queue.recv(&self.receives, &slices).unwrap();
        self.tickets.push((len, ticket));
    }
}

/// One to three slices of that length together; one, if a message of that length is not eager.
fn split<'a>(region: &'a Region, at: u64, len: usize, random: &mut Random) -> Vec<Slice<'a>> {
    let parts = if len > EAGER as usize {
        0
    } else {
        random.below(3)
    };
    let mut cuts: Vec<u64> = (0..parts).map(|_| random.below(len as u64 + 1)).collect();
    cuts.extend([0, len as u64]);
    cuts.sort_unstable();
    let slice = |cut: &[u64]| region.slice(at + cut[0], cut[1] - cut[0]).unwrap();
    cuts.windows(2).map(slice).collect()
}

/// Two sides exchange `count` messages in each direction, as that seed says.
fn exchange(device: &Device, seed: u64, count: usize) {
    let mut random = Random(seed);
    let slots = *random.pick(&[1, 2, 4, 16]);
    let ahead = *random.pick(&[4, 16, 64]);
    let mut config = config().slots(slots).ahead(ahead);
    config.endpoint = config.endpoint.room_timeout(SOON);
    let eager = EAGER as usize;
    let some = [
        0,
        1,
        7,
        8,
        63,
        eager - 1,
        eager,
        eager + 1,
        3 * eager,
        5000,
        70_000,
    ];
    let mut lens = || -> Vec<usize> {
        let mut len = || match random.below(3) {
            0 => random.below(u64::from(2 * EAGER)) as usize,
            _ => *random.pick(&some),
        };
        (0..count).map(|_| len()).collect()
    };
    let lens = [lens(), lens()];
    let queues = pair(device, &config);
    let same_stream = random.below(2) == 0;
    let sides = queues.into_iter().enumerate().map(|(side, queue)| {
        let [own, other] = [side, 1 - side].map(|side| lens[side].clone());
        let mut random = Random(seed ^ (side as u64 + 1) << 32);
        let mut capacity = |len: &usize| match random.below(3) {
            0 => *len,
            1 => len + random.below(100) as usize,
            _ => (*len).max(eager) + 1,
        };
        let capacities: Vec<usize> = other.iter().map(&mut capacity).collect();
        let bytes = |lens: &[usize]| Side::place(lens, lens.len()).max(1) as u64;
        let memory = [bytes(&own), bytes(&capacities)].map(|len| region(&queue, len));
        memory[1].fill(0, bytes(&capacities), GUARD).unwrap();
        for (number, len) in own.iter().enumerate() {
            let message: Vec<u8> = (0..*len).map(|at| byte(side, number, at)).collect();
            memory[0]
                .write(Side::place(&own, number) as u64, &message)
                .unwrap();
        }
        let sends = (!same_stream).then(|| any_stream("sends", &mut random));
        let receives = any_stream("receives", &mut random);
        Side {
            side,
            queue,
            lens: [own, other],
            capacities,
            memory,
            random,
            sends,
            receives,
            pending: VecDeque::new(),
            tickets: Vec::new(),
        }
    });
    let sides: Vec<Side> = sides.collect();
    thread::scope(|scope| {
        let [slots, ahead] = [slots, ahead].map(|it| it as usize);
        let threads: Vec<_> = sides
            .into_iter()
            .map(|side| scope.spawn(move || side.run(slots, ahead)))
            .collect();
        // The queues stay until both sides are done.
        let queues: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let failures: Vec<_> = queues.iter().flatten().map(MessageQueue::failure).collect();
        assert!(
            queues.iter().all(Result::is_ok),
            "DOORBELL_SEED={seed}: {failures:?}"
        );
    });
}

/// Of every length, on streams and from threads, with any number of slots: each message comes once, whole, in order, into its own memory and nowhere else.
#[test]
fn random_exchanges_are_those_of_the_model() {
    let limit = Limit::new("random_exchanges_are_those_of_the_model", STEP);
    let device = strict_device();
    let first = from_env("DOORBELL_SEED", 1);
    let rounds = from_env("DOORBELL_MESSAGES", 800) / 40;
    for seed in first..first + rounds.max(1) {
        limit.step(seed, STEP);
        exchange(&device, seed, 20);
    }
}

#[test]
fn random_exchanges_survive_loss_duplicates_and_reordering() {
    let test = "random_exchanges_survive_loss_duplicates_and_reordering";
    let limit = Limit::new(test, STEP);
    let device = strict_device();
    let first = from_env("DOORBELL_SEED", 1000);
    let rounds = from_env("DOORBELL_MESSAGES", 800) / 80;
    for seed in first..first + rounds.max(1) {
        limit.step(seed, STEP);
        let faults = Faults {
            loss: 0.01,
            duplicate: 0.02,
            reorder: 0.05,
            seed,
            ..strict()
        };
        if !device.set_faults(faults) {
            return waived::waived(test, "the device injects no faults here");
        }
        exchange(&device, seed, 20);
    }
}

/// What became of the messages of one direction: for each that was queued, what its ticket says.
#[derive(Default)]
struct Outcomes {
    sends: Vec<Result<u64, Error>>,
    receives: Vec<Result<u64, Error>>,
}

/// A receive whose ticket has failed, and its memory then: nothing writes there any more.
struct FailedReceive {
    memory: Region,
    at: u64,
    bytes: Vec<u8>,
}

fn read_bytes(memory: &Region, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(at, &mut bytes).unwrap();
    bytes
}

/// Waits for a ticket, which settles whatever has failed.
fn settled(ticket: &MessageTicket) -> Result<u64, Error> {
    let outcome = ticket.wait(SOON);
    let is_late = matches!(outcome, Err(Error::Timeout { .. }));
    assert!(!is_late, "a ticket does not settle: {outcome:?}");
    outcome
}

/// Two sides send to each other on streams while something fails at a random moment: a connection is aborted on either side, all packets are lost, or a queue
/// is dropped, and a wait may be left to its deadline. Returns how many receives were done and how many failed.
fn fail_among_messages(device: &Device, seed: u64, loses: bool) -> [usize; 2] {
    const COUNT: usize = 12;
    let mut random = Random(seed);
    let lens: [Vec<usize>; 2] = [(); 2].map(|()| {
        let len = |_| *random.pick(&[0, 1, 8, EAGER as usize, 300, 5000, 70_000]);
        (0..COUNT).map(len).collect()
    });
    let mut config = config().slots(*random.pick(&[1, 2, 4])).ahead(64);
    // A wait whose message does not come ends by itself, that of a peer which is not told of an abort, too.
    let few = random.below(3) == 0;
    let timeout = if few { 60 } else { 300 };
    config.endpoint = config
        .endpoint
        .wait_timeout(Some(Duration::from_millis(timeout)));
    let queues = pair(device, &config);
    let handles = [&queues[0], &queues[1]].map(MessageQueue::abort_handle);
    let after = Duration::from_micros(random.below(3000));
    let how = random.below(if loses { 4 } else { 3 });
    let seeds = [random.next(), random.next()];
    let lens = &lens;
    let sides = thread::scope(|scope| {
        let mut sides = Vec::new();
        for ((side, mut queue), seed) in queues.into_iter().enumerate().zip(seeds) {
            sides.push(scope.spawn(move || {
                let mut random = Random(seed);
                let (own, other) = (&lens[side], &lens[1 - side]);
                let [mine, theirs] = [own, other].map(|lens| Side::place(lens, COUNT) as u64 + 8);
                let [from, into] = [mine, theirs].map(|len| region(&queue, len));
                into.fill(0, theirs, GUARD).unwrap();
                for (number, len) in own.iter().enumerate() {
                    let message: Vec<u8> = (0..*len).map(|at| byte(side, number, at)).collect();
                    let at = Side::place(own, number) as u64;
                    from.write(at, &message).unwrap();
                }
                let streams = ["sends", "receives"].map(|name| any_stream(name, &mut random));
                // One side may leave the other's last receives without messages.
                let sends = if few && side == 0 { COUNT / 2 } else { COUNT };
                let (mut sent, mut received) = (Vec::new(), Vec::new());
                let mut is_over = false;
                while !is_over && (sent.len() < sends || received.len() < COUNT) {
                    if sent.len() < sends && (random.below(2) == 0 || received.len() == COUNT) {
                        let number = sent.len();
                        let at = Side::place(own, number) as u64;
                        let slice = from.slice(at, own[number] as u64).unwrap();
                        match queue.send(&streams[0], &[slice]) {
                            Ok(ticket) => sent.push(ticket),
                            Err(_) => is_over = true,
                        }
                    } else if received.len() < COUNT {
                        let number = received.len();
                        let at = Side::place(other, number) as u64;
                        let slice = into.slice(at, other[number] as u64).unwrap();
                        match queue.recv(&streams[1], &[slice]) {
                            Ok(ticket) => received.push(ticket),
                            Err(_) => is_over = true,
                        }
                    }
                }
                // A dropped queue fails its peer's.
                let queue = (how != 2 || side == 0).then_some(queue);
                let mut failed = Vec::new();
                let mut receives = Vec::new();
                for (number, ticket) in received.iter().enumerate() {
                    let outcome = settled(ticket);
                    if outcome.is_err() {
                        let at = Side::place(other, number) as u64;
                        let bytes = read_bytes(&into, at, other[number] + 8);
                        let memory = into.clone();
                        failed.push(FailedReceive { memory, at, bytes });
                    }
                    receives.push(outcome);
                }
                let sends = sent.iter().map(settled).collect();
                (
                    Outcomes { sends, receives },
                    into,
                    failed,
                    (queue, from, streams),
                )
            }));
        }
        thread::sleep(after);
        match how {
            0 | 1 => handles[how as usize].abort(),
            2 => {}
            _ => assert!(device.set_faults(Faults {
                loss: 1.0,
                seed,
                ..strict()
            })),
        }
        let sides = sides.into_iter().map(|side| side.join());
        let sides: Vec<_> = sides.collect();
        if loses {
            device.set_faults(strict());
        }
        assert!(sides.iter().all(Result::is_ok), "DOORBELL_SEED={seed}");
        sides.into_iter().flatten().collect::<Vec<_>>()
    });
    thread::sleep(Duration::from_millis(2));
    let mut counts = [0; 2];
    for side in [0, 1] {
        let ([sender, receiver], lens) = ([&sides[side], &sides[1 - side]], &lens[side]);
        let (sends, receives) = (&sender.0.sends, &receiver.0.receives);
        let what = format!("DOORBELL_SEED={seed}, from side {side}");
        let first_failed = receives.iter().position(Result::is_err);
        let done = first_failed.unwrap_or(receives.len());
        counts[0] += done;
        counts[1] += receives.len() - done;
        for (number, received) in receives.iter().enumerate() {
            let at = Side::place(lens, number) as u64;
            let bytes = read_bytes(&receiver.1, at, lens[number] + 8);
            let is_there = (0..lens[number]).all(|at| bytes[at] == byte(side, number, at));
            assert!(
                bytes[lens[number]..].iter().all(|it| *it == GUARD),
                "{what}: bytes behind message {number}"
            );
            // Which ones fail, nobody can say.
            if let Ok(len) = received {
                assert_eq!(*len, lens[number] as u64, "{what}: message {number}");
                assert!(is_there, "{what}: message {number} is said to be there");
                assert!(
                    number < done,
                    "{what}: message {number} came behind a failure"
                );
            }
            let is_read = lens[number] > EAGER as usize;
            if is_read && matches!(sends.get(number), Some(Ok(_))) {
                assert!(is_there, "{what}: message {number} is said to be received");
            }
        }
        for failed in &receiver.2 {
            let now = read_bytes(&failed.memory, failed.at, failed.bytes.len());
            assert_eq!(now, failed.bytes, "{what}: a write behind a failed ticket");
        }
    }
    counts
}

#[test]
fn tickets_are_true_whatever_fails_at_whatever_moment() {
    let test = "tickets_are_true_whatever_fails_at_whatever_moment";
    let limit = Limit::new(test, STEP);
    let device = strict_device();
    let loses = device.set_faults(strict());
    let first = from_env("DOORBELL_SEED", 1);
    let rounds = from_env("DOORBELL_MESSAGES", 800) / 20;
    let mut counts = [0; 2];
    for seed in first..first + rounds {
        limit.step(seed, STEP);
        let of_seed = fail_among_messages(&device, seed, loses);
        for (count, more) in counts.iter_mut().zip(of_seed) {
            *count += more;
        }
    }
    // Both were seen, unless one seed was asked for.
    assert!(
        rounds < 20 || counts.iter().all(|it| *it > 20),
        "{counts:?}"
    );
}

/// A message that is longer than the memory of its receive fails there, with both lengths, and stores nothing. Its send completes, the stream of the
/// receive has a fault, and the next message comes.
#[test]
fn truncation_is_an_error_of_the_receiver_alone() {
    let limit = Limit::new("truncation_is_an_error_of_the_receiver_alone", STEP);
    let device = strict_device();
    let eager = u64::from(EAGER);
    // Both eager; long into an eager one's memory; both long.
    for (step, (len, capacity)) in [(9, 8), (1, 0), (eager + 1, eager), (20_000, 10_000)]
        .into_iter()
        .enumerate()
    {
        limit.step(step as u64, STEP);
        let [mut a, mut b] = pair(&device, &config());
        let memory = region(&a, 1 << 16);
        let (sends, receives) = (rig::stream("sends"), rig::stream("receives"));
        memory.fill(0, 1 << 15, 1).unwrap();
        memory.fill(1 << 15, 1 << 15, GUARD).unwrap();
        let pending = a
            .start_send(&sends, &[memory.slice(0, len).unwrap()])
            .unwrap();
        let target = [memory.slice(1 << 15, capacity).unwrap()];
        let truncated = Error::Truncated {
            len_bytes: len,
            limit_bytes: capacity,
        };
        let received = b.recv(&receives, &target).unwrap();
        assert_eq!(received.wait(SOON), Err(truncated.clone()));
        let sent = a.wait_send(&sends, pending).unwrap();
        assert_eq!(sent.wait(SOON), Ok(len));
        let fault = receives.take_fault().unwrap();
        assert!(
            fault.to_string().contains(&truncated.to_string()),
            "{fault}"
        );
        assert_eq!((a.failure(), b.failure()), (None, None));
        assert!(memory.is_filled_with(1 << 15, 1 << 15, GUARD).unwrap());
        // The same by the thread that receives.
        let pending = a
            .start_send(&sends, &[memory.slice(0, len).unwrap()])
            .unwrap();
        assert_eq!(b.recv_now(&target, SOON), Err(truncated));
        assert_eq!(a.wait_send(&sends, pending).unwrap().wait(SOON), Ok(len));
        assert!(memory.is_filled_with(1 << 15, 1 << 15, GUARD).unwrap());
        a.send(&sends, &[memory.slice(0, 5).unwrap()]).unwrap();
        let target = [memory.slice(1 << 15, 64).unwrap()];
        assert_eq!(b.recv(&receives, &target).unwrap().wait(SOON), Ok(5));
        assert!(memory.is_filled_with(1 << 15, 5, 1).unwrap());
    }
}

/// A fault of the stream: what is queued behind the receive of a message that was too long is not sent, whatever executes the stream.
#[test]
fn nothing_behind_a_refused_message_is_sent() {
    let test = "nothing_behind_a_refused_message_is_sent";
    let limit = Limit::new(test, STEP);
    let device = strict_device();
    if has_no_queue(&device, test) {
        return;
    }
    for (step, len) in [9, 5000].into_iter().enumerate() {
        limit.step(step as u64, STEP);
        let [mut a, mut b] = pair(&device, &config());
        let [mut c, mut d] = pair(&device, &config());
        let memory = region(&a, 1 << 16);
        let other = region(&c, 4096);
        let stream = rig::stream("refuses");
        let target = [memory.slice(1 << 15, 8).unwrap()];
        let received = b.recv(&stream, &target).unwrap();
        // To another peer, whose connection is given up.
        let behind = c
            .start_send(&stream, &[other.slice(0, 8).unwrap()])
            .unwrap();
        let waited = c.wait_send(&stream, behind).unwrap();
        let sends = rig::stream("sends");
        let sent = a
            .start_send(&sends, &[memory.slice(0, len).unwrap()])
            .unwrap();
        let truncated = Error::Truncated {
            len_bytes: len,
            limit_bytes: 8,
        };
        assert_eq!(received.wait(SOON), Err(truncated.clone()));
        assert_eq!(a.wait_send(&sends, sent).unwrap().wait(SOON), Ok(len));
        let discarded = waited.wait(SOON);
        assert!(discarded.is_err(), "{discarded:?}");
        let nothing = d.recv_now(
            &[other.slice(8, 8).unwrap()],
            Some(Duration::from_millis(100)),
        );
        assert!(nothing.is_err(), "{nothing:?}");
        let fault = stream.take_fault().unwrap();
        assert!(
            fault.to_string().contains(&truncated.to_string()),
            "{fault}"
        );
    }
}

/// Kernels copy short messages into memory of a GPU, and the NIC writes long ones there.
#[cfg(feature = "cuda")]
#[test]
fn messages_go_into_memory_of_a_gpu() {
    use doorbell::CudaContext;
    let test = "messages_go_into_memory_of_a_gpu";
    let limit = Limit::new(test, STEP);
    let device = strict_device();
    if !rig::is_cuda() {
        return waived::waived(test, "streams of a GPU do not execute the programs here");
    }
    if has_no_queue(&device, test) {
        return;
    }
    let context = CudaContext::primary(0).unwrap();
    let [mut a, mut b] = pair(&device, &config());
    let buffer = context.alloc(1 << 16).unwrap();
    let into = match Region::register_device(b.domain(), &buffer, Access::ALL) {
        Ok(into) => into,
        Err(error) => return waived::waived(test, &error.to_string()),
    };
    let memory = region(&a, 1 << 15);
    let [sends, receives] = ["sends", "receives"].map(rig::stream);
    // Aligned and not; in one slice and in several; of which the NIC writes those that are not eager.
    let places = [
        (0, 0, 8),
        (16, 48, 256),
        (3, 5, 200),
        (1, 0, 5000),
        (7, 13, 20_000),
    ];
    for (number, (from, to, len)) in places.into_iter().enumerate() {
        limit.step(number as u64, STEP);
        buffer.copy_from_host(0, &vec![GUARD; 1 << 16]).unwrap();
        let message: Vec<u8> = (0..len).map(|at| byte(0, number, at)).collect();
        memory.write(from, &message).unwrap();
        let target = if len <= EAGER as usize {
            vec![
                into.slice(to, len as u64 / 3).unwrap(),
                into.slice(to + len as u64 / 3, len as u64 - len as u64 / 3)
                    .unwrap(),
            ]
        } else {
            vec![into.slice(to, len as u64 + 9).unwrap()]
        };
        let received = b.recv(&receives, &target).unwrap();
        let sent = a
            .send(&sends, &[memory.slice(from, len as u64).unwrap()])
            .unwrap();
        assert_eq!(received.wait(SOON), Ok(len as u64));
        assert_eq!(sent.wait(SOON), Ok(len as u64));
        let mut found = vec![0; 1 << 16];
        buffer.copy_to_host(0, &mut found).unwrap();
        let end = to as usize + len;
        assert!(found[to as usize..end] == message[..], "{len}");
        assert!(
            found[..to as usize]
                .iter()
                .chain(&found[end..])
                .all(|byte| *byte == GUARD)
        );
    }
    // The CPU cannot.
    let target = [into.slice(0, 8).unwrap()];
    assert!(matches!(
        b.recv_now(&target, SOON),
        Err(Error::State { .. })
    ));
    let host = HostStream::new("host").unwrap();
    assert!(matches!(b.recv(&host, &target), Err(Error::State { .. })));
}

/// A sender's stream waits for a credit when all slots are used. Nothing is dropped, and the next receive lets it go on.
#[test]
fn sender_waits_for_a_slot() {
    let test = "sender_waits_for_a_slot";
    let _limit = Limit::new(test, STEP);
    let device = strict_device();
    if has_no_queue(&device, test) {
        return;
    }
    let [mut a, mut b] = pair(&device, &config().slots(2));
    let memory = region(&a, 4096);
    let sends = rig::stream("sends");
    let mut sent = Vec::new();
    for number in 0..5 {
        memory.fill(number * 8, 8, number as u8 + 1).unwrap();
        sent.push(
            a.send(&sends, &[memory.slice(number * 8, 8).unwrap()])
                .unwrap(),
        );
    }
    for ticket in &sent[..2] {
        assert_eq!(ticket.wait(SOON), Ok(8));
    }
    for received in 0..5 {
        thread::sleep(Duration::from_millis(20));
        let done = sent
            .iter()
            .filter(|it| it.check().unwrap().is_some())
            .count();
        assert_eq!(done, (2 + received).min(5), "{received} are received");
        let target = [memory.slice(1024 + 8 * received as u64, 8).unwrap()];
        assert_eq!(b.recv_now(&target, SOON), Ok(8));
        let next = (2 + received).min(4);
        assert_eq!(sent[next].wait(SOON), Ok(8));
    }
    for number in 0..5 {
        assert!(
            memory
                .is_filled_with(1024 + 8 * number, 8, number as u8 + 1)
                .unwrap()
        );
    }
}

/// A message that is not eager is sent when it has been received, and its memory is kept until then.
#[test]
fn long_send_is_done_when_its_message_is_received() {
    let test = "long_send_is_done_when_its_message_is_received";
    let _limit = Limit::new(test, STEP);
    let device = strict_device();
    if has_no_queue(&device, test) {
        return;
    }
    let [mut a, mut b] = pair(&device, &config());
    let source = region(&a, 1 << 16);
    source.fill(0, 1 << 16, 77).unwrap();
    let sends = rig::stream("sends");
    let sent = a
        .send(&sends, &[source.slice(0, 1 << 16).unwrap()])
        .unwrap();
    drop(source);
    thread::sleep(Duration::from_millis(20));
    assert_eq!(sent.check(), Ok(None));
    let target = region(&b, 1 << 16);
    let receives = rig::stream("receives");
    let received = b
        .recv(&receives, &[target.slice(0, 1 << 16).unwrap()])
        .unwrap();
    assert_eq!(received.wait(SOON), Ok(1 << 16));
    assert_eq!(sent.wait(SOON), Ok(1 << 16));
    assert!(target.is_filled_with(0, 1 << 16, 77).unwrap());
}

/// An abort is the cause of what it ends, and not the flushed completion by which a thread may learn of it first.
#[test]
fn an_abort_is_the_cause_in_every_call_and_ticket() {
    let test = "an_abort_is_the_cause_in_every_call_and_ticket";
    let limit = Limit::new(test, STEP);
    // Its flush follows the abort at once, unlike that of `strict_device`: a thread that sleeps for a while finds both.
    let device = rig::device();
    if has_no_queue(&device, test) {
        return;
    }
    let seed = from_env("DOORBELL_SEED", 1);
    let mut random = Random(seed);
    for round in 0..from_env("DOORBELL_MESSAGES", 800) / 4 {
        limit.step(round, STEP);
        let [mut a, _b] = pair(&device, &config().slots(1));
        let memory = region(&a, 4096);
        let eager = [memory.slice(0, 8).unwrap()];
        let long = [memory.slice(0, 4096).unwrap()];
        let stream = rig::stream("s");
        let abort = a.abort_handle();
        let pause = Duration::from_micros(random.below(1500));
        let ended = thread::scope(|scope| {
            let what = round % 7;
            if what == 2 {
                // It has the one slot of the peer.
                a.send_now(&eager, SOON).unwrap();
            }
            let posted = (what == 3).then(|| a.start_send_now(&long, SOON).unwrap());
            let ticket = match what {
                5 => Some(a.send(&stream, &long).unwrap()),
                6 => Some(a.recv(&stream, &eager).unwrap()),
                _ => None,
            };
            scope.spawn(move || {
                thread::sleep(pause);
                abort.abort();
            });
            match what {
                0 => a.recv_now(&eager, SOON).map(drop),
                1 => MessageQueue::recv_any_now(&mut [&mut a], &eager, SOON).map(drop),
                2 => a.send_now(&eager, SOON),
                3 => a.wait_send_now(&posted.unwrap(), SOON),
                4 => a.send_now(&long, SOON),
                _ => ticket.unwrap().wait(SOON).map(drop),
            }
        });
        let is_abort = match &ended {
            Err(Error::Work(error)) => error.cause == Cause::Aborted,
            // The stream had not come to it.
            Err(Error::State { kind, .. }) => *kind == StateKind::Discarded,
            _ => false,
        };
        assert!(is_abort, "DOORBELL_SEED={seed}, round {round}: {ended:?}");
        let causes = a.failure().map(|failure| failure.cause);
        assert_eq!(causes, Some(Cause::Aborted));
    }
}

/// A wait for a peer that never comes ends at its deadline, or when the connection fails. Its error names the cause.
#[test]
fn every_wait_ends() {
    let test = "every_wait_ends";
    let limit = Limit::new(test, STEP);
    let device = strict_device();
    if has_no_queue(&device, test) {
        return;
    }
    for abort in [false, true] {
        for what in 0..3 {
            limit.step(what + 10 * u64::from(abort), STEP);
            let mut config = config().slots(1);
            config.endpoint = config
                .endpoint
                .wait_timeout(if abort { SOON } else { SHORT });
            let [mut a, _b] = pair(&device, &config);
            let memory = region(&a, 4096);
            let eager = [memory.slice(0, 8).unwrap()];
            let long = [memory.slice(0, 4096).unwrap()];
            let stream = rig::stream("s");
            let started = Instant::now();
            let ticket = match what {
                0 => a.send(&stream, &long).unwrap(),
                1 => {
                    a.send_now(&eager, SOON).unwrap();
                    a.send(&stream, &eager).unwrap()
                }
                _ => a.recv(&stream, &eager).unwrap(),
            };
            if abort {
                thread::sleep(Duration::from_millis(5));
                a.abort_handle().abort();
            }
            let ended = ticket.wait(SOON);
            let is_right = |cause| match abort {
                true => cause == Cause::Aborted,
                false => matches!(cause, Cause::Deadline(_)),
            };
            // The stream may not have come to it when the connection was aborted.
            let is_discarded = abort
                && matches!(&ended, Err(Error::State { kind, .. }) if *kind == StateKind::Discarded);
            assert!(
                is_discarded || matches!(&ended, Err(Error::Work(error)) if is_right(error.cause)),
                "{what}: {ended:?}"
            );
            assert!(started.elapsed() < Duration::from_secs(20));
            // The peer may still read the memory, so nothing goes on as if it could not.
            let failure = a.failure().unwrap();
            assert!(is_right(failure.cause), "{what}: {failure}");
            let ended = stream.synchronize(SOON);
            assert!(
                matches!(ended, Err(Error::Asynchronous { .. })),
                "{ended:?}"
            );
        }
    }
    // From the thread.
    let [mut a, mut b] = pair(&device, &config().slots(1));
    let memory = region(&a, 4096);
    let eager = [memory.slice(0, 8).unwrap()];
    assert!(matches!(
        b.recv_now(&eager, SHORT),
        Err(Error::Timeout { .. })
    ));
    a.send_now(&eager, SOON).unwrap();
    assert!(matches!(
        a.send_now(&eager, SHORT),
        Err(Error::Timeout { .. })
    ));
    assert_eq!(b.recv_now(&eager, SOON), Ok(8));
    a.send_now(&eager, SOON).unwrap();
    let abort = a.abort_handle();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(20));
            abort.abort();
        });
        let ended = a.send_now(&eager, SOON);
        assert!(
            matches!(ended, Err(Error::Work(error)) if error.cause == Cause::Aborted),
            "{ended:?}"
        );
    });
}

/// Three peers send at random; the receiver takes what comes.
#[test]
fn messages_are_received_from_any_peer() {
    let test = "messages_are_received_from_any_peer";
    let limit = Limit::new(test, STEP);
    let domain = rig::device().protection_domain();
    let lens = [0, 8, 700, 10_000];
    let first = from_env("DOORBELL_SEED", 1);
    for seed in first..first + 10 {
        limit.step(seed, STEP);
        let mut random = Random(seed);
        let config = config().slots(1 + random.below(4) as u32).ahead(8);
        let [mut senders, mut receivers] = [Vec::new(), Vec::new()];
        for _ in 0..3 {
            let [sender, receiver] = pair_in(&domain, &config);
            senders.push(sender);
            receivers.push(receiver);
        }
        let plan: Vec<usize> = (0..60).map(|_| random.below(3) as usize).collect();
        let [from, into] = [&senders[0], &receivers[0]].map(|queue| region(queue, 1 << 14));
        let byte = |sender: usize, number: usize| (sender * 100 + number % 97) as u8;
        thread::scope(|scope| {
            let (plan, from) = (&plan, &from);
            let sending = scope.spawn(move || {
                let mut sent = [0; 3];
                for sender in plan.iter().copied() {
                    let number = sent[sender];
                    sent[sender] += 1;
                    let len = lens[number % 4];
                    // Each send is waited for, so the memory is free again.
                    from.fill(0, len, byte(sender, number)).unwrap();
                    let slice = [from.slice(0, len).unwrap()];
                    senders[sender].send_now(&slice, SOON).unwrap();
                }
                senders.iter_mut().for_each(|it| it.finish(SOON).unwrap());
                senders
            });
            let mut got = [0; 3];
            for _ in 0..plan.len() {
                into.fill(0, 10_000, 0xee).unwrap();
                let slice = [into.slice(0, 10_000).unwrap()];
                let mut all: Vec<_> = receivers.iter_mut().collect();
                let received = MessageQueue::recv_any_now(&mut all, &slice, SOON);
                let (sender, len) = received.unwrap();
                let number = got[sender];
                got[sender] += 1;
                assert_eq!(len, lens[number % 4], "seed {seed}: {number} of {sender}");
                let filled = into.is_filled_with(0, len, byte(sender, number));
                assert_eq!(filled, Ok(true), "seed {seed}: {number} of {sender}");
            }
            receivers.iter_mut().for_each(|it| it.finish(SOON).unwrap());
            // The queues stay until both sides are done.
            drop(sending.join().unwrap());
        });
    }
}

#[test]
fn queues_with_messages_take_turns_and_one_that_fails_is_named() {
    let test = "queues_with_messages_take_turns";
    let _limit = Limit::new(test, STEP);
    let domain = rig::device().protection_domain();
    let [mut senders, mut receivers] = [Vec::new(), Vec::new()];
    for _ in 0..3 {
        let [sender, receiver] = pair_in(&domain, &config().slots(8));
        senders.push(sender);
        receivers.push(receiver);
    }
    let memory = region(&receivers[0], 64);
    let slice = [memory.slice(0, 8).unwrap()];
    let none = MessageQueue::recv_any_now(&mut [], &slice, SOON).unwrap_err();
    assert!(matches!(none, Error::Range { .. }), "{none}");
    let mut all: Vec<_> = receivers.iter_mut().collect();
    let late = MessageQueue::recv_any_now(&mut all, &slice, SHORT).unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    for _ in 0..4 {
        for sender in &mut senders {
            sender.send_now(&slice, SOON).unwrap();
        }
    }
    // The device delivers each message when its sender was told; the last is there if this one is.
    let begin = MessageQueue::recv_any_now(&mut all[2..], &slice, SOON);
    assert_eq!(begin, Ok((0, 8)));
    let mut of: Vec<usize> = (0..9)
        .map(|_| {
            MessageQueue::recv_any_now(&mut all, &slice, SOON)
                .unwrap()
                .0
        })
        .collect();
    for turn in of.chunks_mut(3) {
        turn.sort_unstable();
        assert_eq!(turn, [0, 1, 2]);
    }
    // Also where each message is followed by another one, which is asked for.
    let mut served = [0; 3];
    for _ in 0..9 {
        for _ in 0..2 {
            for sender in &mut senders[..2] {
                sender.send_now(&slice, SOON).unwrap();
            }
        }
        let (from, _) = MessageQueue::recv_any_now(&mut all[..2], &slice, SOON).unwrap();
        assert_eq!(all[from].recv_now(&slice, SOON), Ok(8));
        served[from] += 1;
        let other = 1 - from;
        for _ in 0..2 {
            assert_eq!(all[other].recv_now(&slice, SOON), Ok(8));
        }
    }
    assert!(served[0].min(served[1]) >= 4, "{served:?}");
    let other = Device::open("softcx").unwrap().protection_domain();
    let foreign = Region::alloc(&other, 64, Access::ALL).unwrap();
    let foreign = [foreign.slice(0, 8).unwrap()];
    let refused = MessageQueue::recv_any_now(&mut all, &foreign, SOON).unwrap_err();
    assert!(matches!(refused, Error::Foreign { .. }), "{refused}");
    all[1].abort_handle().abort();
    let failed = MessageQueue::recv_any_now(&mut all, &slice, SOON).unwrap_err();
    assert!(matches!(failed, Error::Work(_)), "{failed}");
    let failed: Vec<bool> = all.iter().map(|queue| queue.failure().is_some()).collect();
    assert_eq!(failed, [false, true, false]);
    all.remove(1);
    // One message of before is left.
    let received = MessageQueue::recv_any_now(&mut all, &slice, SOON);
    assert_eq!(received, Ok((0, 8)));
}

/// The completion of a credit is late where the peer's device does not answer.
#[test]
fn late_credits_of_one_queue_hold_up_no_other() {
    let test = "late_credits_of_one_queue_hold_up_no_other";
    let _limit = Limit::new(test, STEP);
    let [own, slow, fast] = [(); 3].map(|()| rig::device());
    if !slow.set_frozen(false) {
        return waived::waived(test, "the device is not stopped from this process");
    }
    let own = own.protection_domain();
    // Each credit is signaled.
    let config = config().slots(1).ahead(1);
    let pair_of = |device: &Device| {
        let mut sender = MessageQueue::new(&device.protection_domain(), &config).unwrap();
        let mut receiver = MessageQueue::new(&own, &config).unwrap();
        let addresses = [sender.address(), receiver.address()];
        sender.connect(&addresses[1]).unwrap();
        receiver.connect(&addresses[0]).unwrap();
        (sender, receiver)
    };
    let (mut first, a) = pair_of(&slow);
    let (mut second, b) = pair_of(&fast);
    let mut receivers = [a, b];
    let mut all: Vec<_> = receivers.iter_mut().collect();
    let into = region(all[0], 64);
    let into = [into.slice(0, 8).unwrap()];
    let [from, other] = [&first, &second].map(|queue| region(queue, 64));
    first.send_now(&[from.slice(0, 8).unwrap()], SOON).unwrap();
    assert!(slow.set_frozen(true));
    assert_eq!(
        MessageQueue::recv_any_now(&mut all, &into, SOON),
        Ok((0, 8))
    );
    second
        .send_now(&[other.slice(0, 8).unwrap()], SOON)
        .unwrap();
    // The first one has no completion of its credit: by itself it does not come to a message.
    let late = MessageQueue::recv_any_now(&mut all[..1], &into, SHORT);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert_eq!(
        MessageQueue::recv_any_now(&mut all, &into, SOON),
        Ok((1, 8))
    );
    // The first one has waited longer now, and is asked first.
    second
        .send_now(&[other.slice(0, 8).unwrap()], SOON)
        .unwrap();
    let (limit, since) = (Duration::from_secs(10), Instant::now());
    assert_eq!(
        MessageQueue::recv_any_now(&mut all, &into, Some(limit)),
        Ok((1, 8))
    );
    assert!(since.elapsed() < limit);
    assert!(slow.set_frozen(false));
    receivers.iter_mut().for_each(|it| it.finish(SOON).unwrap());
}

/// A thread that waits for a message, for ever, learns that its peer is gone by the credit that the peer does not take.
#[test]
fn a_receive_without_a_timeout_ends_if_the_peer_is_gone() {
    let test = "a_receive_without_a_timeout_ends_if_the_peer_is_gone";
    let limit = Limit::new(test, STEP);
    let device = rig::device();
    for any in [false, true] {
        limit.step(any.into(), STEP);
        let [mut a, mut b] = pair(&device, &config());
        let memory = region(&a, 64);
        let [from, into] = [0, 8].map(|at| [memory.slice(at, 8).unwrap()]);
        b.send_now(&from, SOON).unwrap();
        drop(b);
        let mut receive = || match any {
            false => a.recv_now(&into, None),
            true => MessageQueue::recv_any_now(&mut [&mut a], &into, None).map(|it| it.1),
        };
        assert_eq!(receive(), Ok(8));
        let ended = receive();
        assert!(matches!(ended, Err(Error::Work(_))), "{any}: {ended:?}");
    }
}

/// One thread sends in both directions before it receives, and waits for its sends in any order.
#[test]
fn a_thread_sends_before_it_receives() {
    let test = "a_thread_sends_before_it_receives";
    let _limit = Limit::new(test, STEP);
    let device = rig::device();
    let config = config().slots(4).ahead(8);
    let [mut a, mut b] = pair(&device, &config);
    let [from, into] = [&a, &b].map(|queue| region(queue, 1 << 16));
    for round in 0..6_u64 {
        // Long and short, in turn.
        let len = |number: u64| match (number + round) % 2 {
            0 => 10_000,
            _ => 8,
        };
        from.fill(0, 40_000, round as u8 + 1).unwrap();
        let send = |queue: &mut MessageQueue, memory: &Region, number: u64| {
            let slice = memory.slice(number * 10_000, len(number)).unwrap();
            queue.start_send_now(&[slice], SOON).unwrap()
        };
        let there: Vec<_> = (0..4).map(|number| send(&mut a, &from, number)).collect();
        let back: Vec<_> = (0..4).map(|number| send(&mut b, &from, number)).collect();
        let slice = [from.slice(0, 8).unwrap()];
        // All slots are used, so nothing is sent, and the call may be repeated later.
        let late = a.start_send_now(&slice, SHORT);
        assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        assert!(matches!(
            b.wait_send_now(&there[0], SOON),
            Err(Error::Foreign { .. })
        ));
        let long = &there[usize::from(len(0) == 8)];
        assert!(matches!(
            a.wait_send_now(long, SHORT),
            Err(Error::Timeout { .. })
        ));
        assert_eq!(a.is_sent(long), Ok(false));
        assert!(matches!(b.is_sent(long), Err(Error::Foreign { .. })));
        for number in 0..4 {
            for queue in [&mut a, &mut b] {
                into.fill(number * 10_000, 10_000, 0).unwrap();
                let slice = [into.slice(number * 10_000, 10_000).unwrap()];
                assert_eq!(queue.recv_now(&slice, SOON), Ok(len(number)));
                let filled = into.is_filled_with(number * 10_000, len(number), round as u8 + 1);
                assert_eq!(filled, Ok(true));
            }
        }
        for sent in there.iter().rev() {
            a.wait_send_now(sent, SOON).unwrap();
            a.wait_send_now(sent, SOON).unwrap();
            assert_eq!(a.is_sent(sent), Ok(true));
        }
        back.iter()
            .for_each(|sent| b.wait_send_now(sent, SOON).unwrap());
    }
    thread::scope(|scope| {
        scope.spawn(|| a.finish(SOON).unwrap());
        b.finish(SOON).unwrap();
    });
}

/// A request whose answer was asked for first, on another stream: the send stands behind no receive. A kernel behind the wait of a send may change the memory,
/// and one behind a receive finds the message.
#[test]
fn requests_are_answered_in_turn() {
    let test = "requests_are_answered_in_turn";
    let _limit = Limit::new(test, STEP);
    let device = strict_device();
    if has_no_queue(&device, test) {
        return;
    }
    for len in [8, 5000] {
        let [mut client, mut server] = pair(&device, &config().slots(2));
        let memory = region(&client, 1 << 16);
        let slice = |at: u64| memory.slice(at, len).unwrap();
        let [asks, answers, serves] = ["asks", "answers", "serves"].map(rig::stream);
        let found = Arc::new(AtomicU64::new(0));
        for number in 1..=20_u8 {
            let answered = client.recv(&answers, &[slice(0)]).unwrap();
            let (from, sums) = (memory.clone(), Arc::clone(&found));
            let look = move || {
                let is_right = from.is_filled_with(0, len, number).unwrap();
                sums.fetch_add(u64::from(is_right), Ordering::Relaxed);
            };
            answers.launch(look).unwrap();
            // The server's side of the memory.
            server.recv(&serves, &[slice(20_000)]).unwrap();
            let answer = server.start_send(&serves, &[slice(20_000)]).unwrap();
            server.wait_send(&serves, answer).unwrap();
            let of = memory.clone();
            asks.launch(move || of.fill(10_000, len, number).unwrap())
                .unwrap();
            client.send(&asks, &[slice(10_000)]).unwrap();
            let of = memory.clone();
            asks.launch(move || of.fill(10_000, len, 0).unwrap())
                .unwrap();
            assert_eq!(answered.wait(SOON), Ok(len));
            serves.synchronize(SOON).unwrap();
        }
        answers.synchronize(SOON).unwrap();
        assert_eq!(found.load(Ordering::Relaxed), 20);
    }
}

/// Sends and receives of one queue on two streams, in turn. Waits are queued on another stream, dropped, or given to another queue, which refuses them.
#[test]
fn messages_of_one_queue_go_by_several_streams() {
    let test = "messages_of_one_queue_go_by_several_streams";
    let _limit = Limit::new(test, STEP);
    let device = strict_device();
    if has_no_queue(&device, test) {
        return;
    }
    let [mut a, mut b] = pair(&device, &config().slots(2));
    let memory = region(&a, 1 << 16);
    let streams = [rig::stream("first"), rig::stream("second")];
    let receives = ["first", "second"].map(rig::stream);
    let mut tickets = Vec::new();
    for number in 0..20_u64 {
        let len = if number % 3 == 0 { 1000 } else { 8 };
        let (from, into) = (number * 1000, 20_000 + number * 1000);
        memory.fill(from, len, number as u8 + 1).unwrap();
        let turn = number as usize % 2;
        let pending = a
            .start_send(&streams[turn], &[memory.slice(from, len).unwrap()])
            .unwrap();
        let received = b
            .recv(&receives[turn], &[memory.slice(into, 1000).unwrap()])
            .unwrap();
        match number % 4 {
            0 => drop(pending),
            1 => {
                let refused = b.wait_send(&streams[turn], pending);
                assert!(matches!(refused, Err(Error::Foreign { .. })), "{refused:?}");
            }
            _ => {
                let ticket = a.wait_send(&streams[1 - turn], pending).unwrap();
                tickets.push((ticket, len));
            }
        }
        tickets.push((received, len));
    }
    for (ticket, len) in tickets {
        assert_eq!(ticket.wait(SOON), Ok(len));
    }
    for number in 0..20_u64 {
        let len = if number % 3 == 0 { 1000 } else { 8 };
        assert!(
            memory
                .is_filled_with(20_000 + number * 1000, len, number as u8 + 1)
                .unwrap()
        );
    }
    for queue in [&mut a, &mut b] {
        queue.finish(SOON).unwrap();
    }
}

/// What is refused changes nothing: the next call is as if it had not been made.
#[test]
fn refused_calls_change_nothing() {
    let test = "refused_calls_change_nothing";
    let _limit = Limit::new(test, STEP);
    let device = strict_device();
    let domain = device.protection_domain();
    let stream = HostStream::new("s").unwrap();
    let mut alone = MessageQueue::new(&domain, &config()).unwrap();
    let memory = region(&alone, 64);
    let small = [memory.slice(0, 8).unwrap()];
    let kind = |error: Error| match error {
        Error::State { kind, .. } => kind,
        error => panic!("{error:?}"),
    };
    assert_eq!(
        kind(alone.send(&stream, &small).unwrap_err()),
        StateKind::NotConnected
    );
    assert_eq!(
        kind(alone.recv(&stream, &small).unwrap_err()),
        StateKind::NotConnected
    );
    assert_eq!(
        kind(alone.send_now(&small, SOON).unwrap_err()),
        StateKind::NotConnected
    );
    assert_eq!(
        kind(alone.recv_now(&small, SOON).unwrap_err()),
        StateKind::NotConnected
    );

    let [mut a, mut b] = pair(&device, &config().ahead(2));
    let memory = region(&a, 1 << 16);
    let small = [memory.slice(0, 8).unwrap()];
    let local = Region::alloc(a.domain(), 4096, Access::LOCAL_READ).unwrap();
    let long = [local.slice(0, 4096).unwrap()];
    assert_eq!(
        kind(a.send(&stream, &long).unwrap_err()),
        StateKind::NoAccess
    );
    assert_eq!(
        kind(b.recv(&stream, &long).unwrap_err()),
        StateKind::NoAccess
    );
    let halves = [
        memory.slice(0, 200).unwrap(),
        memory.slice(200, 200).unwrap(),
    ];
    assert!(matches!(
        a.send(&stream, &halves),
        Err(Error::Range { max: 1, .. })
    ));
    assert!(matches!(
        b.recv(&stream, &halves),
        Err(Error::Range { max: 1, .. })
    ));
    assert!(matches!(
        a.send(&stream, &[small[0]; 4]),
        Err(Error::Range { max: 3, .. })
    ));
    let other = Device::open("softcx").unwrap();
    let other = MessageQueue::new(&other.protection_domain(), &config()).unwrap();
    let foreign = region(&other, 4096);
    let foreign = [foreign.slice(0, 4096).unwrap()];
    assert!(matches!(
        a.send(&stream, &foreign),
        Err(Error::Foreign { .. })
    ));
    assert!(matches!(
        b.recv(&stream, &foreign),
        Err(Error::Foreign { .. })
    ));
    let gone = region(&a, 4096);
    assert_eq!(gone.deregister(), Ok(true));
    let gone_slice = [gone.slice(0, 4096).unwrap()];
    assert_eq!(
        kind(a.send(&stream, &gone_slice).unwrap_err()),
        StateKind::Deregistered
    );
    assert_eq!(
        kind(b.recv(&stream, &gone_slice).unwrap_err()),
        StateKind::Deregistered
    );

    // A stream with a fault takes nothing.
    stream.launch(|| panic!("on purpose")).unwrap();
    assert!(stream.synchronize(SOON).is_err());
    assert!(matches!(
        a.send(&stream, &small),
        Err(Error::Asynchronous { .. })
    ));
    assert!(matches!(
        a.start_send(&stream, &small),
        Err(Error::Asynchronous { .. })
    ));
    assert!(matches!(
        b.recv(&stream, &small),
        Err(Error::Asynchronous { .. })
    ));
    let large = [memory.slice(1024, 4096).unwrap()];
    assert!(matches!(
        b.recv(&stream, &large),
        Err(Error::Asynchronous { .. })
    ));
    assert!(stream.take_fault().is_some());

    // No more than `ahead` receives are queued; one more is refused, whole.
    if rig::control(&device) != Control::Sync {
        let mut tickets = Vec::new();
        let full = loop {
            match b.recv(&stream, &large) {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => break error,
            }
            assert!(tickets.len() <= 16);
        };
        assert!(matches!(full, Error::QueueFull { .. }), "{full:?}");
        assert!(
            tickets.len() >= 2 && tickets.len() <= 3,
            "{}",
            tickets.len()
        );
        memory.fill(0, 8, 5).unwrap();
        let sends = rig::stream("sends");
        // A call of the thread would overtake them.
        assert_eq!(
            kind(b.recv_now(&small, SOON).unwrap_err()),
            StateKind::OutOfOrder
        );
        for ticket in tickets {
            a.send(&sends, &small).unwrap().wait(SOON).unwrap();
            assert_eq!(ticket.wait(SOON), Ok(8));
        }
    }
    for number in 0..20 {
        memory.fill(0, 300, number).unwrap();
        let long = [memory.slice(0, 300).unwrap()];
        let pending = a.start_send(&stream, &long).unwrap();
        assert_eq!(b.recv_now(&large, SOON), Ok(300));
        assert_eq!(a.wait_send(&stream, pending).unwrap().wait(SOON), Ok(300));
        assert!(memory.is_filled_with(1024, 300, number).unwrap());
    }
}

/// One direction only, far more messages than the queues hold: the credits' places in the send queue come back.
#[test]
fn any_number_of_messages_goes_one_way() {
    let _limit = Limit::new("any_number_of_messages_goes_one_way", STEP);
    let device = strict_device();
    for ahead in [1, 2, 8] {
        let mut config = config().ahead(ahead).slots(ahead);
        config.endpoint = config.endpoint.room_timeout(SOON);
        let [mut a, mut b] = pair(&device, &config);
        let memory = region(&a, 4096);
        let source = memory.slice(0, 8).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let stream = HostStream::new("receives").unwrap();
                for number in 0..400 {
                    let target = [memory.slice(8 * (number % 100) + 64, 8).unwrap()];
                    let ticket = b.recv(&stream, &target).unwrap();
                    if number % 10 == 0 {
                        assert_eq!(ticket.wait(SOON), Ok(8));
                    }
                }
                stream.synchronize(SOON).unwrap();
            });
            let stream = rig::stream("sends");
            for _ in 0..400 {
                a.send(&stream, &[source]).unwrap();
            }
            stream.synchronize(SOON).unwrap();
        });
    }
}

#[test]
fn addresses_are_read_back_and_others_refused() {
    let device = strict_device();
    let queue = MessageQueue::new(&device.protection_domain(), &config()).unwrap();
    let bytes = queue.address().to_bytes();
    assert_eq!(MessageAddress::from_bytes(&bytes), Ok(queue.address()));
    for len in 0..bytes.len() {
        assert!(MessageAddress::from_bytes(&bytes[..len]).is_err());
    }
    assert!(MessageAddress::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    for (at, value) in [
        (0, 0),
        (48, 0),
        (116, 2),
        (120, 3),
        (120, 0),
        (122, 1),
        (127, 1),
    ] {
        let mut bytes = bytes;
        bytes[at] = value;
        assert!(MessageAddress::from_bytes(&bytes).is_err(), "{at}");
    }
    // A region for credits that is too short.
    let mut short = bytes;
    short[96 + 8..96 + 16].copy_from_slice(&12_u64.to_le_bytes());
    let short = MessageAddress::from_bytes(&short).unwrap();
    let mut peer = MessageQueue::new(&device.protection_domain(), &config()).unwrap();
    let refused = peer.connect(&short);
    assert!(
        matches!(
            refused,
            Err(Error::OutOfBounds {
                limit_bytes: 12,
                ..
            })
        ),
        "{refused:?}"
    );
    peer.connect(&queue.address()).unwrap();
}
