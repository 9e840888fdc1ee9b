"""Each call that waits lets other threads run meanwhile, and an interrupt ends it."""

import os
import signal
import threading
import time
from collections.abc import Callable

import doorbell
import pytest
from conftest import Pair

LONG = 60.0
NEVER = 1
# Entries of a stream's queue.
ENTRIES = 1024


class Waits:
    """Objects whose waits do not end by themselves."""

    def __init__(self) -> None:
        self.pair: Pair = Pair()
        domain = self.pair.domain
        self.region: doorbell.Region = domain.alloc(16, doorbell.Access.ALL)
        config = doorbell.MessageConfig(slots=1)
        self.queues: list[doorbell.MessageQueue] = [domain.message_queue(config) for _ in range(4)]
        for a, b in (self.queues[:2], self.queues[2:]):
            a.connect(b.address)
            b.connect(a.address)
        self.stream: doorbell.HostStream = doorbell.HostStream("waits")
        ends = [domain.message_queue(config) for _ in range(2)]
        ends[0].connect(ends[1].address)
        ends[1].connect(ends[0].address)
        self.peer: doorbell.MessageQueue = ends[1]
        self.matcher: doorbell.Matcher = doorbell.Matcher(domain, [ends[0]])
        ends = [domain.message_queue() for _ in range(2)]
        ends[0].connect(ends[1].address)
        ends[1].connect(ends[0].address)
        self.ranks: list[doorbell.Communicator] = [doorbell.Communicator(0, [None, ends[0]]), doorbell.Communicator(1, [ends[1], None])]

        # What waits for room.
        room = doorbell.EndpointConfig(send_depth=1, recv_depth=1, room_timeout=LONG)
        self.narrow: Pair = Pair(config=room)
        config = doorbell.MessageConfig(ahead=2, endpoint=doorbell.EndpointConfig(room_timeout=LONG))
        ends = [domain.message_queue(config) for _ in range(6)]
        for a, b in (ends[:2], ends[2:4], ends[4:]):
            a.connect(b.address)
            b.connect(a.address)
        self.narrow_queues: list[doorbell.MessageQueue] = ends[:2]
        self.narrow_matcher: doorbell.Matcher = doorbell.Matcher(domain, [ends[2]], doorbell.MatcherConfig(receives=1, messages=config))
        self.narrow_rank: doorbell.Communicator = doorbell.Communicator(0, [None, ends[4]])
        self.ends: list[doorbell.MessageQueue] = ends

    def held(self) -> doorbell.Ticket:
        return self.stream.wait_value(self.region, 0, NEVER, timeout=LONG)

    def receive(self) -> doorbell.Ticket:
        return self.pair.b.post_recv(self.region)

    def full(self) -> doorbell.MessageQueue:
        """A queue whose peer has no slot left."""
        self.queues[0].send_now(b"the only slot", LONG)
        return self.queues[0]

    def unread(self) -> doorbell.PostedSend:
        return self.queues[0].start_send_now(bytearray(20000), LONG)

    def event(self) -> doorbell.Event:
        self.held()
        return self.stream.record()

    def full_stream(self) -> doorbell.HostStream:
        """A stream whose queue takes nothing, or next to nothing."""
        self.held()
        for _ in range(ENTRIES - 10):
            self.stream.write_value(self.region, 4, 1)
        return self.stream

    def synchronized(self) -> doorbell.HostStream:
        self.held()
        return self.stream


def again(call: Callable[[], object]) -> None:
    """Calls until there is no room."""
    for _ in range(100):
        call()


