"""What several tests need: connected endpoints, and the results in the form that scripts/test counts."""

import os
from collections.abc import Iterator

import doorbell
import pytest


class Pair:
    """Two endpoints of one domain, connected with each other."""

    def __init__(self, name: str = "softcx", config: doorbell.EndpointConfig | None = None) -> None:
        self.domain: doorbell.Domain = doorbell.Device(name).domain()
        self.a: doorbell.Endpoint = self.domain.endpoint(config)
        self.b: doorbell.Endpoint = self.domain.endpoint(config)
        self.a.connect(self.b.address)
        self.b.connect(self.a.address)


@pytest.fixture(params=["softcx", "softcx,path=proxy", "softcx,path=sync"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.fixture
def stream() -> Iterator[doorbell.HostStream]:
    stream = doorbell.HostStream("test")
    yield stream
    stream.abort()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """For scripts/test, which sets this variable: a line for each test, and the reasons of those that are skipped."""
    log = os.environ.get("DOORBELL_WAIVED_LOG")
    if not log:
        return
    if report.skipped:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
        with open(log, "a") as file:
            file.write(f"python {report.nodeid.split('::')[-1]}: {reason}\n")
        print(f"\nWAIVED: {report.nodeid}: {reason}\ncheck: passed")
    elif report.failed:
        print(f"\ncheck: FAILED: {report.nodeid}")
    elif report.when == "call":
        print(f"\n{report.nodeid}\ncheck: passed")
