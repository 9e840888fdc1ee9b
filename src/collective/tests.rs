//! Every algorithm with 1 to 16 ranks, in a simulation of message queues, against a sequential computation.

use std::collections::{BTreeSet, VecDeque};

use super::algorithms::{self as of, Algorithm, Ranks};
use super::matched::{ReadyReceive, ready_rounds};
use super::schedule::{Blocks, MemoryStep, Operand, OperandSpan, Schedule, Transfer};

/// The memory of a rank: input, output, scratch. In place, input and output are one.
#[derive(Clone, Default)]
struct Memory {
    parts: [Vec<u8>; 3],
    in_place: bool,
}

impl Memory {
    fn part(&mut self, place: Operand) -> &mut Vec<u8> {
        match place {
            Operand::Input if !self.in_place => &mut self.parts[0],
            Operand::Input | Operand::Output => &mut self.parts[1],
            Operand::Scratch => &mut self.parts[2],
            Operand::Listed(_) => panic!("no list of messages"),
        }
    }

    fn read(&mut self, span: OperandSpan) -> Vec<u8> {
        let (from, to) = (span.offset as usize, (span.offset + span.len) as usize);
        self.part(span.place)[from..to].to_vec()
    }

    fn write(&mut self, span: OperandSpan, bytes: &[u8]) {
        let (from, to) = (span.offset as usize, (span.offset + span.len) as usize);
        self.part(span.place)[from..to].copy_from_slice(bytes);
    }

    fn perform(&mut self, step: MemoryStep, count: u32) {
        let words = |bytes: Vec<u8>| -> Vec<i32> {
            let (words, rest) = bytes.as_chunks();
            assert!(rest.is_empty(), "not whole elements: {step:?}");
            words.iter().map(|word| i32::from_ne_bytes(*word)).collect()
        };
        let bytes =
            |words: Vec<i32>| -> Vec<u8> { words.into_iter().flat_map(i32::to_ne_bytes).collect() };
        match step {
            MemoryStep::Copy { from, into } => {
                let copied = self.read(from);
                self.write(into, &copied);
            }
            MemoryStep::Divide { span } => {
                let divided = words(self.read(span));
                let divided = divided.into_iter().map(|it| it / count as i32).collect();
                self.write(span, &bytes(divided));
            }
            MemoryStep::Reduce {
                first,
                second,
                into,
            } => {
                assert_eq!((first.len, second.len), (into.len, into.len));
                let [first, second] = [first, second].map(|span| words(self.read(span)));
                let sums = first.into_iter().zip(second);
                let sums = sums.map(|(a, b)| a.wrapping_add(b)).collect();
                self.write(into, &bytes(sums));
            }
        }
    }
}

/// How messages are carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carried {
    /// Copied when they are sent: as short ones are.
    Copied,
    /// Read from the memory of the sender when they are received, for which the send waits: as long ones are.
    Read,
    /// Written into the memory of the receiver when they are sent, once that is ready: as those of matched operations are. So many may be ready early.
    Written(u32),
}

/// What a rank does, one after the other.
enum Action {
    Ready(ReadyReceive),
    Send(Transfer),
    Receive(Transfer),
    /// Until as many messages to a peer were received.
    AwaitSent(u32, u64),
    Local(MemoryStep),
}

fn actions(schedule: &Schedule, in_place: bool, carried: Carried) -> VecDeque<Action> {
    let mut actions = VecDeque::new();
    let mut sent = std::collections::BTreeMap::new();
    let range = |span: OperandSpan| {
        let memory = match span.place {
            Operand::Input if !in_place => 1,
            Operand::Scratch => 2,
            _ => 0,
        };
        let start = (memory << 40) + span.offset;
        (start, start + span.len)
    };
    let ready = match carried {
        Carried::Written(limit) => ready_rounds(schedule, range, |_| limit),
        _ => vec![Vec::new(); schedule.rounds.len()],
    };
    for (round, ready) in schedule.rounds.iter().zip(ready) {
        actions.extend(ready.into_iter().map(Action::Ready));
        for transfers in [&round.sends, &round.receives] {
            let mut peers: Vec<u32> = transfers.iter().map(|it| it.peer).collect();
            peers.sort_unstable();
            assert!(
                peers.windows(2).all(|pair| pair[0] != pair[1]),
                "two messages to a peer in a round"
            );
        }
        actions.extend(round.sends.iter().map(|it| Action::Send(*it)));
        actions.extend(round.receives.iter().map(|it| Action::Receive(*it)));
        for send in &round.sends {
            let number = sent.entry(send.peer).or_insert(0);
            *number += 1;
            actions.push_back(Action::AwaitSent(send.peer, *number));
        }
        actions.extend(round.then.iter().map(|it| Action::Local(*it)));
    }
    actions
}

