"""Has the programs that the tests start record what they call of the package: Python imports this module first."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class RecordedImport(importlib.abc.MetaPathFinder):
    """Begins to record when the program imports the package, and not before: the order of imports is part of what is tested."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "doorbell":
            return None
        sys.meta_path.remove(self)
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_record(module: ModuleType) -> None:
                execute(module)
                import calls

                calls.record()

            found.loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return found


if "CALLS_OF_TESTS" in os.environ:
    sys.meta_path.insert(0, RecordedImport())
