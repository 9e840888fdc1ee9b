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
    /// In each round ranks at half the distance exchange half of what they have left; with recursive doubling behind it, Rabenseifner's all-reduce (SRA:
    /// scatter-reduce, then all-gather). A reduce-scatter needs a number of ranks that is a power of two.
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

/// A tree of all ranks with the relative rank 0 at the top, seen from one of them: it is divided into subtrees of equal size, again and again.
struct RankTree {
    /// The relative rank and its subtree: the ranks from it up to `end`.
    rank: u32,
    end: u32,
    parent: Option<u32>,
    /// By level, the largest subtrees first: children, each with the end of its subtree.
    levels: Vec<Vec<(u32, u32)>>,
}

impl RankTree {
    /// Of subtrees that `radix` others make one: 2 for [`Algorithm::Binomial`], 4 for [`Algorithm::Knomial`].
    fn new(relative: Ranks, algorithm: Algorithm) -> RankTree {
        let radix: u64 = match algorithm {
            Algorithm::Knomial => 4,
            _ => 2,
        };
        let (rank, count) = (u64::from(relative.rank), u64::from(relative.count));
        // The distance from the siblings: the largest power of the radix that divides the rank. At the top the least that is no less than the number of ranks.
        let mut distance = 1;
        while match rank {
            0 => distance < count,
            rank => rank.is_multiple_of(distance * radix),
        } {
            distance *= radix;
        }
        let end = |from: u64, distance: u64| count.min(from + distance) as u32;
        let mut levels = Vec::new();
        let mut below = distance / radix;
        while below > 0 {
            let children = (1..radix).map(|at| rank + at * below);
            let inside = children.filter(|child| *child < count);
            levels.push(inside.map(|it| (it as u32, end(it, below))).collect());
            below /= radix;
        }
        RankTree {
            rank: relative.rank,
            end: end(rank, distance),
            parent: (rank > 0).then(|| (rank - rank % (distance * radix)) as u32),
            levels,
        }
    }

    fn children(&self) -> impl Iterator<Item = (u32, u32)> {
        self.levels.iter().flatten().copied()
    }

    fn is_leaf(&self) -> bool {
        self.children().next().is_none()
    }
}

/// All of `Output` of the root.
pub(super) fn broadcast_tree(
    algorithm: Algorithm,
    ranks: Ranks,
    root: u32,
    bytes: u64,
) -> Schedule {
    let whole = OperandSpan::new(Operand::Output, 0, bytes);
    let tree = RankTree::new(ranks.relative_to(root), algorithm);
    let mut schedule = Schedule::default();
    if let Some(parent) = tree.parent {
        schedule.push(Round::default().receive(parent, whole));
    }
    let send = |round: Round, (child, _)| round.send(child, whole);
    schedule.push(tree.children().fold(Round::default(), send));
    schedule.with_peers(|peer| (peer + root) % ranks.count)
}

