"""Operations of streams and of the calling thread, and their tickets."""

import asyncio
import gc
import math
import os
import select
import threading

import doorbell
import pytest
from conftest import Pair

RIGHTS = doorbell.Access.ALL


def test_a_stream_sends_what_a_function_wrote_before(pair: Pair, stream: doorbell.HostStream) -> None:
    source, target = bytearray(64), bytearray(64)
    region, into = pair.domain.register(source), pair.domain.register(target)

    def fill() -> None:
        source[:] = b"x" * 64

    receive = stream.queue_recv(pair.b, into[0:64], wr_id=4)
    stream.launch(fill)
    sent = stream.queue_send(pair.a, [region[0:32], region.span(32, 32)], wr_id=3, immediate=77)
    waits = [stream.wait_send(pair.a), stream.wait_recv(pair.b, timeout=20)]
    event = stream.record()
    event.wait(10)
    assert event.done() and stream.done() and stream.name == "test"
    for ticket in (sent, *waits, receive):
        ticket.wait(10)
        assert ticket.done() and ticket.status is doorbell.Status.COMPLETE
    assert (receive.nbytes, receive.immediate, sent.nbytes) == (64, 77, None)
    assert target == b"x" * 64


def test_writes_and_reads_of_a_stream(pair: Pair, stream: doorbell.HostStream) -> None:
    mine, theirs = bytearray(b"m" * 32), bytearray(b"t" * 32)
    own, peer = pair.domain.register(mine, RIGHTS), pair.domain.register(theirs, RIGHTS)
    stream.queue_write(pair.a, own[0:8], peer.remote[8:16], signaled=False)
    stream.queue_write(pair.a, own[0:4], peer.remote.span(0, 4), wr_id=2)
    stream.wait_send(pair.a)
    read = stream.queue_read(pair.a, own[16:24], peer.remote[24:32], wr_id=5)
    stream.wait_send(pair.a)
    stream.synchronize(10)
    read.wait(10)
    assert theirs == b"mmmmtttt" + b"m" * 8 + b"t" * 16
    assert mine == b"m" * 16 + b"t" * 8 + b"m" * 8
    # Immediate data take a receive of the peer.
    note = pair.b.post_recv(peer[0:1])
    stream.queue_write(pair.a, own[0:1], peer.remote[31:32], immediate=5)
    stream.wait_send(pair.a)
    note.wait(10)
    assert note.immediate == 5 and theirs[31:] == b"m"


def test_the_calling_thread_posts_and_polls(pair: Pair) -> None:
    mine, theirs = bytearray(b"m" * 32), bytearray(b"t" * 32)
    own, peer = pair.domain.register(mine, RIGHTS), pair.domain.register(theirs, RIGHTS)
    assert pair.a.send_room() == 128 and pair.b.recv_room() == 128
    pair.b.post_recv(peer[0:8], wr_id=9)
    assert pair.b.recv_room() == 127
    pair.a.post_send(own[0:8], wr_id=1, immediate=3)
    came = pair.b.wait_recv(10)
    assert (came.wr_id, came.nbytes, came.immediate) == (9, 8, 3)
    assert pair.a.wait_send(10).wr_id == 1
    pair.a.post_write(own, peer.remote, wr_id=2, signaled=True)
    pair.a.post_read(own[0:4], peer.remote[0:4], wr_id=3)
    assert [pair.a.wait_send(10).wr_id for _ in range(2)] == [2, 3]
    assert pair.a.poll_send() is None and pair.b.poll_recv() is None
    assert theirs == b"m" * 32
    with pytest.raises(TimeoutError) as caught:
        pair.b.wait_recv(0.01)
    assert isinstance(caught.value, doorbell.TimeoutError) and caught.value.timeout == pytest.approx(0.01)
    assert caught.value.operation.startswith("wait_cq")


def test_values_in_memory_order_streams(pair: Pair, stream: doorbell.HostStream) -> None:
    words = pair.domain.alloc(8)
    other = doorbell.HostStream("other")
    order = []
    wait = stream.wait_value(words, 4, 3, timeout=10)
    stream.launch(lambda: order.append("after"))
    other.launch(lambda: order.append("before"))
    other.write_value(words, 4, 3)
    wait.wait(10)
    stream.synchronize(10)
    assert order == ["before", "after"] and memoryview(words).cast("I")[1] == 3
    with pytest.raises(doorbell.AlignmentError) as caught:
        stream.write_value(words, 2, 0)
    assert (caught.value.argument, caught.value.value % 4, caught.value.align) == (caught.value.argument, 2, 4)


