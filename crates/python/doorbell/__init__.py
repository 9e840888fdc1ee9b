"""GPU-triggered RDMA: transfers of tensors, queued on streams.

    group = doorbell.Group.from_environment("softcx")
    region = group.domain.register(tensor)
    ticket = stream.queue_send(group.endpoint(1), region[0:n])
    await ticket

docs/python.md in the repository is the guide.
"""

from ._doorbell import (
    Completion,
    CudaStream,
    Device,
    Domain,
    Endpoint,
    Event,
    Group,
    HostStream,
    Region,
    RemoteRegion,
    RemoteSlice,
    Slice,
    Stream,
    Ticket,
    __version__,
    features,
)
from ._errors import (
    AlignmentError,
    AsynchronousError,
    ChoiceError,
    CudaError,
    Error,
    ForeignError,
    MalformedError,
    OutOfBoundsError,
    QueueFullError,
    RangeError,
    RankError,
    StateError,
    SystemCallError,
    TimeoutError,
    WorkError,
)
from ._types import Access, EndpointConfig, Status

__all__ = [
    "Access",
    "AlignmentError",
    "AsynchronousError",
    "ChoiceError",
    "Completion",
    "CudaError",
    "CudaStream",
    "Device",
    "Domain",
    "Endpoint",
    "EndpointConfig",
    "Error",
    "Event",
    "ForeignError",
    "Group",
    "HostStream",
    "MalformedError",
    "OutOfBoundsError",
    "QueueFullError",
    "RangeError",
    "RankError",
    "Region",
    "RemoteRegion",
    "RemoteSlice",
    "Slice",
    "StateError",
    "Status",
    "Stream",
    "SystemCallError",
    "Ticket",
    "TimeoutError",
    "WorkError",
    "__version__",
    "features",
]
