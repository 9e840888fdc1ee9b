"""Values that the calls take and return."""

import dataclasses
import enum


class Access(enum.IntFlag):
    """Access rights of a region, with the values of verbs."""

    LOCAL_READ = 0
    """The device may read on behalf of this process: sends, sources of writes. Every region has this right."""
    LOCAL_WRITE = 1
    """The device may write on behalf of this process: receives, results of reads."""
    REMOTE_WRITE = 2
    """A peer may write."""
    REMOTE_READ = 4
    """A peer may read."""
    REMOTE_ATOMIC = 8
    """A peer may run atomic operations."""
    ALL = 15


class Status(enum.Enum):
    """The status of a queued operation."""

    PREPARED = "prepared"
    """It is not yet given to a stream."""
    QUEUED = "queued"
    """It is in the queue of a stream."""
    RUNG = "rung"
    """The stream has rung the doorbell; of a wait: the stream waits now."""
    COMPLETE = "complete"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """The endpoint failed, and no completion tells whether the operation was carried out."""
    DISCARDED = "discarded"
    """The stream failed or was aborted before it executed the operation."""
    CANCELLED = "cancelled"


class DataType(enum.Enum):
    """The type of an item, as reductions know it."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"


class ReduceOp(enum.Enum):
    """What two items become."""

    SUM = "sum"
    """Integers wrap around."""
    MIN = "min"
    MAX = "max"
    AVERAGE = "avg"
    """The sum of all, divided by the number of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The configuration of an endpoint. `None` stands for the default of the library, which docs/python.md names."""

    send_depth: int | None = None
    """Work requests that the send queue holds."""
    recv_depth: int | None = None
    """Work requests that the receive queue holds."""
    max_segments: int | None = None
    """Slices of a work request."""
    wait_timeout: float | None = None
    """Seconds that a wait on a stream may take before it is released and the endpoint fails; `math.inf`: no limit."""
    room_timeout: float | None = None
    """Seconds that a call waits for room in a full queue; `None`: it does not wait."""
    mtu_bytes: int | None = None
    """Largest payload of a packet."""
    ack_timeout: int | None = None
    """The code of the time without an acknowledgement, 0 to 31: 4.096 us * 2**ack_timeout."""
    retry_count: int | None = None
    """Repetitions without any progress before a work request fails, 0 to 7."""
    rnr_retry: int | None = None
    """Repetitions if the peer has no receive posted, 0 to 6; 7 means no limit."""
    control: str | None = None
    """The component that rings the doorbells: "direct", "proxy" or "sync"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageConfig:
    """The configuration of a message queue. `None` stands for the default of the library, which docs/python.md names. A sender goes by the slots and the eager bytes of its peer."""

    slots: int | None = None
    """Messages of the peer that may be here and not received yet."""
    eager_bytes: int | None = None
    """The longest message that is copied; longer ones are read."""
    ahead: int | None = None
    """Messages in each direction that are queued and not done."""
    max_slices: int | None = None
    """Slices of a message."""
    endpoint: EndpointConfig | None = None
    """Of its two endpoints. The queue sets the depths and the segments itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """The configuration of a matcher. `None` stands for the default of the library, which docs/python.md names."""

    unexpected: int | None = None
    """Messages of each peer that may be here without a receive, besides those in slots."""
    receives: int | None = None
    """Receives on streams that are not over."""
    messages: MessageConfig | None = None
    """Of the queues that the matcher opens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BounceConfig:
    """The configuration of a bounce buffer. `None` stands for the default of the library, which docs/python.md names. Both ends of a `send` have the same `chunk_bytes`."""

    chunk_bytes: int | None = None
    """Bytes of a chunk."""
    slots: int | None = None
    """Chunks under way at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The configuration of a registration cache. `None` stands for the default of the library, which docs/python.md names."""

    max_entries: int | None = None
    max_bytes: int | None = None
    """Registered bytes of all entries together."""