def test_words_of_64_bits_and_all_conditions(pair: Pair, stream: doorbell.HostStream) -> None:
    words = pair.domain.alloc(16)
    view = memoryview(words).cast("Q")
    other = doorbell.HostStream("other")
    big = 1 << 40
    wait = stream.wait_value64(words, 8, big + 1, timeout=10)
    stream.write_value64(words, 0, big)
    other.write_value64(words, 8, big)
    other.synchronize(10)
    assert view[1] == big and not wait.done()
    other.write_value64(words, 8, big + 2)
    wait.wait(10)
    stream.synchronize(10)
    assert view.tolist() == [big, big + 2]
    # Each of these holds for the word that is there, and the next one for another one.
    for condition, value in ((">=", big), ("==", big + 2), ("and", 2), ("nor", 0)):
        stream.wait_value64(words, 8, value, 10, condition=condition).wait(10)  # type: ignore[arg-type]
    stream.wait_count64(words, 8, big, 1, timeout=10).wait(10)
    narrow = stream.wait_value(words, 0, 7, 10, condition="==")
    assert not narrow.done()
    other.write_value(words, 0, 7)
    narrow.wait(10)
    with pytest.raises(ValueError, match="condition"):
        stream.wait_value64(words, 8, 0, condition="<")  # type: ignore[arg-type]
    with pytest.raises(doorbell.AlignmentError):
        stream.wait_value64(words, 4, 0)
    with pytest.raises(OverflowError):
        stream.write_value64(words, 0, 1 << 64)


def test_atomics_have_the_old_value(pair: Pair, stream: doorbell.HostStream) -> None:
    counter, old = pair.domain.alloc(16, RIGHTS), pair.domain.alloc(8)
    view, result = memoryview(counter).cast("Q"), memoryview(old).cast("Q")
    view[1] = (1 << 63) + 5
    pair.a.post_fetch_add(old, counter.remote.span(8, 8), 7, wr_id=3).wait(10)
    assert (view[1], result[0]) == ((1 << 63) + 12, (1 << 63) + 5) and pair.a.wait_send(10).wr_id == 3
    pair.a.post_compare_swap(old, counter.remote.span(8, 8), 1, 2).wait(10)
    assert (view[1], result[0]) == ((1 << 63) + 12, (1 << 63) + 12), "it is not 1"
    pair.a.post_compare_swap(old, counter.remote.span(8, 8), (1 << 63) + 12, 2, wr_id=4).wait(10)
    assert view[1] == 2
    assert [pair.a.wait_send(10).wr_id for _ in range(2)] == [0, 4]
    for _ in range(3):
        stream.queue_fetch_add(pair.a, old, counter.remote[0:8], 1, signaled=False)
    swap = stream.queue_compare_swap(pair.a, old, counter.remote[0:8], 3, 9, wr_id=5)
    stream.wait_send(pair.a)
    stream.synchronize(10)
    swap.wait(10)
    assert view.tolist() == [9, 2] and result[0] == 3
    with pytest.raises(doorbell.AlignmentError):
        pair.a.post_fetch_add(old, counter.remote.span(4, 8), 1)
    with pytest.raises(doorbell.Error):
        pair.a.post_fetch_add([old[0:4], old[4:8]], counter.remote[0:8], 1)


def test_pages_are_pushed_by_kernels_only(pair: Pair, stream: doorbell.HostStream) -> None:
    region = pair.domain.alloc(64, RIGHTS)
    with pytest.raises(doorbell.StateError) as caught:
        stream.push_pages(pair.a, 8, region[0:16], region.remote, region[16:32], (region, 32), region.remote[40:48])
    assert caught.value.kind in ("WrongKind", "Unsupported")
    with pytest.raises(doorbell.RangeError):
        stream.push_pages(pair.a, 8, [region[0:8], region[8:16]], region.remote, region[16:32], (region, 32), region.remote[40:48])


def test_events_order_streams(stream: doorbell.HostStream) -> None:
    other = doorbell.HostStream()
    assert other.name == "python"
    begun, gate, order = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        gate.wait(10)
        order.append("first")

    stream.launch(first)
    event = stream.record()
    other.wait_event(event)
    other.launch(lambda: order.append("second"))
    assert begun.wait(10) and not event.done() and not other.done()
    with pytest.raises(doorbell.TimeoutError):
        event.wait(0.01)
    gate.set()
    other.synchronize(10)
    assert order == ["first", "second"]


def test_await_of_tickets_and_events(pair: Pair, stream: doorbell.HostStream) -> None:
    source, target = pair.domain.register(bytearray(b"y" * 64)), pair.domain.register(bytearray(64))
    gate = pair.domain.alloc(4)

    async def transfer() -> list[str]:
        order = []
        receive = pair.b.post_recv(target)

        async def opens() -> None:
            await asyncio.sleep(0.02)
            order.append("open")
            memoryview(gate).cast("I")[0] = 1

        opening = asyncio.ensure_future(opens())
        held = stream.wait_value(gate, 0, 1, timeout=30)
        await held
        order.append("held")
        await opening
        stream.queue_send(pair.a, source)
        stream.wait_send(pair.a)
        await stream.record()
        await receive
        order.append("received")
        # What is over already is not waited for.
        await receive
        await stream.record()
        return order

    assert asyncio.run(transfer()) == ["open", "held", "received"]


