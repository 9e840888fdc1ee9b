//! What one rank does in a collective operation: rounds of messages, and work on its own memory between them. Algorithms make schedules; a schedule knows no device.

/// The memory of a collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operand {
    Input,
    Output,
    /// Of the library.
    Scratch,
    /// One of a list of messages.
    Listed(u32),
}

/// A part of a memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OperandSpan {
    pub(super) place: Operand,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl OperandSpan {
    pub(super) fn new(place: Operand, offset: u64, len: u64) -> OperandSpan {
        OperandSpan { place, offset, len }
    }
}

/// A message to or from a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) peer: u32,
    pub(super) span: OperandSpan,
}

/// Work on this rank's own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryStep {
    Copy {
        from: OperandSpan,
        into: OperandSpan,
    },
    /// Stores the reduction of two spans, element by element. `into` may be one of them.
    Reduce {
        first: OperandSpan,
        second: OperandSpan,
        into: OperandSpan,
    },
    /// Divides by the number of ranks: the end of an average.
    Divide { span: OperandSpan },
}

impl MemoryStep {
    /// The operands, the second if there is one, and where the result goes.
    pub(super) fn spans(self) -> (OperandSpan, Option<OperandSpan>, OperandSpan) {
        match self {
            MemoryStep::Copy { from, into } => (from, None, into),
            MemoryStep::Divide { span } => (span, None, span),
            MemoryStep::Reduce {
                first,
                second,
                into,
            } => (first, Some(second), into),
        }
    }
}

/// Sends all, receives all, waits until the memory of what was sent may be used again, and then works on memory. A rank sends at most one message to a peer in
/// a round, and receives at most one from it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) sends: Vec<Transfer>,
    pub(super) receives: Vec<Transfer>,
    pub(super) then: Vec<MemoryStep>,
}

impl Round {
    pub(super) fn send(mut self, peer: u32, span: OperandSpan) -> Round {
        self.sends.push(Transfer { peer, span });
        self
    }

    pub(super) fn receive(mut self, peer: u32, span: OperandSpan) -> Round {
        self.receives.push(Transfer { peer, span });
        self
    }

    pub(super) fn then(mut self, step: MemoryStep) -> Round {
        self.then.push(step);
        self
    }

    /// As many rounds as the longest message needs if none may be longer than `max` bytes. The work on memory is in the last one.
    fn split(self, max: u64) -> Vec<Round> {
        let all = self.sends.iter().chain(&self.receives);
        let longest = all.map(|transfer| transfer.span.len).max().unwrap_or(0);
        if longest <= max {
            return vec![self];
        }
        let part = |transfers: &[Transfer], start: u64| -> Vec<Transfer> {
            let within = transfers
                .iter()
                .filter(|it| start == 0 || start < it.span.len);
            let part = |transfer: &Transfer| {
                let OperandSpan { place, offset, len } = transfer.span;
                let span = OperandSpan::new(place, offset + start, (len - start).min(max));
                Transfer { span, ..*transfer }
            };
            within.map(part).collect()
        };
        let starts = (0..longest).step_by(max as usize);
        let mut rounds: Vec<Round> = starts
            .map(|start| Round {
                sends: part(&self.sends, start),
                receives: part(&self.receives, start),
                then: Vec::new(),
            })
            .collect();
        if let Some(last) = rounds.last_mut() {
            last.then = self.then;
        }
        rounds
    }

    fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty() && self.then.is_empty()
    }
}

/// All rounds of one rank.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Schedule {
    pub(super) rounds: Vec<Round>,
    pub(super) scratch_bytes: u64,
}

impl Schedule {
    /// Adds a round that does something.
    pub(super) fn push(&mut self, round: Round) {
        if !round.is_empty() {
            self.rounds.push(round);
        }
    }

    /// Adds work behind the last round.
    pub(super) fn then(&mut self, step: MemoryStep) {
        match self.rounds.last_mut() {
            Some(last) => last.then.push(step),
            None => self.push(Round::default().then(step)),
        }
    }

