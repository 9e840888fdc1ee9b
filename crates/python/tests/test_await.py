"""`await` of tickets and events: one descriptor for a loop while it waits, and none after it."""

import asyncio
import gc
import os
import select
from collections.abc import Callable, Coroutine
from typing import Any

import doorbell
import pytest
from conftest import Pair


def descriptors() -> int:
    """The eventfds of this process: devices that end meanwhile have descriptors of other kinds."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventfd]"
        except FileNotFoundError:
            pass
    return count


class Gate:
    """A word that holds a stream."""

    def __init__(self, stream: doorbell.HostStream) -> None:
        self.stream: doorbell.HostStream = stream
        self.region: doorbell.Region = doorbell.Device().domain().alloc(4)

    def wait(self) -> doorbell.Ticket:
        return self.stream.wait_value(self.region, 0, 1, timeout=60)

    def open(self) -> None:
        memoryview(self.region).cast("I")[0] = 1


async def wait_for(subject: doorbell.Ticket | doorbell.Event) -> None:
    await subject


def run_with(factory: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def test_many_tickets_are_awaited_by_one_descriptor() -> None:
    pair = Pair(config=doorbell.EndpointConfig(send_depth=512, recv_depth=512))
    target, source = pair.domain.register(bytearray(8)), pair.domain.register(b"received")

    async def main() -> None:
        tickets = [pair.b.post_recv(target) for _ in range(500)]
        before = descriptors()
        # Two tasks wait for each ticket.
        tasks = [asyncio.ensure_future(wait_for(ticket)) for ticket in tickets + tickets]
        await asyncio.sleep(0.05)
        assert descriptors() == before + 1 and not any(task.done() for task in tasks)
        for _ in tickets:
            pair.a.post_send(source)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert descriptors() == before

    asyncio.run(main())
    assert bytes(memoryview(target)) == b"received"


def test_a_cancelled_await_leaves_no_descriptor_and_the_ticket_as_it_was(stream: doorbell.HostStream) -> None:
    gate = Gate(stream)

    async def main() -> None:
        ticket, event = gate.wait(), stream.record()
        before = descriptors()
        for _ in range(3):
            tasks = [asyncio.ensure_future(wait_for(subject)) for subject in (ticket, event, ticket)]
            await asyncio.sleep(0.01)
            assert descriptors() == before + 1
            tasks[0].cancel()
            await asyncio.sleep(0)
            assert descriptors() == before + 1, "the others still wait"
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
            assert descriptors() == before, "cancelled before the stream has come to it"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for(ticket), 0.01)
        assert descriptors() == before and not ticket.done()
        gate.open()
        await asyncio.wait_for(asyncio.gather(wait_for(ticket), wait_for(event)), 60)
        assert ticket.status is doorbell.Status.COMPLETE and descriptors() == before

    asyncio.run(main())


def test_a_ticket_that_only_its_task_has_is_awaited(stream: doorbell.HostStream) -> None:
    gate = Gate(stream)

    async def main() -> None:
        task = asyncio.ensure_future(wait_for(gate.wait()))
        await asyncio.sleep(0.01)
        gc.collect()
        gate.open()
        await asyncio.wait_for(task, 60)

    asyncio.run(main())


def test_a_loop_that_ends_with_tasks_that_wait_leaves_no_descriptor(stream: doorbell.HostStream) -> None:
    gate = Gate(stream)
    ticket = gate.wait()
    # The first wait of the process starts a thread of the library.
    asyncio.run(asyncio.wait_for(asyncio.sleep(0), 1))
    before = descriptors()

    async def begin() -> None:
        begun = asyncio.ensure_future(wait_for(ticket))
        await asyncio.sleep(0.01)
        assert not begun.done()

    # A runner cancels its tasks; a loop alone leaves them, and the collector ends them.
    asyncio.run(begin())
    assert descriptors() == before
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    loop.run_until_complete(begin())
    loop.close()
    del loop
    gc.collect()
    assert descriptors() == before
    gate.open()
    ticket.wait(60)


def test_two_loops_in_turn_and_a_wait_that_is_over_before_it_begins(stream: doorbell.HostStream) -> None:
    for _ in range(2):
        gate = Gate(stream)

        async def main(gate: Gate = gate) -> None:
            ticket = gate.wait()
            asyncio.get_running_loop().call_later(0.01, gate.open)
            await ticket
            before = descriptors()
            await ticket
            await stream.record()
            assert descriptors() == before

        asyncio.run(main())
        memoryview(gate.region).cast("I")[0] = 0


class WithoutReaders(asyncio.SelectorEventLoop):
    """As loops that cannot wait for descriptors."""

    def add_reader(self, *_arguments: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_loops_without_readers_look_at_intervals(stream: doorbell.HostStream) -> None:
    gate = Gate(stream)

    async def main() -> None:
        ticket, before = gate.wait(), descriptors()
        task = asyncio.ensure_future(wait_for(ticket))
        await asyncio.sleep(0.02)
        assert not task.done() and descriptors() == before
        asyncio.get_running_loop().call_later(0.01, gate.open)
        await asyncio.wait_for(asyncio.gather(task, wait_for(stream.record())), 60)
        assert descriptors() == before

    run_with(WithoutReaders, main())


def test_a_ticket_writes_to_a_descriptor(stream: doorbell.HostStream) -> None:
    gate = Gate(stream)
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    ticket = gate.wait()
    ticket.notify(descriptor)
    assert not select.select([descriptor], [], [], 0.01)[0]
    gate.open()
    assert select.select([descriptor], [], [], 60)[0] and os.eventfd_read(descriptor) == 1 and ticket.done()
    # What is over is told at once.
    ticket.notify(descriptor)
    assert os.eventfd_read(descriptor) == 1
    with pytest.raises(doorbell.StateError):
        ticket.notify(-1)
    os.close(descriptor)
    with pytest.raises(doorbell.SystemCallError):
        ticket.notify(1 << 20)


def written(ticket: doorbell.MessageTicket | doorbell.MatchTicket | doorbell.CollectiveTicket, start: Callable[[], object]) -> None:
    """A descriptor is written to once the ticket is over, and not before."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    ticket.notify(descriptor)
    assert not select.select([descriptor], [], [], 0.01)[0] and not ticket.done()
    start()
    assert select.select([descriptor], [], [], 60)[0] and os.eventfd_read(descriptor) == 1 and ticket.done()
    os.close(descriptor)


