//! Connections that come about, and their end.

use super::*;

#[test]
fn a_connection_carries_private_data_and_the_attributes_of_both_queue_pairs() {
    for options in fabrics() {
        let (client, server) = (Host::on(&options), Host::on(&options));
        server.listen(TCP, 7174, 8);
        // By the address of this host, which any device of the fabric may have: the other device has the service. On UDP a device has one address.
        let ip = match options.wire {
            WireKind::SharedMemory => "127.0.0.1".into(),
            _ => server.ip(),
        };
        let id = client.routed(TCP, &ip, 7174);
        assert_eq!(client.attributes(id, 2), client.attributes(id, 2));
        client.connect(id, b"hello").unwrap();
        let asked_psn = client.sent_psn(id);
        let (accepted, event) = server.request();
        let asked = connection_of(&event);
        assert_eq!(asked.qp_num, asking_qpn(id));
        assert_eq!(asked.private_data_len, 56);
        assert!(asked.private_data.starts_with(b"hello\0"));
        // What one side answers the other may ask.
        assert_eq!((asked.responder_resources, asked.initiator_depth), (5, 3));
        let theirs = server.attributes(accepted, 2).unwrap();
        assert_eq!((theirs.dest_qp_num, theirs.path_mtu), (asking_qpn(id), 5));
        assert_eq!(theirs.max_dest_rd_atomic, 5);
        server.accept(accepted, b"welcome").unwrap();
        let reply = connection_of(&client.expect(CONNECT_RESPONSE, id));
        assert_eq!(
            (reply.qp_num, reply.private_data_len),
            (accepting_qpn(accepted), 196)
        );
        assert!(reply.private_data.starts_with(b"welcome\0"));
        let (init, ready) = (client.attributes(id, 1), client.attributes(id, 2));
        let (init, ready) = (init.unwrap(), ready.unwrap());
        assert_eq!(init.qp_access_flags, 0b1110);
        assert_eq!(
            (ready.dest_qp_num, ready.rq_psn),
            (accepting_qpn(accepted), {
                server.attributes(accepted, 3).unwrap().sq_psn
            })
        );
        match options.link {
            LinkLayer::InfiniBand => assert_eq!(ready.ah_attr.dlid, server.device.lid()),
            LinkLayer::Ethernet => {
                let (grh, gid) = (ready.ah_attr.grh, server.device.gid());
                assert_eq!((ready.ah_attr.is_global, grh.dgid), (1, gid));
            }
        }
        // A request says what its sender receives first (the kernel's `cm_format_req`: `rq_psn`).
        assert_eq!(ready.rq_psn, asked_psn);
        let sends = client.attributes(id, 3).unwrap();
        assert_eq!((sends.retry_cnt, sends.rnr_retry), (7, 6));
        assert_eq!(server.attributes(accepted, 2).unwrap().rq_psn, sends.sq_psn);
        client.take_reply(id).unwrap();
        server.expect(ESTABLISHED, accepted);
        // The orderly end.
        client.disconnect(id).unwrap();
        server.expect(DISCONNECTED, accepted);
        server.disconnect(accepted).unwrap();
        client.expect(DISCONNECTED, id);
        client.expect(TIMEWAIT_EXIT, id);
        server.expect(TIMEWAIT_EXIT, accepted);
        assert_eq!(client.destroy(id), Ok(5));
        assert_eq!(server.destroy(accepted), Ok(3));
    }
}

#[test]
fn connections_come_about_and_end_though_messages_are_lost() {
    for options in fabrics() {
        let (client, server) = (
            Host::with_loss(&options, 0.2, 5),
            Host::with_loss(&options, 0.2, 6),
        );
        server.listen(TCP, 9, 64);
        for _ in 0..4 {
            let (id, accepted) = connected(&client, &server, &server.ip(), 9);
            server.disconnect(accepted).unwrap();
            client.expect(DISCONNECTED, id);
            client.disconnect(id).unwrap();
            server.expect(DISCONNECTED, accepted);
            client.destroy(id).unwrap();
            server.destroy(accepted).unwrap();
        }
    }
}

