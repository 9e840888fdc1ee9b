//! `data_parallel_training` against a training in one process, written without the library: the same bits.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Launcher;
use crate::waived::waived;

/// The digits, which `scripts/digits` fetches if they are not there. Without a network the test is waived.
pub fn digits(test: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    let file = folder.join("digits.csv");
    let fetched = Command::new(root.join("scripts/digits"))
        .arg(&file)
        .output();
    match fetched {
        Ok(output) if output.status.success() => Some(file),
        Ok(output) => {
            waived(
                test,
                &format!(
                    "no digits: {}",
                    String::from_utf8_lossy(&output.stderr).trim()
                ),
            );
            None
        }
        Err(error) => panic!("scripts/digits: {error}"),
    }
}

/// Both training programs fetch the digits if they are not there, and say what is missing if they cannot.
#[test]
fn training_fetches_the_digits() {
    let test = "training_fetches_the_digits";
    let Some(file) = digits(test) else {
        return;
    };
    let folder = crate::folder(test);
    for (name, options) in [
        ("data_parallel_training", &["--epochs", "1"][..]),
        (
            "pipeline_training",
            &[
                "--steps",
                "1",
                "--micro-batches",
                "1",
                "--method",
                "pipeline",
            ],
        ),
    ] {
        let fetched = folder.join(name).join("digits.csv");
        let run = |path: &str| {
            let mut command = Command::new(crate::program(name));
            command.args(["--ranks", "2", "--kernel-us", "0", "--data"]);
            command.arg(&fetched).args(options).env("PATH", path);
            command.output().unwrap()
        };
        let output = run("");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{name}");
        assert!(error.contains("cannot fetch the images"), "{name}: {error}");
        let output = run(&std::env::var("PATH").unwrap());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {error}");
        assert_eq!(
            std::fs::read(&fetched).unwrap(),
            std::fs::read(&file).unwrap()
        );
    }
}

/// A kernel sleeps for the rest of two milliseconds, so an exchange that is not behind the next kernel meets one on any machine. The synchronous CPU lets none begin.
#[test]
fn exchanges_run_beside_kernels_unless_the_cpu_waits() {
    let test = "exchanges_run_beside_kernels_unless_the_cpu_waits";
    let Some(file) = digits(test) else {
        return;
    };
    let svg = crate::folder(test).join("timeline.svg");
    let arguments = [
        "--data",
        file.to_str().unwrap(),
        "--ranks",
        "2",
        "--epochs",
        "1",
    ];
    let drawn = ["--svg", svg.to_str().unwrap()];
    let output = crate::example("data_parallel_training", &[&arguments[..], &drawn].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    // 22 steps of 64 images with three layers. The server has a push and a pull for each.
    for (method, operations) in [
        ("all-reduce", 66),
        ("parameter-server", 132),
        ("synchronous", 66),
    ] {
        let row = text.lines().find(|line| line.starts_with(method));
        let row = row.unwrap_or_else(|| panic!("{text}"));
        let beside = row.split_whitespace().find_map(|word| {
            let (beside, all) = word.split_once('/')?;
            assert_eq!(all.parse(), Ok(operations), "{row}");
            beside.parse::<u32>().ok()
        });
        // The steps that were queued before the one before had ended. The first step has none before it.
        let mut words = row.split_whitespace();
        words.find(|word| word.contains('/')).unwrap();
        let ahead: u32 = words.next().unwrap().parse().unwrap();
        match method {
            "synchronous" => {
                assert_eq!(beside, Some(0), "{row}");
                assert_eq!(ahead, 0, "{row}");
            }
            _ => {
                assert!(beside >= Some(operations / 10), "{row}");
                assert!((1..22).contains(&ahead), "{row}");
            }
        }
    }
    let drawing = crate::Drawing::read(&svg);
    drawing.has_texts(&[
        "forward",
        "backward",
        "all-reduce",
        "push of gradients",
        "pull of weights",
    ]);
    drawing.has_texts(&[
        "all-reduce: kernels",
        "parameter-server: network",
        "synchronous: CPU",
    ]);
}

/// SplitMix64.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From -1 to 1.
    pub fn real(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    pub fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
        order
    }
}

/// Pixels and label of each image: those that are trained on, and those that are held out.
pub type Images = Vec<(Vec<f32>, usize)>;

pub fn images(file: &Path) -> (Images, Images) {
    let (mut training, mut held_out) = (Vec::new(), Vec::new());
    for (number, line) in std::fs::read_to_string(file).unwrap().lines().enumerate() {
        let values: Vec<f32> = line
            .split(',')
            .map(|value| value.parse().unwrap())
            .collect();
        let image = (
            values[..64].iter().map(|value| value / 16.0).collect(),
            values[64] as usize,
        );
        if number % 5 == 0 {
            held_out.push(image)
        } else {
            training.push(image)
        }
    }
    (training, held_out)
}

