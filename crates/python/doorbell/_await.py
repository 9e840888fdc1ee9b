"""What `await` does. It starts no thread, and a task that is cancelled leaves nothing behind.

An event loop has one descriptor while tasks wait in it. Threads of the library write to it what has ended.
"""

import asyncio
import os
import time
import weakref
from typing import Any, Protocol

from ._doorbell import _Notices


class _Awaited(Protocol):
    """A ticket or an event."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...


# For loops without descriptors. A wait shorter than this is not worth a sleep: event loops have a resolution of about a millisecond.
_YIELDS_S = 0.001
_SLEEP_MAX_S = 0.01


class _LoopNotices:
    """The waits of one event loop, whose reader keeps this object."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.notices = _Notices(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.waits: dict[int, asyncio.Future[None]] = {}
        self.next_number = 0
        try:
            loop.add_reader(self.notices.fileno(), self.wake)
        except BaseException:
            self.notices.close()
            raise

    def begin(self, loop: asyncio.AbstractEventLoop) -> tuple[int, asyncio.Future[None]]:
        number, future = self.next_number, loop.create_future()
        self.next_number += 1
        self.waits[number] = future
        return number, future

    def wake(self) -> None:
        for number in self.notices.take():
            future = self.waits.get(number)
            if future is not None and not future.done():
                future.set_result(None)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.remove_reader(self.notices.fileno())
        finally:
            self.notices.close()


# Nothing here keeps a loop, or what waits in it.
_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_LoopNotices]] = weakref.WeakKeyDictionary()


async def result(subject: _Awaited) -> Any:
    """Waits until a ticket or an event is over, and returns or raises what its `wait` does."""
    if not subject.done():
        loop = asyncio.get_running_loop()
        try:
            known = _loops.get(loop)
            of_loop = None if known is None else known()
            if of_loop is None:
                of_loop = _LoopNotices(loop)
                _loops[loop] = weakref.ref(of_loop)
        except NotImplementedError:
            # A loop without descriptors.
            await _look(subject)
        else:
            await _noticed(subject, loop, of_loop)
    return subject.wait()


async def _noticed(subject: _Awaited, loop: asyncio.AbstractEventLoop, of_loop: _LoopNotices) -> None:
    number, future = of_loop.begin(loop)
    try:
        watch = of_loop.notices.watch(subject, number)
        if watch is not None:
            await future
    finally:
        # Ends the wait of a task that is cancelled.
        watch = None
        del of_loop.waits[number]
        if not of_loop.waits:
            # The collector may have forgotten the loop, and then ends the task.
            _loops.pop(loop, None)
            of_loop.close(loop)


async def _look(subject: _Awaited) -> None:
    """Lets other tasks run at first, and then sleeps for a 32nd of the time since the beginning between two looks."""
    begin = time.monotonic()
    while not subject.done():
        try:
            # It raises what `wait` raises for an operation that is never done.
            subject.wait(0)
        except TimeoutError:
            pass
        waited = time.monotonic() - begin
        await asyncio.sleep(0 if waited < _YIELDS_S else min(max(waited / 32, _YIELDS_S), _SLEEP_MAX_S))
