"""Messages with tags, from any peer."""

import asyncio
import threading
import time

import doorbell
import pytest
from test_await import WithoutReaders, run_with

numpy = pytest.importorskip("numpy", reason="numpy is not installed")


class Peers:
    """Two matchers, of which each also has itself as a peer."""

    def __init__(self, config: doorbell.MatcherConfig | None = None) -> None:
        self.domain: doorbell.Domain = doorbell.Device().domain()
        self.queues: list[doorbell.MessageQueue] = [self.domain.message_queue() for _ in range(2)]
        a, b = self.queues
        a.connect(b.address)
        b.connect(a.address)
        self.first: doorbell.Matcher = doorbell.Matcher(self.domain, [None, a], config)
        self.second: doorbell.Matcher = doorbell.Matcher(self.domain, [b, None], config)


def test_arrays_go_to_the_receives_that_match(stream: doorbell.HostStream) -> None:
    peers = Peers()
    receiver = doorbell.HostStream("receiver")
    targets = [numpy.zeros(2000) for _ in range(3)]
    tagged = peers.second.recv(receiver, targets[0], peer=0, tag=7)
    masked = peers.second.recv(receiver, targets[1], tag=0x100, ignored=0xFF)
    anything: doorbell.MatchTicket = peers.second.recv(receiver, targets[2])
    arrays = [numpy.full(count, float(count)) for count in (3, 2000, 5)]
    peers.first.send_now(arrays[0], 1, 7, 30)
    pending = peers.first.start_send(stream, arrays[1], 1, 0x142)
    sent = peers.first.send(stream, [arrays[2]], peer=1, tag=9)
    assert peers.first.wait_send(stream, pending).wait(30) == 16000
    found: list[doorbell.Envelope] = [ticket.wait(30) for ticket in (tagged, masked, anything)]
    assert [(it.peer, it.tag, it.nbytes) for it in found] == [(0, 7, 24), (0, 0x142, 16000), (0, 9, 40)]
    assert sent.wait(30) == 40 and anything.done() and "tag 9" in repr(found[2])
    assert (targets[0][:3] == 3).all() and (targets[1] == 2000).all() and (targets[2][:5] == 5).all() and not targets[2][5:].any()
    assert peers.first.peer_count == 2 and peers.first.domain.device.name == "softcx" and peers.first.failure(1) is None
    peers.first.finish(30)
    # The queue belongs to the matcher.
    with pytest.raises(doorbell.StateError):
        peers.queues[0].send_now(b"not by the queue")


def test_threads_receive_and_probe() -> None:
    peers = Peers(doorbell.MatcherConfig(unexpected=8, receives=4, messages=doorbell.MessageConfig(slots=4)))
    assert peers.second.probe_now() is None
    posted = peers.first.start_send_now(b"hello", 1, 3, 30)
    peers.first.wait_send_now(posted, 30)
    peers.second.send_now(b"to myself", 1, 4, 30)
    into = bytearray(16)
    while (seen := peers.second.probe_now(peer=0)) is None:
        pass
    assert (seen.tag, seen.nbytes) == (3, 5)
    came = peers.second.recv_now(into, tag=4, timeout=30)
    assert (came.peer, came.nbytes) == (1, 9) and into[:9] == b"to myself"
    assert peers.second.recv_now(into, 0, 3).nbytes == 5 and into[:5] == b"hello"
    with pytest.raises(doorbell.TimeoutError):
        peers.second.recv_now(into, timeout=0.01)
    # The receive waits while another Python thread sends.
    threading.Timer(0.1, lambda: peers.first.send_now(b"late", 1, 5)).start()
    assert peers.second.recv_now(into, timeout=30).tag == 5


