"""Messages: arrays are sent and received where they are."""

import asyncio
import threading
import time
from typing import Any

import doorbell
import pytest

numpy = pytest.importorskip("numpy", reason="numpy is not installed")


class Queues:
    """Two message queues of one domain, connected with each other."""

    def __init__(self, name: str = "softcx", config: doorbell.MessageConfig | None = None) -> None:
        self.domain: doorbell.Domain = doorbell.Device(name).domain()
        self.a: doorbell.MessageQueue = self.domain.message_queue(config)
        self.b: doorbell.MessageQueue = self.domain.message_queue(config)
        self.a.connect(self.b.address)
        self.b.connect(self.a.address)


@pytest.fixture(params=["softcx", "softcx,path=proxy", "softcx,path=sync"])
def queues(request: pytest.FixtureRequest) -> Queues:
    return Queues(request.param)


@pytest.mark.parametrize("items", [1, 100, 10000])
def test_arrays_are_sent_and_received_in_place(queues: Queues, stream: doorbell.HostStream, items: int) -> None:
    source, target = numpy.arange(items, dtype=numpy.float64), numpy.zeros(items + 3)
    other = doorbell.HostStream("receiver")
    started: doorbell.PendingSend = queues.a.start_send(stream, source)
    received = queues.b.recv(other, target)
    sent = queues.a.wait_send(stream, started)
    assert received.wait(30) == 8 * items == sent.wait(30) and received.done() and sent.done()
    assert received.nbytes == sent.nbytes == 8 * items
    assert (target[:items] == source).all() and not target[items:].any()
    with pytest.raises(doorbell.StateError) as caught:
        queues.a.wait_send(stream, started)
    assert caught.value.kind == "Taken"
    assert queues.a.control in ("direct", "proxy", "sync") and queues.a.failure is None
    queues.a.finish(30)


def test_torch_tensors_are_messages(queues: Queues, stream: doorbell.HostStream) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    source, target = torch.arange(5000.0), torch.zeros(5000)
    other = doorbell.HostStream()
    pending = queues.a.start_send(stream, source)
    queues.b.recv(other, target).wait(30)
    queues.a.wait_send(stream, pending).wait(30)
    assert torch.equal(source, target)


def test_a_message_of_several_parts_goes_into_several(stream: doorbell.HostStream) -> None:
    queues = Queues()
    source, target = queues.domain.register(bytearray(b"abcdefgh"), doorbell.Access.ALL), bytearray(6)
    into = queues.domain.register(target)
    sent = queues.a.send(stream, [source[0:2], source[5:8]])
    assert queues.b.recv_now((into[0:1], into.span(2, 4)), 30) == 5
    sent.wait(30)
    assert bytes(target) == b"a\0bfgh"


def test_threads_send_and_receive(queues: Queues) -> None:
    results: list[Any] = []

    def peer() -> None:
        into = numpy.zeros(5000, dtype=numpy.int64)
        results.append(queues.b.recv_now(into, 30))
        queues.b.send_now(into * 2, 30)

    thread = threading.Thread(target=peer)
    thread.start()
    # A receive that nothing comes for ends, and takes nothing.
    nothing = numpy.zeros(5000, dtype=numpy.int64)
    with pytest.raises(doorbell.TimeoutError) as late:
        queues.a.recv_now(nothing, 0.12)
    assert late.value.timeout == pytest.approx(0.12)
    data = numpy.arange(5000, dtype=numpy.int64)
    posted: doorbell.PostedSend = queues.a.start_send_now(data, 30)
    queues.a.wait_send_now(posted, 30)
    assert queues.a.recv_now(nothing, 30) == 40000 and (nothing == 2 * data).all()
    thread.join()
    assert results == [40000]