/// Carries the schedules of all ranks out. A sender may be `slots` messages ahead of a receiver.
fn simulate(schedules: &[Schedule], memories: &mut [Memory], carried: Carried, slots: u64) {
    let reads = carried == Carried::Read;
    let count = schedules.len();
    for (memory, schedule) in memories.iter_mut().zip(schedules) {
        memory.parts[2] = vec![0xee; schedule.scratch_bytes as usize];
    }
    let ways_in = memories.iter().map(|memory| memory.in_place);
    let mut todo: Vec<VecDeque<Action>> = schedules
        .iter()
        .zip(ways_in)
        .map(|(schedule, in_place)| actions(schedule, in_place, carried))
        .collect();
    // By sender and receiver: where messages with bytes go, how many were sent and received, and which are ready.
    let mut places = vec![vec![Vec::new(); count]; count];
    for (rank, schedule) in schedules.iter().enumerate() {
        for receive in schedule.rounds.iter().flat_map(|round| &round.receives) {
            if receive.span.len > 0 {
                places[receive.peer as usize][rank].push(receive.span);
            }
        }
    }
    let mut placed = vec![vec![[0_usize; 2]; count]; count];
    let mut ready = vec![vec![BTreeSet::new(); count]; count];
    // By sender and receiver: messages on their way, with their bytes unless they are read; how many were sent and received.
    let mut ways = vec![vec![VecDeque::<(OperandSpan, Option<Vec<u8>>)>::new(); count]; count];
    let mut sent = vec![vec![0_u64; count]; count];
    let mut received = vec![vec![0_u64; count]; count];
    while todo.iter().any(|actions| !actions.is_empty()) {
        let mut has_moved = false;
        for rank in 0..count {
            while let Some(action) = todo[rank].front() {
                match action {
                    Action::Ready(ReadyReceive { peer, ahead }) => {
                        let peer = *peer as usize;
                        let number = placed[peer][rank][1] + *ahead as usize;
                        assert!(ready[peer][rank].insert(number), "ready twice");
                    }
                    Action::Send(Transfer { peer, span }) => {
                        let peer = *peer as usize;
                        assert_ne!(peer, rank, "a message to itself");
                        if sent[rank][peer] - received[rank][peer] >= slots {
                            break;
                        }
                        let number = placed[rank][peer][0];
                        let is_placed = matches!(carried, Carried::Written(_)) && span.len > 0;
                        if is_placed && !ready[rank][peer].contains(&number) {
                            break;
                        }
                        sent[rank][peer] += 1;
                        let bytes = (!reads).then(|| memories[rank].read(*span));
                        if is_placed {
                            placed[rank][peer][0] += 1;
                            let into = places[rank][peer][number];
                            memories[peer].write(into, bytes.as_ref().unwrap());
                        }
                        ways[rank][peer].push_back((*span, bytes));
                    }
                    Action::Receive(Transfer { peer, span }) => {
                        let peer = *peer as usize;
                        let Some((from, bytes)) = ways[peer][rank].pop_front() else {
                            break;
                        };
                        assert_eq!(
                            from.len, span.len,
                            "rank {peer} sends and rank {rank} receives"
                        );
                        if !matches!(carried, Carried::Written(_)) {
                            let bytes = bytes.unwrap_or_else(|| memories[peer].read(from));
                            memories[rank].write(*span, &bytes);
                        } else if span.len > 0 {
                            let number = &mut placed[peer][rank][1];
                            assert_eq!(places[peer][rank][*number], *span);
                            *number += 1;
                        }
                        received[peer][rank] += 1;
                    }
                    Action::AwaitSent(peer, number) => {
                        if reads && received[rank][*peer as usize] < *number {
                            break;
                        }
                    }
                    Action::Local(step) => memories[rank].perform(*step, count as u32),
                }
                todo[rank].pop_front();
                has_moved = true;
            }
        }
        assert!(has_moved, "{count} ranks wait for each other");
    }
    assert!(
        ways.iter().flatten().all(VecDeque::is_empty),
        "a message that nobody receives"
    );
}

