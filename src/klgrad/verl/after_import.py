"""A function that is called once another module is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module is imported.

    Args:
        module: the name of the module.
        then: the function.
    """

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self.then = module, then
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as the other finders find it, with a loader that calls the function after it."""
        if fullname != self.module or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = LoaderWithSequel(spec.loader, self._is_imported)
        return spec

    def _is_imported(self) -> None:
        """Only now is it done: a module may be looked for without being imported, or its import may fail."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.then()


class LoaderWithSequel(importlib.abc.Loader):
    """A loader that calls a function after it has run a module; everything else is the other loader's."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the other loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the function."""
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
