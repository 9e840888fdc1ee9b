"""Which methods and properties of the package the tests have called, in this process and in the programs that it starts.

`sitecustomize.py` beside this file has these programs record theirs. What is called for the first time is added to a file at once, since some of them are killed.
"""

import enum
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doorbell

# The file. Its name does not begin as the library's variables do, which the tests take out of the environment of the programs.
VARIABLE = "CALLS_OF_TESTS"
# Besides the public names. That `==` and `hash` are used shows nothing: dictionaries do.
SPECIAL = ("__len__", "__getitem__", "__bytes__", "__await__", "__enter__", "__exit__")

Member = tuple[str, str]


def classes() -> Iterator[type]:
    for name in doorbell.__all__:
        item = getattr(doorbell, name)
        if inspect.isclass(item):
            yield item


def members(item: type) -> list[str]:
    """What can be called or read of a class of the extension module, a configuration, or an exception."""
    if issubclass(item, enum.Enum):
        return []
    if issubclass(item, BaseException) or hasattr(item, "__dataclass_fields__"):
        return [name for name in inspect.get_annotations(item) if not name.startswith("_")]
    return [name for name in vars(item) if not name.startswith("_") or name in SPECIAL]


class Recorder:
    """Notes each member once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: set[Member] = set()
        self.lock = threading.Lock()

    def note(self, item: type, name: str) -> None:
        member = (item.__name__, name)
        if member in self.known:
            return
        with self.lock:
            self.known.add(member)
            # A line is one write, so that those of several processes do not mix.
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(file, " ".join(member).encode() + b"\n")
            os.close(file)

    def wrap(self, item: type) -> None:
        if issubclass(item, BaseException):
            self.wrap_reads(item)
        elif hasattr(item, "__dataclass_fields__"):
            self.wrap_fields(item)
        else:
            for name in members(item):
                setattr(item, name, self.wrapped(item, name, vars(item)[name]))

    def wrapped(self, item: type, name: str, member: Any) -> Any:
        if isinstance(member, staticmethod):
            return staticmethod(self.noting(item, name, member.__func__))
        if inspect.isgetsetdescriptor(member):
            return property(self.noting(item, name, member.__get__), doc=member.__doc__)
        return self.noting(item, name, member)

    def noting(self, item: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.note(item, name)
            try:
                return function(*arguments, **named)
            finally:
                # The traceback of an exception keeps this frame, which is to keep no argument.
                del arguments, named

        functools.update_wrapper(call, function, assigned=("__name__", "__doc__"), updated=())
        return call

    def wrap_reads(self, item: Any) -> None:
        names, read = frozenset(members(item)), item.__getattribute__

        def __getattribute__(error: Any, name: str) -> Any:
            if name in names:
                self.note(item, name)
            return read(error, name)

        item.__getattribute__ = __getattribute__

    def wrap_fields(self, item: Any) -> None:
        fill = item.__init__

        @functools.wraps(fill)
        def __init__(config: Any, **fields: Any) -> None:
            for name in fields:
                self.note(item, name)
            fill(config, **fields)

        item.__init__ = __init__


def record() -> None:
    """Records from now on, if a file is named."""
    path = os.environ.get(VARIABLE)
    if path:
        recorder = Recorder(Path(path))
        for item in classes():
            recorder.wrap(item)


def recorded() -> set[Member]:
    path = Path(os.environ[VARIABLE])
    lines = path.read_text().splitlines() if path.exists() else []
    return {(item, name) for item, _, name in (line.partition(" ") for line in lines)}
