//! The network: blocks of two layers, and a last layer with the loss.

use crate::Options;
use crate::support::digits::{CLASSES, Digit, Digits, PIXELS, Random};

/// Two layers with a detour around them: y = x + B max(0, A x + a) + b. For each hidden neuron its row of A, its bias and its column of B; b at the end. So the part of a
/// rank is a range of neurons.
pub struct Block;

/// Numbers of a hidden neuron.
pub const NEURON: usize = 2 * PIXELS + 1;

impl Block {
    /// The contribution of some neurons to B max(0, A x + a) for each image, and their values.
    pub fn forward(neurons: &[f32], images: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut sums, mut hidden) = (vec![0.0; images.len()], Vec::new());
        for (image, sums) in images.chunks(PIXELS).zip(sums.chunks_mut(PIXELS)) {
            for neuron in neurons.chunks(NEURON) {
                let (row, rest) = neuron.split_at(PIXELS);
                let value = image
                    .iter()
                    .zip(row)
                    .fold(rest[0], |sum, (x, weight)| sum + x * weight)
                    .max(0.0);
                for (sum, weight) in sums.iter_mut().zip(&rest[1..]) {
                    *sum += value * weight;
                }
                hidden.push(value);
            }
        }
        (sums, hidden)
    }

    /// Adds the detour, once the contributions of all neurons are summed.
    pub fn output(images: &[f32], sums: &[f32], biases: &[f32]) -> Vec<f32> {
        let all = images.iter().zip(sums).zip(biases.iter().cycle());
        all.map(|((x, sum), bias)| x + (sum + bias)).collect()
    }

    /// Adds to the gradient of some neurons, and returns their contribution to the derivatives by the inputs.
    pub fn backward(
        neurons: &[f32],
        gradient: &mut [f32],
        images: &[f32],
        hidden: &[f32],
        deltas: &[f32],
    ) -> Vec<f32> {
        let mut below = vec![0.0; images.len()];
        let each = images.chunks(PIXELS).zip(deltas.chunks(PIXELS));
        let each = each
            .zip(hidden.chunks(neurons.len() / NEURON))
            .zip(below.chunks_mut(PIXELS));
        for (((image, deltas), hidden), below) in each {
            for ((neuron, gradient), value) in neurons
                .chunks(NEURON)
                .zip(gradient.chunks_mut(NEURON))
                .zip(hidden)
            {
                let sum = deltas
                    .iter()
                    .zip(&neuron[PIXELS + 1..])
                    .fold(0.0, |sum, (delta, weight)| sum + delta * weight);
                let delta = if *value > 0.0 { sum } else { 0.0 };
                for at in 0..PIXELS {
                    gradient[PIXELS + 1 + at] += value * deltas[at];
                    gradient[at] += delta * image[at];
                    below[at] += delta * neuron[at];
                }
                gradient[PIXELS] += delta;
            }
        }
        below
    }

    pub fn add_bias_gradient(gradient: &mut [f32], deltas: &[f32]) {
        for deltas in deltas.chunks(PIXELS) {
            for (sum, delta) in gradient.iter_mut().zip(deltas) {
                *sum += delta;
            }
        }
    }
}

/// Numbers of a class in the last layer: its weights and its bias.
pub const CLASS: usize = PIXELS + 1;

/// The last layer and the loss. Adds to the gradient, and to the loss image by image, and returns the derivatives by the inputs.
pub fn classify(
    head: &[f32],
    gradient: &mut [f32],
    loss: &mut f32,
    images: &[f32],
    labels: &[u8],
) -> Vec<f32> {
    let mut below = Vec::with_capacity(images.len());
    for (image, label) in images.chunks(PIXELS).zip(labels) {
        let outputs = outputs(head, image);
        let largest = outputs.iter().copied().fold(f32::MIN, f32::max);
        let powers: Vec<f32> = outputs
            .iter()
            .map(|output| (output - largest).exp())
            .collect();
        let sum: f32 = powers.iter().sum();
        *loss += sum.ln() - (outputs[usize::from(*label)] - largest);
        let mut deltas = [0.0; PIXELS];
        for (class, power) in powers.iter().enumerate() {
            let delta = power / sum - f32::from(class == usize::from(*label));
            let at = class * CLASS;
            for pixel in 0..PIXELS {
                deltas[pixel] += delta * head[at + pixel];
                gradient[at + pixel] += delta * image[pixel];
            }
            gradient[at + PIXELS] += delta;
        }
        below.extend(deltas);
    }
    below
}

pub fn outputs(head: &[f32], image: &[f32]) -> Vec<f32> {
    let of_class = |class: &[f32]| {
        image
            .iter()
            .zip(class)
            .fold(class[PIXELS], |sum, (x, weight)| sum + x * weight)
    };
    head.chunks(CLASS).map(of_class).collect()
}

/// All weights, and what a training has come to.
#[derive(Clone)]
pub struct Network {
    pub blocks: Vec<Vec<f32>>,
    pub head: Vec<f32>,
    pub losses: Vec<f32>,
}

impl Network {
    /// Before the first step: the same on every rank.
    pub fn new(options: &Options) -> Network {
        let mut random = Random(1);
        let (first, second) = (
            (3.0 / PIXELS as f32).sqrt(),
            0.5 * (3.0 / options.hidden as f32).sqrt(),
        );
        let mut block = || {
            let mut block = Vec::new();
            for _ in 0..options.hidden {
                block.extend((0..PIXELS).map(|_| random.weight() * first));
                block.push(0.0);
                block.extend((0..PIXELS).map(|_| random.weight() * second));
            }
            block.resize(block.len() + PIXELS, 0.0);
            block
        };
        let blocks = (0..options.blocks).map(|_| block()).collect();
        let mut head = Vec::new();
        for _ in 0..CLASSES {
            head.extend((0..PIXELS).map(|_| random.weight() * first));
            head.push(0.0);
        }
        Network {
            blocks,
            head,
            losses: Vec::new(),
        }
    }

    pub fn recognized(&self, digits: &Digits) -> usize {
        let is_right = |image: &&Digit| {
            let mut passed = image.pixels.to_vec();
            for block in &self.blocks {
                let (neurons, biases) = block.split_at(block.len() - PIXELS);
                passed = Block::output(&passed, &Block::forward(neurons, &passed).0, biases);
            }
            let outputs = outputs(&self.head, &passed);
            let answer = (0..CLASSES).max_by(|a, b| outputs[*a].total_cmp(&outputs[*b]));
            answer == Some(usize::from(image.label))
        };
        digits.held_out.iter().filter(is_right).count()
    }
}

/// The images of a step: the same on every rank, whatever step it begins with.
pub fn images_of(step: usize, options: &Options, digits: &Digits) -> Vec<usize> {
    let a_round = digits.training.len() / options.batch;
    let order = Random(2 + (step / a_round) as u64).order(digits.training.len());
    order[step % a_round * options.batch..][..options.batch].to_vec()
}

pub fn pixels(digits: &Digits, images: &[usize]) -> Vec<f32> {
    images
        .iter()
        .flat_map(|image| digits.training[*image].pixels)
        .collect()
}

pub fn labels(digits: &Digits, images: &[usize]) -> Vec<u8> {
    images
        .iter()
        .map(|image| digits.training[*image].label)
        .collect()
}

pub fn descend(weights: &mut [f32], gradient: &mut [f32], step: f32) {
    for (weight, derivative) in weights.iter_mut().zip(gradient) {
        *weight -= step * *derivative;
        *derivative = 0.0;
    }
}

pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub fn values_of(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}
