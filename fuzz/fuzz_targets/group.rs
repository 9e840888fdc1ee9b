//! What ranks and the store of a group say to each other, and what launchers say of hosts.
#![no_main]

use doorbell::__private::Message;
use doorbell::{Error, LaunchEnvironment};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    loop {
        match Message::parse(rest) {
            Ok(Some((message, len))) => {
                // What is taken is written as the very bytes that it came from, and is never taken before it is whole.
                assert_eq!(
                    message.to_bytes().as_deref(),
                    Ok(&rest[..len]),
                    "{message:?}"
                );
                assert_eq!(Message::parse(&rest[..len - 1]), Ok(None), "{message:?}");
                if let Message::List { values, .. } = message {
                    let count = values.first().copied().unwrap_or_default().into();
                    if let Ok(split) = Message::split_list(values, count) {
                        let bytes: usize = split.iter().map(|value| 4 + value.len()).sum();
                        assert_eq!((split.len(), bytes), (count as usize, values.len()));
                    }
                }
                rest = &rest[len..];
            }
            Ok(None) => break,
            Err(error) => {
                assert!(matches!(error, Error::Malformed { .. }), "{error:?}");
                break;
            }
        }
    }
    if let Ok(text) = std::str::from_utf8(data) {
        let lookup = |name: &str| {
            Some(match name {
                "SLURM_PROCID" => "1".to_owned(),
                "SLURM_STEP_NUM_TASKS" => "2".to_owned(),
                "SLURM_STEP_NODELIST" => text.to_owned(),
                "SLURM_JOB_ID" => "3".to_owned(),
                _ => return None,
            })
        };
        match LaunchEnvironment::from_vars(&lookup) {
            Ok(place) => assert_eq!((place.rank(), place.size()), (1, 2)),
            Err(error) => assert!(
                matches!(error, Error::Malformed { .. } | Error::State { .. }),
                "{error:?}"
            ),
        }
    }
});
