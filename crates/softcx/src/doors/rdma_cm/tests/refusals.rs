//! What is refused, and what ends early.

use super::*;

#[test]
fn a_port_without_a_listener_is_an_invalid_service() {
    let options = fabric();
    let (client, other) = (Host::on(&options), Host::on(&options));
    other.listen(TCP, 1, 8);
    for ip in ["127.0.0.1".to_owned(), other.ip(), client.ip()] {
        let id = client.routed(TCP, &ip, 2);
        client.connect(id, b"").unwrap();
        assert_eq!(client.expect(REJECTED, id).status, 8, "{ip}");
        assert_eq!(client.destroy(id), Ok(3));
    }
    // The right port of a device without it.
    let third = Host::on(&options);
    let id = client.routed(TCP, &third.ip(), 1);
    client.connect(id, b"").unwrap();
    assert_eq!(client.expect(REJECTED, id).status, 8);
}

#[test]
fn a_rejection_has_its_reason_and_private_data() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    server.listen(TCP, 1, 8);
    for (asked, reason) in [(0, 28), (28, 28), (35, 35)] {
        let id = client.routed(TCP, &server.ip(), 1);
        client.connect(id, b"").unwrap();
        let (refused, _) = server.request();
        assert_eq!(server.reject(refused, 5, b""), Err(libc::EINVAL));
        server.reject(refused, asked, b"not today").unwrap();
        let event = client.expect(REJECTED, id);
        assert_eq!(event.status, reason);
        let param = connection_of(&event);
        assert_eq!(param.private_data_len, 148);
        assert!(param.private_data.starts_with(b"not today\0"));
        // Over for both.
        assert_eq!(server.reject(refused, 0, b""), Err(libc::EINVAL));
        assert_eq!(server.accept(refused, b""), Err(libc::EINVAL));
        assert_eq!(client.connect(id, b""), Err(libc::EINVAL));
        // Neither reaches the peer's next request.
        server.destroy(refused).unwrap();
        client.destroy(id).unwrap();
    }
}

#[test]
fn requests_that_nobody_takes_are_refused() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    let listener = server.listen(TCP, 1, 2);
    let ids: Vec<u32> = (0..3)
        .map(|_| {
            let id = client.routed(TCP, &server.ip(), 1);
            client.connect(id, b"").unwrap();
            id
        })
        .collect();
    // More than the backlog.
    assert_eq!(client.expect(REJECTED, ids[2]).status, 28);
    // One is read, and makes room for another one.
    let (read, _) = server.request();
    let late = client.routed(TCP, &server.ip(), 1);
    client.connect(late, b"").unwrap();
    while server.device.counters().packets_received < 4 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    // The listener ends, and with it the requests that were not read.
    assert_eq!(server.destroy(listener), Ok(1));
    let mut refused = [client.event(), client.event()];
    refused.sort_by_key(|event| event.id);
    assert_eq!(
        refused.map(|event| (event.event, event.id, event.status)),
        [(REJECTED, ids[1], 28), (REJECTED, late, 28)]
    );
    // The one that was read is still there.
    server.accept(read, b"").unwrap();
    client.expect(CONNECT_RESPONSE, ids[0]);
    assert_eq!(server.try_event(), Err(libc::EAGAIN));
}

#[test]
fn the_end_of_a_file_ends_its_connections() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    server.listen(TCP, 1, 8);
    let (id, _) = connected(&client, &server, &server.ip(), 1);
    let asking = client.routed(TCP, &server.ip(), 1);
    client.connect(asking, b"").unwrap();
    server.request();
    server.manager.close(server.opened.inode);
    let mut events = [client.event(), client.event()];
    events.sort_by_key(|event| event.id);
    let found = events.map(|event| (event.event, event.id, event.status));
    assert_eq!(found, [(DISCONNECTED, id, 0), (REJECTED, asking, 28)]);
    assert_eq!(server.try_event(), Err(libc::EIO));
}

#[test]
fn a_device_that_dies_in_silence_ends_its_connections() {
    let with_memory = |options: &DeviceOptions| !matches!(options.wire, WireKind::Udp(_));
    for options in fabrics().into_iter().filter(with_memory) {
        let (client, server) = (Host::on(&options), Host::on(&options));
        server.listen(TCP, 1, 8);
        let (id, _) = connected(&client, &server, &server.ip(), 1);
        // Nothing of it answers any more, and its place on the fabric is that of a process that was killed.
        server.device.set_frozen(true);
        let asking = client.routed(TCP, &server.ip(), 1);
        client.connect(asking, b"").unwrap();
        server.device.lock().fabric().unwrap().mark_dead();
        let mut events = [client.event(), client.event()];
        events.sort_by_key(|event| event.id);
        let found = events.map(|event| (event.event, event.id, event.status as i32));
        assert_eq!(
            found,
            [
                (DISCONNECTED, id, 0),
                (UNREACHABLE, asking, -libc::ETIMEDOUT)
            ]
        );
        if options.wire != WireKind::SharedMemory {
            // Its address may be that of another host.
            continue;
        }
        // Later ones find no device.
        let late = client.create(TCP);
        client.resolve(late, &server.ip(), 1).unwrap();
        let error = client.expect(ADDR_ERROR, late);
        assert_eq!(error.status as i32, -libc::EHOSTUNREACH);
    }
}

