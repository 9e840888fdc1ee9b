"""Failures are exceptions of their classes, with the attributes of the library's errors."""

import asyncio
import builtins
import inspect
import threading

import doorbell
import pytest
from conftest import Pair


def test_every_class_is_below_error_and_a_built_in_one_where_there_is_one() -> None:
    nearest = {
        doorbell.RangeError: ValueError,
        doorbell.ChoiceError: ValueError,
        doorbell.AlignmentError: ValueError,
        doorbell.OutOfBoundsError: IndexError,
        doorbell.ForeignError: ValueError,
        doorbell.MalformedError: ValueError,
        doorbell.TruncatedError: ValueError,
        doorbell.StateError: RuntimeError,
        doorbell.TimeoutError: builtins.TimeoutError,
        doorbell.SystemCallError: OSError,
        doorbell.WorkError: Exception,
        doorbell.QueueFullError: Exception,
        doorbell.AsynchronousError: Exception,
        doorbell.CudaError: Exception,
        doorbell.PeerError: Exception,
        doorbell.RankError: Exception,
        doorbell.RefusedError: ConnectionRefusedError,
    }
    names = {name for name in doorbell.__all__ if name.endswith("Error") and name != "Error"}
    assert {kind.__name__ for kind in nearest} == names
    for kind, base in nearest.items():
        assert issubclass(kind, doorbell.Error) and issubclass(kind, base)
        assert inspect.getdoc(kind)


def test_a_wrong_key_fails_the_endpoint_with_the_status_of_the_completion(pair: Pair) -> None:
    # The peer lets nobody write.
    target = pair.domain.register(bytearray(8))
    source = pair.domain.register(bytearray(8))
    ticket = pair.a.post_write(source, target.remote, wr_id=41)
    with pytest.raises(doorbell.WorkError) as caught:
        ticket.wait(10)
    error = caught.value
    assert (error.qpn, error.wr_id, error.cause, error.status) == (pair.a.qpn, 41, "Completion", "RemAccessErr")
    assert error.syndrome and "remote key" in str(error)
    assert ticket.status is doorbell.Status.FAILED and ticket.done()
    failure = pair.a.failure
    assert failure is not None and (failure.wr_id, failure.cause) == (41, "Completion")
    with pytest.raises(doorbell.WorkError):
        pair.a.post_send(source)
    pair.a.reset()
    assert pair.a.failure is None


def test_a_failed_wait_is_a_fault_of_the_stream_until_it_is_taken(stream: doorbell.HostStream) -> None:
    pair = Pair()
    region = pair.domain.register(bytearray(8))
    ran = []
    pair.b.post_recv(region)
    # The time of a wait begins when the stream comes to it.
    gate = threading.Event()
    stream.launch(lambda: gate.wait(10))
    wait = stream.wait_recv(pair.b, timeout=0.05)
    stream.launch(lambda: ran.append(1))
    behind = stream.queue_send(pair.a, region)
    gate.set()
    with pytest.raises(doorbell.AsynchronousError) as caught:
        stream.synchronize(10)
    assert caught.value.stream == "test" and caught.value.reason
    assert caught.value.work is not None and caught.value.work.cause == "Deadline"
    with pytest.raises(doorbell.WorkError):
        wait.wait(10)
    with pytest.raises(doorbell.StateError, match="stream failed"):
        behind.wait(10)
    assert behind.status is doorbell.Status.DISCARDED and ran == []
    fault = stream.take_fault()
    assert isinstance(fault, doorbell.AsynchronousError) and stream.take_fault() is None
    stream.launch(lambda: ran.append(2))
    stream.synchronize(10)
    assert ran == [2]


def test_the_exception_of_a_function_is_a_fault_and_nothing_behind_it_is_sent(stream: doorbell.HostStream) -> None:
    pair = Pair()
    source, target = pair.domain.register(bytearray(b"stale")), bytearray(5)
    into = pair.domain.register(target)
    pair.b.post_recv(into)

    gate = threading.Event()

    def fails() -> None:
        gate.wait(10)
        raise KeyError("no data")

    stream.launch(fails)
    behind = stream.queue_send(pair.a, source)
    gate.set()
    with pytest.raises(doorbell.AsynchronousError, match="KeyError: 'no data'"):
        stream.synchronize(10)
    assert behind.status is doorbell.Status.DISCARDED and target == bytes(5)
    with pytest.raises(doorbell.AsynchronousError, match="KeyError"):
        stream.launch(fails)
    stream.take_fault()
    with pytest.raises(TypeError):
        stream.launch(3)  # type: ignore[arg-type]


def test_await_raises_what_wait_raises(stream: doorbell.HostStream) -> None:
    pair = Pair()
    target, source = pair.domain.register(bytearray(8)), pair.domain.register(bytearray(8))

    async def work() -> None:
        await pair.a.post_write(source, target.remote)

    async def event() -> None:
        def fails() -> None:
            raise ValueError("here")

        stream.launch(fails)
        try:
            recorded = stream.record()
        except doorbell.AsynchronousError:
            # The function has failed already.
            raise
        await recorded

    with pytest.raises(doorbell.WorkError):
        asyncio.run(work())
    with pytest.raises(doorbell.AsynchronousError, match="here"):
        asyncio.run(event())


def test_abort_and_discard_have_statuses_of_their_own(stream: doorbell.HostStream) -> None:
    pair = Pair()
    region, gate = pair.domain.register(bytearray(8)), pair.domain.alloc(4)
    receive = pair.b.post_recv(region)
    assert receive.status is doorbell.Status.RUNG
    pair.b.abort()
    with pytest.raises(doorbell.WorkError) as caught:
        receive.wait(10)
    assert caught.value.cause == "Aborted" and caught.value.wr_id is None and caught.value.status is None
    assert receive.status in (doorbell.Status.FAILED, doorbell.Status.UNKNOWN)
    stream.wait_value(gate, 0, 1, timeout=30)
    sent = stream.queue_send(pair.a, region)
    assert sent.status is doorbell.Status.QUEUED and not sent.done()
    stream.abort()
    with pytest.raises(doorbell.Error):
        sent.wait(10)
    assert sent.status is doorbell.Status.DISCARDED
    assert {status.name for status in doorbell.Status} >= {"PREPARED", "CANCELLED", "FAILED"}


def test_objects_of_other_domains_devices_and_states_are_refused() -> None:
    pair, other = Pair(), Pair()
    with pytest.raises(doorbell.ForeignError) as foreign:
        pair.a.post_send(other.domain.register(bytearray(8)))
    assert foreign.value.argument and foreign.value.found != foreign.value.expected
    fresh = pair.domain.endpoint()
    with pytest.raises(doorbell.StateError) as state:
        fresh.post_send(pair.domain.alloc(8))
    assert state.value.kind == "NotConnected"
    with pytest.raises(doorbell.MalformedError):
        fresh.connect(b"no address")
    with pytest.raises(doorbell.Error, match="softcx"):
        doorbell.Device("no such device")
    with pytest.raises(ValueError):
        fresh.wait_send(float("nan"))
