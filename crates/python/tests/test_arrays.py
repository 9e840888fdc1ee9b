"""Arrays of all kinds are registered where they are: the device writes what the array shows, and nothing is copied."""

import array
import gc
import mmap
import pickle
import weakref
from typing import Any

import doorbell
import pytest
from conftest import Pair

numpy = pytest.importorskip("numpy", reason="numpy is not installed")


class OnlyDlpack:
    """An array that shows nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


def received(pair: Pair, target: doorbell.Region, data: bytes) -> None:
    """Has the peer send the bytes into the region."""
    source = pair.domain.register(data)
    assert source.readonly and source.access == doorbell.Access.LOCAL_READ
    ticket = pair.b.post_recv(target)
    pair.a.post_send(source)
    ticket.wait(10)
    assert ticket.nbytes == len(data)


def test_memory_of_every_kind_of_buffer_is_written_in_place(pair: Pair) -> None:
    buffers: list[Any] = [bytearray(64), array.array("d", [0.0] * 8), mmap.mmap(-1, 64), memoryview(bytearray(80))[8:72]]
    for buffer in buffers:
        region = pair.domain.register(buffer)
        data = bytes(range(64))
        received(pair, region, data)
        assert memoryview(buffer).tobytes() == data
        assert region.nbytes == 64 and region.itemsize == memoryview(buffer).itemsize
        assert len(region) == 64 // region.itemsize


def test_numpy_arrays_are_registered_where_they_are(pair: Pair) -> None:
    target = numpy.zeros(8, dtype=numpy.int64)
    region = pair.domain.register(target)
    assert region.address == target.ctypes.data and region.itemsize == 8 and len(region) == 8
    source = numpy.arange(8, dtype=numpy.int64)
    received(pair, region, source.tobytes())
    assert (target == source).all()


def test_an_array_with_a_mask_is_refused(pair: Pair) -> None:
    masked = numpy.ma.array(numpy.zeros(8), mask=[True] + [False] * 7)
    with pytest.raises(BufferError, match="mask"):
        pair.domain.register(masked)
    assert len(pair.domain.register(masked.data)) == 8


def test_dlpack_alone_leads_to_the_same_memory_and_keeps_it(pair: Pair) -> None:
    target = numpy.zeros((4, 4), dtype=numpy.float32)
    region = pair.domain.register(OnlyDlpack(target))
    assert (region.address, region.itemsize, len(region)) == (target.ctypes.data, 4, 16)
    received(pair, region, numpy.full(16, 1.5, dtype=numpy.float32).tobytes())
    assert (target == 1.5).all()


def test_a_torch_tensor_is_registered_where_it_is(pair: Pair) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    source, target = torch.arange(100, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
    # A view of it, at an offset.
    view = target[50:150]
    from_region, to_region = pair.domain.register(source), pair.domain.register(view)
    assert from_region.address == source.data_ptr()
    assert to_region.address == target.data_ptr() + 50 * 8 == view.data_ptr()
    # What is written after the registration is what is sent.
    source[3] = -7
    ticket = pair.b.post_recv(to_region)
    pair.a.post_send(from_region)
    ticket.wait(10)
    assert torch.equal(target[50:150], source) and not target[:50].any() and not target[150:].any()
    with pytest.raises(BufferError, match="contiguous"):
        pair.domain.register(target.reshape(20, 10).t())
    # torch itself names the reason.
    with pytest.raises((RuntimeError, BufferError)):
        pair.domain.register(torch.zeros(4, requires_grad=True))


def test_memory_of_the_library_is_shown_without_a_copy(pair: Pair) -> None:
    region = pair.domain.alloc(4096)
    shown = numpy.frombuffer(region, dtype=numpy.uint8)
    assert shown.ctypes.data == region.address and not shown.any()
    received(pair, region, b"\x07" * 4096)
    assert (shown == 7).all()
    view = memoryview(region)
    view[0] = 9
    assert shown[0] == 9 and not region.readonly and region.kind == "host"
    assert "4096 bytes" in repr(region)
    # The array keeps the memory.
    del region, view
    gc.collect()
    assert shown[0] == 9 and (shown[1:] == 7).all()


def test_the_region_keeps_the_array_until_the_work_is_done(pair: Pair, stream: doorbell.HostStream) -> None:
    class Watched(bytearray):
        pass

    source, target = Watched(b"kept" * 16), bytearray(64)
    gone = weakref.ref(source)
    to_region = pair.domain.register(target)
    receive = pair.b.post_recv(to_region)
    # Nothing is sent before the word is written.
    gate = pair.domain.alloc(4)
    stream.wait_value(gate, 0, 1, timeout=30)
    if pair.a.control == "sync":
        # This path executes the program in the call, so the word must be there before.
        memoryview(gate).cast("I")[0] = 1
    region = pair.domain.register(source)
    stream.queue_send(pair.a, region[:])
    stream.wait_send(pair.a)
    del source, region
    gc.collect()
    if pair.a.control != "sync":
        assert gone() is not None, "the queued operation keeps it"
    memoryview(gate).cast("I")[0] = 1
    receive.wait(10)
    stream.synchronize(10)
    assert bytes(target) == b"kept" * 16
    for _ in range(1000):
        # Handles that other threads had are dropped by calls of the package.
        pair.a.poll_send() if pair.a.send_room() else None
        gc.collect()
        if gone() is None:
            break
    assert gone() is None, "nothing keeps it any more"


def test_a_buffer_cannot_be_resized_while_it_is_registered(pair: Pair) -> None:
    buffer = bytearray(64)
    region = pair.domain.register(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    assert region.registered and region.deregister() and not region.deregister() and not region.registered
    with pytest.raises(doorbell.StateError) as caught:
        pair.a.post_send(region)
    assert caught.value.kind == "Deregistered" and "deregistered" in caught.value.reason and caught.value.operation
    del region
    buffer.extend(b"more")


def test_slices_count_items_and_cut_nothing_off(pair: Pair) -> None:
    region = pair.domain.register(array.array("I", range(10)))
    part: doorbell.Slice = region[2:5]
    assert (part.offset, part.nbytes) == (8, 12) and "12 bytes" in repr(part)
    assert (region[-2:].offset, region[:].nbytes, region[3:3].nbytes) == (32, 40, 0)
    by_bytes = region.span(1, 3)
    assert (by_bytes.offset, by_bytes.nbytes) == (1, 3)
    for wrong in (slice(0, 11), slice(5, 4), slice(-11, None)):
        with pytest.raises(doorbell.OutOfBoundsError) as caught:
            region[wrong]
        assert caught.value.limit_bytes == 40
    with pytest.raises(doorbell.OutOfBoundsError) as outside:
        region.span(38, 4)
    found = outside.value
    assert (found.argument, found.offset, found.len_bytes, found.limit_bytes) == ("slice", 38, 4, 40)
    with pytest.raises(IndexError):
        region.span(38, 3)
    with pytest.raises(ValueError, match="step"):
        region[0:4:2]
    with pytest.raises(TypeError):
        region[0]  # type: ignore[index]


def test_what_is_no_array_is_refused_with_the_reason(pair: Pair) -> None:
    with pytest.raises(TypeError, match="buffer protocol"):
        pair.domain.register(object())
    with pytest.raises(BufferError, match="contiguous"):
        pair.domain.register(memoryview(bytearray(8))[::2])
    with pytest.raises(doorbell.StateError, match="read-only") as caught:
        pair.domain.register(b"constant", doorbell.Access.LOCAL_WRITE)
    assert caught.value.kind == "NoAccess"
    with pytest.raises(doorbell.RangeError) as empty:
        pair.domain.register(bytearray())
    assert (empty.value.argument, empty.value.value, empty.value.min) == ("len_bytes", 0, 1) and empty.value.max > 1 << 30
    with pytest.raises(TypeError, match="domain.register"):
        pair.a.post_send(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        pair.domain.alloc(64, doorbell.Access(1 << 20))


def test_a_remote_region_goes_to_a_peer_as_bytes(pair: Pair) -> None:
    rights = doorbell.Access.LOCAL_WRITE | doorbell.Access.REMOTE_WRITE | doorbell.Access.REMOTE_READ
    assert rights | doorbell.Access.REMOTE_ATOMIC == doorbell.Access.ALL
    target = pair.domain.register(array.array("H", [0] * 8), rights)
    assert target.access == rights
    remote = doorbell.RemoteRegion(bytes(target.remote), target.itemsize)
    assert remote == target.remote == pickle.loads(pickle.dumps(remote))
    assert remote != doorbell.RemoteRegion(bytes(remote)) and hash(remote) == hash(target.remote)
    assert (remote.nbytes, len(remote), remote.itemsize) == (16, 8, 2)
    part: doorbell.RemoteSlice = remote[2:4]
    assert part.nbytes == 4 and remote.span(3, 5).nbytes == 5
    with pytest.raises(doorbell.OutOfBoundsError):
        remote.span(12, 5)
    with pytest.raises(ValueError, match="20"):
        doorbell.RemoteRegion(b"short")
    assert remote.__getnewargs__() == (bytes(remote), 2)


def test_a_refused_array_is_not_kept(pair: Pair) -> None:
    buffer = bytearray(8)
    with pytest.raises(ValueError):
        pair.domain.register(buffer, doorbell.Access(1 << 20))
    buffer.extend(b"nothing holds it")
