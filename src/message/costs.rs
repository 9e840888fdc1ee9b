//! What messages cost, and from which length on a message is better read by its receiver than copied out of a slot.

use std::time::{Duration, Instant};

use super::config::EAGER_BYTES_MAX;
use super::header::HEADER_BYTES;
use super::receive::MessageSlot;
use super::{MessageConfig, MessageQueue};
use crate::region::{Access, ProtectionDomain, Region};
use crate::{Error, Result};

/// A cost in nanoseconds over a length in bytes: straight lines between points. Behind the last point the last line goes on.
#[derive(Debug, Clone, PartialEq)]
pub struct CostCurve {
    points: Vec<(u64, f64)>,
}

impl CostCurve {
    /// The curve through points of a length in bytes and a cost in nanoseconds.
    ///
    /// # Errors
    /// [`Error::Malformed`] for no points, for lengths that do not ascend, and for costs that descend or are not finite numbers from 0 on.
    pub fn new(points: impl IntoIterator<Item = (u64, f64)>) -> Result<CostCurve> {
        let points: Vec<_> = points.into_iter().collect();
        let is_cost = |cost: f64| cost.is_finite() && cost >= 0.0;
        let ascends = |pair: &[(u64, f64)]| match pair {
            [before, after] => before.0 < after.0 && before.1 <= after.1,
            _ => true,
        };
        if points.is_empty()
            || !points.iter().all(|point| is_cost(point.1))
            || !points.windows(2).all(ascends)
        {
            return Err(Error::Malformed {
                what: "cost curve",
                reason: format!("{points:?}"),
            });
        }
        Ok(CostCurve { points })
    }

    /// A fixed cost, and one for each byte.
    ///
    /// # Errors
    /// As [`CostCurve::new`].
    pub fn linear(fixed_ns: f64, bytes_per_ns: f64) -> Result<CostCurve> {
        let end = u64::from(EAGER_BYTES_MAX);
        CostCurve::new([(0, fixed_ns), (end, fixed_ns + end as f64 / bytes_per_ns)])
    }

    /// The cost of that length.
    pub fn at(&self, len_bytes: u64) -> f64 {
        let behind = self
            .points
            .partition_point(|(len, _)| *len <= len_bytes)
            .clamp(1, self.points.len().saturating_sub(1).max(1));
        match (self.points.get(behind - 1), self.points.get(behind)) {
            (Some(from), Some(to)) => {
                let slope = (to.1 - from.1) / (to.0 - from.0) as f64;
                // Before the first point there is no less than its cost.
                from.1 + slope * len_bytes.saturating_sub(from.0) as f64
            }
            (Some(only), None) => only.1,
            _ => 0.0,
        }
    }

    fn plus(mut self, more_ns: f64) -> CostCurve {
        self.points.iter_mut().for_each(|point| point.1 += more_ns);
        self
    }
}

/// What the steps of a message cost between two processes, for the choice of [`MessageConfig::eager_bytes`](crate::MessageConfig::eager_bytes).
///
/// An eager message costs a send of header and message, and a copy out of the slot. A longer message costs a send of the header, and a read. From
/// [`MessageCosts::eager_bytes`] on, a copy takes longer than the round trip of a read. The copies that [`MessageCosts::measure`] measures are those of the CPU: of receives
/// on host streams and by threads.
///
/// ```
/// use doorbell::{CostCurve, MessageConfig, MessageCosts};
///
/// let costs = MessageCosts {
///     send: CostCurve::linear(900.0, 12.0)?,
///     copy: CostCurve::linear(0.0, 10.0)?,
///     read: CostCurve::linear(2000.0, 12.0)?,
/// };
/// assert!((19_999..=20_000).contains(&costs.eager_bytes()));
/// let config = MessageConfig::default().eager_bytes(costs.eager_bytes());
/// # Ok::<(), doorbell::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct MessageCosts {
    /// From the call that sends to the end of the receive, without a copy.
    pub send: CostCurve,
    /// A copy out of a slot.
    pub copy: CostCurve,
    /// A read: what the receive of a message that is not eager takes longer than that of its header.
    pub read: CostCurve,
}

/// Lengths that are measured, in bytes: closest where the limit mostly is.
const MEASURED: [u64; 16] = [
    8,
    512,
    2048,
    4096,
    6144,
    8192,
    12_288,
    16_384,
    24_576,
    32_768,
    49_152,
    65_536,
    98_304,
    131_072,
    262_144,
    1 << 20,
];
const SAMPLES: usize = 32;
/// Before them. A device whose thread sleeps wakes by these.
const UNMEASURED: usize = 4;
const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