def test_tickets_of_messages_write_to_a_descriptor(stream: doorbell.HostStream) -> None:
    domain = doorbell.Device().domain()
    queues = [domain.message_queue() for _ in range(4)]
    for one, other in ((queues[0], queues[1]), (queues[2], queues[3])):
        one.connect(other.address)
        other.connect(one.address)
    target = bytearray(8)
    written(queues[1].recv(stream, target), lambda: queues[0].send_now(b"a notice", 30))
    assert target == b"a notice"
    sender, receiver = (doorbell.Matcher(domain, [queue]) for queue in queues[2:])
    written(receiver.recv(stream, target), lambda: sender.send_now(b"matched.", 0, 1, 30))
    assert target == b"matched."


def test_a_ticket_of_a_collective_operation_writes_to_a_descriptor() -> None:
    domain = doorbell.Device().domain()
    a, b = domain.message_queue(), domain.message_queue()
    a.connect(b.address)
    b.connect(a.address)
    ranks = [doorbell.Communicator(0, [None, a]), doorbell.Communicator(1, [b, None])]
    streams = [doorbell.HostStream(), doorbell.HostStream()]
    barriers = [rank.barrier() for rank in ranks]
    written(ranks[0].launch(streams[0], barriers[0]), lambda: ranks[1].launch(streams[1], barriers[1]))
    for stream in streams:
        stream.synchronize(30)