def test_many_tasks_wait_at_once_and_one_is_cancelled(stream: doorbell.HostStream) -> None:
    domain = doorbell.Device().domain()
    gate = domain.alloc(4)
    descriptors = len(os.listdir("/proc/self/fd"))

    async def run() -> None:
        wait = stream.wait_value(gate, 0, 1, timeout=30)
        event = stream.record()

        async def ticket_task() -> None:
            await wait

        async def event_task() -> None:
            await event

        tasks = [asyncio.ensure_future(task()) for task in (ticket_task, event_task) for _ in range(20)]
        await asyncio.sleep(0.01)
        for task in (tasks[0], tasks[-1]):
            task.cancel()
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True] + [False] * 38 + [True]
        memoryview(gate).cast("I")[0] = 1
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, *[type(None)] * 38, asyncio.CancelledError]

    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "each await has closed its descriptor"


def test_an_event_writes_to_a_descriptor(stream: doorbell.HostStream) -> None:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    gate = threading.Event()
    stream.launch(lambda: gate.wait(10))
    stream.record().notify(descriptor)
    assert not select.select([descriptor], [], [], 0)[0]
    gate.set()
    assert select.select([descriptor], [], [], 10)[0] and os.eventfd_read(descriptor) == 1
    event = stream.record()
    with pytest.raises(doorbell.StateError):
        event.notify(-1)
    with pytest.raises(doorbell.SystemCallError) as caught:
        event.notify(1 << 20)
    assert isinstance(caught.value, OSError) and caught.value.errno == 9 and caught.value.operation
    os.close(descriptor)


def test_a_ticket_keeps_its_endpoint(stream: doorbell.HostStream) -> None:
    pair = Pair()
    source, target = pair.domain.register(bytearray(b"z" * 8)), pair.domain.register(bytearray(8))
    gate = pair.domain.alloc(4)
    stream.wait_value(gate, 0, 1, timeout=30)
    receive = pair.b.post_recv(target)
    sent: doorbell.Ticket = stream.queue_send(pair.a, source)
    # The tickets alone have the endpoints now.
    del pair
    gc.collect()
    memoryview(gate).cast("I")[0] = 1
    sent.wait(10)
    receive.wait(10)
    assert bytes(memoryview(target)) == b"z" * 8


def test_endpoints_say_what_they_are(pair: Pair) -> None:
    assert pair.domain.device.name == "softcx" and "softcx" in doorbell.Device.list()
    assert pair.a.qpn != pair.b.qpn and pair.a.connected and pair.a.failure is None
    assert pair.a.control in ("direct", "proxy", "sync") and pair.a.control_reason
    assert "softcx" in doorbell.features() and doorbell.__version__.count(".") == 2
    before = pair.a.address
    pair.a.reset()
    assert pair.a.address != before and not pair.a.connected


def test_the_configuration_of_an_endpoint_is_applied() -> None:
    config = doorbell.EndpointConfig(
        send_depth=4,
        recv_depth=2,
        max_segments=1,
        wait_timeout=math.inf,
        mtu_bytes=1024,
        ack_timeout=14,
        retry_count=1,
        rnr_retry=1,
        control="proxy",
    )
    pair = Pair(config=config)
    assert (pair.a.send_room(), pair.a.recv_room(), pair.a.control) == (4, 2, "proxy")
    region = pair.domain.alloc(16)
    with pytest.raises(doorbell.RangeError, match="max_segments|slices"):
        pair.a.post_send([region[0:1], region[1:2]])
    pair.b.post_recv(region)
    pair.b.post_recv(region)
    with pytest.raises(doorbell.QueueFullError) as full:
        pair.b.post_recv(region)
    assert (full.value.queue, full.value.depth) == ("receive", 2)
    patient = pair.domain.endpoint(doorbell.EndpointConfig(recv_depth=1, room_timeout=0.01))
    patient.post_recv(region)
    with pytest.raises(doorbell.TimeoutError, match="room"):
        patient.post_recv(region)
    with pytest.raises(doorbell.RangeError) as range_error:
        pair.domain.endpoint(doorbell.EndpointConfig(send_depth=0))
    assert range_error.value.argument == "send_depth"
    with pytest.raises(doorbell.ChoiceError) as choice:
        pair.domain.endpoint(doorbell.EndpointConfig(mtu_bytes=1000))
    assert (choice.value.argument, choice.value.value) == ("mtu_bytes", 1000) and "1024" in choice.value.allowed
    with pytest.raises(doorbell.MalformedError) as malformed:
        pair.domain.endpoint(doorbell.EndpointConfig(control="gpu"))
    assert malformed.value.what == "control path" and "gpu" in malformed.value.reason
    with pytest.raises(TypeError, match="`send_depth`"):
        pair.domain.endpoint(doorbell.EndpointConfig(send_depth="four"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        pair.domain.endpoint(doorbell.EndpointConfig(wait_timeout=-1.0))