fn all(count: u32) -> impl Iterator<Item = Ranks> {
    (0..count).map(move |rank| Ranks { rank, count })
}

/// Bytes that tell ranks and places apart.
fn data(rank: u32, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (u64::from(rank) * 37 + at * 5 + at / 251) as u8)
        .collect()
}

/// Simulates in all ways, and compares the outputs.
fn check(
    what: &str,
    schedules: &[Schedule],
    memories: &[Memory],
    expected: impl Fn(u32, &[u8]) -> Option<Vec<u8>>,
) {
    let ways = [
        (Carried::Copied, 1),
        (Carried::Copied, 16),
        (Carried::Read, 1),
        (Carried::Read, 16),
        (Carried::Written(1), 1),
        (Carried::Written(3), 16),
    ];
    let divided: Vec<Schedule> = schedules
        .iter()
        .map(|schedule| schedule.clone().with_messages_of(20))
        .collect();
    let whole = ways.map(|(carried, slots)| (schedules, carried, slots));
    let divided = ways.map(|(carried, slots)| (&divided[..], carried, slots));
    for (schedules, carried, slots) in whole.into_iter().chain(divided) {
        let mut memories = memories.to_vec();
        let inputs: Vec<Vec<u8>> = memories.iter().map(|it| it.parts[0].clone()).collect();
        simulate(schedules, &mut memories, carried, slots);
        for (rank, memory) in (0..).zip(&memories) {
            let count = schedules.len();
            if let Some(expected) = expected(rank, &memory.parts[1]) {
                assert!(
                    memory.parts[1] == expected,
                    "{what}: rank {rank} of {count}, {carried:?}"
                );
            }
            assert!(
                memory.in_place || memory.parts[0] == inputs[rank as usize],
                "{what}: an input was changed"
            );
        }
    }
}

/// One rank's memory.
fn memory(input: Vec<u8>, output: Vec<u8>) -> Memory {
    Memory {
        parts: [input, output, Vec::new()],
        in_place: false,
    }
}

fn in_place(output: Vec<u8>) -> Memory {
    Memory {
        parts: [Vec::new(), output, Vec::new()],
        in_place: true,
    }
}

/// Lengths of blocks: of one length, of several, and with nothing at all in some.
fn lengths(count: u32) -> [Vec<u64>; 4] {
    let each = |of: fn(u64) -> u64| (0..u64::from(count)).map(of).collect();
    [
        each(|_| 24),
        each(|at| 4 * at),
        each(|at| at % 3 * 8),
        each(|_| 0),
    ]
}

fn log2_up(count: u32) -> u64 {
    count.next_power_of_two().ilog2().into()
}

const COUNTS: std::ops::RangeInclusive<u32> = 1..=16;

#[test]
fn barrier_waits_for_every_rank() {
    for count in COUNTS {
        let schedules: Vec<Schedule> = all(count).map(of::barrier).collect();
        assert!(
            schedules
                .iter()
                .all(|it| it.messages() == log2_up(count) && it.bytes() == 0)
        );
        // No rank ends before the last one begins: what each rank knows of, after each round.
        let mut knows: Vec<u32> = (0..count).map(|rank| 1 << rank).collect();
        for round in 0..log2_up(count) as usize {
            let before = knows.clone();
            for (rank, schedule) in schedules.iter().enumerate() {
                let from = schedule.rounds[round].receives[0].peer;
                knows[rank] |= before[from as usize];
            }
        }
        let all = u32::MAX >> (32 - count);
        assert!(knows.iter().all(|it| *it == all), "{count}: {knows:?}");
        let memories = vec![memory(Vec::new(), Vec::new()); count as usize];
        check("barrier", &schedules, &memories, |_, _| Some(Vec::new()));
    }
}

