//! Messages of a peer that is no connection manager of this project: which exchange each of them is taken for.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use super::*;
use crate::device::management::{MAD_BYTES, MadQueue};
use crate::doors::rdma_cm::id::ExchangeState;
use crate::doors::rdma_cm::mad::{
    ConnectionReply, ConnectionRequest, REP_PRIVATE, REQ_PRIVATE, about,
};
use crate::doors::rdma_cm::messages::write_ip_header;

const PORT: u16 = 18515;

/// A device whose connection manager is the test.
struct Peer {
    device: Device,
    mads: Arc<MadQueue>,
    guid: u64,
    /// Messages that have arrived.
    arrived: RefCell<VecDeque<(Vec<u8>, CmMessage)>>,
    /// Those that the test has had.
    known: RefCell<HashSet<Vec<u8>>>,
}

impl Peer {
    fn on(options: &DeviceOptions, guid: u64) -> Peer {
        let device = Device::on_fabric(options).unwrap();
        let mads = device.mads();
        mads.open();
        Peer {
            device,
            mads,
            guid,
            arrived: RefCell::default(),
            known: RefCell::default(),
        }
    }

    fn send(&self, to: &Host, message: &CmMessage) {
        let mut table = to.manager.shared.lock();
        table.on_message(self.device.mad_port(), 7, message);
    }

    /// The next message to it, if one comes before the time is over. MRAs are left out: they change nothing but timers.
    fn next_within(&self, limit: Duration) -> Option<(Vec<u8>, CmMessage)> {
        let started = Instant::now();
        let mut arrived = self.arrived.borrow_mut();
        while arrived.is_empty() && started.elapsed() < limit {
            let mads = self.mads.wait(Some(Duration::from_millis(10)));
            let messages = mads.iter().filter_map(|(_, mad)| {
                let (_, message) = CmMessage::parse(mad)?;
                Some((mad.to_vec(), message))
            });
            arrived.extend(messages.filter(|(_, it)| !matches!(it, CmMessage::Received { .. })));
        }
        arrived.pop_front()
    }

    /// The next message that is no repetition: on a busy machine more than 128 ms may pass before an answer.
    fn next(&self) -> (Vec<u8>, CmMessage) {
        loop {
            let (mad, message) = self.next_within(SOON).expect("no message");
            if self.known.borrow_mut().insert(mad.clone()) {
                return (mad, message);
            }
        }
    }

    /// Whether nothing comes but repetitions.
    fn hears_nothing(&self) -> bool {
        while let Some((mad, _)) = self.next_within(Duration::from_millis(60)) {
            if !self.known.borrow().contains(&mad) {
                return false;
            }
        }
        true
    }

    fn ip(&self) -> String {
        ip_of(&self.device)
    }

    fn request(&self, host: &Host, local_id: u32, qpn: u32) -> CmMessage {
        let [own, there] =
            [self.ip(), host.ip()].map(|ip| SocketAddress::of_ip(ip.parse().unwrap(), PORT));
        let header = write_ip_header(&own, &there).unwrap();
        let mut private_data = [0; REQ_PRIVATE];
        private_data[..header.len()].copy_from_slice(&header);
        CmMessage::Request(ConnectionRequest {
            local_id,
            service: u64::from(TCP) << 16 | u64::from(PORT),
            guid: self.guid,
            qpn,
            responder_resources: 1,
            initiator_depth: 1,
            transport: 0,
            flow_control: false,
            psn: 9,
            retry_count: 7,
            rnr_retry_count: 7,
            pkey: 0xffff,
            mtu: 3,
            srq: false,
            lids: [0; 2],
            gids: [[0; 16]; 2],
            traffic_class: 0,
            hop_limit: 64,
            sl: 0,
            ack_timeout: 20,
            private_data,
        })
    }

