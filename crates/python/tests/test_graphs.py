"""Graphs of the library's own, over the stand-in for the CUDA driver, and pages that a kernel pushes."""

import ctypes
import gc
import struct
import threading
from typing import Any

import doorbell
import pytest
from conftest import Pair
from test_collectives import Ranks
from test_cuda import CudaArray, Driver, driver
from test_messages import Queues

numpy = pytest.importorskip("numpy", reason="numpy is not installed")

__all__ = ["driver"]
RIGHTS = doorbell.Access.ALL


@pytest.fixture
def cuda(driver: Driver) -> doorbell.CudaStream:
    return doorbell.CudaStream(driver.stream())


def has_kernels(error: doorbell.StateError) -> None:
    """Skips what a package without kernels refuses."""
    if "kernel" in str(error):
        pytest.skip(str(error))
    raise error


@pytest.fixture(params=["softcx", "softcx,path=proxy"])
def joined(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_a_graph_repeats_operations_of_endpoints(joined: Pair, cuda: doorbell.CudaStream) -> None:
    source, target = numpy.zeros(4, dtype="u4"), numpy.zeros(16, dtype="u4")
    own, peer = joined.domain.register(source, RIGHTS), joined.domain.register(target, RIGHTS)
    counter, old = joined.domain.alloc(16, RIGHTS), joined.domain.alloc(8)
    words = memoryview(counter).cast("Q")
    graph = doorbell.GraphBuilder.capture(cuda)
    graph.recv(joined.b, peer[0:4], wr_id=1)
    graph.send(joined.a, own[0:4], signaled=False, immediate=5)
    graph.write(joined.a, own[0:2], peer.remote[4:6], wr_id=2)
    graph.wait_send(joined.a)
    graph.wait_recv(joined.b, timeout=60)
    graph.read(joined.a, own[2:4], peer.remote[8:10], signaled=False)
    graph.fetch_add(joined.a, old, counter.remote[0:8], 3)
    graph.wait_send(joined.a)
    graph.compare_swap(joined.a, old, counter.remote[8:16], 0, 9)
    graph.wait_send(joined.a, 60)
    graph.write_value(peer, 60, 7)
    graph.wait_value(peer, 60, 7, timeout=60)
    launched: doorbell.GraphExec = graph.instantiate()
    with pytest.raises(doorbell.StateError) as taken:
        graph.send(joined.a, own)
    assert taken.value.kind == "Taken" and launched.armed and launched.tickets == []
    # The graph alone has the endpoints.
    del joined, graph
    gc.collect()
    for launch in range(1, 11):
        source[0:2] = [launch, launch * 10]
        target[8:10] = launch + 100
        launched.launch(cuda)
        cuda.synchronize(60)
        assert target[:2].tolist() == [launch, launch * 10] == target[4:6].tolist()
        assert source[2:].tolist() == [launch + 100] * 2
        assert words.tolist() == [3 * launch, 9] and target[15] == 7
        assert [ticket.status for ticket in launched.tickets] == [doorbell.Status.COMPLETE] * len(launched.tickets)
    assert len(launched.tickets) == 12 and not launched.armed
    launched.arm()
    with pytest.raises(doorbell.StateError):
        launched.arm()
    launched.disarm()
    with pytest.raises(doorbell.StateError) as unarmed:
        launched.launch_armed(cuda)
    assert unarmed.value.kind == "NotArmed"
    launched.arm()
    launched.launch_armed(cuda)
    cuda.synchronize(60)
    assert words[0] == 33
    with pytest.raises(TypeError, match="CudaStream"):
        launched.launch(doorbell.HostStream())


def test_a_graph_repeats_messages(driver: Driver) -> None:
    queues = Queues()
    streams = [doorbell.CudaStream(driver.stream()) for _ in range(2)]
    source, target = numpy.zeros(3000), numpy.zeros(3000)
    short, there = numpy.zeros(3), numpy.zeros(3)
    try:
        sender = doorbell.GraphBuilder.capture(streams[0])
        sender.start_message(queues.a, source)
        sender.wait_messages(queues.a)
        sender.send_message(queues.a, [short])
        receiver = doorbell.GraphBuilder.capture(streams[1])
        receiver.recv_message(queues.b, target)
        receiver.recv_message(queues.b, there)
    except doorbell.StateError as error:
        has_kernels(error)
    graphs = [sender.instantiate(), receiver.instantiate()]
    for launch in range(1, 6):
        source[:], short[:] = launch, -launch
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        for stream in streams:
            stream.synchronize(60)
        assert (target == launch).all() and (there == -launch).all()
    assert [ticket.wait(60) for ticket in graphs[1].message_tickets] == [24000, 24]


def test_a_graph_repeats_a_collective_operation(driver: Driver) -> None:
    ranks = Ranks(2)
    streams = [doorbell.CudaStream(driver.stream()) for _ in range(2)]
    data = [numpy.zeros(1000, dtype="f4") for _ in streams]
    graphs = []
    try:
        for communicator, stream, array in zip(ranks.communicators, streams, data, strict=True):
            builder = doorbell.GraphBuilder.capture(stream)
            builder.collective(communicator, communicator.all_reduce(array))
            graphs.append(builder.instantiate())
    except doorbell.StateError as error:
        has_kernels(error)
    for launch in range(1, 6):
        data[0][:], data[1][:] = launch, 10
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        for graph, stream in zip(graphs, streams, strict=True):
            stream.synchronize(60)
            for ticket in graph.collective_tickets:
                ticket.wait(60)
        assert all((array == launch + 10).all() for array in data)


def test_a_builder_stays_in_its_thread(cuda: doorbell.CudaStream) -> None:
    pair = Pair()
    graph = doorbell.GraphBuilder.capture(cuda)
    region = pair.domain.alloc(8)
    errors: list[doorbell.StateError] = []

    def use() -> None:
        try:
            graph.recv(pair.b, region)
        except doorbell.StateError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1 and errors[0].kind == "WrongKind"
    # A capture that is not instantiated ends with its builder.
    graph.write_value(region, 0, 1)
    del graph
    gc.collect()
    cuda.write_value(region, 4, 2)
    cuda.synchronize(60)
    assert memoryview(region).cast("I").tolist() == [0, 2]


def test_a_kernel_pushes_the_pages_that_a_table_names(driver: Driver, cuda: doorbell.CudaStream) -> None:
    pair = Pair()
    page = 16
    pages = bytes(at // page for at in range(8 * page))
    local, remote = pair.domain.register(bytearray(pages), RIGHTS), pair.domain.register(bytearray(8 * page), RIGHTS)
    signal = pair.domain.alloc(8, RIGHTS)
    table = CudaArray(driver, struct.pack("=7I", 5, 0, 2, 7, 1, 3, 3) + bytes(4))
    entries = pair.domain.register(table)
    try:
        push = cuda.push_pages(pair.a, page, local, remote.remote, entries[0:24], (entries, 24), signal.remote)
    except doorbell.StateError as error:
        has_kernels(error)
    cuda.wait_send(pair.a)
    there = cuda.wait_count64(signal, 0, 1, 1, timeout=60)
    cuda.synchronize(60)
    there.wait(60)
    assert push.status in (doorbell.Status.RUNG, doorbell.Status.COMPLETE)
    shown: Any = memoryview(remote)
    assert [shown[page * at] for at in range(8)] == [5, 0, 0, 1, 0, 0, 0, 2] and memoryview(signal).cast("Q")[0] == 1
    # The table of then.
    data = struct.pack("=2I", 6, 6) + bytes(16) + struct.pack("=I", 1)
    driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(table.pointer), data, ctypes.c_size_t(len(data)))
    cuda.push_pages(pair.a, page, local, remote.remote, entries[0:24], (entries, 24), signal.remote)
    cuda.wait_send(pair.a)
    cuda.synchronize(60)
    assert shown[page * 6] == 6
