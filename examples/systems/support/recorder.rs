//! When work was done, for timelines.

use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use super::Bar;

/// Notes from and to when work was done. The threads of streams and of the application share it.
pub struct Recorder {
    start: Instant,
    start_of_host: SystemTime,
    bars: Mutex<Vec<Bar>>,
}

impl Recorder {
    pub fn new() -> Recorder {
        Recorder {
            start: Instant::now(),
            start_of_host: SystemTime::now(),
            bars: Mutex::default(),
        }
    }

    /// When this was made, in milliseconds by the clock that the processes of a host share.
    pub fn start_ms(&self) -> f64 {
        let since = self.start_of_host.duration_since(SystemTime::UNIX_EPOCH);
        since.map_or(0.0, |since| since.as_secs_f64() * 1e3)
    }

    /// Milliseconds since this was made.
    pub fn now_ms(&self) -> f64 {
        self.start.elapsed().as_secs_f64() * 1e3
    }

    /// Notes that something lasted from a time until now.
    pub fn add(&self, row: usize, kind: &str, from_ms: f64) {
        let bar = Bar {
            row,
            kind: kind.to_owned(),
            from_ms,
            to_ms: self.now_ms(),
        };
        self.bars
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(bar);
    }

    /// Does some work, and notes it.
    pub fn time<T>(&self, row: usize, kind: &str, work: impl FnOnce() -> T) -> T {
        let from_ms = self.now_ms();
        let result = work();
        self.add(row, kind, from_ms);
        result
    }

    /// What was noted so far, in the order of the ends.
    pub fn take(&self) -> Vec<Bar> {
        std::mem::take(&mut self.bars.lock().unwrap_or_else(PoisonError::into_inner))
    }
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
