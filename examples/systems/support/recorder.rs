//! What was done and when, for timelines.

use std::fmt::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use doorbell::Group;

use super::{Bar, timeline};

/// Notes from and to when something was done. The threads of streams and of the application share it.
pub struct Recorder {
    row: usize,
    bars: Mutex<Vec<Bar>>,
}

impl Recorder {
    /// `row` is that of what names none: the rank at the start, which stays when ranks are numbered anew.
    pub fn new(row: u32) -> Recorder {
        let bars = Mutex::default();
        let row = row as usize;
        Recorder { row, bars }
    }

    /// Milliseconds by the clock that the processes of a host share.
    pub fn now_ms() -> f64 {
        super::monotonic_time().as_secs_f64() * 1e3
    }

    /// Notes that something lasted from a time until now.
    pub fn add(&self, kind: &str, from_ms: f64) {
        self.add_in(self.row, kind, from_ms);
    }

    /// [`Recorder::add`] in a certain row.
    pub fn add_in(&self, row: usize, kind: &str, from_ms: f64) {
        let (kind, to_ms) = (kind.to_owned(), Recorder::now_ms());
        let bar = Bar {
            row,
            kind,
            from_ms,
            to_ms,
        };
        let mut bars = self.bars.lock().unwrap_or_else(PoisonError::into_inner);
        bars.push(bar);
    }

    /// Does some work, and notes it.
    pub fn time<T>(&self, kind: &str, work: impl FnOnce() -> T) -> T {
        self.time_in(self.row, kind, work)
    }

    /// [`Recorder::time`] in a certain row.
    pub fn time_in<T>(&self, row: usize, kind: &str, work: impl FnOnce() -> T) -> T {
        let from_ms = Recorder::now_ms();
        let result = work();
        self.add_in(row, kind, from_ms);
        result
    }

    /// What was noted so far, in the order of the ends.
    pub fn take(&self) -> Vec<Bar> {
        std::mem::take(&mut self.bars.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Draws what all ranks of the group have noted into the file that rank 0 was given. All of them call this.
    pub fn write(&self, title: &str, file: Option<&Path>, group: &Group) -> Result<()> {
        let bars = gather_bars(group, &self.take())?;
        let (0, Some(file)) = (group.rank(), file) else {
            return Ok(());
        };
        let begin = bars.iter().map(|bar| bar.from_ms).fold(f64::MAX, f64::min);
        let rows = bars.iter().map(|bar| bar.row + 1).max().unwrap_or(0);
        let rows: Vec<String> = (0..rows).map(|row| format!("rank {row}")).collect();
        timeline(file, title, &rows, &between(&bars, begin, f64::MAX))
    }
}

/// For each rank, when all ranks have met, in milliseconds by the clock of its host: hosts share no clock.
fn meet(group: &Group) -> Result<Vec<f64>> {
    group.barrier()?;
    let met = Recorder::now_ms();
    let all: Vec<u64> = super::gather(group, &[met.to_bits()])?.concat();
    let limit = Duration::from_secs(30);
    let hosts = group.store().gather(&super::host_name()?, limit)?;
    let first_of = |host: &Vec<u8>| {
        let times = all.iter().zip(&hosts).filter(|(_, other)| *other == host);
        let times = times.map(|(time, _)| f64::from_bits(*time));
        times.fold(f64::MAX, f64::min)
    };
    Ok(hosts.iter().map(first_of).collect())
}

/// The bars of all ranks of a group, on each of them. Their times begin when the ranks have met in this call, so those of what was done before are negative.
pub fn gather_bars(group: &Group, own: &[Bar]) -> Result<Vec<Bar>> {
    let zero = meet(group)?[group.rank() as usize];
    let mut text = String::new();
    for bar in own {
        let Bar {
            row,
            kind,
            from_ms,
            to_ms,
        } = bar;
        let (from_ms, to_ms) = (from_ms - zero, to_ms - zero);
        writeln!(text, "{row}\t{kind}\t{from_ms}\t{to_ms}")?;
    }
    let limit = Duration::from_secs(30);
    let all = group.store().gather(text.as_bytes(), limit)?.concat();
    let mut bars = Vec::new();
    for line in String::from_utf8(all)?.lines() {
        let [row, kind, from, to] = line.split('\t').collect::<Vec<_>>()[..] else {
            bail!("`{line}` is no bar");
        };
        bars.push(Bar {
            row: row.parse()?,
            kind: kind.into(),
            from_ms: from.parse()?,
            to_ms: to.parse()?,
        });
    }
    Ok(bars)
}

/// The parts of bars that lie between two times, counted from the first of these.
pub fn between(bars: &[Bar], from_ms: f64, to_ms: f64) -> Vec<Bar> {
    let inside = bars
        .iter()
        .filter(|bar| bar.to_ms > from_ms && bar.from_ms < to_ms);
    let cut = inside.map(|bar| Bar {
        row: bar.row,
        kind: bar.kind.clone(),
        from_ms: bar.from_ms.max(from_ms) - from_ms,
        to_ms: bar.to_ms.min(to_ms) - from_ms,
    });
    cut.collect()
}

/// For how long the bars of a row last, in milliseconds. Those of a row do not overlap.
pub fn busy_ms(bars: &[Bar], row: usize) -> f64 {
    let own = bars.iter().filter(|bar| bar.row == row);
    own.map(|bar| bar.to_ms - bar.from_ms).sum()
}

/// For how long bars of both rows last at the same time, in milliseconds.
pub fn overlap_ms(bars: &[Bar], rows: [usize; 2]) -> f64 {
    let [first, second] = rows.map(|row| bars.iter().filter(move |bar| bar.row == row));
    let with = |bar: &Bar| -> f64 {
        let common = second
            .clone()
            .map(|other| bar.to_ms.min(other.to_ms) - bar.from_ms.max(other.from_ms));
        common.filter(|common| *common > 0.0).sum()
    };
    first.map(with).sum()
}

/// How many bars of the first row last at the same time as one of the second.
pub fn overlapping(bars: &[Bar], [first, second]: [usize; 2]) -> usize {
    let meets = |bar: &Bar| {
        let others = bars.iter().filter(|other| other.row == second);
        let mut common =
            others.map(|other| bar.to_ms.min(other.to_ms) - bar.from_ms.max(other.from_ms));
        common.any(|common| common > 0.0)
    };
    let own = bars.iter().filter(|bar| bar.row == first);
    own.filter(|bar| meets(bar)).count()
}
