"""Collective operations of ranks that are threads of this process, each with a stream."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import doorbell
import pytest

numpy = pytest.importorskip("numpy", reason="numpy is not installed")


class Ranks:
    """A communicator and a stream for each rank."""

    def __init__(self, size: int, name: str = "softcx", config: doorbell.MessageConfig | None = None) -> None:
        self.domain: doorbell.Domain = doorbell.Device(name).domain()
        ends: dict[tuple[int, int], doorbell.MessageQueue] = {}
        for one in range(size):
            for other in range(one):
                a, b = self.domain.message_queue(config), self.domain.message_queue(config)
                a.connect(b.address)
                b.connect(a.address)
                ends[one, other], ends[other, one] = a, b
        self.communicators: list[doorbell.Communicator] = [
            doorbell.Communicator(rank, [ends.get((rank, peer)) for peer in range(size)]) for rank in range(size)
        ]
        self.streams: list[doorbell.HostStream] = [doorbell.HostStream(f"rank{rank}") for rank in range(size)]

    def run(self, prepare: Callable[[doorbell.Communicator], doorbell.Collective]) -> list[doorbell.Collective]:
        """Prepares an operation of each rank, and carries it out once."""
        operations = [prepare(communicator) for communicator in self.communicators]
        self.launch(operations)
        return operations

    def launch(self, operations: list[doorbell.Collective]) -> None:
        ranks = zip(self.communicators, self.streams, operations, strict=True)
        tickets = [communicator.launch(stream, operation) for communicator, stream, operation in ranks]
        for ticket in tickets:
            ticket.wait(60)
            assert ticket.done() and ticket.failed_peer is None


@pytest.fixture(params=[(3, "softcx"), (4, "softcx,path=proxy")])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(*request.param)


def filled(ranks: Ranks, items: int, dtype: str = "f4") -> list[Any]:
    return [numpy.arange(items, dtype=dtype) + 100 * rank for rank in range(len(ranks.communicators))]


def test_arrays_are_reduced_in_place(ranks: Ranks) -> None:
    for dtype in ("f2", "f4", "f8", "i4", "i8", "u1"):
        data = [(numpy.arange(50) % 7 + rank).astype(dtype) for rank in range(len(ranks.streams))]
        total = sum(array.astype("f8") for array in data)
        operations = ranks.run(lambda it, data=data: it.all_reduce(data[it.rank]))  # type: ignore[misc]
        assert all((array == total.astype(dtype)).all() for array in data), dtype
        # The same preparation again: what is there is reduced once more.
        ranks.launch(operations)
        assert (data[0] == (total * len(data)).astype(dtype)).all()
    size = len(ranks.streams)
    assert operations[0].messages > 0 and operations[0].sent_bytes > 0 and not operations[0].matched
    assert [it.size for it in ranks.communicators] == [size] * size and ranks.communicators[1].rank == 1


def test_torch_tensors_are_reduced_in_place_and_by_every_operation(ranks: Ranks) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    size = len(ranks.streams)
    inputs = [torch.arange(6.0, dtype=torch.float64) * (-1) ** rank + rank for rank in range(size)]
    stacked = torch.stack(inputs)
    for op, expected in (
        (doorbell.ReduceOp.SUM, stacked.sum(0)),
        ("min", stacked.min(0).values),
        (doorbell.ReduceOp.MIN, stacked.min(0).values),
        (doorbell.ReduceOp.MAX, stacked.max(0).values),
        (doorbell.ReduceOp.AVERAGE, stacked.mean(0)),
    ):
        outputs = [torch.zeros(6, dtype=torch.float64) for _ in inputs]
        ranks.run(lambda it, outputs=outputs, op=op: it.all_reduce(inputs[it.rank], outputs[it.rank], op))  # type: ignore[misc]
        assert all(torch.equal(output, expected) for output in outputs), op
    # In place, where it is.
    halves = [torch.full((8,), rank + 0.5, dtype=torch.bfloat16) for rank in range(size)]
    before = [half.data_ptr() for half in halves]
    ranks.run(lambda it: it.all_reduce(halves[it.rank]))
    assert [half.data_ptr() for half in halves] == before
    assert all(torch.equal(half, torch.full((8,), sum(range(size)) + size / 2, dtype=torch.bfloat16)) for half in halves)


def test_every_operation_moves_what_it_says(ranks: Ranks) -> None:
    size = len(ranks.streams)
    data = filled(ranks, 12)
    everything = numpy.concatenate(data)

    buffers = [array.copy() for array in data]
    ranks.run(lambda it: it.broadcast(buffers[it.rank], root=1))
    assert all((buffer == data[1]).all() for buffer in buffers)

    out = numpy.zeros(12 * size, dtype="f4")
    ranks.run(lambda it: it.gather(data[it.rank], out if it.rank == 2 else None, root=2))
    assert (out == everything).all()

    blocks = [numpy.zeros(12, dtype="f4") for _ in data]
    ranks.run(lambda it: it.scatter(blocks[it.rank], everything if it.rank == 0 else None))
    assert all((block == array).all() for block, array in zip(blocks, data, strict=True))

    outs = [numpy.zeros(12 * size, dtype="f4") for _ in data]
    ranks.run(lambda it: it.all_gather(outs[it.rank], data[it.rank], algorithm="ring"))
    assert all((out == everything).all() for out in outs)
    # In place, with blocks of several lengths.
    counts = [1, *[3] * (size - 1)]
    outs = [numpy.zeros(sum(counts), dtype="i8") for _ in data]
    ends = numpy.cumsum(counts)
    for rank, out in enumerate(outs):
        out[ends[rank] - counts[rank] : ends[rank]] = rank + 1
    ranks.run(lambda it: it.all_gather(outs[it.rank], counts=counts))
    assert all((out == numpy.repeat(numpy.arange(size) + 1, counts)).all() for out in outs)

    sources = [numpy.arange(2 * size, dtype="i4") + 1000 * rank for rank in range(size)]
    outs = [numpy.zeros(2 * size, dtype="i4") for _ in data]
    ranks.run(lambda it: it.all_to_all(sources[it.rank], outs[it.rank]))
    assert all((outs[rank].reshape(size, 2) == [source[2 * rank : 2 * rank + 2] for source in sources]).all() for rank in range(size))
    outs = [numpy.zeros(2 * size, dtype="i4") for _ in data]
    twos = [2] * size
    ranks.run(lambda it: it.all_to_all(sources[it.rank], outs[it.rank], sends=twos, receives=twos, algorithm="pairwise"))
    assert all((outs[rank][0:2] == sources[0][2 * rank : 2 * rank + 2]).all() for rank in range(size))

    total = numpy.sum(data, 0)
    out = numpy.zeros(12, dtype="f4")
    ranks.run(lambda it: it.reduce(data[it.rank], out if it.rank == 1 else None, root=1, algorithm="binomial"))
    assert (out == total).all()

    parts = [numpy.zeros(12 // size, dtype="f4") for _ in data]
    ranks.run(lambda it: it.reduce_scatter(data[it.rank], parts[it.rank], doorbell.ReduceOp.MAX))
    assert (numpy.concatenate(parts) == numpy.max(data, 0)).all()

    inbox = [numpy.zeros(12, dtype="f4") for _ in data]
    around = ranks.run(lambda it: it.exchange([((it.rank + 1) % size, data[it.rank])], [((it.rank - 1) % size, inbox[it.rank])]))
    assert all((inbox[rank] == data[rank - 1]).all() for rank in range(size)) and around[0].algorithm == "linear"
    ranks.run(lambda it: it.barrier(algorithm="dissemination"))


def test_parts_of_regions_are_reduced_with_a_type_that_is_named(ranks: Ranks) -> None:
    regions = [ranks.domain.alloc(64, doorbell.Access.ALL) for _ in ranks.streams]
    for region in regions:
        numpy.frombuffer(region, dtype="i8")[:] = numpy.arange(8)
    assert regions[0].dtype is None
    for dtype in (doorbell.DataType.I64, "i64"):
        ranks.run(lambda it, dtype=dtype: it.all_reduce(regions[it.rank][8:24], dtype=dtype))  # type: ignore[misc]
    size = len(ranks.streams)
    expected = [0, size**2, 2 * size**2, 3, 4, 5, 6, 7]
    assert all(memoryview(region).cast("q").tolist() == expected for region in regions)
    with pytest.raises(TypeError, match="dtype"):
        ranks.communicators[0].all_reduce(regions[0])


def test_items_of_each_type_are_reduced(ranks: Ranks) -> None:
    types = {
        doorbell.DataType.F16: "f2",
        doorbell.DataType.F32: "f4",
        doorbell.DataType.F64: "f8",
        doorbell.DataType.I32: "i4",
        doorbell.DataType.I64: "i8",
        doorbell.DataType.U8: "u1",
    }
    # numpy has no bfloat16: its items are the upper halves of those of f4.
    assert types.keys() | {doorbell.DataType.BF16} == set(doorbell.DataType)
    size = len(ranks.streams)
    for item, name in types.items():
        arrays = [numpy.arange(5, dtype=name) for _ in ranks.streams]
        assert ranks.domain.register(arrays[0]).dtype is item
        ranks.run(lambda it, arrays=arrays: it.all_reduce(arrays[it.rank]))  # type: ignore[misc]
        assert all(array.tolist() == [size * at for at in range(5)] for array in arrays)
    halves = [numpy.array([0x3F80, 0x4000], dtype="u2") for _ in ranks.streams]
    ranks.run(lambda it: it.all_reduce(halves[it.rank], dtype="bf16"))
    sums = (halves[0].astype("u4") << 16).view("f4")
    assert sums.tolist() == [size, 2 * size]


def test_matched_operations_are_written_into_place(ranks: Ranks) -> None:
    data = filled(ranks, 3000)
    total = numpy.sum(data, 0)
    operations = [it.all_reduce(data[it.rank], algorithm="ring") for it in ranks.communicators]
    threads = [
        threading.Thread(target=it.match_ahead, args=(operation, 60)) for it, operation in zip(ranks.communicators, operations, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(operation.matched and operation.algorithm == "ring" for operation in operations)
    ranks.launch(operations)
    assert all((array == total).all() for array in data)
    for it in ranks.communicators:
        assert it.control in ("direct", "proxy") and it.failure is None
    enders = [threading.Thread(target=it.finish, args=(60,)) for it in ranks.communicators]
    for thread in enders:
        thread.start()
    for thread in enders:
        thread.join()


def test_operations_are_awaited() -> None:
    ranks = Ranks(2)
    data = filled(ranks, 10)
    first, second = (it.all_reduce(data[it.rank]) for it in ranks.communicators)
    assert first.runs_on(ranks.streams[0])

    async def main() -> None:
        waiting = asyncio.ensure_future(wait(ranks.communicators[0].launch(ranks.streams[0], first)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await ranks.communicators[1].launch(ranks.streams[1], second)
        await waiting

    async def wait(ticket: doorbell.CollectiveTicket) -> None:
        await ticket

    asyncio.run(main())
    assert (data[0] == data[1]).all() and data[0][1] == 102


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(3, config=doorbell.MessageConfig(endpoint=doorbell.EndpointConfig(wait_timeout=0.1)))
    first = ranks.communicators[0]
    ticket = first.launch(ranks.streams[0], first.barrier())
    with pytest.raises(doorbell.Error):
        ticket.wait(30)
    assert ticket.failed_peer in (1, 2)
    failure = first.failure
    assert failure is not None and failure[0] in (1, 2) and failure[1].cause == "Deadline"


def test_an_abort_ends_what_others_wait_for() -> None:
    ranks = Ranks(2)
    first, second = ranks.communicators
    operation = first.barrier()
    errors = []

    def match() -> None:
        try:
            first.match_ahead(operation)
        except doorbell.Error as error:
            errors.append(error)

    thread = threading.Thread(target=match)
    thread.start()
    second.abort()
    first.abort()
    thread.join(30)
    assert len(errors) == 1 and not operation.matched


def test_one_rank_alone_and_what_is_refused() -> None:
    domain = doorbell.Device().domain()
    alone, stream = doorbell.Communicator.alone(domain), doorbell.HostStream()
    data = numpy.arange(4.0)
    alone.launch(stream, alone.all_reduce(data)).wait(30)
    assert data.tolist() == [0, 1, 2, 3] and (alone.rank, alone.size, alone.control) == (0, 1, None)
    assert alone.domain.device.name == "softcx"
    ranks = Ranks(2)
    one = ranks.communicators[0]
    with pytest.raises(doorbell.ForeignError):
        alone.launch(stream, one.barrier())
    with pytest.raises(doorbell.RangeError):
        one.broadcast(data, root=2)
    with pytest.raises(doorbell.MalformedError):
        one.barrier(algorithm="magic")
    with pytest.raises(doorbell.MalformedError):
        one.all_reduce(data, op="product")
    with pytest.raises(TypeError, match="dtype"):
        one.all_reduce(numpy.zeros(4, dtype="c8"))
    with pytest.raises(ValueError, match="counts"):
        one.reduce_scatter(numpy.zeros(3), numpy.zeros(1))
    with pytest.raises(ValueError, match="pairwise"):
        one.all_to_all(data, data, sends=[2, 2], algorithm="bruck")
    # A queue has one user. One that is refused has none.
    a, b = domain.message_queue(), domain.message_queue()
    a.connect(b.address)
    b.connect(a.address)
    stranger = doorbell.Device().domain().message_queue()
    for rank, queues in ((0, [a, None]), (0, [None, a, None]), (2, [None, a]), (0, [None, a, a]), (0, [None, a, stranger])):
        with pytest.raises((doorbell.Error, ValueError)):
            doorbell.Communicator(rank, queues)
    b.start_send_now(b"whole", 30)
    assert a.recv_now(bytearray(8), 30) == 5
    taken_before = doorbell.Communicator(0, [None, a])
    with pytest.raises(doorbell.StateError):
        doorbell.Communicator(0, [None, b, a])
    b.start_send_now(b"whole", 30)
    del taken_before
    for use in (lambda: a.send_now(b"more"), lambda: doorbell.Communicator(0, [None, a])):
        with pytest.raises(doorbell.StateError) as taken:
            use()
        assert taken.value.kind == "Taken"
    with pytest.raises(doorbell.StateError):
        doorbell.Communicator(0, [b, None])
