"""Memory and streams of a GPU, over the stand-in for the CUDA driver. Its memory is none that the program can touch."""

import asyncio
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import doorbell
import pytest
from conftest import Pair
from test_await import WithoutReaders, run_with, wait_for

if "DOORBELL_CUDA_STANDIN" not in os.environ:
    pytest.skip("there is no stand-in for the CUDA driver: eval $(scripts/cuda-standin)", allow_module_level=True)
if "cuda" not in doorbell.features():
    pytest.skip("the package was built without the feature cuda", allow_module_level=True)


class Driver:
    """The calls of the driver that these tests make themselves, as torch or cupy would."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        # CU_STREAM_NON_BLOCKING
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value
        return stream.value


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


class CudaArray:
    """Memory of a GPU, as `__cuda_array_interface__` describes it."""

    freed: list[int] = []

    def __init__(self, driver: Driver, data: bytes, typestr: str = "|u1", strides: tuple[int, ...] | None = None) -> None:
        self.driver, self.nbytes = driver, len(data)
        pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(len(data)))
        self.pointer = pointer.value
        driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.pointer), data, ctypes.c_size_t(len(data)))
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (len(data) // int(typestr[2:]),),
            "typestr": typestr,
            "data": (self.pointer, False),
            "strides": strides,
            "version": 3,
        }

    def __bytes__(self) -> bytes:
        data = ctypes.create_string_buffer(self.nbytes)
        self.driver.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.pointer), ctypes.c_size_t(self.nbytes))
        return data.raw

    def __del__(self) -> None:
        CudaArray.freed.append(self.pointer)
        # Objects are dropped at any time, also while a stream is captured, which a call that frees would break off in another mode: CU_STREAM_CAPTURE_MODE_RELAXED.
        mode = ctypes.c_int(2)
        self.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self.driver.call("cuMemFree_v2", ctypes.c_uint64(self.pointer))
        self.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


class OfDevice(CudaArray):
    """One that names its device, as torch and cupy do."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DlpackArray:
    """Memory of a GPU, as DLPack describes it."""

    def __init__(self, array: CudaArray, device_type: int = 2, strides: tuple[int, ...] | None = None) -> None:
        self.array = array
        self.asked: int | None = None
        self.shape = (ctypes.c_int64 * 2)(2, array.nbytes // 8)
        self.strides = None if strides is None else (ctypes.c_int64 * 2)(*strides)
        pointer = ctypes.POINTER(ctypes.c_int64)
        self.tensor = DlTensor(
            array.pointer, device_type, 0, 2, 2, 32, 1, ctypes.cast(self.shape, pointer),
            ctypes.cast(self.strides, pointer) if self.strides is not None else pointer(), 0,
        )  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.tensor.device_type, self.tensor.device_id)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        # As torch has it: without a stream it would order nothing.
        self.asked = stream
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


