//! Random numbers that are the same on every machine, and a Zipf distribution.

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// From 0 to 1.
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

pub fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Number `k` with a probability in proportion to `1 / (k + 1)^skew`.
pub struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    pub fn new(count: u64, skew: f64) -> Zipf {
        let mut sum = 0.0;
        let cumulative = (1..=count).map(|k| {
            sum += (k as f64).powf(-skew);
            sum
        });
        Zipf {
            cumulative: cumulative.collect(),
        }
    }

    pub fn draw(&self, random: &mut Random) -> u64 {
        let total = self.cumulative.last().copied().unwrap_or_default();
        let at = random.fraction() * total;
        self.cumulative.partition_point(|sum| *sum <= at) as u64
    }
}
