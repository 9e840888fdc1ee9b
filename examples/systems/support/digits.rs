//! The handwritten digits of `scripts/digits`, and the random numbers of the training.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Pixels of an image, 8 by 8.
pub const PIXELS: usize = 64;
/// Classes of images.
pub const CLASSES: usize = 10;
/// One image of so many is held out: it is not trained on.
const HELD_OUT: usize = 5;

/// An image, with pixels from 0 to 1, and the digit that it shows.
pub struct Digit {
    pub pixels: [f32; PIXELS],
    pub label: u8,
}

pub struct Digits {
    pub training: Vec<Digit>,
    pub held_out: Vec<Digit>,
}

/// Runs `scripts/digits`, which fetches the images, if the file is not there. Processes may do this at the same time: the script renames the file into place.
///
/// # Errors
/// That the file is not there and cannot be fetched: the script needs a network, python3 and pip.
pub fn fetch(file: &Path) -> Result<()> {
    if file.exists() {
        return Ok(());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/digits");
    let missing = || {
        format!(
            "there is no {}, and {} cannot fetch the images; name a file that has them with --data",
            file.display(),
            script.display()
        )
    };
    // The script has the repository as its working folder.
    let output = Command::new(&script)
        .arg(std::path::absolute(file)?)
        .output();
    let output = output.with_context(missing)?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}: {}",
        missing(),
        output.status,
        error.trim()
    );
    Ok(())
}

impl Digits {
    /// Reads the file that `scripts/digits` writes, and fetches it before if it is not there.
    ///
    /// # Errors
    /// As [`fetch`], and if the file has something else.
    pub fn read(file: &Path) -> Result<Digits> {
        fetch(file)?;
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let mut digits = Digits {
            training: Vec::new(),
            held_out: Vec::new(),
        };
        for (number, line) in text.lines().enumerate() {
            let values: Result<Vec<u8>, _> = line.split(',').map(str::parse).collect();
            let place = || format!("{}, line {}", file.display(), number + 1);
            let values = values.with_context(place)?;
            let is_image = values.len() == PIXELS + 1 && values[PIXELS] < CLASSES as u8;
            ensure!(is_image, "{}: not {PIXELS} pixels and a digit", place());
            let pixels = std::array::from_fn(|at| f32::from(values[at]) / 16.0);
            let digit = Digit {
                pixels,
                label: values[PIXELS],
            };
            match number % HELD_OUT {
                0 => digits.held_out.push(digit),
                _ => digits.training.push(digit),
            }
        }
        ensure!(!digits.training.is_empty(), "{}: no images", file.display());
        Ok(digits)
    }
}

/// SplitMix64: the same numbers in every process.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Evenly distributed from -1 to 1.
    pub fn weight(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// The numbers below `count` in a random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
        order
    }
}