#[test]
fn broadcasts_reach_every_rank_from_any_root() {
    for count in COUNTS {
        for root in 0..count {
            for bytes in [0, 1, 7, 64, 1001] {
                let memories: Vec<Memory> = (0..count)
                    .map(|rank| {
                        in_place(if rank == root {
                            data(root, bytes)
                        } else {
                            vec![0; bytes as usize]
                        })
                    })
                    .collect();
                let expected = |_, _: &[u8]| Some(data(root, bytes));
                let tree: Vec<Schedule> = all(count)
                    .map(|ranks| of::broadcast_tree(Algorithm::Binomial, ranks, root, bytes))
                    .collect();
                let messages: u64 = tree.iter().map(Schedule::messages).sum();
                assert_eq!(messages, u64::from(count) - 1);
                assert!(tree.iter().all(|it| it.messages() <= log2_up(count)));
                check("binomial", &tree, &memories, expected);
                let wide: Vec<Schedule> = all(count)
                    .map(|ranks| of::broadcast_tree(Algorithm::Knomial, ranks, root, bytes))
                    .collect();
                let messages: u64 = wide.iter().map(Schedule::messages).sum();
                assert_eq!(messages, u64::from(count) - 1);
                let depth = log2_up(count).div_ceil(2);
                assert!(wide.iter().all(|it| it.messages() <= 3 * depth));
                check("knomial", &wide, &memories, expected);
                let blocks: Vec<Schedule> = all(count)
                    .map(|ranks| of::broadcast_scatter_gather(ranks, root, bytes))
                    .collect();
                check("scatter-gather", &blocks, &memories, expected);
            }
        }
    }
}

#[test]
fn gathers_and_scatters_have_every_block_in_its_place() {
    let roots = |count: u32| BTreeSet::from([0, 1.min(count - 1), count / 2, count - 1]);
    for count in COUNTS {
        for (lens, root) in lengths(count).into_iter().flat_map(|lens| {
            roots(count)
                .into_iter()
                .map(move |root| (lens.clone(), root))
        }) {
            let blocks = Blocks::of(lens.clone());
            let len = |rank: u32| lens[rank as usize];
            let whole: Vec<u8> = (0..count).flat_map(|rank| data(rank, len(rank))).collect();
            let of_root = |rank, bytes: &[u8]| match rank == root {
                true => bytes.to_vec(),
                false => Vec::new(),
            };
            for algorithm in [Algorithm::Linear, Algorithm::Binomial, Algorithm::Knomial] {
                let gathers: Vec<Schedule> = all(count)
                    .map(|ranks| match algorithm {
                        Algorithm::Linear => of::gather_linear(ranks, root, &blocks),
                        tree => of::gather_tree(tree, ranks, root, &blocks),
                    })
                    .collect();
                let nothing = vec![0; whole.len()];
                let memories: Vec<Memory> = (0..count)
                    .map(|rank| memory(data(rank, len(rank)), of_root(rank, &nothing)))
                    .collect();
                let name = format!("gather, {algorithm}, root {root}");
                check(&name, &gathers, &memories, |rank, _| {
                    Some(of_root(rank, &whole))
                });
                let scatters: Vec<Schedule> = all(count)
                    .map(|ranks| match algorithm {
                        Algorithm::Linear => of::scatter_linear(ranks, root, &blocks),
                        tree => of::scatter_tree(tree, ranks, root, &blocks),
                    })
                    .collect();
                let memories: Vec<Memory> = (0..count)
                    .map(|rank| memory(of_root(rank, &whole), vec![0; len(rank) as usize]))
                    .collect();
                let name = format!("scatter, {algorithm}, root {root}");
                check(&name, &scatters, &memories, |rank, _| {
                    Some(data(rank, len(rank)))
                });
                // A subtree behind whose last rank is rank 0 is two messages at the root, so there may be one more.
                let is_tree = algorithm != Algorithm::Linear;
                let expected = |messages: u64| {
                    let more = messages.checked_sub(u64::from(count) - 1);
                    more == Some(0) || (is_tree && root > 0 && more == Some(1))
                };
                for schedules in [&gathers, &scatters] {
                    let messages: u64 = schedules.iter().map(Schedule::messages).sum();
                    assert!(expected(messages), "{algorithm}: {messages}");
                }
                // In each level of a full tree all subtrees but one of each parent are sent.
                let radix: u64 = match algorithm {
                    Algorithm::Binomial => 2,
                    Algorithm::Knomial => 4,
                    _ => continue,
                };
                let n = u64::from(count);
                let levels = n.ilog(radix);
                if radix.pow(levels) == n && lens.iter().all(|len| *len == lens[0]) {
                    let all_bytes = n / radix * (radix - 1) * u64::from(levels) * lens[0];
                    for schedules in [&gathers, &scatters] {
                        let sent: u64 = schedules.iter().map(Schedule::bytes).sum();
                        assert_eq!(sent, all_bytes, "{algorithm}, {count}");
                    }
                }
            }
        }
    }
}

