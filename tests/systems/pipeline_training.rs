//! `pipeline_training` against a training in one process, written without the library: the same bits.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::data_parallel_training::{
    Images, Numbers, bits, digits, first_difference, images, softmax,
};
use crate::{Launcher, waived};

const BLOCKS: usize = 4;
const HIDDEN: usize = 32;
const BATCH: usize = 32;

/// y = x + B max(0, A x + a) + b
#[derive(Clone)]
struct Block {
    /// For each hidden neuron.
    rows: Vec<[f32; 64]>,
    hidden_biases: Vec<f32>,
    columns: Vec<[f32; 64]>,
    biases: [f32; 64],
}

#[derive(Clone)]
struct Network {
    blocks: Vec<Block>,
    /// For each class.
    classes: Vec<([f32; 64], f32)>,
}

/// The sum of the contributions of ranks whose number is a power of two: of neighbours first.
fn tree_sum(parts: &[[f32; 64]]) -> [f32; 64] {
    if parts.len() == 1 {
        return parts[0];
    }
    let (first, second) = parts.split_at(parts.len() / 2);
    let (first, second) = (tree_sum(first), tree_sum(second));
    std::array::from_fn(|at| first[at] + second[at])
}

fn dot(start: f32, a: &[f32; 64], b: &[f32; 64]) -> f32 {
    let mut sum = start;
    for at in 0..64 {
        sum += a[at] * b[at];
    }
    sum
}

fn add(sum: &mut [f32; 64], factor: f32, vector: &[f32; 64]) {
    for at in 0..64 {
        sum[at] += factor * vector[at];
    }
}

impl Network {
    fn new() -> Network {
        let mut numbers = Numbers(1);
        let (first, second) = (
            (3.0_f32 / 64.0).sqrt(),
            0.5 * (3.0_f32 / HIDDEN as f32).sqrt(),
        );
        let mut blocks = Vec::new();
        for _ in 0..BLOCKS {
            let mut block = Block {
                rows: vec![],
                hidden_biases: vec![0.0; HIDDEN],
                columns: vec![],
                biases: [0.0; 64],
            };
            for _ in 0..HIDDEN {
                block
                    .rows
                    .push(std::array::from_fn(|_| numbers.real() * first));
                block
                    .columns
                    .push(std::array::from_fn(|_| numbers.real() * second));
            }
            blocks.push(block);
        }
        let classes = (0..10)
            .map(|_| (std::array::from_fn(|_| numbers.real() * first), 0.0))
            .collect();
        Network { blocks, classes }
    }

    fn zeros() -> Network {
        let block = Block {
            rows: vec![[0.0; 64]; HIDDEN],
            hidden_biases: vec![0.0; HIDDEN],
            columns: vec![[0.0; 64]; HIDDEN],
            biases: [0.0; 64],
        };
        Network {
            blocks: vec![block; BLOCKS],
            classes: vec![([0.0; 64], 0.0); 10],
        }
    }