    fn reply(&self, local_id: u32, remote_id: u32, qpn: u32) -> CmMessage {
        CmMessage::Reply(ConnectionReply {
            local_id,
            remote_id,
            qpn,
            psn: 5,
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: false,
            rnr_retry_count: 7,
            srq: false,
            guid: self.guid,
            private_data: [0; REP_PRIVATE],
        })
    }

    /// A connection that it asks for: the identifier of the host, and the number of the host's exchange.
    fn connected(&self, host: &Host, local_id: u32, qpn: u32) -> (u32, u32) {
        self.send(host, &self.request(host, local_id, qpn));
        let (id, _) = host.request();
        host.accept(id, b"").unwrap();
        let (_, CmMessage::Reply(reply)) = self.next() else {
            panic!("no reply");
        };
        assert_eq!(reply.remote_id, local_id);
        let number = reply.local_id;
        self.send(host, &ready(local_id, number));
        host.expect(ESTABLISHED, id);
        (id, number)
    }
}

fn ready(local_id: u32, remote_id: u32) -> CmMessage {
    CmMessage::ReadyToUse {
        local_id,
        remote_id,
    }
}

fn disconnect(local_id: u32, remote_id: u32, qpn: u32) -> CmMessage {
    CmMessage::DisconnectRequest {
        local_id,
        remote_id,
        qpn,
    }
}

fn disconnected(local_id: u32, remote_id: u32) -> CmMessage {
    CmMessage::DisconnectReply {
        local_id,
        remote_id,
    }
}

impl Host {
    fn exchange_state(&self, id: u32) -> ExchangeState {
        self.manager.shared.lock().ids[&id].exchange.state
    }
}

/// Reasons of rejections.
const TIMEOUT: u16 = 4;
const STALE_CONNECTION: u16 = 10;
const CONSUMER_DEFINED: u16 = 28;

/// A rejection as a kernel writes it (`cm_format_rej`), with the GUID as additional information.
fn rejection(ids: [u32; 2], about: u8, reason: u16, guid: Option<u64>) -> CmMessage {
    let mut mad = [0; MAD_BYTES];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[16..18].copy_from_slice(&[0, 0x12]);
    mad[24..28].copy_from_slice(&ids[0].to_be_bytes());
    mad[28..32].copy_from_slice(&ids[1].to_be_bytes());
    mad[32] = about << 6;
    mad[34..36].copy_from_slice(&reason.to_be_bytes());
    if let Some(guid) = guid {
        mad[33] = 8 << 1;
        mad[36..44].copy_from_slice(&guid.to_be_bytes());
    }
    CmMessage::parse(&mad).unwrap().1
}

#[test]
fn the_rejection_of_a_request_that_is_given_up_names_its_sender() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 1));
    let id = host.routed(TCP, &peer.ip(), PORT);
    host.connect(id, b"").unwrap();
    let (_, CmMessage::Request(request)) = peer.next() else {
        panic!("no request");
    };
    host.destroy(id).unwrap();
    let (mad, CmMessage::Reject(rejection)) = peer.next() else {
        panic!("no rejection");
    };
    let ids = [rejection.local_id, rejection.remote_id];
    assert_eq!(ids, [request.local_id, 0]);
    assert_eq!(rejection.reason, TIMEOUT);
    // Eight bytes of additional information, which a kernel looks the request up by (`cm_acquire_rejected_id`).
    assert_eq!(mad[33], 8 << 1);
    assert_eq!(mad[36..44], request.guid.to_be_bytes());
    assert_ne!(request.guid, 0);
}

#[test]
fn a_request_is_over_when_its_sender_gives_it_up() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 0x77));
    host.listen(TCP, PORT, 8);
    peer.send(&host, &peer.request(&host, 40, 0x100));
    let (id, _) = host.request();
    for (local_id, guid) in [(40, Some(0x78)), (40, None), (41, Some(0x77))] {
        peer.send(
            &host,
            &rejection([local_id, 0], about::OTHER, TIMEOUT, guid),
        );
        assert_eq!(host.exchange_state(id), ExchangeState::RequestReceived);
    }
    peer.send(
        &host,
        &rejection([40, 0], about::OTHER, TIMEOUT, Some(0x77)),
    );
    assert_eq!(host.exchange_state(id), ExchangeState::Idle);
}

