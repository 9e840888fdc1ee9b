"""What several tests need: connected endpoints, and the results in the form that scripts/test counts."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import calls
import doorbell
import pytest

TESTS = Path(__file__).parent
# The tests that were skipped, as "file::test" or, of a whole file, "file".
skipped: set[str] = set()


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
    if report.skipped:
        skipped.add(report.nodeid.rpartition("/")[2].partition("[")[0])
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


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported. Has this process and those that it starts record what they call."""
    folder = tempfile.mkdtemp(prefix="doorbell-calls-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ[calls.VARIABLE] = f"{folder}/calls"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    calls.record()
    config.addinivalue_line("markers", "after_all_tests: looks at what all other tests have done")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        skipped.add(report.nodeid.rpartition("/")[2])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What looks at the calls of all tests comes last, and only with all tests."""
    last = [item for item in items if item.get_closest_marker("after_all_tests")]
    items[:] = [item for item in items if item not in last]
    is_whole = not config.option.keyword and all(Path(argument).resolve() == TESTS for argument in config.args)
    if is_whole:
        items += last
    else:
        config.hook.pytest_deselected(items=last)
