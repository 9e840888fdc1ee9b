//! On a real device, which the environment variable names: a card, or a software ConnectX behind a door.
#![allow(unsafe_code)] // asks libibverbs for the attributes of a queue pair

use std::io::Write;
use std::ptr::NonNull;
use std::sync::Arc;

use super::call::injection::{ERRNO, alive, fail_after, fail_deregistrations};
use super::qp_states::States;
use super::{Domain, MemoryRegion, Relay, VerbsDevice, VerbsQueuePair};
use crate::{Error, Result};
use doorbell_wire::memory::{Pages, QueuePairSizes};
use doorbell_wire::verbs::{Access, Attributes, Capacity, State, Transport};

const SIZES: QueuePairSizes = QueuePairSizes {
    send_wqebbs: 64,
    recv_wqes: 16,
    recv_stride_bytes: 64,
    cqes: [64, 32],
};

/// The name of the device; if there is none, says so as tests/waived does.
pub(super) fn device_name(test: &str) -> Option<String> {
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

pub(super) const RELAY: Capacity = Capacity {
    transport: Transport::Rc,
    send_depth: 48,
    recv_depth: 16,
    segments: 4,
    inline_bytes: 64,
};

/// A queue pair of either kind.
enum Made {
    Card(Box<VerbsQueuePair>),
    Relay(Box<Relay>),
}

impl Made {
    fn new(domain: &Arc<Domain>) -> Result<Made> {
        if domain.is_plain() {
            Ok(Made::Relay(Box::new(Relay::new(domain, &RELAY)?)))
        } else {
            Ok(Made::Card(Box::new(VerbsQueuePair::new(
                domain,
                Transport::Rc,
                &SIZES,
            )?)))
        }
    }

    fn states(&self) -> &States {
        match self {
            Made::Card(pair) => pair.states(),
            Made::Relay(relay) => relay.states(),
        }
    }

    fn connect(&self, other: &Made) -> Result<()> {
        match self {
            Made::Card(pair) => pair.states().connect(&other.states().local()),
            Made::Relay(relay) => relay.connect(&other.states().local()),
        }
    }

    fn reset(&self) -> Result<()> {
        match self {
            Made::Card(pair) => pair.states().reset(),
            Made::Relay(relay) => relay.reset(),
        }
    }
}

/// Everything from the device list to a pair of connected queue pairs and back to RESET.
fn whole_life(name: &str) -> Result<()> {
    let device = VerbsDevice::open(name)?.unwrap();
    let domain = Arc::new(Domain::new(&device)?);
    let pages = Pages::new(4096)?;
    let region = MemoryRegion::new(&domain, pages.start(), 4096, Access::ALL)?;
    let a = Made::new(&domain)?;
    let b = Made::new(&domain)?;
    for (one, other) in [(&a, &b), (&b, &a)] {
        one.states().init(Attributes::default())?;
        if let Err(error) = one.connect(other) {
            assert_eq!(one.states().state(), State::Init, "{error}");
            return Err(error);
        }
    }
    for pair in [&a, &b] {
        pair.reset()?;
        assert_eq!(pair.states().state(), State::Reset);
    }
    assert!(region.deregister()?);
    assert!(!region.deregister()?);
    Ok(())
}

/// A peer that has the key might write what the memory is used for next.
#[test]
fn memory_that_is_not_deregistered_is_given_to_nobody() {
    let Some(name) = device_name("memory_that_is_not_deregistered_is_given_to_nobody") else {
        return;
    };
    let device = VerbsDevice::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let mut seen = Vec::new();
    for fails in [false, true, false] {
        // A length that no other test asks for.
        let pages = Pages::new(11 * 4096).unwrap();
        seen.push(pages.start());
        let region = MemoryRegion::new(&domain, pages.start(), 11 * 4096, Access::ALL).unwrap();
        if fails {
            fail_deregistrations(2);
            let refused = region.deregister();
            assert!(
                matches!(
                    refused,
                    Err(Error::System {
                        operation: "ibv_dereg_mr",
                        ..
                    })
                ),
                "{refused:?}"
            );
        } else {
            assert_eq!(region.deregister(), Ok(true));
        }
    }
    assert_ne!(seen[2], seen[1]);
}

#[test]
fn every_call_that_fails_is_named_and_leaves_nothing_behind() {
    let Some(name) = device_name("every_call_that_fails_is_named_and_leaves_nothing_behind") else {
        return;
    };
    let plain = format!("verbs:{}", name.trim_start_matches("verbs:"));
    fails_at_every_call(&plain, &["ibv_create_cq", "ibv_create_qp"]);
    if name != plain {
        let calls = [
            "ibv_alloc_td",
            "ibv_alloc_parent_domain",
            "mlx5dv_create_cq",
            "mlx5dv_create_qp",
            "mlx5dv_init_obj",
        ];
        fails_at_every_call(&name, &calls);
    }
}

/// With these calls besides those that every device takes.
fn fails_at_every_call(name: &str, calls_of_its_own: &[&str]) {
    let mut named = Vec::new();
    for calls in 0..100 {
        fail_after(Some(calls));
        let result = whole_life(name);
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
        "ibv_modify_qp to INIT",
        "ibv_modify_qp to RTR",
        "ibv_modify_qp to RTS",
        "ibv_modify_qp to RESET",
    ]
    .iter()
    .chain(calls_of_its_own)
    {
        assert!(named.contains(call), "{call} is not among {named:?}");
    }
    whole_life(name).unwrap();
}

#[test]
fn what_the_device_refuses_is_an_error_of_the_call_that_it_refused() {
    let Some(name) = device_name("what_the_device_refuses_is_an_error_of_the_call_that_it_refused")
    else {
        return;
    };
    assert!(VerbsDevice::open("mlx5_77").unwrap().is_none());
    let device = VerbsDevice::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let call = |result: Result<()>| match result {
        Err(Error::System { operation, errno }) => (operation, errno != 0),
        other => panic!("{other:?}"),
    };
    let nowhere = NonNull::new(std::ptr::without_provenance_mut(1 << 46)).unwrap();
    let unmapped = MemoryRegion::new(&domain, nowhere, 4096, Access::ALL);
    assert_eq!(call(unmapped.map(drop)), ("ibv_reg_mr", true));
    let too_long = VerbsQueuePair::new(
        &domain,
        Transport::Rc,
        &QueuePairSizes {
            send_wqebbs: 1 << 24,
            ..SIZES
        },
    );
    assert_eq!(call(too_long.map(drop)), ("mlx5dv_create_qp", true));
    let too_many = VerbsQueuePair::new(
        &domain,
        Transport::Rc,
        &QueuePairSizes {
            cqes: [64, 1 << 30],
            ..SIZES
        },
    );
    assert_eq!(call(too_many.map(drop)), ("mlx5dv_create_cq", true));
    // And the domain is as good as before.
    VerbsQueuePair::new(&domain, Transport::Rc, &SIZES).unwrap();
}

#[test]
fn each_queue_pair_has_a_register_of_its_own() {
    let Some(name) = device_name("each_queue_pair_has_a_register_of_its_own") else {
        return;
    };
    let device = VerbsDevice::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let pairs: Vec<_> = (0..20)
        .map(|_| VerbsQueuePair::new(&domain, Transport::Rc, &SIZES).unwrap())
        .collect();
    let mut registers: Vec<_> = pairs.iter().map(|pair| pair.queues().uar).collect();
    registers.sort_unstable();
    registers.dedup();
    assert_eq!(registers.len(), pairs.len());
}

/// What the device says of a connected queue pair: level, class if its packets have a global route, and partition.
#[test]
fn packets_have_the_level_the_class_and_the_partition_that_were_asked_for() {
    let test = "packets_have_the_level_the_class_and_the_partition_that_were_asked_for";
    let Some(name) = device_name(test) else {
        return;
    };
    let device = VerbsDevice::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let [a, b] = [(); 2].map(|()| Made::new(&domain).unwrap());
    let asked = Attributes {
        service_level: 5,
        traffic_class: 0x68,
        ..Attributes::default()
    };
    let no_such_key = Attributes {
        pkey_index: u16::MAX,
        ..asked
    };
    let refused = a.states().init(no_such_key).unwrap_err();
    let operation = "ibv_modify_qp to INIT";
    let expected = Error::System {
        operation,
        errno: libc::EINVAL,
    };
    assert_eq!(refused, expected);
    a.states().init(asked).unwrap();
    b.states().init(asked).unwrap();
    a.connect(&b).unwrap();
    // SAFETY: both are plain data, for which zero is a value.
    let (mut attr, mut initial) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let mask =
        rdma_sys::ibv_qp_attr_mask::IBV_QP_AV | rdma_sys::ibv_qp_attr_mask::IBV_QP_PKEY_INDEX;
    // SAFETY: a live queue pair, and room for what is asked for.
    let found: rdma_sys::ibv_qp_attr = unsafe {
        let failed = rdma_sys::ibv_query_qp(
            a.states().raw().as_ptr(),
            &raw mut attr,
            mask.0.cast_signed(),
            &raw mut initial,
        );
        assert_eq!(failed, 0);
        attr
    };
    assert_eq!((found.ah_attr.sl, found.pkey_index), (5, 0));
    if found.ah_attr.is_global == 1 {
        assert_eq!(found.ah_attr.grh.traffic_class, 0x68);
    }
}

/// A port of which the address moves to another index, or goes, while endpoints live. The cells on Ethernet run with a device whose
/// address moves, 100 ms behind its start; on others it stays.
#[test]
fn a_queue_pair_connects_from_where_its_address_stands_by_then() {
    let Some(name) = device_name("a_queue_pair_connects_from_where_its_address_stands_by_then")
    else {
        return;
    };
    let device = VerbsDevice::open(&name).unwrap().unwrap();
    let domain = Arc::new(Domain::new(&device).unwrap());
    let [a, b, c, d] = std::array::from_fn(|_| Made::new(&domain).unwrap());
    let reported = a.states().local();
    std::thread::sleep(std::time::Duration::from_millis(300));
    for pair in [&a, &b, &c, &d] {
        pair.states().init(Attributes::default()).unwrap();
    }
    // One that has reported its address, and those that have not.
    for (one, other) in [(&a, &b), (&b, &a), (&c, &d), (&d, &c)] {
        one.connect(other).unwrap();
    }
    assert_eq!(a.states().local(), reported);
}