#[test]
fn a_request_of_a_connection_that_has_ended_is_refused_as_stale() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 0x77));
    host.listen(TCP, PORT, 8);
    let (id, number) = peer.connected(&host, 40, 0x100);
    peer.send(&host, &disconnect(40, number, accepting_qpn(id)));
    host.expect(DISCONNECTED, id);
    host.disconnect(id).unwrap();
    let reply = CmMessage::DisconnectReply {
        local_id: number,
        remote_id: 40,
    };
    assert_eq!(peer.next().1, reply);
    peer.send(&host, &peer.request(&host, 40, 0x100));
    let (_, CmMessage::Reject(refused)) = peer.next() else {
        panic!("no rejection");
    };
    assert_eq!(
        (refused.remote_id, refused.about, refused.reason),
        (40, about::REQ, STALE_CONNECTION)
    );
    assert_eq!(host.exchange_state(id), ExchangeState::TimeWait);
    assert_eq!(host.try_event(), Err(libc::EAGAIN));
}

#[test]
fn a_request_from_the_queue_pair_of_a_connection_ends_that_connection() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 0x77));
    host.listen(TCP, PORT, 8);
    let (id, number) = peer.connected(&host, 40, 0x100);
    // The same queue pair of another device.
    let other = Peer::on(&options, 0x78);
    let (third, _) = other.connected(&host, 40, 0x100);
    // The peer was killed, and started again.
    peer.send(&host, &peer.request(&host, 50, 0x100));
    let (_, CmMessage::Reject(refused)) = peer.next() else {
        panic!("no rejection");
    };
    assert_eq!([refused.local_id, refused.remote_id], [0, 50]);
    assert_eq!(
        (refused.about, refused.reason),
        (about::REQ, STALE_CONNECTION)
    );
    assert_eq!(peer.next().1, disconnect(number, 40, 0x100));
    // It does not know the connection.
    peer.send(&host, &disconnected(40, number));
    host.expect(DISCONNECTED, id);
    let (again, _) = peer.connected(&host, 60, 0x100);
    for id in [third, again] {
        assert_eq!(host.exchange_state(id), ExchangeState::Established);
    }
}

#[test]
fn a_host_that_gives_the_queue_pair_of_another_host_ends_no_connection() {
    for options in fabrics() {
        let [host, asked] = [(); 2].map(|()| Host::on(&options));
        let (peer, third) = (Peer::on(&options, 0x77), Peer::on(&options, 0x77));
        for host in [&host, &asked] {
            host.listen(TCP, PORT, 8);
        }
        let (id, _) = peer.connected(&host, 40, 0x100);
        // The other host's request is one like any other.
        let (other, _) = third.connected(&host, 50, 0x100);
        for id in [id, other] {
            assert_eq!(host.exchange_state(id), ExchangeState::Established);
        }
        // And so is its reply.
        let (id, number) = peer.connected(&asked, 40, 0x100);
        let own = asked.routed(TCP, &third.ip(), PORT);
        asked.connect(own, b"").unwrap();
        let (_, CmMessage::Request(request)) = third.next() else {
            panic!("no request");
        };
        third.send(&asked, &third.reply(60, request.local_id, 0x100));
        asked.expect(CONNECT_RESPONSE, own);
        assert_eq!(asked.exchange_state(id), ExchangeState::Established);
        assert!(peer.hears_nothing());
        // What the first host knows nothing of any more is over as before.
        peer.send(&asked, &peer.request(&asked, 70, 0x100));
        let (_, CmMessage::Reject(refused)) = peer.next() else {
            panic!("no rejection");
        };
        assert_eq!(refused.reason, STALE_CONNECTION);
        assert_eq!(peer.next().1, disconnect(number, 40, 0x100));
    }
}