    /// Adds the derivatives of one image, with the neurons of each block divided into so many parts, and returns its loss.
    fn add_gradient(
        &self,
        (image, label): &(Vec<f32>, usize),
        parts: usize,
        gradient: &mut Network,
    ) -> f32 {
        let mut passed: [f32; 64] = image.as_slice().try_into().unwrap();
        let mut kept = Vec::new();
        for block in &self.blocks {
            let mut hidden = Vec::new();
            let mut sums = vec![[0.0; 64]; parts];
            for neuron in 0..HIDDEN {
                let value = dot(block.hidden_biases[neuron], &passed, &block.rows[neuron]).max(0.0);
                add(
                    &mut sums[neuron / (HIDDEN / parts)],
                    value,
                    &block.columns[neuron],
                );
                hidden.push(value);
            }
            let sum = tree_sum(&sums);
            let output = std::array::from_fn(|at| passed[at] + (sum[at] + block.biases[at]));
            kept.push((passed, hidden));
            passed = output;
        }
        let outputs: Vec<f32> = self
            .classes
            .iter()
            .map(|(weights, bias)| dot(*bias, &passed, weights))
            .collect();
        let (of_classes, loss) = softmax(&outputs, *label);
        let mut deltas = [0.0; 64];
        for ((delta, (weights, _)), (gradient, bias)) in of_classes
            .iter()
            .zip(&self.classes)
            .zip(&mut gradient.classes)
        {
            add(&mut deltas, *delta, weights);
            add(gradient, *delta, &passed);
            *bias += delta;
        }
        for ((block, gradient), (input, hidden)) in
            self.blocks.iter().zip(&mut gradient.blocks).zip(kept).rev()
        {
            add(&mut gradient.biases, 1.0, &deltas);
            let mut sums = vec![[0.0; 64]; parts];
            for neuron in 0..HIDDEN {
                let delta = dot(0.0, &deltas, &block.columns[neuron]);
                let delta = if hidden[neuron] > 0.0 { delta } else { 0.0 };
                add(&mut gradient.columns[neuron], hidden[neuron], &deltas);
                add(&mut gradient.rows[neuron], delta, &input);
                gradient.hidden_biases[neuron] += delta;
                add(
                    &mut sums[neuron / (HIDDEN / parts)],
                    delta,
                    &block.rows[neuron],
                );
            }
            let sum = tree_sum(&sums);
            add(&mut deltas, 1.0, &sum);
        }
        loss
    }

    /// In the order of the program's files.
    fn flat(&mut self) -> Vec<&mut f32> {
        let mut all = Vec::new();
        for block in &mut self.blocks {
            for ((row, bias), column) in block
                .rows
                .iter_mut()
                .zip(&mut block.hidden_biases)
                .zip(&mut block.columns)
            {
                all.extend(row);
                all.push(bias);
                all.extend(column);
            }
            all.extend(&mut block.biases);
        }
        for (weights, bias) in &mut self.classes {
            all.extend(weights);
            all.push(bias);
        }
        all
    }
}

/// Losses and weights after some steps.
fn expected(training: &Images, steps: usize, parts: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut network, mut losses) = (Network::new(), Vec::new());
    let a_round = training.len() / BATCH;
    for step in 0..steps {
        let order = Numbers(2 + (step / a_round) as u64).shuffled(training.len());
        let (mut gradient, mut loss) = (Network::zeros(), 0.0);
        for image in &order[step % a_round * BATCH..][..BATCH] {
            loss += network.add_gradient(&training[*image], parts, &mut gradient);
        }
        losses.push(loss / BATCH as f32);
        for (weight, derivative) in network.flat().into_iter().zip(gradient.flat()) {
            *weight -= 0.05 / BATCH as f32 * *derivative;
        }
    }
    let weights = network.flat().into_iter().map(|weight| *weight).collect();
    (losses, weights)
}

/// Starts the program. Whether it has succeeded, and what it has written to stderr.
fn train(data: &Path, steps: usize, arguments: &[&str]) -> (bool, String) {
    train_under(Launcher::Itself, 0, data, steps, arguments)
}

fn train_under(
    launcher: Launcher,
    ranks: usize,
    data: &Path,
    steps: usize,
    arguments: &[&str],
) -> (bool, String) {
    let numbers = [steps, BLOCKS, HIDDEN, BATCH].map(|number| number.to_string());
    let mut all = vec![
        "--data",
        data.to_str().unwrap(),
        "--kernel-us",
        "0",
        "--steps",
        &numbers[0],
        "--blocks",
        &numbers[1],
    ];
    all.extend(["--hidden", &numbers[2], "--batch", &numbers[3]]);
    all.extend(arguments);
    let output = launcher.example(ranks, "pipeline_training", &all);
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Compares the next run of a file, and returns its last line.
fn compare<'a>(
    lines: &mut impl Iterator<Item = &'a str>,
    run: &str,
    (losses, weights): &(Vec<f32>, Vec<f32>),
) -> &'a str {
    assert_eq!(lines.next(), Some(run));
    assert_eq!(
        first_difference(&bits(lines, "losses"), losses),
        None,
        "{run}: losses"
    );
    assert_eq!(
        first_difference(&bits(lines, "weights"), weights),
        None,
        "{run}: weights"
    );
    lines.next().unwrap()
}