def test_a_receive_of_a_thread_keeps_its_place(stream: doorbell.HostStream) -> None:
    peers = Peers()
    into, later = bytearray(8), bytearray(8)
    found: list[doorbell.Envelope] = []
    thread = threading.Thread(target=lambda: found.append(peers.second.recv_now(into, timeout=30)))
    thread.start()
    # Longer than the call waits between two looks at signals.
    time.sleep(0.2)
    behind = peers.second.recv(stream, later)
    time.sleep(0.2)
    peers.first.send_now(b"first", 1, 1, 30)
    thread.join()
    assert [it.nbytes for it in found] == [5] and into[:5] == b"first" and not behind.done()
    peers.first.send_now(b"second", 1, 2, 30)
    assert behind.wait(30).tag == 2 and later[:6] == b"second"
    # A receive that has timed out takes no message.
    with pytest.raises(doorbell.TimeoutError):
        peers.second.recv_now(into, timeout=0.12)
    peers.first.send_now(b"third", 1, 3, 30)
    assert peers.second.recv_now(later, timeout=30).tag == 3


def test_a_receive_is_cancelled_or_awaited(stream: doorbell.HostStream) -> None:
    peers = Peers()
    held = peers.second.recv(stream, bytearray(8), tag=1)
    assert not held.done() and peers.second.cancel(held) and not peers.second.cancel(held)
    with pytest.raises(doorbell.StateError) as caught:
        held.wait(30)
    assert caught.value.kind == "Cancelled" and held.done()
    stream.synchronize(30) if stream.take_fault() is None else None
    other = doorbell.HostStream()
    target = bytearray(8)

    async def main() -> doorbell.Envelope:
        ticket = peers.second.recv(other, target)
        asyncio.get_running_loop().call_later(0.01, lambda: peers.first.send_now(b"awaited", 1, 2, 30))
        return await ticket

    assert asyncio.run(main()).tag == 2 and target == b"awaited\0"


def test_a_receive_that_ends_by_its_timeout_is_over(stream: doorbell.HostStream) -> None:
    endpoint = doorbell.EndpointConfig(wait_timeout=0.2)
    peers = Peers(doorbell.MatcherConfig(messages=doorbell.MessageConfig(endpoint=endpoint)))
    ticket = peers.second.recv(stream, bytearray(8), tag=1)
    begin = time.monotonic()
    with pytest.raises(doorbell.TimeoutError, match="a receive for a message"):
        ticket.wait()
    assert ticket.done() and time.monotonic() - begin < 20
    for loop in (asyncio.SelectorEventLoop, WithoutReaders):
        with pytest.raises(doorbell.TimeoutError):
            run_with(loop, asyncio.wait_for(awaited(ticket), 20))


async def awaited(ticket: doorbell.MatchTicket) -> None:
    await ticket


def test_a_peer_that_fails_is_named_and_excluded(stream: doorbell.HostStream) -> None:
    peers = Peers()
    waiting = peers.second.recv(stream, bytearray(8), peer=0)
    peers.queues[0].abort()
    peers.queues[1].abort()
    with pytest.raises(doorbell.PeerError) as caught:
        waiting.wait(30)
    assert caught.value.peer == 0 and caught.value.work.cause == "Aborted"
    failure = peers.second.failure(0)
    assert failure is not None and failure.cause == "Aborted"
    peers.second.exclude(0)
    peers.second.send_now(b"myself", 1, 1, 30)
    assert peers.second.recv_now(bytearray(8), timeout=30).peer == 1
    with pytest.raises(doorbell.RangeError):
        peers.second.exclude(2)
    with pytest.raises(doorbell.RangeError):
        doorbell.Matcher(peers.domain, [None], doorbell.MatcherConfig(receives=0))
    # What is refused takes no queue.
    a, b, apart = (peers.domain.message_queue() for _ in range(3))
    a.connect(b.address)
    b.connect(a.address)
    no_slots = doorbell.MatcherConfig(messages=doorbell.MessageConfig(slots=0))
    refused: list[tuple[doorbell.Domain, list[doorbell.MessageQueue | None], doorbell.MatcherConfig | None]] = [
        (peers.domain, [a], doorbell.MatcherConfig(receives=0)),
        (peers.domain, [a, None], no_slots),
        (peers.domain, [a, None, None], None),
        (peers.domain, [a, a], None),
        (peers.domain, [a, peers.queues[0]], None),
        (peers.domain, [a, apart], None),
        (doorbell.Device().domain(), [a], None),
    ]
    for domain, queues, config in refused:
        with pytest.raises((doorbell.Error, ValueError)):
            doorbell.Matcher(domain, queues, config)
        b.start_send_now(b"whole", 30)
        assert a.recv_now(bytearray(8), 30) == 5
