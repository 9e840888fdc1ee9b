"""What is about memory: bounce buffers, and the registration cache."""

import array
import gc
import os
import threading

import doorbell
import pytest
from conftest import Pair

numpy = pytest.importorskip("numpy", reason="numpy is not installed")


def pattern(count: int) -> bytes:
    return bytes(at * 7 % 251 for at in range(count))


def test_arrays_go_through_a_bounce_buffer(pair: Pair) -> None:
    buffer = doorbell.BounceBuffer(pair.domain, doorbell.BounceConfig(chunk_bytes=1000, slots=3))
    assert (buffer.chunk_bytes, buffer.slots) == (1000, 3)
    source, into = pattern(12345), numpy.zeros(12345, dtype=numpy.uint8)
    remote = pair.domain.alloc(20000, doorbell.Access.ALL)
    buffer.write(pair.a, source, remote.remote[100:12445], 60)
    assert bytes(memoryview(remote)[100:12445]) == source
    assert not any(memoryview(remote)[:100]) and not any(memoryview(remote)[12445:])
    buffer.read(pair.a, into, remote.remote[100:12445])
    assert into.tobytes() == source
    other = doorbell.BounceBuffer(pair.domain, doorbell.BounceConfig(chunk_bytes=1000))
    into[:] = 0
    receiver = threading.Thread(target=lambda: other.recv(pair.b, into, 60))
    receiver.start()
    buffer.send(pair.a, source, 60)
    receiver.join()
    assert into.tobytes() == source


def test_a_bounce_buffer_refuses_what_it_cannot_transfer() -> None:
    pair = Pair()
    buffer = doorbell.BounceBuffer(pair.domain)
    remote = pair.domain.alloc(64, doorbell.Access.ALL)
    with pytest.raises(doorbell.OutOfBoundsError):
        buffer.write(pair.a, bytearray(65), remote.remote)
    with pytest.raises(doorbell.StateError, match="read-only") as caught:
        buffer.read(pair.a, b"constant", remote.remote)
    assert caught.value.kind == "NoAccess"
    with pytest.raises(doorbell.RangeError):
        doorbell.BounceBuffer(pair.domain, doorbell.BounceConfig(slots=0))
    # The peer never sends: the endpoint is aborted.
    with pytest.raises(doorbell.TimeoutError):
        buffer.recv(pair.b, bytearray(8), 0.05)
    assert pair.b.failure is not None and pair.b.failure.cause == "Deadline"


def test_the_cache_registers_an_array_once() -> None:
    domain = doorbell.Device().domain()
    cache = doorbell.RegionCache(domain, doorbell.CacheConfig(max_entries=4, max_bytes=1 << 30))
    data = numpy.zeros(1 << 20, dtype=numpy.float32)
    first = cache.register(data, doorbell.Access.ALL)
    assert (len(first), first.itemsize, first.dtype) == (1 << 20, 4, doorbell.DataType.F32)
    part = cache.register(data[1000:2000], doorbell.Access.ALL)
    assert part.address == first.address + 4000 and part.nbytes == 4000
    if cache.invalidation is None:
        assert cache.reason is not None and len(cache) == 0 and cache.misses == 2
        pytest.skip(f"nothing is kept: {cache.reason}")
    assert cache.invalidation == "kernel" and cache.reason is None
    assert (cache.hits, cache.misses, len(cache)) == (1, 1, 1) and cache.nbytes >= 4 << 20
    # Both are usable, by this side and by the peer.
    pair = Pair()
    with pytest.raises(doorbell.ForeignError):
        pair.a.post_write(first[0:1], part.remote[0:1])
    a, b = (domain.endpoint() for _ in range(2))
    a.connect(b.address)
    b.connect(a.address)
    data[5] = 42.0
    a.post_write(first[5:6], part.remote[0:1]).wait(60)
    assert data[1000] == 42.0
    # The array is kept by its region, and the entry ends with the array.
    del data, first
    gc.collect()
    assert len(cache) == 1 and memoryview(part).nbytes == 4000
    del part
    gc.collect()
    # A finished work request gives its handle back with the next look at its queue.
    a.send_room()
    domain.alloc(8)
    assert len(cache) == 0
    with pytest.raises(doorbell.StateError, match="read-only"):
        cache.register(b"constant", doorbell.Access.ALL)
    assert cache.register(array.array("d", [1.0, 2.0])).itemsize == 8
    with pytest.raises(doorbell.RangeError):
        doorbell.RegionCache(domain, doorbell.CacheConfig(max_entries=0))


def test_connections_by_rdma_cm_say_what_is_missing() -> None:
    if "verbs" not in doorbell.features():
        with pytest.raises(doorbell.StateError, match="feature `verbs`") as caught:
            doorbell.CmListener("127.0.0.1:0")
        assert caught.value.kind == "Unsupported"
        with pytest.raises(doorbell.StateError, match="feature `verbs`"):
            doorbell.CmConnection.connect(Pair().a, "127.0.0.1:1", b"private", 1.0)
        return
    with pytest.raises(doorbell.MalformedError):
        doorbell.CmListener("nowhere")
    with pytest.raises(doorbell.RangeError):
        doorbell.CmConnection.connect(doorbell.Device().domain().endpoint(), "127.0.0.1:1", bytes(57), 1.0)


def refuse(request: doorbell.CmRequest) -> None:
    request.reject(b"no")


def test_endpoints_are_connected_by_rdma_cm() -> None:
    address, device = os.environ.get("DOORBELL_TEST_CM"), os.environ.get("DOORBELL_TEST_DEVICE")
    if not address or not device or "verbs" not in doorbell.features():
        pytest.skip("no DOORBELL_TEST_CM, the IP address of a device that rdma_cm knows")
    domain = doorbell.Device(device).domain()
    listener = doorbell.CmListener(f"{address}:0")
    active, passive = (domain.endpoint() for _ in range(2))
    made: list[doorbell.CmConnection] = []
    thread = threading.Thread(target=lambda: made.append(doorbell.CmConnection.connect(active, listener.address, b"ping", 60)))
    thread.start()
    request = listener.accept(60)
    assert request.private_data.startswith(b"ping\0") and request.device is not None
    accepted = request.accept(passive, b"pong", 60)
    thread.join()
    assert made[0].private_data.startswith(b"pong\0") and made[0].peer == listener.address
    region = domain.alloc(16, doorbell.Access.ALL)
    passive.post_recv(region[8:16])
    active.post_send(region[0:8])
    assert passive.wait_recv(60).nbytes == 8
    made[0].check()
    # A peer that is refused has what the refusal says.
    thread = threading.Thread(target=lambda: refuse(listener.accept(60)))
    thread.start()
    with pytest.raises(doorbell.RefusedError) as caught:
        doorbell.CmConnection.connect(domain.endpoint(), listener.address, timeout=60)
    thread.join()
    assert caught.value.private_data.startswith(b"no\0")
    # Both sides take part.
    thread = threading.Thread(target=lambda: accepted.wait_disconnected(60))
    thread.start()
    made[0].disconnect(60)
    thread.join()
    with pytest.raises(doorbell.StateError):
        accepted.check()