    /// Adds a copy behind the last round, if there is anything to copy.
    pub(super) fn copy(&mut self, from: OperandSpan, into: OperandSpan) {
        if from.len > 0 && from != into {
            self.then(MemoryStep::Copy { from, into });
        }
    }

    /// Takes a part of the scratch memory, which begins at a cache line.
    pub(super) fn scratch(&mut self, len: u64) -> OperandSpan {
        let offset = self.scratch_bytes.next_multiple_of(64);
        self.scratch_bytes = offset + len;
        OperandSpan::new(Operand::Scratch, offset, len)
    }

    /// The same with no message of more than `max` bytes: longer ones are several, in rounds of their own. Both sides of a message divide it alike.
    pub(super) fn with_messages_of(mut self, max: u64) -> Schedule {
        let rounds = self.rounds.into_iter();
        self.rounds = rounds.flat_map(|round| round.split(max)).collect();
        self
    }

    /// The same with other numbers of the peers.
    pub(super) fn with_peers(mut self, peer: impl Fn(u32) -> u32) -> Schedule {
        for round in &mut self.rounds {
            let transfers = round.sends.iter_mut().chain(&mut round.receives);
            transfers.for_each(|transfer| transfer.peer = peer(transfer.peer));
        }
        self
    }

    pub(super) fn append(&mut self, mut other: Schedule) {
        debug_assert_eq!(other.scratch_bytes, 0, "both would use the same memory");
        self.rounds.append(&mut other.rounds);
    }

    /// Messages that this rank sends.
    pub(super) fn messages(&self) -> u64 {
        self.rounds
            .iter()
            .map(|round| round.sends.len() as u64)
            .sum()
    }

    /// Bytes that this rank sends.
    pub(super) fn bytes(&self) -> u64 {
        let sends = self.rounds.iter().flat_map(|round| &round.sends);
        sends.map(|transfer| transfer.span.len).sum()
    }

    /// The memories that the rank works on, and with `received` those that messages are received into.
    pub(super) fn operands(&self, received: bool) -> impl Iterator<Item = Operand> {
        self.rounds.iter().flat_map(move |round| {
            let receives = round.receives.iter().filter(move |_| received);
            let received = receives.map(|transfer| transfer.span);
            let worked_on = round.then.iter().flat_map(|step| {
                let (first, second, into) = step.spans();
                [Some(first), second, Some(into)].into_iter().flatten()
            });
            received.chain(worked_on).map(|span| span.place)
        })
    }

    pub(super) fn has_receives(&self) -> bool {
        self.rounds.iter().any(|round| !round.receives.is_empty())
    }

    pub(super) fn has_local_steps(&self) -> bool {
        self.rounds.iter().any(|round| !round.then.is_empty())
    }
}

/// How a memory is divided among the ranks: contiguous blocks in the order of the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Where each block begins, and the end of the last.
    starts: Vec<u64>,
}

impl Blocks {
    /// As equal as they can be, of whole elements.
    pub(super) fn even(bytes: u64, element: u64, count: u32) -> Blocks {
        let (elements, count) = (bytes / element, u64::from(count));
        // Without a product that could be too large.
        let start = |index: u64| {
            let (share, rest) = (elements / count, elements % count);
            (share * index + (rest * index) / count) * element
        };
        Blocks {
            starts: (0..=count).map(start).collect(),
        }
    }

    /// Of these lengths.
    pub(super) fn of(lens: impl IntoIterator<Item = u64>) -> Blocks {
        let mut starts = vec![0];
        let mut end = 0;
        for len in lens {
            end += len;
            starts.push(end);
        }
        Blocks { starts }
    }

    pub(super) fn count(&self) -> u32 {
        (self.starts.len() - 1) as u32
    }