#[test]
fn unread_events_go_with_their_identifier() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    server.listen(TCP, 1, 8);
    let id = client.create(TCP);
    client.resolve(id, &server.ip(), 1).unwrap();
    let kept = client.create(TCP);
    client.resolve(kept, &server.ip(), 1).unwrap();
    assert_eq!(client.destroy(id), Ok(0));
    client.expect(ADDR_RESOLVED, kept);
    assert_eq!(client.try_event(), Err(libc::EAGAIN));
    // The number is used again.
    assert_eq!(client.create(TCP), id);
}

#[test]
fn a_second_accept_fails_and_refuses_the_peer() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    server.listen(TCP, 1, 8);
    let id = client.routed(TCP, &server.ip(), 1);
    client.connect(id, b"").unwrap();
    let (accepted, _) = server.request();
    server.accept(accepted, b"").unwrap();
    client.expect(CONNECT_RESPONSE, id);
    assert_eq!(server.accept(accepted, b""), Err(libc::EINVAL));
    assert_eq!(client.expect(REJECTED, id).status, 28);
    assert_eq!(client.take_reply(id), Err(libc::EINVAL));
    // Once established, a further accept changes nothing.
    let (id, accepted) = connected(&client, &server, &server.ip(), 1);
    assert_eq!(server.accept(accepted, b""), Err(libc::EINVAL));
    client.disconnect(id).unwrap();
    server.expect(DISCONNECTED, accepted);
}

#[test]
fn commands_in_the_wrong_state_are_invalid() {
    let host = Host::on(&fabric());
    let id = host.create(TCP);
    let route = |id| host.command(RESOLVE_ROUTE, CmResolveRoute { id, timeout_ms: 0 }, 0);
    let listen = |id| host.command(LISTEN, CmListen { id, backlog: 0 }, 0);
    let notify = |id| host.command(NOTIFY, CmNotify { id, event: 4 }, 0);
    assert_eq!(route(id), Err(libc::EINVAL));
    assert_eq!(host.connect(id, b""), Err(libc::EINVAL));
    assert_eq!(host.accept(id, b""), Err(libc::EINVAL));
    assert_eq!(host.reject(id, 0, b""), Err(libc::EINVAL));
    assert_eq!(host.disconnect(id), Err(libc::EINVAL));
    assert_eq!(notify(id), Err(libc::EINVAL));
    assert_eq!(host.attributes(id, 1), Err(libc::EINVAL));
    host.bind(id, "127.0.0.1", 0).unwrap();
    assert_eq!(host.bind(id, "127.0.0.1", 0), Err(libc::EINVAL));
    assert!(host.attributes(id, 1).is_ok());
    host.resolve(id, "127.0.0.1", 1).unwrap();
    host.expect(ADDR_RESOLVED, id);
    assert_eq!(host.resolve(id, "127.0.0.1", 1), Err(libc::EINVAL));
    assert_eq!(listen(id), Err(libc::EINVAL));
    assert_eq!(host.attributes(id, 7), Err(libc::EINVAL));
    assert!(host.attributes(id, 1).is_ok());
    let join = CmJoinMcast {
        id,
        addr_size: 16,
        addr: SocketAddress::of_ip("224.0.0.9".parse().unwrap(), 0).bytes(),
        ..CmJoinMcast::default()
    };
    // Not of an identifier for connections.
    assert_eq!(host.command(JOIN_MCAST, join, 4), Err(libc::EINVAL));
    route(id).unwrap();
    host.expect(ROUTE_RESOLVED, id);
    // 56 bytes of private data fit into a request.
    assert_eq!(host.connect(id, &[0; 57]), Err(libc::EINVAL));
    host.connect(id, &[0; 56]).unwrap();
    assert_eq!(host.connect(id, b""), Err(libc::EINVAL));
    let listener = host.create(TCP);
    listen(listener).unwrap();
    assert_eq!(listen(listener), Err(libc::EINVAL));
}

