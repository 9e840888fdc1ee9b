//! The lines of other homes that a rank has: their slots, and what the homes ask of it.

use anyhow::{Context, Result, bail};

use super::message::{Kind, Message};
use super::{LINE_BYTES, Node, Pending};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Held {
    Nothing,
    Shared,
    Dirty,
    /// On its way back to the home, which has not answered yet and may have sent a forward before.
    Evicting,
}

pub(super) struct Cached {
    pub(super) slot: usize,
    pub(super) held: Held,
    pub(super) used: bool,
    /// A forward that came while the line is on its way back.
    pub(super) forward: Option<Message>,
}

impl Node {
    fn slot_place(&self, slot: usize) -> u64 {
        self.cache_at + slot as u64 * LINE_BYTES
    }

    /// Where the line is here.
    pub(super) fn place(&self, line: u64) -> Result<u64> {
        if self.home(line) == self.rank() {
            return Ok(self.home_place(line));
        }
        let cached = self
            .cache
            .get(&line)
            .with_context(|| format!("line {line} has no slot"))?;
        Ok(self.slot_place(cached.slot))
    }

    /// Returns a free slot. If all slots are in use, evicts the line of a slot that was not used since the last pass of the clock hand.
    pub(super) fn take_slot(&mut self) -> Result<usize> {
        loop {
            if let Some(slot) = self.free.pop() {
                return Ok(slot);
            }
            let mut victim = None;
            for _ in 0..2 * self.slots.len() {
                self.hand = (self.hand + 1) % self.slots.len();
                let Some(line) = self.slots[self.hand] else {
                    continue;
                };
                let is_pending = self.pending.iter().any(|pending| pending.line == line);
                let Some(cached) = self.cache.get_mut(&line) else {
                    continue;
                };
                if !is_pending && !std::mem::take(&mut cached.used) {
                    victim = Some((line, cached.held));
                    break;
                }
            }
            match victim {
                // The home does not learn of it: an invalidation that comes later is answered.
                Some((line, Held::Shared | Held::Nothing)) => self.drop_line(line),
                Some((line, Held::Dirty)) => self.evict(line)?,
                // All are leaving.
                Some((_, Held::Evicting)) | None => {
                    self.wait("a free slot", |node| !node.free.is_empty())?;
                }
            }
        }
    }

    /// Writes a dirty line back to its home, and waits until it is there.
    pub(super) fn evict(&mut self, line: u64) -> Result<()> {
        self.set_held(line, Held::Evicting)?;
        let (home, place) = (self.home(line), self.place(line)?);
        self.write_line(home, place, self.home_place(line), None)?;
        self.send(home, Message::of(Kind::Evict, line))?;
        self.wait("a write-back", |node| !node.cache.contains_key(&line))
    }

    fn set_held(&mut self, line: u64, held: Held) -> Result<()> {
        let cached = self.cache.get_mut(&line);
        cached
            .with_context(|| format!("line {line} is not in the cache"))?
            .held = held;
        Ok(())
    }

    pub(super) fn drop_line(&mut self, line: u64) {
        if let Some(cached) = self.cache.remove(&line) {
            self.slots[cached.slot] = None;
            if self.leaving[cached.slot] == 0 {
                self.free.push(cached.slot);
            }
        }
    }

    pub(super) fn forwarded(&mut self, message: Message) -> Result<()> {
        let line = message.line;
        let cached = self.cache.get_mut(&line);
        let cached = cached.with_context(|| format!("a forward of line {line}"))?;
        match cached.held {
            Held::Dirty => self.answer_forward(message),
            // The home has the line when it answers the write-back. If the requester had it earlier, it could change it and write it back by another connection, and the write-back of this
            // rank would overwrite that.
            Held::Evicting => {
                cached.forward = Some(message);
                Ok(())
            }
            held => bail!("a forward of line {line}, which is {held:?} here"),
        }
    }

    /// The home has the line that this rank wrote back.
    pub(super) fn written_back(&mut self, line: u64) -> Result<()> {
        let cached = self.cache.get_mut(&line);
        let cached = cached.with_context(|| format!("a write-back of line {line}"))?;
        if let Some(message) = cached.forward.take() {
            self.answer_forward(message)?;
        }
        self.drop_line(line);
        Ok(())
    }

    /// Gives a line to the rank that the home has named.
    fn answer_forward(&mut self, message: Message) -> Result<()> {
        let Message {
            line, requester, ..
        } = message;
        let write = message.kind == Kind::ForwardWrite;
        let home = self.home(line);
        let (place, cached) = (self.place(line)?, &self.cache[&line]);
        let (slot, held) = (cached.slot, cached.held);
        // The slot is not used again before the device has read it, whether the line leaves now or later.
        self.write_line(requester, place, message.place, Some(slot))?;
        if requester != home {
            self.send(requester, Message::of(Kind::Granted, line))?;
            if !write {
                self.write_line(home, place, self.home_place(line), Some(slot))?;
            }
        }
        self.send(home, Message::of(Kind::Released, line))?;
        match (held, write) {
            (Held::Dirty, true) => self.drop_line(line),
            (Held::Dirty, false) => self.set_held(line, Held::Shared)?,
            _ => {}
        }
        Ok(())
    }

    pub(super) fn invalidated(&mut self, line: u64, home: u32) -> Result<()> {
        if self
            .cache
            .get(&line)
            .is_some_and(|cached| cached.held == Held::Shared)
        {
            if self.pending.iter().any(|pending| pending.line == line) {
                self.set_held(line, Held::Nothing)?;
            } else {
                self.drop_line(line);
            }
        }
        self.send(home, Message::of(Kind::Invalidated, line))
    }

    /// This rank has the line: does what waits for it before any other rank can get it.
    pub(super) fn granted(&mut self, from: u32, line: u64) -> Result<()> {
        let at = self.pending.iter().position(|pending| pending.line == line);
        let Pending {
            write, operations, ..
        } = self
            .pending
            .swap_remove(at.context("a line that nobody asked for")?);
        let (home, place) = (self.home(line), self.place(line)?);
        if home != self.rank() {
            self.set_held(line, if write { Held::Dirty } else { Held::Shared })?;
        }
        for operation in operations {
            self.execute(place, operation)?;
        }
        if from != home {
            self.send(home, Message::of(Kind::Done, line))?;
        }
        Ok(())
    }
}