#[test]
fn a_reply_from_the_queue_pair_of_a_connection_ends_that_connection() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 0x77));
    let connect = || {
        let id = host.routed(TCP, &peer.ip(), PORT);
        host.connect(id, b"").unwrap();
        let (_, CmMessage::Request(request)) = peer.next() else {
            panic!("no request");
        };
        (id, request.local_id, request.qpn)
    };
    let (first, number, _) = connect();
    peer.send(&host, &peer.reply(40, number, 0x200));
    host.expect(CONNECT_RESPONSE, first);
    host.take_reply(first).unwrap();
    assert_eq!(peer.next().1, ready(number, 40));
    let (second, later, _) = connect();
    peer.send(&host, &peer.reply(41, later, 0x200));
    let (_, CmMessage::Reject(refused)) = peer.next() else {
        panic!("no rejection");
    };
    assert_eq!([refused.local_id, refused.remote_id], [later, 41]);
    assert_eq!(
        (refused.about, refused.reason),
        (about::REP, STALE_CONNECTION)
    );
    assert_eq!(peer.next().1, disconnect(number, 40, 0x200));
    assert_eq!(host.exchange_state(second), ExchangeState::RequestSent);
    assert_eq!(host.exchange_state(first), ExchangeState::DisconnectSent);
}

#[test]
fn messages_of_another_exchange_change_nothing() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 0x77));
    host.listen(TCP, PORT, 8);
    peer.send(&host, &peer.request(&host, 40, 0x100));
    let (id, _) = host.request();
    host.accept(id, b"").unwrap();
    let (_, CmMessage::Reply(reply)) = peer.next() else {
        panic!("no reply");
    };
    let number = reply.local_id;
    peer.send(&host, &ready(39, number));
    peer.send(
        &host,
        &rejection([39, number], about::OTHER, CONSUMER_DEFINED, None),
    );
    assert_eq!(host.exchange_state(id), ExchangeState::ReplySent);
    peer.send(&host, &ready(40, number));
    host.expect(ESTABLISHED, id);
    // The end of another exchange is confirmed, since this side has none.
    peer.send(&host, &disconnect(39, number, accepting_qpn(id)));
    assert_eq!(peer.next().1, disconnected(number, 39));
    // And one for another queue pair is not.
    peer.send(&host, &disconnect(40, number, accepting_qpn(id) + 1));
    assert!(peer.hears_nothing());
    assert_eq!(host.exchange_state(id), ExchangeState::Established);
    host.disconnect(id).unwrap();
    assert_eq!(peer.next().1, disconnect(number, 40, 0x100));
    peer.send(&host, &disconnected(39, number));
    assert_eq!(host.exchange_state(id), ExchangeState::DisconnectSent);
    assert_eq!(host.try_event(), Err(libc::EAGAIN));
    peer.send(&host, &disconnected(40, number));
    host.expect(DISCONNECTED, id);
}

#[test]
fn a_connection_that_the_peer_does_not_know_is_over() {
    let options = fabric();
    let (host, peer) = (Host::on(&options), Peer::on(&options, 0x77));
    host.listen(TCP, PORT, 8);
    let (id, number) = peer.connected(&host, 40, 0x100);
    host.disconnect(id).unwrap();
    assert_eq!(peer.next().1, disconnect(number, 40, 0x100));
    let refused = rejection([40, number], about::OTHER, CONSUMER_DEFINED, None);
    peer.send(&host, &refused);
    assert_eq!(host.exchange_state(id), ExchangeState::TimeWait);
    assert_eq!(host.expect(REJECTED, id).status, 28);
    // What was repeated before the rejection came. Behind it nothing is.
    while peer.next_within(Duration::from_millis(20)).is_some() {}
    std::thread::sleep(Duration::from_millis(200));
    assert!(peer.next_within(Duration::from_millis(60)).is_none());
}
