//! The algorithms: schedules of a rank for each collective operation. Each is the textbook's; R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
//! collective communication operations in MPICH" (2005), describes them all but the parameter server.

use std::fmt;
use std::str::FromStr;

use super::schedule::{Blocks, MemoryStep, Operand, OperandSpan, Round, Schedule, Transfer};
use crate::{Error, Result};

/// How a collective operation is carried out. n is the number of ranks, S the bytes of the whole result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// In each round every rank sends a block to the next rank. For long data: n - 1 rounds of S / n bytes, and twice as many for an all-reduce.
    Ring,
    /// In each round ranks at twice the distance exchange all that they have: log n rounds. An all-gather needs a number of ranks that is a power of two.
    RecursiveDoubling,
    /// In each round ranks at half the distance exchange half of what they have left; with recursive doubling behind it, Rabenseifner's all-reduce. For
    /// a number of ranks that is a power of two.
    RecursiveHalving,
    /// In each round a rank sends all that it has to the rank at twice the distance, in log n rounds for any number of ranks, with copies at the end.
    Bruck,
    /// In round k each rank sends to the rank k behind it: n - 1 rounds.
    Pairwise,
    /// A tree whose depth is log n.
    Binomial,
    /// A tree whose depth is the logarithm of n to the base 4: a rank exchanges with up to three others at once.
    Knomial,
    /// The root scatters blocks down a tree, which then travel around a ring. For long data.
    ScatterGather,
    /// The root exchanges one message with each other rank.
    Linear,
    /// Rank 0 receives from all, reduces, and sends the result to all.
    ParameterServer,
    /// In round k each rank tells the rank 2^k behind it: log n rounds.
    Dissemination,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 11] = [
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::RecursiveHalving,
        Algorithm::Bruck,
        Algorithm::Pairwise,
        Algorithm::Binomial,
        Algorithm::ScatterGather,
        Algorithm::Linear,
        Algorithm::ParameterServer,
        Algorithm::Dissemination,
        Algorithm::Knomial,
    ];

    /// The name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::RecursiveHalving => "recursive-halving",
            Algorithm::Bruck => "bruck",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Binomial => "binomial",
            Algorithm::Knomial => "knomial",
            Algorithm::ScatterGather => "scatter-gather",
            Algorithm::Linear => "linear",
            Algorithm::ParameterServer => "parameter-server",
            Algorithm::Dissemination => "dissemination",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Algorithm> {
        let named = |algorithm: &Algorithm| algorithm.name() == text;
        Algorithm::ALL
            .into_iter()
            .find(named)
            .ok_or_else(|| Error::Malformed {
                what: "the name of an algorithm",
                reason: format!("`{text}` is none"),
            })
    }
}

/// A rank, and how many there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranks {
    pub(super) rank: u32,
    pub(super) count: u32,
}

impl Ranks {
    fn after(self, distance: u32) -> u32 {
        (self.rank + distance % self.count) % self.count
    }

    fn before(self, distance: u32) -> u32 {
        (self.rank + self.count - distance % self.count) % self.count
    }

    /// The rank as the root counts: the root is 0.
    fn relative_to(self, root: u32) -> Ranks {
        Ranks {
            rank: self.before(root),
            count: self.count,
        }
    }

    pub(super) fn is_power_of_two(self) -> bool {
        self.count.is_power_of_two()
    }
}

/// 1, 2, 4 and so on, below `end`.
fn doublings(end: u32) -> impl Iterator<Item = u32> {
    (0..32)
        .map(|shift| 1 << shift)
        .take_while(move |distance| *distance < end)
}

const NOTHING: OperandSpan = OperandSpan {
    place: Operand::Scratch,
    offset: 0,
    len: 0,
};

pub(super) fn barrier(ranks: Ranks) -> Schedule {
    let mut schedule = Schedule::default();
    for distance in doublings(ranks.count) {
        let (to, from) = (ranks.after(distance), ranks.before(distance));
        schedule.push(Round::default().send(to, NOTHING).receive(from, NOTHING));
    }
    schedule
}

/// The way of data from relative rank 0 down a binomial tree: what a rank receives, as the span `of` gives for the ranks from it up to another one, and what it then
/// sends.
fn down_a_tree(ranks: Ranks, of: impl Fn(u32, u32) -> OperandSpan) -> Schedule {
    let Ranks { rank, count } = ranks;
    let mut schedule = Schedule::default();
    // The lowest bit of the rank is the distance of its parent.
    let reach = if rank == 0 {
        count.next_power_of_two()
    } else {
        1 << rank.trailing_zeros()
    };
    if rank > 0 {
        let span = of(rank, count.min(rank + reach));
        schedule.push(Round::default().receive(rank - reach, span));
    }
    let mut sends = Round::default();
    let mut distance = reach / 2;
    while distance > 0 {
        let child = rank + distance;
        if child < count {
            sends = sends.send(child, of(child, count.min(child + distance)));
        }
        distance /= 2;
    }
    schedule.push(sends);
    schedule
}