impl MessageCosts {
    /// Measures between two queues of this process, by messages of the CPU that are eager and by others that are not. A device that other processes use as well costs more then. For
    /// a peer behind a network add its round trip by [`MessageCosts::over`].
    ///
    /// # Errors
    /// Those of [`MessageQueue::new`], [`MessageQueue::connect`] and [`Region::alloc`], and failures of the messages.
    pub fn measure(domain: &ProtectionDomain) -> Result<MessageCosts> {
        let [source, target] =
            [(); 2].map(|()| Region::alloc(domain, EAGER_BYTES_MAX.into(), Access::ALL));
        let (source, target) = (source?, target?);
        let mut eager = pair(domain, EAGER_BYTES_MAX)?;
        let mut read = pair(domain, 0)?;
        let time = |[from, to]: &mut [MessageQueue; 2], len| {
            let [ours, theirs] = [source.slice(0, len)?, target.slice(0, len)?];
            let begin = Instant::now();
            let sent = from.start_send_now(&[ours], PATIENCE)?;
            to.recv_now(&[theirs], PATIENCE)?;
            let taken = begin.elapsed();
            from.wait_send_now(&sent, PATIENCE)?;
            Ok(taken)
        };
        let slot = MessageSlot {
            memory: Region::alloc(
                domain,
                u64::from(HEADER_BYTES) + u64::from(EAGER_BYTES_MAX),
                Access::LOCAL_WRITE,
            )?,
            offset: 0,
            number: 0,
            eager_bytes: EAGER_BYTES_MAX,
            result: 0,
        };
        let copy = |len| {
            let into = [target.slice(0, len)?];
            let begin = Instant::now();
            slot.copy(len, into.into_iter())?;
            Ok(begin.elapsed())
        };
        let [eager, read, copy] = curves([
            &mut |len| time(&mut eager, len),
            &mut |len| time(&mut read, len),
            &mut |len| copy(len),
        ])?;
        let of_send = eager.points.iter().zip(&copy.points);
        let of_send = of_send.map(|((len, eager_ns), (_, copy_ns))| {
            (len + u64::from(HEADER_BYTES), eager_ns - copy_ns)
        });
        let send = ascending(of_send)?;
        let header_ns = send.at(HEADER_BYTES.into());
        let of_read = read.points.iter();
        let read = ascending(of_read.map(|(len, ns)| (*len, ns - header_ns)))?;
        Ok(MessageCosts { send, copy, read })
    }

    /// The costs with a network of that round trip in nanoseconds in between.
    #[must_use]
    pub fn over(self, round_trip_ns: f64) -> MessageCosts {
        MessageCosts {
            send: self.send.plus(round_trip_ns / 2.0),
            copy: self.copy,
            read: self.read.plus(round_trip_ns),
        }
    }

    /// The time in nanoseconds from the send to the end of the receive of an eager message of that length.
    pub fn eager_ns(&self, len_bytes: u64) -> f64 {
        self.send.at(len_bytes + u64::from(HEADER_BYTES)) + self.copy.at(len_bytes)
    }

    /// The same of a message that the receiver reads.
    pub fn rendezvous_ns(&self, len_bytes: u64) -> f64 {
        self.send.at(HEADER_BYTES.into()) + self.read.at(len_bytes)
    }

    /// The longest message that is better eager, 0 to 1 MiB: of all such limits the one by which no length is slowed down by more than with another one.
    pub fn eager_bytes(&self) -> u32 {
        let places = self.places();
        let slowdown = |limit: u64| {
            let slowdown_at = |len: u64| {
                let (eager, rendezvous) = (self.eager_ns(len), self.rendezvous_ns(len));
                let chosen = if len <= limit { eager } else { rendezvous };
                let best = eager.min(rendezvous);
                if best > 0.0 { chosen / best } else { 1.0 }
            };
            // Between two places one of both is the faster one, and the ratio of two straight lines has no greatest value in between.
            let places = places.iter().copied().chain([limit + 1]);
            places.map(slowdown_at).fold(1.0, f64::max)
        };
        let best = places
            .iter()
            .copied()
            .map(|limit| (slowdown(limit), limit))
            .min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        best.map_or(0, |(_, limit)| limit as u32)
    }