#[test]
fn addresses_and_ports_that_cannot_be_had_are_refused() {
    let host = Host::on(&fabric());
    let bind = |ip, port| host.bind(host.create(TCP), ip, port);
    assert_eq!(bind("192.0.2.77", 1), Err(libc::EADDRNOTAVAIL));
    assert_eq!(bind("fe80::1", 1), Err(libc::EINVAL));
    host.listen(TCP, 1, 1);
    assert_eq!(bind("0.0.0.0", 1), Err(libc::EADDRNOTAVAIL));
    assert_eq!(bind("127.0.0.1", 1), Err(libc::EADDRNOTAVAIL));
    host.listen(UDP, 1, 1);
    let id = host.create(TCP);
    host.resolve(id, "192.0.2.77", 1).unwrap();
    assert_eq!(host.expect(ADDR_ERROR, id).status as i32, -libc::ENODEV);
    let id = host.create(TCP);
    host.resolve(id, "127.0.0.9", 1).unwrap();
    let error = host.expect(ADDR_ERROR, id);
    assert_eq!(error.status as i32, -libc::EHOSTUNREACH);
    // After an error, the address is still bound, and another one may be resolved.
    host.resolve(id, "127.0.0.1", 1).unwrap();
    host.expect(ADDR_RESOLVED, id);
}

#[test]
fn identifiers_of_others_and_of_nobody_are_unknown() {
    let host = Host::on(&fabric());
    let id = host.create(TCP);
    let second = host.manager.open().unwrap();
    let bytes = [
        CmHeader {
            cmd: DISCONNECT,
            r#in: 4,
            out: 0,
        }
        .to_bytes(),
        CmDisconnect { id }.to_bytes(),
    ]
    .concat();
    let at = bytes.as_ptr().expose_provenance() as u64;
    let wrong = host.manager.write(second.inode, &host, at, 12);
    assert_eq!(wrong, Err(libc::EINVAL));
    assert_eq!(host.disconnect(77), Err(libc::ENOENT));
    assert_eq!(host.destroy(77), Err(libc::ENOENT));
}

#[test]
fn a_listener_takes_requests_of_its_family() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    let listen = |ip, port, only_family: Option<u32>| {
        let id = server.create(TCP);
        if let Some(only) = only_family {
            server.keep_to_family(id, only);
        }
        server.bind(id, ip, port).unwrap();
        server
            .command(LISTEN, CmListen { id, backlog: 8 }, 0)
            .unwrap();
    };
    let (four, six) = (server.ip(), Ipv6Addr::from(server.device.gid()).to_string());
    let reaches = |ip: &str, port| {
        let id = client.routed(TCP, ip, port);
        client.connect(id, b"").unwrap();
        let started = Instant::now();
        while started.elapsed() < SOON {
            match (server.try_event(), client.try_event()) {
                (Ok(event), _) => {
                    assert_eq!(event.event, CONNECT_REQUEST);
                    server.reject(event.id, 0, b"").unwrap();
                    client.expect(REJECTED, id);
                    return Some(event.uid);
                }
                (_, Ok(event)) => {
                    assert_eq!((event.event, event.status), (REJECTED, 8));
                    return None;
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        panic!("no event");
    };
    // IPv4 addresses, also the wildcard address, are for IPv4.
    listen("0.0.0.0", 1, None);
    assert!(reaches(&four, 1).is_some());
    assert_eq!(reaches(&six, 1), None);
    // The wildcard address of IPv6 is for both, unless the process wants IPv6 only.
    listen("::", 2, None);
    assert!(reaches(&four, 2).is_some());
    assert!(reaches(&six, 2).is_some());
    listen("::", 3, Some(1));
    assert_eq!(reaches(&four, 3), None);
    assert!(reaches(&six, 3).is_some());
    // Beside each other, each has its own.
    listen("0.0.0.0", 3, None);
    assert_ne!(reaches(&four, 3), reaches(&six, 3));
    // A process may also open its IPv4 listener to both.
    listen("0.0.0.0", 4, Some(0));
    assert!(reaches(&six, 4).is_some());
}

/// As `rdma_set_ack_timeout`: only a reliable connection has acknowledgements.
#[test]
fn ack_timeout_is_for_reliable_connections() {
    const IB: u16 = 0x013f;
    const ACK_TIMEOUT: u32 = 3;
    let host = Host::on(&fabric());
    for (qp_type, expected) in [(2, Ok(())), (3, Err(libc::EINVAL)), (4, Err(libc::EINVAL))] {
        let made: Result<CmCreateIdResp, Errno> = host.ask(CREATE_ID, |response| CmCreateId {
            response,
            ps: IB,
            qp_type,
            ..CmCreateId::default()
        });
        let timeout = 14_u8;
        let request = CmSetOption {
            optval: (&raw const timeout).expose_provenance() as u64,
            id: made.unwrap().id,
            level: 0,
            optname: ACK_TIMEOUT,
            optlen: 1,
        };
        let done = host.command(SET_OPTION, request, 0);
        assert_eq!(done, expected, "{qp_type}");
    }
}