class TorchStream:
    """A stream as torch has it."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class CoreStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class CupyStream:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


@pytest.mark.parametrize("kind", [CudaArray, OfDevice])
def test_memory_of_a_gpu_is_sent_and_received_where_it_is(driver: Driver, kind: type[CudaArray]) -> None:
    pair = Pair()
    source, target = kind(driver, bytes(range(64)), "<f4"), kind(driver, bytes(64), "<f4")
    from_region, to_region = pair.domain.register(source), pair.domain.register(target)
    assert (from_region.address, from_region.itemsize, len(from_region)) == (source.pointer, 4, 16)
    assert from_region.kind != "host"
    stream = doorbell.CudaStream(TorchStream(driver.stream()))
    receive = pair.b.post_recv(to_region[0:8])
    # What is written to the memory now is what is sent.
    driver.call("cuMemsetD8_v2", ctypes.c_uint64(source.pointer), 9, ctypes.c_size_t(4))
    sent = stream.queue_send(pair.a, from_region[0:8])
    stream.wait_send(pair.a)
    stream.wait_recv(pair.b)
    stream.synchronize(30)
    sent.wait(10)
    receive.wait(10)
    assert bytes(target) == b"\x09" * 4 + bytes(range(4, 32)) + bytes(32)
    with pytest.raises(BufferError, match="GPU"):
        memoryview(from_region)


def test_dlpack_leads_to_memory_of_a_gpu(driver: Driver) -> None:
    pair = Pair()
    target = CudaArray(driver, bytes(64))
    tensor = DlpackArray(target)
    region = pair.domain.register(tensor)
    assert (region.address, region.itemsize, len(region)) == (target.pointer, 4, 16)
    ticket = pair.b.post_recv(region)
    pair.a.post_send(pair.domain.register(b"host" * 16))
    ticket.wait(10)
    assert bytes(target) == b"host" * 16
    assert len(pair.domain.register(DlpackArray(target, strides=(8, 1)))) == 16
    with pytest.raises(BufferError, match="contiguous"):
        pair.domain.register(DlpackArray(target, strides=(1, 2)))
    with pytest.raises(doorbell.StateError, match="device type 10") as caught:
        pair.domain.register(DlpackArray(target, device_type=10))
    assert caught.value.kind == "Unsupported"
    with pytest.raises(BufferError, match="contiguous"):
        pair.domain.register(CudaArray(driver, bytes(64), "<f4", strides=(8,)))


def test_an_array_that_is_not_what_its_bytes_are_is_refused(driver: Driver) -> None:
    domain = doorbell.Device().domain()
    # The stride of 6 bytes is no number of items, though it is more than one.
    for shape, typestr, strides in [((8,), "<f4", (6,)), ((8,), "<f4", (5,)), ((4, 4), "<f2", (9, 2)), ((2, 2), "|u1", (2,)), ((8,), "<f4", (-4,))]:
        array = CudaArray(driver, bytes(64), typestr)
        array.__cuda_array_interface__.update(shape=shape, strides=strides)
        with pytest.raises(BufferError):
            domain.register(array)
    array = CudaArray(driver, bytes(64), "<f4")
    array.__cuda_array_interface__["mask"] = None
    assert len(domain.register(array)) == 16
    array.__cuda_array_interface__["mask"] = CudaArray(driver, bytes(16))
    with pytest.raises(BufferError, match="mask"):
        domain.register(array)
    changes: list[dict[str, Any]] = [{"shape": shape} for shape in ((-4, -4), (1 << 62, 4))]
    changes += [{"typestr": name} for name in ("<U4", "|O8", "|t8", "f4")]
    for change in changes:
        array = CudaArray(driver, bytes(64), "<f4")
        array.__cuda_array_interface__.update(change)
        with pytest.raises(BufferError):
            domain.register(array)
    array.__cuda_array_interface__.update(shape=(8,), typestr="<M8[ns]", strides=None)
    assert len(domain.register(array)) == 8


def test_a_tensor_of_dlpack_that_is_not_what_its_bytes_are_is_refused(driver: Driver) -> None:
    domain = doorbell.Device().domain()
    memory = CudaArray(driver, bytes(64))
    packed = DlpackArray(memory)
    packed.tensor.bits = 4
    with pytest.raises(BufferError, match="4 bits"):
        domain.register(packed)
    for field, value in [("ndim", -1), ("shape", ctypes.POINTER(ctypes.c_int64)())]:
        tensor = DlpackArray(memory)
        setattr(tensor.tensor, field, value)
        with pytest.raises(BufferError, match="shape"):
            domain.register(tensor)
    for lengths in [(-2, -8), (1 << 62, 4)]:
        tensor = DlpackArray(memory)
        tensor.shape[0], tensor.shape[1] = lengths
        with pytest.raises(BufferError, match="shape"):
            domain.register(tensor)


def test_a_type_that_only_dlpack_names_is_known(driver: Driver) -> None:
    domain = doorbell.Device().domain()

    class Named(CudaArray):
        """As torch has a bfloat16."""

        code = 4
        asked: int | None = None

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, *, stream: int | None = None) -> Any:
            self.asked = stream
            self.shown = DlpackArray(self)
            self.shown.tensor.code, self.shown.tensor.bits = self.code, 16
            # No circle of references: the memory is to be freed at once.
            del self.shown.array
            return self.shown.__dlpack__()

    array = Named(driver, bytes(64), "<V2")
    region = domain.register(array)
    assert (region.dtype, region.itemsize, len(region)) == (doorbell.DataType.BF16, 2, 32)
    # Only the type was asked for.
    assert array.asked == -1
    # Complex of two bytes: known to neither.
    array.code = 5
    assert domain.register(array).dtype is None
    assert domain.register(CudaArray(driver, bytes(64), "<V2")).dtype is None

    class OnlyDlpack(Named):
        """As older torch has it: the other interface raises for the type."""

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise KeyError("bfloat16")

        @__cuda_array_interface__.setter
        def __cuda_array_interface__(self, _value: dict[str, Any]) -> None:
            pass

    only = OnlyDlpack(driver, bytes(64))
    assert domain.register(only).dtype == doorbell.DataType.BF16
    # Its work is ordered before the legacy default stream, for which the package waits.
    assert only.asked == 1


def test_the_kind_of_device_is_that_of_dlpack(driver: Driver) -> None:
    class OnRocm(CudaArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)

    with pytest.raises(doorbell.StateError, match="device type 10"):
        doorbell.Device().domain().register(OnRocm(driver, bytes(64)))


@pytest.mark.parametrize("kind", ["own", "legacy"])
def test_a_call_of_this_thread_waits_for_the_stream_that_an_array_names(driver: Driver, kind: str) -> None:
    domain = doorbell.Device().domain()
    gate = domain.alloc(4)
    word = memoryview(gate).cast("I")
    handle = driver.stream() if kind == "own" else 1
    holder = doorbell.CudaStream(handle)
    array = CudaArray(driver, b"0123456789abcdef")
    described = array.__cuda_array_interface__

    def open_later() -> threading.Timer:
        word[0] = 0
        holder.wait_value(gate, 0, 1, timeout=60)
        timer = threading.Timer(0.2, word.__setitem__, (0, 1))
        timer.start()
        return timer

    a, b = domain.message_queue(), domain.message_queue()
    a.connect(b.address)
    b.connect(a.address)
    pair = Pair()
    remote = pair.domain.alloc(16, doorbell.Access.ALL)
    bounce = doorbell.BounceBuffer(pair.domain, gpu=0)
    calls: list[Callable[[], object]] = [
        lambda: domain.register(array),
        lambda: a.send_now(array, 30),
        lambda: bounce.write(pair.a, array, remote.remote, 30),
    ]
    if kind == "legacy":
        # The stream before which the exporter orders its work.
        calls.append(lambda: domain.register(DlpackArray(array)))
    for call in calls:
        described["stream"] = handle
        timer = open_later()
        call()
        assert holder.done()
        timer.join()
    # Nobody else's work counts, and calls on a stream are in its order.
    timer = open_later()
    described["stream"] = None
    domain.register(array)
    if kind == "own":
        # The driver orders the thread's default stream with the legacy one.
        described["stream"] = 2
        domain.register(array)
    described["stream"] = handle
    queued = a.start_send(doorbell.HostStream(), array)
    assert not holder.done() and word[0] == 0
    timer.join()
    holder.synchronize(30)
    a.wait_send(doorbell.HostStream(), queued).wait(30)
    described["stream"] = 0
    with pytest.raises(BufferError, match="stream"):
        domain.register(array)


def test_a_region_keeps_the_array_of_a_gpu(driver: Driver) -> None:
    domain = doorbell.Device().domain()
    array = CudaArray(driver, bytes(64))
    pointer = array.pointer
    region = domain.register(array)
    del array
    assert pointer not in CudaArray.freed
    part = region[0:4]
    del region
    assert pointer not in CudaArray.freed and part.nbytes == 4
    del part
    for _ in range(1000):
        if pointer in CudaArray.freed:
            break
        doorbell.HostStream("turn").synchronize(10)
    assert pointer in CudaArray.freed


@pytest.mark.parametrize("kind", [TorchStream, CoreStream, CupyStream, int])
def test_streams_of_other_packages_are_used_as_they_are(driver: Driver, kind: Any) -> None:
    handle = driver.stream()
    stream = doorbell.CudaStream(kind(handle), name="theirs")
    assert stream.handle == handle and stream.name == "theirs" and isinstance(stream, doorbell.Stream)
    called = []
    stream.launch(lambda: called.append(1))
    event = stream.record()
    event.wait(30)
    assert called == [1] and stream.done()
    # Streams of both kinds wait for each other.
    host = doorbell.HostStream()
    host.wait_event(event)
    host.synchronize(10)
    stream.wait_event(host.record())
    stream.synchronize(10)


class OwnStream(TorchStream):
    """One that destroys its stream at the end, as cupy's does."""

    destroyed: list[int] = []

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.stream())
        self.driver = driver

    def __del__(self) -> None:
        OwnStream.destroyed.append(self.cuda_stream)
        self.driver.call("cuStreamDestroy_v2", ctypes.c_void_p(self.cuda_stream))