def test_the_next_message_of_any_queue() -> None:
    first, second = Queues(), Queues()
    second.domain = first.domain
    second.a, second.b = first.domain.message_queue(), first.domain.message_queue()
    second.a.connect(second.b.address)
    second.b.connect(second.a.address)
    into = bytearray(8)
    both = [first.b, second.b]
    second.a.send_now(b"2nd")
    assert doorbell.MessageQueue.recv_any_now(both, into, 30) == (1, 3) and into[:3] == b"2nd"
    first.a.send_now(b"first")
    assert doorbell.MessageQueue.recv_any_now(both, into, 30) == (0, 5) and into[:5] == b"first"
    with pytest.raises(doorbell.TimeoutError):
        doorbell.MessageQueue.recv_any_now(both[::-1], into, 0.01)
    for wrong in ([], [first.b, first.b]):
        with pytest.raises(ValueError):
            doorbell.MessageQueue.recv_any_now(wrong, into, 1)


def test_a_message_that_is_too_long_is_refused_by_its_receive(stream: doorbell.HostStream) -> None:
    queues = Queues()
    target = bytearray(4)
    received = queues.b.recv(stream, target)
    queues.a.send_now(b"too long", 30)
    with pytest.raises(doorbell.TruncatedError) as caught:
        received.wait(30)
    assert (caught.value.len_bytes, caught.value.limit_bytes) == (8, 4) and target == bytes(4)
    assert received.done() and received.nbytes is None
    assert stream.take_fault() is not None
    # The next one comes.
    queues.a.send_now(b"next", 30)
    assert queues.b.recv_now(target, 30) == 4 and target == b"next"


def test_messages_are_awaited(stream: doorbell.HostStream) -> None:
    queues = Queues()
    target = bytearray(8)

    async def main() -> int:
        received = queues.b.recv(stream, target)
        waiting = asyncio.ensure_future(wait(received))
        await asyncio.sleep(0.01)
        queues.a.send_now(b"awaited", 30)
        return await waiting

    async def wait(ticket: doorbell.MessageTicket) -> int:
        return await ticket

    assert asyncio.run(main()) == 7 and target == b"awaited\0"


def test_the_configuration_of_a_queue_is_applied() -> None:
    config = doorbell.MessageConfig(slots=2, eager_bytes=16, ahead=4, max_slices=1, endpoint=doorbell.EndpointConfig(control="proxy"))
    queues = Queues(config=config)
    assert queues.a.control == "proxy"
    region = queues.domain.alloc(64, doorbell.Access.ALL)
    with pytest.raises(doorbell.RangeError):
        queues.a.send_now([region[0:1], region[1:2]])
    # Two slots, and nobody receives.
    for _ in range(2):
        queues.a.send_now(b"slot", 30)
    with pytest.raises(doorbell.TimeoutError):
        queues.a.send_now(b"slot", 0.12)
    with pytest.raises(doorbell.RangeError) as range_error:
        queues.domain.message_queue(doorbell.MessageConfig(slots=0))
    assert range_error.value.argument == "slots"
    with pytest.raises(TypeError, match="`ahead`"):
        queues.domain.message_queue(doorbell.MessageConfig(ahead="many"))  # type: ignore[arg-type]


def test_an_abort_ends_a_wait_of_another_thread(stream: doorbell.HostStream) -> None:
    queues = Queues()

    def ends() -> None:
        time.sleep(0.05)
        queues.b.abort()

    threading.Thread(target=ends).start()
    with pytest.raises(doorbell.WorkError) as caught:
        queues.b.recv_now(bytearray(8), 30)
    assert caught.value.cause == "Aborted"
    assert queues.b.failure is not None and queues.b.failure.cause == "Aborted"
    # Read-only memory is not received into.
    with pytest.raises(doorbell.StateError, match="read-only"):
        queues.a.recv_now(b"constant", 1)


def test_the_memory_of_a_message_is_kept_until_the_peer_has_read_it() -> None:
    queues = Queues()
    other = doorbell.HostStream()
    data = numpy.arange(100000, dtype=numpy.int32)
    expected, target = data.copy(), numpy.zeros(100000, dtype=numpy.int32)
    pending = queues.a.start_send(other, data)
    del data
    assert queues.b.recv_now(target, 30) == 400000
    assert (target == expected).all()
    del pending
    queues.a.finish(30)
