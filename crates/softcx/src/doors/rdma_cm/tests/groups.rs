//! Multicast groups.

use super::*;

fn join(host: &Host, id: u32, ip: &str) -> Result<u32, Errno> {
    let address = SocketAddress::of_ip(ip.parse().unwrap(), 0);
    let request = |response| CmJoinMcast {
        response,
        uid: 0x77,
        id,
        addr_size: address.len_bytes(),
        addr: address.bytes(),
        ..CmJoinMcast::default()
    };
    let joined: CmCreateIdResp = host.ask(JOIN_MCAST, request)?;
    Ok(joined.id)
}

fn leave(host: &Host, number: u32) -> Result<u32, Errno> {
    let request = |response| CmDestroyId {
        response,
        id: number,
        reserved: 0,
    };
    let answer: CmDestroyIdResp = host.ask(LEAVE_MCAST, request)?;
    Ok(answer.events_reported)
}

#[test]
fn a_group_is_joined_and_left() {
    let host = Host::on(&DeviceOptions {
        link: LinkLayer::Ethernet,
        ..fabric()
    });
    let id = host.create(UDP);
    assert_eq!(join(&host, id, "239.1.1.1"), Err(libc::EINVAL));
    host.bind(id, "127.0.0.1", 0).unwrap();
    assert_eq!(join(&host, id, "0.0.0.0"), Err(libc::EINVAL));
    for (ip, gid) in [("239.1.1.1", "::ffff:239.1.1.1"), ("ff0e::7", "ff0e::7")] {
        let joined = join(&host, id, ip).unwrap();
        let event = host.event();
        assert_eq!(
            (event.event, event.uid, event.id),
            (MULTICAST_JOIN, 0x77, joined)
        );
        assert_eq!(event.status, 0);
        let param = datagram_of(&event);
        let gid: std::net::Ipv6Addr = gid.parse().unwrap();
        assert_eq!(param.ah_attr.grh.dgid, gid.octets());
        assert_eq!((param.qp_num, param.qkey), (0xff_ffff, 0x0123_4567));
        assert_eq!((param.ah_attr.is_global, param.ah_attr.port_num), (1, 1));
        assert_eq!(leave(&host, joined), Ok(1));
        assert_eq!(leave(&host, joined), Err(libc::ENOENT));
    }
    // An event that was not read goes with its group.
    let older = |response| CmJoinIpMcast {
        response,
        uid: 0x78,
        id,
        addr: SocketAddress::of_ip("239.1.1.2".parse().unwrap(), 0).bytes(),
    };
    let joined: CmCreateIdResp = host.ask(JOIN_IP_MCAST, older).unwrap();
    assert_eq!(leave(&host, joined.id), Ok(0));
    assert_eq!(host.try_event().err(), Some(libc::EAGAIN));
    // As does a group with its identifier, which counts its events.
    let joined = join(&host, id, "239.1.1.3").unwrap();
    host.event();
    assert_eq!(host.destroy(id), Ok(3));
    assert_eq!(leave(&host, joined), Err(libc::ENOENT));
}

/// There is no subnet manager on InfiniBand, and members on other hosts would have to be told by IGMP.
#[test]
fn other_links_and_wires_have_no_groups() {
    for options in fabrics() {
        let host = Host::on(&options);
        let id = host.create(UDP);
        host.bind(id, &host.ip(), 0).unwrap();
        let joined = join(&host, id, "239.1.1.1");
        let has_groups =
            options.link == LinkLayer::Ethernet && options.wire == WireKind::SharedMemory;
        assert_eq!(joined.is_ok(), has_groups, "{options:?}");
        assert!(
            joined.is_ok() || joined == Err(libc::EOPNOTSUPP),
            "{options:?}"
        );
    }
}