/// The derivatives of the loss by the outputs, and the loss of one image.
pub fn softmax(outputs: &[f32], label: usize) -> (Vec<f32>, f32) {
    let mut largest = f32::MIN;
    for output in outputs {
        largest = largest.max(*output);
    }
    let powers: Vec<f32> = outputs
        .iter()
        .map(|output| (output - largest).exp())
        .collect();
    let mut sum = 0.0;
    for power in &powers {
        sum += power;
    }
    let loss = sum.ln() - (outputs[label] - largest);
    let deltas = (0..outputs.len())
        .map(|class| powers[class] / sum - if class == label { 1.0 } else { 0.0 });
    (deltas.collect(), loss)
}

/// A network: for each layer and each neuron its weights, and its bias last.
struct Network(Vec<Vec<Vec<f32>>>);

impl Network {
    fn new(widths: &[usize]) -> Network {
        let mut numbers = Numbers(1);
        let mut layers = Vec::new();
        for pair in widths.windows(2) {
            let mut neurons = vec![vec![0.0; pair[0] + 1]; pair[1]];
            // Drawn input by input.
            for input in 0..pair[0] {
                for neuron in &mut neurons {
                    neuron[input] = numbers.real() * (3.0 / pair[0] as f32).sqrt();
                }
            }
            layers.push(neurons);
        }
        Network(layers)
    }

    /// The inputs of each layer, and the outputs of the last one.
    fn values(&self, image: &[f32]) -> Vec<Vec<f32>> {
        let mut values = vec![image.to_vec()];
        for (at, neurons) in self.0.iter().enumerate() {
            let inputs = &values[at];
            let output = |neuron: &Vec<f32>| {
                let mut sum = neuron[inputs.len()];
                for (input, weight) in inputs.iter().zip(neuron) {
                    sum += input * weight;
                }
                if at + 1 < self.0.len() {
                    sum.max(0.0)
                } else {
                    sum
                }
            };
            let outputs = neurons.iter().map(output).collect();
            values.push(outputs);
        }
        values
    }

    /// Adds the derivatives of one image to the gradient, and returns its loss.
    fn add_gradient(&self, (image, label): &(Vec<f32>, usize), gradient: &mut Network) -> f32 {
        let values = self.values(image);
        let (mut deltas, loss) = softmax(&values[self.0.len()], *label);
        for at in (0..self.0.len()).rev() {
            let inputs = &values[at];
            for (neuron, delta) in gradient.0[at].iter_mut().zip(&deltas) {
                for (sum, input) in neuron.iter_mut().zip(inputs) {
                    *sum += input * delta;
                }
                neuron[inputs.len()] += delta;
            }
            let below = |input: usize| {
                let mut sum = 0.0;
                for (neuron, delta) in self.0[at].iter().zip(&deltas) {
                    sum += neuron[input] * delta;
                }
                if inputs[input] > 0.0 { sum } else { 0.0 }
            };
            deltas = (0..inputs.len()).map(below).collect();
        }
        loss
    }

    /// The numbers of a layer, input by input, and the biases last.
    fn flat(&self, layer: usize) -> Vec<f32> {
        let neurons = &self.0[layer];
        (0..neurons[0].len())
            .flat_map(|input| neurons.iter().map(move |neuron| neuron[input]))
            .collect()
    }

    fn change(&mut self, layer: usize, gradient: &[f32], step: f32) {
        let neurons = &mut self.0[layer];
        let width = neurons.len();
        for (at, derivative) in gradient.iter().enumerate() {
            neurons[at % width][at / width] -= step * derivative;
        }
    }
}

/// The sum of the vectors of all ranks, in the order of a ring: the sum of a block begins behind the rank that has its result.
fn ring_sum(ranks: &[Vec<f32>]) -> Vec<f32> {
    let (count, len) = (ranks.len(), ranks[0].len());
    let start = |block: usize| len / count * block + len % count * block / count;
    let mut sum = vec![0.0; len];
    for block in 0..count {
        for at in start(block)..start(block + 1) {
            sum[at] = ranks[(block + 1) % count][at];
            for distance in 2..=count {
                sum[at] += ranks[(block + distance) % count][at];
            }
        }
    }
    sum
}

/// The same in the order of the ranks.
fn server_sum(ranks: &[Vec<f32>]) -> Vec<f32> {
    let mut sum = ranks[0].clone();
    for rank in &ranks[1..] {
        for (sum, value) in sum.iter_mut().zip(rank) {
            *sum += value;
        }
    }
    sum
}

struct Expected {
    losses: Vec<f32>,
    weights: Vec<f32>,
    recognized: usize,
}

const WIDTHS: [usize; 4] = [64, 128, 64, 10];
const BATCH: usize = 60;
const RATE: f32 = 0.5;