#[test]
fn all_gathers_give_every_rank_every_block() {
    for count in COUNTS {
        for lens in lengths(count) {
            let blocks = Blocks::of(lens.clone());
            let whole: Vec<u8> = (0..count)
                .flat_map(|rank| data(rank, lens[rank as usize]))
                .collect();
            let memories: Vec<Memory> = (0..count)
                .map(|rank| {
                    let span = blocks.span(Operand::Output, rank);
                    let mut output = vec![0; whole.len()];
                    let (from, to) = (span.offset as usize, (span.offset + span.len) as usize);
                    output[from..to].copy_from_slice(&whole[from..to]);
                    in_place(output)
                })
                .collect();
            let bytes = blocks.bytes();
            let expected = |_, _: &[u8]| Some(whole.clone());
            let ring: Vec<Schedule> = all(count)
                .map(|ranks| of::all_gather_ring(ranks, &blocks))
                .collect();
            for (rank, schedule) in (0..count).zip(&ring) {
                assert_eq!(schedule.messages(), u64::from(count) - 1);
                // All blocks but that of the next rank.
                let next = blocks.span(Operand::Output, (rank + 1) % count).len;
                assert_eq!(schedule.bytes(), bytes - next);
            }
            check("ring", &ring, &memories, expected);
            let bruck: Vec<Schedule> = all(count)
                .map(|ranks| of::all_gather_bruck(ranks, &blocks))
                .collect();
            assert!(bruck.iter().all(|it| it.messages() == log2_up(count)));
            check("bruck", &bruck, &memories, expected);
            if count.is_power_of_two() {
                let doubling: Vec<Schedule> = all(count)
                    .map(|ranks| of::all_gather_recursive_doubling(ranks, &blocks))
                    .collect();
                assert!(doubling.iter().all(|it| it.messages() == log2_up(count)));
                check("recursive doubling", &doubling, &memories, expected);
            }
        }
    }
}

#[test]
fn all_to_alls_bring_each_block_to_its_rank() {
    let block_of = |from: u32, to: u32, len: u64| data(from * 16 + to, len);
    for count in COUNTS {
        for uneven in [false, true] {
            // Some have nothing for some.
            let len = |from: u32, to: u32| match uneven {
                true => u64::from((from * 3 + to * 5) % 4) * 9,
                false => 12,
            };
            let memories: Vec<Memory> = (0..count)
                .map(|rank| {
                    let input = (0..count)
                        .flat_map(|to| block_of(rank, to, len(rank, to)))
                        .collect();
                    let into: u64 = (0..count).map(|from| len(from, rank)).sum();
                    memory(input, vec![0; into as usize])
                })
                .collect();
            let expected = |rank, _: &[u8]| {
                Some(
                    (0..count)
                        .flat_map(|from| block_of(from, rank, len(from, rank)))
                        .collect(),
                )
            };
            let pairwise: Vec<Schedule> = all(count)
                .map(|ranks| {
                    let input = Blocks::of((0..count).map(|to| len(ranks.rank, to)));
                    let output = Blocks::of((0..count).map(|from| len(from, ranks.rank)));
                    of::all_to_all_pairwise(ranks, &input, &output)
                })
                .collect();
            assert!(
                pairwise
                    .iter()
                    .all(|it| it.messages() == u64::from(count) - 1)
            );
            check("pairwise", &pairwise, &memories, expected);
            if !uneven {
                let bruck: Vec<Schedule> = all(count)
                    .map(|ranks| of::all_to_all_bruck(ranks, 12))
                    .collect();
                assert!(bruck.iter().all(|it| it.messages() == log2_up(count)));
                check("bruck", &bruck, &memories, expected);
            }
        }
    }
}

/// The input of a rank: elements of 4 bytes.
fn numbers(rank: u32, elements: u64) -> Vec<i32> {
    (0..elements)
        .map(|at| (rank as i32 + 1) * 1_000_003 + at as i32 * 7919)
        .collect()
}