/// All of `Output` of the root.
pub(super) fn broadcast_binomial(ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let whole = OperandSpan::new(Operand::Output, 0, bytes);
    down_a_tree(ranks.relative_to(root), |_, _| whole)
        .with_peers(|peer| (peer + root) % ranks.count)
}

/// How many subtrees of equal size a tree of [`Algorithm::Knomial`] is divided into, again and again.
const RADIX: u32 = 4;

/// The distance of a relative rank from its siblings in a tree of that radix, the largest power of the radix that divides it; of the root, the least that is no less than the number of ranks.
fn knomial_distance(ranks: Ranks) -> u64 {
    let Ranks { rank, count } = ranks;
    let radix = u64::from(RADIX);
    let mut distance = 1;
    while match rank {
        0 => distance < u64::from(count),
        rank => u64::from(rank).is_multiple_of(distance * radix),
    } {
        distance *= radix;
    }
    distance
}

/// The parent of a relative rank other than 0.
fn knomial_parent(ranks: Ranks) -> u32 {
    let siblings = knomial_distance(ranks) * u64::from(RADIX);
    ranks.rank - (u64::from(ranks.rank) % siblings) as u32
}

/// The children of a relative rank, the largest subtrees first, by the distance of their level.
fn knomial_children(ranks: Ranks) -> Vec<Vec<u32>> {
    let mut levels = Vec::new();
    let mut distance = knomial_distance(ranks) / u64::from(RADIX);
    while distance > 0 {
        let children = (1..u64::from(RADIX)).map(|at| u64::from(ranks.rank) + at * distance);
        let inside = children.filter(|child| *child < u64::from(ranks.count));
        levels.push(inside.map(|child| child as u32).collect());
        distance /= u64::from(RADIX);
    }
    levels
}

/// As [`broadcast_binomial`].
pub(super) fn broadcast_knomial(ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let relative = ranks.relative_to(root);
    let whole = OperandSpan::new(Operand::Output, 0, bytes);
    let mut schedule = Schedule::default();
    if relative.rank > 0 {
        schedule.push(Round::default().receive(knomial_parent(relative), whole));
    }
    let children = knomial_children(relative).into_iter().flatten();
    schedule.push(children.fold(Round::default(), |round, child| round.send(child, whole)));
    schedule.with_peers(|peer| (peer + root) % ranks.count)
}

pub(super) fn broadcast_scatter_gather(ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let blocks = Blocks::even(bytes, 1, ranks.count);
    let relative = ranks.relative_to(root);
    let mut schedule = down_a_tree(relative, |from, to| blocks.spans(Operand::Output, from, to));
    schedule.append(all_gather_ring(relative, &blocks));
    schedule.with_peers(|peer| (peer + root) % ranks.count)
}

/// The root receives the input of each rank into its block of the output.
pub(super) fn gather_linear(ranks: Ranks, root: u32, blocks: &Blocks) -> Schedule {
    let mut schedule = Schedule::default();
    let own = OperandSpan::new(
        Operand::Input,
        0,
        blocks.span(Operand::Input, ranks.rank).len,
    );
    if ranks.rank != root {
        schedule.push(Round::default().send(root, own));
        return schedule;
    }
    let mut round = Round::default();
    for distance in 1..ranks.count {
        let peer = ranks.after(distance);
        round = round.receive(peer, blocks.span(Operand::Output, peer));
    }
    schedule.push(round);
    schedule.copy(own, blocks.span(Operand::Output, root));
    schedule
}

/// Each rank receives its block of the root's input.
pub(super) fn scatter_linear(ranks: Ranks, root: u32, blocks: &Blocks) -> Schedule {
    let mut schedule = Schedule::default();
    let own = OperandSpan::new(
        Operand::Output,
        0,
        blocks.span(Operand::Output, ranks.rank).len,
    );
    if ranks.rank != root {
        schedule.push(Round::default().receive(root, own));
        return schedule;
    }
    let mut round = Round::default();
    for distance in 1..ranks.count {
        let peer = ranks.after(distance);
        round = round.send(peer, blocks.span(Operand::Input, peer));
    }
    schedule.push(round);
    schedule.copy(blocks.span(Operand::Input, root), own);
    schedule
}

