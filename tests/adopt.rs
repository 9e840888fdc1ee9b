//! The program of `examples/adopt.rs`, with its own objects of libibverbs, on the first verbs device, used as `DOORBELL_TEST_DEVICE` says.
#![cfg(all(feature = "verbs", not(loom)))]

#[allow(clippy::duplicate_mod)]
#[path = "../examples/adopt.rs"]
mod adopt;
mod waived;

use waived::waived;

#[test]
fn a_program_keeps_its_verbs_objects() {
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    if device.is_empty() || device.starts_with("softcx") {
        return waived("adopt", "DOORBELL_TEST_DEVICE names no verbs device");
    }
    let (name, rest) = device.split_once(',').unwrap_or((&device, ""));
    let kind = if name.starts_with("verbs") {
        "verbs"
    } else {
        "mlx5"
    };
    let settings = format!("{kind},{rest}");
    adopt::adopt(settings.trim_end_matches(',')).unwrap();
}