    /// In ascending order: 0, the longest eager message, the points of the curves between them, and the last lengths before the two costs change places.
    fn places(&self) -> Vec<u64> {
        let end = u64::from(EAGER_BYTES_MAX);
        let sent = self.send.points.iter();
        let sent = sent.map(|point| point.0.saturating_sub(HEADER_BYTES.into()));
        let others = self.copy.points.iter().chain(&self.read.points);
        let mut places: Vec<u64> = others
            .map(|point| point.0)
            .chain(sent)
            .chain([0, end])
            .filter(|place| *place <= end)
            .collect();
        places.sort_unstable();
        places.dedup();
        let difference = |len: u64| self.eager_ns(len) - self.rendezvous_ns(len);
        let changes: Vec<u64> = places
            .windows(2)
            .filter_map(|pair| {
                let [from, to] = [*pair.first()?, *pair.last()?];
                let (before, after) = (difference(from), difference(to));
                let part = before / (before - after);
                let is_inside = part > 0.0 && part < 1.0;
                is_inside.then(|| from + (part * (to - from) as f64) as u64)
            })
            .collect();
        places.extend(changes);
        places.sort_unstable();
        places.dedup();
        places
    }
}

/// Two queues that are connected with each other.
fn pair(domain: &ProtectionDomain, eager_bytes: u32) -> Result<[MessageQueue; 2]> {
    let config = MessageConfig::default().eager_bytes(eager_bytes).slots(2);
    let make = || MessageQueue::new(domain, &config);
    let [mut from, mut to] = [make()?, make()?];
    from.connect(&to.address())?;
    to.connect(&from.address())?;
    Ok([from, to])
}

/// Measures times of messages by their lengths, in turns. The time of a length is the one that a quarter of the samples are below: other work of the machine makes some of them longer, and none
/// shorter.
fn curves<const N: usize>(
    mut measures: [&mut dyn FnMut(u64) -> Result<Duration>; N],
) -> Result<[CostCurve; N]> {
    let mut points = [(); N].map(|()| Vec::with_capacity(MEASURED.len()));
    for len in MEASURED {
        let mut samples = [(); N].map(|()| Vec::with_capacity(SAMPLES));
        for round in 0..UNMEASURED + SAMPLES {
            for (measure, samples) in measures.iter_mut().zip(&mut samples) {
                let taken = measure(len)?;
                if round >= UNMEASURED {
                    samples.push(taken);
                }
            }
        }
        for (samples, points) in samples.iter_mut().zip(&mut points) {
            samples.sort_unstable();
            let quarter = samples.get(SAMPLES / 4).copied().unwrap_or_default();
            points.push((len, quarter.as_nanos() as f64));
        }
    }
    let mut curves = Vec::with_capacity(N);
    for points in points {
        curves.push(ascending(points)?);
    }
    curves.try_into().map_err(|_| Error::Malformed {
        what: "cost curve",
        reason: "one is missing".into(),
    })
}

