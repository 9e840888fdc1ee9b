"""The exceptions of the package: one class, below `Error`, for each error of the library that a call of the package can have.

Each also derives from the built-in exception that comes nearest, where there is one. The attributes are those of the library's error.
"""

import builtins
from typing import Any


class Error(Exception):
    """The base class of all errors of the library."""


class RangeError(Error, ValueError):
    """A number is outside its limits."""

    argument: str
    value: int
    min: int
    max: int


class ChoiceError(Error, ValueError):
    """A value is not one of the allowed values."""

    argument: str
    value: int
    allowed: str


class AlignmentError(Error, ValueError):
    """An address or an offset has the wrong alignment."""

    argument: str
    value: int
    align: int


class OutOfBoundsError(Error, IndexError):
    """Bytes leave the memory that they are to be in."""

    argument: str
    offset: int
    len_bytes: int
    limit_bytes: int


class ForeignError(Error, ValueError):
    """An object belongs to another device or protection domain."""

    argument: str
    found: str
    expected: str


class QueueFullError(Error):
    """A queue has no room."""

    queue: str
    depth: int


class StateError(Error, RuntimeError):
    """An object no longer exists, or is not in a state that allows the operation. `kind` is the name of the condition, such as "NotConnected"."""

    kind: str
    operation: str
    reason: str


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed. `timeout` is in seconds."""

    operation: str
    timeout: float


class WorkError(Error):
    """An operation failed, and with it its endpoint.

    `cause` is the name of the reason, such as "Completion", "Deadline" or "Aborted". If it is "Completion", `status` is the status of the completion.
    """

    qpn: int
    wr_id: int | None
    cause: str
    status: str | None
    syndrome: int | None


class AsynchronousError(Error):
    """Work that was queued earlier on the stream has failed. `work` is the failure of the endpoint that the stream waited for, if that was the cause."""

    stream: str
    reason: str
    work: WorkError | None


class SystemCallError(Error, OSError):
    """The operating system refused a call."""

    operation: str

    def __reduce__(self) -> tuple[Any, ...]:
        # `errno` of an OSError with one argument is in no dictionary, so pickle would lose it.
        return type(self), self.args, {**self.__dict__, "errno": self.errno}


class CudaError(Error):
    """The CUDA driver refused a call."""

    call: str
    code: int
    name: str


class MalformedError(Error, ValueError):
    """Bytes or a text from a peer, a device or the caller are malformed."""

    what: str
    reason: str


class TruncatedError(Error, ValueError):
    """A message was longer than the memory of its receive. Nothing was stored."""

    len_bytes: int
    limit_bytes: int


class PeerError(Error):
    """The connection of a matcher with a peer has failed. `work` says how."""

    peer: int
    work: WorkError


class RefusedError(Error, ConnectionRefusedError):
    """A peer has refused a connection by rdma_cm, or none listened. `private_data` is what came with the refusal."""

    peer: str
    reason: str
    private_data: bytes


class RankError(Error):
    """A process of the group has ended."""

    rank: int
    reason: str