/// Of the blocks of `Output`, of which each rank has its own.
pub(super) fn all_gather_ring(ranks: Ranks, blocks: &Blocks) -> Schedule {
    let mut schedule = Schedule::default();
    for round in 0..ranks.count - 1 {
        let [leaves, comes] =
            [round, round + 1].map(|at| blocks.span(Operand::Output, ranks.before(at)));
        schedule.push(
            Round::default()
                .send(ranks.after(1), leaves)
                .receive(ranks.before(1), comes),
        );
    }
    schedule
}

pub(super) fn all_gather_recursive_doubling(ranks: Ranks, blocks: &Blocks) -> Schedule {
    let mut schedule = Schedule::default();
    for distance in doublings(ranks.count) {
        let peer = ranks.rank ^ distance;
        // The ranks that have exchanged with a rank so far are those that differ from it in lower bits only.
        let [own, other] = [ranks.rank, peer].map(|rank| {
            let first = rank & !(distance - 1);
            blocks.spans(Operand::Output, first, first + distance)
        });
        schedule.push(Round::default().send(peer, own).receive(peer, other));
    }
    schedule
}

pub(super) fn all_gather_bruck(ranks: Ranks, blocks: &Blocks) -> Schedule {
    let Ranks { rank, count } = ranks;
    let mut schedule = Schedule::default();
    // The blocks as they come: this rank's first.
    let rotated = blocks.rotated(rank);
    schedule.scratch(rotated.bytes());
    let of = |from, to| rotated.spans(Operand::Scratch, from, to);
    schedule.copy(blocks.span(Operand::Output, rank), of(0, 1));
    for distance in doublings(count) {
        let some = distance.min(count - distance);
        let (to, from) = (ranks.before(distance), ranks.after(distance));
        let round = Round::default().send(to, of(0, some));
        schedule.push(round.receive(from, of(distance, distance + some)));
    }
    let behind = count - rank;
    schedule.copy(
        of(1, behind),
        blocks.spans(Operand::Output, rank + 1, count),
    );
    schedule.copy(of(behind, count), blocks.spans(Operand::Output, 0, rank));
    schedule
}

/// From the blocks of `Input`, one for each rank, into those of `Output`.
pub(super) fn all_to_all_pairwise(ranks: Ranks, input: &Blocks, output: &Blocks) -> Schedule {
    let mut schedule = Schedule::default();
    let own = [
        input.span(Operand::Input, ranks.rank),
        output.span(Operand::Output, ranks.rank),
    ];
    schedule.copy(own[0], own[1]);
    for distance in 1..ranks.count {
        let (to, from) = (ranks.after(distance), ranks.before(distance));
        let round = Round::default().send(to, input.span(Operand::Input, to));
        schedule.push(round.receive(from, output.span(Operand::Output, from)));
    }
    schedule
}

/// Blocks of equal lengths.
pub(super) fn all_to_all_bruck(ranks: Ranks, block: u64) -> Schedule {
    let Ranks { rank, count } = ranks;
    let blocks = Blocks::of((0..count).map(|_| block));
    let mut schedule = Schedule::default();
    let work = schedule.scratch(blocks.bytes());
    let [leaves, comes] = [(); 2].map(|()| schedule.scratch(blocks.bytes()));
    let part = |of: OperandSpan, at: u64, many: u64| {
        OperandSpan::new(of.place, of.offset + at * block, many * block)
    };
    // Block k of the work is that for the rank k behind this one.
    let behind = u64::from(count - rank);
    schedule.copy(
        blocks.spans(Operand::Input, rank, count),
        part(work, 0, behind),
    );
    schedule.copy(
        blocks.spans(Operand::Input, 0, rank),
        part(work, behind, rank.into()),
    );
    for distance in doublings(count) {
        let moved = || (0..count).filter(|at| at & distance != 0).map(u64::from);
        let many = moved().count() as u64;
        for (to, from) in (0..).zip(moved()) {
            schedule.copy(part(work, from, 1), part(leaves, to, 1));
        }
        let round = Round::default().send(ranks.after(distance), part(leaves, 0, many));
        schedule.push(round.receive(ranks.before(distance), part(comes, 0, many)));
        for (from, to) in (0..).zip(moved()) {
            schedule.copy(part(comes, from, 1), part(work, to, 1));
        }
    }
    for at in 0..count {
        let from = blocks.span(Operand::Output, ranks.before(at));
        schedule.copy(part(work, at.into(), 1), from);
    }
    schedule
}

