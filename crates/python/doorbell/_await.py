"""What `await` does. It starts no thread, and a task that is cancelled leaves nothing behind."""

import asyncio
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._doorbell import Event, Ticket

# A wait shorter than this is not worth a sleep: event loops have a resolution of about a millisecond.
_YIELDS_S = 0.001
_SLEEP_MAX_S = 0.01


async def ticket_done(ticket: "Ticket") -> None:
    """Waits until the operation is over.

    Lets other tasks run at first, and then sleeps for a 32nd of the time since the beginning between two looks.
    """
    begin = time.monotonic()
    while not ticket.done():
        waited = time.monotonic() - begin
        await asyncio.sleep(0 if waited < _YIELDS_S else min(max(waited / 32, _YIELDS_S), _SLEEP_MAX_S))
    ticket.wait()


async def event_done(event: "Event") -> None:
    """Waits until the stream has passed the event, which writes to a descriptor then."""
    loop = asyncio.get_running_loop()
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        passed = loop.create_future()

        def wake() -> None:
            if not passed.done():
                passed.set_result(None)

        loop.add_reader(descriptor, wake)
        try:
            event.notify(descriptor)
            await passed
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)
    event.wait()