fn bytes(numbers: &[i32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect()
}

fn sums(count: u32, elements: u64) -> Vec<i32> {
    let add = |mut sums: Vec<i32>, rank| {
        for (sum, number) in sums.iter_mut().zip(numbers(rank, elements)) {
            *sum = sum.wrapping_add(number);
        }
        sums
    };
    (0..count).fold(vec![0; elements as usize], add)
}

#[test]
fn all_reduces_have_the_sum_everywhere() {
    for count in COUNTS {
        for elements in [0, 1, 5, 16, 100] {
            let len = elements * 4;
            let expected = bytes(&sums(count, elements));
            let apart: Vec<Memory> = (0..count)
                .map(|rank| memory(bytes(&numbers(rank, elements)), vec![0; len as usize]))
                .collect();
            let same: Vec<Memory> = (0..count)
                .map(|rank| in_place(bytes(&numbers(rank, elements))))
                .collect();
            let blocks = Blocks::even(len, 4, count);
            let own = |ranks: Ranks| blocks.span(Operand::Output, ranks.rank);
            let then = |mut first: Schedule, second: Schedule| {
                first.append(second);
                first
            };
            let ring: Vec<Schedule> = all(count)
                .map(|ranks| {
                    let scatter = of::reduce_scatter_ring(ranks, &blocks, own(ranks));
                    then(scatter, of::all_gather_ring(ranks, &blocks))
                })
                .collect();
            for schedule in &ring {
                assert_eq!(schedule.messages(), 2 * (u64::from(count) - 1));
                if elements % u64::from(count) == 0 {
                    let share = len / u64::from(count);
                    assert_eq!(schedule.bytes(), 2 * (u64::from(count) - 1) * share);
                }
            }
            let doubling: Vec<Schedule> = all(count)
                .map(|ranks| of::all_reduce_recursive_doubling(ranks, len))
                .collect();
            if count.is_power_of_two() {
                let rounds = log2_up(count);
                assert!(
                    doubling
                        .iter()
                        .all(|it| it.messages() == rounds && it.bytes() == rounds * len)
                );
            }
            let server: Vec<Schedule> = all(count)
                .map(|ranks| of::all_reduce_parameter_server(ranks, len, false))
                .collect();
            let messages: u64 = server.iter().map(Schedule::messages).sum();
            assert_eq!(messages, 2 * (u64::from(count) - 1));
            let mut algorithms = vec![("ring", ring), ("doubling", doubling), ("server", server)];
            let halving: Vec<Schedule> = all(count)
                .map(|ranks| of::all_reduce_recursive_halving(ranks, len, 4, false))
                .collect();
            let left = 1 << count.ilog2();
            let pairs = u64::from(count - left);
            let messages: u64 = halving.iter().map(Schedule::messages).sum();
            let of_halves = 2 * log2_up(left) * u64::from(left);
            assert_eq!(messages, 2 * pairs + of_halves);
            if elements % u64::from(left) == 0 {
                let sent: u64 = halving.iter().map(Schedule::bytes).sum();
                assert_eq!(sent, 2 * len * (pairs + u64::from(left) - 1));
            }
            algorithms.push(("halving", halving));
            for (name, schedules) in algorithms {
                check(name, &schedules, &apart, |_, _| Some(expected.clone()));
                check(name, &schedules, &same, |_, _| Some(expected.clone()));
            }
        }
    }
}

#[test]
fn averages_are_divided_once_by_a_parameter_server() {
    for count in COUNTS {
        let schedules: Vec<Schedule> = all(count)
            .map(|ranks| of::all_reduce_parameter_server(ranks, 20, true))
            .collect();
        let memories: Vec<Memory> = (0..count)
            .map(|rank| memory(bytes(&numbers(rank, 5)), vec![0; 20]))
            .collect();
        let averages: Vec<i32> = sums(count, 5)
            .into_iter()
            .map(|sum| sum / count as i32)
            .collect();
        check("average", &schedules, &memories, |_, _| {
            Some(bytes(&averages))
        });
    }
}

#[test]
fn reductions_are_at_the_root_or_in_blocks() {
    for count in COUNTS {
        for elements in [0, 1, 7, 40] {
            let len = elements * 4;
            let expected = bytes(&sums(count, elements));
            for root in [0, count / 2, count - 1] {
                let memories: Vec<Memory> = (0..count)
                    .map(|rank| {
                        let output = if rank == root {
                            vec![0; len as usize]
                        } else {
                            Vec::new()
                        };
                        memory(bytes(&numbers(rank, elements)), output)
                    })
                    .collect();
                for algorithm in [Algorithm::Binomial, Algorithm::Knomial] {
                    let tree: Vec<Schedule> = all(count)
                        .map(|ranks| of::reduce_tree(algorithm, ranks, root, len))
                        .collect();
                    let messages: u64 = tree.iter().map(Schedule::messages).sum();
                    assert_eq!(messages, u64::from(count) - 1);
                    assert!(tree.iter().all(|it| it.messages() <= 1));
                    check(algorithm.name(), &tree, &memories, |rank, _| {
                        Some(if rank == root {
                            expected.clone()
                        } else {
                            Vec::new()
                        })
                    });
                }
            }
            // Also blocks of which some are empty.
            let uneven = (0..count)
                .map(|rank| u64::from(rank % 3) * 4)
                .collect::<Vec<_>>();
            let total: u64 = uneven.iter().sum();
            for (blocks, elements) in [
                (Blocks::even(len, 4, count), elements),
                (Blocks::of(uneven), total / 4),
            ] {
                let expected = bytes(&sums(count, elements));
                let memories: Vec<Memory> = (0..count)
                    .map(|rank| {
                        let own = blocks.span(Operand::Output, rank).len;
                        memory(bytes(&numbers(rank, elements)), vec![0; own as usize])
                    })
                    .collect();
                let result = |rank| {
                    OperandSpan::new(Operand::Output, 0, blocks.span(Operand::Output, rank).len)
                };
                let own = |rank, _: &[u8]| {
                    let span = blocks.span(Operand::Output, rank);
                    Some(expected[span.offset as usize..(span.offset + span.len) as usize].to_vec())
                };
                let ring: Vec<Schedule> = all(count)
                    .map(|ranks| of::reduce_scatter_ring(ranks, &blocks, result(ranks.rank)))
                    .collect();
                check("ring", &ring, &memories, own);
                if count.is_power_of_two() {
                    let halving: Vec<Schedule> = all(count)
                        .map(|ranks| {
                            of::reduce_scatter_recursive_halving(ranks, &blocks, result(ranks.rank))
                        })
                        .collect();
                    check("halving", &halving, &memories, own);
                }
            }
        }
    }
}

/// The k-th message to or from a peer is in round k, on both sides.
#[test]
fn exchanges_have_the_messages_of_two_ranks_in_the_same_rounds() {
    let span = |at| OperandSpan::new(Operand::Listed(at), 0, 8);
    let from = |first: u32, peers: &[u32]| -> Vec<Transfer> {
        let numbered = peers.iter().zip(first..);
        let transfer = |(peer, at): (&u32, u32)| Transfer {
            peer: *peer,
            span: span(at),
        };
        numbered.map(transfer).collect()
    };
    let ranks = Ranks { rank: 1, count: 3 };
    let schedule = of::exchange(ranks, &from(0, &[0, 1, 0, 2, 0]), &from(5, &[2, 1, 0]));
    let peers = |transfers: &[Transfer]| -> Vec<(u32, OperandSpan)> {
        transfers.iter().map(|it| (it.peer, it.span)).collect()
    };
    let rounds = &schedule.rounds;
    assert_eq!(rounds.len(), 3);
    assert_eq!(peers(&rounds[0].sends), [(0, span(0)), (2, span(3))]);
    assert_eq!(peers(&rounds[0].receives), [(2, span(5)), (0, span(7))]);
    assert_eq!(peers(&rounds[1].sends), [(0, span(2))]);
    assert_eq!(peers(&rounds[2].sends), [(0, span(4))]);
    let copy = MemoryStep::Copy {
        from: span(1),
        into: span(6),
    };
    assert_eq!(rounds[2].then, [copy]);
    let alone = Ranks { rank: 0, count: 1 };
    let alone = of::exchange(alone, &from(0, &[0]), &from(1, &[0]));
    assert_eq!((alone.messages(), alone.rounds.len()), (0, 1));
}