CALLS: dict[str, Callable[[Waits], Callable[[], object]]] = {
    "Ticket.wait": lambda it: lambda ticket=it.receive(): ticket.wait(LONG),  # type: ignore[misc]
    "Ticket.wait of a word": lambda it: lambda ticket=it.held(): ticket.wait(),  # type: ignore[misc]
    "Event.wait": lambda it: lambda event=it.event(): event.wait(LONG),  # type: ignore[misc]
    "Stream.synchronize": lambda it: lambda stream=it.synchronized(): stream.synchronize(),  # type: ignore[misc]
    "Endpoint.wait_send": lambda it: lambda: it.pair.a.wait_send(LONG),
    "Endpoint.wait_recv": lambda it: lambda ticket=it.receive(): it.pair.b.wait_recv(),  # type: ignore[misc]
    "MessageQueue.recv_now": lambda it: lambda: it.queues[1].recv_now(bytearray(8), LONG),
    "MessageQueue.recv_any_now": lambda it: lambda: doorbell.MessageQueue.recv_any_now([it.queues[1], it.queues[3]], bytearray(8)),
    "MessageQueue.send_now": lambda it: lambda queue=it.full(): queue.send_now(b"no slot", LONG),  # type: ignore[misc]
    "MessageQueue.send_now of a long one": lambda it: lambda: it.queues[0].send_now(bytearray(20000), LONG),
    "MessageQueue.start_send_now": lambda it: lambda queue=it.full(): queue.start_send_now(b"no slot"),  # type: ignore[misc]
    "MessageQueue.wait_send_now": lambda it: lambda posted=it.unread(): it.queues[0].wait_send_now(posted, LONG),  # type: ignore[misc]
    "MessageQueue.finish": lambda it: lambda queue=it.full(): queue.finish(LONG),  # type: ignore[misc]
    "MessageTicket.wait": lambda it: lambda ticket=it.queues[1].recv(it.stream, bytearray(8)): ticket.wait(LONG),  # type: ignore[misc]
    "CollectiveTicket.wait": lambda it: (
        lambda ticket=it.ranks[0].launch(it.stream, it.ranks[0].barrier()): ticket.wait(LONG)  # type: ignore[misc]
    ),
    "Communicator.match_ahead": lambda it: lambda operation=it.ranks[0].barrier(): it.ranks[0].match_ahead(operation),  # type: ignore[misc]
    "Matcher.recv_now": lambda it: lambda: it.matcher.recv_now(bytearray(8)),
    "Matcher.send_now": lambda it: lambda: it.matcher.send_now(bytearray(20000), 0, timeout=LONG),
    "Matcher.finish": lambda it: lambda posted=it.matcher.start_send_now(b"unreceived", 0): it.matcher.finish(LONG),  # type: ignore[misc]
    "MatchTicket.wait": lambda it: lambda ticket=it.matcher.recv(it.stream, bytearray(8)): ticket.wait(LONG),  # type: ignore[misc]
    "Endpoint.post_send without room": lambda it: lambda region=it.narrow.domain.alloc(8): again(lambda: it.narrow.a.post_send(region)),  # type: ignore[misc]
    "Endpoint.post_recv without room": lambda it: lambda region=it.narrow.domain.alloc(8): again(lambda: it.narrow.a.post_recv(region)),  # type: ignore[misc]
    "Stream.queue_send without room": lambda it: (
        lambda held=it.held(), region=it.narrow.domain.alloc(8): again(lambda: it.stream.queue_send(it.narrow.a, region))  # type: ignore[misc]
    ),
    "MessageQueue.start_send without room": lambda it: (
        lambda held=it.held(): again(lambda: it.narrow_queues[0].start_send(it.stream, b"queued"))  # type: ignore[misc]
    ),
    "Matcher.recv without room": lambda it: lambda: again(lambda: it.narrow_matcher.recv(it.stream, bytearray(8))),
    "Matcher.start_send without room": lambda it: (
        lambda held=it.held(): again(lambda: it.narrow_matcher.start_send(it.stream, b"queued", 0))  # type: ignore[misc]
    ),
    "Communicator.launch without room": lambda it: (
        lambda held=it.held(), one=it.narrow_rank.barrier(): again(lambda: it.narrow_rank.launch(it.stream, one))  # type: ignore[misc]
    ),
    "Stream.write_value on a full stream": lambda it: lambda stream=it.full_stream(): again(lambda: stream.write_value(it.region, 4, 1)),  # type: ignore[misc]
    "Stream.record on a full stream": lambda it: lambda stream=it.full_stream(): again(stream.record),  # type: ignore[misc]
    "Stream.launch on a full stream": lambda it: lambda stream=it.full_stream(): again(lambda: stream.launch(int)),  # type: ignore[misc]
    "Stream.queue_recv on a full stream": lambda it: (
        lambda stream=it.full_stream(): again(lambda: stream.queue_recv(it.pair.b, it.region))  # type: ignore[misc]
    ),
    "MessageQueue.recv on a full stream": lambda it: (
        lambda stream=it.full_stream(): again(lambda: it.queues[1].recv(stream, bytearray(8)))  # type: ignore[misc]
    ),
    "BounceBuffer.recv": lambda it: lambda buffer=doorbell.BounceBuffer(it.pair.domain): buffer.recv(it.pair.b, bytearray(8)),  # type: ignore[misc]
    "Communicator.finish": lambda it: (
        lambda ticket=it.ranks[0].launch(it.stream, it.ranks[0].barrier()): it.ranks[0].finish(LONG)  # type: ignore[misc]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wait_lets_others_run_and_an_interrupt_ends_it(name: str) -> None:
    waits = Waits()
    call = CALLS[name](waits)
    steps = 0
    begin = threading.Event()

    def meanwhile() -> None:
        nonlocal steps
        begin.wait()
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            steps += 1
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=meanwhile)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            begin.set()
            call()
    finally:
        begin.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
        waits.stream.abort()
    # A thread that has the lock all the time leaves the other one a step or two.
    assert steps > 100
    # Objects are as they were, except those that the interrupt aborts.
    if name == "Communicator.match_ahead":
        failure = waits.ranks[0].failure
        assert failure is not None and failure[1].cause == "Aborted"
    elif name == "BounceBuffer.recv":
        assert waits.pair.b.failure is not None and waits.pair.b.failure.cause == "Aborted"
    elif name == "Endpoint.wait_recv":
        waits.pair.a.post_send(waits.region)
        assert waits.pair.b.wait_recv(30).nbytes == 16
    elif name in ("MessageQueue.recv_now", "MessageQueue.recv_any_now"):
        waits.queues[0].send_now(b"later", 30)
        assert waits.queues[1].recv_now(bytearray(8), 30) == 5


def test_a_wait_for_room_ends_at_its_timeout() -> None:
    pair = Pair(config=doorbell.EndpointConfig(recv_depth=1, room_timeout=0.12))
    region = pair.domain.alloc(8)
    pair.a.post_recv(region)
    begin = time.monotonic()
    with pytest.raises(doorbell.TimeoutError) as caught:
        pair.a.post_recv(region)
    assert caught.value.timeout == 0.12 and time.monotonic() - begin >= 0.12
    # Without a timeout the queue is full at once.
    pair = Pair(config=doorbell.EndpointConfig(recv_depth=1))
    pair.a.post_recv(pair.domain.alloc(8))
    with pytest.raises(doorbell.QueueFullError):
        pair.a.post_recv(pair.domain.alloc(8))
