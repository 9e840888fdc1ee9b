"""Every public name of the package is used by a test, documented, and declared with types."""

import ast
import enum
import inspect
from pathlib import Path
from types import ModuleType

import doorbell


def public_names(module: ModuleType) -> set[str]:
    """`Class.attribute` for each class of `__all__`, and the names themselves."""
    names = set(module.__all__)
    for name in module.__all__:
        item = getattr(module, name)
        if not inspect.isclass(item):
            continue
        members = set(vars(item)) | set(inspect.get_annotations(item))
        if issubclass(item, enum.Enum):
            members = set(item.__members__)
        names |= {f"{name}.{member}" for member in members if not member.startswith("_")}
    return names


def used_names() -> set[str]:
    """All names, attributes and keywords of the tests, those in programs for other processes included."""
    used: set[str] = set()
    trees = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("*.py")]
    while trees:
        for node in ast.walk(trees.pop()):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                used.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import doorbell" in node.value:
                trees.append(ast.parse(inspect.cleandoc(node.value)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Members of enumerations that are compared by name.
                used.add(node.value)
    return used


def test_a_test_uses_each_public_name() -> None:
    used = used_names()
    unused = sorted(name for name in public_names(doorbell) if name.rpartition(".")[2] not in used)
    assert not unused, unused
    # The check itself notices a name that no test has.
    assert "never_to_be_used_" + "by_a_test" not in used


def test_all_is_complete() -> None:
    shown = {name for name in vars(doorbell) if not name.startswith("_")}
    assert shown <= set(doorbell.__all__) and sorted(doorbell.__all__) == doorbell.__all__


def test_every_class_and_method_has_a_docstring() -> None:
    without = []
    for name in doorbell.__all__:
        item = getattr(doorbell, name)
        if inspect.isclass(item) and not inspect.getdoc(item):
            without.append(name)
    assert without == []