fn expected(
    training: &Images,
    held_out: &Images,
    epochs: usize,
    ranks: usize,
    sum: fn(&[Vec<f32>]) -> Vec<f32>,
) -> Expected {
    let mut network = Network::new(&WIDTHS);
    let (mut losses, mut numbers) = (Vec::new(), Numbers(2));
    let last = WIDTHS.len() - 2;
    for _ in 0..epochs {
        let order = numbers.shuffled(training.len());
        for batch in order.chunks_exact(BATCH) {
            let gradients = batch.chunks(BATCH / ranks).map(|share| {
                let mut gradient = Network(
                    network
                        .0
                        .iter()
                        .map(|layer| vec![vec![0.0; layer[0].len()]; layer.len()])
                        .collect(),
                );
                let mut loss = 0.0;
                for image in share {
                    loss += network.add_gradient(&training[*image], &mut gradient);
                }
                (gradient, loss)
            });
            let gradients: Vec<_> = gradients.collect();
            for layer in 0..=last {
                let of_ranks: Vec<Vec<f32>> = (gradients.iter())
                    .map(|(gradient, loss)| {
                        let mut flat = gradient.flat(layer);
                        if layer == last {
                            flat.push(*loss);
                        }
                        flat
                    })
                    .collect();
                let mut sum = sum(&of_ranks);
                if layer == last {
                    losses.push(sum.pop().unwrap() / BATCH as f32);
                }
                network.change(layer, &sum, RATE / BATCH as f32);
            }
        }
    }
    let is_right = |(image, label): &&(Vec<f32>, usize)| {
        let outputs = network.values(image).pop().unwrap();
        (0..10).max_by(|a, b| outputs[*a].total_cmp(&outputs[*b])) == Some(*label)
    };
    Expected {
        losses,
        recognized: held_out.iter().filter(is_right).count(),
        weights: (0..=last).flat_map(|layer| network.flat(layer)).collect(),
    }
}

/// The numbers of a line, behind its first word.
pub fn bits<'a>(lines: &mut impl Iterator<Item = &'a str>, name: &str) -> Vec<f32> {
    let line = lines.next().unwrap_or_else(|| panic!("no {name}"));
    let mut words = line.split(' ');
    assert_eq!(words.next(), Some(name));
    words
        .map(|word| f32::from_bits(u32::from_str_radix(word, 16).unwrap()))
        .collect()
}

/// Where two lists of numbers differ in a bit.
pub fn first_difference(a: &[f32], b: &[f32]) -> Option<usize> {
    assert_eq!(a.len(), b.len());
    (0..a.len()).find(|at| a[*at].to_bits() != b[*at].to_bits())
}

#[test]
fn training_of_many_ranks_has_the_bits_of_one_process() {
    let Some(file) = digits("training_of_many_ranks_has_the_bits_of_one_process") else {
        return;
    };
    let (training, held_out) = images(&file);
    let folder = crate::folder("data_parallel_training");
    let launchers = Launcher::all("training_of_many_ranks_has_the_bits_of_one_process");
    // With five ranks the gradients cannot be divided evenly.
    let uneven = launchers.into_iter().map(|launcher| (launcher, 5, 1));
    for (launcher, ranks, epochs) in [(Launcher::Itself, 2, 6)].into_iter().chain(uneven) {
        let out = folder.join(format!("{ranks}-{launcher:?}.txt"));
        let numbers = [ranks, epochs, BATCH].map(|number| number.to_string());
        let output = launcher.example(
            ranks,
            "data_parallel_training",
            &[
                "--data",
                file.to_str().unwrap(),
                "--ranks",
                &numbers[0],
                "--epochs",
                &numbers[1],
                "--batch",
                &numbers[2],
                "--rate",
                &RATE.to_string(),
                "--kernel-us",
                "0",
                "--out",
                out.to_str().unwrap(),
            ],
        );
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = std::fs::read_to_string(&out).unwrap();
        let mut lines = text.lines();
        let of_ring = expected(&training, &held_out, epochs, ranks, ring_sum);
        let of_server = expected(&training, &held_out, epochs, ranks, server_sum);
        for (method, expected) in [
            ("all-reduce", &of_ring),
            ("parameter-server", &of_server),
            ("synchronous", &of_ring),
        ] {
            let place = format!("{method} of {ranks} ranks");
            assert_eq!(lines.next(), Some(&*format!("method {method}")));
            let losses = bits(&mut lines, "losses");
            assert_eq!(losses.len(), epochs * (training.len() / BATCH));
            assert_eq!(
                first_difference(&losses, &expected.losses),
                None,
                "{place}: losses"
            );
            let weights = bits(&mut lines, "weights");
            assert_eq!(
                first_difference(&weights, &expected.weights),
                None,
                "{place}: weights"
            );
            let recognized = format!("recognized {} {}", expected.recognized, held_out.len());
            assert_eq!(lines.next(), Some(&*recognized), "{place}");
            if epochs > 1 {
                assert!(
                    expected.recognized * 100 > held_out.len() * 95,
                    "{place}: {recognized}"
                );
                assert!(
                    losses[losses.len() - 1] < 0.2 * losses[0],
                    "{place}: the loss does not fall"
                );
            }
        }
    }
}

/// Without a network, too: with an empty PATH the script finds no program.
#[test]
fn missing_digits_name_the_script() {
    let folder = crate::folder("missing_digits_name_the_script");
    let file = folder.join("no/such/file");
    let mut command = Command::new(crate::program("data_parallel_training"));
    command.args(["--ranks", "2", "--data"]).arg(&file);
    let output = command.env("PATH", "").output().unwrap();
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/digits");
    for part in [file.to_str().unwrap(), script.to_str().unwrap(), "--data"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!file.exists());
}
