"""Objects are dropped in any order, with work queued, under way and done: nothing crashes, and nothing stays."""

import asyncio
import functools
import gc
import os
import random
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any

import doorbell
import pytest

ROUNDS = int(os.environ.get("DOORBELL_TEST_LIFETIMES", "40"))
ACCESS = doorbell.Access.ALL


class Watched(bytearray):
    """Memory of which a test knows whether something keeps it."""


class Round:
    """Objects that use each other, in a random state."""

    def __init__(self, device: str, chance: random.Random) -> None:
        self.gone: list[weakref.ref[Watched]] = []
        domain = doorbell.Device(device).domain()
        # A wait that nothing comes for ends soon, and keeps its memory until then.
        config = doorbell.EndpointConfig(wait_timeout=0.05)
        a, b = domain.endpoint(config), domain.endpoint(config)
        a.connect(b.address)
        b.connect(a.address)
        queues = [domain.message_queue(doorbell.MessageConfig(slots=2, eager_bytes=64, endpoint=config)) for _ in range(4)]
        for one, other in (queues[:2], queues[2:]):
            one.connect(other.address)
            other.connect(one.address)
        ranks = [doorbell.Communicator(0, [None, queues[2]]), doorbell.Communicator(1, [queues[3], None])]
        streams = [doorbell.HostStream("a"), doorbell.HostStream("b")]
        source, target = domain.register(self.array(200), ACCESS), domain.register(self.array(200), ACCESS)
        gate = domain.register(self.array(4))
        self.kept: list[Any] = [domain, a, b, *queues, *ranks, *streams, source, target, gate, source[0:50], target.span(0, 50)]
        is_sync = a.control == "sync"
        # Not opened, it ends by its deadline, and the stream has a fault.
        if not is_sync and chance.random() < 0.6:
            self.kept.append(streams[0].wait_value(gate, 0, 1, timeout=0.05))
        steps: list[Callable[[], object]] = [
            lambda: b.post_recv(target),
            lambda: streams[0].queue_send(a, source[0:50]),
            lambda: streams[0].queue_write(a, source, target.remote),
            lambda: streams[0].wait_send(a, 0.2),
            lambda: streams[1].record(),
            lambda: streams[0].launch(functools.partial(self.array(10).append, 1)),
            lambda: queues[0].start_send(streams[0], self.array(chance.choice((10, 5000)))),
            lambda: queues[0].start_send_now(self.array(10), 0),
            lambda: queues[1].recv(streams[1], self.array(5000)),
            lambda: ranks[0].launch(streams[0], ranks[0].all_reduce(self.array(100), dtype="u8")),
            lambda: ranks[1].launch(streams[1], ranks[1].all_reduce(self.array(100), dtype="u8")),
            lambda: ranks[0].broadcast(self.array(10)),
            lambda: memoryview(source),
            lambda: struct.pack_into("I", memoryview(gate), 0, 1),
            lambda: chance.choice(streams).abort(),
            lambda: chance.choice((a, b)).abort(),
            lambda: chance.choice(queues[:2]).abort(),
            lambda: ranks[0].abort(),
        ]
        chance.shuffle(steps)
        for step in steps[: chance.randrange(len(steps))]:
            try:
                self.kept.append(step())
            except doorbell.Error:
                # What others have aborted or filled.
                pass

    def array(self, nbytes: int) -> Watched:
        array = Watched(nbytes)
        self.gone.append(weakref.ref(array))
        return array

    async def await_some(self, chance: random.Random) -> None:
        """Awaits some of the tickets for a moment."""

        async def wait(subject: Any) -> None:
            await subject

        subjects = [it for it in self.kept if hasattr(it, "__await__") and chance.random() < 0.5]
        tasks = [asyncio.ensure_future(wait(subject)) for subject in subjects]
        await asyncio.sleep(chance.choice((0, 0.001, 0.01)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def drop_all(self, chance: random.Random) -> None:
        chance.shuffle(self.kept)
        while self.kept:
            self.kept.pop()
            if chance.random() < 0.1:
                time.sleep(0.001)


def settle(is_settled: Any) -> bool:
    """Waits until threads of the library have dropped what they had; a call of the package releases the arrays."""
    end = time.monotonic() + 30
    while not is_settled():
        if time.monotonic() > end:
            return False
        gc.collect()
        doorbell.Device.list()
        time.sleep(0.005)
    return True


def resources() -> tuple[int, int]:
    """Descriptors, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("device", ["softcx", "softcx,path=proxy", "softcx,path=sync"])
def test_any_order_of_drops_releases_everything(device: str) -> None:
    seed = int(os.environ.get("DOORBELL_SEED", random.randrange(1 << 32)))
    print(f"DOORBELL_SEED={seed}")
    chance = random.Random(seed)
    least: tuple[int, int] | None = None
    for number in range(ROUNDS):
        round_ = Round(device, chance)
        if chance.random() < 0.3:
            asyncio.run(round_.await_some(chance))
        round_.drop_all(chance)
        assert settle(lambda round_=round_: all(gone() is None for gone in round_.gone)), f"an array is kept: seed {seed}, round {number}"
        if number == 4:
            # The threads that stay have begun.
            time.sleep(0.2)
            least = resources()
    assert least is not None
    bound = least
    assert settle(lambda: all(now <= before for now, before in zip(resources(), bound, strict=True))), f"{resources()} after {bound}: seed {seed}"