#[test]
fn divided_network_has_the_bits_of_one_process() {
    let Some(data) = digits("divided_network_has_the_bits_of_one_process") else {
        return;
    };
    let (training, _) = images(&data);
    let folder = crate::folder("pipeline_training");
    let steps = 60;
    let whole = expected(&training, steps, 1);
    assert!(
        whole.0[steps - 1] < 0.5 * whole.0[0],
        "the loss does not fall: {:?}",
        whole.0
    );
    let launchers = Launcher::all("divided_network_has_the_bits_of_one_process");
    let four = launchers.into_iter().map(|launcher| (launcher, 4));
    for (launcher, ranks) in [(Launcher::Itself, 2)].into_iter().chain(four) {
        let out = folder.join(format!("{ranks}-{launcher:?}.txt"));
        let arguments = [
            "--micro-batches",
            "1,2,8",
            "--ranks",
            &ranks.to_string(),
            "--out",
            out.to_str().unwrap(),
        ];
        let (is_success, error) = train_under(launcher, ranks, &data, steps, &arguments);
        assert!(is_success, "{error}");
        let text = std::fs::read_to_string(&out).unwrap();
        let mut lines = text.lines();
        for count in [1, 2, 8] {
            let kept = compare(&mut lines, &format!("1f1b {count}"), &whole);
            // A stage keeps no more micro-batches than there are stages from it to the end.
            assert_eq!(
                kept,
                format!("from 0 kept {}", count.min(ranks)),
                "{count} micro-batches"
            );
        }
        assert_eq!(compare(&mut lines, "gpipe 8", &whole), "from 0 kept 8");
        compare(&mut lines, "tensor 1", &expected(&training, steps, ranks));
        assert_eq!(lines.next(), None);
    }
}

#[test]
fn training_goes_on_without_a_killed_rank_and_after_a_new_start() {
    let Some(data) = digits("training_goes_on_without_a_killed_rank_and_after_a_new_start") else {
        return;
    };
    let (training, _) = images(&data);
    let folder = crate::folder("pipeline_checkpoint");
    let whole = expected(&training, 24, 1);
    let read = |out: &Path| std::fs::read_to_string(out).unwrap();
    let out = folder.join("out.txt");
    let common = [
        "--micro-batches",
        "4",
        "--every",
        "5",
        "--out",
        out.to_str().unwrap(),
    ];

    // Ranks 0, 1 and 3 go on by themselves.
    let checkpoint = folder.join("shrunk");
    let more = [
        "--checkpoint",
        checkpoint.to_str().unwrap(),
        "--kill",
        "2,13",
        "--on-loss",
        "shrink",
    ];
    let (is_success, error) = train(&data, 24, &[common, more].concat());
    assert!(is_success, "{error}");
    assert!(
        error.contains("goes on at step 10 as rank 2 of [0, 1, 3]"),
        "{error}"
    );
    assert_eq!(
        compare(&mut read(&out).lines(), "1f1b 4", &whole),
        "from 10 kept 3"
    );

    // The others end with an error that names the rank, and the same command without the failure goes on.
    let checkpoint = folder.join("started_again");
    let common = [
        common.as_slice(),
        &["--checkpoint", checkpoint.to_str().unwrap()],
    ]
    .concat();
    std::fs::remove_file(&out).unwrap();
    let (is_success, error) = train(
        &data,
        24,
        &[common.as_slice(), &["--kill", "1,13"]].concat(),
    );
    assert!(
        !is_success && error.contains("rank 1 of the group"),
        "{error}"
    );
    assert!(!out.exists());
    let (is_success, error) = train(&data, 24, &common);
    assert!(is_success, "{error}");
    assert_eq!(
        compare(&mut read(&out).lines(), "1f1b 4", &whole),
        "from 10 kept 4"
    );

    // Rank 0, which has the store of the group, and writes the results.
    std::fs::remove_dir_all(&checkpoint).unwrap();
    std::fs::remove_file(&out).unwrap();
    let killed = [common.as_slice(), &["--kill", "0,13"]].concat();
    let (is_success, error) = train(&data, 24, &killed);
    assert!(!is_success && error.contains("rank 0"), "{error}");
    assert!(!out.exists());
    let (is_success, error) = train(&data, 24, &common);
    assert!(is_success, "{error}");
    assert_eq!(
        compare(&mut read(&out).lines(), "1f1b 4", &whole),
        "from 10 kept 4"
    );
}