/// Block `rank` of the reduction of all inputs goes into `result`.
pub(super) fn reduce_scatter_ring(ranks: Ranks, blocks: &Blocks, result: OperandSpan) -> Schedule {
    let Ranks { rank, count } = ranks;
    let mut schedule = Schedule::default();
    if count == 1 {
        schedule.copy(blocks.span(Operand::Input, rank), result);
        return schedule;
    }
    let arrivals = [(); 2].map(|()| schedule.scratch(blocks.longest()));
    // The block that arrived last, with the inputs of all ranks that it has passed.
    let mut last = None;
    for round in 0..count - 1 {
        let leaves = blocks.span(Operand::Input, ranks.before(round + 1));
        let input = blocks.span(Operand::Input, ranks.before(round + 2));
        let comes = OperandSpan {
            len: input.len,
            ..arrivals[round as usize % 2]
        };
        let is_last = round == count - 2;
        schedule.push(
            Round::default()
                .send(ranks.after(1), last.unwrap_or(leaves))
                .receive(ranks.before(1), comes)
                .then(MemoryStep::Reduce {
                    first: comes,
                    second: input,
                    into: if is_last { result } else { comes },
                }),
        );
        last = Some(comes);
    }
    schedule
}

/// As [`reduce_scatter_ring`].
pub(super) fn reduce_scatter_recursive_halving(
    ranks: Ranks,
    blocks: &Blocks,
    result: OperandSpan,
) -> Schedule {
    let Ranks { rank, count } = ranks;
    let mut schedule = Schedule::default();
    if count == 1 {
        schedule.copy(blocks.span(Operand::Input, rank), result);
        return schedule;
    }
    let [work, arrivals] = [(); 2].map(|()| schedule.scratch(blocks.bytes()));
    let at = |of: OperandSpan, from, to| {
        let span = blocks.spans(of.place, from, to);
        OperandSpan::new(of.place, of.offset + span.offset, span.len)
    };
    let input = OperandSpan::new(Operand::Input, 0, blocks.bytes());
    // The ranks whose blocks are left.
    let (mut from, mut to) = (0, count);
    let mut has = input;
    let mut distance = count / 2;
    while distance > 0 {
        let (peer, middle) = (rank ^ distance, from + distance);
        let (keeps, leaves) = match rank < middle {
            true => ((from, middle), (middle, to)),
            false => ((middle, to), (from, middle)),
        };
        let comes = at(arrivals, keeps.0, keeps.1);
        let mine = at(has, keeps.0, keeps.1);
        // In the order of the ranks, so that the result does not depend on who computes it.
        let (first, second) = if rank < peer {
            (mine, comes)
        } else {
            (comes, mine)
        };
        schedule.push(
            Round::default()
                .send(peer, at(has, leaves.0, leaves.1))
                .receive(peer, comes)
                .then(MemoryStep::Reduce {
                    first,
                    second,
                    into: match distance {
                        1 => result,
                        _ => at(work, keeps.0, keeps.1),
                    },
                }),
        );
        (from, to) = keeps;
        has = work;
        distance /= 2;
    }
    schedule
}

/// From `Input` into `Output`, which may be the same memory.
pub(super) fn all_reduce_recursive_doubling(ranks: Ranks, bytes: u64) -> Schedule {
    let Ranks { rank, count } = ranks;
    let mut schedule = Schedule::default();
    let comes = schedule.scratch(bytes);
    let output = OperandSpan::new(Operand::Output, 0, bytes);
    schedule.copy(OperandSpan::new(Operand::Input, 0, bytes), output);
    // Of so many pairs at the beginning the second reduces for both.
    let pairs = count - (1 << count.ilog2());
    let reduce = |own_is_first: bool| {
        let (first, second) = if own_is_first {
            (output, comes)
        } else {
            (comes, output)
        };
        MemoryStep::Reduce {
            first,
            second,
            into: output,
        }
    };
    if rank < 2 * pairs && rank % 2 == 0 {
        schedule.push(Round::default().send(rank + 1, output));
        schedule.push(Round::default().receive(rank + 1, output));
        return schedule;
    }
    let is_second = rank < 2 * pairs;
    if is_second {
        let round = Round::default().receive(rank - 1, comes);
        schedule.push(round.then(reduce(false)));
    }
    let number = if is_second { rank / 2 } else { rank - pairs };
    for distance in doublings(count - pairs) {
        let other = number ^ distance;
        let peer = if other < pairs {
            2 * other + 1
        } else {
            other + pairs
        };
        let round = Round::default().send(peer, output).receive(peer, comes);
        schedule.push(round.then(reduce(number < other)));
    }
    if is_second {
        schedule.push(Round::default().send(rank - 1, output));
    }
    schedule
}

