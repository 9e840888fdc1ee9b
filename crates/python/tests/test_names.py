"""Every public name of the package is used by a test, documented, and declared with types."""

import ast
import enum
import inspect
from pathlib import Path

import calls
import doorbell
import pytest
from conftest import skipped

# What only these tests call, which need what not every machine or build has.
CALLED_BY = {
    "test_cuda.py": ("CudaStream", "CudaError", "Stream.push_pages", "Stream.wait_count64", "Ticket.launches"),
    "test_cuda.py::test_a_graph_that_others_capture_transfers_with_each_launch": ("Ticket.launches",),
    "test_graphs.py": ("GraphBuilder", "GraphExec", "Stream.push_pages", "Stream.wait_count64"),
    "test_graphs.py::test_a_graph_repeats_messages": (
        "GraphBuilder.start_message", "GraphBuilder.wait_messages", "GraphBuilder.send_message", "GraphBuilder.recv_message",
        "GraphExec.message_tickets",
    ),
    "test_graphs.py::test_a_graph_repeats_a_collective_operation": ("GraphBuilder.collective", "GraphExec.collective_tickets"),
    "test_graphs.py::test_a_kernel_pushes_the_pages_that_a_table_names": ("Stream.push_pages", "Stream.wait_count64"),
    "test_memory_services.py::test_endpoints_are_connected_by_rdma_cm": ("CmListener", "CmRequest", "CmConnection", "RefusedError"),
}  # fmt: skip


def parsed_tests() -> list[ast.AST]:
    """The tests, and the programs for other processes in them."""
    trees: list[ast.AST] = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("test_*.py")]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import doorbell" in node.value:
                trees.append(ast.parse(inspect.cleandoc(node.value)))
    return trees


@pytest.mark.after_all_tests
def test_the_tests_call_each_method_and_read_each_property() -> None:
    called = calls.recorded()
    excused = {name for test, names in CALLED_BY.items() if test in skipped for name in names}
    missing = [
        f"{item.__name__}.{name}"
        for item in calls.classes()
        for name in calls.members(item)
        if (item.__name__, name) not in called and not {item.__name__, f"{item.__name__}.{name}"} & excused
    ]
    assert not missing, ", ".join(missing)


def test_a_call_is_recorded_for_its_own_class(tmp_path: Path) -> None:
    class Two:
        def done(self) -> bool:
            return True

        @staticmethod
        def list() -> int:
            return 7

    class Other(Two):
        def done(self) -> bool:
            return False

    recorder = calls.Recorder(tmp_path / "calls")
    for item in (Two, Other):
        recorder.wrap(item)
    assert not Other().done() and Two.list() == 7
    assert recorder.path.read_text() == "Other done\nTwo list\n"
    assert recorder.known == {("Other", "done"), ("Two", "list")}


def test_a_test_names_each_member_of_an_enumeration() -> None:
    """By its name, or, where a call takes a text instead, by that."""
    named: set[tuple[str, object]] = set()
    for tree in parsed_tests():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                named.add((owner, node.attr))
            elif isinstance(node, ast.Constant):
                named.add(("", node.value))
    enumerations = [item for item in calls.classes() if issubclass(item, enum.Enum)]
    members = [(item.__name__, member) for item in enumerations for member in item.__members__.values()]
    missing = [str(member) for name, member in members if not {(name, member.name), ("", member.value)} & named]
    # Of operations that are dropped before a stream has them: the package gives out no ticket of one that is prepared only.
    missing.remove("Status.CANCELLED")
    assert enumerations and not missing, ", ".join(missing)


def test_all_is_complete() -> None:
    shown = {name for name in vars(doorbell) if not name.startswith("_")}
    assert shown <= set(doorbell.__all__) and sorted(doorbell.__all__) == doorbell.__all__


def test_every_class_and_method_has_a_docstring() -> None:
    without = []
    for name in doorbell.__all__:
        item = getattr(doorbell, name)
        if (inspect.isclass(item) or callable(item)) and not inspect.getdoc(item):
            without.append(name)
    for item in calls.classes():
        # Fields of configurations, attributes of exceptions and members of enumerations are described where they are declared.
        if item.__module__ == "doorbell" and not issubclass(item, enum.Enum | BaseException) and not hasattr(item, "__dataclass_fields__"):
            without += [f"{item.__name__}.{name}" for name in vars(item) if not name.startswith("_") and not inspect.getdoc(vars(item)[name])]
    assert not without, ", ".join(without)
