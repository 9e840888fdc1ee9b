//! The program of `examples/adopt.rs`, with its own objects of libibverbs, on the device that `DOORBELL_TEST_DEVICE` names.
#![cfg(all(feature = "verbs", not(loom)))]

#[allow(clippy::duplicate_mod)]
#[path = "../examples/adopt.rs"]
mod adopt;

#[test]
fn a_program_keeps_its_verbs_objects() {
    let device = std::env::var("DOORBELL_TEST_DEVICE").expect("a verbs device");
    let (name, rest) = device.split_once(',').unwrap_or((&device, ""));
    let kind = if name.starts_with("verbs") {
        "verbs"
    } else {
        "mlx5"
    };
    let settings = format!("{kind},{rest}");
    adopt::adopt(settings.trim_end_matches(',')).unwrap();
}