pub(super) fn all_reduce_parameter_server(ranks: Ranks, bytes: u64, divides: bool) -> Schedule {
    let Ranks { rank, count } = ranks;
    let mut schedule = Schedule::default();
    let [input, output] =
        [Operand::Input, Operand::Output].map(|place| OperandSpan::new(place, 0, bytes));
    if rank > 0 {
        schedule.push(Round::default().send(0, input));
        schedule.push(Round::default().receive(0, output));
        return schedule;
    }
    schedule.copy(input, output);
    let (mut gathers, mut sends) = (Round::default(), Round::default());
    for peer in 1..count {
        let comes = schedule.scratch(bytes);
        gathers = gathers.receive(peer, comes).then(MemoryStep::Reduce {
            first: output,
            second: comes,
            into: output,
        });
        sends = sends.send(peer, output);
    }
    schedule.push(gathers);
    if divides {
        schedule.then(MemoryStep::Divide { span: output });
    }
    schedule.push(sends);
    schedule
}

/// The reduction of all inputs goes into `Output` of the root.
pub(super) fn reduce_binomial(ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let relative = ranks.relative_to(root);
    let mut schedule = Schedule::default();
    let comes = schedule.scratch(bytes);
    let result = match relative.rank {
        0 => OperandSpan::new(Operand::Output, 0, bytes),
        _ => schedule.scratch(bytes),
    };
    let mut has = OperandSpan::new(Operand::Input, 0, bytes);
    for distance in doublings(relative.count) {
        if relative.rank & distance != 0 {
            schedule.push(Round::default().send(relative.rank - distance, has));
            break;
        }
        let child = relative.rank + distance;
        if child < relative.count {
            let round = Round::default().receive(child, comes);
            schedule.push(round.then(MemoryStep::Reduce {
                first: has,
                second: comes,
                into: result,
            }));
            has = result;
        }
    }
    if relative.rank == 0 {
        schedule.copy(has, result);
    }
    schedule.with_peers(|peer| (peer + root) % ranks.count)
}

/// As [`reduce_binomial`].
pub(super) fn reduce_knomial(ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let relative = ranks.relative_to(root);
    let mut schedule = Schedule::default();
    let levels = knomial_children(relative);
    let most = levels.iter().map(Vec::len).max().unwrap_or(0);
    let comes: Vec<OperandSpan> = (0..most).map(|_| schedule.scratch(bytes)).collect();
    let result = match (relative.rank, most) {
        (0, _) => OperandSpan::new(Operand::Output, 0, bytes),
        // A leaf reduces nothing.
        (_, 0) => NOTHING,
        _ => schedule.scratch(bytes),
    };
    let mut has = OperandSpan::new(Operand::Input, 0, bytes);
    // The smallest subtrees are done first.
    for level in levels.into_iter().rev() {
        let mut round = Round::default();
        for (child, comes) in level.into_iter().zip(comes.iter().copied()) {
            round = round.receive(child, comes).then(MemoryStep::Reduce {
                first: has,
                second: comes,
                into: result,
            });
            has = result;
        }
        schedule.push(round);
    }
    match relative.rank {
        0 => schedule.copy(has, result),
        _ => schedule.push(Round::default().send(knomial_parent(relative), has)),
    }
    schedule.with_peers(|peer| (peer + root) % ranks.count)
}

/// Messages to and from any ranks. The ones between two ranks are received in the order in which they are sent; round k has the k-th of each peer on both sides, so that no rank waits
/// for a message of a later round. Those to this rank itself are copied, and are as long as the ones that it receives from itself.
pub(super) fn exchange(ranks: Ranks, sends: &[Transfer], receives: &[Transfer]) -> Schedule {
    let mut rounds: Vec<Round> = Vec::new();
    let mut place = |list: &[Transfer], add: fn(Round, u32, OperandSpan) -> Round| {
        let mut before = vec![0; ranks.count as usize];
        for Transfer { peer, span } in list.iter().filter(|it| it.peer != ranks.rank) {
            let number: &mut usize = &mut before[*peer as usize];
            if rounds.len() == *number {
                rounds.push(Round::default());
            }
            rounds[*number] = add(std::mem::take(&mut rounds[*number]), *peer, *span);
            *number += 1;
        }
    };
    place(sends, Round::send);
    place(receives, Round::receive);
    let mut schedule = Schedule {
        rounds,
        scratch_bytes: 0,
    };
    let own = |list: &[Transfer]| -> Vec<OperandSpan> {
        let own = list.iter().filter(|it| it.peer == ranks.rank);
        own.map(|it| it.span).collect()
    };
    for (from, into) in own(sends).into_iter().zip(own(receives)) {
        schedule.copy(from, into);
    }
    schedule
}
