//! What the ranks of a job did and when, for one figure.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use doorbell::Group;

use super::{Bar, timeline};

/// The bars of this rank.
pub struct Timeline {
    row: u32,
    /// Kind, begin and end, in seconds of the host's clock, which all ranks have.
    bars: Vec<(&'static str, f64, f64)>,
}

impl Timeline {
    /// `row` is the rank at the start, which it keeps when ranks are numbered anew.
    pub fn new(row: u32) -> Timeline {
        let bars = Vec::new();
        Timeline { row, bars }
    }

    pub fn now() -> f64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.unwrap_or_default().as_secs_f64()
    }

    /// Something that began at `begin` and ends now.
    pub fn add(&mut self, kind: &'static str, begin: f64) {
        self.bars.push((kind, begin, Timeline::now()));
    }

    /// Draws the bars of all ranks of the group into the file that rank 0 was given. All of them call this.
    pub fn write(&self, title: &str, file: Option<&Path>, group: &Group) -> Result<()> {
        let mut text = String::new();
        for (kind, from, to) in &self.bars {
            writeln!(text, "{}\t{kind}\t{from}\t{to}", self.row)?;
        }
        let limit = Duration::from_secs(30);
        let all = group.store().gather(text.as_bytes(), limit)?.concat();
        let (0, Some(file)) = (group.rank(), file) else {
            return Ok(());
        };
        let mut bars = Vec::new();
        for line in String::from_utf8(all)?.lines() {
            let [row, kind, from, to] = line.split('\t').collect::<Vec<_>>()[..] else {
                bail!("`{line}` is no bar");
            };
            bars.push(Bar {
                row: row.parse()?,
                kind: kind.into(),
                from_ms: from.parse::<f64>()? * 1e3,
                to_ms: to.parse::<f64>()? * 1e3,
            });
        }
        let begin = bars.iter().map(|bar| bar.from_ms).fold(f64::MAX, f64::min);
        for bar in &mut bars {
            bar.from_ms -= begin;
            bar.to_ms -= begin;
        }
        let rows = bars.iter().map(|bar| bar.row + 1).max().unwrap_or(0);
        let rows: Vec<String> = (0..rows).map(|row| format!("rank {row}")).collect();
        timeline(file, title, &rows, &bars)
    }
}
