//! On a real device, which the environment variable names: a card, or a software ConnectX behind a door.

use std::io::Write;
use std::ptr::NonNull;
use std::sync::Arc;

use super::call::injection::{ERRNO, alive, fail_after};
use super::{Device, Domain, MemoryRegion, QueuePair, QueuePairConfig};
use crate::soft::{Access, Attributes, Pages, State};
use crate::{Error, Result};

const CONFIG: QueuePairConfig = QueuePairConfig {
    send_wqebbs: 64,
    recv_wqes: 16,
    recv_segments: 4,
    send_cqes: 64,
    recv_cqes: 32,
};

/// The name of the device; if there is none, says so as tests/waived does.
fn device_name(test: &str) -> Option<String> {
    let name = std::env::var("DOORBELL_TEST_DEVICE")
        .ok()
        .filter(|name| name != "softcx");
    if name.is_none() {
        let line = format!("{test}: DOORBELL_TEST_DEVICE names no verbs device\n");
        let _ = std::io::stderr().write_all(format!("WAIVED: {line}").as_bytes());
        if let Some(log) = std::env::var_os("DOORBELL_WAIVED_LOG") {
            let file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(log);
            file.unwrap().write_all(line.as_bytes()).unwrap();
        }
    }
    name
}

/// Everything from the device list to a pair of connected queue pairs and back to RESET.
fn whole_life(name: &str) -> Result<()> {
    let device = Device::open(name)?.unwrap();
    let domain = Arc::new(Domain::new(&device)?);
    let pages = Pages::new(4096)?;
    let region = MemoryRegion::new(&domain, pages.start(), 4096, Access::ALL)?;
    let a = QueuePair::new(&domain, &CONFIG)?;
    let b = QueuePair::new(&domain, &CONFIG)?;
    for (one, other) in [(&a, &b), (&b, &a)] {
        one.init(Attributes::default())?;
        let made = one.connect(&other.local());
        if let Err(error) = made {
            assert_eq!(one.state(), State::Init, "{error}");
            return Err(error);
        }
    }
    for pair in [&a, &b] {
        pair.reset()?;
        assert_eq!(pair.state(), State::Reset);
    }
    assert!(region.deregister());
    assert!(!region.deregister());
    Ok(())
}

#[test]
fn every_call_that_fails_is_named_and_leaves_nothing_behind() {
    let Some(name) = device_name("every_call_that_fails_is_named_and_leaves_nothing_behind") else {
        return;
    };
    let mut named = Vec::new();
    for calls in 0..100 {
        fail_after(Some(calls));
        let result = whole_life(&name);
        let never_came = fail_after(None);
        assert_eq!(alive(), 0, "after {} calls: {result:?}", calls);
        match result {
            Ok(()) if never_came => break,
            // One of several addresses that could not be read.
            Ok(()) => {}
            Err(Error::System { operation, errno }) => {
                assert_eq!(errno, ERRNO, "{operation}");
                named.push(operation);
            }
            Err(other) => panic!("{other}"),
        }
    }
    fail_after(None);
    for call in [
        "ibv_get_device_list",
        "ibv_open_device",
        "ibv_query_device",
        "ibv_query_port",
        "ibv_query_gid_ex",
        "ibv_alloc_pd",
        "ibv_reg_mr",
        "ibv_create_cq",
        "ibv_alloc_td",
        "ibv_alloc_parent_domain",
        "mlx5dv_create_qp",
        "mlx5dv_init_obj",
        "ibv_modify_qp to INIT",
        "ibv_modify_qp to RTR",
        "ibv_modify_qp to RTS",
        "ibv_modify_qp to RESET",
    ] {
        assert!(named.contains(&call), "{call} is not among {named:?}");
    }
    whole_life(&name).unwrap();
}

#[test]
fn what_the_device_refuses_is_an_error_of_the_call_that_it_refused() {
    let Some(name) = device_name("what_the_device_refuses_is_an_error_of_the_call_that_it_refused")
    else {
        return;
    };
    assert!(Device::open("mlx5_77").unwrap().is_none());
    let device = Device::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let call = |result: Result<()>| match result {
        Err(Error::System { operation, errno }) => (operation, errno != 0),
        other => panic!("{other:?}"),
    };
    let nowhere = NonNull::new(std::ptr::without_provenance_mut(1 << 46)).unwrap();
    let unmapped = MemoryRegion::new(&domain, nowhere, 4096, Access::ALL);
    assert_eq!(call(unmapped.map(drop)), ("ibv_reg_mr", true));
    let too_long = QueuePair::new(
        &domain,
        &QueuePairConfig {
            send_wqebbs: 1 << 24,
            ..CONFIG
        },
    );
    assert_eq!(call(too_long.map(drop)), ("mlx5dv_create_qp", true));
    let too_many = QueuePair::new(
        &domain,
        &QueuePairConfig {
            recv_cqes: 1 << 30,
            ..CONFIG
        },
    );
    assert_eq!(call(too_many.map(drop)), ("ibv_create_cq", true));
    // And the domain is as good as before.
    QueuePair::new(&domain, &CONFIG).unwrap();
}

#[test]
fn each_queue_pair_has_a_register_of_its_own() {
    let Some(name) = device_name("each_queue_pair_has_a_register_of_its_own") else {
        return;
    };
    let device = Device::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let pairs: Vec<_> = (0..20)
        .map(|_| QueuePair::new(&domain, &CONFIG).unwrap())
        .collect();
    let mut registers: Vec<_> = pairs.iter().map(|pair| pair.queues().uar).collect();
    registers.sort_unstable();
    registers.dedup();
    assert_eq!(registers.len(), pairs.len());
}