/// The curve through points, of which none costs less than one of a shorter length, or nothing.
fn ascending(points: impl IntoIterator<Item = (u64, f64)>) -> Result<CostCurve> {
    let mut most = 0.0_f64;
    CostCurve::new(points.into_iter().map(|(len, ns)| {
        most = most.max(ns);
        (len, most)
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn costs(send: (f64, f64), copy: (f64, f64), read: (f64, f64)) -> MessageCosts {
        let line = |(fixed, rate)| CostCurve::linear(fixed, rate).unwrap();
        MessageCosts {
            send: line(send),
            copy: line(copy),
            read: line(read),
        }
    }

    /// EDR, 100 Gbit/s: a send takes 0.9 us, a read 1.9 us, and a stream 1 us for the doorbell and the wait of the read. A core copies 10 GB/s.
    #[test]
    fn constants_of_edr_give_about_30_kb() {
        let edr = costs((900.0, 12.0), (0.0, 10.0), (2900.0, 12.0));
        assert!((28_999..=29_000).contains(&edr.eager_bytes()));
        // 20 km away, everything is eager: the read costs 200 us more.
        assert_eq!(edr.clone().over(200_000.0).eager_bytes(), EAGER_BYTES_MAX);
        // Where a copy takes long at once, nothing is.
        assert_eq!(
            costs((900.0, 12.0), (5000.0, 10.0), (2900.0, 12.0)).eager_bytes(),
            0
        );
    }

    #[test]
    fn curves_are_straight_between_their_points() {
        let curve = CostCurve::new([(10, 100.0), (20, 200.0), (40, 200.0)]).unwrap();
        let costs = [0, 10, 15, 20, 30, 40, 80].map(|len| curve.at(len));
        assert_eq!(costs, [100.0, 100.0, 150.0, 200.0, 200.0, 200.0, 200.0]);
        let rising = CostCurve::new([(0, 1.0), (4, 3.0)]).unwrap();
        assert_eq!(rising.at(8), 5.0);
        assert_eq!(CostCurve::new([(7, 3.0)]).unwrap().at(99), 3.0);
        for wrong in [
            vec![],
            vec![(1, f64::NAN)],
            vec![(1, -1.0)],
            vec![(1, 2.0), (1, 3.0)],
            vec![(1, 2.0), (2, 1.0)],
        ] {
            assert!(matches!(
                CostCurve::new(wrong),
                Err(Error::Malformed { .. })
            ));
        }
    }

    fn any_curve() -> impl Strategy<Value = CostCurve> {
        let steps = prop::collection::vec((1_u64..200_000, 0.0_f64..20_000.0), 1..8);
        (0_u64..100, steps).prop_map(|(first, steps)| {
            let (mut len, mut cost) = (first, 100.0);
            let point = |(more_bytes, more_ns): (u64, f64)| {
                cost += more_ns;
                let point = (len, cost);
                len += more_bytes;
                point
            };
            CostCurve::new(steps.into_iter().map(point).collect::<Vec<_>>()).unwrap()
        })
    }

    proptest! {
        /// No other limit slows the worst length down by more than 1 % less.
        #[test]
        fn limit_is_the_best_one(send in any_curve(), copy in any_curve(), read in any_curve(), others: [u32; 16], lens: [u32; 16]) {
            let costs = MessageCosts { send, copy, read };
            let limit = costs.eager_bytes();
            prop_assert!(limit <= EAGER_BYTES_MAX);
            let all: Vec<u64> = costs
                .places()
                .into_iter()
                .chain(lens.map(|len| u64::from(len % EAGER_BYTES_MAX)))
                .flat_map(|len| [len, len + 1])
                .collect();
            let slowdown = |limit: u32| {
                all.iter().map(|len| {
                    let (eager, rendezvous) = (costs.eager_ns(*len), costs.rendezvous_ns(*len));
                    let chosen = if *len <= u64::from(limit) { eager } else { rendezvous };
                    chosen / eager.min(rendezvous)
                }).fold(1.0, f64::max)
            };
            let own = slowdown(limit);
            for other in others {
                prop_assert!(own <= slowdown(other % (EAGER_BYTES_MAX + 1)) * 1.01, "{limit}: {own}, {other}");
            }
        }

        /// With a fixed cost and one for each byte, and a read as fast as a send for each byte, no length takes more than 1 % longer than by the better one of both.
        #[test]
        fn no_length_is_slowed_down_with_lines(send in 500.0_f64..5000.0, copy in 0.0_f64..500.0, rate in 1.0_f64..40.0, read in 500.0_f64..9000.0, len in 0..EAGER_BYTES_MAX) {
            let costs = costs((send, 12.0), (copy, rate), (read, 12.0));
            let (eager, rendezvous) = (costs.eager_ns(len.into()), costs.rendezvous_ns(len.into()));
            let chosen = if len <= costs.eager_bytes() { eager } else { rendezvous };
            prop_assert!(chosen <= 1.01 * eager.min(rendezvous));
        }

        /// A faster copy never makes fewer messages eager.
        #[test]
        fn limit_rises_with_the_speed_of_copies(send in 100.0_f64..5000.0, read in 100.0_f64..9000.0, slow in 1.0_f64..20.0, more in 0.0_f64..20.0) {
            let limit = |rate| costs((send, 12.0), (100.0, rate), (read, 12.0)).eager_bytes();
            prop_assert!(limit(slow) <= limit(slow + more));
        }
    }

    #[cfg(feature = "softcx")]
    #[test]
    fn costs_are_measured() {
        let domain = crate::Device::open("softcx").unwrap().protection_domain();
        let costs = MessageCosts::measure(&domain).unwrap();
        let ascends = |curve: &CostCurve| curve.at(8) > 0.0 && curve.at(8) < curve.at(1 << 20);
        assert!(ascends(&costs.send) && ascends(&costs.copy) && ascends(&costs.read));
        let limit = costs.eager_bytes();
        assert!(limit <= EAGER_BYTES_MAX);
    }
}