def test_the_object_of_a_stream_lives_until_the_work_is_done(driver: Driver) -> None:
    gate = doorbell.Device().domain().alloc(4)
    word = memoryview(gate).cast("I")
    theirs = OwnStream(driver)
    handle = theirs.cuda_stream
    stream = doorbell.CudaStream(theirs)
    stream.wait_value(gate, 0, 1, timeout=60)
    event = stream.record()
    del theirs, stream
    doorbell.HostStream("turn").synchronize(10)
    assert not event.done() and handle not in OwnStream.destroyed
    word[0] = 1
    event.wait(30)
    for _ in range(1000):
        if handle in OwnStream.destroyed:
            break
        doorbell.HostStream("turn").synchronize(10)
    assert OwnStream.destroyed.count(handle) == 1
    # Without work it goes at once, and so it does if there is no stream of it.
    idle = OwnStream(driver)
    handle = idle.cuda_stream
    stream = doorbell.CudaStream(idle)
    del idle, stream
    doorbell.HostStream("turn").synchronize(10)
    assert OwnStream.destroyed.count(handle) == 1


class TorchEvent:
    """An event as torch has it, which creates it with the first record and destroys it at the end."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.cuda_event = 0

    def record(self, stream: int) -> None:
        event = ctypes.c_void_p(self.cuda_event)
        if not event.value:
            self.driver.call("cuEventCreate", ctypes.byref(event), 0)
        self.driver.call("cuEventRecord", event, ctypes.c_void_p(stream))
        self.cuda_event = event.value or 0

    def __del__(self) -> None:
        if self.cuda_event:
            self.driver.call("cuEventDestroy_v2", ctypes.c_void_p(self.cuda_event))


class CupyEvent:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


def test_streams_wait_for_events_of_other_libraries(driver: Driver) -> None:
    raw = driver.stream()
    holder, cuda, host = doorbell.CudaStream(raw), doorbell.CudaStream(driver.stream()), doorbell.HostStream()
    gate = doorbell.Device().domain().alloc(4)
    word = memoryview(gate).cast("I")
    event = TorchEvent(driver)
    # Never recorded, it holds nobody.
    for stream in (cuda, host):
        stream.wait_event(event)
        stream.synchronize(30)
    called: list[int] = []
    wraps: list[Callable[[TorchEvent], object]] = [lambda it: it, lambda it: it.cuda_event, lambda it: CupyEvent(it.cuda_event)]
    for round_number, wrapped in enumerate(wraps):
        word[0] = 0
        holder.wait_value(gate, 0, 1, timeout=60)
        event.record(raw)
        for stream in (cuda, host):
            stream.wait_event(wrapped(event))
            stream.launch(lambda: called.append(1))
        with pytest.raises(doorbell.TimeoutError):
            host.synchronize(0.02)
        assert len(called) == 2 * round_number and not cuda.done()
        word[0] = 1
        host.synchronize(30)
        cuda.synchronize(30)
        assert len(called) == 2 * round_number + 2
    # The stream of the host keeps the object while it waits for it.
    word[0] = 0
    holder.wait_value(gate, 0, 1, timeout=60)
    event.record(raw)
    gone = weakref.ref(event)
    host.wait_event(event)
    del event
    assert gone() is not None and not host.done()
    word[0] = 1
    host.synchronize(30)
    for _ in range(1000):
        if gone() is None:
            break
        doorbell.HostStream("turn").synchronize(10)
    assert gone() is None


def test_a_host_stream_uses_the_context_of_the_thread_or_the_event(driver: Driver) -> None:
    class OfDevice(TorchEvent):
        class device:
            index = 0

    host, raw = doorbell.HostStream(), driver.stream()
    plain, named = TorchEvent(driver), OfDevice(driver)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            host.wait_event(named)
            host.wait_event(plain)
        except doorbell.StateError as error:
            errors.append(error)

    plain.record(raw)
    named.record(raw)
    # A thread that has used no GPU.
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert [str(error) for error in errors] and "context" in str(errors[0])
    host.synchronize(30)


def test_what_is_no_event_is_refused(driver: Driver) -> None:
    for stream in (doorbell.HostStream(), doorbell.CudaStream(driver.stream())):
        with pytest.raises(TypeError, match="cuda_event"):
            stream.wait_event("event")
        with pytest.raises(doorbell.StateError, match="null"):
            stream.wait_event(0)
        # The stand-in knows its events; no real driver is given what is none.
        with pytest.raises(doorbell.CudaError) as unknown:
            stream.wait_event(1 << 20)
        asked = "cuEventQuery" if isinstance(stream, doorbell.HostStream) else "cuStreamWaitEvent"
        assert (unknown.value.call, unknown.value.code, unknown.value.name) == (asked, 400, "CUDA_ERROR_INVALID_HANDLE")


def test_a_tensor_of_the_host_and_a_stream_of_the_gpu(driver: Driver) -> None:
    pair = Pair()
    source, target = bytearray(b"s" * 32), bytearray(32)
    stream = doorbell.CudaStream(driver.stream())
    region, into = pair.domain.register(source), pair.domain.register(target)
    pair.b.post_recv(into)
    stream.launch(lambda: source.__setitem__(slice(0, 4), b"late"))
    stream.queue_send(pair.a, region)
    stream.wait_recv(pair.b)
    stream.synchronize(30)
    assert target == b"late" + b"s" * 28


def test_what_is_no_stream_and_no_memory_is_refused(driver: Driver) -> None:
    with pytest.raises(TypeError, match="cuda_stream"):
        doorbell.CudaStream("stream")
    # CU_STREAM_PER_THREAD
    with pytest.raises(doorbell.StateError, match="per-thread"):
        doorbell.CudaStream(2)
    array = CudaArray(driver, bytes(64))
    array.__cuda_array_interface__["shape"] = (1 << 30,)
    with pytest.raises(doorbell.Error):
        doorbell.Device().domain().register(array)
    del array.__cuda_array_interface__["data"]
    with pytest.raises(BufferError, match="data"):
        doorbell.Device().domain().register(array)


def test_the_error_of_the_driver_has_its_name(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = doorbell.Device().domain()
    array = OfDevice(driver, bytes(64))
    pointer = ctypes.c_uint64()
    driver.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(4096), 0)
    array.__cuda_array_interface__["data"] = (pointer.value, False)
    with pytest.raises(doorbell.Error) as caught:
        domain.register(array)
    if isinstance(caught.value, doorbell.CudaError):
        assert caught.value.name.startswith("CUDA_ERROR") and caught.value.code and caught.value.call


def check_never_over(ticket: doorbell.Ticket) -> None:
    """The next launch executes the operation again: whatever waits for its end is refused, and nothing says that it has ended."""

    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert not ticket.done()
        waits: list[Callable[[], object]] = [
            lambda: ticket.wait(timeout=1),
            lambda: ticket.notify(descriptor),
            lambda: run_with(asyncio.SelectorEventLoop, asyncio.wait_for(wait_for(ticket), 10)),
            lambda: run_with(WithoutReaders, asyncio.wait_for(wait_for(ticket), 10)),
        ]
        for wait in waits:
            with pytest.raises(doorbell.StateError) as refused:
                wait()
            assert refused.value.kind == "Captured"
        with pytest.raises(BlockingIOError):
            os.eventfd_read(descriptor)
    finally:
        os.close(descriptor)


def test_a_graph_that_others_capture_transfers_with_each_launch(driver: Driver) -> None:
    pair = Pair()
    source, target = CudaArray(driver, bytes(64)), CudaArray(driver, bytes(64))
    sent = pair.domain.register(source)
    received = pair.domain.register(target)
    raw = driver.stream()
    stream = doorbell.CudaStream(raw)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    # As torch.cuda.graph does: CU_STREAM_CAPTURE_MODE_GLOBAL.
    driver.call("cuStreamBeginCapture_v2", ctypes.c_void_p(raw), 0)
    try:
        tickets = [
            stream.queue_recv(pair.b, received[0:64]),
            stream.queue_send(pair.a, sent[0:64]),
            stream.wait_send(pair.a),
            stream.wait_recv(pair.b),
        ]
    except doorbell.StateError as error:
        if "no kernels" in str(error):
            pytest.skip(str(error))
        raise
    finally:
        driver.call("cuStreamEndCapture", ctypes.c_void_p(raw), ctypes.byref(graph))
    driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    driver.call("cuGraphDestroy", graph)
    assert [(ticket.status, ticket.launches) for ticket in tickets] == [(doorbell.Status.PREPARED, 0)] * 4
    for launch in range(1, 21):
        data = bytes([launch]) * 64
        driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(source.pointer), data, ctypes.c_size_t(64))
        driver.call("cuGraphLaunch", executable, ctypes.c_void_p(raw))
        driver.call("cuStreamSynchronize", ctypes.c_void_p(raw))
        assert bytes(target) == data
        assert [ticket.launches for ticket in tickets] == [launch] * 4
    assert all(ticket.status == doorbell.Status.RUNG for ticket in tickets)
    for ticket in tickets:
        check_never_over(ticket)
    # Outside of a capture a wait is executed once, and over then; the completion of its send is that of the wait.
    stream.queue_recv(pair.b, received[0:64])
    once = stream.queue_send(pair.a, sent[0:64])
    waited = stream.wait_send(pair.a)
    stream.synchronize(30)
    waited.wait(timeout=10)
    assert waited.done() and waited.status == doorbell.Status.COMPLETE
    with pytest.raises(doorbell.StateError, match="completion is that of its wait"):
        once.wait(timeout=1)
    check_never_over(once)
    driver.call("cuGraphExecDestroy", executable)