    pub(super) fn bytes(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The block of a rank.
    pub(super) fn span(&self, place: Operand, index: u32) -> OperandSpan {
        self.spans(place, index, index + 1)
    }

    /// The blocks from one rank up to another, without it.
    pub(super) fn spans(&self, place: Operand, from: u32, to: u32) -> OperandSpan {
        let [from, to] = [from, to].map(|at| self.starts[at as usize]);
        OperandSpan::new(place, from, to - from)
    }

    /// The longest block.
    pub(super) fn longest(&self) -> u64 {
        let lens = self.starts.windows(2).map(|pair| pair[1] - pair[0]);
        lens.max().unwrap_or(0)
    }

    /// The blocks in another order: that of rank `first` comes first, and then those of the ranks behind it.
    pub(super) fn rotated(&self, first: u32) -> Blocks {
        let count = self.count();
        let lens = (0..count).map(|at| self.span(Operand::Output, (first + at) % count).len);
        Blocks::of(lens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_equal_and_whole() {
        for count in 1..=16 {
            for elements in [0, 1, 5, 15, 16, 17, 1000] {
                let blocks = Blocks::even(elements * 8, 8, count);
                assert_eq!((blocks.count(), blocks.bytes()), (count, elements * 8));
                let lens = (0..count).map(|at| blocks.span(Operand::Input, at).len);
                let lens: Vec<u64> = lens.collect();
                let (least, most) = (lens.iter().min().unwrap(), lens.iter().max().unwrap());
                assert!(lens.iter().all(|len| len % 8 == 0) && most - least <= 8);
                assert_eq!(blocks.longest(), *most);
                let first = count / 2;
                let rotated = blocks.rotated(first);
                for at in 0..count {
                    let span = rotated.span(Operand::Input, at);
                    assert_eq!(span.len, lens[((first + at) % count) as usize]);
                }
            }
        }
        // No product of the two overflows.
        assert_eq!(Blocks::even(u64::MAX - 7, 8, 3).bytes(), u64::MAX - 7);
    }

    #[test]
    fn long_messages_are_divided() {
        let span = |offset, len| OperandSpan::new(Operand::Output, offset, len);
        let copy = MemoryStep::Copy {
            from: span(0, 25),
            into: span(100, 25),
        };
        let mut schedule = Schedule::default();
        let round = Round::default()
            .send(1, span(3, 25))
            .receive(2, span(40, 10));
        schedule.push(round.receive(4, span(60, 0)).then(copy));
        schedule.push(Round::default().send(1, span(0, 10)));
        let divided = schedule.clone().with_messages_of(10);
        let sent: Vec<_> = divided
            .rounds
            .iter()
            .map(|round| &round.sends[..])
            .collect();
        let to = |offset, len| {
            vec![Transfer {
                peer: 1,
                span: span(offset, len),
            }]
        };
        assert_eq!(sent, [to(3, 10), to(13, 10), to(23, 5), to(0, 10)]);
        let received = divided.rounds.iter().map(|round| round.receives.len());
        assert_eq!(received.collect::<Vec<_>>(), [2, 0, 0, 0]);
        let works = divided.rounds.iter().map(|round| round.then.len());
        assert_eq!(works.collect::<Vec<_>>(), [0, 0, 1, 0]);
        assert_eq!((divided.messages(), divided.bytes()), (4, 35));
        assert_eq!(schedule.clone().with_messages_of(25), schedule);
    }

    #[test]
    fn schedule_counts_what_it_sends() {
        let mut schedule = Schedule::default();
        let [first, second] = [5, 9].map(|len| schedule.scratch(len));
        assert_eq!(
            (first.offset, second.offset, schedule.scratch_bytes),
            (0, 64, 73)
        );
        schedule.push(Round::default());
        assert!(schedule.rounds.is_empty());
        schedule.push(Round::default().send(1, first).receive(2, second));
        schedule.copy(first, first);
        assert!(!schedule.has_local_steps());
        schedule.copy(first, OperandSpan::new(Operand::Output, 0, 5));
        assert!(schedule.has_local_steps());
        assert_eq!((schedule.messages(), schedule.bytes()), (1, 5));
        let shifted = schedule.with_peers(|peer| peer + 3);
        let round = &shifted.rounds[0];
        assert_eq!((round.sends[0].peer, round.receives[0].peer), (4, 5));
    }
}