#[test]
fn a_process_connects_to_its_own_device() {
    let host = Host::on(&fabric());
    host.listen(TCP, 5, 1);
    let id = host.routed(TCP, "127.0.0.1", 5);
    host.connect(id, b"").unwrap();
    let (accepted, _) = host.request();
    host.accept(accepted, b"").unwrap();
    host.expect(CONNECT_RESPONSE, id);
    host.take_reply(id).unwrap();
    host.expect(ESTABLISHED, accepted);
    host.destroy(id).unwrap();
    host.expect(DISCONNECTED, accepted);
}

#[test]
fn a_datagram_service_says_where_its_queue_pair_is() {
    for options in fabrics() {
        let (client, server) = (Host::on(&options), Host::on(&options));
        server.listen(UDP, 7, 8);
        let id = client.routed(UDP, &server.ip(), 7);
        let made = client.attributes(id, 1).unwrap();
        assert_eq!((made.qkey, made.port_num), (0x0123_4567, 1));
        client.connect(id, b"where").unwrap();
        let (accepted, event) = server.request();
        let asked = datagram_of(&event);
        assert_eq!(asked.private_data_len, 180);
        assert!(asked.private_data.starts_with(b"where\0"));
        server.accept(accepted, b"here").unwrap();
        let found = datagram_of(&client.expect(ESTABLISHED, id));
        assert_eq!(
            (found.qp_num, found.qkey),
            (accepting_qpn(accepted), 0x0123_4567)
        );
        assert!(found.private_data.starts_with(b"here\0"));
        match options.link {
            LinkLayer::InfiniBand => assert_eq!(found.ah_attr.dlid, server.device.lid()),
            LinkLayer::Ethernet => assert_eq!(found.ah_attr.grh.dgid, server.device.gid()),
        }
        // Refused, and not there.
        let id = client.routed(UDP, &server.ip(), 7);
        client.connect(id, b"").unwrap();
        let (accepted, _) = server.request();
        server.reject(accepted, 0, b"no").unwrap();
        let refused = client.expect(UNREACHABLE, id);
        assert_eq!(refused.status, 2);
        assert!(datagram_of(&refused).private_data.starts_with(b"no\0"));
        let id = client.routed(UDP, &server.ip(), 8);
        client.connect(id, b"").unwrap();
        assert_eq!(client.expect(UNREACHABLE, id).status, 1);
    }
}

#[test]
fn an_identifier_takes_its_events_to_another_file() {
    let options = fabric();
    let (client, server) = (Host::on(&options), Host::on(&options));
    let listener = server.listen(TCP, 11, 8);
    let id = client.routed(TCP, &server.ip(), 11);
    client.connect(id, b"").unwrap();
    let second = OpenedFile::of(&server);
    while server.device.counters().packets_received == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    let moved = CmMigrate {
        to: &second,
        from: &server,
    };
    let request = |response| CmMigrateId {
        response,
        id: listener,
        fd: 0,
    };
    let read: CmMigrateResp = moved.ask(MIGRATE_ID, request).unwrap();
    assert_eq!(read.events_reported, 0);
    assert_eq!(server.try_event(), Err(libc::EAGAIN));
    assert_eq!(server.destroy(listener), Err(libc::EINVAL));
    let event: CmEventResp = moved
        .ask(GET_EVENT, |response| CmGetEvent { response })
        .unwrap();
    assert_eq!(event.event, CONNECT_REQUEST);
}

impl OpenedFile {
    fn of(host: &Host) -> OpenedFile {
        host.manager.open().unwrap()
    }
}

/// A process that writes to another file than that of its `from`, and means that one by its descriptors.
struct CmMigrate<'a> {
    to: &'a OpenedFile,
    from: &'a Host,
}

impl CmMigrate<'_> {
    fn ask<T: Layout, A: Layout>(
        &self,
        number: u32,
        request: impl FnOnce(u64) -> T,
    ) -> Result<A, Errno> {
        let mut answer = vec![0_u8; A::BYTES];
        let request = request(answer.as_mut_ptr().expose_provenance() as u64).to_bytes();
        let header = CmHeader {
            cmd: number,
            r#in: request.len() as u16,
            out: A::BYTES as u16,
        };
        let bytes = [header.to_bytes(), request].concat();
        let at = bytes.as_ptr().expose_provenance() as u64;
        let manager = &self.from.manager;
        manager.write(self.to.inode, self.from, at, bytes.len() as u64)?;
        Ok(A::read(&answer))
    }
}