pub(super) fn broadcast_scatter_gather(ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let blocks = Blocks::even(bytes, 1, ranks.count);
    let relative = ranks.relative_to(root);
    let tree = RankTree::new(relative, Algorithm::Binomial);
    let of = |from, to| blocks.spans(Operand::Output, from, to);
    let mut schedule = Schedule::default();
    if let Some(parent) = tree.parent {
        schedule.push(Round::default().receive(parent, of(tree.rank, tree.end)));
    }
    let send = |round: Round, (child, end)| round.send(child, of(child, end));
    schedule.push(tree.children().fold(Round::default(), send));
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

/// The blocks of a rank's subtree, for [`gather_tree`] and [`scatter_tree`]. At the top they are in the order of the ranks, elsewhere in that of the relative ranks. A subtree that
/// goes on behind the last rank with rank 0 is two messages.
struct Subtrees {
    tree: RankTree,
    root: u32,
    count: u32,
    /// In the order of the relative ranks.
    rotated: Blocks,
    blocks: Blocks,
    /// The memory of the subtree's blocks.
    memory: OperandSpan,
}

impl Subtrees {
    /// `whole` is the memory of the root, and `own` that of a rank's own block.
    fn new(
        algorithm: Algorithm,
        ranks: Ranks,
        root: u32,
        blocks: &Blocks,
        [whole, own]: [Operand; 2],
        schedule: &mut Schedule,
    ) -> Subtrees {
        let tree = RankTree::new(ranks.relative_to(root), algorithm);
        let rotated = blocks.rotated(root);
        let bytes = rotated.spans(whole, tree.rank, tree.end).len;
        let memory = match tree.parent {
            None => OperandSpan::new(whole, 0, bytes),
            Some(_) if tree.is_leaf() => OperandSpan::new(own, 0, bytes),
            Some(_) => schedule.scratch(bytes),
        };
        Subtrees {
            tree,
            root,
            count: ranks.count,
            rotated,
            blocks: blocks.clone(),
            memory,
        }
    }

    /// The blocks from one relative rank up to another one.
    fn spans(&self, from: u32, end: u32) -> OperandSpan {
        let place = self.memory.place;
        if self.tree.parent.is_none() {
            let first = (from + self.root) % self.count;
            return self.blocks.spans(place, first, first + (end - from));
        }
        let before = self.rotated.spans(place, self.tree.rank, from).len;
        let len = self.rotated.spans(place, from, end).len;
        OperandSpan::new(place, self.memory.offset + before, len)
    }

    /// Adds a subtree's messages with a peer to the two rounds.
    fn add(
        &self,
        rounds: &mut [Round; 2],
        (peer, from, end): (u32, u32, u32),
        add: fn(Round, u32, OperandSpan) -> Round,
    ) {
        let has_top = peer == 0 || self.tree.parent.is_none();
        let cut = self.count - self.root;
        let is_cut = has_top && from < cut && cut < end;
        let first = if is_cut { cut } else { end };
        let add = |round: &mut Round, from, end| {
            *round = add(std::mem::take(round), peer, self.spans(from, end));
        };
        let [one, other] = rounds;
        add(one, from, first);
        if is_cut {
            add(other, first, end);
        }
    }

    /// The rounds of messages with the children.
    fn with_children(&self, add: fn(Round, u32, OperandSpan) -> Round) -> [Round; 2] {
        let mut rounds = [Round::default(), Round::default()];
        for (child, end) in self.tree.children() {
            self.add(&mut rounds, (child, child, end), add);
        }
        rounds
    }

    /// The rounds of messages with the parent.
    fn with_parent(&self, add: fn(Round, u32, OperandSpan) -> Round) -> [Round; 2] {
        let mut rounds = [Round::default(), Round::default()];
        if let Some(parent) = self.tree.parent {
            self.add(&mut rounds, (parent, self.tree.rank, self.tree.end), add);
        }
        rounds
    }

    /// This rank's own block among them.
    fn own(&self) -> OperandSpan {
        self.spans(self.tree.rank, self.tree.rank + 1)
    }
}

/// As [`gather_linear`]: each rank of a tree sends the blocks of its subtree to its parent.
pub(super) fn gather_tree(
    algorithm: Algorithm,
    ranks: Ranks,
    root: u32,
    blocks: &Blocks,
) -> Schedule {
    let mut schedule = Schedule::default();
    let places = [Operand::Output, Operand::Input];
    let trees = Subtrees::new(algorithm, ranks, root, blocks, places, &mut schedule);
    let own = trees.own();
    let rounds = trees.with_children(Round::receive);
    rounds.into_iter().for_each(|round| schedule.push(round));
    schedule.copy(OperandSpan::new(Operand::Input, 0, own.len), own);
    let rounds = trees.with_parent(Round::send);
    rounds.into_iter().for_each(|round| schedule.push(round));
    schedule.with_peers(|peer| (peer + root) % ranks.count)
}

/// As [`scatter_linear`]: each rank of a tree receives the blocks of its subtree from its parent.
pub(super) fn scatter_tree(
    algorithm: Algorithm,
    ranks: Ranks,
    root: u32,
    blocks: &Blocks,
) -> Schedule {
    let mut schedule = Schedule::default();
    let places = [Operand::Input, Operand::Output];
    let trees = Subtrees::new(algorithm, ranks, root, blocks, places, &mut schedule);
    let own = trees.own();
    let rounds = trees.with_parent(Round::receive);
    rounds.into_iter().for_each(|round| schedule.push(round));
    let rounds = trees.with_children(Round::send);
    rounds.into_iter().for_each(|round| schedule.push(round));
    schedule.copy(own, OperandSpan::new(Operand::Output, 0, own.len));
    schedule.with_peers(|peer| (peer + root) % ranks.count)
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

/// As [`reduce_scatter_ring`]. The number of ranks is a power of two.
pub(super) fn reduce_scatter_recursive_halving(
    ranks: Ranks,
    blocks: &Blocks,
    result: OperandSpan,
) -> Schedule {
    let mut schedule = Schedule::default();
    let input = OperandSpan::new(Operand::Input, 0, blocks.bytes());
    halve(&mut schedule, ranks, blocks, input, result);
    schedule
}

/// Adds the rounds of a reduce-scatter of the memories `has` of a number of ranks that is a power of two.
fn halve(
    schedule: &mut Schedule,
    ranks: Ranks,
    blocks: &Blocks,
    mut has: OperandSpan,
    result: OperandSpan,
) {
    let Ranks { rank, count } = ranks;
    if count == 1 {
        schedule.copy(has, result);
        return;
    }
    let [work, arrivals] = [(); 2].map(|()| schedule.scratch(blocks.bytes()));
    let at = |of: OperandSpan, from, to| {
        let span = blocks.spans(of.place, from, to);
        OperandSpan::new(of.place, of.offset + span.offset, span.len)
    };
    // The ranks whose blocks are left.
    let (mut from, mut to) = (0, count);
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
}

/// What ranks do so that a power of two of them is left: of so many pairs at the beginning the second reduces for both.
#[derive(Debug, Clone, Copy)]
struct Folded {
    pairs: u32,
    count: u32,
}

impl Folded {
    fn new(ranks: Ranks) -> Folded {
        Folded {
            pairs: ranks.count - (1 << ranks.count.ilog2()),
            count: ranks.count,
        }
    }

    /// The number of a rank among those that are left. None: another one reduces for it.
    fn number(self, rank: u32) -> Option<u32> {
        match rank {
            rank if rank >= 2 * self.pairs => Some(rank - self.pairs),
            rank if rank % 2 == 1 => Some(rank / 2),
            _ => None,
        }
    }

    fn rank(self, number: u32) -> u32 {
        match number < self.pairs {
            true => 2 * number + 1,
            false => number + self.pairs,
        }
    }

    /// The rank for which this one reduces, too.
    fn first_of_pair(self, rank: u32) -> Option<u32> {
        (rank < 2 * self.pairs && rank % 2 == 1).then(|| rank - 1)
    }

    fn left(self) -> u32 {
        self.count - self.pairs
    }
}

/// From `Input` into `Output`, which may be the same memory: a reduce-scatter by halves, and an all-gather. `element` is the length of a number.
pub(super) fn all_reduce_recursive_halving(
    ranks: Ranks,
    bytes: u64,
    element: u64,
    divides: bool,
) -> Schedule {
    let folded = Folded::new(ranks);
    let mut schedule = Schedule::default();
    let [input, output] =
        [Operand::Input, Operand::Output].map(|place| OperandSpan::new(place, 0, bytes));
    let Some(number) = folded.number(ranks.rank) else {
        schedule.push(Round::default().send(ranks.rank + 1, input));
        schedule.push(Round::default().receive(ranks.rank + 1, output));
        return schedule;
    };
    let first = folded.first_of_pair(ranks.rank);
    let mut has = input;
    if let Some(first) = first {
        let comes = schedule.scratch(bytes);
        let round = Round::default().receive(first, comes);
        schedule.push(round.then(MemoryStep::Reduce {
            first: comes,
            second: input,
            into: comes,
        }));
        has = comes;
    }
    let left = Ranks {
        rank: number,
        count: folded.left(),
    };
    let blocks = Blocks::even(bytes, element, left.count);
    let own = blocks.span(Operand::Output, number);
    let mut of_left = Schedule {
        scratch_bytes: schedule.scratch_bytes,
        ..Schedule::default()
    };
    halve(&mut of_left, left, &blocks, has, own);
    if divides {
        of_left.then(MemoryStep::Divide { span: own });
    }
    of_left.append(all_gather_recursive_doubling(left, &blocks));
    schedule.scratch_bytes = of_left.scratch_bytes;
    of_left.scratch_bytes = 0;
    schedule.append(of_left.with_peers(|number| folded.rank(number)));
    if let Some(first) = first {
        schedule.push(Round::default().send(first, output));
    }
    schedule
}

/// From `Input` into `Output`, which may be the same memory.
pub(super) fn all_reduce_recursive_doubling(ranks: Ranks, bytes: u64) -> Schedule {
    let rank = ranks.rank;
    let folded = Folded::new(ranks);
    let mut schedule = Schedule::default();
    let comes = schedule.scratch(bytes);
    let output = OperandSpan::new(Operand::Output, 0, bytes);
    schedule.copy(OperandSpan::new(Operand::Input, 0, bytes), output);
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
    let Some(number) = folded.number(rank) else {
        schedule.push(Round::default().send(rank + 1, output));
        schedule.push(Round::default().receive(rank + 1, output));
        return schedule;
    };
    let first = folded.first_of_pair(rank);
    if let Some(first) = first {
        let round = Round::default().receive(first, comes);
        schedule.push(round.then(reduce(false)));
    }
    for distance in doublings(folded.left()) {
        let other = number ^ distance;
        let peer = folded.rank(other);
        let round = Round::default().send(peer, output).receive(peer, comes);
        schedule.push(round.then(reduce(number < other)));
    }
    if let Some(first) = first {
        schedule.push(Round::default().send(first, output));
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
pub(super) fn reduce_tree(algorithm: Algorithm, ranks: Ranks, root: u32, bytes: u64) -> Schedule {
    let tree = RankTree::new(ranks.relative_to(root), algorithm);
    let mut schedule = Schedule::default();
    let most = tree.levels.iter().map(Vec::len).max().unwrap_or(0);
    let comes: Vec<OperandSpan> = (0..most).map(|_| schedule.scratch(bytes)).collect();
    let result = match tree.parent {
        None => OperandSpan::new(Operand::Output, 0, bytes),
        // It reduces nothing.
        Some(_) if tree.is_leaf() => NOTHING,
        Some(_) => schedule.scratch(bytes),
    };
    let mut has = OperandSpan::new(Operand::Input, 0, bytes);
    // The smallest subtrees are done first.
    for level in tree.levels.iter().rev() {
        let mut round = Round::default();
        for ((child, _), comes) in level.iter().zip(comes.iter().copied()) {
            round = round.receive(*child, comes).then(MemoryStep::Reduce {
                first: has,
                second: comes,
                into: result,
            });
            has = result;
        }
        schedule.push(round);
    }
    match tree.parent {
        None => schedule.copy(has, result),
        Some(parent) => schedule.push(Round::default().send(parent, has)),
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