/// A rank is killed when the others have saved their weights of step 10, and it has not. Rank 0 must not say that this checkpoint is complete.
#[test]
fn checkpoint_that_a_rank_has_not_saved_is_not_gone_on_from() {
    let test = "checkpoint_that_a_rank_has_not_saved_is_not_gone_on_from";
    let Some(data) = digits(test) else {
        return;
    };
    let (training, _) = images(&data);
    let folder = crate::folder(test);
    let out = folder.join("out.txt");
    let arguments = "--micro-batches 4 --every 5 --kill 1,9 --kill-at save --on-loss shrink";
    let mut arguments: Vec<&str> = arguments.split(' ').collect();
    arguments.extend(["--checkpoint", folder.to_str().unwrap()]);
    arguments.extend(["--out", out.to_str().unwrap()]);
    let (is_success, error) = train(&data, 12, &arguments);
    assert!(is_success, "{error}");
    assert!(
        error.contains("goes on at step 5 as rank 1 of [0, 2, 3]"),
        "{error}"
    );
    let text = std::fs::read_to_string(&out).unwrap();
    let run = compare(&mut text.lines(), "1f1b 4", &expected(&training, 12, 1));
    assert_eq!(run, "from 5 kept 3");
}

/// What a power failure may lose shows only in the calls of the system: the names of files are durable when their folders are written behind them.
#[test]
fn folders_of_a_checkpoint_are_written_to_disk() {
    let test = "folders_of_a_checkpoint_are_written_to_disk";
    let Some(data) = digits(test) else {
        return;
    };
    let traced = [
        "-f",
        "-y",
        "-qq",
        "-e",
        "?rename,?renameat,?renameat2,fsync",
    ];
    let strace = |more: &[&str]| {
        let mut command = Command::new("strace");
        command.args(traced).args(more);
        command
    };
    let is_possible = strace(&["true"]).output();
    if !is_possible.is_ok_and(|output| output.status.success()) {
        return waived(test, "there is no strace that can trace");
    }
    // As the system names it.
    let folder = crate::folder(test).canonicalize().unwrap();
    let trace = folder.join("trace");
    let program = crate::program("pipeline_training");
    let mut command = strace(&["-o", trace.to_str().unwrap(), program.to_str().unwrap()]);
    command.args(["--data", data.to_str().unwrap()]);
    command.args("--ranks 2 --steps 1 --every 1 --kernel-us 0 --micro-batches 1".split(' '));
    command.args(["--checkpoint", folder.to_str().unwrap()]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    // The calls of each process, in their order.
    let text = std::fs::read_to_string(&trace).unwrap();
    let mut processes = BTreeMap::<&str, Vec<&str>>::new();
    for (process, call) in text.lines().filter_map(|line| line.split_once(' ')) {
        processes.entry(process).or_default().push(call.trim());
    }
    let step = folder.join("step-1");
    let is_write = |call: &str, of: &Path| {
        call.starts_with("fsync(") && call.contains(&format!("<{}>", of.display()))
    };
    let (mut saved, mut named) = (0, 0);
    for calls in processes.values() {
        let last_with = |name: &str| {
            let is_it = |call: &&str| call.starts_with("rename") && call.contains(name);
            calls.iter().rposition(is_it)
        };
        if let Some(last) = last_with("/block-") {
            let names = &calls[last..];
            let own = names.iter().position(|call| is_write(call, &step));
            let own = own.unwrap_or_else(|| panic!("{names:#?}"));
            let around = names[own..].iter().any(|call| is_write(call, &folder));
            assert!(around, "{names:#?}");
            saved += 1;
        }
        if let Some(last) = last_with("/latest") {
            let written = calls[last..].iter().any(|call| is_write(call, &folder));
            assert!(written, "{calls:#?}");
            named += 1;
        }
    }
    assert_eq!((saved, named), (2, 1), "{text}");
}

/// A checkpoint that is further than the steps of a run cannot be gone on from. One of as many steps is the end of the run.
#[test]
fn checkpoint_of_more_steps_is_refused() {
    let test = "checkpoint_of_more_steps_is_refused";
    let Some(data) = digits(test) else {
        return;
    };
    let checkpoint = crate::folder(test);
    let folder = checkpoint.to_str().unwrap();
    let arguments = ["--ranks", "2", "--every", "2", "--checkpoint", folder];
    for steps in [4, 4] {
        let (is_success, error) = train(&data, steps, &arguments);
        assert!(is_success, "{error}");
    }
    let (is_success, error) = train(&data, 2, &arguments);
    assert!(!is_success, "{error}");
    assert!(
        error.contains("has 4 steps, which are more than --steps 2"),
        "{error}"
    );
    assert!(!error.contains("panicked"), "{error}");
}

/// With one micro-batch the stages run one after the other, so three of four are idle, as the formula says. With eight they meet.
#[test]
fn stages_are_idle_as_the_schedule_predicts() {
    let test = "stages_are_idle_as_the_schedule_predicts";
    let Some(file) = digits(test) else {
        return;
    };
    let svg = crate::folder(test).join("pipeline.svg");
    let arguments = [
        "--data",
        file.to_str().unwrap(),
        "--method",
        "pipeline",
        "--ranks",
        "4",
    ];
    let more = [
        "--micro-batches",
        "1,8",
        "--steps",
        "4",
        "--kernel-us",
        "32000",
    ];
    let drawn = ["--svg", svg.to_str().unwrap()];
    let all = [&arguments[..], &more, &drawn].concat();
    let output = crate::example("pipeline_training", &all);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    // Idle and predicted, in percent.
    let idle = |schedule: &str, micro_batches: &str| -> [f64; 2] {
        let mut rows = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row[..].starts_with(&[schedule, micro_batches]));
        let row = row.unwrap_or_else(|| panic!("{text}"));
        let percent: Vec<f64> = (row.iter())
            .filter_map(|word| word.strip_suffix('%')?.parse().ok())
            .collect();
        [percent[0], percent[1]]
    };
    let [one, predicted] = idle("1f1b", "1");
    assert_eq!(predicted, 75.0, "{text}");
    // No two stages can run at once; the rest of the time goes to messages. The time of a rank ends with its own last kernel, so four steps have 73.3 % at least.
    assert!((73.0..100.0).contains(&one), "{text}");
    for schedule in ["1f1b", "gpipe"] {
        let [eight, predicted] = idle(schedule, "8");
        assert_eq!(predicted, 27.3, "{text}");
        assert!(eight < one, "{text}");
        // No schedule is idle for less; see above.
        assert!(eight >= 0.85 * predicted, "{text}");
    }
    let drawing = crate::Drawing::read(&svg);
    drawing.has_texts(&[
        "forward",
        "backward",
        "1f1b 1, rank 0",
        "1f1b 8, rank 3",
        "gpipe 8, rank 3",
    ]);
}
